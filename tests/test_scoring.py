"""Scoring run files: numbers read from texts, intervals, and what is refused."""

import json
import sys

import pytest

from jaxspec import cli
from jaxspec.errors import InputError
from jaxspec.scoring import ScoreGroup, last_number, score_gsm8k
from tests.test_run_comparison import HEADER, entry


@pytest.fixture
def write(tmp_path):
    def write(name, lines):
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


ANSWERS = [
    {"question": "?", "answer": "3*6=<<3*6=18>>18\n#### 18", "id": "x"},
    {"question": "?", "answer": "so\n#### 1,234", "id": "y"},
    {"question": "?", "answer": "so\n#### -5", "id": "z"},
    {"question": "?", "answer": "so\n#### 7", "id": "w"},
]


def request(id, text, category=None, finish="eos"):
    return entry(id, [5, 6], category=category) | {"text": text, "finish": finish}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("she makes 9 * 2 = $18.", "18"),
        ("#### 18\n\nThat is all.", "18"),
        ("it costs $1,234.50, in all", "1234.50"),
        ("x = -5", "-5"),
        ("-$5", "-5"),
        ("of 3-5", "5"),
        (r"\boxed{42}", "42"),
        ("about .5", ".5"),
        ("no number.", None),
        ("", None),
    ],
)
def test_the_last_number(text, number):
    assert last_number(text) == number


def test_right_and_wrong(write):
    lines = [
        request("x", "It is 18.00.", "easy"),
        request("y", "1234 and then 12", "hard", "length"),
        request("z", "so -5", "easy"),
        request("w", "I do not know", "hard"),
    ]
    found = score_gsm8k(write("run.jsonl", [HEADER, *lines]), write("a.jsonl", ANSWERS))
    whole, easy, hard = found.groups
    assert whole == ScoreGroup("all", 4, 2, 1, 1)
    assert easy == ScoreGroup("easy", 2, 2, 0, 0) and hard == ScoreGroup("hard", 2, 0, 1, 1)
    assert found.wrong == {"y": "12", "w": None} and found.num_not_run == 0
    assert found.to_dict()["accuracy"] == 0.5
    found = score_gsm8k(write("run.jsonl", [HEADER, *lines[:1]]), write("a.jsonl", ANSWERS))
    assert found.num_not_run == 3 and "3 questions are not in the run" in found.finding()


def test_wilsons_interval():
    """Against published values (Newcombe 1998, Statistics in Medicine 17, table I, method 3)."""
    published = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605)}
    published |= {(0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (right, of), expected in published.items():
        assert ScoreGroup("all", of, right, 0, 0).interval == pytest.approx(expected, abs=6e-5)


def test_ids_are_decoded_where_there_is_no_text(write):
    run, answers = write("run.jsonl", [HEADER, entry("x", [5, 6])]), write("a.jsonl", ANSWERS)
    with pytest.raises(InputError, match=r"request 'x' holds no text, only ids; .*--target DIR"):
        score_gsm8k(run, answers)
    assert score_gsm8k(run, answers, lambda ids: f"{ids[0] + 13}").groups[0].num_correct == 1


def test_lines_without_ids_are_numbered_as_prompts_are(write):
    answers = [{"question": "?", "answer": f"#### {n}"} for n in (4, 5)]
    run = write("run.jsonl", [HEADER, request("0", "4"), request("1", "5")])
    assert score_gsm8k(run, write("a.jsonl", answers)).groups[0].num_correct == 2


@pytest.mark.parametrize(
    ("lines", "answers", "message"),
    [
        ([], ANSWERS, "holds no request"),
        ([request("q", "1"), request("x", "1")], ANSWERS, r"1 of 2 requests, as 'q', have no ans"),
        ([request("x", "1")], [{"question": "?", "id": "x"}], r"line 1: expected GSM8K's"),
        ([request("x", "1")], [{"answer": "18"}], "line 1: its answer states no number after ####"),
        ([request("x", "1")], [*ANSWERS, ANSWERS[0]], "line 5: a second answer of id 'x'"),
        ([request("x", "1")], [7], "line 1: expected GSM8K's"),
    ],
    ids=["empty", "stranger", "no answer", "no number", "twice", "no object"],
)
def test_bad_files(write, lines, answers, message):
    with pytest.raises(InputError, match=message):
        score_gsm8k(write("run.jsonl", [HEADER, *lines]), write("a.jsonl", answers))


def test_a_byte_order_mark_is_no_answer(write):
    """`generate --prompt-file` takes such a file, too."""
    run, answers = write("run.jsonl", [HEADER, request("x", "18")]), write("a.jsonl", ANSWERS)
    answers.write_bytes(b"\xef\xbb\xbf" + answers.read_bytes())
    assert score_gsm8k(run, answers).groups[0].num_correct == 1


def test_the_command(write, monkeypatch, capsys):
    run = write("run.jsonl", [HEADER, request("x", "18")])
    answers = write("a.jsonl", ANSWERS)

    def command(*flags: str) -> tuple[int, str, str]:
        argv = ["jaxspec", "score", "gsm8k", str(run), "--answers", *map(str, flags)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    status, out, err = command(answers)
    assert (status, err) == (0, "") and "1 of 1 right: 100.0%, 95 % between 20.7%" in out
    status, out, _ = command(answers, "--json")
    assert json.loads(out.splitlines()[-1])["groups"][0]["num_correct"] == 1
    status, out, err = command("none.jsonl")
    assert (status, out) == (2, "") and "none.jsonl: cannot be read" in err
    status, out, err = command(answers, "--target", run.parent)
    assert status == 2 and "no tiktoken.model in it" in err
