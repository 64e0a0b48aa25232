"""The commands that serve a pair elsewhere, with the same tree, and why there is none."""

import dataclasses
import json
import shlex
from collections.abc import Callable
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
      layout: of the draft.
      config: of the draft, if that is here.
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
        if sglang is not None and (why := _misread("SGLang", _as_sglang_reads, ids, wanted)):
            sglang = None
            notes.append(why)
        if vllm is not None and (why := _misread("vLLM", list, ids, wanted)):
            vllm = None
            notes.append(why)
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


def _as_sglang_reads(ids: list[int]) -> list[int]:
    """Boundaries, since its PR 25454; before that every id was taken for the layer's output."""
    return [one + 1 for one in ids] if ids[0] == 1 else list(ids)


def _misread(
    engine: str, read: Callable[[list[int]], list[int]], ids: list[int], wanted: list[int]
) -> str | None:
    """Why an engine would capture others than the boundaries wanted; None if it would not."""
    if read(ids) == wanted:
        return None
    other = [one - 1 for one in wanted] if ids == wanted else wanted
    can_be_said = read(other) == wanted
    return (
        f"{engine} reads ids {ids} as boundaries {read(ids)}, and this draft was trained on "
        f"{wanted}; "
        + ("export with the other --capture-convention" if can_be_said else "no ids say them to it")
    )
