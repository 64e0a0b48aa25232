"""Text in, text out: what stands between prompts and a `Generator`, which knows only ids."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.generator import Completion, GenerateConfig, Generator, Request, Run
from jaxspec.prompts import EncodedPrompt, Prompt, check_prompts, encode_prompts
from jaxspec.report import GenerateReport, PromptReport, report_of
from jaxspec.target import Target
from jaxspec.tokenizer import TextStream, Tokenizer

__all__ = [
    "SamplingConfig",
    "Stopper",
    "continue_prompts",
    "generate",
    "requests_of",
    "tokenize",
]


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the tokens of a run are chosen, and which text ends it.

    Attributes:
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: in (0, 1]; 1 is off.
      seed: of the first prompt; each further one counts up, so that no two share their noise.
      stop: texts that end a continuation, themselves not part of it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def check(self, has_text: bool) -> None:
        """Raises InputError for what cannot be; stop strings are looked for in text only."""
        Request((), self.temperature, self.top_k, self.top_p).check_sampling()
        if "" in self.stop:
            raise InputError("a stop string is empty, which every text holds")
        if self.stop and not has_text:
            raise InputError("stop strings are looked for in text, and there are only ids here")


GREEDY = SamplingConfig()


class Stopper:
    """The text of every request so far, and where a stop string ends it.

    Text that could still turn out to be the beginning of a stop string is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        on_text: Callable[[int, str], None] | None = None,
    ) -> None:
        """Calls `on_text` with a request's index and its text so far, whenever there is more."""
        self._tokenizer, self._stop, self._on_text = tokenizer, tuple(stop), on_text
        self._texts: dict[int, _GrowingText] = {}

    def should_stop(self, index: int, tokens: Sequence[int]) -> int | None:
        """How many of a request's tokens to keep if a stop string has appeared, else None.

        The last kept token is the earliest one with which the text holds a stop string.
        """
        text = self._texts.setdefault(index, _GrowingText(self._tokenizer))
        for token in tokens[text.num_tokens :]:
            text.push(token)
            if len(self._cut(text.so_far)) < len(text.so_far):
                return text.num_tokens
        if self._on_text:
            certain = len(text.so_far) - max(map(len, self._stop), default=1) + 1
            self._on_text(index, text.so_far[: max(certain, 0)])
        return None

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a request's tokens, up to a stop string."""
        return self._cut(self._tokenizer.decode(tokens))

    def _cut(self, text: str) -> str:
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        return text[: min(places, default=len(text))]


class _GrowingText:
    """The text of tokens that come one at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self.so_far, self.num_tokens = "", 0

    def push(self, token: int) -> None:
        self.so_far += self._stream.push([token])
        self.num_tokens += 1


def requests_of(prompts: Sequence[EncodedPrompt], sampling: SamplingConfig) -> list[Request]:
    """A request for each prompt, with a seed of its own."""
    s = sampling
    return [
        Request(prompt.ids, s.temperature, s.top_k, s.top_p, s.seed + index)
        for index, prompt in enumerate(prompts)
    ]


def continue_prompts(
    generator: Generator,
    prompts: Sequence[EncodedPrompt],
    tokenizer: Tokenizer | None,
    sampling: SamplingConfig,
    known: Mapping[int, Completion] = MappingProxyType({}),
    on_text: Callable[[int, str], None] | None = None,
    on_finish: Callable[[PromptReport], None] | None = None,
) -> tuple[list[PromptReport], Run]:
    """The continuations of the prompts, in order, and the run that made them.

    Args:
      tokenizer: of the target; None where no text is wanted.
      known: completions that there are already, by the prompt's index; they are not run again.
      on_text: called with a prompt's index and all its text that is certain so far.
      on_finish: called with each new report, as soon as it is there.

    Raises:
      InputError: a prompt or a setting that cannot be used; nothing is generated.
    """
    sampling.check(has_text=tokenizer is not None)
    stopper = Stopper(tokenizer, sampling.stop, on_text) if tokenizer else None
    tree = generator.config.tree

    def report(index: int, completion: Completion) -> PromptReport:
        prompt, levels = prompts[index], tree.levels if tree else 0
        text = stopper.text_of(completion.tokens) if stopper else None
        return PromptReport(prompt.id, prompt.category, prompt.ids, completion, text, levels)

    to_run = [index for index in range(len(prompts)) if index not in known]
    requests = requests_of(prompts, sampling)
    run = generator.run(
        [requests[index] for index in to_run],
        should_stop=stopper and (lambda i, tokens: stopper.should_stop(to_run[i], tokens)),
        on_finish=on_finish and (lambda i, done: on_finish(report(to_run[i], done))),
    )
    completions = {**known, **dict(zip(to_run, run.completions, strict=True))}
    return [report(index, completions[index]) for index in range(len(prompts))], run


def tokenize(
    prompts: Sequence[str], tokenizer: Tokenizer, use_chat: bool = False
) -> list[tuple[int, ...]]:
    """The exact ids of prompts, as `generate` continues them.

    Args:
      use_chat: each is a user's message in the chat template.

    Raises:
      InputError: an empty prompt, or no template.
    """
    return [prompt.ids for prompt in encode_prompts(_numbered(prompts), tokenizer, use_chat)]


def generate(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[str | Sequence[int]],
    config: GenerateConfig,
    tokenizer: Tokenizer | None = None,
    sampling: SamplingConfig = GREEDY,
) -> GenerateReport:
    """The continuations of prompts, given as text or as ids, and the figures of the run.

    Compiles anew at every call; `generator.Generator` compiles once for many.

    Raises:
      InputError: a prompt or a setting that cannot be used.
      ContractError: draft and target do not belong together.
    """
    encoded = encode_prompts(_numbered(prompts), tokenizer)
    check_prompts(encoded, target.config.vocab_size, config.slots(target.config))
    generator = Generator(target, draft, config)
    reports, run = continue_prompts(generator, encoded, tokenizer, sampling)
    return report_of(generator, target, draft, reports, run)


def _numbered(prompts: Sequence[str | Sequence[int]]) -> list[Prompt]:
    """Prompts that are text or ids, numbered from 0."""
    numbered = []
    for index, prompt in enumerate(prompts):
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, tuple(prompt))
        numbered.append(Prompt(str(index), text=text, ids=ids, where=f"prompt {index}"))
    return numbered
