"""`load_target` and `load_draft`: every layout, against modules that tiny.py fills by itself."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpoint import _place, load_draft, load_target
from jaxspec.config import Numerics
from jaxspec.convert import matrices, transforms
from jaxspec.convert.prepare import prepare_target
from jaxspec.convert.problems import Problems
from jaxspec.convert.source import Source
from tests import make_checkpoint, tiny

F32 = tiny.NUMERICS


def leaves(model: nnx.Module) -> dict[str, np.ndarray]:
    """The model's arrays by path."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in flat}


def assert_same(model: nnx.Module, other: nnx.Module) -> None:
    """Asserts that both hold the same arrays, bit for bit."""
    got, want = leaves(model), leaves(other)
    assert got.keys() == want.keys()
    for path in want:
        assert got[path].dtype == want[path].dtype, path
        assert got[path].tobytes() == want[path].tobytes(), path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, "language_model.model.")
    return load_target(make_checkpoint.write(tmp_path_factory.mktemp("t"), config, tensors), F32)


@pytest.mark.parametrize(
    ("form", "quantization", "prefix", "num_shards"),
    [
        ("wrapper", "int4", "language_model.model.", 3),
        ("wrapper", "int4", "language_model.", 1),
        ("flat", "int4", "model.", 2),
        ("flat", "none", "model.", 1),
    ],
)
def test_target_layouts(tmp_path, form, quantization, prefix, num_shards):
    config = make_checkpoint.target_config(form, quantization)
    tensors = make_checkpoint.target_tensors(config, prefix)
    model = load_target(make_checkpoint.write(tmp_path, config, tensors, num_shards), F32)
    text = make_checkpoint.text_config(config)
    assert_same(model, tiny.target_module(tiny.target_tensors(text), text))


@pytest.mark.parametrize("layout", ["specforge", "speculators", "safeailab"])
def test_draft_layouts(tmp_path, target, layout):
    config, tensors = make_checkpoint.draft_layout(layout)
    draft = load_draft(make_checkpoint.write(tmp_path, config, tensors), F32, target=target)
    has_embedding = "embed_tokens.weight" in tensors
    ids = (2, 2, 1) if layout == "safeailab" else (1, 2, 4)
    assert draft.config.boundaries.ids == ids
    assert draft.config.boundaries.target == target.identity
    want = tiny.draft_config(
        tiny.DRAFT_CONFIG, draft.config.boundaries, has_embedding=has_embedding
    )
    assert draft.config == want
    assert_same(draft, tiny.draft_module(tiny.draft_tensors(tiny.DRAFT_CONFIG), want))


def test_dtype_is_the_callers(tmp_path):
    """bf16 weights in an f32 model are the same numbers; router and words never change type."""
    config = make_checkpoint.target_config()
    tensors = {
        name: tensor.astype(ml_dtypes.bfloat16) if tensor.dtype == np.float32 else tensor
        for name, tensor in make_checkpoint.target_tensors(config).items()
    }
    path = make_checkpoint.write(tmp_path, config, tensors)
    bf16, f32 = leaves(load_target(path, Numerics())), leaves(load_target(path, F32))
    kinds = {"experts.gate_up_words": "int32", "experts.down_words": "int32"}
    kinds |= {"sparse.router.weight": "float32", "sparse.router.bias": "float32"}
    for name, array in bf16.items():
        assert array.dtype == jnp.dtype(kinds.get(name, "bfloat16")), name
        np.testing.assert_array_equal(array.astype(np.float64), f32[name].astype(np.float64))


def test_fp8_blocks(tmp_path):
    """Plain weights are the float8 ones times their block's scale, partial blocks included."""
    config = make_checkpoint.target_config("flat", "fp8")
    tensors = make_checkpoint.target_tensors(config)
    model = leaves(load_target(make_checkpoint.write(tmp_path, config, tensors), F32))
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    want = np.zeros(tensors[name].shape, np.float32)
    for row, column in np.ndindex(*want.shape):
        block = row // make_checkpoint.FP8_BLOCK[0], column // make_checkpoint.FP8_BLOCK[1]
        want[row, column] = np.float32(tensors[name][row, column]) * np.float32(
            tensors[f"{name}_scale_inv"][block]
        )
    np.testing.assert_array_equal(
        model["experts.down"][1, 5], want.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_experts_quantised_only_when_asked(tmp_path):
    config = make_checkpoint.target_config("flat", "none")
    tensors = make_checkpoint.target_tensors(config)
    path = make_checkpoint.write(tmp_path, config, tensors)
    plain, packed = load_target(path, F32), load_target(path, F32, experts="int4")
    assert (plain.config.num_bits, packed.config.num_bits) == (None, 4)
    words, scales = transforms.quantize_int4(tensors["model.layers.3.mlp.experts.7.up_proj.weight"])
    assert plain.identity != packed.identity, "a quantised model is another model"
    got = leaves(packed)
    np.testing.assert_array_equal(got["experts.gate_up_words"][2, 7, 1], words)
    np.testing.assert_array_equal(got["experts.gate_up_scales"][2, 7, 1], scales)
    jax.block_until_ready(nnx.state(plain))


def test_layers_are_placed_without_a_copy():
    """A stack is donated: the layer goes into the buffer that is there."""
    stacks = {"w": jnp.zeros((4, 64, 64)), "b": jnp.zeros((4, 64), jnp.bfloat16)}
    jax.block_until_ready(stacks)
    before = {path: stack.unsafe_buffer_pointer() for path, stack in stacks.items()}
    leaves = {"w": np.ones((1, 64, 64), np.float32), "b": np.ones((1, 64), ml_dtypes.bfloat16)}
    starts = {"w": np.asarray([2, 0, 0], np.int32), "b": np.asarray([2, 0], np.int32)}
    placed = _place(stacks, leaves, starts)
    assert {path: stack.unsafe_buffer_pointer() for path, stack in placed.items()} == before
    assert float(placed["w"].sum()) == 64 * 64
    assert all(stack.is_deleted() for stack in stacks.values())


def test_one_layer_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """The most that reading and building takes does not grow with the number of layers."""
    monkeypatch.setattr(matrices, "NUM_READERS", 1)  # or the most depends on how they overlap
    peaks = []
    for num_layers in (4, 10):
        config = make_checkpoint.target_config()
        config["text_config"] |= {"num_hidden_layers": num_layers, "n_routed_experts": 32}
        tensors = make_checkpoint.target_tensors(config)
        directory = make_checkpoint.write(tmp_path / str(num_layers), config, tensors)
        prepared, problems = prepare_target(Source(directory)), Problems("here")
        tracemalloc.start()
        for piece in prepared.pieces(problems):
            del piece
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    words = 32 * (2 * 32 + 64) * 32 * 4  # of one layer's experts, in bytes
    assert words < peaks[0] < 3 * words
    assert peaks[1] < 1.1 * peaks[0]
