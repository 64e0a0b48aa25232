"""Exports: what is written converts to the same parameters, bit by bit, and says the same."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint import load_draft, load_target
from jaxspec.config import LatentDraftConfig, TreeConfig
from jaxspec.convert import plan
from jaxspec.convert.export import ExportConfig, export
from jaxspec.convert.problems import CheckpointError
from jaxspec.convert.rotary import RotaryChoice
from jaxspec.convert.shards import write_tensors
from jaxspec.convert.write import ConvertConfig, convert
from tests import draft_kinds, make_checkpoint, tiny
from tests.test_checkpoint import assert_same

F32 = tiny.NUMERICS


@pytest.fixture(scope="module")
def small_pieces():
    """Checkpoints in more pieces: parts of a vocabulary, of a layer, of its experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PIECE_BYTES", 30_000)
        yield


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("form", "quantization", "prefix", "is_converted"),
    [("wrapper", "int4", "language_model.model.", True), ("flat", "none", "model.", False)],
)
def test_target(tmp_path, form, quantization, prefix, is_converted):
    config = make_checkpoint.target_config(form, quantization)
    tensors = make_checkpoint.target_tensors(config, prefix)
    source = make_checkpoint.write(tmp_path / "hf", config, tensors, 2)
    (source / "tiktoken.model").write_text("IQ== 0\n")
    if is_converted:
        convert(source, tmp_path / "converted")
        source = tmp_path / "converted"
    report = export(source, tmp_path / "out", ExportConfig("hf"))
    # Every tensor, its element type, and every bit: packed words and scales among them.
    found = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        found |= load_file(file)
    assert report.num_tensors == len(found)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    again = load_target(tmp_path / "out", F32)
    wanted = load_target(source, F32)
    assert_same(again, wanted)
    assert (again.config, again.identity) == (wanted.config, wanted.identity)
    assert (tmp_path / "out" / "tiktoken.model").read_text() == "IQ== 0\n"


def test_text_model_of_a_wrapper(tmp_path):
    """In DeepSeek-V3's form, which engines serve without a vision tower: the same model."""
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, "language_model.model.")
    source = make_checkpoint.write(tmp_path / "hf", config, tensors)
    whole = export(source, tmp_path / "whole", ExportConfig("hf")).served
    assert (whole.sglang, whole.vllm) == (None, None)
    assert "vision tower" in whole.notes[0]
    served = export(source, tmp_path / "flat", ExportConfig("hf", flat=True, pair="D")).served
    assert f"--model-path {tmp_path / 'flat'} " in served.sglang
    assert f"vllm serve {tmp_path / 'flat'} " in served.vllm
    flat, wanted = load_target(tmp_path / "flat", F32), load_target(source, F32)
    assert_same(flat, wanted)
    assert flat.config == wanted.config
    name, _, fingerprint = flat.identity.partition("@")
    assert (name, fingerprint) == ("deepseek_v3", wanted.identity.partition("@")[2])


def test_target_of_fp8_is_exported_plain(tmp_path):
    config = make_checkpoint.target_config("flat", "fp8")
    source = make_checkpoint.write(tmp_path / "hf", config, make_checkpoint.target_tensors(config))
    export(source, tmp_path / "plain", ExportConfig("hf"))
    assert_same(load_target(tmp_path / "plain", F32), load_target(source, F32))
    convert(source, tmp_path / "int4", ConvertConfig(experts="int4"))
    export(tmp_path / "int4", tmp_path / "packed", ExportConfig("hf"))
    found, wanted = (load_target(tmp_path / name, F32) for name in ("packed", "int4"))
    assert_same(found, wanted)
    assert found.config == wanted.config


EXPORTS = [
    (kind, layout)
    for kind in draft_kinds.LAYOUTS
    for layout in ("specforge", "speculators")
    if layout == "specforge" or kind not in ("ModelOpt MLA", "TorchSpec")
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """By kind, the directory of a draft in its own layout, and what it was converted to."""
    place = tmp_path_factory.mktemp("drafts")

    @functools.cache
    def make(kind: str) -> tuple[Path, Path]:
        source = make_checkpoint.write(place / kind, *draft_kinds.LAYOUTS[kind]())
        convert(source, place / f"{kind} converted")
        return source, place / f"{kind} converted"

    return make


@pytest.mark.parametrize(("kind", "layout"), EXPORTS)
def test_draft(tmp_path, target, converted, kind, layout):
    """Parameters, and tensors, are what they were; the config says the same."""
    source, directory = converted(kind)
    wanted, out = load_draft(source, F32, target=target), tmp_path / "out"
    export(directory, out, ExportConfig(layout))
    found = load_draft(out, F32, target=target)
    assert_same(found, wanted)
    assert same_but_for_origin(found.config) == same_but_for_origin(wanted.config)
    original, mine = (
        {n.replace("midlayer.", "layers.0."): t for n, t in load_file(file).items()}
        for file in (source / "model.safetensors", out / "model.safetensors")
    )
    for name, tensor in original.items():
        assert mine[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(mine[name], tensor, err_msg=name)
    assert mine.keys() - original.keys() <= {"d2t", "t2d"}, "maps that a layout leaves out"


@pytest.mark.parametrize(
    ("kind", "layout"), [("ModelOpt MLA", "specforge"), ("speculators", "speculators")]
)
def test_draft_of_either_form(tmp_path, target, converted, kind, layout):
    """Exported from its own layout it is the same file; and an export can be converted."""
    source, directory = converted(kind)
    for number, place in enumerate((source, directory)):
        export(place, tmp_path / f"{number}", ExportConfig(layout))
    first, second = (tmp_path / f"{number}" / "model.safetensors" for number in range(2))
    assert first.read_bytes() == second.read_bytes()
    convert(tmp_path / "0", tmp_path / "again")
    assert_same(
        load_draft(tmp_path / "again", F32, target=target), load_draft(source, F32, target=target)
    )


def same_but_for_origin(config):
    """A draft's config without where its claim was read."""
    return dataclasses.replace(config, boundaries=dataclasses.replace(config.boundaries, origin=""))


@pytest.mark.parametrize("convention", ["before", "after"])
def test_ids_in_either_convention(tmp_path, target, convention):
    source = make_checkpoint.write(tmp_path / "hf", *draft_kinds.specforge())
    export(source, tmp_path / "out", ExportConfig("specforge", capture_convention=convention))
    found = json.loads((tmp_path / "out" / "config.json").read_text())["eagle_config"]
    ids = {"before": [2, 4], "after": [1, 3]}[convention]
    assert found["eagle_aux_hidden_state_layer_ids"] == ids
    assert load_draft(tmp_path / "out", F32, target=target).config.boundaries.ids == (2, 4)


SGLANG = (
    "python3 -m sglang.launch_server --model-path T --trust-remote-code --speculative-algorithm "
    "EAGLE3 --speculative-draft-model-path {out} --speculative-num-steps {levels} "
    "--speculative-eagle-topk {branches} --speculative-num-draft-tokens {nodes}"
)
VLLM = (
    "vllm serve T --trust-remote-code --speculative-config "
    '\'{{"method": "eagle3", "model": "{out}", "num_speculative_tokens": {levels}}}\''
)


@pytest.mark.parametrize(
    ("kind", "layout", "convention", "tree", "engines", "notes"),
    [
        ("TorchSpec", "specforge", "before", "3x1x4", "SGLang vLLM", []),
        ("TorchSpec", "specforge", "before", "3x4x16", "SGLang", ["vLLM drafts chains"]),
        ("TorchSpec", "specforge", "before", "3x1x3", "SGLang", ["vLLM verifies all it drafts"]),
        ("TorchSpec", "specforge", "after", "3x1x4", "SGLang", ["[1, 2, 3] as boundaries [1, 2"]),
        ("SafeAILab", "specforge", "before", "3x1x4", "SGLang vLLM", []),
        ("SafeAILab", "speculators", "before", "3x1x4", "vLLM", ["--layout specforge"]),
        (
            "ModelOpt Llama",
            "specforge",
            "before",
            "3x1x4",
            "vLLM",
            ["SGLang reads ids [1, 2, 3, 4] as boundaries [2, 3, 4, 5]"],
        ),
        (
            "speculators",
            "specforge",
            "before",
            "3x1x4",
            "vLLM",
            ["no norm_before_residual and no drafts of several layers"],
        ),
    ],
)
def test_commands_that_serve_it(tmp_path, kind, layout, convention, tree, engines, notes):
    """Written by hand; an engine that would read other boundaries gets none."""
    source = make_checkpoint.write(tmp_path / "hf", *draft_kinds.LAYOUTS[kind]())
    shape, out = TreeConfig.parse(tree), tmp_path / "out"
    config = ExportConfig(layout, convention, pair="T", tree=shape)
    report = export(source, out, config)
    sizes = {"out": out, **dataclasses.asdict(shape)}
    assert report.served.sglang == (SGLANG.format(**sizes) if "SGLang" in engines else None)
    assert report.served.vllm == (VLLM.format(**sizes) if "vLLM" in engines else None)
    assert len(report.served.notes) == len(notes)
    for note, fragment in zip(report.served.notes, notes, strict=True):
        assert fragment in note
        assert f"note: {note}" in report.summary()
    assert json.loads(json.dumps(report.to_dict()))["served"]["sglang"] == report.served.sglang


def test_what_cannot_be_exported(tmp_path, target):
    source = make_checkpoint.write(tmp_path / "hf", *draft_kinds.torchspec())
    (tmp_path / "there").mkdir()
    cases = [
        ("there", ExportConfig("specforge"), source, "exists already"),
        ("a", ExportConfig("hf"), source, "a draft, and 'hf' is no layout of one"),
        ("b", ExportConfig("speculators"), source, "latent attention, which speculators does not"),
    ]
    flat = ExportConfig("specforge", flat=True)
    cases.append(("f", flat, source, "a draft, and --flat is of a target"))
    after = ExportConfig("speculators", "after")
    config = make_checkpoint.target_config("flat")
    whole = make_checkpoint.write(tmp_path / "t", config, make_checkpoint.target_tensors(config))
    cases.append(("g", ExportConfig("hf", "before"), whole, "a target, and --capture-convention"))
    pairs = RotaryChoice.parse('{"rope_interleave": true}')
    llama = make_checkpoint.write(tmp_path / "llama", *draft_kinds.safeailab())
    cases.append(("h", after, llama, "speculators counts boundaries"))
    convert(llama, tmp_path / "pairs", ConvertConfig(draft_rotary=pairs))
    cases.append(("c", ExportConfig("specforge"), tmp_path / "pairs", "turns pairs of dims"))
    config, tensors = draft_kinds.safeailab()
    tensors["fc.weight"][0, 0] = np.nan
    bad = make_checkpoint.write(tmp_path / "nan", config, tensors)
    cases.append(("d", ExportConfig("specforge"), bad, "NaN"))
    (tmp_path / "e.partial").mkdir()
    cases.append(("e", ExportConfig("specforge"), source, "is in the way"))
    config, tensors = draft_kinds.safeailab()
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    unclear = make_checkpoint.write(tmp_path / "unclear", config, tensors)
    of_convert = r"for export and train-draft: of convert, first"
    cases.append(("i", ExportConfig("hf", pair=str(unclear)), whole, of_convert))
    before = sorted(tmp_path.iterdir())
    for name, choice, directory, message in cases:
        with pytest.raises(CheckpointError, match=message):
            export(directory, tmp_path / name, choice)
    assert sorted(tmp_path.iterdir()) == before, "nothing is left behind"


def test_latent_pairing_survives(tmp_path, target):
    source = make_checkpoint.write(tmp_path / "hf", *draft_kinds.torchspec())
    halves = RotaryChoice.parse('{"rope_interleave": false}')
    convert(source, tmp_path / "halves", ConvertConfig(draft_rotary=halves))
    export(tmp_path / "halves", tmp_path / "out", ExportConfig("specforge"))
    found = load_draft(tmp_path / "out", F32, target=target)
    assert isinstance(found.config, LatentDraftConfig)
    assert found.config.rotary.kind == "halves"
    assert_same(found, load_draft(tmp_path / "halves", F32, target=target))


def test_tensors_of_every_type(tmp_path):
    """By safetensors' own reader: ours are at offsets it takes, behind a padded header."""
    rng = np.random.default_rng(0)
    tensors = {
        "b": rng.normal(size=(3, 2)).astype(np.float32),
        "a": rng.integers(0, 9, 5),
        "c": rng.normal(size=7) > 0,
        "": np.zeros((0, 4), np.float32),
        "é" * 40: np.array(3, np.int32),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)
