"""`expert_matmul` on Hopper: two Mosaic GPU kernels that read packed int4 weights once.

An expert's choices are cut into *slots* of `token_tile`. A work item is a slot and a tile of weight
rows in two pieces of 64: gate rows and the same up rows in the first kernel, whose SiLU product is
the hidden row; 128 output rows in the second. Programs are persistent. Blocks of 256 columns of
words, scales and tokens stream through a ring in shared memory that runs on from item to item, so
that loads never drain.

Weights are unpacked in registers only. There nibble planes become the left operand of a warp-level
matrix product; the tokens are its right, narrow one. Over the 32 columns k of one scale:

    0x4300 | nibble  is the bfloat16 128 + nibble, and nibble = q + 8, so
    sum_k q x        = sum_k -136 x + sum_k (128 + nibble) x      two products, summed in f32
    out             += scale * sum_k q x                          in f32

No weight is converted, and q x scale is never rounded. NOTES.md says why not `wgmma`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.kernels.compat import mma_on_cpu
from jaxspec.kernels.expert_matmul.packing import BLOCK, GROUP, PackedInt4
from jaxspec.kernels.expert_matmul.slots import Slots, assign, most_slots

__all__ = ["Tuning", "expert_matmul_mosaic", "supported"]

ROWS = 64
"""Weight rows of one warpgroup's product; an item has two such pieces."""
WORDS = BLOCK // 8
PLANES = BLOCK // GROUP
SMEM_BYTES = 227 * 1024
"""Shared memory of a streaming multiprocessor that its programs can have."""
MAGIC = 0x43004300
"""Two bfloat16 of 128: its low bits take a nibble each."""
OFFSET = -136.0
"""What turns 128 + nibble, nibble = q + 8, into q."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What a launch chooses.

    Attributes:
      token_tile: choices of one expert that share a read of its weights.
      stages: blocks of 256 columns in the ring.
      programs: persistent programs; an H200 has 132 multiprocessors, which hold up to three each.
      unroll: pairs of nibble planes, of the four in a block, that the inner loop takes at once;
        more is fewer instructions and more registers.
      parts: into which the columns of weights are cut, as far as they divide, so that few experts
        make items enough for all programs. Their sums are added in XLA.
    """

    token_tile: int = 8
    stages: int = 3
    programs: int = 396
    unroll: int = 4
    parts: int = 1

    def __post_init__(self) -> None:
        if self.token_tile not in (8, 16, 32):
            raise ValueError(f"Tuning: token_tile is {self.token_tile}, not 8, 16 or 32")
        if self.stages < 2 or self.programs < 1:
            raise ValueError(
                f"Tuning: {self.stages} stages and {self.programs} programs; at least two stages "
                "and one program"
            )
        if self.unroll not in (1, 2, 4):
            raise ValueError(f"Tuning: unroll is {self.unroll}, not 1, 2 or 4")
        if self.parts < 1:
            raise ValueError(f"Tuning: {self.parts} parts; at least one")
        if self.smem_bytes > SMEM_BYTES:
            raise ValueError(
                f"Tuning: {self.stages} stages of {self.token_tile} tokens need "
                f"{self.smem_bytes} bytes of shared memory, there are {SMEM_BYTES}"
            )

    @property
    def stage_bytes(self) -> int:
        """Bytes that one stage loads: words, scales, tokens."""
        return 2 * ROWS * WORDS * 4 + 2 * PLANES * ROWS * 2 + self.token_tile * BLOCK * 2

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the hungrier kernel, the second: ring and output tile."""
        return self.stages * self.stage_bytes + self.token_tile * 2 * ROWS * 4 + 1024


def tuning_for(num_tokens: int, num_experts: int) -> Tuning:
    """The tuning taken when none is named, for `num_experts` of the 384 that tokens choose 8 of.

    A tile holds about three times what an expert gets of tokens that spread evenly. Choices beyond
    it make one more slot, at work at the same time, so that its weights come from L2. An expert is
    32 items of the first kernel: where those it takes to fill all programs are not to be expected,
    the columns are cut.
    """
    if num_tokens > 256:
        return Tuning(token_tile=32, stages=2, programs=264, unroll=1)
    if num_tokens > 128:
        return Tuning(token_tile=16, stages=2, programs=396, unroll=1)
    expected_experts = num_experts * (1 - (1 - 8 / 384) ** num_tokens)
    parts = 1 if expected_experts >= 12 else 2 if expected_experts >= 6 else 4
    return Tuning(token_tile=8, stages=3, programs=396, unroll=4, parts=parts)


def supported(
    x_MD: jax.Array,
    gate_up: PackedInt4 | jax.Array,
    down: PackedInt4 | jax.Array,
) -> str | None:
    """Why the kernel cannot take these operands; None when it can."""
    if not (isinstance(gate_up, PackedInt4) and isinstance(down, PackedInt4)):
        return "the experts are plain weights, not packed int4"
    if x_MD.dtype != jnp.bfloat16:
        return f"tokens are {x_MD.dtype}, not bfloat16"
    for name, stack in (("gate and up", gate_up), ("down", down)):
        if stack.scales.dtype != jnp.bfloat16:
            return f"the scales of {name} are {stack.scales.dtype}, not bfloat16"
    width, hidden = down.words.shape[2], gate_up.words.shape[3]
    if width % BLOCK or hidden % BLOCK:
        return f"widths {width} and {hidden} are not both multiples of {BLOCK}"
    return None


def expert_matmul_mosaic(
    x_MD: jax.Array,
    gate_up: PackedInt4 | jax.Array,
    down: PackedInt4 | jax.Array,
    layer: jax.Array | int,
    expert_MX: jax.Array,
    weight_MX: jax.Array,
    *,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See `expert_matmul`.

    Raises:
      ValueError: operands that are not `supported`.
    """
    reason = supported(x_MD, gate_up, down)
    if reason is not None:
        raise ValueError(f"expert_matmul: the mosaic kernels cannot run: {reason}")
    assert isinstance(gate_up, PackedInt4)
    assert isinstance(down, PackedInt4)
    mma_on_cpu()
    num_experts, width = down.words.shape[1:3]
    hidden = gate_up.words.shape[3]
    tuning = tuning or tuning_for(x_MD.shape[0], num_experts)
    slots = assign(expert_MX, num_experts, tuning.token_tile)
    num_rows = tuning.token_tile * most_slots(expert_MX.size, num_experts, tuning.token_tile)
    x_RD = x_MD.at[slots.table[:num_rows]].get(mode="promise_in_bounds")

    parts = math.gcd(tuning.parts, width // BLOCK)
    hidden_RPF = _product(x_RD, _gate_up(gate_up, parts), slots, layer, tuning)
    hidden_RF = hidden_RPF[:, 0] if parts == 1 else _silu_product(hidden_RPF)
    parts = math.gcd(tuning.parts, hidden // BLOCK)
    out_RPD = _product(hidden_RF, _down(down, parts), slots, layer, tuning)

    # A choice that is no expert has no row; it gets some other one, which may hold anything.
    out_MXD = out_RPD.at[slots.row].get(mode="clip").sum(2)
    is_expert_MX1 = (slots.row < num_rows)[:, :, None]
    return jnp.where(is_expert_MX1, weight_MX[:, :, None] * out_MXD, 0).sum(1)


def _silu_product(products_RPF: jax.Array) -> jax.Array:
    """silu(gate) x up [R,F] bf16 of tiles that hold 64 columns of gate and the same 64 of up."""
    rows, parts = products_RPF.shape[:2]
    tiles = products_RPF.reshape(rows, parts, -1, 2, ROWS).sum(1)
    return (jax.nn.silu(tiles[:, :, 0]) * tiles[:, :, 1]).reshape(rows, -1).astype(jnp.bfloat16)


class _Weights(NamedTuple):
    """What the two kernels do differently.

    Attributes:
      words, scales: whole stacks [L x E, ..], arranged so that an item's two pieces are two
        entries of one axis.
      kernel_name: what profiles call it.
      experts: in a layer.
      parts: into which the columns are cut; each is an item, whose output is a partial sum.
      num_tiles: of the rows, two pieces each.
      tile_features: output columns of an item.
      out_dtype: of the output.
      words_at: (matrix, tile, piece, columns) -> index of a piece's words [64, 32].
      scales_at: (matrix, tile, block) -> index of its scales.
      scales_shape: of those; [2, 8, 64] or [8, 2, 64].
      scale_at: (piece, plane) -> index of 64 scales in those.
      finish: (two products [64, token_tile] f32, output tile) -> None.
    """

    words: jax.Array
    scales: jax.Array
    kernel_name: str
    experts: int
    parts: int
    num_tiles: int
    tile_features: int
    out_dtype: jnp.dtype
    words_at: Callable
    scales_at: Callable
    scales_shape: tuple[int, ...]
    scale_at: Callable
    finish: Callable


def _gate_up(packed: PackedInt4, parts: int) -> _Weights:
    """Pieces: 64 gate rows and the same 64 up rows.

    Output: silu(gate) x up, bf16; of several parts, which cannot know it, both products, f32.
    """

    def finish(products, out_s) -> None:
        gate, up = products
        hidden = gate / (1.0 + jnp.exp(-gate)) * up
        _store_transposed(out_s, hidden.astype(jnp.bfloat16))

    every = slice(None)
    return _Weights(
        packed.words.reshape(-1, *packed.words.shape[2:]),
        packed.scales.reshape(-1, *packed.scales.shape[2:]),
        kernel_name="expert_gate_up",
        experts=packed.words.shape[1],
        parts=parts,
        num_tiles=packed.words.shape[3] // ROWS,
        tile_features=ROWS if parts == 1 else 2 * ROWS,
        out_dtype=jnp.dtype("bfloat16" if parts == 1 else "float32"),
        words_at=lambda matrix, tile, piece, columns: (matrix, piece, _rows(tile), columns),
        scales_at=lambda matrix, tile, block: (matrix, every, block, every, _rows(tile)),
        scales_shape=(2, PLANES, ROWS),
        scale_at=lambda piece, plane: (piece, plane),
        finish=finish if parts == 1 else _store_both,
    )


def _down(packed: PackedInt4, parts: int) -> _Weights:
    """Pieces: 128 rows in two halves. Output: their products, f32."""
    every = slice(None)
    features, words = packed.words.shape[2:]
    return _Weights(
        packed.words.reshape(-1, features // ROWS, ROWS, words),
        packed.scales.reshape(-1, *packed.scales.shape[2:-1], features // ROWS, ROWS),
        kernel_name="expert_down",
        experts=packed.words.shape[1],
        parts=parts,
        num_tiles=features // (2 * ROWS),
        tile_features=2 * ROWS,
        out_dtype=jnp.dtype("float32"),
        words_at=lambda matrix, tile, piece, columns: (matrix, 2 * tile + piece, every, columns),
        scales_at=lambda matrix, tile, block: (matrix, block, every, pl.ds(2 * tile, 2), every),
        scales_shape=(PLANES, 2, ROWS),
        scale_at=lambda piece, plane: (plane, piece),
        finish=_store_both,
    )


def _rows(tile):
    return pl.ds(tile * ROWS, ROWS)


def _product(
    x_RK: jax.Array, weights: _Weights, slots: Slots, layer: jax.Array | int, tuning: Tuning
) -> jax.Array:
    """Outputs [R, parts, features] of the rows of all slots in use; other rows stay unwritten."""
    num_rows, in_features = x_RK.shape
    tokens, stages, programs = tuning.token_tile, tuning.stages, tuning.programs
    num_tiles, tile_features = weights.num_tiles, weights.tile_features
    num_blocks = in_features // BLOCK // weights.parts
    items_of_slot, num_slots = weights.parts * num_tiles, num_rows // tokens

    def body(x_g, words_g, scales_g, table_g, layer_g, magic_g, out_g, x_s, words_s, *rest):
        scales_s, out_s, loaded = rest
        program, magic = lax.axis_index("program"), magic_g[0]
        num_items = table_g[num_rows + num_slots] * items_of_slot
        my_items = lax.div(jnp.maximum(num_items - program + programs - 1, 0), programs)
        my_steps = my_items * num_blocks

        def slot_and_place(item):
            """The slot of one of my items, and its place among those of the slot: part, tile."""
            number = program + item * programs
            return lax.div(number, items_of_slot), lax.rem(number, items_of_slot)

        def load(step):
            slot, place = slot_and_place(lax.div(step, num_blocks))
            part, tile = lax.div(place, num_tiles), lax.rem(place, num_tiles)
            block = part * num_blocks + lax.rem(step, num_blocks)
            matrix = layer_g[0] * weights.experts + table_g[num_rows + slot]
            stage = lax.rem(step, stages)
            barrier, columns = loaded.at[stage], pl.ds(block * WORDS, WORDS)
            for piece in range(2):
                words_at = weights.words_at(matrix, tile, piece, columns)
                plgpu.copy_gmem_to_smem(words_g.at[words_at], words_s.at[stage, piece], barrier)
            scales_at = weights.scales_at(matrix, tile, block)
            x_at = pl.ds(slot * tokens, tokens), pl.ds(block * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(scales_g.at[scales_at], scales_s.at[stage], barrier)
            plgpu.copy_gmem_to_smem(x_g.at[x_at], x_s.at[stage], barrier)

        for step in range(stages):
            pl.when(step < my_steps)(functools.partial(load, jnp.int32(step)))

        def one_item(item, _):
            def one_block(block, sums):
                step = item * num_blocks + block
                stage = lax.rem(step, stages)
                plgpu.barrier_wait(loaded.at[stage])
                scale = scales_s.at[stage], weights.scale_at
                sums = _add_block(sums, x_s.at[stage], words_s.at[stage], *scale, magic, tuning)
                plgpu.commit_smem()  # all have read the stage before it is loaded anew
                pl.when(step + stages < my_steps)(functools.partial(load, step + stages))
                return sums

            zero = jnp.zeros((ROWS, tokens), jnp.float32)
            products = lax.fori_loop(0, num_blocks, one_block, (zero, zero))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            weights.finish(products, out_s)
            plgpu.commit_smem()
            slot, place = slot_and_place(item)
            out_at = pl.ds(slot * tokens, tokens), pl.ds(place * tile_features, tile_features)
            plgpu.copy_smem_to_gmem(out_s, out_g.at[out_at])

        lax.fori_loop(0, my_items, one_item, None)
        plgpu.wait_smem_to_gmem(0)

    x_form, words_form = _swizzled(2 * GROUP, jnp.bfloat16), _swizzled(4 * WORDS, jnp.int32)
    out_form = _swizzled(128, weights.out_dtype)
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, items_of_slot * tile_features), weights.out_dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((stages, tokens, BLOCK), jnp.bfloat16, transforms=x_form),
            plgpu.SMEM((stages, 2, ROWS, WORDS), jnp.int32, transforms=words_form),
            plgpu.SMEM((stages, *weights.scales_shape), jnp.bfloat16),
            plgpu.SMEM((tokens, tile_features), weights.out_dtype, transforms=out_form),
            plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        ],
        kernel_name=weights.kernel_name,
    )(
        x_RK,
        weights.words,
        weights.scales,
        slots.table,
        jnp.asarray(layer, jnp.int32).reshape(1),
        jnp.full((1,), MAGIC, jnp.int32),
    )
    return out.reshape(num_rows, weights.parts, -1)


def _swizzled(num_bytes: int, dtype: Any) -> tuple[Any, Any]:
    """The form of shared memory from which eight rows of so many bytes are read at once.

    Without it they would lie in the same banks.
    """
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, num_bytes // jnp.dtype(dtype).itemsize)), swizzle(num_bytes)


def _add_block(sums, x_s, words_s, scales_s, scale_at: Callable, magic, tuning: Tuning):
    """Both running products [64, token_tile], one block of 256 columns further."""
    tokens, unroll = tuning.token_tile, tuning.unroll
    offset = jnp.full((ROWS, GROUP), OFFSET, jnp.bfloat16)
    zero = jnp.zeros((ROWS, tokens), jnp.float32)
    words = [words_s[piece] for piece in range(2)]

    def add_planes(pair, sums):
        sums = list(sums)
        planes = [_two_planes(words[piece], pair, magic) for piece in range(2)]
        for which in range(2):
            plane = pair + which * (PLANES // 2)
            x = x_s.at[:, pl.ds(plane * GROUP, GROUP)].transpose((1, 0))[...]
            base = plgpu.mma(zero, offset, x)
            for piece in range(2):
                group = plgpu.mma(base, planes[piece][which], x)
                scale = scales_s[scale_at(piece, plane)].astype(jnp.float32)
                sums[piece] += group * lax.broadcast_in_dim(scale, (ROWS, tokens), [0])
        return tuple(sums)

    def add_some(turn, sums):
        for pair in range(unroll):
            sums = add_planes(turn * unroll + pair, sums)
        return sums

    turns = PLANES // 2 // unroll
    return add_some(0, sums) if turns == 1 else lax.fori_loop(0, turns, add_some, sums)


def _two_planes(words, pair, magic):
    """Planes `pair` and `pair + 4` of the words, as the bfloat16 128 + nibble."""
    nibbles = lax.shift_right_logical(words, jnp.asarray(4 * pair, jnp.int32)) & 0x000F000F
    both = nibbles | magic
    halves = both, lax.shift_right_logical(both, 16)
    return [lax.bitcast_convert_type(half.astype(jnp.int16), jnp.bfloat16) for half in halves]


def _store_both(products, out_s) -> None:
    """Writes two products side by side."""
    for piece, product in enumerate(products):
        _store_transposed(out_s.at[:, pl.ds(piece * ROWS, ROWS)], product)


def _store_transposed(out_s, product) -> None:
    """Writes [features, tokens] to shared memory as [tokens, features]."""
    out_s.transpose((1, 0))[...] = plgpu.layout_cast(product, plgpu.Layout.WGMMA_TRANSPOSED)
