"""What `jaxspec doctor` does once its flags are read; `cli_doctor.py` reads them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxspec.commands import ModelFlags, PromptFlags, load, tokenizer_of, unread_settings
from jaxspec.console import Display
from jaxspec.convert.pairing import fingerprint_of
from jaxspec.doctor import diagnose
from jaxspec.doctor_report import DoctorReport
from jaxspec.doctor_scores import DoctorConfig
from jaxspec.doctor_texts import Text, read_observed, write_on
from jaxspec.errors import InputError
from jaxspec.prompts import EncodedPrompt
from jaxspec.target import Target
from jaxspec.text import SamplingConfig
from jaxspec.tokenizer import Tokenizer

__all__ = ["DoctorFlags", "check_texts", "prompts_within", "run_doctor"]


@dataclasses.dataclass(frozen=True)
class DoctorFlags:
    """All of `jaxspec doctor`.

    Attributes:
      prompts: none at all are those that ship, for the shipped target.
      observed: a run file, whose texts are read in place of prompts.
      max_new_tokens: that the target writes after each prompt; 0 reads the prompts as they are.
      temperature: of what it writes after prompts that do not say; 0 is greedy.
      context_length: tokens of a text; a longer prompt is cut at its end.
    """

    models: ModelFlags
    prompts: PromptFlags
    config: DoctorConfig
    observed: Path | None = None
    max_new_tokens: int = 64
    temperature: float = 0.8
    context_length: int = 512


def run_doctor(flags: DoctorFlags, display: Display) -> DoctorReport:
    """The report of a draft on prompts, or on another engine's run.

    Raises:
      InputError: a flag, a prompt or a checkpoint cannot be used.
      ContractError: draft and target do not belong together.
    """
    models, config, observed = flags.models, flags.config, None
    prompts, tokenizer, sampling = [], None, SamplingConfig(flags.temperature)
    config.check()
    if models.draft == "none":
        raise InputError("--draft none: there is nothing to find out about")
    room = room_for_prompts(flags.context_length, flags.max_new_tokens)
    if flags.observed is None:
        prompts, tokenizer = prompts_within(models, flags.prompts, room, display)
        texts = [Text.of(prompt) for prompt in prompts]
        if flags.max_new_tokens:
            sampling.check(prompts, has_text=tokenizer is not None)
        elif said := unread_settings(prompts):
            display.say(f"{said}: with --max-new-tokens 0 nothing is written")
    else:
        if flags.prompts != PromptFlags():
            raise InputError("--observed brings its own prompts: give no others")
        observed = read_observed(flags.observed)
        texts = observed.texts
        config = dataclasses.replace(config, levels=observed.levels)
    target, draft = load(models, display, is_draft_alone=True)
    assert draft is not None, "checked above"
    ran = None if observed is None else observed.target_hash
    if ran is not None and fingerprint_of(ran) != fingerprint_of(target.identity):
        raise InputError(
            f"{flags.observed}: its target_hash is {ran}, and {models.target_directory} is "
            f"{target.identity}: give the target that was run; a hash that is not jaxspec's is "
            "left out of the file"
        )
    if (claim := models.claim(target)) is not None:
        claim.require(draft.config.boundaries, "doctor")
    check_texts(texts, target)
    if flags.observed is None and flags.max_new_tokens:
        with display.waiting("the target writes"):
            texts = write_on(
                target, prompts, tokenizer, sampling, flags.max_new_tokens, config.batch_size
            )
    engine = "the engine" if observed is None else observed.engine
    report = diagnose(target, draft, texts, config, engine=engine, progress=display.progress)
    if report.looping:
        display.say(f"left out, since they repeat themselves: {', '.join(report.looping)}")
    return report


def check_texts(texts: Sequence[Text], target: Target) -> None:
    """Raises InputError for texts that the target cannot read."""
    for text in texts:
        outside = [i for i in text.ids if not 0 <= i < target.config.vocab_size]
        if outside:
            raise InputError(
                f"prompt {text.id!r}: token id {outside[0]} is not in a vocabulary of "
                f"{target.config.vocab_size}"
            )
        if len(text.ids) > target.config.max_position_embeddings:
            raise InputError(
                f"prompt {text.id!r}: {len(text.ids)} tokens; the target was made for "
                f"{target.config.max_position_embeddings}"
            )


def room_for_prompts(context_length: int, max_new_tokens: int) -> int:
    """Tokens that a prompt may have.

    Raises:
      InputError: fewer than two, or a number of new tokens that is none.
    """
    room = context_length - max_new_tokens
    if max_new_tokens < 0 or room < 2:
        raise InputError(
            f"--context-length {context_length} has no room for a prompt and "
            f"--max-new-tokens {max_new_tokens}"
        )
    return room


def prompts_within(
    models: ModelFlags, asked: PromptFlags, room: int, display: Display
) -> tuple[list[EncodedPrompt], Tokenizer | None]:
    """The prompts, cut to the room that there is, and who made ids of them; none at all are those
    that ship.

    Raises:
      InputError: no prompt for another target than the shipped one, or one cannot be used.
    """
    asked = asked.or_shipped(models)
    tokenizer = tokenizer_of(models, asked)
    prompts = asked.read(tokenizer)
    for prompt in prompts:
        if len(prompt.ids) < 2:
            raise InputError(
                f"{prompt.where}: a single token, of which a draft can tell nothing; give longer "
                "prompts"
            )
    num_cut = sum(len(prompt.ids) > room for prompt in prompts)
    if num_cut:
        display.say(f"prompts cut, since --context-length allows no longer ones: {num_cut}")
    return [dataclasses.replace(prompt, ids=prompt.ids[:room]) for prompt in prompts], tokenizer
