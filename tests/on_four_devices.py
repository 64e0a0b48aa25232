"""A program: what a tiny draft learns, and what the doctor says, on meshes of four CPU devices.

    python -m tests.on_four_devices gradients llama 1x2 2x2
    python -m tests.on_four_devices run 2x2
    python -m tests.on_four_devices features 2x2
    python -m tests.on_four_devices doctor 2x2

What it prints is JSON.
The number of devices is settled when jax starts, so this runs in a process of its own, which
`test_four_devices.py` starts; it judges nothing itself.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from jaxspec.config import MeshConfig, Numerics, TreeConfig
from jaxspec.doctor import diagnose
from jaxspec.doctor_readings import FAMILIES
from jaxspec.doctor_scores import DoctorConfig
from jaxspec.doctor_texts import write_on
from jaxspec.features import record_features
from jaxspec.fresh_draft import DraftShape, fresh_draft
from jaxspec.optimizer import OptimizerConfig
from jaxspec.prompts import EncodedPrompt
from jaxspec.target import Target
from jaxspec.text import SamplingConfig
from jaxspec.training import LossConfig, Trainer
from jaxspec.training_acceptance import AcceptanceConfig
from jaxspec.training_data import Sample, Windows
from jaxspec.training_run import TrainConfig, train
from tests import tiny

TARGET = tiny.TARGET_CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 4}
VOCAB, LENGTH = 24, 12
RNG = np.random.default_rng(0)
IDS = np.tile(RNG.integers(0, VOCAB, 7), 15).astype(np.int32)
# Not all of it is learned, so that the groups of a mesh have different numbers of positions.
WINDOWS = Windows.of([Sample(IDS, RNG.random(len(IDS)) < 0.6, "the test's")], LENGTH, VOCAB)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, num_batches=6, warm_up=2, clip=10.0, accumulate=2)
CONFIG = TrainConfig(
    LossConfig(2),
    OPTIMIZER,
    batch_size=2,
    evaluate_every=2,
    acceptance=AcceptanceConfig(3, prompt_len=5, max_new_tokens=6, tree=TreeConfig(1, 1, 2)),
)


def target_on(mesh: MeshConfig | None) -> Target:
    numerics = Numerics(dtype="float32", mesh=mesh)
    return tiny.target_module(tiny.target_tensors(TARGET), TARGET, numerics)


def shape_of(kind: Any, num_layers: int = 1) -> DraftShape:
    """Of a fresh draft; of Llama's, two query heads share a key."""
    sizes = {"num_hidden_layers": num_layers}
    sizes |= {"head_dim": 16, "num_key_value_heads": 2} if kind == "llama" else {}
    return DraftShape(kind, tiny.BOUNDARIES, vocab_size=20, sizes=sizes)


def gradients(kind: str, *meshes: str) -> dict[str, Any]:
    """How far loss and gradient of a batch are from those of one device, relative to their size."""
    told, want = {}, None
    batch = next(WINDOWS.in_order(4))
    for text in ("alone", *meshes):
        mesh = None if text == "alone" else MeshConfig.parse(text)
        target = target_on(mesh)
        draft = fresh_draft(target, shape_of(kind, 2), np.arange(20), seed=0)
        trainer = Trainer(target, draft, LossConfig(2), OPTIMIZER)
        given = trainer._start, trainer._target, trainer._fixed, trainer._put(batch)
        program = jax.jit(trainer._gradient_of, static_argnums=4)
        (loss, _), gradient = jax.device_get(program(*given, trainer.loss))
        if want is None:
            want = loss, gradient
        away = {name: np.linalg.norm(gradient[name] - of) for name, of in want[1].items()}
        told[text] = {
            "loss": float(abs(loss / want[0] - 1)),
            "gradient": {
                name: float(length / np.linalg.norm(want[1][name])) for name, length in away.items()
            },
        }
    return told


def run(mesh: str) -> dict[str, Any]:
    """A run on one device, on a mesh, and on a mesh with an interruption."""

    def of(out: Path, where: MeshConfig | None, **options: Any) -> Any:
        target = target_on(where)
        learned, held_out = WINDOWS.take(slice(None, -3)), WINDOWS.take(slice(-3, None))
        draft = fresh_draft(target, shape_of("llama"), learned.frequent_ids(VOCAB, 20), seed=1)
        report = train(target, draft, learned, held_out, CONFIG, out, **options)
        return report.to_dict()

    def interrupt(_: str, done: int, __: int) -> None:
        if done == 3:  # amid an accumulation, a batch after the checkpoint
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as name:
        place, where = Path(name), MeshConfig.parse(mesh)
        jax.config.update("jax_compilation_cache_dir", str(place / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        told = {"alone": of(place / "alone", None), "mesh": of(place / "mesh", where)}
        try:
            of(place / "killed", where, progress=interrupt)
        except KeyboardInterrupt:
            told["killed"] = of(place / "killed", where)
        try:
            of(place / "killed", None)
        except Exception as error:
            told["elsewhere"] = str(error)
        alone, on_mesh = (
            load_file(place / one / "draft" / "model.safetensors") for one in ("alone", "mesh")
        )
        told["shapes"] = [
            {name: [*tensor.shape, str(tensor.dtype)] for name, tensor in tensors.items()}
            for tensors in (alone, on_mesh)
        ]
        told["away"] = max(float(np.abs(alone[n].astype(float) - on_mesh[n]).max()) for n in alone)
        files = [
            (place / one / "draft" / "model.safetensors").read_bytes() for one in ("mesh", "killed")
        ]
        told["is_same_after_a_kill"] = files[0] == files[1]
    return told


def features(mesh: str) -> dict[str, Any]:
    """How far the features recorded on a mesh are from those of one device, by array; and what a
    draft's losses on that mesh are, step by step, with them and with the target's own.
    """
    with tempfile.TemporaryDirectory() as name:
        found, losses = [], []
        for where in (None, MeshConfig.parse(mesh)):
            target = target_on(where)
            claim = target.boundaries(tiny.BOUNDARIES, "the test's")
            made = record_features(target, claim, WINDOWS, Path(name) / str(where))
            found.append(load_file(made.shards[0]))
        draft = fresh_draft(target, shape_of("llama"), np.arange(20), seed=0)
        trainer = Trainer(target, draft, LossConfig(2), OPTIMIZER)
        for windows in (WINDOWS, made.windows()):
            batch = next(windows.in_order(4))
            losses.append(trainer.sums(trainer.new_state(), batch).mean("loss"))
    away = {name: float(np.abs(array - found[1][name]).max()) for name, array in found[0].items()}
    return {"away": away, "losses": losses}


def doctor(mesh: str) -> dict[str, Any]:
    """What is written, and found of a fresh draft, alone and with the target on a mesh."""
    told = {}
    for name, where in (("alone", None), ("mesh", MeshConfig.parse(mesh))):
        target = target_on(where)
        draft = fresh_draft(target_on(None), shape_of("llama"), np.arange(20), seed=0)
        prompts = [EncodedPrompt(str(i), tuple(IDS[i : i + 5].tolist())) for i in range(6)]
        texts = write_on(target, prompts, None, SamplingConfig(1.0), 60, 2)
        families = tuple(one for one in FAMILIES if one.name in ("order", "borrowed"))
        report = diagnose(target, draft, texts, DoctorConfig(1, 2, 3), families=families)
        told[name] = {"texts": [text.ids for text in texts]} | report.to_dict()
    return told


def main() -> None:
    # Read when the first array is made. Unoptimised, programs that run for moments compile in half
    # the time.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    what, *asked = sys.argv[1:]
    programs = {"gradients": gradients, "run": run, "features": features, "doctor": doctor}
    print(json.dumps(programs[what](*asked)))


if __name__ == "__main__":
    main()
