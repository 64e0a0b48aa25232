import json
import re

import pytest

from jaxspec.errors import InputError
from jaxspec.report import PromptReport
from jaxspec.requests import Completion
from jaxspec.runfile import RunFile, entry_of

HEADER = {
    "engine": "jaxspec", "version": "0", "flags": {"tree": "3x1x4"}, "target_hash": "1",
    "draft_hash": None, "machine": "m",
}  # fmt: skip


def report(id: str, **settings) -> PromptReport:
    done = Completion((4, 5, 6), "eos", (1,), 10.0, 20.0)
    return PromptReport(id, "语", (1, 2), done, "text", 3, settings)


def test_lines_are_the_contract(tmp_path):
    path = tmp_path / "run.jsonl"
    RunFile(path, HEADER).append(entry_of(report("a")))
    first, second = map(json.loads, path.read_text("utf-8").splitlines())
    assert first == {"format": "jaxspec-run-1", **HEADER}
    assert second == {
        "id": "a", "category": "语", "prompt_ids": [1, 2], "output_ids": [4, 5, 6],
        "finish": "eos", "verify_steps": 1, "accepted": [1], "ttft_ms": 10.0, "decode_ms": 20.0,
        "text": "text",
    }  # fmt: skip


@pytest.mark.parametrize("cut_off", ["", '{"id": "b", "categ', "语".encode()[:2]])
def test_an_interrupted_run_goes_on(tmp_path, cut_off):
    path = tmp_path / "run.jsonl"
    RunFile(path, HEADER).append(entry_of(report("a")))
    with path.open("ab") as file:
        file.write(cut_off.encode() if isinstance(cut_off, str) else cut_off)
    again = RunFile(path, HEADER)
    assert again.completion("a", (1, 2)) == report("a").completion
    assert again.completion("b", (1, 2)) is None
    again.append(entry_of(report("b")))
    assert [json.loads(line).get("id") for line in path.read_text().splitlines()] == [
        None,
        "a",
        "b",
    ]


def test_another_prompt_under_the_same_id(tmp_path):
    RunFile(tmp_path / "r", HEADER).append(entry_of(report("a")))
    with pytest.raises(InputError, match="request 'a' in it has another prompt"):
        RunFile(tmp_path / "r", HEADER).completion("a", (9,))


def test_other_settings_under_the_same_id(tmp_path):
    own = {"temperature": 0.5, "stop": ("a", "b")}
    RunFile(tmp_path / "r", HEADER).append(entry_of(report("a", **own)))
    again = RunFile(tmp_path / "r", HEADER)
    assert again.completion("a", (1, 2), own) == report("a").completion
    for other in ({}, {**own, "temperature": 0.7}):
        with pytest.raises(InputError, match="request 'a' in it has another sampling"):
            again.completion("a", (1, 2), other)


def test_a_request_that_failed_is_in_it(tmp_path):
    failed = Completion((), "capacity", (), 0.0, 0.0, "no room")
    RunFile(tmp_path / "r", HEADER).append(entry_of(PromptReport("a", None, (1,), failed, "", 3)))
    assert RunFile(tmp_path / "r", HEADER).completion("a", (1,)) == failed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"flags": {"tree": "1x1x2"}},
            "flags.tree is '3x1x4' there and '1x1x2' here",
        ),
        ({"target_hash": "2"}, "target_hash is '1' there and '2' here"),
        ({"extra": 1}, "extra is None there and 1 here"),
    ],
)
def test_another_run(tmp_path, change, message):
    path = tmp_path / "run.jsonl"
    RunFile(path, HEADER).append(entry_of(report("a")))
    before = path.read_bytes()
    with pytest.raises(InputError, match=re.escape(message)):
        RunFile(path, {**HEADER, **change})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["my notes", "my\nnotes\n", '{"format": "other"}\n', "[1]\n"])
def test_a_file_that_is_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(InputError, match="is no jaxspec-run-1 file"):
        RunFile(path, HEADER)
    assert path.read_text() == content


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="there is no directory"):
        RunFile(tmp_path / "absent" / "run.jsonl", HEADER)
    (tmp_path / "directory").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        RunFile(tmp_path / "directory", HEADER)


def test_a_damaged_line(tmp_path):
    path = tmp_path / "run.jsonl"
    RunFile(path, HEADER).append(entry_of(report("a")))
    for line in ("{", "[]", "{}", '{"id": "a"}'):
        path.write_text(path.read_text().splitlines()[0] + f"\n{line}\n")
        with pytest.raises(InputError, match=r"run\.jsonl, line 2: damaged"):
            RunFile(path, HEADER)


def test_nothing_is_written_before_there_is_something(tmp_path):
    run_file = RunFile(tmp_path / "run.jsonl", HEADER)
    assert not list(tmp_path.iterdir())
    (tmp_path / "run.jsonl").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        run_file.append(entry_of(report("a")))
