"""What a training run keeps on disk: states, by which it goes on, and what it measured."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxspec.convert.manifest import write_whole
from jaxspec.errors import InputError
from jaxspec.training import StepReport, TrainState

__all__ = ["Checkpoints", "Evaluation", "Metrics"]

CHECKPOINTS_KEPT = 2
ROOM_FOR_METADATA = 2**20


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


class Checkpoints:
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
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"--out {out}: cannot be used ({error})") from error
        self._manager = ocp.CheckpointManager(
            (out / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=CHECKPOINTS_KEPT, enable_async_checkpointing=False
            ),
        )
        self._out = out

    def __enter__(self) -> "Checkpoints":
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
        with _told(self._out, (OSError, ValueError)):  # TensorStore's of the system are ValueErrors
            if shutil.disk_usage(self._out).free < num_bytes + ROOM_FOR_METADATA:
                text = f"no room for a checkpoint of {num_bytes / 1e9:.3f} GB"
                raise OSError(errno.ENOSPC, text)
            self._manager.save(step, args=ocp.args.StandardSave(leaves))


@contextlib.contextmanager
def _told(out: Path, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raises InputError where what is written in it cannot be, as on a full disk."""
    try:
        yield
    except errors as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"--out {out}: cannot be written ({reason}); the last checkpoint is kept, and the same "
            "command goes on from there once there is room"
        ) from error


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


class Metrics:
    """`metrics.jsonl`: a line for every batch, and one for every evaluation.

    Its methods raise InputError where it cannot be written.
    """

    def __init__(self, path: Path, num_done: int) -> None:
        """Of a new file, or of one whose lines after `num_done` batches are to be written again."""
        self.path, self.evaluations = path, []
        with _told(path.parent):
            lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
            num_bytes = 0
            for line in lines:
                try:
                    entry = json.loads(line)
                except ValueError:
                    break  # the last one, cut off
                if entry["batch"] > num_done or not line.endswith(b"\n"):
                    break
                num_bytes += len(line)
                if "accuracy" in entry:
                    self.evaluations.append(Evaluation(**entry))
            if lines:  # shortened where it is: writing it again would take room
                os.truncate(path, num_bytes)

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
        with _told(self.path.parent), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
