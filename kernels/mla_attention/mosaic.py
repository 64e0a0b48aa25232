"""`mla_attention` for Hopper GPUs, in Pallas (Mosaic GPU).

The query rows m = t * N + n of a sequence are taken 64 at a time; a block of the grid (a CTA) owns
one such tile and one share ("split") of the keys: the filled part of the cache followed by the new
rows, counted in blocks of 64. Grid order has the tile fastest, so that the tiles of one split run
together and read the keys from L2.

A CTA is three warpgroups, which hand blocks of keys to one another through two stages of shared
memory. For block i, in stage i % 2:

    scorer      waits for the block (`loaded_latent`, `loaded_rotary`); S = Q K^T; the softmax
                numerators P go where the rotary parts were, which nobody needs any more; the
                factor by which older sums shrink goes to `shrink`; then `scored`
    two mixers  wait for `scored`; each owns half of the output columns: O = shrink * O + P V;
                each then loads its half of block i + 2; when both are done (`free`), the first
                loads its rotary part

So block i + 1 is loaded and scored, softmax included, while block i is mixed. A P of its own would
not fit: two stages of 72 KB and 72 KB of queries leave 11 of 227 KB. Another kernel merges splits.

Here M stands for query rows, P for splits, X for either width. How it came about: NOTES.md.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.kernels.mla_attention.mosaic_merge import MAX_SPLITS, merge_splits

__all__ = ["Tuning", "mla_attention_mosaic", "num_splits", "supported"]

TILE = 64
"""Query rows of a CTA, keys of a block, and the width of the rotary part: a P tile has the shape
of a rotary tile, and takes its place."""
STAGES = 2
SCORER, FIRST_MIXER, MIXERS = 0, 1, 2
WORD = 32
FLOOR = -1e30
"""The running maximum of a row before it has seen a key: finite, so that -inf - FLOOR is -inf."""
LOG2E = math.log2(math.e)
ACC: Any = plgpu.WGMMAAccumulatorRef
"""An accumulator in registers. `Any`, because its declared type fits neither of its two uses."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What may be chosen without changing the result.

    Attributes:
      depth: latent columns per `wgmma` group of S. Short groups in a rolled loop: a fully unrolled
        depth keeps one shared-memory descriptor per k-step alive across the loop over keys, and
        spills.
      columns: output columns per accumulator of a mixer.
      num_sms: CTAs that run at once; the splits are chosen to fill them.
      min_blocks: blocks of keys below which a split is not worth its partial output.
    """

    depth: int = 64
    columns: int = 256
    num_sms: int = 132
    min_blocks: int = 2

    def __post_init__(self) -> None:
        if self.depth % 64 or not 64 <= self.depth <= 256:
            raise ValueError(f"{self.depth=}: a multiple of 64 up to 256 is needed")
        if self.columns not in (64, 128, 256):
            raise ValueError(f"{self.columns=}: 64, 128 or 256 is needed")
        if self.num_sms < 1 or self.min_blocks < 1:
            raise ValueError(f"{self.num_sms=} and {self.min_blocks=} must be positive")


def supported(q_latent: Any, q_rotary: Any, latent: Any, *, has_tree: bool) -> str | None:
    """Why the kernel cannot take these shapes and dtypes, or None if it can.

    Args:
      q_latent, q_rotary, latent: arrays or shapes, as `mla_attention` takes them.
      has_tree: whether `sees_BTT` is given.
    """
    _, tokens, heads, latent_width = q_latent.shape
    rotary_width, slots = q_rotary.shape[-1], latent.shape[2]
    if q_latent.dtype != jnp.bfloat16:
        return f"dtype is {q_latent.dtype}: only bfloat16"
    if rotary_width != TILE:
        return f"rotary width is {rotary_width}: only {TILE}"
    if latent_width not in (128, 256, 512):
        return f"latent width is {latent_width}: only 128, 256 or 512"
    if heads % 8 or not 8 <= heads <= 64:
        return f"{heads} local heads: only multiples of 8 from 8 to 64"
    if slots % TILE or slots == 0:
        return f"{slots} cache slots: only multiples of {TILE}"
    if has_tree and tokens > 128:
        return f"a tree of {tokens} nodes: at most 128"
    if not has_tree and tokens > 2048:
        return f"a chunk of {tokens} tokens: at most 2048"
    return None


def num_splits(batch: int, tokens: int, heads: int, slots: int, tuning: Tuning) -> int:
    """Shares that the keys of a sequence are cut into: those that finish a full cache soonest.

    A CTA has an SM to itself, so a grid of so many CTAs runs in waves. Each wave costs its blocks
    of keys and about two more for the queries, the first loads and the output. A tenth of the time
    is not worth more splits: their partial outputs take memory.
    """
    ctas = batch * pl.cdiv(tokens * heads, TILE)
    blocks = pl.cdiv(slots, TILE) + pl.cdiv(tokens, TILE)
    most = max(1, min(tuning.num_sms, MAX_SPLITS, blocks // tuning.min_blocks))

    def time(splits: int) -> int:
        return pl.cdiv(ctas * splits, tuning.num_sms) * (pl.cdiv(blocks, splits) + 2)

    enough = 1.1 * min(map(time, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if time(splits) <= enough)


def mla_attention_mosaic(
    q_latent_BTNC: jax.Array,
    q_rotary_BTNR: jax.Array,
    latent_LBSC: jax.Array,
    rotary_LBSR: jax.Array,
    layer: jax.Array | int,
    kv_len_B: jax.Array,
    new_latent_BTC: jax.Array,
    new_rotary_BTR: jax.Array,
    sees_BTT: jax.Array | None,
    *,
    scale: float,
    tuning: Tuning = Tuning(),
    splits: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `mla_attention`.

    Args:
      splits: shares of the keys; None takes `num_splits`. Only rounding depends on it.
      interpret: run on a CPU under the Mosaic GPU interpreter.

    Raises:
      ValueError: shapes that the kernel does not take, or a number of splits that it does not.
    """
    reason = supported(q_latent_BTNC, q_rotary_BTNR, latent_LBSC, has_tree=sees_BTT is not None)
    if reason is not None:
        raise ValueError(f"mla_attention: the mosaic kernel cannot run: {reason}")
    batch, tokens, heads, width = q_latent_BTNC.shape
    operands = {
        "q_latent": q_latent_BTNC.reshape(batch, tokens * heads, width),
        "q_rotary": q_rotary_BTNR.reshape(batch, tokens * heads, TILE),
        "latent": latent_LBSC,
        "rotary": rotary_LBSR,
        "new_latent": _whole_tiles(new_latent_BTC),
        "new_rotary": _whole_tiles(new_rotary_BTR),
        "kv_len": kv_len_B.astype(jnp.int32),
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
    }
    if sees_BTT is not None:
        operands["words"] = _ancestor_words(sees_BTT, heads)
    if splits is None:
        splits = num_splits(batch, tokens, heads, latent_LBSC.shape[2], tuning)
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"mla_attention: {splits=}, but 1 to {MAX_SPLITS} can be merged")
    out_BPMC, lse_BPM = _attend(operands, heads, splits, scale, tuning, interpret)
    out_BMC, lse_BM = merge_splits(out_BPMC, lse_BPM, interpret=interpret)
    return out_BMC.reshape(q_latent_BTNC.shape), lse_BM.reshape(batch, tokens, heads)


def _whole_tiles(new_BTX: jax.Array) -> jax.Array:
    """With zero rows at the end if there are more than 8 and not a multiple of it.

    A copy (TMA) of 64 rows takes rows past the end as zeros, but the end must not lie within the
    8 rows of a swizzled tile, unless there is no other.
    """
    tokens = new_BTX.shape[1]
    missing = -tokens % 8 if tokens > 8 else 0
    return jnp.pad(new_BTX, [(0, 0), (0, missing), (0, 0)]) if missing else new_BTX


def _ancestor_words(sees_BTT: jax.Array, heads: int) -> jax.Array:
    """[B, words, rows] int32: bit k of word w of row m says whether m sees new row 32 w + k.

    Words fill whole blocks of keys, rows whole tiles.
    """
    batch, tokens, _ = sees_BTT.shape
    sees = jnp.pad(sees_BTT, [(0, 0), (0, 0), (0, -tokens % TILE)])
    place = jnp.arange(WORD, dtype=jnp.uint32).reshape(1, 1, 1, WORD)
    bit = sees.reshape(batch, tokens, -1, WORD).astype(jnp.uint32) << place
    word = lax.bitcast_convert_type(bit.sum(-1, dtype=jnp.uint32), jnp.int32)
    by_row = jnp.repeat(word, heads, axis=1)
    by_row = jnp.pad(by_row, [(0, 0), (0, -(tokens * heads) % TILE), (0, 0)])
    return by_row.swapaxes(1, 2)


def _attend(
    operands: dict[str, jax.Array],
    heads: int,
    splits: int,
    scale: float,
    tuning: Tuning,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """Each split's normalised output [B,P,M,C] and log-sum-exp [B,P,M]; an empty one: 0, -inf."""
    batch, rows, width = operands["q_latent"].shape
    dtype = operands["q_latent"].dtype
    words = operands["words"].shape[1] if "words" in operands else 0

    def body(*refs: Any, **scratch: Any) -> None:
        named = dict(zip([*operands, "out", "lse"], refs, strict=True))
        kv_len = named["kv_len"][lax.axis_index("batch")]
        cta = _Cta(
            refs=named,
            scratch=scratch,
            layer=named["layer"][0],
            kv_len=jnp.clip(kv_len, 0, named["latent"].shape[2]),
            heads=heads,
            rows=min(rows, TILE),
            splits=splits,
            scale=scale,
            tuning=tuning,
            is_interpreted=interpret is not None,
        )
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == SCORER)(lambda: _score(cta))
        pl.when(warpgroup != SCORER)(lambda: _mix(cta, warpgroup - FIRST_MIXER))

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, splits, rows, width), dtype),
            jax.ShapeDtypeStruct((batch, splits, rows), jnp.float32),
        ),
        grid=(batch, splits, pl.cdiv(rows, TILE)),
        grid_names=("batch", "split", "tile"),
        num_threads=1 + MIXERS,
        thread_name="warpgroup",
        scratch_types=_scratch(width, dtype, words),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="mla_attention",
    )(*operands.values())


def _scratch(width: int, dtype: Any, words: int) -> dict[str, Any]:
    """Shared memory and barriers of a CTA. Latents lie in halves: a copy (TMA) fills or reads a
    contiguous piece."""

    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform

    def tiled(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=(tiling((8, 64)), swizzle(128)))

    half = width // MIXERS
    scratch = {
        "q_latent": tiled(MIXERS, TILE, half),
        "q_rotary": tiled(TILE, TILE),
        "latent": tiled(STAGES, MIXERS, TILE, half),
        "rotary": tiled(STAGES, TILE, TILE),
        "shrink": plgpu.SMEM((STAGES, TILE), jnp.float32),
        "inverse": plgpu.SMEM((TILE,), jnp.float32),
        "lse": plgpu.SMEM((TILE,), jnp.float32),
        "q_loaded": plgpu.Barrier(num_arrivals=MIXERS + (2 if words else 1)),
        "loaded_latent": plgpu.Barrier(num_barriers=STAGES * MIXERS),
        "loaded_rotary": plgpu.Barrier(num_barriers=STAGES),
        "scored": plgpu.Barrier(num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=MIXERS, num_barriers=STAGES),
        "done": plgpu.Barrier(),
    }
    if words:
        scratch["words"] = plgpu.SMEM((words, TILE), jnp.int32)
    return scratch


@dataclasses.dataclass(frozen=True)
class _Cta:
    """What a CTA has, and which keys are its own.

    Attributes:
      refs: operands and results, in global memory.
      layer, kv_len: read once; from inside a loop they would be read anew for every block.
      rows: query rows that are loaded and stored.
    """

    refs: dict[str, Any]
    scratch: dict[str, Any]
    layer: jax.Array
    kv_len: jax.Array
    heads: int
    rows: int
    splits: int
    scale: float
    tuning: Tuning
    is_interpreted: bool

    @property
    def b(self) -> jax.Array:
        return lax.axis_index("batch")

    @property
    def first_row(self) -> jax.Array:
        return lax.axis_index("tile") * TILE

    @property
    def half(self) -> int:
        return self.scratch["q_latent"].shape[-1]

    @property
    def prefix_blocks(self) -> jax.Array:
        return lax.div(self.kv_len + TILE - 1, TILE)

    def share(self) -> tuple[jax.Array, jax.Array]:
        """(first block, how many) of this split."""
        if "words" in self.refs:
            new_blocks = self.refs["words"].shape[1] * WORD // TILE
        else:  # causal: no row of the tile sees a new row after its own
            last_token = lax.div(self.first_row + self.rows - 1, self.heads)
            new_blocks = lax.div(last_token, TILE) + 1
        blocks = self.prefix_blocks + new_blocks
        most = lax.div(blocks + self.splits - 1, self.splits)
        first = lax.axis_index("split") * most
        return first, jnp.clip(blocks - first, 0, most)

    def load_queries(self) -> None:
        refs, scratch, rows = self.refs, self.scratch, pl.ds(self.first_row, self.rows)
        kept, loaded = pl.ds(0, self.rows), scratch["q_loaded"]
        for h in range(MIXERS):
            cols = pl.ds(h * self.half, self.half)
            plgpu.copy_gmem_to_smem(
                refs["q_latent"].at[self.b, rows, cols], scratch["q_latent"].at[h, kept], loaded
            )
        plgpu.copy_gmem_to_smem(
            refs["q_rotary"].at[self.b, rows], scratch["q_rotary"].at[kept], loaded
        )
        if "words" in refs:
            tile = pl.ds(self.first_row, TILE)
            plgpu.copy_gmem_to_smem(refs["words"].at[self.b, :, tile], scratch["words"], loaded)

    def _load(self, kind: str, block: jax.Array, cols: Any, to: Any, barrier: Any) -> None:
        refs, is_prefix = self.refs, block < self.prefix_blocks

        @pl.when(is_prefix)
        def _() -> None:
            slots = pl.ds(block * TILE, TILE)
            cache = refs[kind].at[self.layer, self.b, slots, cols]
            plgpu.copy_gmem_to_smem(cache, to, barrier)

        @pl.when(jnp.logical_not(is_prefix))
        def _() -> None:
            slots = pl.ds((block - self.prefix_blocks) * TILE, TILE)
            plgpu.copy_gmem_to_smem(refs[f"new_{kind}"].at[self.b, slots, cols], to, barrier)

    def load_latent(self, block: jax.Array, stage: jax.Array | int, h: jax.Array) -> None:
        """Starts the copy of one half of a block's latents."""
        to, barrier = self.scratch["latent"], self.scratch["loaded_latent"]
        cols = pl.ds(h * self.half, self.half)
        self._load("latent", block, cols, to.at[stage, h], barrier.at[stage * MIXERS + h])

    def load_rotary(self, block: jax.Array, stage: jax.Array | int) -> None:
        """Starts the copy of a block's rotary parts."""
        to, barrier = self.scratch["rotary"], self.scratch["loaded_rotary"]
        self._load("rotary", block, pl.ds(0, TILE), to.at[stage], barrier.at[stage])

    def wgmma(self, acc: Any, a: Any, b: Any) -> None:
        """acc += a @ b."""
        if self.is_interpreted:
            # The interpreter looks for races in loads and stores, not in `wgmma`: load the
            # operands. The fence orders these loads as `wgmma` is ordered with later copies.
            _ = a[...], b[...]
            plgpu.commit_smem()
        plgpu.wgmma(acc, a, b)

    def accumulate(self, out: jax.Array, a: Any, b: Any) -> jax.Array:
        """out + a @ b."""
        if not self.is_interpreted:
            return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(ACC.init(out))

        # The interpreter has no accumulator that starts from a value.
        def product(acc: Any) -> jax.Array:
            self.wgmma(acc, a, b)
            return acc[...]

        return out + pl.run_scoped(product, ACC(out.shape, jnp.float32))


def _score(cta: _Cta) -> None:
    """The scorer: P and `shrink` of each block, at the end `inverse` and the log-sum-exps."""
    scratch, (first, count) = cta.scratch, cta.share()
    plgpu.barrier_wait(scratch["q_loaded"])

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        top, total = carry
        stage, block = lax.rem(i, STAGES), first + i
        scores = _scores(cta, stage) * (cta.scale * LOG2E)
        scores = jnp.where(_is_seen(cta, block), scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - _over_columns(new_top, TILE))
        scratch["rotary"].at[stage][...] = weights.astype(scratch["rotary"].dtype)
        scratch["shrink"][stage] = shrink
        _clear_nonfinite(cta, stage, block)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["scored"].at[stage])
        return new_top, total * shrink + weights.sum(axis=1)

    start = (jnp.full((TILE,), FLOOR, jnp.float32), jnp.zeros((TILE,), jnp.float32))
    top, total = lax.fori_loop(0, count, step, start)
    has_seen = total != 0  # NaN, if a score was
    divisor = jnp.where(has_seen, total, 1.0)
    scratch["inverse"][...] = jnp.where(has_seen, 1 / divisor, 0.0)
    plgpu.barrier_arrive(scratch["done"])
    scratch["lse"][...] = jnp.where(has_seen, (top + jnp.log2(divisor)) / LOG2E, -jnp.inf)
    plgpu.commit_smem()
    rows = pl.ds(cta.first_row, cta.rows)
    out = cta.refs["lse"].at[cta.b, lax.axis_index("split"), rows]
    plgpu.copy_smem_to_gmem(scratch["lse"].at[pl.ds(0, cta.rows)], out)
    plgpu.wait_smem_to_gmem(0)


def _scores(cta: _Cta, stage: jax.Array) -> jax.Array:
    """Q K^T of the block in `stage`, each part as soon as it is there."""
    scratch, depth = cta.scratch, min(cta.tuning.depth, cta.half)

    def product(acc: Any) -> jax.Array:
        for h in range(MIXERS):
            plgpu.barrier_wait(scratch["loaded_latent"].at[stage * MIXERS + h])

            def part(d: jax.Array, _: None, h: int = h) -> None:
                cols = pl.ds(d * depth, depth)
                key = scratch["latent"].at[stage, h, :, cols].transpose((1, 0))
                cta.wgmma(acc, scratch["q_latent"].at[h, :, cols], key)

            lax.fori_loop(0, cta.half // depth, part, None)
        plgpu.barrier_wait(scratch["loaded_rotary"].at[stage])
        cta.wgmma(acc, scratch["q_rotary"], scratch["rotary"].at[stage].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(product, ACC((TILE, TILE), jnp.float32))


def _is_seen(cta: _Cta, block: jax.Array) -> jax.Array:
    """Which keys of the block each row sees: all that are filled; of the new ones, its own."""
    row, column = (lax.broadcasted_iota(jnp.int32, (TILE, TILE), axis) for axis in (0, 1))
    is_prefix = block < cta.prefix_blocks
    # Scalars are selected by kind of block, vectors are multiplied by it.
    is_new = jnp.where(is_prefix, 0, 1)
    num_filled = cta.kv_len - block * TILE
    new_block = block - cta.prefix_blocks
    if "words" not in cta.refs:  # causal
        token = lax.div(cta.first_row + row, cta.heads)
        return column < jnp.where(is_prefix, num_filled, 1 - new_block * TILE) + token * is_new
    first_word = jnp.maximum(new_block, 0) * (TILE // WORD)
    low, high = (_over_columns(cta.scratch["words"][first_word + i], TILE) for i in (0, 1))
    word = jnp.where(column < WORD, low, high)
    bit = lax.shift_right_logical(word, column & (WORD - 1)) & is_new
    return jnp.logical_or(column < jnp.where(is_prefix, num_filled, 0), bit != 0)


def _clear_nonfinite(cta: _Cta, stage: jax.Array, block: jax.Array) -> None:
    """Zeroes the values that are NaN or infinite, where some row may not see them: 0 * NaN is NaN.

    Unfilled slots may hold anything, and a drafted token may have overflowed. Who does see it gets
    the NaN from its scores. Whole blocks of the prefix are seen by all.
    """
    latent = cta.scratch["latent"]

    @pl.when(cta.kv_len - block * TILE < TILE)
    def _() -> None:
        for h in range(MIXERS):

            def part(d: jax.Array, _: None, h: int = h) -> None:
                piece = latent.at[stage, h, :, pl.ds(d * TILE, TILE)]
                value = piece[...].astype(jnp.float32)
                value = jnp.where(jnp.abs(value) < jnp.inf, value, 0.0)
                piece[...] = value.astype(latent.dtype)

            lax.fori_loop(0, cta.half // TILE, part, None)


def _over_columns(vector: jax.Array, width: int) -> jax.Array:
    return lax.broadcast_in_dim(vector, (TILE, width), [0])


def _mix(cta: _Cta, mixer: jax.Array) -> None:
    """A mixer: half of the output columns, and the loads."""
    scratch, (first, count) = cta.scratch, cta.share()
    columns = min(cta.tuning.columns, cta.half)
    pieces = [pl.ds(j * columns, columns) for j in range(cta.half // columns)]
    is_first = mixer == 0
    pl.when(is_first)(cta.load_queries)
    for stage in range(STAGES):

        @pl.when(stage < count)
        def _(stage: int = stage) -> None:
            cta.load_latent(first + stage, stage, mixer)
            pl.when(is_first)(lambda: cta.load_rotary(first + stage, stage))

    def step(i: jax.Array, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        stage = lax.rem(i, STAGES)
        plgpu.barrier_wait(scratch["scored"].at[stage])
        shrink = _over_columns(scratch["shrink"][stage], columns)
        weights, values = scratch["rotary"].at[stage], scratch["latent"].at[stage, mixer]
        outs = tuple(
            cta.accumulate(out * shrink, weights, values.at[:, piece])
            for out, piece in zip(outs, pieces, strict=True)
        )
        plgpu.barrier_arrive(scratch["free"].at[stage])
        has_next = i + STAGES < count
        pl.when(has_next)(lambda: cta.load_latent(first + i + STAGES, stage, mixer))

        @pl.when(is_first)
        def _() -> None:
            plgpu.barrier_wait(scratch["free"].at[stage])
            pl.when(has_next)(lambda: cta.load_rotary(first + i + STAGES, stage))

        return outs

    zeros = tuple(jnp.zeros((TILE, columns), jnp.float32) for _ in pieces)
    outs = lax.fori_loop(0, count, step, zeros)
    plgpu.barrier_wait(scratch["done"])
    # The scorer is done with the queries: the outputs leave through their place.
    staged, inverse = scratch["q_latent"].at[mixer], _over_columns(scratch["inverse"][...], columns)
    for out, piece in zip(outs, pieces, strict=True):
        staged.at[:, piece][...] = (out * inverse).astype(staged.dtype)
    plgpu.commit_smem()
    rows, cols = pl.ds(cta.first_row, cta.rows), pl.ds(mixer * cta.half, cta.half)
    out = cta.refs["out"].at[cta.b, lax.axis_index("split"), rows, cols]
    plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, cta.rows)], out)
    plgpu.wait_smem_to_gmem(0)
