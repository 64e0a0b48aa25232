"""`jaxspec compare` from its flags to its exit status."""

import functools
import json

import numpy as np
import pytest

from jaxspec import SHIPPED_TARGET, cli_compare, load_target
from jaxspec.config import Numerics
from jaxspec.recording import Record, RecordConfig, record
from tests.test_run_comparison import HEADER, entry

METADATA = {"format": "jaxspec-record-1", "dtype": "float32"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Records a, b (which differs in boundary 1) and a run file."""
    rng = np.random.default_rng(0)
    arrays = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3)}
    arrays |= {f"boundary.{b:03d}": rng.normal(size=(2, 3, 8)).astype("float32") for b in range(3)}
    Record(arrays, METADATA).save(tmp_path / "a.safetensors")
    arrays["boundary.001"] = 1.01 * arrays["boundary.001"]
    Record(arrays, METADATA).save(tmp_path / "b.safetensors")
    lines = [HEADER, entry("x", range(8), (3, 1, 0)), entry("y", range(5), (0, 2))]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(place, command):
    return functools.partial(command, "compare")


def test_records(run, place):
    status, out, err = run("a.safetensors", "a.safetensors", "--plot", "p.png")
    assert (status, err) == (0, "") and out.endswith("they agree\n")
    assert (place / "p.png").stat().st_size > 5000
    status, out, _ = run("a.safetensors", "b.safetensors", "--json")
    found = json.loads(out.splitlines()[-1])
    assert status == 1 and found["kind"] == "records" and not found["holds"]
    assert found["finding"].startswith("boundary.001 is the first to differ")
    status, out, _ = run("a.safetensors", "a.safetensors", "--require", "boundary,logits")
    assert status == 1 and "logits was not compared: not in both records" in out


def test_runs(run):
    status, out, err = run("run.jsonl", "run.jsonl")
    assert (status, err) == (0, "") and "2 of 2 requests have the same tokens" in out


def test_a_tie_of_nothing_is_asked_for(run, monkeypatch):
    monkeypatch.setattr(cli_compare, "_margins", lambda *_: lambda questions: [])
    for flags, tie in (((), 1e-4), (("--tie", "0"), 0.0)):
        _, out, _ = run("run.jsonl", "run.jsonl", "--target", "x", "--json", *flags)
        assert json.loads(out.splitlines()[-1])["tie"] == tie


@pytest.mark.slow
def test_a_record_against_weights(run, place):
    """Of the target that ships, in both dtypes; then with one layer's state from another run."""
    for dtype in ("float32", "bfloat16"):
        target = load_target(SHIPPED_TARGET, Numerics(dtype=dtype))
        done = record(target, None, [list(range(290, 314))], RecordConfig(top=4))
        done.save(place / f"{dtype}.safetensors")
        flags = ("--isolate", "--target", str(SHIPPED_TARGET), "--plot", f"{dtype}.png")
        status, out, err = run(f"{dtype}.safetensors", *flags)
        assert status == 0, out + err
        assert (place / f"{dtype}.png").stat().st_size > 5000
    done.arrays["boundary.003"] = 1.1 * done.arrays["boundary.003"]
    done.save(place / "wrong.safetensors")
    both = ("wrong.safetensors", "bfloat16.safetensors")
    status, out, _ = run(*both, "--isolate", "--target", str(SHIPPED_TARGET), "--json")
    found = json.loads(out.splitlines()[-1])
    assert status == 1 and [one["holds"] for one in found["records"]] == [False, True]
    assert "layer 2 (sparse) departs" in found["records"][0]["finding"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("a.safetensors", "run.jsonl"), "run.jsonl is a run file and a.safetensors a record"),
        (("a.safetensors", "none"), "none: cannot be read (No such file"),
        (("a.safetensors", "a.safetensors", "--require", "tokens"), "--require tokens: there are"),
        (("a.safetensors", "a.safetensors", "--target", "x"), "--target is of run files"),
        (("a.safetensors",), "compare takes two files; --isolate takes one record and --target"),
        (("a.safetensors", "--isolate"), "--isolate runs the layers of a target: give --target"),
        (("a.safetensors", "--isolate", "--target", "x", "--align"), "--isolate goes without"),
        (("run.jsonl", "--isolate", "--target", "x"), "cannot be read as safetensors"),
        (("run.jsonl", "run.jsonl", "--tie", "1"), "--tie is of the margins that --target gives"),
        (("run.jsonl", "run.jsonl", "--align"), "are of records; these are runs"),
        (
            ("run.jsonl", "run.jsonl", "--target", str(SHIPPED_TARGET)),
            "the runs are of t@1 and t@1",
        ),
        (("a.safetensors", "a.safetensors", "--plot", "no/p.png"), "there is no directory no"),
        (("a.safetensors", "none", "--plot", "p.txt"), "expected a file that ends in .png"),
        (("a.safetensors", "a.safetensors", "--reference", "none"), "none: cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input(run, args, message):
    status, out, err = run(*args)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1
