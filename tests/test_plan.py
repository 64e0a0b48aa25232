"""`jaxspec plan` without the CUDA wheels: configs, sums, times, tables, and what it refuses.

The compiling is in `test_sm90_plan.py`.
"""

import dataclasses
import io
import json
import sys

import jax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from rich.console import Console

from jaxspec import cli
from jaxspec.config import MeshConfig, Numerics, TreeConfig
from jaxspec.environment import KIMI_DRAFT_CONFIG, KIMI_TARGET_CONFIG
from jaxspec.errors import InputError
from jaxspec.hardware import Assumptions
from jaxspec.picture import check_picture
from jaxspec.plan import plan, what_runs
from jaxspec.plan_models import PlanConfig, abstract_models
from jaxspec.plan_report import Exchange, Memory, PlanReport, ProgramPlan
from jaxspec.plan_view import draw, show
from jaxspec.sharding import held_bytes, spec_of
from jaxspec.step import empty_state
from jaxspec.traffic import Work
from tests import full_size, make_checkpoint, tiny

ASSUMED = Assumptions(
    memory_gb=100,
    bandwidth_gb_per_s=1000,
    tflops=100,
    collective_us=10,
    bus_gb_per_s=100,
    launch_us=2,
    wait_us=20,
)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `jaxspec ARGS` as on a machine without the CUDA wheels: exit status, stderr."""
    monkeypatch.setattr("jaxspec.aot.importlib.util.find_spec", lambda name: None)

    def run(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["jaxspec", *args])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        assert not out
        return exit.value.code, err

    return run


def test_without_the_wheels(run):
    status, err = run("plan")
    assert status == 2
    assert err.count("\n") == 1
    assert "pip install -e '.[cuda]'" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mesh", "1x7"), "do not divide the target's num_attention_heads 64"),
        (("--mesh", "8"), "expected DATAxMODEL"),
        (("--mesh", "2x4", "--batch-size", "3"), "do not divide a batch of 3"),
        (("--context-length", "300000"), "context_length is 300000"),
        (("--batch-size", "0"), "batch_size is 0"),
        (("--tree", "3x4x99"), "offer only 36"),
        (("--tree", "3x4x16", "--draft", "none"), "no tree to give a shape to"),
        (("--target", "nowhere"), "nowhere: no such directory"),
        (("--draft", str(KIMI_TARGET_CONFIG)), "model_type is 'kimi_k25'"),
        (("--assume", "launch_us"), "expected NAME=NUMBER"),
        (("--assume", "speed=3"), "names are bandwidth_gb_per_s"),
        (("--assume", "launch_us=-1"), "above 0"),
        (("--plot", "plan.doc"), "expected a file that ends in .png"),
        (("--plot", "nowhere/plan.png"), "there is no directory nowhere"),
    ],
)
def test_bad_input(run, flags, message):
    status, err = run("plan", *flags)
    assert (status, message in err) == (2, True), err


def test_a_tree_wants_a_draft():
    with pytest.raises(InputError, match="a draft wants a tree"):
        plan(PlanConfig(trees=()))
    with pytest.raises(InputError, match="a draft wants a tree"):
        plan(PlanConfig(draft="none"))


def test_the_configs_that_ship():
    """Kimi-K2.5 as other tests write it out by hand, and a draft of the published size."""
    target, draft = abstract_models(PlanConfig())
    by_hand = full_size.abstract_target().config
    # Nothing but the tokenizer's and the generation's configs name the end of a turn.
    assert target.config == dataclasses.replace(by_hand, eos_token_ids=(163585,))
    assert draft is not None
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(draft, nnx.Param)))
    assert abs(count - 3.178e9) < 0.001e9
    assert draft.config.boundaries.ids == (2, 30, 58)
    assert (KIMI_TARGET_CONFIG / "config.json").is_file()
    assert (KIMI_DRAFT_CONFIG / "config.json").is_file()


def test_other_configs(tmp_path):
    """A config alone, its file, and checkpoints with weights: those say what a draft owns."""
    config = tiny.TARGET_CONFIG
    tensors = tiny.target_tensors(config)
    target = make_checkpoint.write(tmp_path / "target", config, tensors)
    of_draft = tiny.draft_tensors(tiny.DRAFT_CONFIG)
    del of_draft["embed_tokens.weight"]
    draft = make_checkpoint.write(tmp_path / "draft", tiny.DRAFT_CONFIG, of_draft)
    one = MeshConfig(1, 1)
    _, found = abstract_models(PlanConfig(target, draft, one))
    assert found is not None
    assert (found.config.has_embedding, found.config.has_head) == (False, True)
    for name in ("target", "draft"):
        (tmp_path / name / "model.safetensors").unlink()
    alone, found = abstract_models(PlanConfig(target, draft / "config.json", one))
    assert found is not None
    assert (found.config.has_embedding, found.config.has_head) == (True, True)
    assert alone.config.hidden_size == config["hidden_size"]
    assert found.config.boundaries.target == alone.identity


@pytest.mark.parametrize("mesh", [MeshConfig(1, 8), MeshConfig(2, 4, "slots")], ids=str)
def test_bytes_held_are_those_of_the_shardings(mesh):
    """The rule table's sums against jax's own shapes of shards."""
    numerics = Numerics(mesh=mesh)
    target, draft = full_size.abstract_target(61, numerics), full_size.abstract_draft(32000)
    axes = AbstractMesh((mesh.data, mesh.model), ("data", "model"))
    state = jax.eval_shape(lambda: empty_state(target, draft, 4, 32768))
    for tree in (nnx.state(target), nnx.state(draft), state):
        named = jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        )
        found = held_bytes(tree, mesh)
        assert len(found) == len(named)
        for (_, leaf), (name, size) in zip(named, found.items(), strict=True):
            leaf = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            where = NamedSharding(axes, spec_of(name, leaf.ndim, mesh))
            shard = jax.ShapeDtypeStruct(where.shard_shape(leaf.shape), leaf.dtype)
            assert size == shard.size * shard.dtype.itemsize, name


def test_a_loop_that_nobody_knows_the_turns_of():
    program = """
%b (p: s32[]) -> s32[] {
  ROOT %p = s32[] parameter(0)
}

ENTRY %main (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %w = s32[] while(%p), condition=%b, body=%b, metadata={op_name="jit(f)/while/body/SCOPE/while"}
}
"""  # noqa: E501
    (wait,) = what_runs(program.replace("SCOPE", "propose"), 1000)
    assert wait.times == 1 + 4, "blocks of 256"
    (wait,) = what_runs(program.replace("SCOPE", "extend"), 32768)
    assert wait.times == 1 + 16, "and no more than 16"
    with pytest.raises(ValueError, match="nobody knows the turns of"):
        what_runs(program.replace("SCOPE", "verify"), 1000)


def program(tree: str | None = None, **memory: int) -> ProgramPlan:
    """A step of round figures."""
    held = dict.fromkeys((field.name for field in dataclasses.fields(Memory)), 0)
    return ProgramPlan(
        tree=tree,
        levels=0 if tree is None else TreeConfig.parse(tree).levels,
        memory=Memory(**held | {"target": 60 * 10**9, "arguments": 60 * 10**9} | memory),
        work={"attention cache": Work(2e9, 3e11), "routed experts": Work(8e9, 1e9)},
        experts=(8.0, 2.5),
        copied={"verify": 1e9},
        exchanges=(Exchange("verify", "all-reduce", 4e5, 100, 8),),
        launches={"verify": 900.0, "loop": 100.0},
        waits={"propose": 50.0},
        compile_s=30.0,
    )


def report(*steps: ProgramPlan, plain: ProgramPlan | None = None) -> PlanReport:
    names = ("target", "draft", "device", "mesh", "cache")
    words = dict.fromkeys((*names, "jax_version", "machine", "command"), "some")
    return PlanReport(
        **words,
        batch_size=4,
        context_length=1000,
        assumed=ASSUMED,
        plain=plain or program(),
        steps=steps,
    )


def test_times_are_the_stated_costs():
    """3e11 FLOP take 3 ms, 8 GB take 8 ms, 1 GB copied is 2 GB, 7 / 4 of 400 kB are 7 us."""
    times = program().times_ms(ASSUMED)
    assert times == pytest.approx(
        {
            "attention cache": 3.0,
            "routed experts": 8.0,
            "slices copied": 2.0,
            "collectives": 100 * (10 + 7) / 1000,
            "launches": 1000 * 2 / 1000,
            "waits": 50 * 20 / 1000,
        }
    )
    assert program().step_ms(ASSUMED) == pytest.approx(17.7)


@pytest.mark.parametrize(
    ("opcode", "crossings"), [("all-gather", 7 / 8), ("all-to-all", 7 / 8), ("reduce-scatter", 7)]
)
def test_bytes_cross_the_bus(opcode, crossings):
    one = Exchange("verify", opcode, 1e6, 1, 8)
    assert one.ms(ASSUMED) == pytest.approx((10 + crossings * 10) / 1000)


def test_break_even_is_the_ratio_of_the_steps():
    tree = dataclasses.replace(program("3x1x4"), waits={"propose": 935.0})
    found = report(tree)
    assert found.break_even(tree) == pytest.approx(2.0)
    assert found.tokens_per_s(found.plain) == pytest.approx(4 / 17.7e-3)
    assert found.tokens_per_s(tree, 2.0) == pytest.approx(found.tokens_per_s(found.plain))
    assert "pays above an accept_length of 2.00 of 4" in shown(found)
    slow = dataclasses.replace(tree, waits={"propose": 10_000.0})
    assert "never pays" in shown(report(slow))


def shown(report: PlanReport) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=200))
    return out.getvalue()


def test_what_does_not_fit_is_said_not_to():
    fitting = report(program("3x1x4"))
    assert fitting.fits
    assert "DOES NOT FIT" not in shown(fitting)
    assert "fits, 40.00 GB of head-room" in shown(fitting)
    # The larger temporaries count: those of a step, or of a prefill.
    for name in ("temporaries", "prefill_temporaries"):
        full = report(program("3x1x4", **{name: 41 * 10**9}))
        assert not full.fits
        assert "tree 3x1x4: DOES NOT FIT: 1.00 GB too much" in shown(full)
        assert "plain decoding: fits" in shown(full)
    assert shown(fitting).count("predicted") >= 8


def test_a_rule_table_that_is_wrong_is_seen():
    assert report(plain=program(arguments=round(60.2 * 10**9))).agrees
    wrong = report(plain=program(arguments=round(60.4 * 10**9)))
    assert not wrong.agrees
    assert "XLA disagree" in shown(wrong)


def test_groups_larger_than_a_node_are_pointed_at():
    one = program("3x1x4")
    assert "more than a node's 8" not in shown(report(one))
    wide = (Exchange("verify", "all-reduce", 4e5, 100, 16),)
    assert "more than a node's 8" in shown(report(dataclasses.replace(one, exchanges=wide)))


def test_json_is_labelled():
    found = json.loads(json.dumps(report(program("3x4x16")).to_dict()))
    assert found["kind"] == "predicted"
    (step,) = found["speculative"]
    assert step["break_even_accept_length"] == pytest.approx(1)
    assert [entry["accept_length"] for entry in step["tokens_per_s"]] == [1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert step["work"]["attention cache"]["bound"] == "arithmetic"
    assert found["autoregressive"]["tree"] is None
    assert found["assumptions"]["launch_us"]["value"] == 2
    assert "--assume" not in Assumptions().to_dict()["launch_us"]["source"]
    assert "--assume" in found["assumptions"]["wait_us"]["source"]


def test_picture(tmp_path):
    path = tmp_path / "plan.svg"
    check_picture(path)
    draw(report(program("3x1x4"), program("3x4x16")), path)
    text = path.read_text()
    for words in ("predicted speed", "tree 3x4x16", "plain decoding", "17.7 ms", "launches"):
        assert words in text
    draw(report(), tmp_path / "plain.png")
    assert (tmp_path / "plain.png").read_bytes().startswith(b"\x89PNG")
