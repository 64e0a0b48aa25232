"""The merge of attention's splits as one Mosaic GPU kernel.

Plain XLA takes five launches for it and writes an f32 copy of all partial outputs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["MAX_SPLITS", "merge_splits"]

MAX_SPLITS = 256
"""A copy (TMA) takes no more along one axis."""
COLUMNS = 128
"""Output columns of a CTA, one to a thread."""
MIN_ROWS = 4
"""Log-sum-exps of so many rows are 16 bytes, the least that a copy (TMA) moves."""
UNROLL = 8
TERMS = 64
"""Partial outputs that a CTA adds up at least, where there are so many."""


def merge_splits(
    out_BPMC: jax.Array,
    lse_BPM: jax.Array,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The attention over all P splits: [B,M,C] in the partial outputs' dtype, and [B,M] f32.

    Args:
      out_BPMC: normalised outputs of each split; C a multiple of 128, M of 8.
      lse_BPM: natural log-sum-exps, -inf where a split saw nothing; where all saw nothing, so does
        the merge: 0, -inf.
    """
    batch, splits, rows, width = out_BPMC.shape
    if splits == 1:
        return out_BPMC[:, 0], lse_BPM[:, 0]
    group = 1
    while 2 * group * splits <= TERMS and rows % (2 * group) == 0:
        group *= 2
    lse_rows = max(group, MIN_ROWS)

    def body(out_g: Any, lse_g: Any, merged_g: Any, merged_lse_g: Any, **scratch: Any) -> None:
        out, lse, loaded = scratch["out"], scratch["lse"], scratch["loaded"]
        merged, merged_lse = scratch["merged"], scratch["merged_lse"]
        b, c = lax.axis_index("batch"), lax.axis_index("column")
        first, cols = lax.axis_index("group") * group, pl.ds(c * COLUMNS, COLUMNS)
        first_lse = lax.div(first, lse_rows) * lse_rows
        plgpu.copy_gmem_to_smem(out_g.at[b, :, pl.ds(first, group), cols], out, loaded)
        plgpu.copy_gmem_to_smem(lse_g.at[b, :, pl.ds(first_lse, lse_rows)], lse, loaded)
        plgpu.barrier_wait(loaded)

        def row(i: jax.Array, _: None) -> None:
            at = first - first_lse + i
            top = _loop(splits, lambda p, top: jnp.maximum(top, lse[p, at]), jnp.float32(-jnp.inf))
            finite_top = jnp.where(top == -jnp.inf, 0.0, top)

            def add(p: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                weight = jnp.exp(lse[p, at] - finite_top)
                return sums[0] + weight, sums[1] + weight * out[p, i].astype(jnp.float32)

            zeros = jnp.float32(0), jnp.zeros((COLUMNS,), jnp.float32)
            total, mixed = _loop(splits, add, zeros)
            merged[i] = (mixed * (1 / jnp.where(total > 0, total, 1.0))).astype(merged.dtype)
            merged_lse[i] = jnp.full((COLUMNS,), finite_top + jnp.log(total))

        lax.fori_loop(0, group, row, None)
        plgpu.commit_smem()
        to = pl.ds(first, group)
        plgpu.copy_smem_to_gmem(merged, merged_g.at[b, to, cols])

        @pl.when(c == 0)
        def _() -> None:
            plgpu.copy_smem_to_gmem(merged_lse, merged_lse_g.at[b, to])

        plgpu.wait_smem_to_gmem(0)

    merged_BMC, lse_BMX = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, rows, width), out_BPMC.dtype),
            jax.ShapeDtypeStruct((batch, rows, COLUMNS), jnp.float32),
        ),
        grid=(batch, rows // group, width // COLUMNS),
        grid_names=("batch", "group", "column"),
        scratch_types={
            "out": plgpu.SMEM((splits, group, COLUMNS), out_BPMC.dtype),
            "lse": plgpu.SMEM((splits, lse_rows), jnp.float32),
            "merged": plgpu.SMEM((group, COLUMNS), out_BPMC.dtype),
            "merged_lse": plgpu.SMEM((group, COLUMNS), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="mla_merge",
    )(out_BPMC, lse_BPM)
    return merged_BMC, lse_BMX[..., 0]


def _loop(count: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """A loop some of whose steps are in flight together."""

    def several(i: jax.Array, carry: Any) -> Any:
        for k in range(UNROLL):
            carry = step(i * UNROLL + k, carry)
        return carry

    whole = count // UNROLL
    carry = lax.fori_loop(0, whole, several, carry)
    for i in range(whole * UNROLL, count):
        carry = step(i, carry)
    return carry
