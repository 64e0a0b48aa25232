"""The texts that the doctor reads: prompts with what the target, or another engine, wrote."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import TreeConfig
from jaxspec.doctor_report import Observed
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.prompts import EncodedPrompt
from jaxspec.run_comparison import difference_interval, read_run
from jaxspec.target import Target
from jaxspec.text import SamplingConfig, TextRun
from jaxspec.tokenizer import Tokenizer

__all__ = [
    "ObservedRun",
    "Text",
    "loop_start",
    "num_steps",
    "read_observed",
    "replay",
    "write_on",
]

MAX_PERIOD, MIN_REPEATS, MIN_LOOP = 16, 4, 24
"""A loop repeats a period so many times, for so many tokens, at least."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt and what was written after it.

    Attributes:
      prompt_len: tokens of the prompt; all of them where nothing was written.
      accepted: drafted tokens accepted in each verify step of the engine that wrote it, a chain's;
        None where nobody counted them.
    """

    id: str
    ids: tuple[int, ...]
    prompt_len: int
    accepted: tuple[int, ...] | None = None

    @classmethod
    def of(cls, prompt: EncodedPrompt) -> "Text":
        """A prompt alone."""
        return cls(prompt.id, prompt.ids, len(prompt.ids))

    @property
    def first_root(self) -> int:
        """The position of the token that the first step starts from: what prefill gave, if steps
        wrote more; else the second token, as if the target had written the prompt."""
        return self.prompt_len if self.prompt_len < len(self.ids) - 1 else 1

    @property
    def num_from_steps(self) -> int:
        """Tokens that steps have to give."""
        return len(self.ids) - 1 - self.first_root


def loop_start(ids: Sequence[int], min_loop: int = MIN_LOOP) -> int | None:
    """Where the first stretch begins that repeats itself; None where there is none.

    Args:
      min_loop: tokens that it has at least, besides `MIN_REPEATS` periods.
    """
    tokens, starts = np.asarray(ids), []
    for period in range(1, min(MAX_PERIOD, len(tokens) - 1) + 1):
        wanted = max(period * MIN_REPEATS, min_loop) - period
        run = 0
        for index, is_same in enumerate(tokens[period:] == tokens[:-period]):
            run = run + 1 if is_same else 0
            if run == wanted:
                starts.append(index + 1 - wanted)
                break
    return min(starts, default=None)


def write_on(
    target: Target,
    prompts: Sequence[EncodedPrompt],
    tokenizer: Tokenizer | None,
    sampling: SamplingConfig,
    num_tokens: int,
    batch_size: int,
) -> list[Text]:
    """The prompts with the target's own continuations, by plain decoding.

    A prompt's own settings come before `sampling`, as when text is generated.

    Args:
      num_tokens: of a prompt that does not say; and all have room for so many, and no more.

    Raises:
      InputError: a prompt or a setting that cannot be used.
    """
    slots = max(len(prompt.ids) for prompt in prompts) + num_tokens
    config = GenerateConfig(None, num_tokens, slots, batch_size)
    reports = TextRun(Generator(target, None, config), prompts, tokenizer, sampling).finish()
    return [
        Text(prompt.id, prompt.ids + report.completion.tokens, len(prompt.ids))
        for prompt, report in zip(prompts, reports, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class ObservedRun:
    """A run of a chain.

    Attributes:
      engine: its name.
      target_hash: the identity of what it served; None where it does not say.
      levels: drafted tokens of a step.
    """

    engine: str
    target_hash: str | None
    levels: int
    texts: list[Text]


def read_observed(path: Path) -> ObservedRun:
    """The requests of a run file that had verify steps.

    Raises:
      InputError: it is no run file, or not one of a chain of drafted tokens.
    """
    header, entries = read_run(path)
    flags = header.get("flags") or {}
    levels = _levels(path, flags)
    texts = [
        Text(entry.id, entry.prompt_ids + entry.output_ids, len(entry.prompt_ids), entry.accepted)
        for entry in entries.values()
        if entry.accepted
    ]
    if not texts:
        raise InputError(f"{path}: no request has verify steps: nothing was drafted")
    deepest = max(max(text.accepted or ()) for text in texts)
    if deepest > levels:
        raise InputError(
            f"{path}: a step accepted {deepest} drafted tokens, of a chain of {levels} by its flags"
        )
    target = header.get("target_hash")
    engine = str(header.get("engine", "the engine"))
    return ObservedRun(engine, None if target is None else str(target), levels, texts)


def _levels(path: Path, flags: dict[str, Any]) -> int:
    """Drafted tokens of a step, by the flags of jaxspec, or by SGLang's."""
    if flags.get("tree"):
        tree = TreeConfig.parse(str(flags["tree"]))
    else:
        names = ("num_steps", "eagle_topk", "num_draft_tokens")
        found = [flags.get(f"speculative_{name}") for name in names]
        numbers = [value for value in found if type(value) is int]
        if len(numbers) < len(names):
            raise InputError(
                f'{path}: its flags name no tree, as in {{"tree": "3x1x4"}}, and no '
                "speculative_num_steps, speculative_eagle_topk and speculative_num_draft_tokens"
            )
        tree = TreeConfig(*numbers)
        tree.check()
    if tree.branches > 1:
        raise InputError(
            f"{path}: a run with the tree {tree}; what a step accepts can be replayed of a chain "
            "alone: run the engine again with one branch (--speculative-eagle-topk 1)"
        )
    return min(tree.levels, tree.nodes - 1)


def replay(
    engine: str, texts: Sequence[Text], drafted: np.ndarray, perfect: np.ndarray
) -> Observed:
    """What the engine's steps gave, against a walk along the same tokens.

    Args:
      drafted: [B,T,P] whether the draft's guess at each row and depth is the text's next token;
        `perfect`, likewise, of a draft that knew the target.
    """
    emitted = np.array([text.num_from_steps for text in texts], float)
    steps = {
        "engine": np.array([len(text.accepted or ()) for text in texts], float),
        "drafted": np.array([num_steps(*pair) for pair in zip(texts, drafted, strict=True)]),
        "perfect": np.array([num_steps(*pair) for pair in zip(texts, perfect, strict=True)]),
    }
    length = {name: float(emitted.sum() / counts.sum()) for name, counts in steps.items()}
    interval = difference_interval((emitted, steps["drafted"]), (emitted, steps["engine"]))
    return Observed(
        engine, len(texts), length["engine"], length["drafted"], length["perfect"], interval
    )


def num_steps(text: Text, is_next_TP: np.ndarray) -> int:
    """Steps that a chain takes along the text.

    Args:
      is_next_TP: whether the guess of each row and depth is the text's token; row t follows its
        token t + 1.
    """
    right = np.cumprod(is_next_TP, axis=-1).sum(axis=-1)
    root, last, steps = text.first_root, len(text.ids) - 1, 0
    while root < last:
        root += 1 + int(right[root - 1])
        steps += 1
    return steps
