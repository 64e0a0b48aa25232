"""Comparing run files."""

import json

import numpy as np
import pytest

from jaxspec.comparison_view import plot_runs, tables_of_runs
from jaxspec.errors import InputError
from jaxspec.run_comparison import compare_runs, read_run

HEADER = {"format": "jaxspec-run-1", "engine": "other", "version": "1", "flags": {}}
HEADER |= {"target_hash": "t@1", "draft_hash": "d@1", "machine": "a machine"}


def entry(id, output, accepted=(), category=None, prompt=(1, 2), decode_ms=10.0):
    return {
        "id": id,
        "category": category,
        "prompt_ids": list(prompt),
        "output_ids": list(output),
        "finish": "length",
        "verify_steps": len(accepted),
        "accepted": list(accepted),
        "ttft_ms": 1.0,
        "decode_ms": decode_ms,
    }


@pytest.fixture
def write(tmp_path):
    def write(name, entries, header=HEADER):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in [header, *entries]))
        return path

    return write


def test_the_first_token_that_differs_and_its_margin(write):
    a = write("a", [entry("x", [5, 6, 7]), entry("y", [5, 6, 7]), entry("z", [5, 6])])
    b = write("b", [entry("z", [5, 6, 9]), entry("y", [5, 8, 7]), entry("x", [5, 6, 7])])
    asked = []

    def margins(questions):
        asked.extend(questions)
        return [3e-5 for _ in questions]

    found = compare_runs(a, b)
    assert (found.num_requests, found.num_equal, found.holds) == (3, 1, False)
    assert [(d.id, d.index, d.a, d.b, d.margin) for d in found.differences] == [
        ("y", 1, 6, 8, None),
        ("z", 2, None, 9, None),
    ]
    assert "--target DIR tells" in found.finding()
    found = compare_runs(a, b, margins, tie=1e-4)
    assert asked == [([1, 2, 5], (6, 8))], "of a text that ended there is no margin to ask for"
    assert found.num_ties == 1 and not found.holds, "z ended, which is no tie"
    whole_z = [entry("x", [5, 6, 7]), entry("y", [5, 8, 7]), entry("z", [5, 6])]
    assert compare_runs(a, write("c", whole_z), margins, tie=1e-4).holds
    assert not compare_runs(a, write("c", whole_z), margins, tie=1e-6).holds
    found = compare_runs(a, write("c", whole_z[:2]), margins, tie=1e-4)
    assert found.only_in[str(a)] == ("z",) and not found.holds
    assert f"requests only in {a}: 1" in found.finding()


def test_sampled_runs_have_no_margins(write):
    header = HEADER | {"flags": {"temperature": 0.8, "seed": 5}}
    a, b = write("a", [entry("x", [5, 6])]), write("b", [entry("x", [5, 7])], header)
    with pytest.raises(InputError, match=r"b.jsonl was sampled: logits alone do not tell"):
        compare_runs(a, b, lambda questions: [0.0], tie=1e-4)
    found = compare_runs(a, b)
    assert found.flags_that_differ == {"seed": (None, 5), "temperature": (None, 0.8)}
    assert "the runs were asked for other things: seed None and 5" in found.finding()


def test_lines_end_with_a_newline_only(write, tmp_path):
    entries = [entry("a\u2028b", [5, 6])]
    path = tmp_path / "u.jsonl"
    lines = [json.dumps(line, ensure_ascii=False) for line in (HEADER, *entries)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    assert compare_runs(path, path).holds
    path.write_text("\n".join(lines)[:-9], "utf-8")
    with pytest.raises(InputError, match="the run was interrupted; run it again"):
        compare_runs(path, path)


def test_few_requests_have_no_interval(write):
    a, b = [[entry(str(i), range(9), [n, n]) for i in range(7)] for n in (1, 3)]
    whole = compare_runs(write("a", a), write("b", b)).groups[0]
    assert whole.accept_length.interval is None and whole.accept_length.differs is None


def test_requests_that_were_timed_twice(write):
    a = [entry("x", range(9), (3, 3), decode_ms=10.0), entry("y", [1], (), decode_ms=0.0)]
    whole = compare_runs(write("a", a), write("b", a)).groups[0]
    assert whole.ms_per_step.a == 5.0 and whole.tokens_per_s.a == 8 / 0.01


def test_acceptance_by_its_definitions(write):
    a = [entry("x", range(8), (3, 1, 0), "code"), entry("y", range(5), (0, 2), "prose")]
    b = [entry("x", range(8), (1, 1, 1, 0), "code"), entry("y", range(5), (0, 2), "prose")]
    found = compare_runs(write("a", a), write("b", b))
    whole, code, prose = found.groups
    assert (whole.name, code.name, prose.name) == ("all", "code", "prose")
    assert whole.accept_length.a == (7 + 4) / 5 and whole.accept_length.b == (7 + 4) / 6
    assert code.accept_length.a == 7 / 3 and prose.accept_length.difference == 0
    assert [one.a for one in whole.accept_per_depth] == [3 / 5, 2 / 5, 1 / 5]
    assert [one.b for one in whole.accept_per_depth] == [4 / 6, 1 / 6, 0]
    assert whole.ms_per_step.a == 20 / 5 and whole.tokens_per_s.b == 11 / 0.02


def test_an_interval_holds_the_truth_as_often_as_it_says(write):
    """95 % of intervals over requests hold the difference that the requests were drawn with."""
    rng = np.random.default_rng(1)
    held = 0
    trials = 40
    for _ in range(trials):
        runs = []
        for mean in (1.0, 1.5):
            accepted = [rng.poisson(mean, size=20).clip(0, 7).tolist() for _ in range(40)]
            runs.append([entry(str(i), range(sum(n) + 21), n) for i, n in enumerate(accepted)])
        estimate = compare_runs(write("a", runs[0]), write("b", runs[1])).groups[0].accept_length
        low, high = estimate.interval
        held += low <= -0.5 <= high
        assert estimate.differs
    assert held >= trials - 6, "binomial(40, 0.95): 34 or more with probability 0.99"


def test_one_that_does_not_differ(write):
    rng = np.random.default_rng(2)
    runs = [
        [
            entry(str(i), range(sum(n) + 21), n)
            for i, n in enumerate(rng.poisson(1.0, size=(30, 20)).tolist())
        ]
        for _ in range(2)
    ]
    found = compare_runs(write("a", runs[0]), write("b", runs[1]))
    assert not found.groups[0].accept_length.differs
    assert "accept_length does not differ" in found.finding()


def test_view(write, tmp_path):
    a = write("a", [entry("x", range(8), (3, 1, 0), "code"), entry("y", [1, 2], (0,), "prose")])
    b = write("b", [entry("x", range(8), (1, 1, 2), "code"), entry("y", [1, 3], (0,), "prose")])
    found = compare_runs(a, b)
    plot_runs(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000
    figures, parting = tables_of_runs(found)
    assert parting.row_count == 1 and figures.row_count > 10
    json.loads(json.dumps(found.to_dict(), allow_nan=False))
    with pytest.raises(InputError, match="cannot be written"):
        plot_runs(found, tmp_path / "missing" / "p.png")


def test_without_steps_or_times(write, tmp_path):
    runs = [entry("x", [1, 2], (), decode_ms=None)]
    found = compare_runs(write("a", runs), write("b", runs))
    assert found.holds and found.groups[0].accept_length is None
    assert found.groups[0].ms_per_step is None
    with pytest.raises(InputError, match="no verify steps"):
        plot_runs(found, tmp_path / "p.png")


def test_nothing_in_common(write):
    found = compare_runs(write("a", [entry("x", [1])]), write("b", [entry("y", [1])]))
    assert not found.holds and found.num_requests == 0


def test_bad_files(write, tmp_path):
    good = write("good", [entry("x", [1])])
    bad = {
        "another prompt in each": write("a", [entry("x", [1], prompt=(1, 3))]),
        "line 2: damaged": write("b", [{"id": "x"}]),
        r"accepted is \[-1\]": write("e", [entry("x", [1], (-1,))]),
        "a second request 'x'": write("c", [entry("x", [1]), entry("x", [1])]),
        "does not say format": write("d", [], {"format": "else"}),
        "cannot be read as JSON lines": tmp_path / "missing.jsonl",
    }
    for message, path in bad.items():
        with pytest.raises(InputError, match=message):
            compare_runs(path, good)
    header, entries = read_run(good)
    assert header == HEADER and entries["x"].output_ids == (1,)
