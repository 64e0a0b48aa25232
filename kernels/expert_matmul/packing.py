"""The packed int4 layout that the expert kernels read.

A matrix [out, in] is cut along `in` into blocks of 256. In each block, nibble i of int32 word c
holds the element 32 i + c, as q + 8. So the eight nibbles of a word belong to eight groups of 32,
and every nibble plane has one scale per output row:

    word 0:  q[0]  q[32]  q[64]  ... q[224]      (nibble 0 .. 7, low bits first)
    word 1:  q[1]  q[33]  q[65]  ... q[225]

`in` is padded to whole blocks with q = 0 under scale 0.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["BLOCK", "GROUP", "PackedInt4", "pack", "planes", "unpack"]

GROUP = 32
"""Elements that share a scale."""
BLOCK = 256
"""Elements along `in` that share their eight planes of words."""
_PLANES = BLOCK // GROUP


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "scales"],
    meta_fields=["in_features"],
)
@dataclasses.dataclass(frozen=True)
class PackedInt4:
    """A stack of packed matrices.

    Attributes:
      words: int32 [..., out, in / 8], `in` padded to whole blocks.
      scales: bf16 or f32 [..., in / 256, 8, out], the same padding.
      in_features: the true `in`.
    """

    words: Any
    scales: Any
    in_features: int


def padded(in_features: int) -> int:
    """`in_features` rounded up to whole blocks."""
    return -(-in_features // BLOCK) * BLOCK


def pack(q: np.ndarray, scale: np.ndarray) -> PackedInt4:
    """The packed form of signed values [..., out, in] in -8..7 with scales [..., out, in / 32].

    Runs on the host, in numpy.

    Raises:
      ValueError: `in` is not a multiple of the group, the scales are not one per group, or a
        value is out of range.
    """
    *lead, out, in_features = q.shape
    if in_features % GROUP or scale.shape != (*lead, out, in_features // GROUP):
        raise ValueError(
            f"pack: values {q.shape} want scales {(*lead, out, in_features // GROUP)} and a width "
            f"that is a multiple of {GROUP}; the scales are {scale.shape}"
        )
    if q.size and (q.min() < -8 or q.max() > 7):
        raise ValueError(f"pack: values run from {q.min()} to {q.max()}, int4 from -8 to 7")
    missing = padded(in_features) - in_features
    q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, missing)])
    scale = np.pad(scale, [(0, 0)] * (scale.ndim - 1) + [(0, missing // GROUP)])
    planes = (q.astype(np.int8) + 8).astype(np.uint32).reshape(*lead, out, -1, _PLANES, GROUP)
    words = np.zeros((*lead, out, planes.shape[-3], GROUP), np.uint32)
    for plane in range(_PLANES):
        words |= planes[..., plane, :] << np.uint32(4 * plane)
    scales = np.moveaxis(scale.reshape(*lead, out, -1, _PLANES), -3, -1)
    return PackedInt4(
        words.reshape(*lead, out, -1).view(np.int32), np.ascontiguousarray(scales), in_features
    )


def unpack(packed: PackedInt4, dtype: jnp.dtype, product: str = "exact") -> jax.Array:
    """The matrices [..., out, in] in `dtype`, q x scale.

    Args:
      product: "exact" forms it in f32 and rounds once, to `dtype`; "bfloat16" rounds it to bf16
        on the way, whatever `dtype` is.
    """
    weight = jnp.stack(planes(packed, product), axis=-2)
    weight = weight.reshape(*packed.words.shape[:-1], -1)[..., : packed.in_features]
    return weight.astype(dtype)


def planes(packed: PackedInt4, product: str = "exact") -> list[jax.Array]:
    """The matrices by nibble plane, eight of f32 [..., out, in / 256, 32]; see `unpack`.

    Plane by plane: XLA:CPU takes twice as long over one broadcast shift.
    """
    words = packed.words
    words = words.reshape(*words.shape[:-1], -1, GROUP)
    scales = jnp.moveaxis(packed.scales, -1, -3).astype(jnp.float32)

    def plane(index: int) -> jax.Array:
        # A logical shift, because the last nibble holds the word's sign bit.
        q = (lax.shift_right_logical(words, jnp.full_like(words, 4 * index)) & 15) - 8
        weight = q.astype(jnp.float32) * scales[..., index, None]
        if product == "bfloat16":
            weight = lax.reduce_precision(weight, exponent_bits=8, mantissa_bits=7)
        return weight

    return [plane(index) for index in range(_PLANES)]
