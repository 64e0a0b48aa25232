"""A training run: batches, evaluations, checkpoints, and the draft as `generate` takes it.

A run that was killed goes on where its last checkpoint is, and comes to the same parameters, bit
for bit, as one that was not.
"""

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.aliases import Progress
from jaxspec.ceiling import accept_ceiling
from jaxspec.config import TreeConfig
from jaxspec.convert.export import write_draft
from jaxspec.convert.manifest import write_whole
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.figures import accept_per_depth, ratio
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.requests import Request
from jaxspec.target import Target
from jaxspec.training import (
    LossConfig,
    OptimizerConfig,
    StepReport,
    Sums,
    Trainer,
    TrainState,
)
from jaxspec.training_data import Windows

__all__ = ["AcceptanceConfig", "TrainConfig", "TrainReport", "train"]

FORMAT = "jaxspec-training-1"
CHECKPOINTS_KEPT = 2
CHAIN = TreeConfig(3, 1, 4)


@dataclasses.dataclass(frozen=True)
class AcceptanceConfig:
    """How acceptance is measured at each evaluation, on held-out prompts, through the real step.

    Attributes:
      num_prompts: the first held-out windows; 0 measures none.
      prompt_len: tokens of each window that are the prompt; of a short one, half of it.
    """

    num_prompts: int = 16
    prompt_len: int = 64
    max_new_tokens: int = 64
    temperature: float = 0.8
    tree: TreeConfig = CHAIN


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All that decides what a run comes to, besides models and data.

    Attributes:
      evaluate_every: batches between two evaluations; each ends with a checkpoint.
    """

    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    batch_size: int = 4
    seed: int = 0
    evaluate_every: int = 200
    acceptance: AcceptanceConfig = dataclasses.field(default_factory=AcceptanceConfig)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The draft on held-out data after so many batches.

    Attributes:
      loss, accuracy: per step of the training-time test; accuracy is how often the draft's
        likeliest token is the target's likeliest of all.
      accept_length, accept_per_depth, accept_ceiling: as `generate` gives them; None where
        acceptance was not measured.
    """

    batch: int
    loss: list[float | None]
    accuracy: list[float | None]
    accept_length: float | None = None
    accept_per_depth: list[float | None] | None = None
    accept_ceiling: float | None = None

    def summary(self) -> str:
        """One line."""
        accuracy = " ".join("-" if a is None else f"{a:.3f}" for a in self.accuracy)
        line = f"after {self.batch} batches: held-out loss {self.loss[0]:.3f}, accuracy {accuracy}"
        if self.accept_length is None:
            return line
        return (
            f"{line}, accept_length {self.accept_length:.3f} of at most {self.accept_ceiling:.3f}"
        )


@dataclasses.dataclass(frozen=True)
class TrainReport:
    """What a run came to.

    Attributes:
      resumed_at: batches that an earlier, interrupted run had done.
    """

    draft: Path
    metrics: Path
    num_batches: int
    resumed_at: int
    evaluations: tuple[Evaluation, ...]
    device: str
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        paths = {"draft": str(self.draft), "metrics": str(self.metrics)}
        return dataclasses.asdict(self) | paths | {"jax_version": jax.__version__}


def train(
    target: Target,
    draft: Draft,
    learned: Windows,
    held_out: Windows,
    config: TrainConfig,
    out: Path,
    progress: Progress | None = None,
    say: Any = None,
) -> TrainReport:
    """The report of training `draft`, in f32, on what `target` says of texts.

    `out` gets `draft/`, in SpecForge's layout, which `generate` takes; `metrics.jsonl`;
    `checkpoints/`; and `run.json`, by which a run that is given the same again goes on.

    Args:
      progress: called with "training", and how many of how many batches are done.
      say: called with a line after each evaluation.

    Raises:
      InputError: too little data, a config that cannot be trained with, or an `out` of another run.
      FloatingPointError: a loss or a gradient that is not finite; the last checkpoint stays.
    """
    if config.batch_size < 1 or config.evaluate_every < 1:
        raise InputError(
            f"batches of {config.batch_size}, evaluated every {config.evaluate_every}: both start "
            "at 1"
        )
    if len(learned) < config.batch_size:
        raise InputError(
            f"{len(learned)} windows to learn from, and {config.batch_size} make a batch: give "
            "more text, or a smaller --batch-size or --length"
        )
    trainer = Trainer(target, draft, config.loss, config.optimizer)
    about = _about(target, draft, learned, held_out, config)
    with _Checkpoints(out, about) as checkpoints:
        state, begin = checkpoints.newest(trainer.new_state())
        metrics = _Metrics(out / "metrics.jsonl", begin)
        acceptance = _Acceptance(target, held_out, config.acceptance, trainer.draft(state))
        total, started = config.optimizer.num_batches, time.perf_counter()
        for index in range(begin, total):
            rows = learned.rows_of(index, config.batch_size, config.seed)
            state, report = trainer.step(state, learned.batch(rows))
            if not report.is_finite:
                raise FloatingPointError(_what_failed(index + 1, report, learned, rows, out))
            metrics.add(index + 1, report, time.perf_counter() - started)
            if progress is not None:
                progress("training", index + 1, total)
            if (index + 1) % config.evaluate_every and index + 1 < total:
                continue
            found = _evaluate(index + 1, trainer, state, held_out, config.batch_size, acceptance)
            metrics.add_evaluation(found)
            if say is not None:
                say(found.summary())
            # The checkpoint comes last: what is older than it is never done again.
            write_draft(trainer.values(state), draft.config, out / "draft")
            checkpoints.save(index + 1, state)
    return TrainReport(
        out / "draft",
        metrics.path,
        total,
        begin,
        tuple(metrics.evaluations),
        jax.devices()[0].device_kind,
        target.numerics.dtype,
    )


def _about(
    target: Target, draft: Draft, learned: Windows, held_out: Windows, config: TrainConfig
) -> dict[str, Any]:
    """What has to be the same for a run to go on."""
    return {
        "format": FORMAT,
        "target": target.identity,
        "dtype": target.numerics.dtype,
        "draft": dataclasses.asdict(draft.config) | {"identity": draft.identity},
        "learned": learned.digest,
        "held_out": held_out.digest,
        "config": dataclasses.asdict(config),
    }


class _Checkpoints:
    """The states of a run on disk, by Orbax, which writes each whole or not at all."""

    def __init__(self, out: Path, about: dict[str, Any]) -> None:
        """Raises InputError where `out` is of another run, or cannot be."""
        about = json.loads(json.dumps(about))
        path = out / "run.json"
        try:
            if path.is_file():
                _check_same(path, json.loads(path.read_text("utf-8")), about)
            elif out.exists() and any(out.iterdir()):
                raise InputError(f"--out {out}: not empty, and no training run")
            else:
                out.mkdir(parents=True, exist_ok=True)
                write_whole(path, about)
        except (OSError, ValueError) as error:
            raise InputError(f"--out {out}: cannot be used ({error})") from error
        self._manager = ocp.CheckpointManager(
            (out / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=CHECKPOINTS_KEPT, enable_async_checkpointing=False
            ),
        )
        self._out = out

    def __enter__(self) -> "_Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def newest(self, fresh: TrainState) -> tuple[TrainState, int]:
        """The newest state and the batches it has seen; the fresh one and 0 where there is none."""
        step = self._manager.latest_step()
        if step is None:
            return fresh, 0
        leaves, structure = jax.tree.flatten(fresh)
        wanted = {str(index): leaf for index, leaf in enumerate(leaves)}
        found = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        return jax.tree.unflatten(structure, [found[name] for name in wanted]), step

    def save(self, step: int, state: TrainState) -> None:
        """Keeps a state.

        Raises:
          InputError: there is no room for it; the states before it stay.
        """
        leaves = {str(index): leaf for index, leaf in enumerate(jax.tree.leaves(state))}
        num_bytes = sum(leaf.nbytes for leaf in leaves.values())
        if shutil.disk_usage(self._out).free < num_bytes + 2**20:
            raise InputError(
                f"--out {self._out}: no room for a checkpoint of {num_bytes / 1e9:.3f} GB; the "
                "earlier ones are kept, and the same command goes on from there"
            )
        self._manager.save(step, args=ocp.args.StandardSave(leaves))


def _check_same(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises InputError where a directory's run is another one."""
    both = [dict(_flat(one)) for one in (found, wanted)]
    differing = [name for name in both[1] if both[0].get(name) != both[1][name]]
    if differing:
        name = differing[0]
        raise InputError(
            f"{path}: of another run, whose {name} is {both[0].get(name)!r} where this one's is "
            f"{both[1][name]!r}; give another --out, or the same flags and files"
        )


def _flat(value: Any, name: str = "") -> Any:
    """(name, value) of all that is no object, as in ("config.loss.num_steps", 7)."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}" if name else key)


class _Metrics:
    """`metrics.jsonl`: a line for every batch, and one for every evaluation."""

    def __init__(self, path: Path, num_done: int) -> None:
        """Of a new file, or of one whose lines after `num_done` batches are to be written again."""
        self.path, self.evaluations = path, []
        kept = []
        for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                break  # the last one, cut off
            if entry["batch"] > num_done:
                break
            kept.append(line)
            if "accuracy" in entry:
                self.evaluations.append(Evaluation(**entry))
        path.write_text("".join(f"{line}\n" for line in kept), "utf-8")

    def add(self, batch: int, report: StepReport, seconds: float) -> None:
        self._append(
            {
                "batch": batch,
                "loss": report.sums.mean("loss"),
                "gradient_norm": float(report.gradient_norm),
                "seconds": round(seconds, 2),
            }
        )

    def add_evaluation(self, found: Evaluation) -> None:
        self.evaluations.append(found)
        self._append(dataclasses.asdict(found))

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class _Acceptance:
    """What the real step accepts of a draft, over the same prompts each time.

    Sampled tokens depend on the target alone, so that the texts, and their ceiling, stay.
    """

    def __init__(
        self, target: Target, held_out: Windows, config: AcceptanceConfig, draft: Draft
    ) -> None:
        self._target, self._config = target, config
        self._requests = _requests(held_out, config)
        self._ceiling: float | None = None
        if not self._requests:
            return
        slots = min(
            config.prompt_len + config.max_new_tokens + config.tree.nodes,
            target.config.max_position_embeddings,
        )
        self._generator = Generator(
            target,
            draft,
            GenerateConfig(
                config.tree,
                config.max_new_tokens,
                slots,
                batch_size=min(8, len(self._requests)),
                ignore_eos=True,
            ),
        )

    def measure(self, draft: Draft) -> dict[str, Any]:
        """The figures of an evaluation; none where there are no prompts."""
        if not self._requests:
            return {}
        self._generator.use(draft)
        done = self._generator.run(self._requests).completions
        accepted = [count for one in done for count in one.accepted]
        levels = self._config.tree.levels
        if self._ceiling is None:
            texts = [one.tokens for one in done]
            ceiling = accept_ceiling(self._target, self._requests, texts, self._config.tree)
            self._ceiling = ceiling.accept_length
        num_decoded = sum(len(one.tokens) - 1 for one in done)  # all but prefill's
        return {
            "accept_length": ratio(num_decoded, len(accepted)),
            "accept_per_depth": list(accept_per_depth(accepted, levels)),
            "accept_ceiling": self._ceiling,
        }


def _requests(held_out: Windows, config: AcceptanceConfig) -> list[Request]:
    rows = range(min(config.num_prompts, len(held_out)))
    prompts = [
        held_out.tokens[row, : min(config.prompt_len, held_out.lengths[row] // 2)] for row in rows
    ]
    return [
        Request(tuple(ids.tolist()), temperature=config.temperature, seed=seed)
        for seed, ids in enumerate(prompts)
    ]


def _evaluate(
    batch: int,
    trainer: Trainer,
    state: TrainState,
    held_out: Windows,
    batch_size: int,
    acceptance: _Acceptance,
) -> Evaluation:
    parts = [trainer.sums(state, one) for one in held_out.in_order(batch_size)]
    sums: Sums = jax.tree.map(lambda *of: np.concatenate(of, axis=1), *parts)
    measured = acceptance.measure(trainer.draft(state))
    return Evaluation(batch, sums.mean("loss"), sums.mean("num_right"), **measured)


def _what_failed(
    batch: int, report: StepReport, learned: Windows, rows: np.ndarray, out: Path
) -> str:
    """Where a loss or gradient stopped being finite."""
    per_row = np.asarray(report.sums.loss).sum(0)
    bad = [learned.where[row] for row, loss in zip(rows, per_row, strict=True) if loss - loss != 0]
    largest = {name: float(value) for name, value in report.largest.items()}
    name = max(largest, key=lambda one: np.nan_to_num(largest[one], nan=np.inf, posinf=np.inf))
    samples = ", ".join(bad) if bad else "every sample's own loss is finite"
    return (
        f"training stopped at batch {batch}: the loss is {float(report.loss)}\n"
        f"  samples whose loss is not finite: {samples}\n"
        f"  largest gradient: {largest[name]} in {name}\n"
        f"  {out / 'checkpoints'} keeps the states before; a lower --learning-rate, or other data, "
        "is another run, with another --out"
    )
