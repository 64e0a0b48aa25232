"""What `jaxspec sweep` does once its flags are read; `cli_sweep.py` reads them."""

import contextlib
import dataclasses
import itertools
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxspec.commands import ModelFlags, PromptFlags, load, unread_settings
from jaxspec.config import MeshConfig, TreeConfig
from jaxspec.console import Display
from jaxspec.contracts import ContractError
from jaxspec.doctor_run import check_texts, prompts_within, room_for_prompts
from jaxspec.doctor_texts import Text
from jaxspec.environment import start_jax
from jaxspec.errors import InputError
from jaxspec.plan import plan
from jaxspec.plan_compile import absent_devices
from jaxspec.plan_models import PlanConfig, abstract_models
from jaxspec.plan_report import work_ms
from jaxspec.report import command
from jaxspec.sweep import NO_ENV, measure
from jaxspec.sweep_config import SweepConfig
from jaxspec.sweep_log import SweepLog
from jaxspec.sweep_report import Prediction, SweepReport, report_of
from jaxspec.traffic import StepShape, work_of_step

__all__ = ["SweepFlags", "child", "environments", "predict", "run_sweep"]

OVERHEADS = 0.0, 1.0, 3.0
"""What a step takes besides reading and multiplying, over what that takes in plain decoding: what
`plan` finds for Kimi-K2.5 on eight H200s lies between, and is nearly the same with all trees."""
REFUSED = 2
"""Exit status of a process that refused its input."""
CHILD = "from jaxspec.sweep_run import child; child()"


@dataclasses.dataclass(frozen=True)
class SweepFlags:
    """All of `jaxspec sweep`.

    Attributes:
      models: makes them; called where devices may be touched, which one process at a time can own.
      prompts: none at all are those that ship, for the shipped target.
      context_length: tokens of a text; a longer prompt is cut at its end.
      envs: environment variables to time under, each in a process of its own; none is this one.
      plan: H200s to predict for; None for no prediction.
    """

    models: Callable[[], ModelFlags]
    prompts: PromptFlags
    config: SweepConfig
    context_length: int = 512
    out: Path | None = None
    envs: tuple[Mapping[str, str], ...] = ()
    plan: MeshConfig | None = None
    compile_cache: str | None = None


def environments(settings: Sequence[str]) -> tuple[dict[str, str], ...]:
    """Every combination of settings, each as in `NCCL_PROTO=LL,Simple`; none of no settings.

    Raises:
      InputError: one of another form, or of a name that has come before.
    """
    values: dict[str, list[str]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (equals and re.fullmatch(r"[A-Za-z_]\w*", name)) or name in values:
            raise InputError(
                f"--env {setting!r}: expected NAME=VALUE,VALUE, as in NCCL_PROTO=LL,Simple, and "
                "every name once"
            )
        values[name] = text.split(",")
    if not values:
        return ()
    return tuple(
        dict(zip(values, some, strict=True)) for some in itertools.product(*values.values())
    )


def run_sweep(flags: SweepFlags, display: Display) -> SweepReport:
    """The report of a sweep here, or of one in a process for each environment.

    Raises:
      InputError: a flag, a prompt or a checkpoint cannot be used, or one of the processes failed.
      ContractError: draft and target do not belong together.
    """
    flags.config.check()
    room_for_prompts(flags.context_length, flags.config.max_new_tokens)
    if flags.plan is not None:
        absent_devices(flags.plan)  # before minutes are spent on what cannot be finished
    if flags.envs:
        log = _in_fresh_processes(flags, display)
    else:
        log = _measured(flags, NO_ENV, None, display)
    report = report_of(log.header, log.entries, command())
    if flags.plan is None:
        return report
    return dataclasses.replace(report, predicted=predict(flags, flags.plan, report, display))


def _measured(
    flags: SweepFlags, env: Mapping[str, str], num_rounds: int | None, display: Display
) -> SweepLog:
    """The log of a sweep in this process."""
    models = flags.models()
    room = room_for_prompts(flags.context_length, flags.config.max_new_tokens)
    prompts, _ = prompts_within(models, flags.prompts, room, display)
    if said := unread_settings(prompts):
        display.say(f"{said}: all texts are written alike")
    texts = [Text.of(prompt) for prompt in prompts]
    target, draft = load(models, display)
    assert draft is not None, "checked where flags are read"
    if (claim := models.claim(target)) is not None:
        claim.require(draft.config.boundaries, "sweep")
    check_texts(texts, target)
    return measure(
        target,
        draft,
        texts,
        flags.config,
        out=flags.out,
        env=env,
        num_rounds=num_rounds,
        progress=display.progress,
    )


def _in_fresh_processes(flags: SweepFlags, display: Display) -> SweepLog:
    """The log of a sweep under each environment, there and back: half of the rounds each time.

    This process loads nothing: it would keep devices from the others.
    """
    half = -(-flags.config.rounds // 2)
    turns = [(env, half) for env in flags.envs]
    turns += [(env, flags.config.rounds) for env in reversed(flags.envs)]
    with _log_file(flags) as out:
        alone = dataclasses.replace(flags, out=out, envs=(), plan=None)
        for number, (env, num_rounds) in enumerate(turns, start=1):
            name = " ".join(f"{key}={value}" for key, value in env.items())
            display.say(f"{number} of {len(turns)}: {name}")
            there = {key: value for key, value in (os.environ | dict(env)).items() if value}
            done = subprocess.run(
                [sys.executable, "-c", CHILD],
                input=pickle.dumps((alone, env, num_rounds)),
                stdout=subprocess.PIPE,
                env=there,
                check=False,
            )
            if done.returncode == REFUSED:
                raise InputError(f"under {name}: {done.stdout.decode().strip()}")
            if done.returncode:
                raise InputError(
                    f"under {name} the sweep ended with exit status {done.returncode}; what it "
                    "said stands above"
                )
        return SweepLog.read(out)


@contextlib.contextmanager
def _log_file(flags: SweepFlags) -> Iterator[Path]:
    """--out, or a file for as long as it is needed."""
    if flags.out is not None:
        yield flags.out
        return
    with tempfile.TemporaryDirectory(prefix="jaxspec-sweep-") as folder:
        yield Path(folder) / "sweep.jsonl"


def child() -> None:
    """One process of a sweep under several environments; flags and turn come on stdin.

    What it refuses goes to stdout, and is told by the process that waits for it: once.
    """
    flags, env, num_rounds = pickle.load(sys.stdin.buffer)
    start_jax(flags.compile_cache)
    try:
        with Display() as display:
            _measured(flags, env, num_rounds, display)
    except (InputError, ContractError) as error:
        print(error)
        sys.exit(REFUSED)


def predict(
    flags: SweepFlags, mesh: MeshConfig, report: SweepReport, display: Display
) -> tuple[Prediction, ...]:
    """What the trees would reach on H200s, at each batch size, by `plan`.

    The accept lengths are the measured ones. Which trees are compiled, arithmetic says: for each of
    `OVERHEADS` the one that would be best. The shipped pair stands for Kimi-K2.5, whose configs are
    those that `plan` takes by itself.

    Raises:
      InputError: no CUDA wheels to compile with, or a config that cannot be planned.
    """
    models = flags.models()
    found = []
    for batch_size in flags.config.batch_sizes:
        config = PlanConfig(models.target, models.draft, mesh, batch_size=batch_size)
        config = dataclasses.replace(config, trees=_most_promising(config, report))
        planned = plan(config, display.waiting)
        trees = {
            step.tree: (
                planned.tokens_per_s(step, length),
                length / planned.break_even(step),
            )
            for step in planned.steps
            if step.tree is not None
            for length in (report.accept_length[step.tree].value,)
        }
        context = f"{planned.context_length} tokens of context"
        found.append(Prediction(f"{planned.target}, {context}", str(mesh), batch_size, trees))
    return tuple(found)


def _most_promising(config: PlanConfig, report: SweepReport) -> tuple[TreeConfig, ...]:
    """The trees that may be best, whatever a step takes besides reading and multiplying."""
    target, draft = abstract_models(config)

    def floor_ms(tree: TreeConfig | None) -> float:
        shape = StepShape(tree, config.batch_size, config.context_length)
        work = work_of_step(target, draft, shape)
        return sum(work_ms(part, config.assumed) for part in work.values())

    plain_ms = floor_ms(None)
    trees = {TreeConfig.parse(name): one.value for name, one in report.accept_length.items()}
    floors_ms = {tree: floor_ms(tree) for tree in trees}
    best = [
        max(trees, key=lambda tree: trees[tree] / (floors_ms[tree] + overhead * plain_ms))
        for overhead in OVERHEADS
    ]
    return tuple(dict.fromkeys(best))
