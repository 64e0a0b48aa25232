"""Checkpoints that cannot be used: each gives one message that says what, where and what instead,
and leaves nothing behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.checkpoint import load_draft, load_target, locate
from jaxspec.convert.problems import CheckpointError
from jaxspec.convert.write import ConvertConfig, convert
from tests import make_checkpoint
from tests.test_checkpoint import F32

PREFIX = "language_model.model."
EXPERT = f"{PREFIX}layers.2.mlp.experts.3.up_proj"
O_PROJ = f"{PREFIX}layers.1.self_attn.o_proj.weight"
NORM = f"{PREFIX}norm.weight"
IDS = "eagle_aux_hidden_state_layer_ids"

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]


def change(path: str, value: Any) -> Callable[[Config, Tensors], None]:
    """Sets the config's entry at a dotted path."""

    def apply(config: Config, tensors: Tensors) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            config = config[parent]
        config[last] = value

    return apply


def drop(path: str) -> Callable[[Config, Tensors], None]:
    """Removes the config's entry at a dotted path."""

    def apply(config: Config, tensors: Tensors) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            config = config[parent]
        del config[last]

    return apply


def put(name: str, tensor: np.ndarray) -> Callable[[Config, Tensors], None]:
    """Adds or replaces a tensor."""
    return lambda config, tensors: tensors.update({name: tensor})


def remove(*names: str) -> Callable[[Config, Tensors], None]:
    """Removes tensors."""

    def apply(config: Config, tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return apply


def edit(name: str, function: Callable[[np.ndarray], Any]) -> Callable[[Config, Tensors], None]:
    """Replaces a tensor by a function of it, or changes it in place."""

    def apply(config: Config, tensors: Tensors) -> None:
        changed = tensors[name].copy()
        result = function(changed)
        tensors[name] = changed if result is None else result

    return apply


def everywhere(path: str, value: Any) -> Callable[[Config, Tensors], None]:
    """Sets an entry of both copies of a wrapper's quantization_config."""

    def apply(config: Config, tensors: Tensors) -> None:
        for place in ("quantization_config", "text_config.quantization_config"):
            change(f"{place}.{path}", value)(config, tensors)

    return apply


def set_at(index: Any, value: float) -> Callable[[np.ndarray], None]:
    return lambda array: array.__setitem__(index, value)


def text(key: str, value: Any) -> Callable[[Config, Tensors], None]:
    return change(f"text_config.{key}", value)


WEIGHTS = "config_groups.group_0.weights"
TARGET_CASES = {
    "missing tensor": (remove(O_PROJ), [O_PROJ, "is missing", "[64, 36]"]),
    "missing packed tensor": (remove(f"{EXPERT}.weight_scale"), [EXPERT, "is missing", "BF16"]),
    "unknown tensor": (
        put(f"{PREFIX}layers.1.self_attn.q_proj.weight", np.ones((2, 2), np.float32)),
        ["layers.1.self_attn.q_proj.weight", "nothing in this model has that name"],
    ),
    "tensor of a layer too many": (
        put(f"{PREFIX}layers.4.input_layernorm.weight", np.ones(64, np.float32)),
        ["layers.4.input_layernorm.weight", "nothing in this model has that name"],
    ),
    "two embeddings": (
        put("model.embed_tokens.weight", np.ones((24, 64), np.float32)),
        ["expected one embedding", f"found {PREFIX}embed_tokens.weight, model.embed_tokens.weight"],
    ),
    "two heads": (
        put("lm_head.weight", np.ones((24, 64), np.float32)),
        ["lm_head.weight", "nothing in this model has that name"],
    ),
    "no known prefix": (
        remove(f"{PREFIX}embed_tokens.weight"),
        ["expected one embedding", "found none"],
    ),
    "wrong shape": (edit(O_PROJ, lambda w: w[:, :-1]), [O_PROJ, "[64, 35]", "expected [64, 36]"]),
    "wrong dtype": (
        edit(O_PROJ, lambda w: w.astype(np.float16)),
        [O_PROJ, "is F16", "expected BF16 or F32"],
    ),
    "weight_shape disagrees": (
        put(f"{EXPERT}.weight_shape", np.array([32, 60], np.int32)),
        [f"{EXPERT}.weight_shape says [32, 60]", "expected [32, 64]"],
    ),
    "NaN": (edit(O_PROJ, set_at((3, 5), np.nan)), [O_PROJ, "1 of 2304", "NaN", "[3, 5]"]),
    "infinity in a norm": (edit(NORM, set_at(7, np.inf)), [NORM, "1 of 64", "infinite", "[7]"]),
    "NaN in a scale": (
        edit(f"{EXPERT}.weight_scale", set_at((0, 1), np.nan)),
        [f"{EXPERT}.weight_scale", "NaN", "[0, 1]"],
    ),
    "model_type": (change("model_type", "llama"), ["model_type is 'llama'", "'kimi_k25'"]),
    "inner model_type": (text("model_type", "qwen3"), ["text_config.model_type is 'qwen3'"]),
    "architecture": (
        change("architectures", ["LlavaForConditionalGeneration"]),
        ["architectures names 'LlavaForConditionalGeneration'", "KimiK25ForConditionalGeneration"],
    ),
    "no text_config": (drop("text_config"), ["has a text_config"]),
    "unknown key": (text("qk_norm", True), ["text_config.qk_norm is True", "does not know"]),
    "unknown wrapper key": (change("router", 1), ["config.json: router is 1", "does not know"]),
    "missing epsilon": (drop("text_config.rms_norm_eps"), ["rms_norm_eps is missing"]),
    "epsilon that is no number": (
        text("rms_norm_eps", "1e-5"),
        ["rms_norm_eps is '1e-5'", "a number"],
    ),
    "no rotary base": (drop("text_config.rope_theta"), ["text_config.rope_theta is missing"]),
    "rotary scaling": (text("rope_scaling.type", "linear"), ["rope_scaling.type is 'linear'"]),
    "unknown rotary key": (text("rope_scaling.low_freq_factor", 1.0), ["low_freq_factor"]),
    "two rotary bases": (
        lambda config, tensors: config["text_config"].update(
            rope_parameters=config["text_config"]["rope_scaling"] | {"rope_theta": 10000.0}
        ),
        ["rope_theta is 1000.0, but", "rope_parameters.rope_theta is 10000.0"],
    ),
    "no query latent": (text("q_lora_rank", None), ["text_config.q_lora_rank is missing"]),
    "router": (text("topk_method", "greedy"), ["topk_method is 'greedy'", "'noaux_tc'"]),
    "scoring": (text("scoring_func", "softmax"), ["scoring_func is 'softmax'", "'sigmoid'"]),
    "bias": (text("attention_bias", True), ["attention_bias is True", "supported: False"]),
    "layer frequency": (text("moe_layer_freq", 2), ["moe_layer_freq is 2", "supported: 1"]),
    "activation": (text("hidden_act", "gelu"), ["hidden_act is 'gelu'", "'silu'"]),
    "tied embeddings": (
        text("tie_word_embeddings", True),
        ["text_config.tie_word_embeddings is True", "supported: False"],
    ),
    "a wrapper that ties them": (
        change("tie_word_embeddings", True),
        ["tie_word_embeddings is True, but config.json: text_config.tie_word_embeddings is False"],
    ),
    "no sparse layer": (text("first_k_dense_replace", 4), ["first_k_dense_replace is 4 of 4"]),
    "groups": (text("n_group", 3), ["n_group is 3", "n_routed_experts 8"]),
    "more groups than there are": (text("topk_group", 2), ["topk_group is 2, more than n_group 1"]),
    "groups of one expert": (
        lambda config, tensors: config["text_config"].update(n_group=8, topk_group=4),
        ["n_group is 8: one expert in each group"],
    ),
    "groups with too few experts": (
        lambda config, tensors: config["text_config"].update(n_group=4, topk_group=1),
        ["topk_group is 1: 2 experts to choose from", "num_experts_per_tok 3"],
    ),
    "fewer experts than a token takes": (
        text("num_experts_per_tok", 9),
        ["8 experts to choose from, fewer than num_experts_per_tok 9"],
    ),
    "two vocabularies": (
        change("vocab_size", 25),
        ["vocab_size is 25, but config.json: text_config.vocab_size is 24"],
    ),
    "two quantisations": (
        change(f"quantization_config.{WEIGHTS}.group_size", 64),
        ["config.json: quantization_config is", "but config.json: text_config.quantization_config"],
    ),
    "quantisation method": (everywhere("quant_method", "awq"), ["quant_method is 'awq'"]),
    "packed format": (
        everywhere("format", "float-quantized"),
        ["format is 'float-quantized'", "'pack-quantized'"],
    ),
    "format of a group": (
        everywhere("config_groups.group_0.format", "nvfp4-pack-quantized"),
        ["group_0.format is 'nvfp4-pack-quantized'", "'pack-quantized'"],
    ),
    "bits": (everywhere(f"{WEIGHTS}.num_bits", 8), ["num_bits is 8", "supported: 4"]),
    "asymmetric": (everywhere(f"{WEIGHTS}.symmetric", False), ["symmetric is False"]),
    "group size": (
        everywhere(f"{WEIGHTS}.group_size", 48),
        ["group_size is 48", "multiples of 32"],
    ),
    "group size of another file": (
        everywhere(f"{WEIGHTS}.group_size", 64),
        ["moe_intermediate_size is 32", "group size 64"],
    ),
    "quantised activations": (
        everywhere("config_groups.group_0.input_activations", {"num_bits": 8}),
        ["input_activations"],
    ),
}


@pytest.mark.parametrize("case", TARGET_CASES)
def test_target(tmp_path, case):
    break_it, fragments = TARGET_CASES[case]
    config = make_checkpoint.target_config()
    config = json.loads(json.dumps(config))
    tensors = make_checkpoint.target_tensors(config, PREFIX)
    break_it(config, tensors)
    directory = make_checkpoint.write(tmp_path / "bad", config, tensors)
    expect_refusal(directory, fragments, lambda: load_target(directory, F32))


def expect_refusal(
    directory: Path, fragments: list[str], load: Callable[[], Any], num_problems: int = 1
) -> None:
    """Asserts that loading and converting both fail with that message, and that nothing is left."""
    before = sorted(directory.parent.iterdir())
    messages = []
    for use in (load, lambda: convert(directory, directory.parent / "out")):
        with pytest.raises(CheckpointError) as caught:
            use()
        assert len(caught.value.problems) == num_problems, caught.value
        messages.append(str(caught.value))
        for fragment in [str(directory), *fragments]:
            assert fragment in messages[-1]
    assert messages[0] == messages[1]
    assert sorted(directory.parent.iterdir()) == before


def truncate(directory: Path) -> None:
    path = directory / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lengthen(directory: Path) -> None:
    path = directory / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes() + b"0")


def cut_header(directory: Path) -> None:
    (directory / "model-00001-of-00003.safetensors").write_bytes(b"\x00\x01\x02")


def garble_header(directory: Path) -> None:
    path = directory / "model-00001-of-00003.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"#" + data[9:])


def edit_index(function: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        function(index["weight_map"])
        path.write_text(json.dumps(index))

    return apply


def duplicate(directory: Path) -> None:
    """Puts everything in the second file into a fourth as well."""
    source = directory / "model-00002-of-00003.safetensors"
    (directory / "model-00004-of-00003.safetensors").write_bytes(source.read_bytes())
    add = {"x": "model-00004-of-00003.safetensors"}
    edit_index(lambda weight_map: weight_map.update(add))(directory)


SHARD = "model-00002-of-00003.safetensors"
FILE_CASES = {
    "missing shard": (
        lambda directory: (directory / SHARD).unlink(),
        ["model.safetensors.index.json names", SHARD, "no such file"],
    ),
    "truncated shard": (truncate, [SHARD, "truncated", "its header describes"]),
    "shard with a tail": (lengthen, [SHARD, "too long"]),
    "no header": (cut_header, ["model-00001-of-00003.safetensors", "truncated, or not"]),
    "garbled header": (garble_header, ["model-00001-of-00003.safetensors", "cannot be read"]),
    "index names a wrong file": (
        edit_index(lambda index: index.update({NORM: "model-00001-of-00003.safetensors"})),
        [NORM, "model.safetensors.index.json says model-00001-of-00003.safetensors"],
    ),
    "index names a tensor that is nowhere": (
        edit_index(lambda index: index.update({"ghost": SHARD})),
        ["tensor ghost", SHARD, "does not hold it"],
    ),
    "index lacks a tensor": (
        edit_index(lambda index: index.pop(NORM)),
        [NORM, "is not in model.safetensors.index.json"],
    ),
    "tensor in two files": (duplicate, ["is in two files", SHARD]),
    "stray file": (
        lambda directory: (directory / "extra.safetensors").write_bytes(b""),
        ["extra.safetensors is not named in model.safetensors.index.json"],
    ),
    "no index": (
        lambda directory: (directory / "model.safetensors.index.json").unlink(),
        ["3 safetensors files", "neither model.safetensors.index.json"],
    ),
    "no config": (lambda directory: (directory / "config.json").unlink(), ["no config.json"]),
    "config that is no JSON": (
        lambda directory: (directory / "config.json").write_text("{,"),
        ["config.json: not JSON"],
    ),
    "converted by another version": (
        lambda directory: (directory / "manifest.json").write_text('{"format": "other-2"}'),
        ["manifest.json: format is 'other-2'", "jaxspec-checkpoint-1"],
    ),
}


@pytest.mark.parametrize("case", FILE_CASES)
def test_files(tmp_path, case):
    break_it, fragments = FILE_CASES[case]
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, PREFIX)
    directory = make_checkpoint.write(tmp_path / "bad", config, tensors, 3)
    break_it(directory)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        load_target(directory, F32)
    for fragment in fragments:
        assert fragment in str(caught.value)
    with pytest.raises(CheckpointError):
        convert(directory, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_no_such_directory():
    with pytest.raises(CheckpointError, match="no such directory, and no such repository"):
        locate("no/where")


def test_all_problems_are_reported_together(tmp_path):
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, PREFIX)
    del tensors[O_PROJ], tensors[f"{EXPERT}.weight_packed"]
    tensors["stranger"] = np.ones(2, np.float32)
    tensors[NORM] = tensors[NORM][:-1]
    directory = make_checkpoint.write(tmp_path / "bad", config, tensors)
    fragments = ["4 problems", O_PROJ, f"{EXPERT}.weight_packed", "stranger", NORM]
    expect_refusal(directory, fragments, lambda: load_target(directory, F32), num_problems=4)


def test_every_nan_is_reported(tmp_path):
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, PREFIX)
    for name in (f"{PREFIX}embed_tokens.weight", O_PROJ, NORM):
        tensors[name].flat[0] = np.nan
    directory = make_checkpoint.write(tmp_path / "bad", config, tensors)
    fragments = ["embed_tokens.weight", O_PROJ, NORM]
    expect_refusal(directory, fragments, lambda: load_target(directory, F32), num_problems=3)


DRAFT_CASES = {
    "no d2t": (remove("d2t"), ["d2t is missing", "20 of vocab_size 24"]),
    "d2t out of range": (
        edit("d2t", set_at(19, 5)),
        ["d2t: 1 of 20 draft ids map outside", "vocabulary of 24", "draft id 19, to 24"],
    ),
    "d2t with duplicates": (
        edit("d2t", set_at(slice(0, 2), (3, 2))),
        ["d2t: 2 draft ids are duplicates", "target id 3"],
    ),
    "t2d that disagrees": (
        edit("t2d", lambda kept: np.ones_like(kept)),
        ["d2t and t2d disagree about 4 of 24 tokens"],
    ),
    "no head": (remove("lm_head.weight"), ["lm_head.weight is missing", "20, vocab_size 24"]),
    "no fc": (remove("fc.weight"), ["fc.weight is missing", "[64, 192]"]),
    "fc of one state": (
        edit("fc.weight", lambda w: w[:, :64]),
        ["[0, 1, 3], convention 'after'", "3 boundaries of 64", "192 wide", "fc.weight takes 64"],
    ),
    "no layer": (
        lambda config, tensors: [tensors.pop(name) for name in list(tensors) if "mid" in name],
        ["expected one of midlayer. and layers.0."],
    ),
    "NaN": (edit("fc.weight", set_at((1, 2), np.nan)), ["fc.weight", "NaN", "[1, 2]"]),
    "ids that could mean two things": (
        change("eagle_config", {IDS: [3, 30, 58]}),
        ["[3, 30, 58], which could mean boundaries [3, 30, 58]", "[4, 31, 59]", "--capture-conv"],
    ),
    "the embedding among the ids": (
        change("eagle_config", {IDS: [0, 1, 3]}),
        ["[0, 1, 3], which could mean", "--capture-convention"],
    ),
    "unknown convention": (
        change("eagle_config.capture_convention", "between"),
        ["capture_convention is 'between'", "'before' or 'after'"],
    ),
    "ids in two places": (
        change(IDS, [1, 2, 3]),
        [f"config.json: {IDS} is [1, 2, 3] but config.json: eagle_config.{IDS} is [0, 1, 3]"],
    ),
    "a norm that is not there": (
        change("norm_before_fc", True),
        ["input_norm.weight is missing", "[192]"],
    ),
    "a norm that is not asked for": (
        put("fc_norm.0.weight", np.ones(64, np.float32)),
        ["fc_norm.0.weight", "nothing in this model has that name"],
    ),
    "no layers": (change("num_hidden_layers", 0), ["num_hidden_layers is 0", "1 or more"]),
    "another attention": (change("model_type", "qwen3"), ["model_type is 'qwen3'", "'llama'"]),
    "unknown key": (change("query_norm", True), ["query_norm is True", "does not know"]),
    "a rotary scaling nobody asked for": (
        change("rope_scaling", {"rope_type": "longrope", "factor": 8.0}),
        ["rope_scaling.type is 'longrope'"],
    ),
    "quantised draft": (
        change("quantization_config", {"quant_method": "fp8"}),
        ["quantization_config is", "supported: absent"],
    ),
    "heads": (change("num_key_value_heads", 4), ["num_key_value_heads is 4", "heads 6"]),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, PREFIX)
    return load_target(make_checkpoint.write(tmp_path_factory.mktemp("t"), config, tensors), F32)


@pytest.mark.parametrize("case", DRAFT_CASES)
def test_draft(tmp_path, target, case):
    break_it, fragments = DRAFT_CASES[case]
    config, tensors = make_checkpoint.draft_layout("specforge")
    break_it(config, tensors)
    directory = make_checkpoint.write(tmp_path / "bad", config, tensors)
    expect_refusal(directory, fragments, lambda: load_draft(directory, F32, target=target))


def halved(config: Config, tensors: Tensors) -> None:
    """A draft for a target half as wide."""
    config["target_hidden_size"] = 32
    tensors["fc.weight"] = tensors["fc.weight"][:, :96]


PAIR_CASES = {
    "hidden sizes": (halved, ["fc takes states 32 wide", "hidden_size 64"]),
    "boundaries past the end": (
        change("eagle_config", {IDS: [2, 3, 5]}),
        ["boundaries (2, 3, 5)", "has boundaries 0 (the embedding output) to 4"],
    ),
    "vocabularies": (
        lambda config, tensors: (
            config.update(vocab_size=25),
            tensors.pop("t2d"),
            tensors.update({"embed_tokens.weight": np.ones((25, 64), np.float32)}),
        ),
        ["vocab_size is 25", "is 24"],
    ),
    "borrowed head of another width": (
        lambda config, tensors: (halved(config, tensors), tensors.pop("embed_tokens.weight")),
        ["it borrows the embedding or the head of a target 32 wide"],
    ),
}


@pytest.mark.parametrize("case", PAIR_CASES)
def test_draft_of_another_target(tmp_path, target, case):
    """Shapes that cannot belong together, when the draft is loaded and when it is tied."""
    break_it, fragments = PAIR_CASES[case]
    config, tensors = make_checkpoint.draft_layout("specforge")
    break_it(config, tensors)
    directory = make_checkpoint.write(tmp_path / "draft", config, tensors)
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, PREFIX)
    of = make_checkpoint.write(tmp_path / "target", config, tensors)
    for use in (
        lambda: load_draft(directory, F32, target=target),
        lambda: convert(directory, tmp_path / "out", ConvertConfig(target=of)),
    ):
        with pytest.raises(CheckpointError) as caught:
            use()
        for fragment in [*fragments, target.identity]:
            if fragment != target.identity or "borrow" not in case:
                assert fragment in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_destination_that_exists(tmp_path):
    (tmp_path / "out").mkdir()
    directory = make_checkpoint.write(tmp_path / "hf", *make_checkpoint.draft_layout("specforge"))
    with pytest.raises(CheckpointError, match="exists already"):
        convert(directory, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_one_kind_for_another(tmp_path, target):
    draft = make_checkpoint.write(tmp_path / "hf", *make_checkpoint.draft_layout("specforge"))
    convert(draft, tmp_path / "draft")
    with pytest.raises(CheckpointError, match="this is a draft, not a target"):
        load_target(tmp_path / "draft")
    with pytest.raises(CheckpointError, match="converted already"):
        convert(tmp_path / "draft", tmp_path / "again")
    with pytest.raises(CheckpointError, match="converted already, which settled"):
        load_draft(tmp_path / "draft", F32, target=target, capture_convention="before")
    with pytest.raises(CheckpointError, match="this is a draft, not a target"):
        load_target(draft)
