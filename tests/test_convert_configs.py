"""Configs of published checkpoints, as their model cards print them, and what is read from them."""

import copy
import types

import numpy as np
import pytest

from jaxspec.config import RotaryConfig, TargetConfig, Yarn
from jaxspec.convert.configs import Quantization, TargetFacts, read_target_config
from jaxspec.convert.draft_configs import read_draft
from jaxspec.convert.matrices import Matrices
from jaxspec.convert.names import target_rules
from jaxspec.convert.prepare import TargetCard, tie
from jaxspec.convert.problems import CheckpointError, Problems
from jaxspec.convert.source import TensorInfo
from jaxspec.layers import inverse_frequencies
from tests.real_layouts import INT4, kimi_k2_instruct_config, kimi_k25_config

TEXT = kimi_k25_config()["text_config"] | {
    "initializer_range": 0.02,
    "ep_size": 1,
    "pretraining_tp": 1,
}
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "quantization_config": INT4,
    "text_config": TEXT,
    "vision_config": {"patch_size": 14, "vt_hidden_size": 1152},
}
KIMI_K2 = {key: value for key, value in TEXT.items() if key != "pad_token_id"} | {
    key: kimi_k2_instruct_config()[key]
    for key in ("rms_norm_eps", "max_position_embeddings", "rope_scaling", "quantization_config")
}


def source(config, generation_config=None, tokenizer_config=None, tensors=None):
    """What `Source` shows of a directory, without one."""
    return types.SimpleNamespace(
        config=config,
        generation_config=generation_config or {},
        tokenizer_config=tokenizer_config or {},
        tensors=tensors or {},
    )


def read(config, *more) -> TargetFacts:
    return read_target_config(source(config, *more), Problems("here"))


def test_kimi_k25():
    facts = read(KIMI_K25)
    yarn = Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert facts.config == TargetConfig(
        vocab_size=163840,
        hidden_size=7168,
        num_hidden_layers=61,
        first_k_dense_replace=1,
        num_attention_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=384,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        norm_topk_prob=True,
        rms_norm_eps=1e-5,
        latent_norm_eps=1e-5,
        max_position_embeddings=262144,
        rotary=RotaryConfig(64, 50000.0, "pairs", yarn),
        num_bits=4,
        eos_token_ids=(163585,),
    )
    assert facts.quantization == Quantization("int4", group_size=32)
    assert facts.config.softmax_scale == pytest.approx(0.144679626, rel=1e-8)
    assert facts.claims["latent_norm_eps"].origin == "rms_norm_eps, as in vLLM and SGLang"
    golden = [1, 7.131110849e-01, 6.687403050e-02, 1.537296735e-03]
    golden += [1.807023387e-05, 4.672964941e-06, 4.382206456e-07]
    picked = inverse_frequencies(facts.config.rotary)[[0, 1, 8, 16, 20, 24, 31]]
    np.testing.assert_allclose(picked, golden, rtol=1e-8)


def test_kimi_k2():
    facts = read(KIMI_K2)
    assert facts.quantization == Quantization("fp8", block=(128, 128))
    assert (facts.config.num_bits, facts.config.rms_norm_eps) == (None, 1e-6)
    assert facts.config.softmax_scale == pytest.approx(0.130860800, rel=1e-8)
    picked = inverse_frequencies(facts.config.rotary)[[16, 20]]
    np.testing.assert_allclose(picked, [4.472135955e-03, 3.614046774e-05], rtol=1e-8)


def test_rope_parameters_are_the_same():
    """transformers 5 moves the base into the scaling, and says its type twice."""
    config = copy.deepcopy(KIMI_K25)
    text = config["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling") | {
        "rope_theta": text.pop("rope_theta"),
        "rope_type": "yarn",
    }
    text |= {"model_type": "deepseek_v3", "head_dim": 64, "qk_head_dim": 192, "use_cache": True}
    text |= {"rope_interleave": True, "attention_dropout": 0.0, "output_router_logits": False}
    assert read(config).config == read(KIMI_K25).config


def test_every_end_of_text_counts():
    """Kimi ends a turn with an id that its config.json does not name."""
    tokenizer = {
        "added_tokens_decoder": {
            "163585": {"content": "[EOS]"},
            "163586": {"content": "<|im_end|>"},
        }
    }
    facts = read(KIMI_K25, {"eos_token_id": 163585, "max_length": 9}, tokenizer)
    assert facts.config.eos_token_ids == (163585, 163586)
    assert facts.claims["eos_token_ids"].origin == (
        "config.json: eos_token_id; tokenizer_config.json: <|im_end|>"
    )


def test_published_tensor_counts():
    """208,550 tensors in Kimi-K2.5 and 139,644 in Kimi-K2-Instruct, by their own counts."""
    vision = 6 + 3 + 27 * 12 + 2
    assert len(wanted(KIMI_K25, None)) + vision == 208_550
    stale_inv_freq = 61
    assert len(wanted(KIMI_K2, Fp8Projections())) + stale_inv_freq == 139_644


class Fp8Projections:
    """Headers in which every projection is float8, as in Kimi-K2-Instruct."""

    def get(self, name: str) -> TensorInfo | None:
        return TensorInfo("f", "F8_E4M3", (), 0) if "_proj" in name else None


def wanted(config, tensors) -> set[str]:
    """Names of the tensors that a target's rules read; one cut into pieces is read for each."""
    facts = read(config)
    matrices = Matrices(source(config, tensors=tensors), facts.quantization)
    rules = target_rules(matrices, "model.", "lm_head.weight", facts.config)
    return {
        one.name
        for rule in rules
        for want in rule.wants
        for one in (want, want.fp8_scale)
        if one is not None
    }


AQ_MEDAI = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "draft_vocab_size": 32000,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
        "use_aux_hidden_state": True,
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 64,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_aux": True,
    "use_cache": True,
    "vocab_size": 163840,
}


def boundaries_of(ids, convention=None, **more):
    """Boundaries, on Kimi-K2.5, of a draft whose config states those ids."""
    config = AQ_MEDAI | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids} | more}
    problems = Problems("here")
    draft, _ = read_draft(source(config), problems, convention)
    tied = tie(draft, TargetCard("kimi@1", read(KIMI_K25).config), problems, "here")
    problems.raise_any()
    return tied.boundaries.ids, tied.boundaries.origin


@pytest.mark.parametrize(
    ("ids", "convention", "more", "boundaries", "why"),
    [
        ([1, 29, 57], None, {}, (2, 30, 58), "convention 'after' (the first id is 1)"),
        ([2, 30, 58], None, {}, (2, 30, 58), "convention 'before' (the first id is 2)"),
        (None, None, {}, (2, 30, 58), "the default (2, n // 2, n - 3)"),
        ([2, 30, 58], "after", {}, (3, 31, 59), "convention 'after' (as asked for)"),
        ([1, 29, 57], "before", {}, (1, 29, 57), "convention 'before' (as asked for)"),
        ([0, 2, 61], "before", {}, (0, 2, 61), "convention 'before' (as asked for)"),
        ([-1, 2, 60], "after", {}, (0, 3, 61), "convention 'after' (as asked for)"),
        (
            [2, 30, 58],
            None,
            {"capture_convention": "after"},
            (3, 31, 59),
            "convention 'after' (the config says so)",
        ),
        (
            [2, 30, 58],
            "before",
            {"capture_convention": "after"},
            (2, 30, 58),
            "convention 'before' (as asked for)",
        ),
    ],
)
def test_boundaries(ids, convention, more, boundaries, why):
    got, origin = boundaries_of(ids, convention, **more)
    assert got == boundaries
    assert why in origin


@pytest.mark.parametrize("ids", [[0, 29, 57], [3, 31, 59], [2, 0, 3], [5]])
def test_ids_that_could_mean_two_things(ids):
    with pytest.raises(CheckpointError, match="could mean boundaries"):
        boundaries_of(ids)


def test_boundaries_outside_the_target():
    with pytest.raises(CheckpointError, match="has boundaries 0"):
        boundaries_of([2, 30, 61], "after")
    with pytest.raises(CheckpointError, match="no boundary comes before 0"):
        boundaries_of([-1, 30, 61], "before")


def test_scaled_rotary_of_a_draft():
    """TorchSpec's template for lightseek's Llama draft: YaRN, halves, no softmax magnitude."""
    config = AQ_MEDAI | {"rope_theta": 50000.0, "rope_scaling": TEXT["rope_scaling"]}
    draft, claims = read_draft(source(config), Problems("here"))
    assert draft.rotary == RotaryConfig(
        128, 50000.0, "halves", Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0)
    )
    assert claims["rms_norm_eps"].origin == "config.json: rms_norm_eps"


def test_speculators_must_say_where_the_residual_is():
    """Its default differs between engines."""
    layer = {
        key: AQ_MEDAI[key]
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    } | {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "model_type": "llama"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 64,
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "norm_output": False,
        "speculators_config": None,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
        "transformers_version": "5.24.0",
    }
    draft, _ = read_draft(source(config), Problems("here"))
    assert draft.norm_before_residual
    assert (draft.num_key_value_heads, draft.head_dim) == (64, 112)
    del config["norm_before_residual"]
    with pytest.raises(CheckpointError, match="norm_before_residual is missing"):
        read_draft(source(config), Problems("here"))


def test_what_transformers_4_writes_into_nested_configs():
    """Dozens of generation defaults, which change nothing, and five keys that could."""
    config = copy.deepcopy(KIMI_K25)
    config["text_config"] |= {
        "_name_or_path": "",
        "add_cross_attention": False,
        "bad_words_ids": None,
        "cross_attention_hidden_size": None,
        "do_sample": False,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "is_decoder": False,
        "is_encoder_decoder": False,
        "pruned_heads": {},
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "tie_encoder_decoder": False,
        "torchscript": False,
        "typical_p": 1.0,
    }
    assert read(config).config == read(KIMI_K25).config
    config["text_config"]["pruned_heads"] = {"3": [1]}
    with pytest.raises(CheckpointError, match=r"pruned_heads is .*a plain decoder"):
        read(config)
