"""`jaxspec sweep` from its flags to its table, its picture and its processes."""

import dataclasses
import io
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from jaxspec import SHIPPED_DRAFT, TreeConfig, plan_compile, sweep_run
from jaxspec.cli_sweep import numbers_of
from jaxspec.commands import ModelFlags, PromptFlags
from jaxspec.config import MeshConfig
from jaxspec.console import Display
from jaxspec.errors import InputError
from jaxspec.plan_models import PlanConfig
from jaxspec.sweep_config import SweepConfig
from jaxspec.sweep_report import report_of
from jaxspec.sweep_run import SweepFlags, environments, predict, run_sweep
from jaxspec.sweep_view import draw_sweep, show_sweep
from tests.test_sweep import HEADER, log


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    return lambda *args: command("sweep", *args, "--compile-cache", "none")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--draft", "none"), "there is no tree to find"),
        (("--levels", "0-3"), "--levels is '0-3': expected numbers from 1"),
        (("--batch-size", "4,x"), "--batch-size is '4,x'"),
        (("--levels", "1-100000000"), "expected numbers from 1 to 1024"),
        (("--plot", "."), "--plot ."),
        (("--tree", "3x1x4", "--nodes", "4"), "--nodes: --tree names the trees"),
        (("--tree", "1x1x9"), "8 nodes below the root"),
        (("--branches", "3", "--levels", "1", "--nodes", "9"), "there is no tree of these"),
        (("--plot", "a.txt"), "--plot a.txt"),
        (("--env", "NCCL_PROTO"), "expected NAME=VALUE,VALUE"),
        (("--context-length", "90"), "--context-length 90 has no room"),
        (("--rounds", "0"), "rounds is 0"),
        (("--plan", "8"), "mesh '8'"),
        (("--cache", "slots"), "--cache slots is of a mesh"),
        (("--target", "t", "--draft", "d"), "no prompt"),
        (("--target", str(SHIPPED_DRAFT), "--draft", "d", "x"), "no tiktoken.model"),
    ],
)
def test_bad_input(run, args, message):
    status, out, err = run(*args)
    assert (status, out) == (2, "") and err.startswith("jaxspec: ") and message in err


def test_numbers():
    assert numbers_of("--levels", "1-3, 8,2") == (1, 2, 3, 8)


def test_environments():
    assert environments(()) == ()
    assert environments(("A=1,2", "B_C=x")) == ({"A": "1", "B_C": "x"}, {"A": "2", "B_C": "x"})
    for settings in (("A",), ("1A=2",), ("A=1", "A=2")):
        with pytest.raises(InputError, match="every name once"):
            environments(settings)


def flags(**changes) -> SweepFlags:
    config = SweepConfig((TreeConfig(1, 1, 2),), (2,), rounds=3)
    return SweepFlags(ModelFlags, PromptFlags("x"), config, **changes)


def test_a_process_for_each_environment(tmp_path, monkeypatch):
    """There and back, the rounds shared; the report has what all of them wrote in one file."""
    turns = []

    def process(command, *, input, stdout, env, check):
        given, setting, num_rounds = pickle.loads(input)
        assert command == [sys.executable, "-c", "from jaxspec.sweep_run import child; child()"]
        assert env["JAXSPEC_TEST"] == setting["JAXSPEC_TEST"] and not given.envs
        first, *rest = log()
        entries = [first, rest[0]] if not turns else []
        done = sum(1 for setting_before, _ in turns if setting_before == setting)
        for entry in rest[1:4][2 * done : num_rounds]:
            entries.append({**entry, "env": setting})
        turns.append((setting, num_rounds))
        with given.out.open("a") as file:
            if file.tell() == 0:
                file.write(json.dumps({"format": "jaxspec-sweep-1", **HEADER}) + "\n")
            file.writelines(json.dumps(entry) + "\n" for entry in entries)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(sweep_run.subprocess, "run", process)
    one, other = environments(("JAXSPEC_TEST=a,b",))
    for out in (None, tmp_path / "log.jsonl"):
        turns.clear()
        report = run_sweep(flags(envs=(one, other), out=out), Display())
        assert turns == [(one, 2), (other, 2), (other, 3), (one, 3)]
        assert [setting.env for setting in report.settings] == [one, other]
        assert [batch.num_rounds for s in report.settings for batch in s.batches] == [3, 3]
        assert report.finding().startswith("JAXSPEC_TEST=a, batch 2: 1x1x2 is the fastest tree")
    assert (tmp_path / "log.jsonl").exists()


def test_a_process_that_fails(monkeypatch):
    """What it refused is told once; of what it died of, its own words stand on stderr."""
    for status, said, told in (
        (2, b"log: damaged\n", r"^under A=1: log: damaged$"),
        (-9, b"", "^under A=1 the sweep ended with exit status -9; what it said stands above"),
    ):
        ended = SimpleNamespace(returncode=status, stdout=said)
        monkeypatch.setattr(sweep_run.subprocess, "run", lambda *_, ended=ended, **__: ended)
        with pytest.raises(InputError, match=told):
            run_sweep(flags(envs=environments(("A=1",))), Display())


def test_a_process_that_refuses(monkeypatch, capsys):
    stdin = io.BytesIO(pickle.dumps((flags(), {}, 1)))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stdin))
    monkeypatch.setattr(sweep_run, "start_jax", lambda _: None)

    def refuses(*_):
        raise InputError("log: damaged")

    monkeypatch.setattr(sweep_run, "_measured", refuses)
    with pytest.raises(SystemExit) as ended:
        sweep_run.child()
    assert (ended.value.code, capsys.readouterr().out) == (2, "log: damaged\n")


def test_for_a_reader(tmp_path):
    """Table, sentence and picture; what is predicted has a table of its own."""
    report = report_of(HEADER, log(), "c")
    console = Console(width=160, record=True, file=io.StringIO())
    show_sweep(report, console)
    text = console.export_text()
    assert "6 texts of 36 tokens, greedy; 1 more repeat themselves and are left out" in text
    assert "2.00 nats a token, of the 7.00 of random ones" in text
    (row,) = (line for line in text.splitlines() if "fastest tree " in line and "│" in line)
    assert "1x1x2" in row and "0.83 (0.83 to 0.83)" in row and "2.000" in row
    assert "predicted" not in text
    draw_sweep(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_predictions(monkeypatch):
    """The measured accept length over the planned step; of a plan that a test can afford."""
    report = report_of(HEADER, log(), "c")
    asked: list[PlanConfig] = []

    def plan(config, waiting):
        asked.append(config)
        steps = [SimpleNamespace(tree=str(tree)) for tree in config.trees]
        return SimpleNamespace(
            target="kimi", context_length=9, steps=steps, break_even=lambda step: 2.0,
            tokens_per_s=lambda step, length: 111 * length,
        )  # fmt: skip

    monkeypatch.setattr(sweep_run, "plan", plan)
    (found,) = predict(flags(), MeshConfig(1, 8), report, Display())
    (config,) = asked
    assert (config.target, str(config.mesh), config.batch_size) == (None, "1x8", 2)
    assert set(map(str, config.trees)) == {"1x1x2", "4x1x5"}
    assert found.trees["4x1x5"] == (277.5, 1.25) and found.best == "4x1x5"
    console = Console(width=160, record=True, file=io.StringIO())
    report = dataclasses.replace(report, predicted=(found,))
    show_sweep(report, console)
    measured, _, predicted = console.export_text().partition("predicted, on H200s")
    assert "277.5" in predicted and "277.5" not in measured
    assert "4x1x5, 1.25 times plain decoding" in predicted
    (told,) = report.to_dict()["predicted"]
    assert (told["kind"], told["best"]) == ("predicted", "4x1x5")
    assert told["trees"]["4x1x5"] == {"tokens_per_s": 277.5, "speed": 1.25}


def test_plan_without_the_wheels(monkeypatch):
    """Said before anything is measured."""

    def h200s(count):
        raise ModuleNotFoundError

    monkeypatch.setattr(plan_compile, "h200s", h200s)
    with pytest.raises(InputError, match="takes the CUDA wheels and no GPU"):
        run_sweep(flags(plan=MeshConfig(1, 8)), Display())


@pytest.mark.slow
def test_end_to_end(run, tmp_path, monkeypatch):
    """The shipped pair under two environments, each in a process of its own, which also refuses
    what a file holds of another sweep."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    args = ("--tree", "2x1x3", "--batch-size", "2", "--rounds", "3", "--max-new-tokens", "32")
    args += ("--env", "XLA_FLAGS=,--xla_cpu_multi_thread_eigen=false", "--out", "s.jsonl")
    status, out, err = run(*args, "--plot", "s.png", "--json")
    assert status == 0, err
    report = json.loads(out)
    assert [setting["env"]["XLA_FLAGS"] for setting in report["settings"]] == [
        "", "--xla_cpu_multi_thread_eigen=false",
    ]  # fmt: skip
    for setting in report["settings"]:
        (batch,) = setting["batches"]
        assert batch["num_rounds"] == 3 and batch["whole"]["interval"] is not None
    assert report["holds"] and abs(report["checks"]["2x1x3"]["difference"]) < 0.03
    assert Path("s.png").exists()
    status = run(*args, "--rounds", "4")[0]
    assert status == 2
