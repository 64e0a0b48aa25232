"""What is done to a tensor on its way in: on the host, vectorised, nothing per element."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspec.kernels.expert_matmul.packing import BLOCK, GROUP, padded

__all__ = [
    "dequantize_fp8",
    "heads_in",
    "heads_out",
    "join_kv",
    "narrowed",
    "quantize_int4",
    "repack_scales",
    "repack_words",
    "restored",
    "split_kv",
    "transpose",
    "unpack_scales",
    "unpack_words",
]

NIBBLES = 8  # of a 32-bit word
ZERO_WORD = 0x88888888  # eight times q = 0, stored as q + 8
TRANSPOSED = 2**14
"""Elements that are transposed at a time, but 16 rows at least: whole cache lines are written."""


def transpose(weight: np.ndarray) -> np.ndarray:
    """[in, out] of torch's [out, in]."""
    out = np.empty(weight.shape[::-1], weight.dtype)
    # As plain bits, which numpy moves faster, and some rows at a time: four times as fast.
    out_bits, bits = (array.view(f"u{weight.itemsize}") for array in (out, weight))
    num_rows = max(16, TRANSPOSED // weight.shape[1])
    for row in range(0, len(weight), num_rows):
        rows = slice(row, row + num_rows)
        out_bits[:, rows] = bits[rows].T
    return out


def heads_out(weight: np.ndarray, heads: int) -> np.ndarray:
    """[in, heads, width] of a projection [heads * width, in] to heads."""
    return transpose(weight).reshape(weight.shape[1], heads, -1)


def heads_in(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads, width, out] of a projection [out, heads * width] from heads."""
    return transpose(weight).reshape(heads, -1, weight.shape[0])


def restored(leaf: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor [out, in] whose `transpose`, `heads_out` or `heads_in` the leaf is."""
    return transpose(leaf.reshape(shape[::-1]))


def narrowed(array: np.ndarray) -> np.ndarray:
    """The same f32 values in bf16, where nothing is lost by it."""
    rounded = array.astype(ml_dtypes.bfloat16)
    return rounded if np.array_equal(rounded.astype(array.dtype), array) else array


def split_kv(weight: np.ndarray, heads: int, key_width: int) -> tuple[np.ndarray, np.ndarray]:
    """k_up [heads, key, latent] and v_up [heads, latent, value] of `kv_b_proj`.

    Convention: its rows are, head after head, first the head's keys and then its values.
    """
    per_head = weight.reshape(heads, -1, weight.shape[1])
    key, value = per_head[:, :key_width], per_head[:, key_width:]
    return np.ascontiguousarray(key), np.ascontiguousarray(value.swapaxes(1, 2))


def join_kv(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """`kv_b_proj` of what `split_kv` made of it."""
    per_head = np.concatenate([key, value.swapaxes(1, 2)], axis=1)
    return per_head.reshape(-1, key.shape[2])


def dequantize_fp8(weight: np.ndarray, scale_inv: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """bf16 weights of float8 ones, times the scale of their block (a product, despite the name).

    The last block of a row or column may be partial: 576 rows are 4.5 blocks of 128.
    """
    rows, columns = weight.shape
    scale = np.repeat(np.repeat(scale_inv, block[0], 0)[:rows], block[1], 1)[:, :columns]
    return (weight.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)


def quantize_int4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words and scales, as the kernel reads them, of weights [out, in].

    The rule is compressed-tensors' for symmetric groups: the scale is max |w| / 7.5, rounded to
    bf16 before it is divided by; q = round(w / scale), clipped to -8..7.
    """
    out, columns = weight.shape
    groups = weight.astype(np.float32).reshape(out, -1, GROUP)
    scale = (np.abs(groups).max(-1) / 7.5).astype(ml_dtypes.bfloat16)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)[:, :, None]
    q = np.clip(np.round(groups / divisor), -8, 7).astype(np.int8)
    nibbles = (q + 8).astype(np.uint32).reshape(out, columns // NIBBLES, NIBBLES)
    shifts = 4 * np.arange(NIBBLES, dtype=np.uint32)
    words = np.bitwise_or.reduce(nibbles << shifts, axis=-1)
    return repack_words(words), repack_scales(scale, GROUP)


def repack_words(words: np.ndarray) -> np.ndarray:
    """The kernel's int32 words [out, padded in / 8] of compressed-tensors' [out, in / 8].

    There, nibble b of word w is element 8 w + b. Here, in each block of 256, nibble i of word c is
    element 32 i + c: nibble c % 8 of word 4 i + c // 8 there.
    """
    out, num_words = words.shape
    words = words.view(np.uint32)
    if missing := padded(num_words * NIBBLES) // NIBBLES - num_words:
        words = np.pad(words, [(0, 0), (0, missing)], constant_values=ZERO_WORD)
    packed_N48 = _on_host(_pack_blocks, words.reshape(-1, NIBBLES, 4))
    return packed_N48.reshape(out, -1).view(np.int32)


def unpack_words(words: np.ndarray, in_features: int) -> np.ndarray:
    """compressed-tensors' words [out, in / 8] of the kernel's, which `repack_words` made."""
    unpacked_N84 = _on_host(_unpack_blocks, words.view(np.uint32).reshape(-1, 4, NIBBLES))
    unpadded = unpacked_N84.reshape(len(words), -1)[:, : in_features // NIBBLES]
    return np.ascontiguousarray(unpadded).view(np.int32)


@jax.jit
def _pack_blocks(words_N84: jax.Array) -> jax.Array:
    """Word (q, c) is made of nibble c of the words (i, q). One pass: six times numpy's speed."""
    shift_118 = 4 * jnp.arange(NIBBLES, dtype=jnp.uint32)[None, None]
    nibbles = ((words_N84[:, i, :, None] >> shift_118 & 15) << 4 * i for i in range(NIBBLES))
    return functools.reduce(jnp.bitwise_or, nibbles)


@jax.jit
def _unpack_blocks(words_N48: jax.Array) -> jax.Array:
    """The way back: word (i, q) is made of nibble i of the words (q, c)."""
    shift_181 = 4 * jnp.arange(NIBBLES, dtype=jnp.uint32)[None, :, None]
    nibbles = ((words_N48[:, None, :, c] >> shift_181 & 15) << 4 * c for c in range(NIBBLES))
    return functools.reduce(jnp.bitwise_or, nibbles)


def _on_host(program: Callable[[jax.Array], jax.Array], array: np.ndarray) -> np.ndarray:
    """What a compiled program makes of an array: on the CPU, whichever devices there are."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        host = None
    return np.asarray(program(jax.device_put(array, host)))


def repack_scales(scale: np.ndarray, group_size: int) -> np.ndarray:
    """The kernel's scales [in / 256, 8, out] of [out, in / group_size]; 0 where `in` is padded.

    A larger group's scale is repeated for each group of 32 in it, which changes no weight.
    """
    if group_size != GROUP:
        scale = np.repeat(scale, group_size // GROUP, axis=1)
    out, num_groups = scale.shape
    packed = np.zeros((padded(num_groups * GROUP) // GROUP, out), scale.dtype)
    packed[:num_groups] = transpose(scale)
    return packed.reshape(-1, BLOCK // GROUP, out)


def unpack_scales(scale: np.ndarray, in_features: int) -> np.ndarray:
    """compressed-tensors' scales [out, in / 32] of the kernel's, which `repack_scales` made."""
    out = scale.shape[-1]
    return np.ascontiguousarray(scale.reshape(-1, out).T[:, : in_features // GROUP])
