"""What is done to tensors, against loops over single elements written from the formats' text."""

import ml_dtypes
import numpy as np
import pytest

from jaxspec.convert import transforms
from jaxspec.kernels.expert_matmul.packing import PackedInt4, pack, unpack


def slow_unpack(words: np.ndarray, columns: int) -> np.ndarray:
    """compressed-tensors: element i of each word's eight sits at bits 4 i, as q + 8."""
    q = np.zeros((len(words), columns), np.int64)
    for row in range(len(words)):
        for column in range(columns):
            word = int(words[row, column // 8]) % 2**32
            q[row, column] = word // 16 ** (column % 8) % 16 - 8
    return q


@pytest.mark.parametrize("columns", [32, 96, 256, 288])
def test_repacked_words_hold_the_same_values(columns):
    """Every int4 value occurs, sign bits of words included, in whole and in padded blocks."""
    rng = np.random.default_rng(columns)
    words = rng.integers(-(2**31), 2**31, (5, columns // 8), np.int64).astype(np.int32)
    words[0] = -1  # all ones: what an arithmetic shift would smear
    scale = rng.uniform(0.5, 2, (5, columns // 32)).astype(ml_dtypes.bfloat16)
    q = slow_unpack(words, columns)
    assert set(np.unique(q)) == set(range(-8, 8))
    want = pack(q.astype(np.int8), scale)
    got = transforms.repack_words(words)
    scales = transforms.repack_scales(scale, 32)
    np.testing.assert_array_equal(got, want.words)
    np.testing.assert_array_equal(scales, want.scales)
    product = np.asarray(unpack(PackedInt4(got, scales, columns), np.dtype(np.float32)))
    for row in range(5):
        for column in range(columns):
            assert product[row, column] == q[row, column] * np.float32(scale[row, column // 32])


@pytest.mark.parametrize("group_size", [64, 128])
def test_larger_groups_change_no_weight(group_size):
    rng = np.random.default_rng(group_size)
    q = rng.integers(-8, 8, (3, 256)).astype(np.int8)
    scale = rng.uniform(0.5, 2, (3, 256 // group_size)).astype(ml_dtypes.bfloat16)
    packed = PackedInt4(
        pack(q, np.ones((3, 8))).words, transforms.repack_scales(scale, group_size), 256
    )
    product = np.asarray(unpack(packed, np.dtype(np.float32)))
    for row in range(3):
        for column in range(256):
            want = q[row, column] * np.float32(scale[row, column // group_size])
            assert product[row, column] == want


def test_fp8_blocks_that_are_partial():
    """4.5 blocks of 128, as in kv_a_proj_with_mqa's 576 rows."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((9, 7)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.1, 2, (5, 3)).astype(np.float32)
    got = transforms.dequantize_fp8(weight, scale, (2, 3))
    assert got.dtype == ml_dtypes.bfloat16
    for row in range(9):
        for column in range(7):
            exact = np.float32(weight[row, column]) * scale[row // 2, column // 3]
            assert got[row, column] == ml_dtypes.bfloat16(exact)


def test_quantize_int4():
    """Within half a step everywhere, the largest of a group at its end, and zeros exact."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((4, 96)).astype(np.float32)
    weight[2, 32:64] = 0
    words, scales = transforms.quantize_int4(weight)
    got = np.asarray(unpack(PackedInt4(words, scales, 96), np.dtype(np.float32)))
    step = np.abs(weight.reshape(4, 3, 32)).max(-1) / 7.5
    error = np.abs(got - weight).reshape(4, 3, 32).max(-1)
    assert (error <= 0.53 * step).all()  # half a step, and the scale's rounding to bf16
    assert (got[2, 32:64] == 0).all()


def test_heads():
    """Rows of a projection to heads are head after head; kv_b's are keys, then values, per head."""
    heads, key, value, latent = 3, 4, 2, 5
    weight = np.arange(heads * (key + value) * latent).reshape(-1, latent)
    k_up, v_up = transforms.split_kv(weight, heads, key)
    assert (k_up.shape, v_up.shape) == ((heads, key, latent), (heads, latent, value))
    to_heads = transforms.heads_out(weight, heads)
    from_heads = transforms.heads_in(weight.T, heads)
    for head in range(heads):
        for part in range(key + value):
            row = weight[head * (key + value) + part]
            if part < key:
                np.testing.assert_array_equal(k_up[head, part], row)
            else:
                np.testing.assert_array_equal(v_up[head, :, part - key], row)
            np.testing.assert_array_equal(to_heads[:, head, part], row)
            np.testing.assert_array_equal(from_heads[head, part], row)
