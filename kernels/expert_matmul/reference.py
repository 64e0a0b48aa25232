"""The definition of correct for `expert_matmul`: all experts of the layer in f32, then a choice."""

import jax
import jax.numpy as jnp

from jaxspec.kernels.expert_matmul.packing import PackedInt4, unpack

__all__ = ["expert_matmul_reference"]


def expert_matmul_reference(
    x_MD: jax.Array,
    gate_up: PackedInt4 | jax.Array,
    down: PackedInt4 | jax.Array,
    layer: jax.Array | int,
    expert_MX: jax.Array,
    weight_MX: jax.Array,
    *,
    product: str = "exact",
) -> jax.Array:
    """As `expert_matmul`: [M,D] f32."""

    def layer_of(stack: PackedInt4 | jax.Array) -> jax.Array:
        if isinstance(stack, PackedInt4):
            stack = unpack(stack, jnp.dtype("float32"), product)
        return stack[layer].astype(jnp.float32)

    gate_up_ECFD, down_EDF = layer_of(gate_up), layer_of(down)
    experts = down_EDF.shape[0]
    hidden_MECF = jnp.einsum("md,ecfd->mecf", x_MD.astype(jnp.float32), gate_up_ECFD)
    hidden_MEF = jax.nn.silu(hidden_MECF[:, :, 0]) * hidden_MECF[:, :, 1]
    out_MED = jnp.einsum("mef,edf->med", hidden_MEF, down_EDF)
    share_ME = (jax.nn.one_hot(expert_MX, experts) * weight_MX[:, :, None]).sum(1)
    return jnp.einsum("me,med->md", share_ME, out_MED)
