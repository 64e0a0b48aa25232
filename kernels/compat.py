"""What the kernels need that differs between jax versions, or that a version leaves out."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import mlir

__all__ = ["ROWS_OF_ONE_QUERY", "mma_on_cpu"]

ROWS_OF_ONE_QUERY = 2 if jax.__version_info__ < (0, 12) else 1
"""Rows as which XLA:GPU is given a single query. To multiply one alone, jax 0.11 wants the cache
laid out otherwise, and writes a transposed copy of all of it in every step (seen for H200s)."""


@functools.cache
def mma_on_cpu() -> None:
    """Gives `plgpu.mma` a meaning on CPU, where the Mosaic GPU interpreter runs kernels.

    The interpreter executes what it has no rule for as ordinary jax, so that is all it takes.
    """
    left, right, sums = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((64, 16), "bfloat16"), ((16, 8), "bfloat16"), ((64, 8), "float32"))
    )
    (equation,) = jax.make_jaxpr(plgpu.mma)(sums, left, right).eqns

    def product(sums: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        return sums + jnp.dot(left, right, preferred_element_type=jnp.float32)

    rule = mlir.lower_fun(product, multiple_results=False)
    mlir.register_lowering(equation.primitive, rule, platform="cpu")
