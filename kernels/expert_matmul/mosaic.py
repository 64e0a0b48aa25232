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
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.kernels.compat import mma_on_cpu
from jaxspec.kernels.expert_matmul.packing import BLOCK, GROUP, PackedInt4

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
    """

    token_tile: int = 8
    stages: int = 3
    programs: int = 396
    unroll: int = 4

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


def tuning_for(num_tokens: int) -> Tuning:
    """The tuning taken when none is named.

    A tile holds about three times what an expert gets of `num_tokens` spread evenly over 384
    experts, 8 for each token. Choices beyond it make one more slot, at work at the same time, so
    that its weights come from L2.
    """
    if num_tokens <= 128:
        return Tuning(token_tile=8, stages=3, programs=396, unroll=4)
    if num_tokens <= 256:
        return Tuning(token_tile=16, stages=2, programs=396, unroll=1)
    return Tuning(token_tile=32, stages=2, programs=264, unroll=1)


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


class Plan(NamedTuple):
    """Who reads what. S is the most slots that M x X choices can need; those in use come first.

    Attributes:
      matrix: [S] layer x E + expert of each slot: its place in the stacks.
      token: [R] of each row, the token whose choice it holds. A slot has `token_tile` rows; rows
        that no choice fills repeat token 0.
      row: [M,X] the row of each choice; of a choice that is no expert, one past the end.
      scalars: the number of slots in use, and `MAGIC`.
    """

    matrix: jax.Array
    token: jax.Array
    row: jax.Array
    scalars: jax.Array


def plan(expert_MX: jax.Array, layer: jax.Array | int, num_experts: int, tile: int) -> Plan:
    """Slots of at most `tile` choices of one expert; ids outside 0..num_experts-1 get none.

    Counts are sums of comparisons, each one fused kernel: sorting or searching takes several.
    """
    num_choices, choices_per_token = expert_MX.size, expert_MX.shape[1]
    most_experts = min(num_experts, num_choices)
    slots = most_experts + (num_choices - most_experts) // tile

    def count(is_counted: jax.Array) -> jax.Array:
        return is_counted.sum(1, dtype=jnp.int32)

    choice_C = jnp.arange(num_choices, dtype=jnp.int32)
    expert_E = jnp.arange(num_experts, dtype=jnp.int32)
    expert_C = expert_MX.reshape(-1).astype(jnp.int32)
    slots_E = (count(expert_C[None] == expert_E[:, None]) + tile - 1) // tile
    is_up_to_EE = expert_E[None] <= expert_E[:, None]
    last_slot_E = jnp.where(is_up_to_EE, slots_E[None], 0).sum(1, dtype=jnp.int32)

    is_earlier_CC = choice_C[None] < choice_C[:, None]
    place_C = count((expert_C[None] == expert_C[:, None]) & is_earlier_CC)
    first_slot_C = (last_slot_E - slots_E).at[expert_C].get(mode="clip")
    is_expert_C = (expert_C >= 0) & (expert_C < num_experts)
    row_C = jnp.where(is_expert_C, first_slot_C * tile + place_C, slots * tile + choice_C)
    token_R = jnp.zeros((slots * tile,), jnp.int32)
    token_C = choice_C // choices_per_token
    token_R = token_R.at[row_C].set(token_C, mode="drop", unique_indices=True)

    slot_S = jnp.arange(slots, dtype=jnp.int32)
    expert_S = count(last_slot_E[None] <= slot_S[:, None])
    matrix_S = jnp.asarray(layer, jnp.int32) * num_experts + expert_S
    scalars = jnp.stack([last_slot_E[-1], jnp.int32(MAGIC)])
    return Plan(matrix_S, token_R, row_C.reshape(expert_MX.shape), scalars)


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
    tuning = tuning or tuning_for(x_MD.shape[0])
    num_experts, width = down.words.shape[1:3]
    hidden = gate_up.words.shape[3]
    groups = plan(expert_MX, layer, num_experts, tuning.token_tile)
    x_RD = x_MD.at[groups.token].get(mode="promise_in_bounds")
    hidden_RF = _product(x_RD, _gate_up(gate_up), hidden, groups, tuning)
    out_RD = _product(hidden_RF, _down(down), width, groups, tuning)
    out_MXD = weight_MX[:, :, None] * out_RD.at[groups.row].get(mode="clip")
    # A choice that is no expert has no row; it got some other one, which may hold anything.
    is_expert_MX = groups.row < out_RD.shape[0]
    return jnp.where(is_expert_MX[:, :, None], out_MXD, 0).sum(1)


class _Weights(NamedTuple):
    """What the two kernels do differently.

    Attributes:
      words, scales: whole stacks [L x E, ..], arranged so that an item's two pieces are two
        entries of one axis.
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
    tile_features: int
    out_dtype: jnp.dtype
    words_at: Callable
    scales_at: Callable
    scales_shape: tuple[int, ...]
    scale_at: Callable
    finish: Callable


def _gate_up(packed: PackedInt4) -> _Weights:
    """Pieces: 64 gate rows and the same 64 up rows. Output: silu(gate) x up, bf16."""

    def finish(products, out_s) -> None:
        gate, up = products
        hidden = gate / (1.0 + jnp.exp(-gate)) * up
        _store_transposed(out_s, hidden.astype(jnp.bfloat16))

    def rows(tile):
        return pl.ds(tile * ROWS, ROWS)

    return _Weights(
        packed.words.reshape(-1, *packed.words.shape[2:]),
        packed.scales.reshape(-1, *packed.scales.shape[2:]),
        tile_features=ROWS,
        out_dtype=jnp.dtype("bfloat16"),
        words_at=lambda matrix, tile, piece, columns: (matrix, piece, rows(tile), columns),
        scales_at=lambda matrix, tile, block: (matrix, slice(None), block, slice(None), rows(tile)),
        scales_shape=(2, PLANES, ROWS),
        scale_at=lambda piece, plane: (piece, plane),
        finish=finish,
    )


def _down(packed: PackedInt4) -> _Weights:
    """Pieces: 128 rows in two halves. Output: their products, f32."""

    def finish(products, out_s) -> None:
        for piece, product in enumerate(products):
            _store_transposed(out_s.at[:, pl.ds(piece * ROWS, ROWS)], product)

    def pieces(tile):
        return pl.ds(2 * tile, 2)

    features, words = packed.words.shape[2:]
    return _Weights(
        packed.words.reshape(-1, features // ROWS, ROWS, words),
        packed.scales.reshape(-1, *packed.scales.shape[2:-1], features // ROWS, ROWS),
        tile_features=2 * ROWS,
        out_dtype=jnp.dtype("float32"),
        words_at=lambda matrix, tile, piece, columns: (
            matrix,
            2 * tile + piece,
            slice(None),
            columns,
        ),
        scales_at=lambda matrix, tile, block: (
            matrix,
            block,
            slice(None),
            pieces(tile),
            slice(None),
        ),
        scales_shape=(PLANES, 2, ROWS),
        scale_at=lambda piece, plane: (plane, piece),
        finish=finish,
    )


def _product(x_RK, weights: _Weights, out_features: int, groups: Plan, tuning: Tuning) -> jax.Array:
    """Outputs [R, out_features] of the rows of all slots in use; other rows stay unwritten."""
    (rows, in_features), tile_features = x_RK.shape, weights.tile_features
    num_blocks, num_tiles = in_features // BLOCK, out_features // tile_features
    tokens, stages, programs = tuning.token_tile, tuning.stages, tuning.programs

    def body(x_g, words_g, scales_g, matrix_g, scalars_g, out_g, x_s, words_s, scales_s, *rest):
        out_s, loaded = rest
        program = lax.axis_index("program")
        num_items, magic = scalars_g[0] * num_tiles, scalars_g[1]
        my_items = lax.div(jnp.maximum(num_items - program + programs - 1, 0), programs)
        my_steps = my_items * num_blocks

        def slot_and_tile(item):
            number = program + item * programs
            return lax.div(number, num_tiles), lax.rem(number, num_tiles)

        def load(step):
            slot, tile = slot_and_tile(lax.div(step, num_blocks))
            block, stage = lax.rem(step, num_blocks), lax.rem(step, stages)
            matrix, barrier = matrix_g[slot], loaded.at[stage]
            columns = pl.ds(block * WORDS, WORDS)
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
            slot, tile = slot_and_tile(item)
            out_at = pl.ds(slot * tokens, tokens), pl.ds(tile * tile_features, tile_features)
            plgpu.copy_smem_to_gmem(out_s, out_g.at[out_at])

        lax.fori_loop(0, my_items, one_item, None)
        plgpu.wait_smem_to_gmem(0)

    # Swizzled, eight rows are read at once without a bank conflict.
    x_form = (plgpu.TilingTransform((8, GROUP)), plgpu.SwizzleTransform(64))
    words_form = (plgpu.TilingTransform((8, WORDS)), plgpu.SwizzleTransform(128))
    out_tile = (8, 128 // weights.out_dtype.itemsize)
    out_form = (plgpu.TilingTransform(out_tile), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, out_features), weights.out_dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((stages, tokens, BLOCK), jnp.bfloat16, transforms=x_form),
            plgpu.SMEM((stages, 2, ROWS, WORDS), jnp.int32, transforms=words_form),
            plgpu.SMEM((stages, *weights.scales_shape), jnp.bfloat16),
            plgpu.SMEM((tokens, tile_features), weights.out_dtype, transforms=out_form),
            plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        ],
    )(x_RK, weights.words, weights.scales, groups.matrix, groups.scalars)


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


def _store_transposed(out_s, product) -> None:
    """Writes [features, tokens] to shared memory as [tokens, features]."""
    out_s.transpose((1, 0))[...] = plgpu.layout_cast(product, plgpu.Layout.WGMMA_TRANSPOSED)
