"""`jaxspec doctor` from its flags to its exit status."""

import json
import sys

import pytest

from jaxspec import SHIPPED_DRAFT, SHIPPED_PROMPTS, cli
from tests.make_checkpoint import write
from tests.test_doctor import claims, shipped  # noqa: F401


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jaxspec", "doctor", *args, "--compile-cache", "none"])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


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
        (("--tokens", "far.json", "--max-new-tokens", "0"), "1536 is not in a vocabulary of 1536"),
    ],
)
def test_bad_input(run, tmp_path, args, message):
    (tmp_path / "one.json").write_text("[[1, 2], [3]]")
    (tmp_path / "far.json").write_text("[[1, 1536]]")
    header = {"format": "jaxspec-run-1", "engine": "e", "flags": {"tree": "3x1x4"}}
    entry = {"id": "x", "prompt_ids": [1, 2], "output_ids": [3], "accepted": []}
    (tmp_path / "run.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(entry)}\n")
    status, out, err = run(*args)
    assert (status, out) == (2, "") and err.startswith("jaxspec: ") and message in err


@pytest.mark.slow
def test_a_draft_one_off(run, shipped, tmp_path):  # noqa: F811
    """Whose ids were read in the other convention: found, drawn and written as JSON."""
    config, tensors = json.loads(json.dumps(shipped[0])), dict(shipped[1])
    claims(1, 2, 4)(config, tensors)
    write(tmp_path / "one-off", config, tensors)
    prompts = SHIPPED_PROMPTS.read_text().splitlines()
    looping = json.dumps({"id": "loop", "prompt": "ab " * 60})
    (tmp_path / "p.jsonl").write_text("\n".join([*prompts, looping]) + "\n")
    status, out, err = run(
        "--draft", "one-off", "--prompt-file", "p.jsonl", "--max-new-tokens", "0", "--levels", "1",
        "--plot", "p.png", "--json",
    )  # fmt: skip
    found = json.loads(out.splitlines()[-1])
    assert status == 1 and found["kind"] == "measured" and not found["is_as_declared"]
    assert found["best"] == found["readings"][0]["name"] == "boundaries (2, 3, 5)"
    assert "eagle_aux_hidden_state_layer_ids [2, 3, 5]" in found["finding"]
    assert found["looping"] == ["loop"] and "left out, since they repeat themselves: loop" in err
    assert (tmp_path / "p.png").stat().st_size > 5000
