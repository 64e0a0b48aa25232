"""Kimi-K2.5 and its drafts at their real sizes, as shapes: nothing is allocated."""

import jax
from flax import nnx

from jaxspec.config import (
    LatentDraftConfig,
    LlamaDraftConfig,
    Numerics,
    RotaryConfig,
    TargetConfig,
    Yarn,
)
from jaxspec.contracts import Boundaries
from jaxspec.draft import Draft
from jaxspec.target import Target

IDENTITY = "kimi_k25@full-size"


def abstract_target(num_hidden_layers: int = 61, numerics: Numerics | None = None) -> Target:
    """The target of `moonshotai/Kimi-K2.5`'s config.json, or its first layers."""
    numerics = numerics or Numerics()
    config = TargetConfig(
        vocab_size=163840,
        hidden_size=7168,
        num_hidden_layers=num_hidden_layers,
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
        rotary=RotaryConfig(64, 50000.0, "pairs", Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0)),
        num_bits=4,
        eos_token_ids=(163585, 163586),
    )
    return nnx.eval_shape(lambda: Target(config, numerics, IDENTITY, nnx.Rngs(0)))


def abstract_draft(
    draft_vocab_size: int,
    boundaries: tuple[int, ...] = (2, 30, 58),
    numerics: Numerics | None = None,
) -> Draft:
    """A Llama-type draft as the public ones for Kimi are."""
    numerics = numerics or Numerics()
    config = LlamaDraftConfig(
        vocab_size=163840,
        draft_vocab_size=draft_vocab_size,
        hidden_size=7168,
        intermediate_size=18432,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        rms_norm_eps=1e-6,
        norm_before_residual=False,
        rotary=RotaryConfig(128, 1e6, "halves"),
        boundaries=Boundaries(IDENTITY, boundaries, 7168, "tests/full_size.py"),
        has_embedding=False,
        has_head=draft_vocab_size != 163840,
    )
    return nnx.eval_shape(lambda: Draft(config, numerics, nnx.Rngs(0)))


def abstract_latent_draft(numerics: Numerics) -> Draft:
    """A draft as lightseek's EAGLE-3.1 ones with latent attention are."""
    config = LatentDraftConfig(
        vocab_size=163840,
        draft_vocab_size=163840,
        hidden_size=7168,
        intermediate_size=18432,
        num_attention_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rms_norm_eps=1e-5,
        latent_norm_eps=1e-5,
        fc_norm=True,
        norm_output=True,
        norm_before_residual=False,
        rotary=RotaryConfig(64, 50000.0, "pairs", Yarn(64.0, 4096, 1.0, 1.0, 1.0, 1.0)),
        boundaries=Boundaries(IDENTITY, (2, 30, 58), 7168, "tests/full_size.py"),
        has_embedding=True,
        has_head=True,
    )
    return nnx.eval_shape(lambda: Draft(config, numerics, nnx.Rngs(0)))


def abstract_inputs(target: Target, draft: Draft | None, batch: int, slots: int):
    """(graph, params, state) of a batch, as shapes."""
    from jaxspec.step import empty_state

    graph, params = nnx.split((target, draft))
    state = jax.eval_shape(lambda: empty_state(target, draft, batch, slots))
    return graph, params, state
