"""A training run: batches, evaluations, checkpoints, and the draft as `generate` takes it.

A run that was killed goes on where its last checkpoint is, and comes to the same parameters, bit
for bit, as one that was not.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.aliases import Progress
from jaxspec.convert.draft_export import write_draft
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.optimizer import OptimizerConfig
from jaxspec.requests import check_seed
from jaxspec.sharding import check_batch
from jaxspec.target import Target
from jaxspec.training import LossConfig, StepReport, Sums, Trainer, TrainState
from jaxspec.training_acceptance import Acceptance, AcceptanceConfig
from jaxspec.training_data import Windows
from jaxspec.training_store import Checkpoints, Evaluation, Metrics

__all__ = ["TrainConfig", "TrainReport", "train"]

FORMAT = "jaxspec-training-1"


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

    def check(self) -> None:
        """Raises InputError for what cannot be trained with."""
        if self.batch_size < 1 or self.evaluate_every < 1:
            raise InputError(
                f"batches of {self.batch_size}, evaluated every {self.evaluate_every}: both start "
                "at 1"
            )
        check_seed(self.seed)
        self.loss.check()
        self.optimizer.check()
        self.acceptance.check()


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
      InputError: too little data, a config that cannot be trained with, a mesh that does not fit,
        or an `out` of another run.
      FloatingPointError: a loss or a gradient that is not finite; the last checkpoint stays.
    """
    config.check()
    if len(learned) < config.batch_size:
        raise InputError(
            f"{len(learned)} windows to learn from, and {config.batch_size} make a batch: give "
            "more text, or a smaller --batch-size or --length"
        )
    mesh = target.numerics.mesh
    if mesh is not None:
        check_batch(mesh, config.batch_size)
    trainer = Trainer(target, draft, config.loss, config.optimizer)
    about = _about(target, draft, learned, held_out, config)
    with Checkpoints(out, about) as checkpoints:
        state, begin = checkpoints.newest(trainer.new_state())
        metrics = Metrics(out / "metrics.jsonl", begin)
        acceptance = Acceptance(target, held_out, config.acceptance, trainer.draft(state))
        total, started = config.optimizer.num_batches, time.perf_counter()
        coming = learned.batches(config.batch_size, config.seed, begin, total)
        for index, (rows, batch) in enumerate(coming, begin):
            state, report = trainer.step(state, batch, index)
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
    """What has to be the same for a run to go on to the same bits: another mesh sums otherwise."""
    mesh = target.numerics.mesh
    return {
        "format": FORMAT,
        "target": target.identity,
        "dtype": target.numerics.dtype,
        "mesh": None if mesh is None else str(mesh),
        "draft": dataclasses.asdict(draft.config) | {"identity": draft.identity},
        "learned": learned.digest,
        "held_out": held_out.digest,
        "config": dataclasses.asdict(config),
    }


def _evaluate(
    batch: int,
    trainer: Trainer,
    state: TrainState,
    held_out: Windows,
    batch_size: int,
    acceptance: Acceptance,
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
