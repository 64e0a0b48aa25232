"""How a draft's parameters follow their gradient."""

import dataclasses

import optax

from jaxspec.errors import InputError

__all__ = ["OptimizerConfig"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW whose rate rises linearly and falls along a cosine to a tenth.

    Attributes:
      num_batches: of the whole run; the rate has fallen by the last.
      warm_up: batches until the rate is reached.
      clip: the gradient's norm is cut to it.
      accumulate: batches whose mean gradient makes one update.
    """

    learning_rate: float = 1e-4
    num_batches: int = 1000
    warm_up: int = 50
    clip: float = 0.5
    weight_decay: float = 0.0
    accumulate: int = 1

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

    def make(self) -> optax.MultiSteps:
        """The optimiser, of gradients of single batches."""
        updates = self.num_batches // self.accumulate
        rate = optax.warmup_cosine_decay_schedule(
            0.0 if self.warm_up else self.learning_rate,
            self.learning_rate,
            self.warm_up // self.accumulate,
            updates,
            self.learning_rate / 10,
        )
        chain = optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=self.weight_decay),
        )
        return optax.MultiSteps(chain, self.accumulate)
