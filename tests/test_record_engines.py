"""`benchmarks/record_sglang.py` and `record_vllm.py` against small fakes of the engines' APIs: what
they write is a record that `jaxspec compare` and `inspect` take."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import recording
from jaxspec.identify import identify
from jaxspec.record_comparison import compare_records
from jaxspec.record_file import RecordFile
from tests import fake_engines, tiny
from tests.test_readme import command_lines

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # where they import one another from

import record_sglang  # noqa: E402
import record_vllm  # noqa: E402

SEQUENCES = [[5, 9, 2, 2, 17, 3, 11], [1, 20, 8]]
EXPERTS = {"sglang": (), "vllm": ("--experts",)}
PROGRAMS = {"sglang": record_sglang, "vllm": record_vllm}


@pytest.fixture(scope="module", autouse=True)
def little_optimisation():
    """Half the time to compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def ours(target, tmp_path_factory):
    """jaxspec's own record of the sequences: its arrays, and a file with the best logits only."""
    claim = target.boundaries(tiny.BOUNDARIES, "the test's")
    whole = recording.record(target, None, SEQUENCES, recording.RecordConfig(capture=claim))
    kept = {name: array for name, array in whole.arrays.items() if name != "logits"}
    logits_BTV = whole.arrays["logits"]
    ids_BTk = np.argsort(-logits_BTV, axis=-1, kind="stable")[..., :8]
    kept["logits.top"] = np.take_along_axis(logits_BTV, ids_BTk, axis=-1)
    kept["logits.top_ids"] = ids_BTk.astype(np.int32)
    path = tmp_path_factory.mktemp("ours") / "top.safetensors"
    recording.Record(kept, whole.metadata).save(path)
    return whole.arrays, path


@pytest.fixture
def record(ours, tmp_path, monkeypatch, capsys):
    """Runs a recorder; gives its exit status, stderr, and the record."""
    model = fake_engines.Model(ours[0], 4, 1)
    out, directory = tmp_path / "theirs.safetensors", tmp_path / "target"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"text_config": tiny.TARGET_CONFIG}))
    (tmp_path / "lists.json").write_text(json.dumps(SEQUENCES))

    def record(engine: str, *flags: str, shift: int = 0, prefix: str = "language_model."):
        model.shift = shift
        modules = {"sglang": fake_engines.sglang(model, prefix), **fake_engines.vllm(model)}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        argv = [f"record_{engine}.py", str(directory), "--tokens", str(tmp_path / "lists.json")]
        monkeypatch.setattr(sys, "argv", [*argv, "--out", str(out), "--top", "8", *flags])
        status = 0
        try:
            PROGRAMS[engine].main()
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr().err, out

    return record


@pytest.mark.parametrize("engine", PROGRAMS)
def test_a_record_is_compared(engine, record, ours, target):
    flags = ("--dtype", "float32", "--features", "1,2,4", *EXPERTS[engine])
    status, said, out = record(engine, *flags)
    assert status == 0 and "left out: logits but the best ones" in said, said
    found = RecordFile.open(out)
    assert found.metadata["framework"] == engine and found.metadata["logits"] == "log-probabilities"
    names = {f"boundary.{b:03d}" for b in range(int(engine == "vllm"), 5)}
    names |= {"router.001", "router.002", "router.003", "logits.top", "logits.top_ids"}
    assert names | {"features", "tokens", "lengths"} == set(found.shapes)
    require = ("boundary", "router", "logits", "features")
    compared = compare_records(out, ours[1], require=require)
    assert compared.holds, compared.finding()
    assert ("boundary 0: vLLM" in found.metadata["left_out"]) == (engine == "vllm")
    report = identify(out, target)
    assert report.found == report.claimed == (1, 2, 4) and report.holds


@pytest.mark.parametrize("engine", PROGRAMS)
def test_states_one_layer_off_are_found(engine, record, ours, target):
    status, _, out = record(engine, "--dtype", "float32", "--features", "1,2,4", shift=1)
    assert status == 0
    compared = compare_records(out, ours[1])
    assert not compared.holds and "boundary.001" in compared.finding(), compared.finding()
    assert identify(out, target).found == (2, 3, 4), "nothing lies further on than the last one"


@pytest.mark.parametrize("engine", PROGRAMS)
def test_what_is_asked_for(engine, record):
    status, said, out = record(engine, "--boundaries", "4,2", "--top", "0")
    found = RecordFile.open(out)
    kept = {name for name in found.shapes if not name.startswith("router.")}
    assert status == 0 and kept == {"boundary.002", "boundary.004", "tokens", "lengths"}
    assert "logits" not in found.metadata and found.dtype == "bfloat16"
    assert ("chosen experts: --experts" in said) == (engine == "vllm")


def test_logits_of_other_models_differ_although_shifted(record, ours, tmp_path):
    """Log-probabilities are compared up to a number a row, and no further."""
    _, _, out = record("vllm", "--dtype", "float32")
    arrays = load_file(out)
    arrays["logits.top"] = arrays["logits.top"] * np.float32(1.01)
    save_file(arrays, tmp_path / "other.safetensors", RecordFile.open(out).metadata)
    compared = compare_records(tmp_path / "other.safetensors", ours[1])
    assert not compared.holds and "logits.top" in compared.finding(), compared.finding()


def test_sglang_of_another_name_in_parts_and_unseen(record, monkeypatch):
    """A flat model's layers are found too; a pass in chunks is put together; without hooks that are
    called there is no record."""
    monkeypatch.setattr(record_sglang, "SHORTEST_PASS", 3)
    status, _, out = record("sglang", "--dtype", "float32", prefix="")
    assert status == 0 and RecordFile.open(out).shapes["boundary.003"] == (2, 7, 64)
    monkeypatch.setattr(record_sglang, "_engine", _in_chunks(record_sglang._engine))
    status, _, out = record("sglang", "--dtype", "float32")
    assert status == 0 and RecordFile.open(out).shapes["boundary.003"] == (2, 7, 64)
    status, said, _ = record("sglang", prefix="transformer.")
    assert status == 2 and "no hook was called" in said


def _in_chunks(engine):
    return lambda *given: engine(*given) | {"chunked_prefill_size": 3}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--boundaries", "5"), "--boundaries 5: expected boundaries from 0"),
        (("--features", "x"), "--features x: expected boundaries"),
        (("--engine", "[]"), "--engine '[]': expected an object"),
        (("--tokens", "nowhere.json"), "--tokens nowhere.json: cannot be read"),
        (("--out", "nowhere/r.safetensors"), "--out nowhere/r.safetensors: cannot be written"),
        (("--top", "30"), "the engine gave 24 log-probabilities of a position"),
    ],
)
def test_bad_flags(flags, said, record):
    for engine in PROGRAMS:
        status, error, _ = record(engine, *flags)
        assert status == 2 and f"record_{engine}: " in error and said in error


def test_features_of_a_boundary_that_is_not_there(record):
    status, error, _ = record("vllm", "--features", "0,2")
    assert status == 2 and "boundaries [0] were not recorded; " in error and "first layer" in error


@pytest.mark.parametrize("engine", PROGRAMS)
def test_the_protocol(engine):
    page = (BENCHMARKS / "PROTOCOL.md").read_text("utf-8")
    (line,) = (line for line in command_lines(page) if f"benchmarks/record_{engine}.py" in line)
    args = PROGRAMS[engine].parser().parse_args(line[2:])
    assert (args.tokens, args.features) == (Path("lists.json"), "2,30,58")


@pytest.mark.parametrize("engine", PROGRAMS)
def test_an_engine_that_is_not_installed(engine, tmp_path):
    """A process of its own, as a user's: it says what to install, and imports no jaxspec."""
    (tmp_path / "lists.json").write_text("[[1]]")
    (tmp_path / "config.json").write_text(json.dumps(tiny.TARGET_CONFIG))
    program = BENCHMARKS / f"record_{engine}.py"
    argv = [str(program), str(tmp_path), "--tokens", str(tmp_path / "lists.json"), "--out", "r"]
    ask = (
        f"import sys, runpy; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        f"sys.modules[{engine!r}] = None; sys.argv = {argv!r}\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: assert not {'jax', 'jaxspec'} & set(sys.modules), 'imports jaxspec'"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"record_{engine}: {engine} cannot be imported" in done.stderr
    assert "pip install" in done.stderr and "Traceback" not in done.stderr
