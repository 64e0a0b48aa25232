"""The commands that serve a pair elsewhere, with the same tree, and why there is none."""

import dataclasses
import json
import shlex
from pathlib import Path

from jaxspec.config import DraftConfig, TreeConfig

__all__ = ["Served", "launch_lines"]


@dataclasses.dataclass(frozen=True)
class Served:
    """How engines serve a pair.

    Attributes:
      sglang, vllm: the command; None where that engine would do something else.
      notes: why there is none, and what to do.
    """

    sglang: str | None
    vllm: str | None
    notes: tuple[str, ...]


def launch_lines(
    target: str | Path,
    draft: str | Path,
    tree: TreeConfig,
    layout: str,
    config: DraftConfig | None = None,
    ids: list[int] | None = None,
) -> Served:
    """The commands for a target and a draft.

    Args:
      layout: of the draft; "hf" where the target was exported, and the draft is somebody else's.
      config: of the draft, if it was exported.
      ids: as they are written in its config; None or [] are the defaults, which all agree on.
    """
    notes: list[str] = []
    sglang: list[str] | None = [
        *("python3", "-m", "sglang.launch_server", "--model-path", str(target)),
        *("--trust-remote-code", "--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(tree.levels)),
        *("--speculative-eagle-topk", str(tree.branches)),
        *("--speculative-num-draft-tokens", str(tree.nodes)),
    ]
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": tree.levels}
    vllm: list[str] | None = [
        *("vllm", "serve", str(target), "--trust-remote-code"),
        *("--speculative-config", json.dumps(speculative)),
    ]
    if layout == "speculators":
        sglang = None
        notes.append("SGLang does not read speculators' configs: export with --layout specforge")
    if tree.branches > 1:
        vllm = None
        notes.append(f"vLLM drafts chains; tree {tree} has {tree.branches} branches")
    elif tree.nodes != tree.levels + 1:
        vllm = None
        notes.append(
            f"vLLM verifies all it drafts; tree {tree} keeps {tree.nodes - 1} of {tree.levels}"
        )
    if config is not None and ids:
        wanted = list(config.boundaries.ids)
        # SGLang since its PR 25454; before that every id was taken for the layer's output.
        by_sglang = [one + 1 for one in ids] if ids[0] == 1 else ids
        if sglang is not None and by_sglang != wanted:
            sglang = None
            notes.append(_misread("SGLang", ids, by_sglang, wanted))
        if vllm is not None and ids != wanted:
            vllm = None
            notes.append(_misread("vLLM", ids, ids, wanted))
    if config is not None and sglang is not None:
        missing = [
            what
            for what, is_there in (
                ("norm_before_residual", config.norm_before_residual),
                ("drafts of several layers", config.num_hidden_layers > 1),
            )
            if is_there
        ]
        if missing:
            sglang = None
            notes.append(f"SGLang has no {' and no '.join(missing)}")
    return Served(
        None if sglang is None else shlex.join(sglang),
        None if vllm is None else shlex.join(vllm),
        tuple(notes),
    )


def _misread(engine: str, ids: list[int], read: list[int], wanted: list[int]) -> str:
    return (
        f"{engine} reads ids {ids} as boundaries {read}, and this draft was trained on {wanted}; "
        "export with the other --capture-convention"
    )
