"""`tree_verify` on Hopper: three Mosaic GPU kernels.

    tree_top     of each node and share of the vocabulary: the greatest logit, its lowest id, and
                 whether a NaN is there. Greedy sequences need no more: one pass
    tree_sample  of sampled sequences the same for the scores with noise. A score is relative to
                 the row's maximum, so this is a second pass, from L2 where the logits fit
    tree_walk    from the root down, a program for each sequence: a node's shares are merged when
                 it is reached, and the child that is the token chosen there comes next

Between the first two stands a search for thresholds in XLA, where top-k, top-p or min-p cuts
something.

Values are compared as int32 that sort as the floats do: thresholds are such numbers, 0 is -0, and
all that a share yields fits one array. Noise is threefry2x32 in plain integer operations and is
made where it is used. Nodes that stand next to each other mostly share a depth, so a program keeps
the noise of its share of the vocabulary in shared memory and goes on to the next node. NOTES.md
says how it came about.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.kernels.tree_verify.mosaic_walk import MAX_NODES, Shares, greatest_of, walk
from jaxspec.kernels.tree_verify.sampling import LOWEST, Sampling, gumbel, sortable, thresholds
from jaxspec.kernels.tree_verify.threefry import Words, bits_at, fold_in
from jaxspec.kernels.tree_verify.xla import Verified

__all__ = ["Tuning", "supported", "tree_verify_mosaic"]

THREADS = 128
"""Of a program. Vectors hold a multiple of it."""
ALIGNED = 8
"""A vocabulary that is a multiple of it makes rows and shares start at 16 bytes."""
NO_PLACE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What may be chosen without changing the result.

    Attributes:
      top_block: ids of a program of the first pass; its threads load them all at once.
      sample_block: ids of a program of the second pass.
      nodes: that a program of the second pass serves, one after the other.
    """

    top_block: int = 4096
    sample_block: int = 1024
    nodes: int = 8

    def __post_init__(self) -> None:
        for name, most in (("top_block", 8192), ("sample_block", 2048)):
            block = getattr(self, name)
            if block % THREADS or not THREADS <= block <= most:
                raise ValueError(
                    f"Tuning: {name} is {block}, not a multiple of {THREADS} up to {most}"
                )
        if self.nodes < 1:
            raise ValueError(f"Tuning: {self.nodes} nodes; at least one")


def tuning_for(num_rows: int) -> Tuning:
    """The tuning taken when none is named, for so many nodes of all sequences together.

    Few rows are cut into small shares, so that all multiprocessors have one.
    """
    if num_rows <= 4:
        return Tuning(top_block=1024, sample_block=1024)
    return Tuning()


def supported(logits: Any, levels: int) -> str | None:
    """Why the kernels cannot take logits [B,J,V] of this shape and dtype; None when they can."""
    batch, nodes, vocab_size = logits.shape
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits are {logits.dtype}, not float32 or bfloat16"
    if nodes > MAX_NODES:
        return f"a tree of {nodes} nodes: at most {MAX_NODES}"
    if levels >= MAX_NODES:
        return f"a path of {levels + 1} nodes: at most {MAX_NODES}"
    if vocab_size % ALIGNED or vocab_size < THREADS:
        return f"a vocabulary of {vocab_size}: only multiples of {ALIGNED} from {THREADS} on"
    if batch * nodes * vocab_size >= 2**31:
        return f"{batch * nodes * vocab_size} logits: less than {2**31} can be counted"
    return None


def tree_verify_mosaic(
    logits_BJV: jax.Array,
    tokens_BJ: jax.Array,
    parent_BJ: jax.Array,
    depth_BJ: jax.Array,
    length_B: jax.Array,
    sampling: Sampling,
    *,
    levels: int,
    tuning: Tuning | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Verified:
    """See `tree_verify`; the walk needs no ancestors.

    Args:
      interpret: run on a CPU under the Mosaic GPU interpreter.

    Raises:
      ValueError: logits or levels that are not `supported`.
    """
    reason = supported(logits_BJV, levels)
    if reason is not None:
        raise ValueError(f"tree_verify: the mosaic kernels cannot run: {reason}")
    batch, nodes, vocab_size = logits_BJV.shape
    tuning = tuning or tuning_for(batch * nodes)
    whole = vocab_size // THREADS * THREADS
    tuning = dataclasses.replace(
        tuning,
        top_block=min(tuning.top_block, whole),
        sample_block=min(tuning.sample_block, whole),
    )
    logits = _top(logits_BJV, tuning.top_block, interpret)
    scores = _sample(logits_BJV, logits, depth_BJ, length_B, sampling, tuning, interpret)
    return walk(
        tokens_BJ,
        parent_BJ,
        logits,
        scores,
        sampling.is_sampled,
        levels=levels,
        interpret=interpret,
    )


def _top(logits_BJV: jax.Array, block: int, interpret: plgpu.InterpretGPUParams | None) -> Shares:
    """The greatest logits, and where a NaN is."""
    batch, nodes, vocab_size = logits_BJV.shape
    shares = pl.cdiv(vocab_size, block)

    def body(logits_g: Any, found_g: Any) -> None:
        b, j, s = (lax.axis_index(name) for name in ("batch", "node", "share"))
        first = _first_id(s, block, vocab_size)
        logit = logits_g[b, j, pl.ds(first, block)].astype(jnp.float32)
        is_nan = logit != logit
        order, token = _greatest(jnp.where(is_nan, -jnp.inf, logit), first)
        found_g[b, j, 0, s] = order
        found_g[b, j, 1, s] = token
        found_g[b, j, 2, s] = jnp.max(jnp.where(is_nan, 1, 0))

    found = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, nodes, 3, _slots(shares)), jnp.int32),
        grid=(batch, nodes, shares),
        grid_names=("batch", "node", "share"),
        interpret=interpret,
        kernel_name="tree_top",
    )(logits_BJV)
    return Shares(found, shares)


def _slots(shares: int) -> int:
    return pl.cdiv(shares, THREADS) * THREADS


def _first_id(share: jax.Array, block: int, vocab_size: int) -> jax.Array:
    """Where a share begins. The last one is moved back to end with the vocabulary: what it sees
    twice changes neither a maximum nor its lowest id."""
    return jnp.minimum(share * block, vocab_size - block)


def _greatest(value: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The greatest of a share's values, none NaN, as `sortable` has it, and its lowest id."""
    order = sortable(value)
    greatest = jnp.max(order)
    place = lax.broadcasted_iota(jnp.int32, value.shape, 0)
    return greatest, first + jnp.min(jnp.where(order == greatest, place, NO_PLACE))


def _sample(
    logits_BJV: jax.Array,
    top: Shares,
    depth_BJ: jax.Array,
    length_B: jax.Array,
    sampling: Sampling,
    tuning: Tuning,
    interpret: plgpu.InterpretGPUParams | None,
) -> Shares:
    """The greatest scores with noise. Those of greedy sequences stay unwritten: their programs end
    at once, which costs less than a condition whose outcome the host would have to wait for.

    Args:
      top: the greatest logits, to which scores are relative.
    """
    batch, nodes, vocab_size = logits_BJV.shape
    block, group = tuning.sample_block, min(tuning.nodes, nodes)
    shares = pl.cdiv(vocab_size, block)

    def body(
        logits_g: Any,
        top_g: Any,
        depth_g: Any,
        length_g: Any,
        seed_g: Any,
        temperature_g: Any,
        threshold_g: Any,
        found_g: Any,
        noise_s: Any,
    ) -> None:
        b, s = lax.axis_index("batch"), lax.axis_index("share")
        first_node = lax.axis_index("group") * group
        first = _first_id(s, block, vocab_size)
        temperature = temperature_g[b]

        def one_node(i: jax.Array, noise_depth: jax.Array) -> jax.Array:
            j = first_node + i
            depth = depth_g[b, j]

            @pl.when(depth != noise_depth)
            def _() -> None:
                key = fold_in(seed_g[b], length_g[b] + 1 + depth)
                noise_s[...] = _noise(key, first, block)
                plgpu.commit_smem()  # a thread may read what another one wrote

            greatest = greatest_of(top_g.at[b, j, 0][...], top.count)
            logit = logits_g[b, j, pl.ds(first, block)].astype(jnp.float32)
            logit = jnp.where(logit != logit, -jnp.inf, logit)
            score = (logit - _unsortable(jnp.full((block,), greatest))) / temperature
            score = jnp.where(sortable(score) >= threshold_g[b, j], score, -jnp.inf)
            score = score + noise_s[...]
            # Of an infinite maximum: as an argmax has it, that is NaN, and beats all numbers.
            order, token = _greatest(jnp.where(score != score, jnp.inf, score), first)
            found_g[b, j, 0, s] = order
            found_g[b, j, 1, s] = token
            return depth

        @pl.when(temperature > 0)
        def _() -> None:
            lax.fori_loop(0, jnp.minimum(nodes - first_node, group), one_node, jnp.int32(-1))

    found = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, nodes, 2, _slots(shares)), jnp.int32),
        grid=(batch, pl.cdiv(nodes, group), shares),
        grid_names=("batch", "group", "share"),
        scratch_types=[plgpu.SMEM((block,), jnp.float32)],
        interpret=interpret,
        kernel_name="tree_sample",
    )(
        logits_BJV,
        top.found,
        depth_BJ.astype(jnp.int32),
        length_B.astype(jnp.int32),
        lax.bitcast_convert_type(sampling.seed, jnp.int32),
        sampling.temperature,
        _thresholds(logits_BJV, top, sampling),
    )
    return Shares(found, shares)


def _thresholds(logits_BJV: jax.Array, top: Shares, sampling: Sampling) -> jax.Array:
    """[B,J] int32, the score from which on a token may be chosen; the lowest where nothing is cut.

    In XLA, with the search and so the rounding of the plain path: sums over the vocabulary decide.
    """

    def searched() -> jax.Array:
        logits = logits_BJV.astype(jnp.float32)
        logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
        greatest_BJ = _unsortable(top.found[:, :, 0, : top.count].max(-1))
        temperature_B = jnp.where(sampling.is_sampled, sampling.temperature, 1.0)
        score_BJV = (logits - greatest_BJ[:, :, None]) / temperature_B[:, None, None]
        found_BJ = thresholds(score_BJV, sampling)
        return jnp.where(sampling.is_cut[:, None], found_BJ, LOWEST)

    def none() -> jax.Array:
        return jnp.full(logits_BJV.shape[:2], LOWEST, jnp.int32)

    return lax.cond(sampling.is_cut.any(), searched, none)


def _noise(key: Words, first: jax.Array, block: int) -> jax.Array:
    """The noise of the ids from `first` on.

    The bits are the same everywhere. The logarithm is not: XLA's on a CPU, XLA's on a GPU and this
    one may differ in the last place, so a near-tie can fall otherwise on another platform or with
    another implementation. Within one, plain and speculative decoding run this same code.
    """
    token = first + lax.broadcasted_iota(jnp.int32, (block,), 0)
    return gumbel(bits_at(key, token))


def _unsortable(order: jax.Array) -> jax.Array:
    """The float that `sortable` made this of."""
    return lax.bitcast_convert_type(jnp.where(order < 0, LOWEST - order, order), jnp.float32)
