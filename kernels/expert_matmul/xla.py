"""`expert_matmul` in plain XLA: a loop that reads one expert out of the whole stack at a time.

Choices are sorted by expert, and experts that nobody chose cost nothing. Where each expert serves a
few tokens, they go one by one and the packed words are multiplied as they are read: the weights
never stand in memory. Where it serves many, an expert is unpacked once for a tile of tokens, and
the largest temporary is one expert.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.expert_matmul.packing import GROUP, PackedInt4, planes, unpack

__all__ = ["expert_matmul_xla"]

MAX_TILE = 32
MAX_PER_EXPERT = 4
"""Choices per expert, on average, up to which they go one by one: about where it is no longer
faster on a CPU (benchmarks/README.md)."""


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
        return _one_by_one(x_MD, gate_up, down, layer, expert_MX, weight_MX, product)
    return _in_tiles(x_MD, gate_up, down, layer, expert_MX, weight_MX, product)


def _one_by_one(x_MD, gate_up, down, layer, expert_MX, weight_MX, product) -> jax.Array:
    num_choices, dtype = expert_MX.shape[1], x_MD.dtype
    choice_expert = expert_MX.reshape(-1)
    # Those of one expert follow each other, while its words are in the processor's cache.
    order = jnp.argsort(choice_expert, stable=True)
    num_real = (choice_expert < down.words.shape[1]).sum()

    def times(stack: PackedInt4, expert: jax.Array, x_D: jax.Array) -> jax.Array:
        """The matrix [..., out, in] times x, f32."""
        weights = planes(_read_packed(stack, layer, expert), product)
        missing = weights[0].shape[-2] * len(weights) * GROUP - stack.in_features
        # Apart from its making: fused, it would be made again for every row of the matrix.
        x_D = lax.optimization_barrier(jnp.pad(x_D.astype(jnp.float32), (0, missing)))
        x = x_D.reshape(*[1] * (weights[0].ndim - 2), -1, len(weights), GROUP)
        total = sum(
            plane.astype(dtype).astype(jnp.float32) * x[..., index, :]
            for index, plane in enumerate(weights)
        )
        # Apart from the sum within a group: XLA:CPU does not vectorise the two together.
        return lax.optimization_barrier(total).sum((-2, -1))

    def body(i: jax.Array, out_MD: jax.Array) -> jax.Array:
        token, expert = order[i] // num_choices, choice_expert[order[i]]
        gate_F, up_F = times(gate_up, expert, x_MD[token])
        y_D = times(down, expert, (jax.nn.silu(gate_F) * up_F).astype(dtype))
        return out_MD.at[token].add(weight_MX.reshape(-1)[order[i]] * y_D)

    return lax.fori_loop(0, num_real, body, jnp.zeros(x_MD.shape, jnp.float32))


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


def _read(stack: jax.Array, layer: jax.Array | int, expert: jax.Array) -> jax.Array:
    start, size = (layer, expert, *[0] * (stack.ndim - 2)), (1, 1, *stack.shape[2:])
    return lax.dynamic_slice(stack, start, size)[0, 0]
