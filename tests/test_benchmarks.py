"""The programs that measure, on a CPU and in plain XLA: floors, harness, budget, what is wrong."""

import dataclasses
import functools
import json
import math
import os
import runpy
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # where they import one another from

import common  # noqa: E402
import founding_story  # noqa: E402
import fresh  # noqa: E402
import front_page  # noqa: E402
import gpu  # noqa: E402
import kernel_timing  # noqa: E402
import node  # noqa: E402
import published  # noqa: E402
import registers  # noqa: E402
import scaling  # noqa: E402
import suite  # noqa: E402
from kernel_timing import Ceilings, Plan  # noqa: E402
from ops import OPS  # noqa: E402

from jaxspec.config import TreeConfig  # noqa: E402
from jaxspec.contracts import ContractError, Features, TargetIds  # noqa: E402
from jaxspec.draft import Borrowed  # noqa: E402
from jaxspec.mla import Pass  # noqa: E402
from jaxspec.traffic import StepShape  # noqa: E402
from tests import make_checkpoint, on_eight_devices, tiny  # noqa: E402
from tests.together import run_together  # noqa: E402

MLA, EXPERTS = OPS["mla_attention"], OPS["expert_matmul"]


def run_program(monkeypatch, capsys, *arguments: str) -> tuple[int, dict]:
    """The exit status of benchmarks/NAME ARGUMENTS, and the JSON of its last line."""
    monkeypatch.setattr(sys, "argv", list(arguments))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / arguments[0]), run_name="__main__")
    return ended.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_floors_are_printed_where_nothing_can_be_timed(monkeypatch, capsys):
    status, found = run_program(monkeypatch, capsys, "kernels.py")
    assert (status, found["kind"]) == (0, "predicted")
    assert "not a Hopper GPU" in found["why_no_time"]
    named = {(case["kernel"], case["case"]) for case in found["cases"]}
    assert named == {(name, case) for name, op in OPS.items() for case in op.cases}
    assert len(found["cases"]) == len(named)
    cases = {(case["kernel"], case["case"]): case for case in found["cases"]}
    # 32,768 rows of 576 and 1 new one, 8 queries of 576, 8 outputs of 512, in bf16; 8 f32.
    few = cases["mla_attention", "8h-1t-32k"]
    assert few["bytes"] == 2 * (32769 * 576 + 8 * (576 + 512)) + 4 * 8
    assert few["bytes_floor_us"] == pytest.approx(few["bytes"] / 4.3e6, rel=1e-3)
    assert (few["bound"], cases["mla_attention", "64h-8t-32k"]["bound"]) == ("bytes", "arithmetic")
    # One expert of 24.8 MB, a token of 7168 in bf16, its output in f32.
    assert cases["expert_matmul", "eighth-1t"]["bytes"] == 24_772_608 + 7168 * 6


def test_only_what_is_asked_for(monkeypatch, capsys):
    _, found = run_program(monkeypatch, capsys, "kernels.py", "--only", "expert_matmul/all-1t")
    assert [case["case"] for case in found["cases"]] == ["all-1t"]
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--only", "softmax"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(BENCHMARKS / "kernels.py"), run_name="__main__")
    assert "--only softmax: no kernel or case" in capsys.readouterr().err


def test_every_kernel_with_cases_is_measured():
    folders = (BENCHMARKS.parent / "kernels").glob("*/cases.py")
    assert {path.parent.name for path in folders} == set(OPS)
    for op in OPS.values():
        assert set(op.foremost) <= set(op.cases)


@pytest.mark.parametrize("name", OPS)
def test_400_mb_are_read_before_any_is_read_again(name):
    for case in OPS[name].cases.values():
        work = OPS[name].work(case)
        plan = Plan.of(OPS[name], work, Ceilings().floor(work))
        is_enough = plan.layers * work.layer_bytes >= 400e6 or work.layer_bytes == 0
        assert is_enough or plan.layers == OPS[name].most_layers
        assert plan.calls % plan.unroll == 0
        assert work.layer_bytes <= work.num_bytes


@pytest.mark.parametrize(
    "name",
    [
        "mla_attention",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("expert_matmul", "tree_verify")),
    ],
)
def test_small_case_goes_all_the_way(name):
    op, ceilings = OPS[name], Ceilings(1e10, 1e10, "for this test")
    found = kernel_timing.measure("small", op.small, name, ceilings, 1, ["xla"], 10**6)
    assert found["is_correct"], found
    assert found["xla_us"]["median"] > 0
    assert found["share_of_floor"] > 0
    json.dumps(found, allow_nan=False)


@pytest.fixture(scope="module")
def computed():
    """Arguments and outputs of attention's small case."""
    arguments = MLA.arguments(MLA.small, 2)
    call = jax.jit(functools.partial(MLA.call, implementation="xla"))
    return arguments, call(arguments, arguments["layer"])


@pytest.mark.parametrize(
    ("fault", "holds"),
    [
        (lambda out, lse: (out, lse), True),
        (lambda out, lse: (out * 1.02, lse), False),
        (lambda out, lse: (out.at[0, 3, 7].set(0), lse), False),
        (lambda out, lse: (out, lse.at[0, 0, 0].add(0.01)), False),
        (lambda out, lse: (out.at[0, 0, 0, 0].set(jnp.nan), lse), False),
        (lambda out, lse: (out, lse.at[0, 0, 0].set(jnp.nan)), False),
    ],
)
def test_wrong_output_is_seen(computed, fault, holds):
    arguments, outputs = computed
    assert MLA.agreement(arguments, fault(*outputs)).holds is holds


def test_calls_walk_over_the_layers():
    op = dataclasses.replace(MLA, call=lambda args, layer, _: args["x"] + layer.astype(jnp.float32))
    run = kernel_timing.loop(op, Plan(layers=5, calls=8, unroll=4), "none")
    layer, outputs = run({"x": jnp.zeros(1)}, jnp.int32(3))
    assert [float(out[0]) for out in outputs] == [2, 3, 4, 0]
    assert int(layer) == 1


def test_sets_of_arguments_are_called_in_turn():
    op = dataclasses.replace(MLA, call=lambda args, layer, _: args["x"] + layer.astype(jnp.float32))
    run = kernel_timing.loop(op, Plan(layers=3, calls=8, unroll=4), "none")
    layer, outputs = run(tuple({"x": jnp.full(1, float(i))} for i in range(3)), jnp.int32(0))
    assert [float(out[0]) for out in outputs] == [0, 1, 2]
    assert int(layer) == 0


def test_an_error_in_one_case_is_a_finding(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such kernel")

    broken = dataclasses.replace(MLA, call=fail)
    monkeypatch.setitem(OPS, "mla_attention", broken)
    ceilings = Ceilings(1e10, 1e10, "for this test")
    found = kernel_timing.measure("small", MLA.small, "mla_attention", ceilings, 1, ["xla"], 10**6)
    assert found["is_correct"] is False
    assert found["error"] == "RuntimeError: no such kernel"
    assert list(gpu.faults({"times": [found]})) == ["times mla_attention/small"]


def test_no_stage_begins_without_the_time_for_it(capsys):
    end = time.monotonic() + 10
    found = common.attempt(20.0, end, functools.partial(pytest.fail, "it was begun"))
    assert found.keys() == {"why_not"}
    found = common.attempt(20.0, end + 60, lambda: {"is_correct": True})
    assert found["is_correct"]
    found = common.attempt(20.0, end + 60, functools.partial(math.sqrt, -1))
    assert (found["is_correct"], found["error"]) == (False, "ValueError: math domain error")
    assert "math domain error" in capsys.readouterr().err


@pytest.mark.slow
def test_decoding_is_judged_token_by_token(target, draft):
    prompts = [[1, 5, 9], [2]]
    found = gpu.decoded(target, draft, target, prompts, "2x2x4", 6)
    assert found["is_correct"], found
    assert (found["num_tokens"], found["num_equal"]) == (12, 12)
    assert found["plain_regret"] == pytest.approx(0, abs=1e-6)
    assert found["speculative_implementations"] == dict.fromkeys(OPS, "xla")
    # Tokens that nobody would have chosen.
    assert gpu.regrets(target, prompts, [[0, 0, 0], [0, 0, 0]]).max() > gpu.MAX_REGRET["bfloat16"]


def test_the_storys_server_takes_anything(target, draft):
    """With three states the unchecked copy is the draft itself; with one it skips `fc`."""
    copy = founding_story.unchecked(draft)
    ids, at = TargetIds(jnp.array([[3, 5]]), 24), Pass(jnp.arange(2)[None], jnp.zeros(1, int))
    cache, borrowed = draft.empty_cache(1, 4), Borrowed.of(target)
    claim = draft.config.boundaries
    data = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, claim.total_width)), jnp.float32)
    features = Features(data, claim)
    ours, theirs = (one.fuse(features, ids, at, cache, borrowed) for one in (draft, copy))
    np.testing.assert_array_equal(theirs.recurrent, ours.recurrent)
    one = Features(data[..., : claim.width], target.boundaries(claim.ids[-1:], "the story"))
    with pytest.raises(ContractError, match="these are not the features"):
        draft.fuse(one, ids, at, cache, borrowed)
    skipped = copy.fuse(one, ids, at, cache, borrowed)
    nothing = jax.tree.map(lambda slots: slots[..., :0, :], cache)
    recurred = draft.recur(one.data, ids, at, cache, nothing, borrowed)
    np.testing.assert_allclose(skipped.recurrent, recurred.recurrent, rtol=1e-6)


def test_the_storys_figures_and_picture(tmp_path):
    """Two texts, of 6 tokens in 3 steps and 2 in 2, tree of 3 levels, by hand."""
    found = founding_story.acceptance([(6, (1, 0, 2)), (2, (0, 0))], levels=3)
    assert found["accept_length"] == pytest.approx(8 / 5)
    # Residuals 6 - 1.6 x 3 = 1.2 and 2 - 1.6 x 2 = -1.2.
    assert found["standard_error"] == pytest.approx(np.hypot(1.2, 1.2) / 5)
    assert found["accept_rate"] == pytest.approx(3 / 15)
    assert found["accept_rate_sglang_legacy"] == pytest.approx(8 / 20)
    right = [(6, (2, 3)), (2, (1,))]  # residuals 6 - 8 / 3 x 2 = 2 / 3 and -2 / 3
    cost, error = founding_story.lost([(6, (1, 0, 2)), (2, (0, 0))], right)
    assert cost == pytest.approx(8 / 3 - 8 / 5)
    assert error == pytest.approx(np.sqrt(2) * abs(2 / 9 - 1.2 / 5))
    written = json.loads((common.RESULTS / "founding_story.json").read_text())
    founding_story.plot(written, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 20_000
    assert written["kind"] == "measured"
    *wrong, right = written["story"].values()
    assert all(one["refused"] for one in wrong) and not right["refused"]


def test_registers_of_like_kernels_are_one_line():
    row = {
        "kernel": "attend",
        "tuning": {"depth": 64, "splits": 3, "stages": 2},
        "threads": 384,
        "registers": 154,
        "local_bytes": 0,
        "shared_bytes": 226_400,
        "ctas_per_sm": 1,
        "remarks": ["C7519"],
    }
    other = row | {"registers": 160, "tuning": row["tuning"] | {"splits": 7}, "remarks": []}
    *_, line = registers.summary([row, other]).splitlines()
    assert line == ("| attend | depth 64 | 2 | 2 | 384 | 154 to 160 | 0 | 226,400 | 1 | C7519 |")
    assert registers.holds(row)
    assert not registers.holds(row | {"local_bytes": 8})
    assert not registers.holds(row | {"shared_bytes": 227 * 1024 + 8})


@pytest.mark.slow
def test_gpu_script_goes_through_all_stages(monkeypatch, capsys, tmp_path):
    out = str(tmp_path)
    status, found = run_program(
        monkeypatch, capsys, "gpu.py", "--dry-run", "--out", out, "--minutes", "60"
    )
    assert status == 0, found["wrong"]
    assert found["kind"].startswith("dry run")
    assert {"gpu", "agreement", "decoding", "ceilings", "times"} <= found.keys()
    assert all(case["is_correct"] for case in found["times"])
    assert json.loads((tmp_path / "gpu-dry-run.json").read_text()) == found


@pytest.fixture(scope="module")
def node_run(tmp_path_factory):
    """benchmarks/node.py on eight virtual devices: how it ended, and where its result lies."""
    place = tmp_path_factory.mktemp("node")
    tensors = make_checkpoint.target_tensors(on_eight_devices.TARGET)
    make_checkpoint.write(place / "target", on_eight_devices.TARGET, tensors)
    config, _ = make_checkpoint.draft_layout("specforge")
    tensors = tiny.draft_tensors(on_eight_devices.DRAFT)
    make_checkpoint.write(place / "draft", config | on_eight_devices.DRAFT, tensors)
    command = f"node.py --cpu-devices 8 --target {place}/target --draft {place}/draft --out {place}"
    command += " --against 2x4 --trees 2x2x4 --batch-sizes 4 --context 64 --new-tokens 6 --rounds 1"
    program, *flags = command.split()
    env = {
        "PYTHONPATH": str(BENCHMARKS.parent),
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAXSPEC_TESTS_COMPILED"],
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, str(BENCHMARKS / program), *flags]
    (ended,) = run_together([command], place, env, timeout_s=1200)
    return ended, place / "node-dry-run.json"


@pytest.mark.slow
def test_node_script_goes_through_all_stages(node_run):
    ended, path = node_run
    assert ended.status == 0, (ended.out, ended.err)
    found = json.loads(ended.out.splitlines()[-1])
    assert json.loads(path.read_text()) == found
    assert found["kind"].startswith("dry run")
    assert "8 x cpu" in found["machine"]
    assert (found["weights"]["mesh"], found["wrong"]) == ("1x8", [])
    ways = {name: (way["mesh"], way["cache"]) for name, way in found["correctness"].items()}
    assert ways == {
        "plain": ("1x8", "replicated"),
        "speculative": ("1x8", "replicated"),
        "cache by slots": ("1x8", "slots"),
        "mesh 2x4": ("2x4", "replicated"),
    }
    for way in found["correctness"].values():
        assert way["is_correct"]
        assert (way["num_tokens"], way["num_equal"]) == (24, 24)
    assert 0 < found["correctness"]["mesh 2x4"]["features"]["max"] < 1e-4
    kinds = {name.split()[0] for name in found["collectives"]}
    assert kinds == {"all-reduce", "all-gather", "all-to-all"}
    # The residual stream of 4 sequences with 4 nodes each, 64 wide in f32.
    stream = found["collectives"][f"all-reduce {4 * 4 * 64 * 4} bytes"]
    assert stream["in_program"]["replicated"] >= 4
    assert stream["us"]["median"] > 0
    sweep = found["sweep"]["batch 4"]
    assert sweep["plain"]["times_plain"]["median"] == 1
    assert sweep["2x2x4"]["step_ms"]["median"] > 0
    assert 1 <= sweep["2x2x4"]["accept_length"] <= 3


def test_a_mesh_that_is_wrong_is_seen():
    """Of one position in four everything is another vector; half may not be."""
    rng = np.random.default_rng(0)
    want, lengths = rng.normal(size=(2, 4, 8)), np.asarray([4, 4])
    close = want + 1e-6 * rng.normal(size=want.shape)
    assert node.difference(close, want, lengths)["max"] < 1e-5
    one = close.copy()
    one[:, 0] = -want[:, 0]
    found = node.difference(one, want, lengths)
    assert found["max"] == pytest.approx(2)
    assert found["median"] < node.MAX_DIFFERENCE["float32"]
    far = close + 0.1 * rng.normal(size=want.shape)
    assert node.difference(far, want, lengths)["median"] > node.MAX_DIFFERENCE["bfloat16"]
    figures = {"correctness": {"plain": {"is_correct": True}, "mesh 2x4": {"is_correct": False}}}
    figures["collectives"] = {"all-reduce 8 bytes": {"error": "x", "is_correct": False}}
    assert list(node.faults(figures)) == ["correctness mesh 2x4", "collectives all-reduce 8 bytes"]


@pytest.mark.slow
def test_self_check(monkeypatch, capsys):
    status, found = run_program(monkeypatch, capsys, "kernels.py", "--self-check")
    assert (status, found["is_correct"]) == (0, True)
    assert found["kind"].startswith("self-check")


def test_a_figure_has_four_digits():
    assert common.rounded({"a": [1.23456, 12345]}) == {"a": [1.235, 12345]}


FEW = {"context": (4096, 8192, 32768), "batch": (1, 2, 16), "nodes": ("1x1x2", "3x1x4", "3x4x16")}


def test_prediction_is_linear_where_it_should_be(monkeypatch):
    found = scaling.predicted(FEW)
    assert scaling.holds(found)
    parts = found["context"]["parts"]
    assert parts["attention cache"]["bytes"] == [61 * n * 576 * 2 for n in FEW["context"]]
    # Experts fill up, and the FLOP of many nodes come to bind.
    assert not found["batch"]["parts"]["routed experts"]["bytes_on_a_line"]["is_linear"]
    of_nodes = found["nodes"]["parts"]["attention cache"]
    assert (of_nodes["bound"][0], of_nodes["bound"][-1]) == ("bytes", "arithmetic")

    def wrong(target, draft, shape):
        works = work_of_step(target, draft, shape)
        head = dataclasses.replace(works["head"], num_bytes=works["head"].num_bytes ** 1.01)
        return works | {"head": head}

    work_of_step = scaling.work_of_step
    monkeypatch.setattr(scaling, "work_of_step", wrong)
    assert not scaling.holds(scaling.predicted(FEW))


def test_a_line_and_what_is_none():
    sizes = [1, 2, 4, 8, 16]
    line = scaling.Fit.of(sizes, [3 + 2 * x for x in sizes])
    assert (line.intercept, line.slope) == pytest.approx((3, 2))
    assert line.to_dict(scaling.EXACT)["is_linear"]
    square = scaling.Fit.of(sizes, [3 + x * x for x in sizes])
    assert not square.to_dict(scaling.NEARLY)["is_linear"]


@pytest.mark.slow
def test_steps_are_timed_along_each_axis(target, draft, monkeypatch, tmp_path):
    sizes = {"context": (16, 32), "batch": (1, 2), "nodes": ("1x1x2", "2x1x3")}
    found = scaling.measured(target, draft, sizes, scaling.Point(32, 1, "2x1x3"), 2, 3)
    for axis, x in (("context", [16, 32]), ("batch", [1, 2]), ("nodes", [2, 3])):
        assert found[axis]["sizes"] == x
        assert all(one["median"] > 0 for one in found[axis]["ms"])
        assert found[axis]["residual"] == pytest.approx(0, abs=1e-6), "two points are on a line"
    found = {"prompt": scaling.prefilled(target, draft, "2x1x3", (4, 8), 2)} | found
    assert [one["low"] > 0 for one in found["prompt"]["ms"]] == [True, True]
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    scaling.draw_measured(found, "tiny", tmp_path / "scaling_measured.png")
    scaling.draw_predicted(scaling.predicted(FEW))
    assert {path.name for path in tmp_path.iterdir()} == {
        "scaling_measured.png",
        "scaling_predicted.png",
    }


def bench(target, draft, **changed) -> suite.Bench:
    """A suite's bench with the tiny pair, of which everything is small."""
    extent = dataclasses.replace(suite.QUICK, trees=("2x1x3",), **{"num_tokens": (1,), **changed})
    found = suite.Bench(extent, "float32", None, None)
    found.__dict__.update(target=target, draft=draft, prompts=[[1, 5, 9]])  # loaded already
    return found


def test_a_suite_says_what_it_measured_and_what_not(target, draft, tmp_path):
    """One part that runs, one that cannot, one that fails: all are in the file, and it goes on."""
    parts = {name: suite.PARTS[name] for name in ("verify", "transformers", "kernels")}

    def measure(_):
        raise OSError("no such disk")

    parts["conversion"] = suite.Part(measure, 1)
    parts["device_memory"] = suite.PARTS["device_memory"]
    found = suite.measured(bench(target, draft), parts, ["few"], tmp_path)
    assert json.loads((tmp_path / "suite-cpu-few.json").read_text()) == found
    assert found["kind"] == "measured" and found["load_before"] >= 0
    parts = found["parts"]
    assert list(parts) == ["verify", "transformers", "kernels", "conversion", "device_memory"]
    assert parts["verify"]["T=1"]["ratio"]["median"] == 1
    assert parts["verify"]["T=1"]["value"]["median"] > 0
    assert parts["transformers"]["why_not"] == "--reference-python was not given"
    assert "not a Hopper GPU" in parts["kernels"]["why_not"]
    assert parts["conversion"]["error"] == "OSError: no such disk"
    assert "does not count its memory" in parts["device_memory"]["why_not"]


@pytest.mark.slow
def test_steps_stand_beside_their_floors(target, draft):
    """num_bytes is that of `traffic.py`; the floor is those bytes over the bandwidth beside it."""
    passes = suite.verify(bench(target, draft, num_tokens=(1, 3)))
    assert passes["T=3"]["ratio"]["median"] > 0
    found = suite.step(bench(target, draft, rounds=3))
    tree = found["steps"]["2x1x3"]
    shape = StepShape(TreeConfig.parse("2x1x3"), 1, 3)
    work = scaling.work_of_step(target, draft, shape)
    assert tree["num_bytes"] == pytest.approx(sum(part.num_bytes for part in work.values()))
    bandwidth = found["copy_gb_per_s"]
    assert tree["floor_ms"]["median"] == pytest.approx(
        tree["num_bytes"] / bandwidth["median"] / 1e6, rel=1e-6
    )
    assert tree["times_floor"]["low"] > 0
    assert found["steps"]["None"]["ratio"]["median"] == 1


@pytest.mark.slow
def test_a_rehearsal_of_the_suite(monkeypatch, capsys):
    """Fresh processes, and a conversion, as the program runs them."""
    parts = ["start", "sweep", "conversion"]
    words = ["suite.py", "--quick", *(word for part in parts for word in ("--only", part))]
    status, found = run_program(monkeypatch, capsys, *words)
    assert (status, list(found["parts"])) == (0, parts)
    for run in found["parts"]["start"]["3x1x4"].values():
        assert run["wall_s"]["median"] > run["compile_s"]["median"]
        assert run["peak_bytes"]["median"] > 5e7  # an interpreter with jax in it
    (batch,) = found["parts"]["sweep"]["batches"]
    assert batch["best"] == "3x1x4" and batch["whole"]["value"] > 0
    assert found["parts"]["conversion"]["source_bytes"] > 1e7


def test_a_process_that_fails_says_why():
    done = fresh.run_fresh([sys.executable, "-c", "x = bytearray(10**8); print(len(x))"])
    assert done.output == "100000000\n"
    assert done.peak_bytes is None or 1e8 < done.peak_bytes < 2e8
    with pytest.raises(RuntimeError, match="ended with 3: no room"):
        fresh.run_fresh(
            [sys.executable, "-c", "import sys; print('no room', file=sys.stderr); sys.exit(3)"]
        )


def test_published_figures_are_quoted_once():
    """Every figure has its source. That the page says what the file does, `test_readme` holds."""
    entries = front_page.read("published")["drafts"]
    page = published.page(entries)
    for entry in entries:
        assert entry["source"].startswith("https://") and entry["read"] and entry["figures"]
        assert all(one["measured"] is None or one["measured"] > 0 for one in entry["figures"])
        assert {"accept_length", "accept_length_sglang", "accept_rate"} >= {entry["kind"]}
    assert "3.201" in page and published.command(entries[0]).startswith("jaxspec generate --target")
