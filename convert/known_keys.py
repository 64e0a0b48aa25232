"""Config keys that never change what a model computes, each with the reason it is left alone."""

from jaxspec.convert.fields import Fields

__all__ = [
    "EAGLE",
    "LATENT_DRAFT",
    "LLAMA",
    "SPECULATORS",
    "TEXT",
    "UNREAD",
    "WRAPPER",
    "leave_housekeeping",
]

HOUSEKEEPING = {
    "_attn_implementation": "serving option",
    "_name_or_path": "a label",
    "auto_map": "names remote code, which is never run",
    "bos_token_id": "the tokenizer's",
    "dtype": "each tensor's own element type is read",
    "id2label": "a label",
    "initializer_range": "training only",
    "label2id": "a label",
    "pad_token_id": "nothing is padded with it",
    "sep_token_id": "the tokenizer's",
    "tokenizer_class": "the tokenizer's",
    "torch_dtype": "each tensor's own element type is read",
    "transformers_version": "a label",
    "use_cache": "serving option",
}
TRANSFORMERS_4 = """
    bad_words_ids begin_suppress_tokens chunk_size_feed_forward decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    is_decoder length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate suppress_tokens
    task_specific_params temperature tf_legacy_loss top_k top_p torchscript typical_p
    use_bfloat16
"""
"""Options of generation and training that transformers 4 writes into nested configs."""

PLAIN_DECODER = {
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False, None),
}
"""What transformers 4 writes beside them, and what a plain decoder has there."""

TEXT = {
    "attention_dropout": "training only",
    "aux_loss_alpha": "training only",
    "ep_size": "a sharding of the training run",
    "head_dim": "the rotary part of a head; qk_rope_head_dim says it",
    "output_router_logits": "serving option",
    "pretraining_tp": "a sharding of the training run",
    "router_aux_loss_coef": "training only",
    "seq_aux": "training only",
}
VISION = """
    image_token_id media_placeholder_token_id mm_projector_type projection_hidden_size
    projection_layer_norm_eps use_unified_vision_chunk video_placeholder video_token_id
    vision_config vision_end_token_id vision_start_token_id
"""
WRAPPER = {"ignore_index": "training only"} | dict.fromkeys(
    VISION.split(), "vision, which is not converted"
)
LLAMA = {
    "architectures": "the tensors say what the draft is",
    "attention_dropout": "training only",
    "eos_token_id": "the target's counts",
    "max_position_embeddings": "never limits anything: rotary angles are computed for any position",
    "max_window_layers": "read with use_sliding_window",
    "pretraining_tp": "a sharding of the training run",
}
EXPERTS = """
    aux_loss_alpha first_k_dense_replace moe_intermediate_size moe_layer_freq n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers
    routed_scaling_factor scoring_func seq_aux topk_group topk_method
"""
LATENT_DRAFT = {
    "ep_size": "a sharding of the training run",
    "head_dim": "the rotary part of a head; qk_rope_head_dim says it",
} | dict.fromkeys(EXPERTS.split(), "of a target's experts: a draft's MLP is dense")
SPECULATORS = {
    "architectures": "the tensors say what the draft is",
    "embed_requires_grad": "training only",
    "has_no_defaults_at_init": "a label",
    "model_type": "a label; speculators_model_type says what it is",
    "speculators_config": "names the verifier it was trained for and how many tokens to propose",
    "speculators_version": "a label",
}
EAGLE = {
    "eagle_decoder_type": "a label",
    "has_lm_head": "the tensors say whether it has one",
    "parallel_draft_heads_num_layers": "of parallel heads, whose tensors would be unknown",
    "parallel_draft_step": "how many tokens to propose",
}


_ANY = {*HOUSEKEEPING, *TRANSFORMERS_4.split(), *PLAIN_DECODER}
UNREAD = {
    "target": _ANY | {*TEXT, *WRAPPER},
    "draft": _ANY | {*LLAMA, *LATENT_DRAFT, *SPECULATORS, *EAGLE},
}
"""All of them, by what the config is of."""


def leave_housekeeping(fields: Fields) -> None:
    """Ignores the keys that any config may have; what would be no plain decoder is a problem."""
    fields.ignore(HOUSEKEEPING | dict.fromkeys(TRANSFORMERS_4.split(), "transformers 4 writes it"))
    for key, supported in PLAIN_DECODER.items():
        fields.expect(key, *supported, why="a plain decoder")
