"""A program: what a tiny model gives on meshes of eight CPU devices, told as JSON.

    python -m tests.on_eight_devices '["loading", ["1x8", "replicated"], ["2x4", "slots"]]'

With "latent" among them the draft is one with latent attention.

The number of devices is settled when jax starts, so this runs in a process of its own, which
`test_sharding.py` starts; it judges nothing itself.
"""

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxspec.ceiling import accept_ceiling
from jaxspec.checkpoint import load_draft, load_target
from jaxspec.config import MeshConfig, Numerics, TreeConfig
from jaxspec.convert.write import convert
from jaxspec.draft import Draft
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.hlo import collectives
from jaxspec.recording import record
from jaxspec.requests import Request
from jaxspec.sharding import Devices
from jaxspec.target import Target
from jaxspec.walk import Walker
from tests import draft_kinds, make_checkpoint, tiny
from tests.reference.target import ReferenceTarget

TARGET = tiny.TARGET_CONFIG | {"vocab_size": 48, "num_attention_heads": 8, "n_routed_experts": 16}
TARGET["num_key_value_heads"] = 8
DRAFT = tiny.DRAFT_CONFIG | {"vocab_size": 48, "draft_vocab_size": 40}
DRAFT |= {"num_attention_heads": 16, "num_key_value_heads": 8}
TREE = TreeConfig(3, 2, 6)
CONFIG = GenerateConfig(
    TREE, max_new_tokens=14, context_length=45, batch_size=8, prefill_chunk=8, steps_per_call=4
)
"""45 slots are not a multiple of 8: a cache that is cut by slots is rounded up."""


def requests() -> list[Request]:
    """Two batches: prompts shorter and longer than a chunk, greedy and sampled ones."""
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(0, 48, length).tolist()) for length in range(1, 29, 2)]
    sampled = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
    return [
        Request(prompt, seed=seed, **(sampled if seed % 2 else {}))
        for seed, prompt in enumerate(prompts)
    ]


def models(reference: ReferenceTarget, mesh: MeshConfig | None) -> tuple[Target, Draft]:
    """The tiny models, computed on a mesh."""
    numerics = Numerics(dtype="float32", mesh=mesh)
    target = tiny.target_module(tiny.target_tensors(TARGET), TARGET, numerics)
    claim = target.boundaries(tiny.BOUNDARIES, "tests/on_eight_devices.py")
    tensors = tiny.related_draft_tensors(DRAFT, reference)
    return target, tiny.draft_module(tensors, tiny.draft_config(DRAFT, claim), numerics)


def latent_models(mesh: MeshConfig | None) -> tuple[Target, Draft]:
    """The same target, and a random draft of two layers with latent attention."""
    numerics = Numerics(dtype="float32", mesh=mesh)
    target = tiny.target_module(tiny.target_tensors(TARGET), TARGET, numerics)
    config, _ = draft_kinds.modelopt_mla()
    config |= {"vocab_size": 48, "draft_vocab_size": 48}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    tensors = draft_kinds.tensors_of(config, num_layers=2, first="layers.0.")
    with tempfile.TemporaryDirectory() as name:
        directory = make_checkpoint.write(Path(name), config, tensors)
        return target, load_draft(directory, numerics, target=target)


def facts(target: Target, draft: Draft) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What was generated, how the devices' copies differ, the exchanges; and a record."""
    generator = Generator(target, draft, CONFIG)
    done = generator.run(requests())
    found = {
        "tokens": [completion.tokens for completion in done.completions],
        "accepted": [completion.accepted for completion in done.completions],
        "differing_copies": differing_copies(generator._state),
        "collectives": {
            str(loop): [exchange.opcode for exchange in exchanges]
            for loop, exchanges in collectives(generator._decode.as_text()).items()
        },
        "bytes_per_device": bytes_per_device((generator._params, generator._state)),
    }
    # Three sequences: no mesh divides them.
    sequences = [request.prompt_ids for request in requests()[-3:]]
    return found, record(target, draft, sequences).arrays


def differing_copies(tree: Any) -> list[str]:
    """The arrays of which two devices that should hold the same part do not."""
    differing = []
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        parts: dict[str, bytes] = {}
        for shard in array.addressable_shards:
            mine = np.asarray(shard.data).tobytes()
            if parts.setdefault(str(shard.index), mine) != mine:
                differing.append(jax.tree_util.keystr(path))
                break
    return differing


def bytes_per_device(tree: Any) -> int:
    """Bytes that the fullest device holds of a tree."""
    held: dict[int, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return max(held.values())


def loading() -> dict[str, Any]:
    """Whether a checkpoint of either form, loaded onto a mesh, is the one loaded without."""
    numerics = Numerics(dtype="float32", mesh=MeshConfig(2, 4))
    tensors = make_checkpoint.target_tensors(TARGET)
    with tempfile.TemporaryDirectory() as name:
        source, converted = Path(name) / "hf", Path(name) / "converted"
        make_checkpoint.write(source, TARGET, tensors)
        convert(source, converted)
        want = nnx.state(load_target(source, Numerics(dtype="float32")))
        told = {"alone": bytes_per_device(want)}
        for directory in (source, converted):
            model = load_target(directory, numerics)
            got = nnx.state(model)
            assert numerics.mesh is not None
            wanted = Devices.of(numerics.mesh).shardings(got)
            told[directory.name] = {
                "bytes_per_device": bytes_per_device(got),
                "is_where_the_table_says": all(
                    array.sharding == where
                    for array, where in zip(
                        jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True
                    )
                ),
                "is_alike": all(
                    np.array_equal(a, b)
                    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
                ),
            }
    return told


def ceilings(reference: ReferenceTarget, tokens: list[tuple[int, ...]]) -> dict[str, Any]:
    """How far a draft that knew the target would have got, on one device and on a mesh.

    Args:
      tokens: that were emitted for `requests()`, greedy and sampled in turn.
    """
    asked, emitted, told = requests()[:5], tokens[:5], {}
    for name, mesh in (("alone", None), ("mesh", MeshConfig(2, 4, "slots"))):
        target, draft = models(reference, mesh)
        found = accept_ceiling(target, asked, emitted, TREE, draft, batch_size=3)
        told[name] = [
            {"accepted": text.accepted, "best": text.best.tolist(), "draft": text.draft.tolist()}
            for text in found.texts
        ]
    return told


def walks(reference: ReferenceTarget, tokens: list[tuple[int, ...]]) -> dict[str, Any]:
    """What trees accept from each root of the same texts, and how prompts surprise the target."""
    texts = [(r.prompt_ids, ids) for r, ids in zip(requests()[:5], tokens, strict=False)]
    trees, told = (TREE, TreeConfig(2, 2, 4)), {}
    for name, mesh in (("alone", None), ("mesh", MeshConfig(2, 4, "slots"))):
        walker = Walker(*models(reference, mesh), 45, 14, batch_size=3)
        found = walker.accepted(texts, trees)
        told[name] = {
            "accepted": [[of.tolist() for of in found[tree]] for tree in trees],
            "surprise": walker.surprise([prompt for prompt, _ in texts[1:]]),
        }
    return told


def main() -> None:
    # Read when the first array is made. Unoptimised, programs that run for moments compile in half
    # the time.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    reference = ReferenceTarget(tiny.target_tensors(TARGET), TARGET)
    told: dict[str, Any] = {}
    asked = json.loads(sys.argv[1])
    if "loading" in asked:
        asked.remove("loading")
        told["loading"] = loading()
    make = latent_models if "latent" in asked else functools.partial(models, reference)
    asked = [run for run in asked if run != "latent"]
    alone, said = facts(*make(None))
    told["alone"] = alone
    if "ceiling" in asked:
        asked.remove("ceiling")
        told["ceiling"] = ceilings(reference, alone["tokens"])
        told["walks"] = walks(reference, alone["tokens"])
    for text, cache in asked:
        found, also_said = facts(*make(MeshConfig.parse(text, cache)))
        assert also_said.keys() == said.keys()
        found["differences"] = {
            name: float(np.abs(also_said[name].astype(np.float64) - array).max())
            for name, array in said.items()
        }
        told[f"{text} {cache}"] = found
    print(json.dumps(told))


if __name__ == "__main__":
    main()
