"""The routed experts of a mixture: gate, up, SiLU, down, weighted sum; packed or plain weights."""

from typing import Any, Literal

import jax

from jaxspec.kernels.expert_matmul.mosaic import expert_matmul_mosaic, supported
from jaxspec.kernels.expert_matmul.packing import PackedInt4
from jaxspec.kernels.expert_matmul.xla import expert_matmul_xla
from jaxspec.kernels.hopper import why_not_hopper

__all__ = ["Implementation", "PackedInt4", "expert_matmul", "why_not_mosaic"]

Implementation = Literal["mosaic", "xla"]


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
      product: how q x scale is rounded; see `packing.unpack`. Plain weights ignore it, and so
        does "mosaic", which does not round it at all.
      implementation: None takes "mosaic" where `why_not_mosaic` has no objection, else "xla".
        "mosaic" has code for Hopper GPUs only; it can be compiled for one that is not there.

    Raises:
      ValueError: widths that do not belong together, or operands that "mosaic" does not take.
    """
    if implementation not in (None, "mosaic", "xla"):
        raise ValueError(
            f"expert_matmul: no implementation {implementation!r}; there are 'mosaic' and 'xla'"
        )
    width = gate_up.in_features if isinstance(gate_up, PackedInt4) else gate_up.shape[-1]
    if width != x_MD.shape[1]:
        raise ValueError(f"expert_matmul: tokens are {x_MD.shape[1]} wide, gate and up {width}")
    if implementation is None:
        reason = why_not_mosaic(x_MD, gate_up, down)
        implementation = "mosaic" if reason is None else "xla"
    if implementation == "mosaic":
        return expert_matmul_mosaic(x_MD, gate_up, down, layer, expert_MX, weight_MX)
    return expert_matmul_xla(x_MD, gate_up, down, layer, expert_MX, weight_MX, product=product)


def why_not_mosaic(
    x_MD: Any, gate_up: PackedInt4 | jax.Array, down: PackedInt4 | jax.Array
) -> str | None:
    """Why a call of these operands runs in plain XLA here; None if it runs the Mosaic kernels.

    Args:
      x_MD: an array, or its shape.
    """
    return why_not_hopper() or supported(x_MD, gate_up, down)
