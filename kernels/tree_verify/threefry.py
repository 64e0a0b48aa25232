"""Threefry-2x32 (Salmon et al., SC 2011, doi:10.1145/2063384.2063405) in plain int32 operations.

The bits are those of `jax.random` with `impl="threefry2x32"` in its partitionable layout
(`jax_threefry_partitionable`, the default since jax 0.5; `jax/_src/random/threefry2x32.py`):
element i of an array, counted through, is the exclusive or of the two words that the key makes of
the 64-bit counter i. The layout without that flag gives other bits: there, halves of an array share
a counter.
"""

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Words", "bits_at", "fold_in", "threefry2x32"]

Words = tuple[jax.Array, jax.Array]
"""A key, or a counter: its higher and its lower 32 bits."""
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA


def threefry2x32(key: Words, counter: Words) -> Words:
    """The two words that the key makes of a counter, 20 rounds; scalars or arrays, int32."""
    schedule = (*key, key[0] ^ key[1] ^ jnp.int32(PARITY))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for turn in range(5):
        for distance in ROTATIONS[turn % 2]:
            x = x + y
            y = _rotate_left(y, distance) ^ x
        x = x + schedule[(turn + 1) % 3]
        y = y + (schedule[(turn + 2) % 3] + (turn + 1))
    return x, y


def fold_in(seed: jax.Array, data: jax.Array) -> Words:
    """The key `fold_in(key(seed), data)` of 32-bit integers."""
    zero = jnp.int32(0)
    return threefry2x32((zero, seed), (zero, data))


def bits_at(key: Words, place: jax.Array) -> jax.Array:
    """Elements `place` of the random bits that `key` makes, int32."""
    x, y = threefry2x32(key, (jnp.int32(0), place))
    return x ^ y


def _rotate_left(x: jax.Array, distance: int) -> jax.Array:
    return lax.shift_left(x, distance) | lax.shift_right_logical(x, 32 - distance)
