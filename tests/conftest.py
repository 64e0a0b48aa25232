"""Settings and fixtures that the tests share.

Rank promotion and implicit dtype promotion raise here: what broadcasts or casts says so in the code.
"""

import os

# Before jax is imported: the tests are for a CPU, whatever else the machine has.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
