"""What the commands do once their flags are read; `cli.py` reads the flags.

Whatever can be wrong with the flags and the prompts is found before any weights are loaded.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.aliases import Convention
from jaxspec.ceiling import accept_ceiling
from jaxspec.checkpoint import load_draft, load_target, locate
from jaxspec.config import Numerics
from jaxspec.console import Display
from jaxspec.contracts import Boundaries
from jaxspec.convert.draft_configs import AS_STATED
from jaxspec.convert.manifest import is_converted
from jaxspec.convert.rotary import RotaryChoice
from jaxspec.convert.source import Source
from jaxspec.draft import Draft
from jaxspec.environment import SHIPPED_DRAFT, SHIPPED_PROMPTS, SHIPPED_TARGET
from jaxspec.errors import InputError
from jaxspec.features import FeaturesDirectory, estimated_bytes, record_features
from jaxspec.generator import GenerateConfig, Generator, implementations
from jaxspec.identify import FeaturesReport, identify
from jaxspec.outputs import check_file
from jaxspec.processes import all_or_none, check_agreement, is_first, told_by_first
from jaxspec.prompts import (
    EncodedPrompt,
    Prompt,
    check_prompts,
    encode_prompts,
    read_prompts,
    read_tokens,
)
from jaxspec.recording import Record, RecordConfig, record
from jaxspec.report import GenerateReport, PromptReport, machine, report_of
from jaxspec.requests import Completion
from jaxspec.runfile import RunFile, entry_of
from jaxspec.target import Target
from jaxspec.text import SamplingConfig, TextRun, check_requests, requests_of
from jaxspec.tokenizer import Tokenizer, load_tokenizer
from jaxspec.training_data import Windows, read_samples
from jaxspec.version import version

__all__ = [
    "GenerateFlags",
    "ModelFlags",
    "PromptFlags",
    "TokenizeReport",
    "load",
    "run_generate",
    "run_identify",
    "run_record",
    "run_record_features",
    "run_tokenize",
    "tokenizer_of",
    "unread_settings",
]


CEILING_BATCH = 8
"""Texts at a time when the ceiling is measured: it is one pass over each, and its tree's steps."""


@dataclasses.dataclass(frozen=True)
class ModelFlags:
    """Which target and draft, and how they are computed.

    Attributes:
      target: a directory or a repository's id; None is the shipped one.
      draft: likewise, or "none"; None is the shipped one, for the shipped target only.
      capture: boundaries that the target captures; a draft that states others refuses them. None
        takes those that the draft states.
      draft_rotary: the draft's rotary embedding, in place of what its config says.
    """

    target: str | None = None
    draft: str | None = None
    capture: tuple[int, ...] | None = None
    capture_convention: Convention | None = None
    draft_rotary: RotaryChoice = AS_STATED
    numerics: Numerics = dataclasses.field(default_factory=Numerics)

    def claim(self, target: Target) -> Boundaries | None:
        """What the target captures, where --capture says it."""
        if self.capture is None:
            return None
        return target.boundaries(self.capture, "target capture, set by --capture")

    @property
    def target_directory(self) -> Path:
        return locate(self.target or SHIPPED_TARGET)

    @property
    def draft_directory(self) -> Path | None:
        """None for no draft.

        Raises:
          InputError: it was left open which draft belongs to a given target.
        """
        if self.draft == "none":
            return None
        if self.draft is None and self.target is not None:
            raise InputError("--target without a draft: name one with --draft DIR, or --draft none")
        return locate(self.draft or SHIPPED_DRAFT)


@dataclasses.dataclass(frozen=True)
class PromptFlags:
    """Where the prompts come from: exactly one of the first three.

    Attributes:
      thinking: on or off in the chat template; None leaves it alone.
    """

    text: str | None = None
    prompt_file: Path | None = None
    tokens: Path | None = None
    use_chat: bool = False
    thinking: bool | None = None

    def or_shipped(self, models: ModelFlags) -> "PromptFlags":
        """These; where none is given, those that ship, which are for the shipped target.

        Raises:
          InputError: none is given, for another target.
        """
        if (self.text, self.prompt_file, self.tokens) != (None, None, None):
            return self
        if models.target is not None:
            raise InputError(
                "no prompt: give one of PROMPT, --prompt-file and --tokens; those that ship are "
                "for the target that ships"
            )
        return dataclasses.replace(self, prompt_file=SHIPPED_PROMPTS)

    def read(self, tokenizer: Tokenizer | None) -> list[EncodedPrompt]:
        """The prompts as ids.

        Raises:
          InputError: none was given or several were, or one of them cannot be used.
        """
        given = [self.text is not None, self.prompt_file is not None, self.tokens is not None]
        if sum(given) != 1:
            raise InputError(
                f"{'no prompt' if not any(given) else 'several sources of prompts'}: give one of "
                "PROMPT, --prompt-file and --tokens"
            )
        if self.tokens is not None:
            if self.use_chat or self.thinking is not None:
                flag = "--chat" if self.use_chat else "--thinking"
                raise InputError(f"{flag} is of text, and --tokens are ids already: drop one")
            return encode_prompts(read_tokens(self.tokens), None)
        if self.prompt_file is not None:
            prompts = read_prompts(self.prompt_file)
        else:
            prompts = [Prompt("0", text=self.text, where="PROMPT")]
        return encode_prompts(prompts, tokenizer, self.use_chat, self.thinking)


@dataclasses.dataclass(frozen=True)
class GenerateFlags:
    """All of `jaxspec generate`."""

    models: ModelFlags
    prompts: PromptFlags
    config: GenerateConfig
    sampling: SamplingConfig
    out: Path | None = None
    streams: bool = False
    with_ceiling: bool = False


def load(
    models: ModelFlags, display: Display, is_draft_alone: bool = False
) -> tuple[Target, Draft | None]:
    """The models, loaded.

    Args:
      is_draft_alone: the draft on one device, wherever the target is.
    """
    draft_directory = models.draft_directory
    target = load_target(models.target_directory, models.numerics, progress=display.progress)
    if draft_directory is None:
        return target, None
    draft = load_draft(
        draft_directory,
        dataclasses.replace(models.numerics, mesh=None) if is_draft_alone else models.numerics,
        target=target,
        capture_convention=models.capture_convention,
        capture=models.capture,
        rotary=models.draft_rotary,
        progress=display.progress,
    )
    return target, draft


def run_generate(flags: GenerateFlags, display: Display) -> GenerateReport:
    """The report of a run, whose text goes to stdout while it comes, if the flags say so.

    Raises:
      InputError: a flag, a prompt or a checkpoint cannot be used.
      ContractError: draft and target do not belong together.
    """
    models = flags.models
    with all_or_none():
        tokenizer = tokenizer_of(models, flags.prompts)
        prompts = flags.prompts.read(tokenizer)
        flags.config.check()
        flags.sampling.check(prompts, has_text=tokenizer is not None)
        target, draft = load(models, display)
        check_requests(prompts, flags.sampling, target.config, flags.config)
    _check_same(prompts, target, draft)
    run_file, known = None, {}
    with all_or_none():
        if flags.out is not None and is_first():
            run_file = RunFile(flags.out, _header(flags, prompts, target, draft))
            known = _known(run_file, prompts)
    known = _of_first(known)
    with display.waiting("compiling"):
        generator = Generator(target, draft, flags.config, models.claim(target))
    if not (target.config.eos_token_ids or flags.config.ignore_eos):
        display.say(
            f"{models.target_directory}: no config names an end-of-sequence id; a text ends with "
            "--max-new-tokens or --stop"
        )
    printer = _Printer(len(prompts)) if flags.streams else None
    run = TextRun(generator, prompts, tokenizer, flags.sampling, known)
    for piece in run:
        if printer:
            printer.add(piece.text)
        if piece.report is None:
            continue
        if run_file is not None:
            run_file.append(entry_of(piece.report))
        if printer is None or not printer.streams:
            display.progress("generating", len(run.reports), len(prompts))
    reports = run.finish()
    if printer:
        printer.finish(reports)
    for prompt, report in zip(prompts, reports, strict=True):
        if report.error:
            display.say(f"{prompt.where}: {report.error}")
    ceiling = _ceiling(flags, target, prompts, reports, display) if flags.with_ceiling else None
    return report_of(generator, target, draft, reports, run.run, ceiling)


def _check_same(prompts: Sequence[EncodedPrompt], target: Target, draft: Draft | None) -> None:
    """Raises InputError if several processes found different things under the same names."""
    check_agreement(
        {
            "prompts and their settings, by SHA-256": _digest(prompts),
            "target": target.identity,
            "draft": "none" if draft is None else draft.identity,
        }
    )


def _digest(prompts: Sequence[EncodedPrompt]) -> str:
    """What tells prompts and their own settings from others, in their order: of it come seeds."""
    asked = json.dumps([[prompt.id, prompt.ids, dict(prompt.settings)] for prompt in prompts])
    return hashlib.sha256(asked.encode()).hexdigest()[:12]


def _ceiling(
    flags: GenerateFlags,
    target: Target,
    prompts: Sequence[EncodedPrompt],
    reports: Sequence[PromptReport],
    display: Display,
) -> float | None:
    """The accept_length of a draft that knew the target, on what was emitted."""
    assert flags.config.tree is not None, "checked where flags are read"
    pairs = zip(requests_of(prompts, flags.sampling), reports, strict=True)
    served = [(request, report.completion.tokens) for request, report in pairs if not report.error]
    return accept_ceiling(
        target,
        [request for request, _ in served],
        [tokens for _, tokens in served],
        flags.config.tree,
        batch_size=min(len(served), CEILING_BATCH),
        progress=display.progress,
    ).accept_length


def tokenizer_of(models: ModelFlags, prompts: PromptFlags) -> Tokenizer | None:
    """The target's; None for prompts that are ids, which are answered with ids."""
    if prompts.tokens is not None:
        return None
    directory = models.target_directory
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        if not is_converted(directory):
            Source(directory, needs_weights=False)  # which says what is not there of a checkpoint
        raise InputError(
            f"{directory}: no tiktoken.model in it, so text cannot become ids; give ids with "
            "--tokens"
        )
    return tokenizer


def unread_settings(prompts: Sequence[EncodedPrompt]) -> str | None:
    """Which prompts have settings of their own, where none is sampled by; None for none."""
    names = [prompt.id for prompt in prompts if prompt.settings]
    more = f" and {len(names) - 1} others" if len(names) > 1 else ""
    return f"'sampling' of prompt {names[0]!r}{more} plays no part" if names else None


@dataclasses.dataclass(frozen=True)
class TokenizeReport:
    """Prompts with their ids, and the tokenizer that made them."""

    prompts: tuple[EncodedPrompt, ...]
    tokenizer: Tokenizer

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object: `pieces` are the texts of the tokens, control tokens by name, and
        `sampling` are a prompt's own settings, as its file has them."""
        return {
            "target": str(self.tokenizer.directory),
            "prompts": [
                {
                    "id": prompt.id,
                    "category": prompt.category,
                    "ids": list(prompt.ids),
                    "sampling": dict(prompt.settings),
                    "pieces": [self.tokenizer.piece(i) for i in prompt.ids],
                }
                for prompt in self.prompts
            ],
        }


def run_tokenize(models: ModelFlags, prompts: PromptFlags) -> TokenizeReport:
    """The ids of prompts, in the target's vocabulary.

    Raises:
      InputError: a prompt cannot be used, or the target has no tokenizer.
    """
    tokenizer = tokenizer_of(models, prompts)
    assert tokenizer is not None, "prompts to tokenize are text"
    encoded = prompts.read(tokenizer)
    return TokenizeReport(tuple(encoded), tokenizer)


def run_record(
    models: ModelFlags,
    prompts: PromptFlags,
    boundaries: tuple[int, ...] | None,
    top: int | None,
    out: Path,
    display: Display,
) -> Record:
    """The record of prompts, written to `out`; see `recording.record`.

    Raises:
      InputError: a flag, a prompt or a checkpoint cannot be used.
      ContractError: draft and target do not belong together.
    """
    with all_or_none():
        encoded = prompts.read(tokenizer_of(models, prompts))
        if is_first():
            check_file(out, f"--out {out}")
        target, draft = load(models, display)
        longest = max(len(prompt.ids) for prompt in encoded)
        check_prompts(encoded, target.config.vocab_size, context_length=longest + 1)
    if said := unread_settings(encoded):
        display.say(f"{said}: nothing is sampled here")
    _check_same(encoded, target, draft)
    config = RecordConfig(boundaries, models.claim(target), top)
    sequences = [prompt.ids for prompt in encoded]
    done = record(target, draft, sequences, config, display.progress)
    if is_first():
        done.save(out)
    return done


def run_record_features(
    models: ModelFlags,
    data: PromptFlags,
    capture: tuple[int, ...] | None,
    length: int,
    out: Path,
    display: Display,
) -> FeaturesDirectory:
    """The features of a training text, in shards in `out`; see `features.record_features`.

    Args:
      capture: their boundaries; None takes those that the draft states.

    Raises:
      InputError: a flag, the data or a checkpoint cannot be used.
    """
    source = data.prompt_file or data.tokens
    only = PromptFlags(prompt_file=source), PromptFlags(tokens=source)
    if source is None or data not in only:
        raise InputError("--features reads --prompt-file or --tokens, and nothing beside")
    if jax.process_count() > 1:
        raise InputError("--features is recorded by one process: leave out --coordinator")
    if (capture is None) == (models.draft == "none"):
        raise InputError("--features are those of --capture with --draft none, or of a --draft")
    target, draft = load(models, display)
    if draft is not None:
        claim = target.asked_for(draft.config.boundaries)
    else:
        assert capture is not None, "one of the two was given"
        claim = target.boundaries(capture, "target capture, set by --capture")
    tokenizer = load_tokenizer(models.target_directory)
    samples = read_samples(source, tokenizer, target.config, data.tokens is not None)
    windows = Windows.of(samples, length, target.config.vocab_size)
    gigabytes = estimated_bytes(target, claim, windows) / 1e9
    display.say(f"{len(windows)} windows, {gigabytes:.3f} GB, of {claim}")
    return record_features(target, claim, windows, out, display.progress)


def run_identify(path: Path, models: ModelFlags, display: Display) -> FeaturesReport:
    """Which boundaries of the target a features file holds; see `identify.identify`.

    Raises:
      InputError: the file or the target cannot be used.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file")
    target, _ = load(models, display)
    return identify(path, target, display.progress)


def _known(run_file: RunFile, prompts: Sequence[EncodedPrompt]) -> dict[int, Completion]:
    """What an earlier, interrupted run has completed, by index."""
    found = {
        index: run_file.completion(prompt.id, prompt.ids, prompt.settings)
        for index, prompt in enumerate(prompts)
    }
    return {index: done for index, done in found.items() if done is not None}


def _of_first(known: dict[int, Completion]) -> dict[int, Completion]:
    """What the first process knows: it alone has the run file."""
    told = told_by_first(json.dumps({i: dataclasses.asdict(done) for i, done in known.items()}))
    return {
        int(index): Completion(
            **done | {"tokens": tuple(done["tokens"]), "accepted": tuple(done["accepted"])}
        )
        for index, done in json.loads(told).items()
    }


def _header(
    flags: GenerateFlags, prompts: Sequence[EncodedPrompt], target: Target, draft: Draft | None
) -> dict[str, Any]:
    """The first line of a run file: all that decides which tokens come, and on what."""
    config, sampling, models = flags.config, flags.sampling, flags.models
    return {
        "engine": "jaxspec",
        "version": version(),
        "flags": {
            "tree": None if config.tree is None else str(config.tree),
            "capture": models.capture and list(models.capture),
            "max_new_tokens": config.max_new_tokens,
            "context_length": config.slots(target.config),
            "batch_size": config.batch_size,
            "ignore_eos": config.ignore_eos,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "chat": flags.prompts.use_chat,
            "prompts": _digest(prompts),
            "dtype": models.numerics.dtype,
            "implementation": implementations(target, config),
            **_where_used(flags),
        },
        "target_hash": target.identity,
        "draft_hash": None if draft is None else draft.identity,
        "machine": machine(),
    }


def _where_used(flags: GenerateFlags) -> dict[str, Any]:
    """The flags that came later, where they are given: so that old files go on."""
    mesh, sampling = flags.models.numerics.mesh, flags.sampling
    choice = flags.models.draft_rotary
    found = {
        "mesh": mesh and str(mesh),
        "cache": mesh and mesh.cache,
        "draft_rotary": dataclasses.asdict(choice) if choice else None,
        "capture_convention": flags.models.capture_convention,
        "min_p": sampling.min_p or None,
        "stop_ids": list(sampling.stop_ids) or None,
        "thinking": flags.prompts.thinking,
    }
    return {name: value for name, value in found.items() if value is not None}


class _Printer:
    """Text on stdout: of one prompt while it comes, of several when they are done, in order."""

    def __init__(self, num_prompts: int) -> None:
        self.streams = num_prompts == 1
        self._num_printed = 0

    def add(self, text: str | None) -> None:
        if self.streams and text:
            print(text, end="", flush=True)
            self._num_printed += len(text)

    def finish(self, reports: Sequence[PromptReport]) -> None:
        for report in reports:
            text = report.text
            if text is None:
                text = json.dumps(list(report.completion.tokens))
            if self.streams:
                print(text[self._num_printed :])
            else:
                print(f"--- {report.id}\n{text}")
