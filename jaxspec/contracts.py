"""Contracts between target and draft: what an array *means*, checked while tracing.

JAX compares the static fields of a registered dataclass whenever it traces, scans or branches over
one. A claim that rides in such a field cannot be lost on the way from target to draft, and costs
nothing at run time. A width can agree by accident; a claim cannot.

`boundary b` (0..N for N layers) is the un-normed residual stream entering layer b: 0 is the
embedding output, N what the final norm receives. All ids in this package are boundaries; other
conventions are converted where a checkpoint is read (`convert/drafts.py`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.errors import InputError

__all__ = ["Boundaries", "ContractError", "DraftIds", "Features", "TargetIds", "VocabMap"]


class ContractError(InputError):
    """Two sides of the program mean different things by the same array."""


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """The claim that features are the concatenation, in this order, of these boundaries.

    Attributes:
      target: identity of the target they come from, `name@fingerprint`.
      ids: boundaries in the order they are concatenated.
      width: width of each chunk (the target's `hidden_size`).
      origin: where this claim was read. Part of equality, so that a cached trace never
        quotes a stale source: a claim read elsewhere costs one retrace.
    """

    target: str
    ids: tuple[int, ...]
    width: int
    origin: str

    @property
    def total_width(self) -> int:
        return len(self.ids) * self.width

    def agrees_with(self, other: "Boundaries") -> bool:
        """Whether both claim the same thing, wherever each was read."""
        return (self.target, self.ids, self.width) == (other.target, other.ids, other.width)

    def require(self, want: "Boundaries", who: str) -> None:
        """Raises ContractError unless features under this claim are what `who` was trained on."""
        if not self.agrees_with(want):
            raise ContractError(_other_features(self, want, self.total_width, who))

    def __str__(self) -> str:
        return f"boundaries {self.ids} of {self.target}, {self.width} wide each   [{self.origin}]"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["boundaries"]
)
@dataclasses.dataclass(frozen=True)
class Features:
    """Captured states of the target, concatenated, and the claim of what they are.

    The target stamps the claim, the draft requires its own, and nobody in between unwraps:
    `require` is the only way to the array.
    """

    data: Any
    boundaries: Boundaries

    def require(self, want: Boundaries, who: str) -> Float[Array, "B T G"]:
        """The array, if it is what `who` was trained on.

        Raises:
          ContractError: the claims differ, or the array was sliced after it was stamped.
        """
        given, width = self.boundaries, self.data.shape[-1]
        if given.agrees_with(want) and width == want.total_width:
            return self.data
        raise ContractError(_other_features(given, want, width, who))

    def select(self, ids: tuple[int, ...]) -> "Features":
        """The features of these boundaries alone, in this order, under a claim that says so."""
        given = self.boundaries
        data = self.require(given, "Features.select")
        chunks = dict(zip(given.ids, jnp.split(data, len(given.ids), axis=-1), strict=True))
        claim = dataclasses.replace(given, ids=ids)
        return Features(jnp.concatenate([chunks[b] for b in ids], axis=-1), claim)

    def take_rows(self, index_BP: Int[Array, "B P"]) -> "Features":
        """The features of the rows `index_BP`, under the same claim."""
        rows = jnp.take_along_axis(self.data, index_BP[:, :, None], axis=1)
        return Features(rows, self.boundaries)


def _other_features(given: Boundaries, want: Boundaries, width: int, who: str) -> str:
    """In what an array of this width, under the claim `given`, is not what is wanted."""
    lines = [
        f"{who}: these are not the features this draft was trained on",
        f"  wants: {want}",
        f"  given: {given}",
    ]
    if width != given.total_width:
        lines.append(
            f"  the array itself is {width} wide where its own claim makes it "
            f"{given.total_width}: it was cut or padded after the target stamped it."
        )
    elif width == want.total_width:
        lines.append(f"  both are {width} wide, so nothing else would have failed.")
    else:
        lines.append(f"  that is {width} wide where {want.total_width} are wanted.")
    return "\n".join(lines)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ids"], meta_fields=["vocab_size"]
)
@dataclasses.dataclass(frozen=True)
class TargetIds:
    """Token ids in the target's vocabulary, the only ids that ever enter an embedding."""

    ids: Any
    vocab_size: int

    def require(self, vocab_size: int, who: str) -> Int[Array, "..."]:
        """The ids, if they index a vocabulary of `vocab_size`.

        Raises:
          ContractError: they index another vocabulary, or are not target ids at all.
        """
        return _require_ids(self, TargetIds, vocab_size, who)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ids"], meta_fields=["vocab_size"]
)
@dataclasses.dataclass(frozen=True)
class DraftIds:
    """Token ids in the draft's own, often pruned, vocabulary: the columns of its head."""

    ids: Any
    vocab_size: int

    def require(self, vocab_size: int, who: str) -> Int[Array, "..."]:
        """The ids, if they index a draft vocabulary of `vocab_size`; see `TargetIds.require`."""
        return _require_ids(self, DraftIds, vocab_size, who)


def _require_ids(given: Any, kind: type, vocab_size: int, who: str) -> Any:
    if isinstance(given, kind) and given.vocab_size == vocab_size:
        return given.ids
    name = {TargetIds: "target ids", DraftIds: "draft ids"}
    if type(given) in name:
        found = f"{name[type(given)]} of a vocabulary of {given.vocab_size}"
    else:
        found = f"a bare {type(given).__name__}, which says of no vocabulary"
    raise ContractError(
        f"{who}: token ids of the wrong vocabulary\n"
        f"  wants: {name[kind]} of a vocabulary of {vocab_size}\n"
        f"  given: {found}\n"
        "  VocabMap.to_target is the one way from draft ids to target ids."
    )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["targets"], meta_fields=["target_vocab_size"]
)
@dataclasses.dataclass(frozen=True)
class VocabMap:
    """For every id of the draft's vocabulary, the target id it stands for.

    Absolute ids: the offsets of a checkpoint's `d2t` are resolved, and checked for range and
    uniqueness, where it is converted. Uniqueness matters: two draft ids for one token would give
    a node two equal children.
    """

    targets: Any
    target_vocab_size: int

    @property
    def draft_vocab_size(self) -> int:
        return self.targets.shape[0]

    def to_target(self, ids: DraftIds) -> TargetIds:
        """The target ids that `ids` stand for."""
        index = DraftIds.require(ids, self.draft_vocab_size, "VocabMap.to_target")
        return TargetIds(self.targets[index], self.target_vocab_size)
