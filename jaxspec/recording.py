"""Records: everything that models say of given tokens, in a file that any framework can write."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxspec.aliases import Progress
from jaxspec.cache import KeyValues, Latents, commit
from jaxspec.contracts import Boundaries, TargetIds
from jaxspec.draft import Borrowed, Draft
from jaxspec.errors import InputError
from jaxspec.mla import Pass
from jaxspec.record_file import FORMAT
from jaxspec.sharding import devices_of, specs_of
from jaxspec.target import Target
from jaxspec.version import version

__all__ = ["Record", "RecordConfig", "logit_margins", "record"]


CHUNK = 128
"""Tokens per pass: one compilation for every length."""
MARGIN_TOP = 64


@dataclasses.dataclass(frozen=True)
class Record:
    """What the models say of the tokens of B sequences, zero past each one's length.

    Attributes:
      arrays: by name, in the run's dtype where it is not said:
        `tokens` [B,T] int32, `lengths` [B] int32;
        `boundary.NNN` [B,T,D], the state entering layer NNN, the last one before the final norm;
        `features` [B,T,G], as the draft is given them;
        `logits` [B,T,V] f32, or the best of them: `logits.top` and int32 `logits.top_ids` [B,T,k];
        `draft.logits` [B,T,U] f32, teacher-forced: features of position t with the token at t + 1,
        at the last position with the target's argmax;
        `router.LLL` [B,T,X] int32, the experts chosen in layer LLL, best first, and beyond the
        format's own names `router_margin.LLL` [B,T] f32: by how much the last chosen expert beat
        the first rejected one, which a difference must exceed to change the choice.
      metadata: `format`, `framework`, `framework_version`, `model`, `draft`, `dtype`, and
        `boundaries`, those of `features` as in "1,3,5", empty where there are none.
    """

    arrays: dict[str, np.ndarray]
    metadata: dict[str, str]

    def save(self, path: Path) -> None:
        """Writes the safetensors file, whole or not at all.

        Raises:
          InputError: it cannot be written there.
        """
        part = path.with_name(path.name + ".part")
        # Safetensors writes a view's underlying memory, whatever the view shows of it.
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        try:
            save_file(arrays, part, self.metadata)
            part.replace(path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise InputError(f"{path}: cannot be written ({error})") from error

    def to_dict(self) -> dict[str, Any]:
        """Shapes, dtypes and metadata; the arrays themselves are the file's."""
        arrays = {
            name: {"shape": list(array.shape), "dtype": str(array.dtype)}
            for name, array in sorted(self.arrays.items())
        }
        return {"arrays": arrays, "metadata": self.metadata}


@dataclasses.dataclass(frozen=True)
class RecordConfig:
    """What to keep.

    Attributes:
      boundaries: which of them; None keeps all.
      capture: what `features` are; None takes the draft's claim, or leaves them out without one.
      top: keep only so many of the target's best logits at each position; None keeps all.
    """

    boundaries: tuple[int, ...] | None = None
    capture: Boundaries | None = None
    top: int | None = None


KEEP_ALL = RecordConfig()


def record(
    target: Target,
    draft: Draft | None,
    sequences: Sequence[Sequence[int]],
    config: RecordConfig = KEEP_ALL,
    progress: Progress | None = None,
) -> Record:
    """The record of the sequences through target and draft, in their dtype.

    Args:
      progress: called with "recording", and how many of how many tokens are done.

    Raises:
      ContractError: there is no such boundary, or these are not the draft's.
      InputError: `top` is no number of logits, or a sequence is empty.
    """
    if config.top is not None and not 1 <= config.top <= target.config.vocab_size:
        raise InputError(f"top is {config.top}; a position has {target.config.vocab_size} logits")
    if not sequences or not all(map(len, sequences)):
        raise InputError("there is nothing to record: no sequence, or an empty one")
    plan = _plan(target, draft, config)
    mesh = target.numerics.mesh
    tokens_BT, lengths_B = _padded(sequences, 1 if mesh is None else mesh.data)
    slots = tokens_BT.shape[1]
    reader = _Reader(target, draft, plan, *tokens_BT.shape)
    one_more = np.pad(tokens_BT, ((0, 0), (0, 1)))  # the draft reads one token further
    chunks = []
    for start in range(0, slots, CHUNK):
        tokens = one_more[:, start : start + CHUNK + 1]
        chunks.append(reader.read(tokens, lengths_B, start))
        if progress is not None:
            progress("recording", start + CHUNK, slots)
    batch, longest = len(sequences), int(lengths_B.max())
    tokens_BT, lengths_B = tokens_BT[:batch], lengths_B[:batch]
    is_real_BT = np.arange(longest) < lengths_B[:, None]
    kept = {"tokens": tokens_BT[:, :longest], "lengths": lengths_B}
    for name in chunks[0]:
        array = np.concatenate([chunk[name] for chunk in chunks], axis=1)[:batch, :longest]
        is_real = is_real_BT.reshape(is_real_BT.shape + (1,) * (array.ndim - 2))
        kept[name] = np.where(is_real, array, np.zeros((), array.dtype))
    metadata = {
        "format": FORMAT,
        "framework": "jaxspec",
        "framework_version": version(),
        "model": target.identity,
        "draft": "" if draft is None else draft.identity,
        "dtype": target.numerics.dtype,
        "boundaries": ",".join(map(str, plan.features)),
    }
    return Record(kept, metadata)


def logit_margins(
    target: Target, questions: Sequence[tuple[Sequence[int], tuple[int, int]]]
) -> list[float]:
    """After each (ids, two tokens), how far the tokens' logits are from each other.

    At least so far, where a token is not among the best `MARGIN_TOP`.
    """
    config = RecordConfig(boundaries=(), top=min(MARGIN_TOP, target.config.vocab_size))
    margins = []
    for ids, tokens in questions:
        arrays = record(target, None, [ids], config).arrays
        best, best_ids = arrays["logits.top"][0, -1], arrays["logits.top_ids"][0, -1].tolist()
        known = [float(best[best_ids.index(token)]) for token in tokens if token in best_ids]
        known = known or [float(best[0])]
        margins.append(abs(known[0] - (known[1] if len(known) > 1 else float(best[-1]))))
    return margins


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Boundaries to keep, those of the features, both together as captured, and how many logits."""

    kept: tuple[int, ...]
    features: tuple[int, ...]
    capture: Boundaries | None
    top: int | None


def _plan(target: Target, draft: Draft | None, config: RecordConfig) -> _Plan:
    claim = config.capture
    if claim is None and draft is not None:
        claim = target.asked_for(draft.config.boundaries)
    kept = config.boundaries
    if kept is None:
        kept = tuple(range(target.config.num_hidden_layers + 1))
    features = () if claim is None else claim.ids
    capture = None
    if kept or features:
        origin = "target capture, for the record" if claim is None else claim.origin
        capture = target.boundaries(tuple(sorted({*kept, *features})), origin)
    return _Plan(kept, features, capture, config.top)


def _padded(sequences: Sequence[Sequence[int]], groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B,T] for a whole number of chunks, zero past each length, and the lengths.

    Empty sequences fill up the batch, so that every group of a mesh's devices has as many.
    """
    lengths = np.zeros(-(-len(sequences) // groups) * groups, np.int32)
    lengths[: len(sequences)] = [len(ids) for ids in sequences]
    tokens = np.zeros((len(lengths), -(-lengths.max() // CHUNK) * CHUNK), np.int32)
    for row, ids in zip(tokens, sequences, strict=False):
        row[: len(ids)] = ids
    return tokens, lengths


class _Reader:
    """The models, their caches, and where both live: reads chunk after chunk."""

    def __init__(
        self, target: Target, draft: Draft | None, plan: _Plan, batch: int, slots: int
    ) -> None:
        graph, self._params = nnx.split((target, draft))

        def new_caches() -> tuple[Latents, KeyValues | None]:
            drafts = None if draft is None else draft.empty_cache(batch, slots)
            return target.empty_cache(batch, slots), drafts

        self._devices = devices = devices_of(target, draft, batch)
        if devices is None:
            self._caches = new_caches()
            self._program = functools.partial(_chunk_alone, graph, plan)
            return
        self._params = devices.put(self._params)
        shapes = jax.eval_shape(new_caches)
        self._caches = jax.jit(new_caches, out_shardings=devices.shardings(shapes))()
        params, caches = specs_of((self._params, shapes), devices.config)
        program = devices.spread(
            functools.partial(_chunk, graph, plan),
            (params, caches, P("data"), P("data"), P()),
            (caches, P("data")),
        )
        self._program = jax.jit(program, donate_argnums=1)

    def read(self, tokens: np.ndarray, lengths: np.ndarray, start: int) -> dict[str, np.ndarray]:
        """The arrays of the tokens [B,CHUNK+1] that stand at `start`, and of the one after."""
        devices, given = self._devices, (tokens, lengths, np.int32(start))
        if devices is not None:
            given = map(devices.put_as, given, (P("data"), P("data"), P()))
        self._caches, arrays = self._program(self._params, self._caches, *given)
        return jax.device_get(arrays) if devices is None else devices.fetch(arrays)


def _chunk(graph, plan: _Plan, params, caches, tokens, lengths_B, start):
    """The caches with this chunk's rows, and its arrays, [B,CHUNK,...] each."""
    target, draft = nnx.merge(graph, params)
    c, (target_cache, draft_cache) = target.config, caches
    batch = tokens.shape[0]
    row_BT = jnp.broadcast_to(jnp.arange(CHUNK, dtype=jnp.int32), (batch, CHUNK))
    pos_BT, start_B = start + row_BT, jnp.broadcast_to(start, (batch,))
    is_real_BT = pos_BT < lengths_B[:, None]
    at = Pass(pos_BT, start_B, None, is_real_BT)
    place = row_BT, start_B, is_real_BT.sum(1, dtype=jnp.int32)
    seen = target(TargetIds(tokens[:, :CHUNK], c.vocab_size), at, target_cache, plan.capture)
    target_cache = commit(target_cache, seen.rows, *place, target.stripe)
    logits_BTV = target.logits(seen.hidden)
    arrays = {}
    for b in plan.kept:
        one = seen.features.select((b,))
        arrays[f"boundary.{b:03d}"] = one.require(one.boundaries, "record")
    if plan.top is None:
        arrays["logits"] = logits_BTV
    else:
        arrays["logits.top"], arrays["logits.top_ids"] = jax.lax.top_k(logits_BTV, plan.top)
    for index in range(c.num_sparse_layers):
        layer = c.first_k_dense_replace + index
        arrays[f"router.{layer:03d}"] = seen.experts[index]
        arrays[f"router_margin.{layer:03d}"] = seen.router_margin[index]
    if plan.features:
        captured = seen.features.select(plan.features)
        arrays["features"] = captured.require(captured.boundaries, "record")
        if draft is not None:
            is_last_BT = pos_BT == lengths_B[:, None] - 1
            best_BT = jnp.argmax(logits_BTV, axis=-1).astype(jnp.int32)
            shifted = TargetIds(jnp.where(is_last_BT, best_BT, tokens[:, 1:]), c.vocab_size)
            borrowed = Borrowed.of(target)
            drafted = draft.fuse(captured, shifted, at, draft_cache, borrowed)
            draft_cache = commit(draft_cache, drafted.rows, *place)
            arrays["draft.logits"] = draft.logits(drafted.recurrent, borrowed)
    return (target_cache, draft_cache), arrays


_chunk_alone = jax.jit(_chunk, static_argnames=("graph", "plan"), donate_argnames="caches")
