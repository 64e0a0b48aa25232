"""Which tree is fastest here: acceptance of a whole grid from one pass, step times of some of it.

    texts    the target writes on, by plain decoding: with any tree the tokens are these
    walk     what every tree of the grid accepts along them (walk.py)
    trees    a few corners of the grid are timed, and the times of all others guessed from those;
             what promises most is timed in earnest
    rounds   in each, every tree and plain decoding once, on the same texts, with all places running
    whole    the fastest against plain decoding, over whole texts, with fresh times

What is compared was timed in the same round: what else the machine does then falls on all.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxspec.aliases import Progress
from jaxspec.config import TreeConfig
from jaxspec.doctor_texts import Text, loop_start, write_on
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.prompts import EncodedPrompt
from jaxspec.report import command, machine
from jaxspec.sweep_config import SweepConfig
from jaxspec.sweep_log import SweepLog
from jaxspec.sweep_report import SweepReport, report_of
from jaxspec.sweep_timing import Timer
from jaxspec.target import Target
from jaxspec.text import SamplingConfig
from jaxspec.version import version
from jaxspec.walk import Walker, steps_along

__all__ = ["NO_ENV", "measure", "sweep"]

NO_ENV: Mapping[str, str] = MappingProxyType({})
FEWEST_JUDGED = 8
"""Tokens of a prompt below which it cannot be told from random ones by itself."""
MOST_NAMED = 16
"""Trees whose names all stand in a log's first line."""
WALK_BATCH = 32
"""Texts at a time."""
DEFAULT_CONFIG = SweepConfig()


def sweep(
    target: Target,
    draft: Draft,
    prompts: Sequence[Text],
    config: SweepConfig = DEFAULT_CONFIG,
    *,
    out: Path | None = None,
    progress: Progress | None = None,
) -> SweepReport:
    """The fastest tree of each batch size, and the acceptance of all of them.

    Args:
      out: a file of JSON lines; the same sweep, interrupted, goes on with it.
      progress: called with what is done, and how much of how much.

    Raises:
      ContractError: draft and target do not belong together.
      InputError: a config that cannot run, prompts that are no text to this target, too few texts
        that do not loop, or `out` is of another sweep.
    """
    log = measure(target, draft, prompts, config, out=out, progress=progress)
    return report_of(log.header, log.entries, command())


def measure(
    target: Target,
    draft: Draft,
    prompts: Sequence[Text],
    config: SweepConfig,
    *,
    out: Path | None = None,
    env: Mapping[str, str] = NO_ENV,
    num_rounds: int | None = None,
    progress: Progress | None = None,
) -> SweepLog:
    """The log of a sweep; see `sweep`, which reports on it.

    Args:
      env: environment variables that this process was started with, under which it is filed.
      num_rounds: stop after so many; None is all of them.
    """
    config.check()
    target.asked_for(draft.config.boundaries).require(draft.config.boundaries, "sweep")
    log = SweepLog(_header(target, draft, prompts, config), out)
    show = progress or (lambda *_: None)
    texts = _texts(log, target, draft, prompts, config, show)
    num_rounds = config.rounds if num_rounds is None else min(num_rounds, config.rounds)
    for batch_size in config.batch_sizes:
        timer = Timer(target, draft, config, texts, batch_size, log, dict(env), show)
        timer.run(num_rounds)
    return log


def _header(
    target: Target, draft: Draft, prompts: Sequence[Text], config: SweepConfig
) -> dict[str, Any]:
    asked = json.dumps([[prompt.id, prompt.ids] for prompt in prompts])
    mesh = target.numerics.mesh
    flags = {
        **dataclasses.asdict(config),
        "trees": _named(config.trees),
        "batch_sizes": list(config.batch_sizes),
        "dtype": target.numerics.dtype,
        "mesh": None if mesh is None else f"{mesh} {mesh.cache}",
        "prompts": hashlib.sha256(asked.encode()).hexdigest()[:12],
    }
    return {
        "version": version(),
        "target_hash": target.identity,
        "draft_hash": draft.identity,
        "machine": machine(),
        "flags": flags,
    }


def _named(trees: Sequence[TreeConfig]) -> str:
    """All of them, or of many how many and which."""
    names = " ".join(map(str, trees))
    if len(trees) <= MOST_NAMED:
        return names
    return f"{len(trees)} ({hashlib.sha256(names.encode()).hexdigest()[:12]})"


def _texts(
    log: SweepLog,
    target: Target,
    draft: Draft,
    prompts: Sequence[Text],
    config: SweepConfig,
    show: Progress,
) -> list[dict[str, Any]]:
    """The texts that do not loop, written and walked along, unless the log has them.

    Raises:
      InputError: the prompts are no text, or too little that is written does not loop.
    """
    if (most := max(config.batch_sizes)) > len(prompts):
        raise InputError(
            f"batch size {most} (--batch-size) and {len(prompts)} prompts: each place takes a text "
            "of its own, since equal ones share their experts"
        )
    batch = min(len(prompts), WALK_BATCH)
    slots = max((len(prompt.ids) for prompt in prompts), default=0) + config.max_new_tokens
    walker = Walker(target, draft, slots, config.max_new_tokens - 1, batch)
    entry = log.find("texts")
    if entry is None:
        surprise, uniform = _surprise(walker, prompts, target.config.vocab_size)
        show("the target writes", 0, 1)
        asked = [EncodedPrompt(prompt.id, prompt.ids) for prompt in prompts]
        sampling = SamplingConfig(config.temperature)
        written = write_on(target, asked, None, sampling, config.max_new_tokens, batch)
        show("the target writes", 1, 1)
        texts = [
            {
                "id": text.id,
                "seed": seed,
                "prompt_ids": list(text.ids[: text.prompt_len]),
                "output_ids": list(text.ids[text.prompt_len :]),
                # A text of one token has no step.
                "loops": loop_start(text.ids) is not None or len(text.ids) < text.prompt_len + 2,
            }
            for seed, text in enumerate(written)
        ]
        entry = log.append("texts", texts=texts, surprise=surprise, uniform=uniform)
    kept = [text for text in entry["texts"] if not text["loops"]]
    if not kept:
        raise InputError(
            f"all of {len(entry['texts'])} texts repeat themselves, which any draft foresees: give "
            "other prompts, or a temperature"
        )
    if most > len(kept):
        raise InputError(
            f"batch size {most} (--batch-size): only {len(kept)} of {len(prompts)} texts do not "
            "loop, and each place takes one of its own: give more prompts, or a temperature"
        )
    if log.find("walk") is None:
        pairs = [(text["prompt_ids"], text["output_ids"]) for text in kept]
        accepted = walker.accepted(pairs, config.trees, show)
        steps = {
            str(tree): [steps_along(of_text) for of_text in some] for tree, some in accepted.items()
        }
        log.append("walk", steps=steps)
    return kept


def _surprise(walker: Walker, prompts: Sequence[Text], vocab_size: int) -> tuple[float, float]:
    """Nats a token that the target finds in the prompts, and that uniform guessing would.

    Raises:
      InputError: no prompt, or some that are to the target what random tokens are.
    """
    if not prompts:
        raise InputError("there is no prompt")
    uniform = math.log(vocab_size)
    lengths = np.array([len(prompt.ids) - 1 for prompt in prompts])
    found = np.nan_to_num(walker.surprise([prompt.ids for prompt in prompts]))
    mean = float((found * lengths).sum() / max(lengths.sum(), 1))
    random = [
        f"{prompt.id!r} {nats:.2f}"
        for prompt, nats, length in zip(prompts, found, lengths, strict=True)
        if nats >= uniform and length >= FEWEST_JUDGED
    ]
    if random or mean >= uniform:
        named = f": {', '.join(random[:5])}" if random else ""
        raise InputError(
            f"{len(random) or len(prompts)} of {len(prompts)} prompts are random tokens to this "
            f"target, {mean:.2f} nats a token on the whole where guessing among {vocab_size} has "
            f"{uniform:.2f}{named}; acceptance on them says nothing: give text of the kind that "
            "will be served"
        )
    return mean, uniform
