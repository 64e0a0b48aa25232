"""A tiny random target and draft: Hugging Face tensors, configs, and modules filled from them.

No two sizes are equal where the code could mix them up. The filling is written here, apart from
`convert/`, so that tests of the modules do not rest on the converter.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxspec.cache import KeyValues, Latents
from jaxspec.config import LlamaDraftConfig, Numerics, RotaryConfig, TargetConfig, Yarn
from jaxspec.contracts import Boundaries, Features, TargetIds
from jaxspec.draft import Borrowed, Draft
from jaxspec.kernels.expert_matmul.packing import pack
from jaxspec.mla import Pass
from jaxspec.target import Target
from tests.reference import formulas
from tests.reference.draft import ReferenceDraft
from tests.reference.target import ReferenceTarget, unpack_words

IDENTITY = "tiny@1"
BOUNDARIES = (1, 2, 4)
GROUP_SIZE = 32
NUMERICS = Numerics(dtype="float32")

TARGET_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 24,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 28,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 1000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 2.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32},
            }
        },
    },
}
DRAFT_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 24,
    "draft_vocab_size": 20,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 18,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "max_position_embeddings": 32,
    "norm_before_residual": False,
}


def target_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Kimi-K2.5's names; experts packed where the config says so."""
    rng = np.random.default_rng(seed)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    tensors = {
        "model.embed_tokens.weight": normal(rng, config["vocab_size"], width, gain=3 * width**0.5),
        "model.norm.weight": near_one(rng, width),
        "lm_head.weight": normal(rng, config["vocab_size"], width, gain=2),
    }
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": near_one(rng, width),
            "post_attention_layernorm.weight": near_one(rng, width),
            "self_attn.q_a_proj.weight": normal(rng, q_rank, width),
            "self_attn.q_a_layernorm.weight": near_one(rng, q_rank),
            "self_attn.q_b_proj.weight": normal(rng, heads * (nope + rope), q_rank, gain=2),
            "self_attn.kv_a_proj_with_mqa.weight": normal(rng, kv_rank + rope, width),
            "self_attn.kv_a_layernorm.weight": near_one(rng, kv_rank),
            "self_attn.kv_b_proj.weight": normal(
                rng, heads * (nope + config["v_head_dim"]), kv_rank
            ),
            "self_attn.o_proj.weight": normal(rng, width, heads * config["v_head_dim"]),
        }
        if index < config["first_k_dense_replace"]:
            layer |= mlp_tensors(rng, "mlp.", width, config["intermediate_size"])
        else:
            experts, hidden = config["n_routed_experts"], config["moe_intermediate_size"]
            layer["mlp.gate.weight"] = normal(rng, experts, width)
            layer["mlp.gate.e_score_correction_bias"] = 0.1 * normal(rng, experts, 1)[:, 0]
            shared = config["n_shared_experts"] * hidden
            layer |= mlp_tensors(rng, "mlp.shared_experts.", width, shared)
            for expert in range(experts):
                weights = mlp_tensors(rng, f"mlp.experts.{expert}.", width, hidden)
                if "quantization_config" in config:
                    for name in list(weights):
                        weights |= _quantized(name.removesuffix(".weight"), weights.pop(name))
                layer |= weights
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def draft_tensors(config: dict, num_boundaries: int = 3, seed: int = 1) -> dict[str, np.ndarray]:
    """Random weights under SpecForge's names, with an embedding and a pruned head of its own."""
    rng = np.random.default_rng(seed)
    width, head_dim = config["hidden_size"], config["head_dim"]
    rows = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    rows["v"] = rows["k"]
    kept = np.sort(rng.choice(config["vocab_size"], config["draft_vocab_size"], replace=False))
    return {
        "embed_tokens.weight": normal(rng, config["vocab_size"], width, gain=width**0.5),
        "fc.weight": normal(rng, width, num_boundaries * width),
        "midlayer.input_layernorm.weight": near_one(rng, width),
        "midlayer.hidden_norm.weight": near_one(rng, width),
        "midlayer.post_attention_layernorm.weight": near_one(rng, width),
        **{
            f"midlayer.self_attn.{n}_proj.weight": normal(rng, rows[n] * head_dim, 2 * width)
            for n in "qkv"
        },
        "midlayer.self_attn.o_proj.weight": normal(
            rng, width, config["num_attention_heads"] * head_dim
        ),
        **mlp_tensors(rng, "midlayer.mlp.", width, config["intermediate_size"]),
        "norm.weight": near_one(rng, width),
        "lm_head.weight": normal(rng, config["draft_vocab_size"], width, gain=2),
        "d2t": kept - np.arange(len(kept)),
    }


def related_draft_tensors(config: dict, target: ReferenceTarget) -> dict[str, np.ndarray]:
    """A draft that is right often enough for whole paths of its trees to be accepted.

    Queries equal keys, so that a row attends to rows of its own token, and the head is fitted to
    the target's logits by least squares: what training does, in one step.
    """
    tensors = draft_tensors(config)
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    key = tensors["midlayer.self_attn.k_proj.weight"]
    per_head = key.reshape(-1, config["head_dim"], key.shape[1]).repeat(groups, axis=0)
    tensors["midlayer.self_attn.q_proj.weight"] = 5 * per_head.reshape(-1, key.shape[1])
    tensors["midlayer.self_attn.o_proj.weight"] *= 24
    draft, rng = ReferenceDraft(tensors, config), np.random.default_rng(2)
    states, logits = [], []
    for _ in range(40):
        ids = rng.integers(0, config["vocab_size"], 20)
        seen = target.run(ids)
        hidden = draft.fuse(seen.features(BOUNDARIES)[:-1])
        out = draft.run(hidden, ids[1:], np.arange(19), formulas.causal(19))
        states.append(formulas.rms_norm(out, draft.weights["norm"], config["rms_norm_eps"]))
        logits.append(seen.logits[1:, draft.target_of_draft])
    head = np.linalg.lstsq(np.concatenate(states), np.concatenate(logits), rcond=None)[0]
    tensors["lm_head.weight"] = head.T.astype(np.float32)
    return tensors


def target_config(config: dict) -> TargetConfig:
    """The config of the module for a Hugging Face config."""
    fields = {field.name for field in dataclasses.fields(TargetConfig)}
    given = {name: value for name, value in config.items() if name in fields}
    return TargetConfig(
        **{"latent_norm_eps": config["rms_norm_eps"], **given},
        rotary=RotaryConfig(
            config["qk_rope_head_dim"], config["rope_theta"], "pairs", _yarn(config)
        ),
        num_bits=4 if "quantization_config" in config else None,
    )


def draft_config(config: dict, boundaries: Boundaries, **changes) -> LlamaDraftConfig:
    """The config of the module for a Hugging Face config, and what its `fc` reads."""
    fields = {field.name for field in dataclasses.fields(LlamaDraftConfig)}
    given = {name: value for name, value in config.items() if name in fields}
    return LlamaDraftConfig(
        **{"has_embedding": True, "has_head": True, **given, **changes},
        rotary=RotaryConfig(config["head_dim"], config["rope_theta"], "halves", _yarn(config)),
        boundaries=boundaries,
    )


def target_module(
    tensors: dict[str, np.ndarray], config: dict, numerics: Numerics = NUMERICS
) -> Target:
    """The module that holds these tensors."""
    dense = range(config["first_k_dense_replace"])
    sparse = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]

    def stacked(layers: range, suffix: str, transform=lambda weight: weight) -> np.ndarray:
        names = [f"model.layers.{index}.{suffix}" for index in layers]
        return np.stack([transform(tensors[name]) for name in names])

    def attention_and_norms(layers: range) -> dict[tuple[str, ...], np.ndarray]:
        def kv_b(weight: np.ndarray) -> np.ndarray:
            return weight.reshape(heads, -1, config["kv_lora_rank"])

        attn = "self_attn."
        return {
            ("input_norm", "weight"): stacked(layers, "input_layernorm.weight"),
            ("post_norm", "weight"): stacked(layers, "post_attention_layernorm.weight"),
            ("attention", "q_a"): stacked(layers, attn + "q_a_proj.weight", np.transpose),
            ("attention", "q_a_norm", "weight"): stacked(layers, attn + "q_a_layernorm.weight"),
            ("attention", "q_b"): stacked(
                layers, attn + "q_b_proj.weight", lambda w: w.T.reshape(len(w.T), heads, -1)
            ),
            ("attention", "kv_a"): stacked(
                layers, attn + "kv_a_proj_with_mqa.weight", np.transpose
            ),
            ("attention", "kv_a_norm", "weight"): stacked(layers, attn + "kv_a_layernorm.weight"),
            ("attention", "k_up"): stacked(
                layers, attn + "kv_b_proj.weight", lambda w: kv_b(w)[:, :nope]
            ),
            ("attention", "v_up"): stacked(
                layers, attn + "kv_b_proj.weight", lambda w: kv_b(w)[:, nope:].swapaxes(1, 2)
            ),
            ("attention", "out"): stacked(
                layers, attn + "o_proj.weight", lambda w: w.T.reshape(heads, -1, len(w))
            ),
        }

    def mlp(layers: range, prefix: str) -> dict[str, np.ndarray]:
        return {
            name: stacked(layers, f"{prefix}{name}_proj.weight", np.transpose)
            for name in ("gate", "up", "down")
        }

    values = {("embed",): tensors["model.embed_tokens.weight"]}
    values |= {("norm", "weight"): tensors["model.norm.weight"]}
    values |= {("head",): tensors["lm_head.weight"].T}
    for kind, layers in (("dense", dense), ("sparse", sparse)):
        values |= {(kind, *path): value for path, value in attention_and_norms(layers).items()}
    values |= {("dense", "mlp", name): value for name, value in mlp(dense, "mlp.").items()}
    shared = mlp(sparse, "mlp.shared_experts.")
    values |= {("sparse", "shared", name): value for name, value in shared.items()}
    values[("sparse", "router", "weight")] = stacked(sparse, "mlp.gate.weight", np.transpose)
    values[("sparse", "router", "bias")] = stacked(sparse, "mlp.gate.e_score_correction_bias")
    values |= _experts(tensors, config, sparse)
    return _filled(lambda rngs: Target(target_config(config), numerics, IDENTITY, rngs), values)


def draft_module(
    tensors: dict[str, np.ndarray], config: LlamaDraftConfig, numerics: Numerics = NUMERICS
) -> Draft:
    """The module that holds these tensors."""
    layer = "midlayer."
    values = {
        ("fc",): tensors["fc.weight"].T,
        ("input_norm", "weight"): tensors[layer + "input_layernorm.weight"],
        ("hidden_norm", "weight"): tensors[layer + "hidden_norm.weight"],
        ("post_norm", "weight"): tensors[layer + "post_attention_layernorm.weight"],
        ("attention", "out"): tensors[layer + "self_attn.o_proj.weight"].T.reshape(
            config.num_attention_heads, config.head_dim, -1
        ),
        ("norm", "weight"): tensors["norm.weight"],
        ("target_of_draft",): np.arange(len(tensors["d2t"])) + tensors["d2t"],
    }
    for name in ("query", "key", "value"):
        weight = tensors[f"{layer}self_attn.{name[0]}_proj.weight"]
        values[("attention", name)] = weight.T.reshape(len(weight.T), -1, config.head_dim)
    for name in ("gate", "up", "down"):
        values[("mlp", name)] = tensors[f"{layer}mlp.{name}_proj.weight"].T
    if config.has_embedding:
        values[("embed",)] = tensors["embed_tokens.weight"]
    if config.has_head:
        values[("head",)] = tensors["lm_head.weight"].T
    return _filled(lambda rngs: Draft(config, numerics, rngs), values)


@functools.partial(jax.jit, static_argnames=("graph", "capture"))
def run_target(
    graph: nnx.GraphDef,
    params: nnx.State,
    ids_BT: jax.Array,
    pos_BT: jax.Array,
    kv_len_B: jax.Array,
    cache: Latents,
    capture: Boundaries,
    sees_BTT: jax.Array | None = None,
    is_real_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Latents, jax.Array, jax.Array]:
    """Logits, features, rows, experts and margins of one jitted pass."""
    target = nnx.merge(graph, params)
    at = Pass(pos_BT, kv_len_B, sees_BTT, is_real_BT)
    done = target(TargetIds(ids_BT, target.config.vocab_size), at, cache, capture)
    features = done.features.require(capture, "test")
    return target.logits(done.hidden), features, done.rows, done.experts, done.router_margin


@functools.partial(jax.jit, static_argnames=("graph",))
def run_draft(
    graph: nnx.GraphDef,
    params: nnx.State,
    source: Features | jax.Array,
    ids_BT: jax.Array,
    pos_BT: jax.Array,
    kv_len_B: jax.Array,
    cache: KeyValues,
    earlier: KeyValues | None = None,
    sees_BTT: jax.Array | None = None,
    target: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, KeyValues]:
    """Logits, recurrent hidden and rows of one jitted pass: `fuse` of features, else `recur`."""
    draft = nnx.merge(graph, params)
    tokens, at = TargetIds(ids_BT, draft.config.vocab_size), Pass(pos_BT, kv_len_B, sees_BTT)
    nothing = jnp.zeros((0, draft.config.hidden_size)), jnp.zeros((draft.config.hidden_size, 0))
    borrowed = Borrowed(*(nothing if target is None else target))
    if isinstance(source, Features):
        done = draft.fuse(source, tokens, at, cache, borrowed)
    else:
        done = draft.recur(source, tokens, at, cache, earlier, borrowed)
    return draft.logits(done.recurrent, borrowed), done.recurrent, done.rows


def normal(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
    """A matrix that keeps a vector's size, times `gain`."""
    return (gain * columns**-0.5 * rng.standard_normal((rows, columns))).astype(np.float32)


def near_one(rng: np.random.Generator, width: int) -> np.ndarray:
    """A norm's weight."""
    return (1 + 0.2 * rng.standard_normal(width)).astype(np.float32)


def mlp_tensors(
    rng: np.random.Generator, prefix: str, width: int, hidden: int
) -> dict[str, np.ndarray]:
    """The three matrices of a gated MLP."""
    return {
        f"{prefix}gate_proj.weight": normal(rng, hidden, width, gain=1.5),
        f"{prefix}up_proj.weight": normal(rng, hidden, width),
        f"{prefix}down_proj.weight": normal(rng, width, hidden),
    }


def _quantized(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """The three tensors of a pack-quantized matrix, rounded to nearest within its groups."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, GROUP_SIZE)
    scale = (np.abs(groups).max(-1) / 7.5).astype(ml_dtypes.bfloat16)
    q = np.clip(np.round(groups / scale[..., None].astype(np.float32)), -8, 7).astype(np.int64)
    shifts = 4 * np.arange(8)
    words = ((q.reshape(rows, -1, 8) + 8) << shifts).sum(-1).astype(np.uint32).view(np.int32)
    return {
        f"{name}.weight_packed": words,
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": np.array([rows, columns], np.int32),
    }


def _experts(
    tensors: dict[str, np.ndarray], config: dict, layers: range
) -> dict[tuple[str, ...], np.ndarray]:
    experts = range(config["n_routed_experts"])

    def stack(kind: str, suffix: str) -> np.ndarray:
        matrix = lambda layer, expert: tensors[  # noqa: E731
            f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.{suffix}"
        ]
        return np.stack([np.stack([matrix(layer, e) for e in experts]) for layer in layers])

    if "quantization_config" not in config:
        gate_up = np.stack([stack("gate", "weight"), stack("up", "weight")], axis=2)
        return {("experts", "gate_up"): gate_up, ("experts", "down"): stack("down", "weight")}

    def packed(kind: str):
        words, scale = stack(kind, "weight_packed"), stack(kind, "weight_scale")
        flat = unpack_words(words.reshape(-1, words.shape[-1]), 8 * words.shape[-1])
        return flat.reshape(*words.shape[:-1], -1), scale

    (gate, gate_scale), (up, up_scale), (down, down_scale) = map(packed, ("gate", "up", "down"))
    gate_up = pack(np.stack([gate, up], axis=2), np.stack([gate_scale, up_scale], axis=2))
    down = pack(down, down_scale)
    return {
        ("experts", "gate_up_words"): gate_up.words,
        ("experts", "gate_up_scales"): gate_up.scales,
        ("experts", "down_words"): down.words,
        ("experts", "down_scales"): down.scales,
    }


def _yarn(config: dict) -> Yarn | None:
    scaling = config.get("rope_scaling")
    return Yarn(**{k: v for k, v in scaling.items() if k != "type"}) if scaling else None


def _filled(make, values: dict[tuple[str, ...], np.ndarray]):
    """The module that `make(rngs)` describes, holding `values` and nothing else."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    flat = dict(nnx.to_flat_state(state))
    assert flat.keys() == values.keys(), flat.keys() ^ values.keys()
    for path, variable in flat.items():
        wanted = variable.get_value()
        assert wanted.shape == values[path].shape, (path, wanted.shape, values[path].shape)
        flat[path] = variable.replace(jnp.asarray(values[path]).astype(wanted.dtype))
    return nnx.merge(graph, nnx.from_flat_state(flat))
