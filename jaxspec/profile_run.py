"""What `jaxspec profile` does once its flags are read; `cli_profile.py` reads them."""

import dataclasses

from jaxspec.commands import ModelFlags, PromptFlags, load, tokenizer_of
from jaxspec.console import Display
from jaxspec.errors import InputError
from jaxspec.profile_report import ProfileReport
from jaxspec.profiling import ProfileConfig, profile_step
from jaxspec.text import SamplingConfig, requests_of

__all__ = ["ProfileFlags", "run_profile"]


@dataclasses.dataclass(frozen=True)
class ProfileFlags:
    """All of `jaxspec profile`.

    Attributes:
      prompts: none at all are those that ship, for the shipped target.
      batch_size: the first of the prompts that are taken, one a place.
    """

    models: ModelFlags
    prompts: PromptFlags
    config: ProfileConfig
    batch_size: int = 1
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)


def run_profile(flags: ProfileFlags, display: Display) -> ProfileReport:
    """The profile of steps on prompts.

    Raises:
      InputError: a flag, a prompt or a checkpoint cannot be used.
      ContractError: draft and target do not belong together.
    """
    models = flags.models
    flags.config.check()
    if flags.batch_size < 1:
        raise InputError(f"--batch-size is {flags.batch_size}; it starts at 1")
    asked = flags.prompts.or_shipped(models)
    tokenizer = tokenizer_of(models, asked)
    prompts = asked.read(tokenizer)
    if len(prompts) < flags.batch_size:
        raise InputError(
            f"--batch-size {flags.batch_size} and {len(prompts)} prompts: each place of the batch "
            "takes one of its own, since equal ones choose equal experts"
        )
    prompts = prompts[: flags.batch_size]
    flags.sampling.check(prompts, has_text=tokenizer is not None)
    target, draft = load(models, display)
    requests = requests_of(prompts, flags.sampling)
    return profile_step(
        target, draft, requests, flags.config, models.claim(target), display.progress
    )
