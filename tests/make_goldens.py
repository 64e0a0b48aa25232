"""Makes the files in `tests/golden/` again, from the tiny checkpoints and the shipped ones:

    JAXSPEC_REFERENCE_PYTHON=.../bin/python .venv/bin/python -m tests.make_goldens [NAME ...]

Needed after the shipped checkpoint, a tiny one (`tests/tiny.py`) or a program of
`benchmarks/reference_env/` has changed. Without names all of them, in about three minutes.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import save_file

from tests import torch_reference as reference


def target(name: str, *options: str) -> Callable[[Path, Path], object]:
    """How the record of a target is made, in a folder, into a file."""
    return lambda folder, out: reference.make_target_record(
        reference.target_directory(name, folder), out, "golden", *options
    )


def draft(name: str, of_target: str) -> Callable[[Path, Path], object]:
    """How the record of a draft is made."""
    return lambda folder, out: reference.make_draft_record(
        reference.draft_directory(name, folder),
        reference.target_directory(of_target, folder),
        out,
        "golden",
    )


def greedy(folder: Path, out: Path) -> object:
    """How the greedy continuations of the held-out prompts are made."""
    return reference.make_greedy_record(reference.MINI_TARGET, reference.prompt_ids(), out)


def torch_file(folder: Path, out: Path) -> object:
    """How the file that torch saved is made."""
    from tests.test_torch_file import ARRAYS

    save_file(ARRAYS, folder / "arrays.safetensors")
    return reference.save_torch(folder / "arrays.safetensors", out)


def features(project: str, index: int) -> Callable[[Path, Path], object]:
    """How a sample of features is made, as that project saves it."""
    from tests import feature_samples

    return lambda folder, out: feature_samples.save(project, index, out)


GOLDENS: dict[str, Callable[[Path, Path], object]] = {
    "tiny-kimi": target("tiny-kimi"),
    "tiny-kimi-bfloat16": target("tiny-kimi", "--expert-product", "bfloat16"),
    "tiny-deepseek": target("tiny-deepseek"),
    "tiny-k2": target("tiny-k2"),
    "tiny-draft": draft("tiny-draft", "tiny-kimi"),
    "tiny-draft-normed": draft("tiny-draft-normed", "tiny-kimi"),
    "tiny-specforge": draft("tiny-specforge", "tiny-kimi"),
    "tiny-speculators": draft("tiny-speculators", "tiny-kimi"),
    "mini-target": target("mini-target"),
    "mini-draft": draft("mini-draft", "mini-target"),
    "mini-greedy": greedy,
    "torch-file.bin": torch_file,
    "specforge-0.ckpt": features("specforge", 0),
    "specforge-1.ckpt": features("specforge", 1),
    "speculators-0.pt": features("speculators", 0),
    "speculators-1.pt": features("speculators", 1),
}
"""By name; the files are safetensors where the name has no ending."""


def main(names: list[str]) -> None:
    if unknown := set(names) - GOLDENS.keys():
        raise SystemExit(f"no golden file is named {sorted(unknown)}; known: {', '.join(GOLDENS)}")
    for name in names or GOLDENS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / (name if "." in name else f"{name}.safetensors")
            GOLDENS[name](Path(folder), out)
            kept = reference.GOLDEN / out.name
            kept.write_bytes(out.read_bytes())
            print(f"{kept.name}: {kept.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
