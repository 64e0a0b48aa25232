"""How a draft's parameters follow their gradient."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxspec.errors import InputError

__all__ = ["OptimizerConfig"]

BETA_1, BETA_2 = 0.9, 0.95
ADAMS_RMS = 0.2
"""Of an update of Adam's at a rate of 1, roughly: Muon's are made so large, and one rate serves
both (arXiv:2502.16982)."""
STACKED = "later."
"""Parameters whose first axis is the layer."""
ONE_INPUT = ("query", "key", "value", "q_b")
"""The first axis is the input, all others the output; elsewhere all but the last are the input."""
PER_HEAD = ("k_up", "v_up")
"""A matrix for each head, which is the first axis."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, with a rate that rises linearly and falls along a cosine.

    Attributes:
      num_batches: of the whole run; the rate has fallen by the last.
      warm_up: batches until the rate is reached.
      clip: the gradient's norm is cut to it.
      accumulate: batches whose mean gradient makes one update.
      name: "muon" moves matrices by their momentum made orthogonal, and head, norms and all else
        by Adam with Nesterov's momentum (https://kellerjordan.github.io/posts/muon/).
      final_rate: where the rate ends, as a share of the highest.
    """

    learning_rate: float = 1e-4
    num_batches: int = 1000
    warm_up: int = 50
    clip: float = 0.5
    weight_decay: float = 0.0
    accumulate: int = 1
    name: Literal["adamw", "muon"] = "adamw"
    final_rate: float = 0.1

    def check(self) -> None:
        """Raises InputError for what cannot be trained with."""
        if min(self.num_batches, self.accumulate) < 1 or self.num_batches % self.accumulate:
            raise InputError(
                f"{self.num_batches} batches, of which {self.accumulate} make an update: the first "
                "is a multiple of the second, and both start at 1"
            )
        if not 0 <= self.warm_up < self.num_batches:
            raise InputError(
                f"warm-up over {self.warm_up} of {self.num_batches} batches: it ends before they do"
            )
        if min(self.learning_rate, self.clip) <= 0 or self.weight_decay < 0:
            raise InputError(
                f"learning rate {self.learning_rate}, clip {self.clip}, weight decay "
                f"{self.weight_decay}: the first two are positive, the last is not negative"
            )
        if not 0 <= self.final_rate <= 1:
            raise InputError(
                f"a final rate of {self.final_rate}: it is a share of the highest, from 0 to 1"
            )

    def make(self, params: Mapping[str, jax.Array]) -> optax.MultiSteps:
        """The optimiser of parameters, by their names, which takes gradients of single batches."""
        updates = self.num_batches // self.accumulate
        rate = optax.warmup_cosine_decay_schedule(
            0.0 if self.warm_up else self.learning_rate,
            self.learning_rate,
            self.warm_up // self.accumulate,
            updates,
            self.learning_rate * self.final_rate,
        )
        if self.name == "muon":
            # What optax declares for it leaves out None, which it takes.
            axes: Any = {name: _axes(name, leaf.ndim) for name, leaf in params.items()}
            moved = muon(
                rate,
                weight_decay=self.weight_decay,
                adam_b1=BETA_1,
                adam_b2=BETA_2,
                muon_weight_dimension_numbers=axes,
                consistent_rms=ADAMS_RMS,
            )
        else:
            moved = optax.adamw(rate, b1=BETA_1, b2=BETA_2, weight_decay=self.weight_decay)
        chain = optax.chain(optax.clip_by_global_norm(self.clip), moved)
        return optax.MultiSteps(chain, self.accumulate)


def _axes(name: str, rank: int) -> MuonDimensionNumbers | None:
    """Which axes are input and output of a parameter's matrix; None of one that is none."""
    first = int(name.startswith(STACKED))
    axes, last = tuple(range(first, rank)), name.rpartition(".")[2]
    if len(axes) < 2 or name == "head" or "norm" in name:
        return None
    if last in PER_HEAD:
        axes = axes[1:]
    elif last in ONE_INPUT:
        return MuonDimensionNumbers(axes[0], axes[1:])
    return MuonDimensionNumbers(axes[:-1], axes[-1])
