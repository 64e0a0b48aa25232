"""Each process reads what its devices need, and any mesh holds what one device would.

The checkpoint is written by one process without a mesh; two processes load it, in programs of their
own: `loading_in_two.py`. What they need to read is summed here from the manifest and the table of
rules.
"""

import functools
import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpoint import _is_needed, load_target
from jaxspec.config import MeshConfig, Numerics
from jaxspec.convert import plan
from jaxspec.convert.manifest import read_manifest
from jaxspec.convert.pieces import pieces_of
from jaxspec.convert.prepare import abstract_target, parameters_of, prepare_target
from jaxspec.convert.problems import Problems
from jaxspec.convert.source import Source
from jaxspec.convert.store import chunk_shape
from jaxspec.convert.write import convert
from jaxspec.sharding import spec_of
from tests import make_checkpoint, tiny
from tests.together import free_address, run_together

ROOT = Path(__file__).parent.parent
MESHES = ("1x8", "2x4", "8x1")
TARGET = tiny.TARGET_CONFIG | {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 32,
}
"""Weights are many times what stands beside them on the disk."""
METADATA_BYTES = 10_000
"""Of a piece: names, shapes and places of its chunks."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with `hf` and `converted`, in pieces of a few experts."""
    place = tmp_path_factory.mktemp("restore")
    make_checkpoint.write(place / "hf", TARGET, make_checkpoint.target_tensors(TARGET))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PIECE_BYTES", 200_000)
        convert(place / "hf", place / "converted")
    names = [piece["name"] for piece in read_manifest(place / "converted").pieces]
    assert len(names) > 12, names
    return place


@pytest.fixture(scope="module")
def told(place) -> list[dict[str, Any]]:
    """What the two processes say."""
    program = [sys.executable, "-m", "tests.loading_in_two", free_address()]
    commands = [[*program, str(index), str(place / "converted"), *MESHES] for index in range(2)]
    ended = run_together(commands, ROOT)
    for process in ended:
        assert not process.status, process.err
    return [json.loads(process.out.splitlines()[-1]) for process in ended]


def needed_bytes(directory: Path, mesh: MeshConfig) -> int:
    """Bytes on the disk of what one of two processes holds, by the table of rules."""
    total = 0
    for leaf in read_manifest(directory).leaves:
        is_cut = "model" in tuple(spec_of(leaf["path"], len(leaf["shape"]), mesh))
        # Of 1x8 a process has half of the devices of the one group; of others whole groups.
        total += leaf["bytes"] // (2 if is_cut and mesh.data == 1 else 1)
    return total


@pytest.mark.parametrize("mesh", MESHES)
def test_a_process_reads_what_it_needs(place, told, mesh):
    needed = needed_bytes(place / "converted", MeshConfig.parse(mesh))
    num_pieces = len(read_manifest(place / "converted").pieces)
    for process in told:
        read = process[mesh]["read"]
        print(f"{mesh}: {needed} bytes needed, read {read}, {num_pieces} pieces")
        assert needed < read["tensorstore"] <= read["system"]
        assert read["system"] < 1.05 * needed + num_pieces * METADATA_BYTES
        assert read["system"] < 1.2 * needed
    whole = needed_bytes(place / "converted", MeshConfig(8, 1))
    assert needed < 0.6 * whole or mesh != "1x8"


def test_every_mesh_holds_what_one_device_would(place, told):
    """Every part that a device holds is that cut of what is loaded without a mesh."""
    alone = {
        ".".join(map(str, path)): np.asarray(leaf.get_value())
        for path, leaf in nnx.to_flat_state(
            nnx.state(load_target(place / "converted", Numerics(dtype="float32")))
        )
    }
    for mesh in MESHES:
        held = {name: 0 for name in alone}
        parts = told[0][mesh]["hashes"] | told[1][mesh]["hashes"]
        for name, digest in parts.items():
            path, _, bounds = name.partition(" ")
            cut = tuple(slice(*ends) for ends in json.loads(bounds))
            part = alone[path][cut]
            assert hashlib.sha256(part.tobytes()).hexdigest() == digest, (mesh, name)
            held[path] += part.size
        assert held == {name: array.size for name, array in alone.items()}, mesh
    for process in told:
        assert process["8x1"]["hashes"].keys() == {
            f"{path} {json.dumps([[0, n] for n in array.shape])}" for path, array in alone.items()
        }


@pytest.mark.parametrize(
    ("path", "shape", "chunk"),
    [
        ("sparse.attention.q_b", (1536, 64, 192), (1536, 4, 192)),
        ("sparse.attention.out", (64, 128, 7168), (4, 128, 7168)),
        ("experts.gate_up_words", (16, 2, 2048, 896), (1, 2, 2048, 896)),
        ("head", (7168, 32768), (7168, 2048)),
        ("sparse.shared.down", (2048, 7168), (128, 7168)),
        ("sparse.attention.q_a", (7168, 1536), (7168, 1536)),
        ("norm.weight", (7168,), (7168,)),
        ("embed", (24, 64), (2, 64)),  # 24 rows in twelve
    ],
)
def test_chunks_lie_along_the_axis_that_is_cut(path, shape, chunk):
    assert chunk_shape(path, shape) == chunk


def test_of_hugging_faces_files_only_pieces_that_are_needed_are_built(place, monkeypatch):
    """The second half of the experts and of the vocabulary, as of the second of two processes."""
    monkeypatch.setattr(plan, "PIECE_BYTES", 200_000)
    prepared, problems = prepare_target(Source(place / "hf")), Problems("here")
    hull = {}
    for path, leaf in parameters_of(abstract_target(prepared.config, Numerics(), "")).items():
        shape = leaf.get_value().shape
        cut = spec_of(path, len(shape), MeshConfig(1, 2))
        begin = [n // 2 if by else 0 for n, by in itertools.zip_longest(shape, cut)]
        hull[path] = (np.asarray(begin), np.asarray(shape))
    is_needed = functools.partial(_is_needed, hull)
    total, pieces = pieces_of(prepared, place, problems, is_needed)
    built = {piece.name for piece in pieces}
    assert len(built) == total
    experts = [f"layer_{layer:03}.{first:06}" for layer in (1, 2) for first in range(0, 16, 4)]
    assert prepared.rules_by_piece().keys() - built == {"embed.000000", "head.000000", *experts}
