"""What is exported as one of a pair belongs to the other one, and engines find what they run."""

import json

import pytest

from jaxspec.convert.export import ExportConfig, export
from jaxspec.convert.export_changes import config_changes
from jaxspec.convert.problems import CheckpointError
from jaxspec.convert.write import ConvertConfig, convert
from tests import draft_kinds, make_checkpoint, tiny

FLAT = ExportConfig("hf", flat=True)
DRAFT = ExportConfig("specforge")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two targets of the same shapes, and the drafts `open`, which names none, and `tied`."""
    place = tmp_path_factory.mktemp("pairs")
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, "language_model.model.")
    make_checkpoint.write(place / "target", config, tensors)
    tensors["language_model.model.norm.weight"][0] += 1
    make_checkpoint.write(place / "other", config, tensors)
    make_checkpoint.write(place / "open", *draft_kinds.torchspec())
    convert(place / "open", place / "tied", ConvertConfig(target=place / "target"))
    return place


def exported(place, tmp_path, source, config, pair):
    """The report of an export with that one of the pair."""
    arguments = {**vars(config), "pair": str(pair)}
    return export(place / source, tmp_path / "out", ExportConfig(**arguments))


@pytest.mark.parametrize(
    ("source", "config", "pair"),
    [("open", DRAFT, "other"), ("tied", DRAFT, "target"), ("target", FLAT, "open")],
)
def test_pairs_that_belong_together(place, tmp_path, source, config, pair):
    report = exported(place, tmp_path, source, config, place / pair)
    assert str(place / pair) in (report.served.sglang or "")
    assert not [note for note in report.notes if "not here" in note or "do not read" in note]
    assert not [note for note in report.notes if pair in note]


def test_the_same_weights_under_another_name(place, tmp_path):
    """The flat form of the target that a draft was tied to is that target."""
    export(place / "target", tmp_path / "flat", FLAT)
    report = exported(place, tmp_path, "tied", DRAFT, tmp_path / "flat")
    assert f"--model-path {tmp_path / 'flat'} " in (report.served.sglang or "")


def test_what_a_target_is_exported_with_decides_the_commands(place, tmp_path):
    """An engine that would read others than the draft's own boundaries is given no command."""
    config, tensors = draft_kinds.torchspec()
    config["eagle_config"]["capture_convention"] = "after"
    make_checkpoint.write(tmp_path / "after", config, tensors)
    served = exported(place, tmp_path, "target", FLAT, tmp_path / "after").served
    assert served.sglang is not None
    assert served.vllm is None
    assert "vLLM reads ids [1, 2, 3] as boundaries [1, 2, 3]" in served.notes[0]


@pytest.mark.parametrize(
    ("source", "config", "pair", "message"),
    [
        ("tied", DRAFT, "other", "no target for it: the draft .* belongs to kimi_k25@"),
        ("other", FLAT, "tied", "no draft for it: the draft .* and the target is kimi_k25@"),
        ("open", DRAFT, "tied", "a draft, and so is .*: a pair is a target and a draft"),
        ("target", FLAT, "other", "a target, and so is"),
    ],
)
def test_pairs_that_do_not(place, tmp_path, source, config, pair, message):
    with pytest.raises(CheckpointError, match=message):
        exported(place, tmp_path, source, config, place / pair)
    assert list(tmp_path.iterdir()) == []


def test_shapes_that_cannot_belong(place, tmp_path):
    config = make_checkpoint.target_config("flat") | {"vocab_size": 23}
    make_checkpoint.write(tmp_path / "small", config, make_checkpoint.target_tensors(config))
    with pytest.raises(CheckpointError, match=r"vocab_size is 24; that of kimi_k2@.* is 23"):
        exported(place, tmp_path, "open", DRAFT, tmp_path / "small")


def test_what_is_not_known_of_a_pair_is_said(place, tmp_path):
    report = exported(place, tmp_path, "open", DRAFT, "org/model")
    assert report.notes[0].startswith("org/model is not here: whether they belong together")
    report = export(place / "target", tmp_path / "b", ExportConfig("hf", pair=f"{place / 'tied'}"))
    assert "is a converted checkpoint, which engines do not read" in report.notes[0]


def test_the_tokenizers_own_code_goes_along_and_is_not_run(place, tmp_path):
    """Through a conversion too; what would run it is told where it is not."""
    config = make_checkpoint.target_config("flat")
    source = make_checkpoint.write(tmp_path / "hf", config, make_checkpoint.target_tensors(config))
    code = b"raise SystemExit('was run')\n"
    for name in ("tokenization_kimi.py", "tool_declaration_ts.py"):
        (source / name).write_bytes(code)
    auto_map = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    convert(source, tmp_path / "converted")
    for number, form in enumerate(("hf", "converted")):
        report = export(tmp_path / form, tmp_path / f"{number}", ExportConfig("hf"))
        assert not any("tokenizer_config.json names" in note for note in report.notes)
        for name in ("tokenization_kimi.py", "tool_declaration_ts.py"):
            assert (tmp_path / f"{number}" / name).read_bytes() == code
    (source / "tokenization_kimi.py").unlink()
    report = export(source, tmp_path / "2", ExportConfig("hf"))
    assert any("names tokenization_kimi.py, which the source does not" in n for n in report.notes)
    assert "note: tokenizer_config.json names tokenization_kimi.py" in report.summary()


def test_what_the_config_says_otherwise(tmp_path):
    """A line for each changed value, from either form; and none for what only moved."""
    config, tensors = draft_kinds.torchspec()
    config |= {"max_position_embeddings": 32, "bos_token_id": 1, "initializer_range": 0.5}
    source = make_checkpoint.write(tmp_path / "hf", config, tensors)
    convert(source, tmp_path / "converted")
    wanted = (
        "config.json: eagle_aux_hidden_state_layer_ids was [1, 2, 3], is [2, 3, 4]",
        "config.json: max_position_embeddings was 32, is 262144",
        "config.json: left out, since no weight or product depends on it: bos_token_id, "
        "initializer_range",
    )
    for form in ("hf", "converted"):
        report = export(tmp_path / form, tmp_path / f"{form} out", DRAFT)
        assert set(report.notes) == set(wanted)
        assert all(f"note: {line}" in report.summary() for line in wanted)
    (tmp_path / "converted" / "source_config.json").unlink()
    report = export(tmp_path / "converted", tmp_path / "old", DRAFT)
    assert "so what differs from the original is not known" in report.notes[0]


def test_changes_of_a_target():
    rotary = {"rope_theta": 5e4, "rope_type": "yarn", "factor": 64, "beta_fast": 32.0}
    before = {
        "model_type": "kimi_k25",
        "text_config": {"hidden_size": 8, "rope_parameters": rotary, "eos_token_id": 3},
        "quantization_config": {"quant_method": "fp8"},
        "vision_config": {"patch_size": 14},
        "dtype": "bfloat16",
    }
    after = {
        "model_type": "deepseek_v3",
        "hidden_size": 8,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "beta_fast": 16.0},
        "eos_token_id": [3],
        "torch_dtype": "bfloat16",
    }
    assert set(config_changes(before, after, "target")) == {
        'config.json: model_type was "kimi_k25", is "deepseek_v3"',
        "config.json: rope_scaling.beta_fast was 32.0, is 16.0",
        'config.json: quantization_config was {"quant_method": "fp8"}, is not written',
        "config.json: left out, since no weight or product depends on it: vision_config",
    }


def test_nothing_is_said_of_what_is_the_same():
    config = tiny.TARGET_CONFIG
    assert config_changes(config, config, "target") == ()
