"""A draft in memory as a directory in SpecForge's layout: what training leaves."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxspec.config import DraftConfig
from jaxspec.convert.drafts import DraftNames, draft_rules
from jaxspec.convert.export_configs import draft_json
from jaxspec.convert.problems import CheckpointError, Problems
from jaxspec.convert.shards import write_tensors

__all__ = ["tensors_of_draft", "write_draft"]


def tensors_of_draft(
    values: Mapping[str, np.ndarray], config: DraftConfig, problems: Problems
) -> dict[str, np.ndarray]:
    """A draft's parameters, by path, as SpecForge's tensors, by name."""
    tensors: dict[str, list[np.ndarray]] = {}
    for rule in draft_rules(DraftNames("midlayer."), config, problems):
        leaves = [
            values[leaf] if rule.layer is None else values[leaf][rule.layer] for leaf in rule.leaves
        ]
        if rule.part is not None:
            leaves = [leaf.take(rule.part.rows, axis=rule.part.axis) for leaf in leaves]
        for name, rows in rule.restore(*leaves).items():
            tensors.setdefault(name, []).append(rows)
    return {
        name: np.concatenate(parts) if len(parts) > 1 else parts[0]
        for name, parts in tensors.items()
    }


def write_draft(values: Mapping[str, np.ndarray], config: DraftConfig, destination: Path) -> None:
    """Writes a draft in SpecForge's layout, its ids as SGLang and vLLM read them, in bf16.

    An earlier one of that name is replaced, when the new one is complete.

    Raises:
      CheckpointError: it cannot be written, or the layout has no word for it.
    """
    problems = Problems(str(destination))
    tensors = tensors_of_draft(values, config, problems)
    content = draft_json(config, "before", "bfloat16", problems)
    problems.raise_any()
    partial, old = (destination.with_name(destination.name + end) for end in (".partial", ".old"))
    try:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        halves = {
            name: tensor.astype(ml_dtypes.bfloat16) if tensor.dtype == np.float32 else tensor
            for name, tensor in tensors.items()
        }
        write_tensors(partial / "model.safetensors", halves)
        text = json.dumps(content, indent=2)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        if destination.exists():
            destination.rename(old)
        partial.rename(destination)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            str(destination), [f"cannot be written ({error.strerror or error})"]
        ) from error
