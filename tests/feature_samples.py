"""Two samples of features of the tiny target, as SpecForge, speculators and vLLM have them."""

import functools
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests import tiny, torch_reference
from tests.reference import formulas
from tests.reference.target import ReferenceTarget

TOKENS = ([5, 9, 2, 2, 17, 3, 11, 20, 6], [1, 20, 8, 8, 13, 4])
MASKS = ([0, 0, 0, 1, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1])
BOUNDARIES = tiny.BOUNDARIES
PADDING = (0, 2)
"""Of the ids, as SpecForge's HF variant leaves them in a batch."""


@functools.cache
def states(index: int) -> tuple[np.ndarray, np.ndarray]:
    """All boundaries [L+1,T,D] of a sample, and its last state after the final norm [T,D], f32."""
    target = ReferenceTarget(tiny.target_tensors(tiny.TARGET_CONFIG), tiny.TARGET_CONFIG)
    boundaries = target.run(TOKENS[index]).boundaries
    normed = formulas.rms_norm(boundaries[-1], target.norm, tiny.TARGET_CONFIG["rms_norm_eps"])
    return boundaries, normed


def save(project: str, index: int, out: Path) -> None:
    """Writes a sample as SpecForge does, or speculators before 0.5, in the torch environment."""
    every, normed = states(index)
    kept = [every[b] for b in BOUNDARIES] + [normed]
    arrays = {
        "tokens": np.array(TOKENS[index]),
        "loss_mask": np.array(MASKS[index]),
        "states": np.stack(kept).astype(np.float32),
    }
    options = ("--padding", PADDING[index]) if project == "specforge" else ()
    torch_reference.save_features(project, out, arrays, *options)


def save_vllm(index: int, out: Path, boundaries: tuple[int, ...] = BOUNDARIES) -> Path:
    """Writes a sample as vLLM's connector does: the last state before the final norm."""
    every, _ = states(index)
    kept = np.stack([every[b] for b in (*boundaries, len(every) - 1)], axis=1)
    out.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.array(TOKENS[index])
    save_file({"hidden_states": kept.astype(ml_dtypes.bfloat16), "token_ids": tokens}, out)
    return out
