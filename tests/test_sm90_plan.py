"""What a plan claims of a step on eight H200s, compiled for them: shallower, and once in full."""

import functools
import json
from typing import NamedTuple

import pytest
from flax import nnx
from jax.stages import Compiled

from jaxspec import ptxas
from jaxspec.aliases import CacheLayout
from jaxspec.commands import ModelFlags, PromptFlags
from jaxspec.config import MeshConfig, Numerics, TreeConfig
from jaxspec.console import Display
from jaxspec.hlo import Run, loop_writes
from jaxspec.phases import phase_of
from jaxspec.plan import plan, what_runs
from jaxspec.plan_compile import absent_devices, compile_step
from jaxspec.plan_models import PlanConfig
from jaxspec.sharding import held_bytes
from jaxspec.step import State
from jaxspec.sweep_config import SweepConfig
from jaxspec.sweep_report import report_of
from jaxspec.sweep_run import SweepFlags, predict
from tests.full_size import abstract_draft, abstract_target
from tests.test_sweep import HEADER, log

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        not ptxas.IS_INSTALLED, reason="compiling for an H200 needs the `cuda` extra"
    ),
]

LAYERS = 6
SLOTS = 129 * 512  # 129 divides no other dimension: it gives away what holds a cache's slots
LEVELS = 3
PER_LAYER = {"replicated": 2, "slots": 4}


class Case(NamedTuple):
    """A step on eight devices, a group that shares all of it."""

    tree: str
    batch: int
    cache: CacheLayout


CASES = [
    Case("3x1x4", 1, "replicated"),
    Case("3x4x16", 8, "replicated"),
    Case("3x4x16", 32, "slots"),
]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


class Built(NamedTuple):
    """A compiled step, and what it is given, by the rule table's own sum."""

    step: Compiled
    state: State
    expected_bytes: int


@functools.cache
def built(case: Case) -> Built:
    mesh = MeshConfig(1, 8, case.cache)
    numerics = Numerics(implementation="mosaic", mesh=mesh)
    target, draft = abstract_target(LAYERS, numerics), abstract_draft(32000, (1, 3, 5), numerics)
    tree = TreeConfig.parse(case.tree)
    step, state = compile_step(absent_devices(mesh), target, draft, tree, case.batch, SLOTS)
    trees = (nnx.state(target), nnx.state(draft), state)
    return Built(step, state, sum(sum(held_bytes(tree, mesh).values()) for tree in trees))


def started(case: Case) -> list[Run]:
    return what_runs(str(built(case).step.as_text()), SLOTS)


@EACH
def test_weights_are_as_the_rule_table_says(case):
    step, _, expected = built(case)
    assert step.memory_analysis().argument_size_in_bytes == pytest.approx(expected, rel=0.005)
    # Weights are most of it, and not all: the caches are there too.
    assert expected > 8e9


@EACH
def test_temporaries_are_small(case):
    assert built(case).step.memory_analysis().temp_size_in_bytes < 4 * 2**30


@EACH
def test_no_loop_writes_a_share_of_a_cache_or_of_the_experts(case):
    """An eighth of a layer, that is; what XLA updates in place is no write of `loop_writes`."""
    of_device = SLOTS // (8 if case.cache == "slots" else 1)
    cache_layer = case.batch * of_device * (512 + 64) * 2
    draft_cache = case.batch * SLOTS * 2 * (64 // 8) * 128 * 2  # read, and copied, by blocks
    experts_layer = 384 // 8 * 3 * 2048 * 7168 // 2
    words = ({2048, 7168 // 8}, {7168, 2048 // 8}, {2048, 7168})  # packed, packed, unpacked
    writes = loop_writes(str(built(case).step.as_text()))
    assert writes
    for write in writes:
        holds_slots = any(size % 129 == 0 for size in write.shape)
        holds_experts = any(matrix <= set(write.shape) for matrix in words)
        layer = draft_cache if write.shape[-1:] == (128,) else cache_layer
        assert not (holds_slots and write.num_bytes >= layer / 8), write
        assert not (holds_experts and write.num_bytes >= experts_layer / 8), write


@EACH
def test_few_collectives_a_layer(case):
    """Two with a replicated cache, four with stripes; besides, the embedding's and the logits'."""
    exchanges = [run for run in started(case) if run.is_collective]
    of = {phase: 0.0 for phase in ("propose", "verify", "extend")}
    for run in exchanges:
        of[phase_of(run.scopes)] += run.times  # accept and commit say nothing
    assert PER_LAYER[case.cache] * LAYERS <= of["verify"] <= PER_LAYER[case.cache] * LAYERS + 2
    # A draft's pass: embedding, attention, MLP, logits.
    assert of["propose"] <= 4 * (LEVELS - 1)
    assert of["extend"] <= 4


@EACH
def test_no_weight_is_copied(case):
    """No slice of a stack: XLA's own are of routing tables and of draft caches' blocks."""
    slices = [run for run in started(case) if run.opcode == "dynamic-slice"]
    assert all(run.num_bytes < 2**20 for run in slices if phase_of(run.scopes) == "verify"), slices


@EACH
def test_the_state_is_updated_in_place(case):
    step, state, _ = built(case)
    held = sum(held_bytes(state, MeshConfig(1, 8, case.cache)).values())
    assert step.memory_analysis().alias_size_in_bytes == pytest.approx(held, rel=1e-6)


@EACH
def test_layers_are_counted(case):
    """Mosaic's kernels: one or two of attention in every layer, two of the experts but in one."""
    calls = [run for run in started(case) if run.opcode == "custom-call"]

    def of(name: str) -> float:
        return sum(run.times for run in calls if f"/{name}/" in run.scopes[-1])

    assert of("mla_attention") == LAYERS
    assert of("expert_gate_up") == of("expert_down") == LAYERS - 1
    turns = 16  # at most, of the draft's attention over its cache
    looks = [run.times for run in started(case) if run.opcode == "while"]
    assert sorted(looks) == [2, turns + 1, (LEVELS - 1) * (turns + 1)]


def test_a_full_size_plan():
    """61 layers on 8 H200s, batch 8, 32k tokens of context each."""
    report = plan(PlanConfig(trees=(TreeConfig(3, 4, 16),), batch_size=8))
    assert report.fits
    assert report.agrees
    (step,) = report.steps
    for program in report.programs:
        assert program.compile_s < 600
        assert program.memory.disagreement < 0.005
        assert program.memory.temporaries < 4 * 2**30
        of_verify = sum(one.times for one in program.exchanges if one.phase == "verify")
        assert 2 * 61 <= of_verify <= 2 * 61 + 2
    # 594.2 GB of tensors, an eighth each, and what is replicated: 2.6 % (measured.md).
    assert step.memory.target == pytest.approx(594.2e9 / 8 * 1.03, rel=0.01)
    assert step.memory.draft > report.plain.memory.draft == 0
    assert step.memory.target_cache == 61 * 8 * 32768 * 576 * 2
    assert report.break_even(step) > 1
    found = json.loads(json.dumps(report.to_dict()))
    assert (found["kind"], found["mesh"], found["fits"]) == ("predicted", "1x8", True)


def test_a_sweep_predicts():
    """Accept lengths of a sweep over the steps of a full-size plan, which both trees share."""
    models, config = ModelFlags(), SweepConfig((TreeConfig(1, 1, 2),), (2,))
    flags = SweepFlags(lambda: models, PromptFlags("x"), config)
    measured = report_of(HEADER, log(), "")
    (found,) = predict(flags, MeshConfig(1, 8), measured, Display())
    assert set(found.trees) <= set(measured.accept_length) and found.best in found.trees
    plain = [per_s / speed for per_s, speed in found.trees.values()]
    assert plain == pytest.approx([plain[0]] * len(plain))
    for tree, (_, speed) in found.trees.items():
        assert 1 < speed < measured.accept_length[tree].value
