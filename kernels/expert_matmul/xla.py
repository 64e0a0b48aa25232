"""`expert_matmul` in plain XLA, which reads chosen experts out of the whole stack.

Choices are sorted by expert, and experts that nobody chose are not read. Where each expert serves a
few tokens, a block of choices goes side by side and the packed words are multiplied as they are
read: the weights never stand in memory, only sums over their planes, and what each choice adds.
Where it serves many, an expert is unpacked once for a tile of tokens, and the largest temporary is
one expert.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.expert_matmul.packing import GROUP, PackedInt4, planes, unpack

__all__ = ["expert_matmul_xla"]

MAX_TILE = 32
BLOCK = 8
"""Choices side by side: enough for two cores. Their sums over planes take as much room as an expert
in f32: of Kimi-K2.5's, 176 MB."""
MAX_PER_EXPERT = 32
"""Choices for each expert that is here, those of others' experts counted, up to which they go side
by side. On two cores of an EPYC 9005, 16 experts of 256 x 256: 0.59 of the time of tiles at 16
choices an expert, 0.85 at 32."""


def expert_matmul_xla(
    x_MD: jax.Array,
    gate_up: PackedInt4 | jax.Array,
    down: PackedInt4 | jax.Array,
    layer: jax.Array | int,
    expert_MX: jax.Array,
    weight_MX: jax.Array,
    *,
    product: str,
) -> jax.Array:
    """See `expert_matmul`."""
    x_MD, expert_MX, weight_MX = map(jnp.asarray, (x_MD, expert_MX, weight_MX))
    stack = down.words if isinstance(down, PackedInt4) else down
    num_experts = stack.shape[1]
    is_packed = isinstance(gate_up, PackedInt4) and isinstance(down, PackedInt4)
    if is_packed and expert_MX.size <= MAX_PER_EXPERT * num_experts:
        return _side_by_side(x_MD, gate_up, down, layer, expert_MX, weight_MX, product)
    return _in_tiles(x_MD, gate_up, down, layer, expert_MX, weight_MX, product)


def _side_by_side(x_MD, gate_up, down, layer, expert_MX, weight_MX, product) -> jax.Array:
    """A are the choices of a block, in `y_AD` all of them."""
    num_experts, dtype = down.words.shape[1], x_MD.dtype
    num_choices, block = expert_MX.size, min(BLOCK, expert_MX.size)
    # Choices of no expert come last: blocks of nothing else are not run.
    missing = -num_choices % block
    choice_expert = jnp.pad(expert_MX.reshape(-1), (0, missing), constant_values=num_experts)
    order = jnp.argsort(choice_expert, stable=True)
    num_real = (choice_expert < num_experts).sum()

    def times(stack: PackedInt4, expert_A: jax.Array, x_AD: jax.Array) -> jax.Array:
        """The matrices [A, ..., out, in], each times its own x, f32."""
        weights = planes(_read_some(stack, layer, expert_A), product)
        missing = weights[0].shape[-2] * len(weights) * GROUP - stack.in_features
        # Apart from its making: fused, it would be made again for every row of the matrix.
        x_AD = lax.optimization_barrier(jnp.pad(x_AD.astype(jnp.float32), ((0, 0), (0, missing))))
        x = x_AD.reshape(block, *[1] * (weights[0].ndim - 3), -1, len(weights), GROUP)
        products = [
            plane.astype(dtype).astype(jnp.float32) * x[..., index, :]
            for index, plane in enumerate(weights)
        ]
        # Apart from the sum within a group, which XLA:CPU does not vectorise together with it, and
        # is slow to do but as a product.
        total = lax.optimization_barrier(functools.reduce(jnp.add, products))
        total = total.reshape(*total.shape[:-2], -1)
        ones = jnp.ones(total.shape[-1:], jnp.float32)
        return jnp.matmul(total, ones, precision=lax.Precision.HIGHEST)

    def body(index: jax.Array, y_AD: jax.Array) -> jax.Array:
        chosen = lax.dynamic_slice_in_dim(order, index * block, block)
        expert_A = choice_expert[chosen]
        # A block's first choice is of an expert: those of none read what is read anyway.
        expert_A = jnp.where(expert_A < num_experts, expert_A, expert_A[0])
        x_AD = x_MD.at[chosen // expert_MX.shape[1]].get(mode="clip")
        gate_up_ACF = times(gate_up, expert_A, x_AD)
        hidden_AF = jax.nn.silu(gate_up_ACF[:, 0]) * gate_up_ACF[:, 1]
        y_block = times(down, expert_A, hidden_AF.astype(dtype))
        return y_AD.at[chosen].set(y_block, mode="drop", unique_indices=True)

    num_blocks = (num_real + block - 1) // block
    y_AD = jnp.zeros((num_choices, x_MD.shape[1]), jnp.float32)
    y_AD = lax.fori_loop(0, num_blocks, body, y_AD)
    y_MXD = weight_MX[..., None] * y_AD.reshape(*expert_MX.shape, -1)
    y_MXD = jnp.where((expert_MX < num_experts)[..., None], y_MXD, 0)
    # Choice by choice: XLA:CPU makes more of that than of a reduction.
    return functools.reduce(jnp.add, jnp.unstack(y_MXD, axis=1))


def _in_tiles(x_MD, gate_up, down, layer, expert_MX, weight_MX, product) -> jax.Array:
    num_tokens, num_choices = expert_MX.shape
    stack = down.words if isinstance(down, PackedInt4) else down
    num_experts, dtype = stack.shape[1], x_MD.dtype
    tile = min(num_tokens, MAX_TILE)

    def matrix(stack: PackedInt4 | jax.Array, expert: jax.Array) -> jax.Array:
        if isinstance(stack, PackedInt4):
            return unpack(_read_packed(stack, layer, expert), dtype, product)
        return _read(stack, layer, expert).astype(dtype)

    choice_expert = expert_MX.reshape(-1)
    order = jnp.argsort(choice_expert, stable=True)
    token_of, weight_of = order // num_choices, weight_MX.reshape(-1)[order]
    end_E = jnp.searchsorted(choice_expert[order], jnp.arange(num_experts), side="right")
    start_E = jnp.concatenate([jnp.zeros((1,), end_E.dtype), end_E[:-1]])
    last_tile_E = jnp.cumsum((end_E - start_E + tile - 1) // tile)

    def body(t: jax.Array, out_MD: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_tile_E, t, side="right")
        tiles_before = jnp.where(expert > 0, last_tile_E[expert - 1], 0)
        choice = start_E[expert] + (t - tiles_before) * tile + jnp.arange(tile)
        token = jnp.where(choice < end_E[expert], token_of.at[choice].get(mode="clip"), num_tokens)
        x_tile = x_MD.at[token].get(mode="clip")
        gate_up_CFD, down_DF = matrix(gate_up, expert), matrix(down, expert)
        hidden = jnp.einsum("td,cfd->ctf", x_tile, gate_up_CFD, preferred_element_type=jnp.float32)
        hidden = (jax.nn.silu(hidden[0]) * hidden[1]).astype(dtype)
        y_tile = jnp.einsum("tf,df->td", hidden, down_DF, preferred_element_type=jnp.float32)
        weight = weight_of.at[choice].get(mode="clip")
        return out_MD.at[token].add(weight[:, None] * y_tile, mode="drop")

    out_MD = jnp.zeros(x_MD.shape, jnp.float32)
    return lax.fori_loop(0, last_tile_E[-1], body, out_MD)


def _read_packed(stack: PackedInt4, layer: jax.Array | int, expert: jax.Array) -> PackedInt4:
    """One expert out of the whole stack."""
    # The barrier keeps the transposition of one expert's scales from becoming one of the whole
    # stack's, ahead of all loops (5 GB at full size).
    scales = lax.optimization_barrier(_read(stack.scales, layer, expert))
    return PackedInt4(_read(stack.words, layer, expert), scales, stack.in_features)


def _read_some(stack: PackedInt4, layer: jax.Array | int, expert_A: jax.Array) -> PackedInt4:
    """Several experts out of the whole stack."""
    # XLA:CPU gathers faster along one axis than along two.
    row_A = layer * stack.words.shape[1] + expert_A

    def read(leaf: jax.Array) -> jax.Array:
        rows = jnp.asarray(leaf).reshape(-1, *leaf.shape[2:])
        return rows.at[row_A].get(mode="promise_in_bounds")

    scales = lax.optimization_barrier(read(stack.scales))  # as for one expert
    return PackedInt4(read(stack.words), scales, stack.in_features)


def _read(stack: jax.Array, layer: jax.Array | int, expert: jax.Array) -> jax.Array:
    start, size = (layer, expert, *[0] * (stack.ndim - 2)), (1, 1, *stack.shape[2:])
    return lax.dynamic_slice(stack, start, size)[0, 0]
