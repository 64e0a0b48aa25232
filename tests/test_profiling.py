"""`profile`: what is attributed to which phase, the sum property, and what is refused."""

import json
import sys

import pytest

from jaxspec import SHIPPED_DRAFT, SHIPPED_PROMPTS, SHIPPED_TARGET, cli
from jaxspec.checkpoint import load_draft, load_target
from jaxspec.config import Numerics, TreeConfig
from jaxspec.errors import InputError
from jaxspec.hlo import module_name, operations
from jaxspec.phases import LOOP, PARTS
from jaxspec.profile_report import CALL, COLLECTIVES, UNKNOWN, PhaseTime
from jaxspec.profile_view import draw, show
from jaxspec.profiling import Attribution, ProfileConfig, _profiler, _ProfilerCost, profile_step
from jaxspec.requests import Request
from jaxspec.tokenizer import load_tokenizer
from jaxspec.trace import Event, profile_files

PROGRAM = """HloModule jit_traced, is_scheduled=true

%layer (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %attend = f32[4]{0} negate(%p), metadata={op_name="jit(traced)/while/body/verify/while/body/attention/neg"}
  %sum = f32[4]{0} all-reduce(%attend), to_apply=%add, metadata={op_name="jit(traced)/while/body/verify/while/body/attention/psum"}
  ROOT %copied = f32[4]{0} copy(%sum)
}

%shared (p: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %draft = f32[4]{0} negate(%p.1), metadata={op_name="jit(traced)/while/body/extend/while/body/neg"}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %layers = f32[4]{0} while(%a), condition=%layer, body=%layer, metadata={op_name="jit(traced)/while/body/verify/while"}
  %levels = f32[4]{0} while(%layers), condition=%shared, body=%shared, metadata={op_name="jit(traced)/while/body/propose/levels/while"}
  %blocks = f32[4]{0} while(%levels), condition=%shared, body=%shared, metadata={op_name="jit(traced)/while/body/extend/while"}
  ROOT %count = f32[4]{0} negate(%blocks), metadata={op_name="jit(traced)/while/body/add"}
}
"""  # noqa: E501
"""A layer with a collective and a copy of the compiler's own; two loops that share a body."""

EVENTS = [
    Event(0, 6000, "layers"),
    Event(1000, 3000, "attend"),
    Event(3000, 4000, "sum"),
    Event(4500, 6000, "copied"),
    Event(6000, 7000, "draft"),
    Event(7000, 7500, "count"),
    Event(7500, 8000, "no instruction of the program"),
]
"""Of one call of two steps."""


def test_every_moment_has_a_phase():
    found = Attribution({"CPU 0": EVENTS}, operations(PROGRAM))
    phases = found.phases(call_ms=0.010, num_steps=2, cost_us=0.0)
    assert phases == {
        "verify/attention": PhaseTime(1.5e-3, 0.5e-3, 0.5),  # the wait for the first is its own
        "verify/rest": PhaseTime(1e-3, 0.25e-3, 1.0),  # the copy, and the loop around
        COLLECTIVES: PhaseTime(0.5e-3, 0, 0.5),
        LOOP: PhaseTime(0.25e-3, 0, 0.5),
        UNKNOWN: PhaseTime(0.75e-3, 0, 1.0),  # of two phases' loops, and what nobody knows
        CALL: PhaseTime(1e-3, 1e-3, 0),
    }
    assert sum(phase.ms for phase in phases.values()) == pytest.approx(0.010 / 2)
    (exchange,) = found.exchanges(2, 0.0)
    assert (exchange.phase, exchange.opcode, exchange.num_bytes) == ("verify", "all-reduce", 16)
    assert (exchange.times, exchange.ms) == (0.5, 0.5e-3)
    assert found.tracks()["CPU 0"] == [
        (0, 3000, "verify/attention"),
        (3000, 4000, COLLECTIVES),
        (4000, 6000, "verify/rest"),
        (6000, 7000, UNKNOWN),
        (7000, 7500, LOOP),
        (7500, 8000, UNKNOWN),
    ]


def test_what_the_profiler_adds_is_taken_off_for_each_operation():
    found = Attribution({"CPU 0": EVENTS}, operations(PROGRAM))
    with_it, without = (found.phases(0.010, 2, cost_us) for cost_us in (0.0, 0.1))
    for name, phase in without.items():
        taken = with_it[name].ms - phase.ms
        assert taken == pytest.approx(0.1e-3 * phase.operations), name
    assert all(phase.ms == 0 for name, phase in found.phases(0, 2, 9.0).items() if name != CALL)


def test_what_the_profiler_adds_is_of_operations_that_it_saw(tmp_path, monkeypatch):
    monkeypatch.setattr(_ProfilerCost, "OPERATIONS", 3)
    adds = _ProfilerCost()
    adds.run(is_traced=False)
    with _profiler(tmp_path):
        adds.run(is_traced=True)
    xplane, _ = profile_files(tmp_path)
    small = module_name(str(adds._program.as_text()))
    adds._fastest_ms = {False: 1.0, True: 1.12}  # 120 operations
    assert adds.us(xplane, small) == pytest.approx(1.0)
    adds.OPERATIONS = 4  # as if the compiler had made three of four
    with pytest.raises(InputError, match=r"runs the 160 operations .* as 120: it cannot"):
        adds.us(xplane, small)


def test_several_devices_are_averaged():
    longer = EVENTS[-1]._replace(end_ns=9000)
    events = {"CPU 0": EVENTS, "CPU 1": [*EVENTS[:-1], longer]}
    both = Attribution(events, operations(PROGRAM)).phases(0.010, 2, 0.0)
    assert both[UNKNOWN].ms == pytest.approx(1e-3) and both[LOOP].operations == 0.5
    assert both[CALL].ms == pytest.approx(0.75e-3)
    with pytest.raises(InputError, match="saw no operation"):
        Attribution({}, operations(PROGRAM))


@pytest.fixture(scope="module")
def shipped():
    numerics = Numerics(dtype="float32")
    target = load_target(SHIPPED_TARGET, numerics)
    text = json.loads(SHIPPED_PROMPTS.read_text().splitlines()[0])["prompt"]
    request = Request(tuple(load_tokenizer(SHIPPED_TARGET).encode(text)))
    return target, load_draft(SHIPPED_DRAFT, numerics, target=target), request


@pytest.fixture(scope="module")
def report(shipped, tmp_path_factory):
    """Of the pair that ships, one call each: what there is, and not how long it took."""
    target, draft, request = shipped
    trace = tmp_path_factory.mktemp("profile") / "trace"
    config = ProfileConfig((TreeConfig(3, 1, 4),), num_steps=2, repeats=1, trace=trace)
    return profile_step(target, draft, [request], config), trace


def test_the_real_program_is_attributed(report):
    found, trace = report
    (step,) = found.steps
    expected = {part for part in PARTS if part != "propose/rest"} | {CALL}
    assert expected <= set(step.phases) <= expected | {"propose/rest", UNKNOWN}
    # Whatever the compiler names after no phase of the step is little.
    unknown = step.phases.get(UNKNOWN, PhaseTime(0, 0, 0)).operations
    assert unknown < 0.02 * sum(phase.operations for phase in step.phases.values())
    # One layer is dense; a mixture of experts is more work than it in all others.
    assert step.phases["verify/experts"].operations > step.phases["verify/dense"].operations > 0
    told = json.loads(json.dumps(found.to_dict()))
    assert told["kind"] == "measured" and told["batch_size"] == 1 and told["num_steps"] == 2
    (one,) = told["steps"]
    assert sum(phase["share"] for phase in one["phases"].values()) == pytest.approx(1)
    assert one["sum_ms"] == pytest.approx(sum(phase["ms"] for phase in one["phases"].values()))
    assert one["disagreement"] == pytest.approx(one["sum_ms"] / one["step_ms"] - 1)
    assert one["agrees"] is (abs(one["disagreement"]) <= 0.1) is told["agrees"]
    assert sorted(path.suffix for path in (trace / "plugins/profile/tree-3x1x4").iterdir()) == [
        ".gz",
        ".pb",
    ]


def test_it_is_shown(report, tmp_path, capsys):
    from rich.console import Console

    found, _ = report
    show(found, Console(width=160))
    out = capsys.readouterr().out
    (step,) = found.steps
    assert out.startswith(f"tree 3x1x4: verify {step.of_phase('verify') / step.sum_ms:.0%}")
    assert f" of {step.sum_ms:.3f} ms; the whole step: {step.step_ms:.3f} ms" in out
    for said in ("measured: ", "experts", "whole step, no profiler", "JAX's profiler", "machine: "):
        assert said in out
    draw(found, tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert "verify/experts" in text and "whole step, no profiler" in text


def test_steps_have_to_fit(target, draft):
    config = ProfileConfig((TreeConfig(3, 1, 4),), 32, num_steps=8)
    with pytest.raises(InputError, match=r"prompt 0: 3 tokens and 8 steps of up to 32 tokens"):
        profile_step(target, draft, [Request((1, 2, 3))], config)
    with pytest.raises(InputError, match="one of the two is missing"):
        profile_step(target, None, [Request((1, 2, 3))], config)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("x", "--plot", "nowhere/p.png"), "there is no directory nowhere"),
        (("x", "--plot", "p.txt"), "--plot p.txt: expected a file that ends in"),
        (("x", "--trace", "file/deep"), "--trace file/deep: cannot be written"),
        (("x", "--trace", "old"), "--trace old: there is a profile already"),
        (("x", "--tree", "3x1x4", "--tree", "3x1x4"), "the same tree twice"),
        (("x", "--tree", "3x1"), "3x1"),
        (("x", "--draft", "none", "--tree", "3x1x4"), "there is no tree to give a shape to"),
        (("x", "--steps", "0"), "num_steps (--steps) is 0"),
        (("x", "--repeats", "0"), "repeats is 0"),
        (("x", "--batch-size", "2"), "--batch-size 2 and 1 prompts"),
        (("--batch-size", "0"), "--batch-size is 0"),
        (("--target", "t", "--draft", "d"), "no prompt"),
        (("x", "--temperature", "-1"), "temperature is -1"),
        (("x", "--implementation", "triton"), "--implementation is 'triton'"),
        (("x", "--cache", "slots"), "--cache slots is of a mesh"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "old" / "plugins" / "profile" / "tree-3x1x4").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["jaxspec", "profile", *args, "--compile-cache", "none"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxspec: ") and message in err, err
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["3x1x4", "3x4x16", "6x2x12"])
def test_the_sum_is_the_whole_step(shipped, tree):
    """Issue 7's property, with the pair that ships. What disturbs a machine only makes it miss."""
    target, draft, request = shipped
    config, found = ProfileConfig((TreeConfig.parse(tree),), repeats=10), []
    for _ in range(6):
        report = profile_step(target, draft, [request], config)
        found.append(report.steps[0])
        if report.agrees:
            break
    assert found[-1].agrees, [(one.sum_ms, one.step_ms, one.has_settled) for one in found]
