"""The routed experts of a mixture: gate, up, SiLU, down, weighted sum; packed or plain weights."""

from typing import Literal

import jax

from jaxspec.kernels.expert_matmul.packing import PackedInt4
from jaxspec.kernels.expert_matmul.xla import expert_matmul_xla

__all__ = ["Implementation", "PackedInt4", "expert_matmul"]

Implementation = Literal["xla"]


def expert_matmul(
    x_MD: jax.Array,
    gate_up: PackedInt4 | jax.Array,
    down: PackedInt4 | jax.Array,
    layer: jax.Array | int,
    expert_MX: jax.Array,
    weight_MX: jax.Array,
    *,
    product: Literal["exact", "bfloat16"] = "exact",
    implementation: Implementation | None = None,
) -> jax.Array:
    """sum_x weight[m, x] * down_e(silu(gate_e(x)) * up_e(x)) with e = expert[m, x]: [M,D] f32.

    Args:
      gate_up: the whole stack [L, E, 2, F, D], gate first; plain, or packed along D.
      down: the whole stack [L, E, D, F]; plain, or packed along F. Only `layer` is read, and of
        it only the experts that some token chose.
      expert_MX: chosen experts; an id of E or more is no expert: that choice adds nothing.
      weight_MX: their weights, f32.
      product: how q x scale is rounded; see `packing.unpack`. Plain weights ignore it.
      implementation: None takes the best that can run.

    Raises:
      ValueError: widths that do not belong together.
    """
    if implementation not in (None, "xla"):
        raise ValueError(f"expert_matmul: no implementation {implementation!r}; there is 'xla'")
    width = gate_up.in_features if isinstance(gate_up, PackedInt4) else gate_up.shape[-1]
    if width != x_MD.shape[1]:
        raise ValueError(f"expert_matmul: tokens are {x_MD.shape[1]} wide, gate and up {width}")
    return expert_matmul_xla(x_MD, gate_up, down, layer, expert_MX, weight_MX, product=product)
