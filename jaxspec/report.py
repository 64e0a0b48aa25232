"""What a run of `generate` reports: the figures, their formulas, and the `--json` object."""

import dataclasses
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jaxspec.config import MeshConfig, RotaryConfig, TreeConfig
from jaxspec.draft import Draft
from jaxspec.figures import accept_per_depth, ratio
from jaxspec.generator import Generator, implementations
from jaxspec.requests import Completion, Run
from jaxspec.target import Target

__all__ = [
    "GenerateReport",
    "PromptReport",
    "acceptance",
    "command",
    "machine",
    "report_of",
]


@dataclasses.dataclass(frozen=True)
class PromptReport:
    """One prompt's continuation.

    Attributes:
      id, category: the prompt's own.
      prompt_ids: what was continued.
      completion: the tokens emitted, the steps they took, and why they ended.
      text: of the tokens, cut before a stop string; None where there is no tokenizer.
      levels: of the tree; 0 without a draft.
      settings: how its tokens were chosen, where the prompt itself said so.
    """

    id: str
    category: str | None
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str | None
    levels: int
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def error(self) -> str | None:
        """Why the prompt could not be served; None where it was."""
        return self.completion.error

    def to_dict(self) -> dict[str, Any]:
        """This prompt's entry of the `--json` object; a figure of no steps is None."""
        completion = self.completion
        return {
            "id": self.id,
            "category": self.category,
            "prompt_len": len(self.prompt_ids),
            "tokens": list(completion.tokens),
            "text": self.text,
            "finish": completion.finish,
            "error": self.error,
            "sampling": dict(self.settings),
            "num_steps": len(completion.accepted),
            **acceptance([self]),
            "prefill_ms": completion.prefill_ms,
            "decode_ms": completion.decode_ms,
        }


@dataclasses.dataclass(frozen=True)
class GenerateReport:
    """All prompts of a run, and what they ran on.

    Attributes:
      tree: its shape; None without a draft.
      target, draft: identity of the weights, `name@fingerprint`; None without a draft.
      capture: the boundaries that the target captured, and who asked for them; `draft_claim`,
        what the draft states that it was trained on, and where that was read; `draft_rotary`, the
        rotary embedding it ran with, its config's or the one asked for. None without a draft.
      device, dtype: what ran it, and in what.
      mesh: the devices that shared it, and how the target's cache lay on them; None for one.
      implementations: of the kernels that have several, by the kernel's name.
      prefill_ms, decode_ms: wall time of the run's two phases, all prompts together, compilation
        not included.
      compile_s: tracing and compiling, or fetching what was compiled before.
      accept_ceiling: the accept_length of a draft that knew the target's own probabilities, with
        this tree on this text; None where it was not asked for.
      num_decoded: tokens that `decode_ms` bought: those from steps, of the prompts run now. What
        was taken over from an earlier run's file is in the prompts and in no time.
      machine, command: where and how this was measured.
    """

    prompts: tuple[PromptReport, ...]
    tree: TreeConfig | None
    target: str
    draft: str | None
    capture: str | None
    draft_claim: str | None
    draft_rotary: RotaryConfig | None
    device: str
    dtype: str
    mesh: MeshConfig | None
    implementations: dict[str, str]
    jax_version: str
    prefill_ms: float
    decode_ms: float
    compile_s: float
    accept_ceiling: float | None
    num_decoded: int
    machine: str
    command: str

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted by verify steps per verify step, bonus included; see `acceptance`."""
        return acceptance(self.prompts)["accept_length"]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of decoding, after compilation, all prompts together."""
        return ratio(self.num_decoded, self.decode_ms / 1e3)

    @property
    def num_failed(self) -> int:
        """Prompts that could not be served."""
        return sum(prompt.error is not None for prompt in self.prompts)

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return {
            "prompts": [prompt.to_dict() for prompt in self.prompts],
            **acceptance(self.prompts),
            **self._as_sglang_counts(),
            "accept_ceiling": self.accept_ceiling,
            "tokens_per_s": self.tokens_per_s,
            "prefill_ms": self.prefill_ms,
            "decode_ms": self.decode_ms,
            "compile_s": self.compile_s,
            "tree": None if self.tree is None else str(self.tree),
            "target": self.target,
            "draft": self.draft,
            "capture": self.capture,
            "draft_claim": self.draft_claim,
            "draft_rotary": self.draft_rotary and dataclasses.asdict(self.draft_rotary),
            "device": self.device,
            "dtype": self.dtype,
            "implementation": "+".join(sorted(set(self.implementations.values()))),
            "implementations": self.implementations,
            "mesh": None if self.mesh is None else str(self.mesh),
            "cache": None if self.mesh is None else self.mesh.cache,
            "jax_version": self.jax_version,
            "kind": "measured",
            "machine": self.machine,
            "command": self.command,
        }

    def summary(self) -> str:
        """Two lines for a reader: how much was accepted and how fast, and of what features."""
        speed = f"{self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else "nothing decoded"
        device = self.device if self.mesh is None else f"mesh {self.mesh} of {self.device}"
        ran = f"{speed} on {device} in {self.dtype}; compiled in {self.compile_s:.1f} s"
        if self.tree is None:
            return f"no draft, {ran}"
        if self.accept_length is None:
            return f"no verify step, tree {self.tree}, {ran}"
        most = self.tree.levels + 1
        accepted = f"accept_length {self.accept_length:.2f} of {most} (bonus included)"
        if self.accept_ceiling is not None:
            accepted += f"; a draft that knew the target: {self.accept_ceiling:.2f} expected"
        return f"{accepted}, tree {self.tree}, {ran}\nfeatures: {self.draft_claim}"

    def _as_sglang_counts(self) -> dict[str, float | None]:
        """SGLang's two figures.

        `accept_length_sglang`: completion tokens per verify step, the prefill's included.
        `accept_rate_sglang_legacy`: what its older releases logged, (accepted + 1) / (drafted + 1)
        per step, where drafted + 1 is `speculative-num-draft-tokens`: the tree's nodes. None
        without a draft.
        """
        steps = sum(len(prompt.completion.accepted) for prompt in self.prompts)
        tokens = sum(len(prompt.completion.tokens) for prompt in self.prompts)
        nodes = 0 if self.tree is None else self.tree.nodes
        return {
            "accept_length_sglang": ratio(tokens, steps),
            "accept_rate_sglang_legacy": ratio(_all_from_steps(self.prompts), nodes * steps),
        }


def report_of(
    generator: Generator,
    target: Target,
    draft: Draft | None,
    prompts: Sequence[PromptReport],
    run: Run,
    accept_ceiling: float | None = None,
) -> GenerateReport:
    """The report of prompts, and of the run whose time is told: here and now."""
    return GenerateReport(
        prompts=tuple(prompts),
        tree=generator.config.tree,
        target=target.identity,
        draft=None if draft is None else draft.identity,
        capture=None if generator.capture is None else str(generator.capture),
        draft_claim=None if draft is None else str(draft.config.boundaries),
        draft_rotary=None if draft is None else draft.config.rotary,
        device=jax.devices()[0].device_kind,
        dtype=target.numerics.dtype,
        mesh=target.numerics.mesh,
        implementations=implementations(target, generator.config),
        jax_version=jax.__version__,
        prefill_ms=run.prefill_ms,
        decode_ms=run.decode_ms,
        compile_s=generator.compile_s,
        accept_ceiling=accept_ceiling,
        num_decoded=sum(map(_from_steps, run.completions)),
        machine=machine(),
        command=command(),
    )


def machine() -> str:
    """What a figure was measured on, in words."""
    devices = jax.devices()
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, "
        f"{len(devices)} x {devices[0].device_kind}"
    )


def command() -> str:
    """The command line of this process, without the place of its program."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "jaxspec"] if name == "__main__.py" else [name]
    return shlex.join([*program, *sys.argv[1:]])


def acceptance(prompts: Sequence[PromptReport]) -> dict[str, Any]:
    """The figures of prompts that share a tree, over all their steps together.

    `accept_length`: tokens emitted by verify steps / verify steps, bonus included; EAGLE's tau, at
    most LEVELS + 1. The token from prefill is not counted, nor any after the end.
    `accept_rate`: accepted drafted tokens / (LEVELS x steps).
    `accept_per_depth[d]`: share of all steps in which the token at depth d + 1 was accepted.
    None where there were no steps, or no draft.
    """
    levels = prompts[0].levels if prompts else 0
    accepted = [count for prompt in prompts for count in prompt.completion.accepted]
    steps = len(accepted)
    return {
        "accept_length": ratio(_all_from_steps(prompts), steps),
        "accept_rate": ratio(sum(accepted), levels * steps),
        "accept_per_depth": list(accept_per_depth(accepted, levels)),
    }


def _all_from_steps(prompts: Sequence[PromptReport]) -> int:
    return sum(_from_steps(prompt.completion) for prompt in prompts)


def _from_steps(completion: Completion) -> int:
    """Tokens emitted by steps: all but the first, which comes from prefill."""
    return max(len(completion.tokens) - 1, 0)
