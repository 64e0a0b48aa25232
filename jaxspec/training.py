"""EAGLE-3's training-time test: the draft learns from its own hidden states, as it will draft.

Row i pairs the features of position i with token i + 1 and learns what the target says after that
token. In each later step every row goes on from its own hidden state, one position further, with
the true token there; it sees the rows of the first step up to its own (a causal block) and its own
row of each step between (one diagonal each). So the draft meets its own errors while it is trained
(arXiv:2503.01840, section 3.2).
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import DraftCache, joined
from jaxspec.collectives import over_groups, share, whole_gradient
from jaxspec.contracts import Boundaries, Features, TargetIds
from jaxspec.dims import typed
from jaxspec.draft import Borrowed, Draft
from jaxspec.errors import InputError
from jaxspec.layers import full_f32
from jaxspec.mla import Pass
from jaxspec.optimizer import OptimizerConfig
from jaxspec.sharding import devices_of, specs_of
from jaxspec.target import Target

__all__ = [
    "Batch",
    "LossConfig",
    "StepReport",
    "Sums",
    "TrainState",
    "Trainer",
    "draft_loss",
    "see",
    "state_cuts",
    "unroll",
]

Labels = Literal["covered", "within"]
FROZEN = "embed"
"""An embedding of the draft's own stays as it is, as SpecForge and speculators leave theirs."""
OF_ROWS = P(None, "data")
"""How `Sums` lie on a mesh."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is asked of the draft.

    Attributes:
      num_steps: of the training-time test.
      step_weight: what a step counts, over the one before it.
      labels: the target's probabilities of the draft's vocabulary. "covered" takes them as they
        are, so that a position counts as much as the draft can cover of it; "within" makes them sum
        to 1, as speculators does. Over the full vocabulary they are the same.
      one_step_batches: so many batches at first take one step only, at a fraction of the cost.
    """

    num_steps: int = 7
    step_weight: float = 0.8
    labels: Labels = "covered"
    one_step_batches: int = 0

    def check(self) -> None:
        """Raises InputError for what cannot be trained with."""
        if self.num_steps < 1 or not 0 < self.step_weight <= 1:
            raise InputError(
                f"{self.num_steps} steps of weight {self.step_weight}; steps start at 1, and a "
                "step's weight over the one before lies above 0, at most at 1"
            )
        if self.one_step_batches < 0:
            raise InputError(f"{self.one_step_batches} batches of one step at first: 0 is none")

    def at(self, index: int) -> "LossConfig":
        """What is asked in a batch, counted from 0."""
        return dataclasses.replace(self, num_steps=1) if index < self.one_step_batches else self


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "is_learned", "features", "hidden"],
    meta_fields=["is_normed"],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """Some sequences, and what was recorded of them.

    Attributes:
      tokens: [B,T] int32, anything past the lengths.
      lengths: [B] int32.
      is_learned: [B,T] whether what the target says after this token is learned.
      features, hidden: the boundaries that the draft reads, and the last one [B,T,D], before the
        final norm; None where the target is to compute them.
      is_normed: `hidden` lies after the final norm.
    """

    tokens: Any
    lengths: Any
    is_learned: Any
    features: Features | None = None
    hidden: Any = None
    is_normed: bool = False


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["loss", "num_right", "count"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the positions that count, [steps, B] each.

    Attributes:
      loss: cross-entropy in nats.
      num_right: positions whose likeliest draft token is the target's likeliest of all.
      count: positions.
    """

    loss: Any
    num_right: Any
    count: Any

    def mean(self, name: Literal["loss", "num_right"]) -> list[float | None]:
        """Per position, step by step; None where no position counts."""
        totals, counts = np.asarray(getattr(self, name)).sum(1), np.asarray(self.count).sum(1)
        return [float(t) / float(n) if n else None for t, n in zip(totals, counts, strict=True)]


@typed
def _ahead(x_BT: Array, by: int) -> Array:
    """What stands `by` positions further; zeros past the end. Further axes come along."""
    width = [(0, 0), (0, by)] + [(0, 0)] * (x_BT.ndim - 2)
    return jnp.pad(x_BT[:, by:], width)


@full_f32
@typed
def draft_loss(
    draft: Draft,
    borrowed: Borrowed,
    features: Features,
    tokens_BT: Int[Array, "B T"],
    logits_BTV: Float[Array, "B T V"],
    is_learned_BT: Bool[Array, "B T"],
    config: LossConfig,
) -> tuple[Float[Array, ""], Sums]:
    """The weighted loss, and its parts.

    Of each step it is the mean over the positions that count in the whole batch: on a mesh, that
    of all groups, on every device, while the parts are of this group's sequences.

    Args:
      logits_BTV: the target's; no gradient goes there.
      is_learned_BT: whether the target's distribution at a position is learned.

    Raises:
      ContractError: these are not the features that the draft is for.
    """
    probs_BTU = _labels(logits_BTV, draft.vocab_map.targets, config.labels)
    best_BT = jnp.argmax(logits_BTV, axis=-1)
    parts = []
    guesses = unroll(draft, borrowed, features, tokens_BT, config.num_steps)
    for step, logits_BTU in enumerate(guesses):
        counts_BT = _ahead(is_learned_BT, step + 1)
        log_BTU = jax.nn.log_softmax(logits_BTU)
        loss_BT = -jnp.sum(_ahead(probs_BTU, step + 1) * log_BTU, axis=-1)
        guess_BT = draft.vocab_map.targets[jnp.argmax(logits_BTU, axis=-1)]
        is_right_BT = (guess_BT == _ahead(best_BT, step + 1)) & counts_BT
        loss_B = jnp.where(counts_BT, loss_BT, 0.0).sum(1)
        parts.append(Sums(loss_B, is_right_BT.sum(1), counts_BT.sum(1)))
    sums = jax.tree.map(lambda *of_steps: jnp.stack(of_steps), *parts)
    # [2, steps]: of each step, the loss and the positions of all groups of a mesh.
    both = jnp.stack([sums.loss.sum(1), sums.count.sum(1).astype(jnp.float32)])
    loss, count = over_groups(both, draft.numerics.mesh)
    weight = jnp.asarray(config.step_weight ** np.arange(config.num_steps), jnp.float32)
    return jnp.sum(weight * loss / jnp.maximum(count, 1.0)), sums


@typed
def unroll(
    draft: Draft,
    borrowed: Borrowed,
    features: Features,
    tokens_BT: Int[Array, "B T"],
    num_steps: int,
) -> Iterator[Float[Array, "B T U"]]:
    """The draft's logits in every step of the training-time test.

    Row i of step s, counted from 0, has seen the true tokens up to i + s + 1 and says what follows
    them; the last s + 1 rows have none to see.

    Raises:
      ContractError: these are not the features that the draft is for.
    """
    batch, length = tokens_BT.shape
    pos_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    sees_TT, diagonal_TT = jnp.tri(length, dtype=bool), jnp.eye(length, dtype=bool)
    nothing_B, cache = jnp.zeros(batch, jnp.int32), draft.empty_cache(batch, 0)
    hidden: jax.Array | None = None
    earlier: DraftCache | None = None
    for step in range(num_steps):
        tokens = TargetIds(_ahead(tokens_BT, step + 1), draft.config.vocab_size)
        sees_BTT = jnp.broadcast_to(sees_TT, (batch, *sees_TT.shape))
        at = Pass(pos_BT + step, nothing_B, sees_BTT)
        if hidden is None:
            done = draft.fuse(features, tokens, at, cache, borrowed)
        else:
            assert earlier is not None
            done = draft.recur(hidden, tokens, at, cache, earlier, borrowed)
        yield draft.logits(done.recurrent, borrowed)
        hidden = done.recurrent
        earlier = done.rows if earlier is None else joined(earlier, done.rows)
        sees_TT = jnp.concatenate([sees_TT, diagonal_TT], axis=1)


def _labels(logits_BTV: jax.Array, targets_U: jax.Array, labels: Labels) -> jax.Array:
    """The target's probabilities [B,T,U] of the draft's vocabulary."""
    logits_BTV = jax.lax.stop_gradient(logits_BTV)
    if labels == "within":
        return jax.nn.softmax(logits_BTV[:, :, targets_U])
    return jax.nn.softmax(logits_BTV)[:, :, targets_U]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["trained", "optimizer"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What training changes, f32.

    Attributes:
      trained: parameters by path, as in `attention.query`.
      optimizer: optax's state.
    """

    trained: dict[str, jax.Array]
    optimizer: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss", "sums", "gradient_norm", "largest"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class StepReport:
    """What a step on one batch found.

    Attributes:
      largest: the largest absolute value in each parameter's gradient.
    """

    loss: Any
    sums: Sums
    gradient_norm: Any
    largest: dict[str, Any]

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.loss) and np.isfinite(self.gradient_norm))


class Trainer:
    """A draft that learns from a target, one compiled step for every batch of a shape.

    Parameters and optimiser are f32; both models are computed in the target's dtype. On a mesh,
    loss and gradient are one `shard_map`, as a step of generation is; the optimiser lies as its
    parameters do, and what it needs of other devices, such as a norm, is left to XLA's partitioner.
    """

    def __init__(
        self, target: Target, draft: Draft, loss: LossConfig, optimizer: OptimizerConfig
    ) -> None:
        """Args:
          draft: in f32, on the target's mesh. Its numerics' implementation is left alone: plain
            XLA has a gradient.

        Raises:
          InputError: a config that cannot be trained with, or a mesh that does not fit.
        """
        loss.check()
        optimizer.check()
        self._devices = devices_of(target, draft, None)
        self.capture: Boundaries = target.asked_for(draft.config.boundaries)
        # Contract errors before anything is compiled.
        self.capture.require(draft.config.boundaries, "train-draft")
        self.loss = loss
        dtype = target.numerics.jnp_dtype
        _, state = nnx.split(draft)
        self._variables = dict(nnx.to_flat_state(state))
        numerics = dataclasses.replace(target.numerics, implementation="xla")
        self._graph = nnx.split(
            nnx.eval_shape(lambda: Draft(draft.config, numerics, nnx.Rngs(0), draft.identity))
        )[0]
        values = {
            ".".join(map(str, path)): leaf.get_value() for path, leaf in self._variables.items()
        }
        is_trained = {
            name: name != FROZEN and jnp.issubdtype(value.dtype, jnp.floating)
            for name, value in values.items()
        }
        self._start = {n: v.astype(jnp.float32) for n, v in values.items() if is_trained[n]}
        self._optimizer = optimizer.make(self._start)
        self._fixed = {
            n: v.astype(dtype) if n == FROZEN else v for n, v in values.items() if not is_trained[n]
        }
        self._target_graph, self._target = nnx.split(target)
        self._dtype = dtype
        where, self._given, self._cuts = None, (), {}
        if (devices := self._devices) is not None:
            models = self._start, self._target, self._fixed
            self._start, self._target, self._fixed = models = devices.put(models)
            self._cuts = specs_of(self._start, devices.config)
            self._given = *specs_of(models, devices.config), P("data")
            cuts = state_cuts(jax.eval_shape(self._new_state), self._cuts)
            where = jax.tree.map(devices.sharding, cuts), None
        self._step = jax.jit(self._train, donate_argnums=0, static_argnums=4, out_shardings=where)
        self._sums = jax.jit(self._sums_of, static_argnums=4)

    def new_state(self) -> TrainState:
        """The state before the first step, of arrays of its own."""
        state = self._new_state()
        if self._devices is None:
            return state
        return jax.tree.map(self._devices.put_as, state, state_cuts(state, self._cuts))

    def step(
        self, state: TrainState, batch: Batch, index: int = 0
    ) -> tuple[TrainState, StepReport]:
        """The state after one batch, and what was found there, on the host.

        A loss or a gradient that is not finite changes nothing: see `StepReport.is_finite`.

        Args:
          index: of the batch in its run, counted from 0.
        """
        given = self._target, self._fixed, self._put(batch), self.loss.at(index)
        state, report = self._step(state, *given)
        return state, jax.device_get(report)

    def sums(self, state: TrainState, batch: Batch) -> Sums:
        """What `draft_loss` finds on a batch that is not learned from, on the host."""
        given = self._target, self._fixed, self._put(batch), self.loss
        return jax.device_get(self._sums(state.trained, *given))

    def draft(self, state: TrainState) -> Draft:
        """The draft as it is now, in the target's dtype."""
        return self._merged(state.trained, self._fixed)

    def values(self, state: TrainState) -> dict[str, np.ndarray]:
        """All of its parameters by path, the trained ones f32."""
        values = self._fixed | state.trained
        return jax.device_get(values) if self._devices is None else self._devices.fetch(values)

    def _new_state(self) -> TrainState:
        trained = jax.tree.map(jnp.copy, self._start)
        return TrainState(trained, self._optimizer.init(trained))

    def _put(self, batch: Batch) -> Batch:
        """The batch on a mesh's devices, each group with its sequences."""
        if (devices := self._devices) is None:
            return batch
        return jax.tree.map(lambda array: devices.put_as(array, P("data")), batch)

    def _merged(self, trained: Mapping[str, jax.Array], fixed: Mapping[str, jax.Array]) -> Draft:
        values = {name: value.astype(self._dtype) for name, value in trained.items()} | dict(fixed)
        flat = [
            (path, leaf.replace(values[".".join(map(str, path))]))
            for path, leaf in self._variables.items()
        ]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))

    def _loss(
        self,
        asked: LossConfig,
        trained: dict[str, jax.Array],
        target_params: Any,
        fixed: Any,
        batch: Batch,
    ) -> tuple[jax.Array, Sums]:
        target = nnx.merge(self._target_graph, target_params)
        is_real_BT = jnp.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
        features, hidden_BTD = batch.features, batch.hidden
        if features is None:
            features, hidden_BTD = see(target, batch.tokens, is_real_BT, self.capture)
        return draft_loss(
            self._merged(trained, fixed),
            Borrowed.of(target),
            features,
            batch.tokens,
            target.logits(hidden_BTD, is_normed=batch.is_normed),
            batch.is_learned & is_real_BT,
            asked,
        )

    def _sums_of(
        self,
        trained: dict[str, jax.Array],
        target_params: Any,
        fixed: Any,
        batch: Batch,
        asked: LossConfig,
    ) -> Sums:
        def sums(*given: Any) -> Sums:
            return self._loss(asked, *given)[1]

        if (devices := self._devices) is not None:
            sums = devices.spread(sums, self._given, OF_ROWS)
        return sums(trained, target_params, fixed, batch)

    def _gradient_of(
        self,
        trained: dict[str, jax.Array],
        target_params: Any,
        fixed: Any,
        batch: Batch,
        asked: LossConfig,
    ) -> tuple[tuple[jax.Array, Sums], dict[str, jax.Array]]:
        """Loss, its parts, and the gradient."""
        devices = self._devices
        mesh = None if devices is None else devices.config

        def gradient(trained: dict[str, jax.Array], *given: Any) -> Any:
            def share_of_loss(trained: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
                found = self._loss(asked, trained, *given)
                return share(found[0], mesh), found

            gradient, found = jax.grad(share_of_loss, has_aux=True)(trained)
            return found, whole_gradient(gradient, self._cuts, mesh)

        if devices is not None:
            gradient = devices.spread(gradient, self._given, ((P(), OF_ROWS), self._cuts))
        return gradient(trained, target_params, fixed, batch)

    def _train(
        self,
        state: TrainState,
        target_params: Any,
        fixed: Any,
        batch: Batch,
        asked: LossConfig,
    ) -> tuple[TrainState, StepReport]:
        (loss, sums), gradient = self._gradient_of(
            state.trained, target_params, fixed, batch, asked
        )
        norm = optax.tree.norm(gradient)
        with jax.numpy_dtype_promotion("standard"):  # optax's counts are integers among floats
            updates, optimizer = self._optimizer.update(gradient, state.optimizer, state.trained)
        trained: Any = optax.apply_updates(state.trained, updates)
        learnt = TrainState(trained, optimizer)
        is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
        kept = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), learnt, state)
        largest = {name: jnp.abs(leaf).max() for name, leaf in gradient.items()}
        return kept, StepReport(loss, sums, norm, largest)


def state_cuts(state: TrainState, cuts: Mapping[str, P]) -> Any:
    """How a state lies on a mesh: what is kept of a parameter as that does, all else whole."""

    def cut(path: tuple[Any, ...], _: Any) -> P:
        return cuts.get(getattr(path[-1], "key", ""), P())

    return jax.tree_util.tree_map_with_path(cut, state)


def see(
    target: Target, tokens_BT: jax.Array, is_real_BT: jax.Array, capture: Boundaries
) -> tuple[Features, jax.Array]:
    """The features of whole sequences, and the last boundary [B,T,D]."""
    batch, length = tokens_BT.shape
    pos_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    at = Pass(pos_BT, jnp.zeros(batch, jnp.int32), None, is_real_BT)
    tokens = TargetIds(tokens_BT, target.config.vocab_size)
    seen = target(tokens, at, target.empty_cache(batch, 1), capture)
    assert seen.features is not None
    return seen.features, seen.hidden
