"""Records of transformers and speculators: made in the reference environment, or read from
`tests/golden/`, where `tests/make_goldens.py` put them.

The programs that make them are in `benchmarks/reference_env/`; they are run by the Python that the
environment variable JAXSPEC_REFERENCE_PYTHON names (CONTRIBUTING.md says how to make one).
"""

import dataclasses
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import jaxspec
from jaxspec.convert.source import Source as Checkpoint
from jaxspec.tokenizer import load_tokenizer
from tests import draft_kinds, make_checkpoint, tiny

Source = Literal["golden", "live"]

GOLDEN = Path(__file__).parent / "golden"
PROGRAMS = Path(__file__).parents[1] / "benchmarks" / "reference_env"
MINI_TARGET = Path(jaxspec.__file__).parent / "checkpoints" / "mini-target"
MINI_DRAFT = MINI_TARGET.with_name("mini-draft")

BOUNDARIES = (2, 3, 4)
"""What the tiny drafts read: outputs of the layers 1, 2 and 3, as SpecForge counts them."""
LENGTHS = {"golden": (9, 5), "live": (70, 41)}
"""Of the recorded sequences; golden files are committed, so they are short."""
RECURRENT_STEPS = {"golden": 2, "live": 4}

NEAR_TIE = 1e-4
"""A choice with a smaller margin than this may fall differently in another f32 program."""

KIMI_CONFIG = tiny.TARGET_CONFIG
NOT_PACKED = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]
"""What Kimi-K2.5's own config leaves plain."""
DEEPSEEK_CONFIG = {
    **{name: value for name, value in KIMI_CONFIG.items() if name != "quantization_config"},
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 2,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": KIMI_CONFIG["rope_scaling"] | {"mscale": 0.7, "mscale_all_dim": 0.9},
}


@dataclasses.dataclass(frozen=True)
class Record:
    """A file of one of the programs.

    Attributes:
      arrays: under the names of "jaxspec-record-1", or of greedy_target.py.
      metadata: strings; `model` is `name@fingerprint` of the checkpoint.
    """

    arrays: dict[str, np.ndarray]
    metadata: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Record":
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            return cls({name: file.get_tensor(name) for name in names}, file.metadata())

    @property
    def is_real(self) -> np.ndarray:
        """Which rows [B, T] lie within their sequence."""
        length = self.arrays["tokens"].shape[1]
        return np.arange(length) < self.arrays["lengths"][:, None]

    def check_made_from(self, directory: Path) -> None:
        """Raises AssertionError unless this is a record of the weights in `directory`."""
        assert self.metadata["model"] == identity(directory), (
            f"this record is of {self.metadata['model']}, and the checkpoint here is "
            f"{identity(directory)}: make the golden files again (CONTRIBUTING.md)"
        )


def identity(directory: Path) -> str:
    """`name@fingerprint` of a checkpoint directory: of its config and every tensor."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    source = Checkpoint(directory)  # safetensors' own reader has no fp8 for numpy
    for name in sorted(source.tensors, key=lambda name: (source.tensors[name].file, name)):
        tensor = source.read(name)
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.tobytes())
    return f"{directory.name}@{digest.hexdigest()[:16]}"


def target_directory(name: str, folder: Path) -> Path:
    """The directory of a target: the one that ships, or a tiny one written into `folder`.

    Args:
      name: "mini-target"; "tiny-kimi", Kimi-K2.5's wrapper with packed experts; "tiny-deepseek",
        flat and plain, with experts in groups and two dense layers; "tiny-k2", Kimi-K2's, flat in
        block fp8; or "tiny-packed", packed experts as transformers itself loads them.
    """
    if name == "mini-target":
        return MINI_TARGET
    if name == "tiny-k2":
        config = make_checkpoint.target_config("flat", "fp8")
        return _write(folder / name, config, make_checkpoint.target_tensors(config))
    if name == "tiny-packed":
        config = KIMI_CONFIG | {"model_type": "deepseek_v3"}
        config["quantization_config"] = config["quantization_config"] | {"ignore": NOT_PACKED}
        return _write(folder / name, config, tiny.target_tensors(KIMI_CONFIG))
    if name == "tiny-deepseek":
        return _write(folder / name, DEEPSEEK_CONFIG, tiny.target_tensors(DEEPSEEK_CONFIG, seed=5))
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": KIMI_CONFIG,
        "quantization_config": KIMI_CONFIG["quantization_config"],
        "tie_word_embeddings": False,
    }
    tensors = tiny.target_tensors(KIMI_CONFIG)
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    return _write(folder / name, wrapper, tensors)


def draft_directory(name: str, folder: Path) -> Path:
    """The directory of a draft: the one that ships, or a tiny one of "tiny-kimi".

    Args:
      name: "mini-draft", "tiny-draft", "tiny-draft-normed" (`norm_before_residual`), or
        "tiny-specforge" and "tiny-speculators", which are those of `draft_kinds`.
    """
    if name == "mini-draft":
        return MINI_DRAFT
    if name == "tiny-specforge":
        return _write(folder / name, *draft_kinds.specforge())
    if name == "tiny-speculators":
        return _write(folder / name, *draft_kinds.speculators())
    config = tiny.DRAFT_CONFIG | {
        "num_attention_heads": 8,  # transformers takes only what divides the width
        "norm_before_residual": name == "tiny-draft-normed",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [b - 1 for b in BOUNDARIES]},
    }
    return _write(folder / name, config, tiny.draft_tensors(config))


def _write(directory: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def boundaries_of(draft: Path) -> tuple[int, ...]:
    """The boundaries a draft was trained on; others than speculators count layer outputs, unless
    the config says what it counts."""
    config = json.loads((draft / "config.json").read_text())
    if "speculators_model_type" in config:
        return tuple(config["eagle_aux_hidden_state_layer_ids"])
    eagle = config["eagle_config"]
    after = eagle.get("capture_convention") != "before"
    return tuple(i + after for i in eagle["eagle_aux_hidden_state_layer_ids"])


def prompt_ids() -> list[list[int]]:
    """The 64 held-out prompts, as the shipped checkpoint's tokenizer reads them."""
    prompts = json.loads((GOLDEN / "prompts.json").read_text())["golden"]
    tokenizer = load_tokenizer(MINI_TARGET)
    assert tokenizer is not None
    return [tokenizer.encode(prompt["text"]) for prompt in prompts]


def each_source(names: Iterable[str], slow: Iterable[str] = ()) -> list:
    """pytest parameters (source, name): golden by default, live under its marker.

    Args:
      slow: names whose golden ones are slow tests.
    """
    live = pytest.mark.torch_reference
    golden = {name: [pytest.mark.slow] if name in slow else [] for name in names}
    return [
        pytest.param(
            (source, name),
            id=f"{source}-{name}",
            marks=[live] if source == "live" else golden[name],
        )
        for source in ("golden", "live")
        for name in names
    ]


def golden(name: str) -> Record:
    """The committed record of that name."""
    return Record.read(GOLDEN / f"{name}.safetensors")


def make_target_record(directory: Path, out: Path, source: Source, *options: str) -> Record:
    """transformers' record of random sequences.

    Args:
      options: of record_target.py.
    """
    config = json.loads((directory / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]
    rng = np.random.RandomState(0)  # its stream is frozen (NEP 19)
    sequences = [rng.randint(vocab_size, size=length).tolist() for length in LENGTHS[source]]
    listed = _write_tokens(out, sequences)
    _run("record_target.py", directory, "--tokens", listed, "--out", out, *options)
    return Record.read(out)


def make_draft_record(directory: Path, target: Path, out: Path, source: Source) -> Record:
    """speculators' record of a draft over transformers' record of its target."""
    features = ",".join(map(str, boundaries_of(directory)))
    of_target = out.with_suffix(".target.safetensors")
    make_target_record(target, of_target, source, "--features", features)
    options = ("--record", of_target, "--target", target, "--steps", RECURRENT_STEPS[source])
    _run("record_draft.py", directory, "--out", out, *options)
    return Record.read(out)


def make_greedy_record(
    directory: Path, prompts: list[list[int]], out: Path, *options: str
) -> Record:
    """64 tokens that transformers generates greedily after each prompt.

    Args:
      options: of greedy_target.py.
    """
    given = ("--tokens", _write_tokens(out, prompts), "--out", out)
    _run("greedy_target.py", directory, *given, "--max-new-tokens", 64, *options)
    return Record.read(out)


def make_draft_step(
    directory: Path, out: Path, inputs: dict[str, np.ndarray], num_steps: int, decay: float
) -> dict[str, np.ndarray]:
    """speculators' loss and gradients of one training step; see draft_step.py."""
    given = out.with_suffix(".inputs.safetensors")
    # Safetensors writes a view's underlying memory, whatever the view shows of it.
    save_file({name: np.ascontiguousarray(array) for name, array in inputs.items()}, given)
    options = ("--inputs", given, "--out", out, "--steps", num_steps, "--decay", decay)
    _run("draft_step.py", directory, *options)
    return Record.read(out).arrays


def save_features(project: str, out: Path, arrays: dict[str, np.ndarray], *options: object) -> None:
    """A sample of features as that project saves it; see save_features.py."""
    given = out.with_suffix(".safetensors")
    save_file(arrays, given)
    _run_python("save_features.py", project, given, out, *options)


def save_torch(tensors: Path, out: Path) -> None:
    """The tensors of a safetensors file as torch saves them."""
    _run_python("save_torch.py", tensors, out)


def _write_tokens(out: Path, sequences: list[list[int]]) -> Path:
    listed = out.with_suffix(".json")
    listed.write_text(json.dumps(sequences))
    return listed


def _run(program: str, directory: Path, *args: object) -> None:
    _run_python(program, directory, "--model", identity(directory), *args)


def _run_python(program: str, *args: object) -> None:
    python = os.environ.get("JAXSPEC_REFERENCE_PYTHON")
    if not python:
        raise RuntimeError(
            "JAXSPEC_REFERENCE_PYTHON names no Python: it has to be that of the reference "
            "environment, made as CONTRIBUTING.md says"
        )
    command = [python, PROGRAMS / program, *args]
    # torch's threads wait for each other in busy loops: on a machine with other work, for minutes.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{program} exited with {done.returncode}:\n{done.stderr}")


def row_error(ours: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """|ours - reference| / |reference| of every row, by the norms over the last axis."""
    ours, reference = ours.astype(np.float64), reference.astype(np.float64)
    return np.linalg.norm(ours - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
