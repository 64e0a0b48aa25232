"""`expert_matmul` in plain XLA: a loop over the tiles that hold work, an expert unpacked for each.

Choices are sorted by expert and each expert's are cut into tiles. A tile reads one expert out of
the whole stack, so the largest temporary is one expert, and experts that nobody chose cost nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.expert_matmul.packing import PackedInt4, unpack

__all__ = ["expert_matmul_xla"]

MAX_TILE = 32


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
    num_tokens, num_choices = expert_MX.shape
    stack = down.words if isinstance(down, PackedInt4) else down
    num_experts, dtype = stack.shape[1], x_MD.dtype
    tile = min(num_tokens, MAX_TILE)

    def matrix(stack: PackedInt4 | jax.Array, expert: jax.Array) -> jax.Array:
        def read(array: jax.Array) -> jax.Array:
            start, size = (layer, expert, *[0] * (array.ndim - 2)), (1, 1, *array.shape[2:])
            return lax.dynamic_slice(array, start, size)[0, 0]

        if not isinstance(stack, PackedInt4):
            return read(stack).astype(dtype)
        # The barrier keeps the transposition of one expert's scales from becoming one of the whole
        # stack's, ahead of all loops (5 GB at full size).
        scales = lax.optimization_barrier(read(stack.scales))
        one = PackedInt4(read(stack.words), scales, stack.in_features)
        return unpack(one, dtype, product)

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
