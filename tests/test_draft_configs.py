"""Configs of drafts: variants, what contradicts itself, and the rotary embedding asked for."""

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from jaxspec.checkpoint import load_draft
from jaxspec.config import LatentDraftConfig, Llama3Scaling, Numerics, RotaryConfig, Yarn
from jaxspec.convert.draft_configs import read_draft
from jaxspec.convert.export import ExportConfig, export
from jaxspec.convert.prepare import abstract_draft, parameters_of
from jaxspec.convert.problems import CheckpointError, Problems
from jaxspec.convert.rotary import RotaryChoice
from jaxspec.convert.source import TensorInfo
from jaxspec.convert.write import ConvertConfig, convert
from jaxspec.errors import InputError
from jaxspec.layers import inverse_frequencies
from tests import draft_kinds, make_checkpoint, tiny
from tests.real_layouts import TEXT
from tests.test_convert_configs import AQ_MEDAI, source

TORCHSPEC_MLA = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "torch_dtype": "bfloat16",
    "rope_theta": 50000.0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    },
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 0,
}
"""TorchSpec's template of lightseek's latent drafts."""
MODELOPT_MLA = TORCHSPEC_MLA | {
    **{key: TEXT[key] for key in ("n_routed_experts", "topk_method", "routed_scaling_factor")},
    "early_stopping": False,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "pruned_heads": {},
    "tie_word_embeddings": False,
    "transformers_version": "4.51.3",
}


def read(config: dict[str, Any], fc_width: int | None = None, **options: Any):
    """The config, and its claims, of a draft whose `fc` is so wide."""
    found = source(config)
    if fc_width is not None:
        found.tensors = {"fc.weight": TensorInfo("f", "BF16", (7168, fc_width), 0)}
    return read_draft(found, Problems("here"), **options)


def change(config: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return changed


@pytest.mark.parametrize("config", [TORCHSPEC_MLA, MODELOPT_MLA], ids=["TorchSpec", "ModelOpt"])
def test_latent_drafts(config):
    """Of a published size; a short `max_position_embeddings` is no limit: nothing reads it."""
    draft, claims = read(config)
    assert isinstance(draft, LatentDraftConfig)
    assert (draft.q_lora_rank, draft.kv_lora_rank, draft.v_head_dim) == (1536, 512, 128)
    assert draft.boundaries.ids == (2, 30, 58)
    assert draft.rotary == RotaryConfig(64, 5e4, "pairs", Yarn(64.0, 4096, 1.0, 1.0, 1.0, 1.0))
    assert draft.softmax_scale == pytest.approx(0.144679626, rel=1e-8)
    assert draft.latent_norm_eps == 1e-5
    assert claims["rotary_kind"].origin == "latent attention"
    eps, _ = read(config, latent_norm_eps="transformers")
    assert eps.latent_norm_eps == 1e-6


def test_base_that_the_config_is_wrong_about():
    """The golden numbers of both bases, and the claim that tells which one was asked for."""
    picked = [0, 1, 8, 16, 20, 24, 31]
    stated, _ = read(TORCHSPEC_MLA)
    np.testing.assert_allclose(
        inverse_frequencies(stated.rotary)[picked],
        [1, 7.131110849e-01, 6.687403050e-02, 4.472135955e-03, 1.807023387e-05, 4.672964941e-06,
         4.382206456e-07],
        rtol=1e-9,
    )  # fmt: skip
    asked, claims = read(TORCHSPEC_MLA, choice=RotaryChoice.parse('{"rope_theta": 10000}'))
    np.testing.assert_allclose(
        inverse_frequencies(asked.rotary)[picked],
        [1, 7.498942093e-01, 1.000000000e-01, 1.000000000e-02, 3.162277660e-03, 1.5625e-05,
         2.083627238e-06],
        rtol=1e-9,
    )  # fmt: skip
    assert claims["rotary"].value["theta"] == 10000
    assert claims["rotary"].origin.startswith("as asked for; config.json: rope_theta")
    assert '"theta": 50000.0' in claims["rotary"].origin


def test_scaling_and_pairing_asked_for():
    choice = RotaryChoice.parse('{"rope_scaling": null, "rope_interleave": false}')
    draft, claims = read(TORCHSPEC_MLA, choice=choice)
    assert draft.rotary == RotaryConfig(64, 5e4, "halves")
    assert draft.softmax_scale == 192**-0.5, "YaRN's magnitude goes with it"
    assert claims["rotary_kind"].origin == "as asked for; latent attention says 'pairs'"
    yarn = '{"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}'
    draft, _ = read(AQ_MEDAI, choice=RotaryChoice.parse(f'{{"rope_scaling": {yarn}}}'))
    assert draft.rotary == RotaryConfig(128, 1e6, "halves", Yarn(64.0, 4096))
    assert not RotaryChoice.parse("{}")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama3(tmp_path, target):
    """Read under both names, asked for, converted, exported: the same embedding every time."""
    wanted = Llama3Scaling(8.0, 64, 1.0, 4.0)
    parameters = {"rope_parameters": {**LLAMA3, "rope_theta": 1e6}, "rope_theta": None}
    for changes in ({"rope_scaling": LLAMA3}, parameters):
        draft, claims = read(AQ_MEDAI | changes)
        assert draft.rotary == RotaryConfig(128, 1e6, "halves", llama3=wanted)
        assert claims["rotary"].value["llama3"]["low_freq_factor"] == 1.0
    config, tensors = draft_kinds.safeailab()
    stated = make_checkpoint.write(tmp_path / "hf", config | {"rope_scaling": LLAMA3}, tensors)
    convert(stated, tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "specforge", ExportConfig("specforge"))
    export(tmp_path / "converted", tmp_path / "speculators", ExportConfig("speculators"))
    plain = make_checkpoint.write(tmp_path / "plain", config, tensors)
    choice = RotaryChoice.parse(json.dumps({"rope_scaling": LLAMA3}))
    loaded = [
        load_draft(tmp_path / name, tiny.NUMERICS, target=target)
        for name in ("hf", "converted", "specforge", "speculators")
    ]
    loaded.append(load_draft(plain, tiny.NUMERICS, target=target, rotary=choice))
    assert {draft.config.rotary.llama3 for draft in loaded} == {wanted}
    assert len({draft.identity for draft in loaded}) == 1
    unscaled = load_draft(plain, tiny.NUMERICS, target=target)
    assert unscaled.identity != loaded[0].identity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10000", "expected a JSON object"),
        ("theta=1", "expected a JSON object"),
        ('{"rope_theta": -1}', "rope_theta is -1; expected a positive"),
        ('{"rope_theta": NaN}', "rope_theta is nan; expected a positive"),
        ('{"rope_theta": "1e4"}', "rope_theta is '1e4'; expected a number"),
        ('{"base": 1}', "base is 1: jaxspec does not know this key"),
        ('{"rope_scaling": {"type": "linear"}}', "is 'linear'; supported: 'yarn', 'llama3'"),
        ('{"rope_scaling": {"type": "llama3"}}', "low_freq_factor is missing"),
        ('{"rope_scaling": {"type": "yarn"}}', "factor is missing"),
        (
            '{"rope_scaling": {"type": "yarn", "factor": 0}}',
            "factor is 0; expected a positive",
        ),
        ('{"rope_interleave": 1}', "rope_interleave is 1; expected true or false"),
    ],
)
def test_rotary_choice_that_cannot_be(text, message):
    with pytest.raises(InputError, match=message):
        RotaryChoice.parse(text)


def test_converted_drafts_keep_their_rotary_embedding(tmp_path, target):
    """What a conversion settled is part of the identity, and is not changed by loading."""
    source_directory = make_checkpoint.write(tmp_path / "hf", *draft_kinds.torchspec())
    choice = RotaryChoice.parse('{"rope_theta": 5}')
    report = convert(source_directory, tmp_path / "5", ConvertConfig(draft_rotary=choice))
    assert '"theta": 5.0' in report.summary()
    asked = load_draft(source_directory, tiny.NUMERICS, target=target, rotary=choice)
    stored = load_draft(tmp_path / "5", tiny.NUMERICS, target=target)
    plain = load_draft(source_directory, tiny.NUMERICS, target=target)
    assert asked.identity == stored.identity != plain.identity
    assert asked.config.rotary == stored.config.rotary != plain.config.rotary
    with pytest.raises(CheckpointError, match="settled its rotary embedding"):
        load_draft(tmp_path / "5", tiny.NUMERICS, target=target, rotary=choice)


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (AQ_MEDAI | {"fc_norm": True, "norm_output": True}, "fc_norm norm_output"),
        (AQ_MEDAI | {"use_aux_norm": True}, "fc_norm"),
        (change(AQ_MEDAI, "eagle_config", "norm_before_fc", to=True), "norm_before_fc"),
        (change(TORCHSPEC_MLA, "norm_before_residual", to=True), "norm_before_residual"),
        (AQ_MEDAI | {"fc_norm": None, "norm_output": False}, ""),
    ],
)
def test_variants_are_read_at_either_level(config, flags):
    draft, claims = read(config)
    names = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    assert {name for name in names if getattr(draft, name)} == set(flags.split())
    assert set(names) - {"fc_norm"} <= claims.keys()


@pytest.mark.parametrize(
    ("owned", "fc_norm", "count"),
    [
        ({"has_embedding": True, "has_head": True}, False, 3_015_604_224),
        ({"has_embedding": True, "has_head": True}, True, 3_015_604_224 + 3 * 7168),
        ({"has_head": True}, False, 1_841_199_104),
    ],
    ids=["lightseek", "lightseek 3.1", "nvidia"],
)
def test_published_sizes(owned, fc_norm, count):
    """Parameters of latent drafts of Kimi's size: half the bytes of the published files."""
    config, _ = read(TORCHSPEC_MLA | {"fc_norm": fc_norm})
    model = abstract_draft(dataclasses.replace(config, **owned), Numerics(), "draft@1")
    sizes = {path: leaf.get_value().size for path, leaf in parameters_of(model).items()}
    del sizes["target_of_draft"]
    assert sum(sizes.values()) == count


@pytest.mark.parametrize(
    ("ids", "convention", "wanted"),
    [
        ([2, 30, 58, 61], "before", (2, 30, 58, 61)),
        ([60], "after", (61,)),
        ([1, 29], None, (2, 30)),
    ],
)
def test_other_than_three_boundaries(ids, convention, wanted):
    """The one that the final norm receives among them."""
    config = change(AQ_MEDAI, "eagle_config", "eagle_aux_hidden_state_layer_ids", to=ids)
    draft, _ = read(config, len(ids) * 7168, convention=convention)
    assert draft.boundaries.ids == wanted
    assert draft.num_aux_hidden_states == len(ids)


NO_IDS = change(AQ_MEDAI, "eagle_config", to={})


def test_number_of_boundaries_where_none_are_named():
    """The width of `fc` says how many."""
    draft, _ = read(NO_IDS, 4 * 7168)
    assert (draft.boundaries.ids, draft.num_aux_hidden_states) == ((), 4)
    draft, _ = read(change(NO_IDS, "eagle_aux_hidden_state_layer_ids", to=[]), 3 * 7168)
    assert (draft.boundaries.ids, draft.num_aux_hidden_states) == ((), 3)


@pytest.mark.parametrize(
    ("config", "fc_width", "fragments"),
    [
        (AQ_MEDAI, 2 * 7168, ["[2, 30, 58]", "3 boundaries of 7168", "21504", "takes 14336"]),
        (AQ_MEDAI | {"num_aux_hidden_states": 2}, None, ["num_aux_hidden_states is 2", "3"]),
        (AQ_MEDAI | {"fc_norm": True, "norm_before_fc": True}, None, ["both true"]),
        (
            change(AQ_MEDAI | {"norm_output": True}, "eagle_config", "norm_output", to=False),
            None,
            ["norm_output is True", "eagle_config.norm_output is False"],
        ),
        (AQ_MEDAI | {"norm_output": "yes"}, None, ["norm_output is 'yes'", "true or false"]),
        (AQ_MEDAI | {"num_hidden_layers": 0}, None, ["num_hidden_layers is 0", "1 or more"]),
        (AQ_MEDAI | {"model_type": "qwen3"}, None, ["model_type is 'qwen3'", "'llama'"]),
        (AQ_MEDAI | {"head_dim": 127}, None, ["127 dims of a head are rotated"]),
        (AQ_MEDAI | {"rope_scaling": {"rope_type": "longrope"}}, None, ["'longrope'", "'yarn'"]),
        (
            AQ_MEDAI | {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}},
            None,
            ["low_freq_factor is 4.0; expected less than high_freq_factor 4.0"],
        ),
        (AQ_MEDAI | {"rope_scaling": LLAMA3 | {"factor": -8}}, None, ["factor is -8; expected a"]),
        (AQ_MEDAI | {"rope_scaling": LLAMA3 | {"beta_fast": 32}}, None, ["beta_fast is 32"]),
        (TORCHSPEC_MLA | {"q_lora_rank": None}, None, ["q_lora_rank is missing"]),
        (TORCHSPEC_MLA | {"num_key_value_heads": 8}, None, ["num_key_value_heads is 8"]),
        (TORCHSPEC_MLA | {"model_type": "llama"}, None, ["model_type is 'llama'", "'kimi_k2'"]),
        (TORCHSPEC_MLA | {"attention_sink": 1}, None, ["attention_sink is 1", "may change"]),
        (
            change(TORCHSPEC_MLA, "eagle_config", "use_mtp_layernorm", to=True),
            None,
            ["use_mtp_layernorm is True", "supported: False"],
        ),
    ],
)
def test_configs_that_are_refused(config, fc_width, fragments):
    with pytest.raises(CheckpointError) as caught:
        read(config, fc_width)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_fc_of_other_boundaries_than_captured(tmp_path, target):
    """A draft that names none, and whose `fc` takes four, has to be told which."""
    config, tensors = draft_kinds.modelopt_llama()
    del config["eagle_config"]
    directory = make_checkpoint.write(tmp_path / "hf", config, tensors)
    with pytest.raises(CheckpointError, match=r"fc takes 4 boundaries.*--capture"):
        load_draft(directory, tiny.NUMERICS, target=target)
    with pytest.raises(CheckpointError, match=r"--capture names 3 boundaries .* takes 4"):
        load_draft(directory, tiny.NUMERICS, target=target, capture=(1, 2, 3))
    draft = load_draft(directory, tiny.NUMERICS, target=target, capture=(0, 1, 2, 4))
    assert draft.config.boundaries.ids == (0, 1, 2, 4)
