"""The tensors of a target, by Hugging Face's names, and the parameters they become."""

import collections
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxspec.config import TargetConfig
from jaxspec.convert import transforms
from jaxspec.convert.configs import Quantization
from jaxspec.convert.plan import Reader, Rule, UnusedRule, Want
from jaxspec.convert.problems import Problems
from jaxspec.convert.source import DTYPES, Source

__all__ = ["find_prefix", "target_rules", "unused_target_tensors"]

PREFIXES = ("language_model.model.", "language_model.", "model.")
"""In front of `embed_tokens` and `layers`: Kimi-K2.5, its NVFP4 release, and flat checkpoints."""
HEADS = ("language_model.lm_head.weight", "lm_head.weight")
NUM_READERS = 8
"""Experts read and repacked at once: numpy and file reads run beside each other."""

Build = Callable[[Reader], tuple[np.ndarray, ...]]


def find_prefix(source: Source, problems: Problems) -> tuple[str, str]:
    """The prefix of the decoder's tensors in this checkpoint, and the name of its head.

    Raises:
      CheckpointError: no prefix, or more than one, has an embedding.
    """
    found = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in source.tensors]
    if len(found) != 1:
        tried = ", ".join(f"{prefix}embed_tokens.weight" for prefix in PREFIXES)
        problems.add(
            f"expected one embedding among {tried}; found "
            f"{', '.join(f'{prefix}embed_tokens.weight' for prefix in found) or 'none'}"
        )
        problems.raise_any()
    heads = [head for head in HEADS if head in source.tensors]
    # A second head stays unclaimed, and is reported as a tensor that nothing knows.
    return found[0], heads[0] if heads else HEADS[found[0] == "model."]


def unused_target_tensors(prefix: str, config: TargetConfig, num_extra: int) -> list[UnusedRule]:
    """The tensors of a target checkpoint that no parameter is built from."""
    first, layer = config.num_hidden_layers, re.escape(f"{prefix}layers.")
    extra = "|".join(str(first + index) for index in range(num_extra)) or "(?!)"
    return [
        UnusedRule(
            re.compile(layer + r"\d+\.self_attn\.rotary_emb\.inv_freq"),
            "stale: rotary frequencies are computed from the config",
        ),
        UnusedRule(
            re.compile(r"(vision_tower|mm_projector|multi_modal_projector)\..*"),
            "vision: present and not converted",
        ),
        UnusedRule(
            re.compile(rf"{layer}({extra})\..*"),
            "multi-token-prediction layer (num_nextn_predict_layers), which is no draft here",
        ),
    ]


def target_rules(
    source: Source,
    prefix: str,
    head: str,
    config: TargetConfig,
    quantization: Quantization,
) -> Iterator[Rule]:
    """The rules of a target, piece by piece in the order of the model."""
    tensors = _Tensors(source, quantization)
    c = config
    vocab = (c.vocab_size, c.hidden_size)
    yield _copy("embed", None, "embed", Want(f"{prefix}embed_tokens.weight", vocab))
    for index in range(c.num_hidden_layers):
        yield from _layer(tensors, f"{prefix}layers.{index}.", index, config)
    norm = Want(f"{prefix}norm.weight", (c.hidden_size,))
    yield _copy("norm", None, "norm.weight", norm)
    yield _transposed("head", None, "head", Want(head, vocab))


class _Tensors:
    """Wants for matrices, as this checkpoint stores them."""

    def __init__(self, source: Source, quantization: Quantization) -> None:
        self.source, self.quantization = source, quantization

    def matrix(self, name: str, out: int, in_features: int) -> Want:
        """The weight of a linear layer, plain or, where the config says so, float8 in blocks."""
        weight, info = f"{name}.weight", self.source.tensors.get(f"{name}.weight")
        if self.quantization.kind != "fp8" or info is None or info.dtype != "F8_E4M3":
            return Want(weight, (out, in_features))
        rows, columns = self.quantization.block
        blocks = (-(-out // rows), -(-in_features // columns))
        scale = Want(f"{name}.weight_scale_inv", blocks, ("F32",))
        return Want(weight, (out, in_features), ("F8_E4M3",), scale)

    def packed(self, name: str, out: int, in_features: int) -> tuple[Want, Want, Want]:
        """An int4 expert matrix: words, scales, and its true shape."""
        groups = -(-in_features // self.quantization.group_size)
        return (
            Want(f"{name}.weight_packed", (out, -(-in_features // 8)), ("I32",)),
            Want(f"{name}.weight_scale", (out, groups), ("BF16",)),
            Want(f"{name}.weight_shape", (2,), ("I32", "I64")),
        )


def _layer(tensors: _Tensors, name: str, index: int, config: TargetConfig) -> Iterator[Rule]:
    """The rules of one decoder layer."""
    c, piece = config, f"layer_{index:03d}"
    is_dense = index < c.first_k_dense_replace
    stack, layer = ("dense", index) if is_dense else ("sparse", index - c.first_k_dense_replace)
    width, attention = c.hidden_size, f"{stack}.attention"
    for leaf, norm in (
        ("input_norm", "input_layernorm"),
        ("post_norm", "post_attention_layernorm"),
    ):
        yield _copy(piece, layer, f"{stack}.{leaf}.weight", Want(f"{name}{norm}.weight", (width,)))
    for leaf, norm, size in (
        ("q_a_norm", "q_a_layernorm", c.q_lora_rank),
        ("kv_a_norm", "kv_a_layernorm", c.kv_lora_rank),
    ):
        want = Want(f"{name}self_attn.{norm}.weight", (size,))
        yield _copy(piece, layer, f"{attention}.{leaf}.weight", want)
    heads, key, value = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim
    rotary, matrix = c.qk_rope_head_dim, lambda part, *shape: tensors.matrix(name + part, *shape)
    q_a = matrix("self_attn.q_a_proj", c.q_lora_rank, width)
    yield _transposed(piece, layer, f"{attention}.q_a", q_a)
    q_b = matrix("self_attn.q_b_proj", heads * (key + rotary), c.q_lora_rank)
    yield Rule(
        piece,
        layer,
        (f"{attention}.q_b",),
        (q_b,),
        lambda reader: (transforms.heads_out(reader.read(q_b), heads),),
    )
    kv_a = matrix("self_attn.kv_a_proj_with_mqa", c.kv_lora_rank + rotary, width)
    yield _transposed(piece, layer, f"{attention}.kv_a", kv_a)
    kv_b = matrix("self_attn.kv_b_proj", heads * (key + value), c.kv_lora_rank)
    yield Rule(
        piece,
        layer,
        (f"{attention}.k_up", f"{attention}.v_up"),
        (kv_b,),
        lambda reader: transforms.split_kv(reader.read(kv_b), heads, key),
    )
    out = matrix("self_attn.o_proj", width, heads * value)
    yield Rule(
        piece,
        layer,
        (f"{attention}.out",),
        (out,),
        lambda reader: (transforms.heads_in(reader.read(out), heads),),
    )
    if is_dense:
        yield from _mlp(
            tensors, piece, layer, "dense.mlp", f"{name}mlp.", width, c.intermediate_size
        )
        return
    router = Want(f"{name}mlp.gate.weight", (c.n_routed_experts, width))
    bias = Want(f"{name}mlp.gate.e_score_correction_bias", (c.n_routed_experts,))
    yield Rule(
        piece,
        layer,
        ("sparse.router.weight", "sparse.router.bias"),
        (router, bias),
        # f32 whatever the file's type: a routing decision is never rounded.
        lambda reader: (
            transforms.transpose(reader.read(router).astype(np.float32)),
            reader.read(bias).astype(np.float32),
        ),
    )
    shared = c.n_shared_experts * c.moe_intermediate_size
    yield from _mlp(
        tensors, piece, layer, "sparse.shared", f"{name}mlp.shared_experts.", width, shared
    )
    yield _experts(tensors, piece, layer, f"{name}mlp.experts.", config)


def _mlp(
    tensors: _Tensors, piece: str, layer: int, path: str, name: str, width: int, hidden: int
) -> Iterator[Rule]:
    for part, *shape in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)):
        want = tensors.matrix(f"{name}{part}_proj", *shape)
        yield _transposed(piece, layer, f"{path}.{part}", want)


def _experts(tensors: _Tensors, piece: str, layer: int, name: str, config: TargetConfig) -> Rule:
    """The routed experts of one layer: gathered into one array per kind, gate before up."""
    c, quantization = config, tensors.quantization
    shape_of = {
        "gate": (c.moe_intermediate_size, c.hidden_size),
        "up": (c.moe_intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.moe_intermediate_size),
    }
    slots = {
        (expert, part): f"{name}{expert}.{part}_proj"
        for expert in range(c.n_routed_experts)
        for part in shape_of
    }
    is_packed = quantization.kind == "int4"
    wants: dict[tuple[int, str], tuple[Want, ...]] = {
        slot: tensors.packed(tensor, *shape_of[slot[1]])
        if is_packed
        else (tensors.matrix(tensor, *shape_of[slot[1]]),)
        for slot, tensor in slots.items()
    }

    def plain_dtype() -> np.dtype:
        # One array holds them all; from bf16 to f32 nothing is lost.
        is_f32 = any(tensors.source.tensors[ws[0].name].dtype == "F32" for ws in wants.values())
        return DTYPES["F32" if is_f32 else "BF16"]

    def arrays_of(reader: Reader, slot: tuple[int, str]) -> tuple[np.ndarray, ...]:
        if is_packed:
            return _read_packed(reader, wants[slot], shape_of[slot[1]], quantization.group_size)
        weight = reader.read(wants[slot][0])
        return transforms.quantize_int4(weight) if c.num_bits else (weight.astype(plain_dtype()),)

    def build(reader: Reader) -> tuple[np.ndarray, ...]:
        first = {part: arrays_of(reader, (0, part)) for part in shape_of}
        gate_up = [_empty(c.n_routed_experts, 2, like=array) for array in first["gate"]]
        down = [_empty(c.n_routed_experts, like=array) for array in first["down"]]
        views = {"gate": [s[:, 0] for s in gate_up], "up": [s[:, 1] for s in gate_up], "down": down}

        def fill(slot: tuple[int, str]) -> None:
            expert, part = slot
            arrays = arrays_of(reader, slot) if expert else first[part]
            for view, array in zip(views[part], arrays, strict=True):
                view[expert] = array

        with ThreadPoolExecutor(NUM_READERS) as pool:
            collections.deque(pool.map(fill, slots), maxlen=0)
        return (*gate_up, *down)

    parts = ("_words", "_scales") if c.num_bits else ("",)
    leaves = tuple(f"experts.{kind}{part}" for kind in ("gate_up", "down") for part in parts)
    return Rule(piece, layer, leaves, tuple(w for ws in wants.values() for w in ws), build)


def _empty(*lead: int, like: np.ndarray) -> np.ndarray:
    return np.empty((*lead, *like.shape), like.dtype)


def _read_packed(
    reader: Reader, wants: tuple[Want, ...], shape: tuple[int, int], group_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Words and scales of one expert matrix, in the kernel's layout."""
    words, scale, true_shape = (reader.read(want) for want in wants)
    if tuple(true_shape.tolist()) != shape:
        reader.report(f"tensor {wants[2].name} says {true_shape.tolist()}; expected {list(shape)}")
    return transforms.repack_words(words), transforms.repack_scales(scale, group_size)


def _copy(piece: str, layer: int | None, leaf: str, want: Want) -> Rule:
    return Rule(piece, layer, (leaf,), (want,), lambda reader: (reader.read(want),))


def _transposed(piece: str, layer: int | None, leaf: str, want: Want) -> Rule:
    build = lambda reader: (transforms.transpose(reader.read(want)),)
    return Rule(piece, layer, (leaf,), (want,), build)
