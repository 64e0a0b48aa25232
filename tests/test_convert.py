"""Conversion: what lies on disk, that it loads the same, and that it never looks finished early."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxspec.checkpoint import load_draft, load_target, locate
from jaxspec.convert.inspect import inspect
from jaxspec.convert.problems import CheckpointError
from jaxspec.convert.write import ConvertConfig, convert
from tests import make_checkpoint, tiny
from tests.test_checkpoint import F32, assert_same

PREFIX = "language_model.model."


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """A target in Kimi-K2.5's layout, with what its directory holds beside the decoder."""
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, PREFIX)
    tensors["vision_tower.patch_embed.proj.weight"] = np.ones((2, 3), np.float32)
    tensors["mm_projector.proj.0.bias"] = np.ones(3, np.float32)
    tensors[f"{PREFIX}layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    directory = make_checkpoint.write(tmp_path_factory.mktemp("kimi"), config, tensors, 2)
    (directory / "tiktoken.model").write_text("IQ== 0\n")
    (directory / "generation_config.json").write_text('{"eos_token_id": [22, 23]}')
    return directory


@pytest.fixture(scope="module")
def converted(kimi, tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted") / "target"
    return convert(kimi, directory)


def test_both_ways_load_the_same(kimi, converted):
    ours, theirs = load_target(converted.destination, F32), load_target(kimi, F32)
    assert_same(ours, theirs)
    assert (ours.config, ours.identity) == (theirs.config, theirs.identity)
    assert ours.config.eos_token_ids == (22, 23)


def test_manifest(kimi, converted):
    manifest = json.loads((converted.destination / "manifest.json").read_text())
    assert manifest["format"] == "jaxspec-checkpoint-1"
    assert manifest == converted.manifest.to_dict() | {
        key: json.loads(json.dumps(converted.manifest.to_dict()[key]))
        for key in ("config", "claims")
    }
    files = {entry["file"]: entry for entry in manifest["sources"]}
    for file in kimi.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert files[file.name] == {
            "file": file.name,
            "bytes": file.stat().st_size,
            "sha256": digest,
        }
    reasons = {entry["tensor"]: entry["reason"] for entry in manifest["unused"]}
    assert reasons == {
        "vision_tower.patch_embed.proj.weight": "vision: present and not converted",
        "mm_projector.proj.0.bias": "vision: present and not converted",
        f"{PREFIX}layers.1.self_attn.rotary_emb.inv_freq": (
            "stale: rotary frequencies are computed from the config"
        ),
    }
    assert manifest["claims"]["rms_norm_eps"] == {
        "value": 1e-5,
        "origin": "config.json: text_config.rms_norm_eps",
    }
    assert manifest["claims"]["eos_token_ids"] == {
        "value": [22, 23],
        "origin": "config.json: eos_token_id; generation_config.json: eos_token_id",
    }
    assert (converted.destination / "tiktoken.model").read_text() == "IQ== 0\n"
    names = {path.name for path in (converted.destination / "params").iterdir()}
    assert names == {"embed", "norm", "head", *(f"layer_{i:03d}" for i in range(4))}


def test_inspect_says_the_same_before_and_after(kimi, converted):
    before, after = inspect(kimi).to_dict(), inspect(converted.destination).to_dict()
    assert (before.pop("form"), after.pop("form")) == ("hugging-face", "converted")
    before.pop("directory"), after.pop("directory")
    assert json.loads(json.dumps(before)) == json.loads(json.dumps(after))
    plain = make_checkpoint.target_tensors(make_checkpoint.target_config("flat", "none"))
    assert before["parameters"] == sum(tensor.size for tensor in plain.values())
    c, block_bytes = tiny.TARGET_CONFIG, 4 * 32  # every row of an expert is one block of 256
    rows = 2 * c["moe_intermediate_size"] + c["hidden_size"]
    assert before["bytes_by_dtype"]["int32"] == 3 * c["n_routed_experts"] * rows * block_bytes
    assert before["boundaries"]["ids"] == [0, 1, 2, 3, 4]


def test_dry_run_writes_nothing(kimi, tmp_path):
    report = convert(kimi, tmp_path / "out", is_dry_run=True)
    assert report.manifest.identity == inspect(kimi).manifest.identity
    assert list(tmp_path.iterdir()) == []


def test_progress(kimi, tmp_path):
    seen = []
    convert(kimi, tmp_path / "out", progress=lambda *step: seen.append(step))
    used = inspect(kimi).manifest.leaves
    whats, done, totals = zip(*seen, strict=True)
    assert set(whats) == {"converting"}
    assert len(done) == 8, "one for each piece, and one before them"
    assert list(done) == sorted(done)
    assert done[0] == 0 and done[-1] == totals[0]
    # Words and scales of these widths are padded on the way, and weight_shape is not kept.
    padded = sum(leaf["bytes"] for leaf in used if leaf["path"].startswith("experts."))
    assert totals[0] < sum(leaf["bytes"] for leaf in used) < totals[0] + padded


def test_draft_tied_to_its_target(kimi, converted, tmp_path):
    """A tie outlives the conversion; without one, loading makes it, and says so."""
    draft = make_checkpoint.write(tmp_path / "hf", *make_checkpoint.draft_layout("specforge"))
    target = load_target(kimi, F32)
    convert(draft, tmp_path / "untied")
    for tied_to in (kimi, converted.destination):
        out = tmp_path / f"tied-{tied_to.name}"
        convert(draft, out, ConvertConfig(target=tied_to))
    in_memory = load_draft(draft, F32, target=target)
    untied = load_draft(tmp_path / "untied", F32, target=target)
    tied = load_draft(tmp_path / "tied-target", F32, target=target)
    assert_same(untied, in_memory)
    assert_same(tied, in_memory)
    assert (untied.config, untied.identity) == (in_memory.config, in_memory.identity)
    assert untied.config.boundaries.agrees_with(tied.config.boundaries)
    assert untied.config.boundaries.origin.endswith("tied to this target when it was loaded")
    assert tied.config.boundaries.origin.endswith("tied to this target by --target")
    manifest = json.loads((tmp_path / "tied-target" / "manifest.json").read_text())
    assert manifest["claims"]["target"]["value"] == target.identity
    assert load_draft(out, F32, target=target).config == tied.config


def test_tie_to_another_target_is_kept(kimi, tmp_path):
    """The contract refuses such a draft when it is traced; loading must not retie it."""
    draft = make_checkpoint.write(tmp_path / "hf", *make_checkpoint.draft_layout("specforge"))
    convert(draft, tmp_path / "tied", ConvertConfig(target=kimi))
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, PREFIX)
    tensors[f"{PREFIX}norm.weight"] = tensors[f"{PREFIX}norm.weight"] * 2
    other = load_target(make_checkpoint.write(tmp_path / "other", config, tensors), F32)
    loaded = load_draft(tmp_path / "tied", F32, target=other)
    assert loaded.config.boundaries.target == load_target(kimi, F32).identity
    assert loaded.config.boundaries.target != other.identity


def test_same_weights_same_identity(kimi, tmp_path):
    """One identity for a model under other names, another where any kind of matrix differs."""
    flat = make_checkpoint.target_config("flat", "int4")
    tensors = make_checkpoint.target_tensors(flat)
    directory = make_checkpoint.write(tmp_path / "flat", flat, tensors)
    fingerprint = inspect(kimi).manifest.identity.split("@")[1]
    assert inspect(directory).manifest.identity == f"kimi_k2@{fingerprint}"
    for name in (
        "lm_head.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.mlp.experts.0.down_proj.weight_packed",
    ):
        changed = make_checkpoint.write(
            tmp_path / name, flat, tensors | {name: tensors[name] + tensors[name].dtype.type(1)}
        )
        assert inspect(changed).manifest.identity != f"kimi_k2@{fingerprint}", name


KILLED = """
import os, signal, sys
from jaxspec.convert.write import convert
calls = []
def progress(*step):
    calls.append(step)
    if len(calls) == 1 + 3:
        os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], progress=progress)
"""


def test_killed_conversion_never_looks_complete(kimi, tmp_path):
    """Killed after three of seven pieces: nothing loads, and the next run goes on from there."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    command = [sys.executable, "-c", KILLED, str(kimi), str(out)]
    done = subprocess.run(command, env=os.environ, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert not (partial / "manifest.json").exists()
    for read in (lambda: load_target(partial, F32), lambda: inspect(partial)):
        with pytest.raises(CheckpointError, match="a conversion that was interrupted"):
            read()
    (partial / "params" / "layer_002.orbax-checkpoint-tmp").mkdir()
    # Killed just before its record, which is written beside the next piece.
    (partial / "params" / "layer_001" / "files.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="left from another conversion"):
        convert(kimi, out, ConvertConfig(latent_norm_eps="transformers"))
    report = convert(kimi, out)
    assert report.num_pieces_kept == 2
    assert not partial.exists()
    assert not (out / "partial.json").exists()
    assert not list((out / "params").glob("*tmp*"))
    assert_same(load_target(out, F32), load_target(kimi, F32))


def test_latent_norm_eps_is_a_recorded_choice(kimi, tmp_path):
    convert(kimi, tmp_path / "out", ConvertConfig(latent_norm_eps="transformers"))
    model = load_target(tmp_path / "out", F32)
    assert (model.config.rms_norm_eps, model.config.latent_norm_eps) == (1e-5, 1e-6)
    ours = load_target(tmp_path / "out", F32, latent_norm_eps="rms_norm_eps")
    assert ours.config == dataclasses.replace(model.config, latent_norm_eps=1e-5)
    assert ours.identity == model.identity == load_target(kimi, F32).identity


def test_damaged_conversion(kimi, tmp_path):
    """A piece that is gone or cut short, and a manifest that was changed."""
    out = tmp_path / "out"
    convert(kimi, out)
    layer, manifest = out / "params" / "layer_002", out / "manifest.json"
    data = next(path for path in layer.rglob("*") if path.is_file() and path.parent.name == "d")
    kept = data.read_bytes()
    data.write_bytes(kept[: len(kept) // 2])
    sizes = rf"{len(kept)} bytes were written, {len(kept) // 2} are there"
    with pytest.raises(CheckpointError, match=rf"params/layer_002 is missing or damaged.*{sizes}"):
        load_target(out, F32)
    data.write_bytes(kept)
    load_target(out, F32)
    text = manifest.read_text()
    manifest.write_text(text.replace('"q_lora_rank": 28', '"q_lora_rank": 27'))
    with pytest.raises(CheckpointError, match="config has no room for"):
        load_target(out, F32)
    manifest.write_text(text)
    layer.rename(out / "params" / "elsewhere")
    with pytest.raises(CheckpointError, match="params/layer_002 is missing or damaged"):
        load_target(out, F32)


def test_repository_in_the_local_cache(kimi, tmp_path, monkeypatch):
    """Hugging Face's cache layout: refs name the snapshot. Nothing is downloaded."""
    repository = tmp_path / "models--moonshotai--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123\n")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc123").symlink_to(kimi)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = locate("moonshotai/tiny")
    assert inspect(found).manifest.identity == inspect(kimi).manifest.identity
