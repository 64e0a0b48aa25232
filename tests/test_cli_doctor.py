"""`jaxspec doctor` from its flags to its exit status."""

import json
from pathlib import Path

import pytest

from jaxspec import SHIPPED_DRAFT, SHIPPED_PROMPTS

OTHER = "kimi_k25@0123456789ab"


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    return lambda *args: command("doctor", *args, "--compile-cache", "none")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--tokens", "one.json"), "one.json, entry 1: a single token"),
        (("x", "--draft", "none"), "nothing to find out about"),
        (("x", "--plot", "a.txt"), "--plot a.txt"),
        (("x", "--levels", "0"), "start at 1"),
        (("x", "--context-length", "20"), "--context-length 20 has no room"),
        (("x", "--target", str(SHIPPED_DRAFT), "--draft", "d"), "no tiktoken.model"),
        (("--target", "t", "--draft", "d"), "no prompt"),
        (("x", "--observed", "run.jsonl"), "brings its own prompts"),
        (("--observed", "run.jsonl"), "no request has verify steps"),
        (("--observed", "run.jsonl", "--levels", "2"), "--levels: --observed brings its own texts"),
        (("--observed", "other.jsonl"), "its target_hash is kimi_k25@0123456789ab, and"),
        (("--prompt-file", "own.jsonl"), "own.jsonl, line 1: temperature is -1"),
        (("--tokens", "far.json", "--max-new-tokens", "0"), "320 is not in a vocabulary of 320"),
    ],
)
def test_bad_input(run, tmp_path, args, message):
    (tmp_path / "one.json").write_text("[[1, 2], [3]]")
    (tmp_path / "far.json").write_text("[[1, 320]]")
    (tmp_path / "own.jsonl").write_text('{"prompt": "a b c", "sampling": {"temperature": -1}}')
    header = {"format": "jaxspec-run-1", "engine": "e", "flags": {"tree": "3x1x4"}}
    entry = {"id": "x", "prompt_ids": [1, 2], "output_ids": [3], "accepted": []}
    (tmp_path / "run.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(entry)}\n")
    header["target_hash"], entry["output_ids"], entry["accepted"] = OTHER, [3, 4, 5], [1]
    (tmp_path / "other.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(entry)}\n")
    status, out, err = run(*args)
    assert (status, out) == (2, "") and err.startswith("jaxspec: ") and message in err


def test_the_prompts_that_ship_are_held_out():
    prompts = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())
    shipped = [json.loads(line)["prompt"] for line in SHIPPED_PROMPTS.read_text().splitlines()]
    assert shipped == [prompt["text"] for prompt in prompts["evaluation"]]
