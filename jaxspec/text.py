"""Text in, text out: what stands between prompts and a `Generator`, which knows only ids."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from jaxspec.config import TargetConfig
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.prompts import EncodedPrompt, Prompt, check_prompts, encode_prompts
from jaxspec.report import GenerateReport, PromptReport, report_of
from jaxspec.requests import Completion, Request, Run
from jaxspec.target import Target
from jaxspec.tokenizer import TextStream, Tokenizer

__all__ = [
    "SamplingConfig",
    "Stopper",
    "TextPiece",
    "TextRun",
    "check_requests",
    "generate",
    "requests_of",
    "stream",
    "tokenize",
]


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the tokens of a run are chosen, and what ends them. A prompt's own settings come first.

    Attributes:
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: in (0, 1]; 1 is off.
      min_p: in [0, 1]; 0 is off.
      seed: of the first prompt; each further one counts up, so that no two share their noise, and
        none may come past 2^32 - 1.
      stop: texts that end a continuation, themselves not part of it.
      stop_ids: tokens that end it, besides the target's own, and are its last.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def request(self, prompt: EncodedPrompt, index: int) -> Request:
        """What a run's `index`-th prompt asks for."""
        settings = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.seed + index,
            "stop_ids": self.stop_ids,
            **prompt.settings,
        }
        settings.pop("stop", None)  # of text: ids know nothing of it
        return Request(prompt.ids, **settings)

    def stop_of(self, prompt: EncodedPrompt) -> tuple[str, ...]:
        """The stop strings of a prompt."""
        return prompt.settings.get("stop", self.stop)

    def check(self, prompts: Sequence[EncodedPrompt], has_text: bool) -> None:
        """Raises InputError for what cannot be; stop strings are looked for in text only."""
        _check_settings(self.request(EncodedPrompt("", ()), 0), self.stop, has_text)
        for index, prompt in enumerate(prompts):
            try:
                _check_settings(self.request(prompt, index), self.stop_of(prompt), has_text)
            except InputError as error:
                raise InputError(f"{prompt.where}: {error}") from None


GREEDY = SamplingConfig()


def _check_settings(request: Request, stop: Sequence[str], has_text: bool) -> None:
    request.check_settings()
    if isinstance(stop, str):
        raise InputError(f"stop is the text {stop!r}; give a tuple of texts")
    if "" in stop:
        raise InputError("a stop string is empty, which every text holds")
    if stop and not has_text:
        raise InputError("stop strings are looked for in text, and there are only ids here")


def requests_of(prompts: Sequence[EncodedPrompt], sampling: SamplingConfig) -> list[Request]:
    """A request for each prompt, with a seed of its own."""
    return [sampling.request(prompt, index) for index, prompt in enumerate(prompts)]


def check_requests(
    prompts: Sequence[EncodedPrompt],
    sampling: SamplingConfig,
    target: TargetConfig,
    config: GenerateConfig,
) -> None:
    """Raises InputError, naming the prompt, for what this target cannot serve."""
    check_prompts(prompts, target.vocab_size, config.slots(target))
    for prompt, request in zip(prompts, requests_of(prompts, sampling), strict=True):
        try:
            request.check(target, config.ignore_eos)
        except InputError as error:
            raise InputError(f"{prompt.where}: {error}") from None


class Stopper:
    """The text of a request so far, and where a stop string ends it.

    Text that could still turn out to be the beginning of a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._stream, self._stop = TextStream(tokenizer), tuple(stop)
        self._held_back = max(map(len, self._stop), default=1) - 1
        self._text, self._num_tokens, self._num_shown = "", 0, 0
        self._end: int | None = None

    def should_stop(self, tokens: Sequence[int]) -> int | None:
        """How many of the tokens so far to keep if their text holds a stop string, else None.

        The last kept token is the earliest one with which it does.
        """
        for token in tokens[self._num_tokens :]:
            self._push(self._stream.push([token]))
            self._num_tokens += 1
            if self._end is not None:
                return self._num_tokens
        return None

    def new_text(self) -> str:
        """What is certain by now, and was not yet when this was last asked."""
        certain = len(self._text) - self._held_back if self._end is None else self._end
        start, self._num_shown = self._num_shown, max(self._num_shown, certain)
        return self._text[start : self._num_shown]

    def finish(self) -> str:
        """All of the text, up to a stop string; half a character at its end is U+FFFD."""
        if self._end is None:
            self._push(self._stream.finish())
        self._held_back = 0
        return self._text[: self._end]

    def _push(self, text: str) -> None:
        # A stop string that was not there before ends in what is new.
        start = max(len(self._text) - self._held_back, 0)
        self._text += text
        places = [p for stop in self._stop if (p := self._text.find(stop, start)) >= 0]
        self._end = min(places, default=None)


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """The next text of a prompt.

    Attributes:
      index: of the prompt.
      text: what is certain since its last piece, never half a character, never the beginning of
        what may turn out to be a stop string. All of its pieces together are its text. None where
        there is no tokenizer.
      tokens: ids that came meanwhile. They may be ahead of the text.
      report: of a prompt that has ended with this piece; else None.
    """

    index: int
    text: str | None
    tokens: tuple[int, ...]
    report: PromptReport | None


class TextRun:
    """The continuations of prompts while they come: an iterator over their pieces.

    Attributes:
      reports: of the prompts that have ended so far, by index.
    """

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[EncodedPrompt],
        tokenizer: Tokenizer | None,
        sampling: SamplingConfig,
        known: Mapping[int, Completion] = MappingProxyType({}),
    ) -> None:
        """Of prompts as ids; nothing is generated yet.

        Args:
          tokenizer: of the target; None where no text is wanted.
          known: completions that there are already, by the prompt's index; they are not run again.

        Raises:
          InputError: a prompt or a setting that cannot be used.
        """
        sampling.check(prompts, has_text=tokenizer is not None)
        self._prompts, self._tree = prompts, generator.config.tree
        self._stoppers = (
            {i: Stopper(tokenizer, sampling.stop_of(p)) for i, p in enumerate(prompts)}
            if tokenizer
            else {}
        )
        self.reports: dict[int, PromptReport] = {}
        for index, completion in known.items():
            if index in self._stoppers:
                self._stoppers[index].should_stop(completion.tokens)
            self.reports[index] = self._report(index, completion)
        self._to_run = [index for index in range(len(prompts)) if index not in known]
        requests = requests_of(prompts, sampling)
        to_run = [requests[index] for index in self._to_run]
        generator.check(to_run)
        self._stream = generator.stream(to_run, self._should_stop if tokenizer else None)

    def __iter__(self) -> Iterator[TextPiece]:
        return self

    def __next__(self) -> TextPiece:
        piece = next(self._stream)
        index, report = self._to_run[piece.index], None
        if piece.completion is not None:
            report = self.reports[index] = self._report(index, piece.completion)
        text = self._stoppers[index].new_text() if self._stoppers else None
        return TextPiece(index, text, piece.tokens, report)

    def finish(self) -> list[PromptReport]:
        """The reports of all prompts, in order, after whatever has not come yet."""
        for _ in self:
            pass
        return [self.reports[index] for index in range(len(self._prompts))]

    @property
    def run(self) -> Run:
        """The completions that this run has made so far, and their time."""
        done = [self.reports[i].completion for i in self._to_run if i in self.reports]
        return Run(tuple(done), self._stream.prefill_ms, self._stream.decode_ms)

    def _should_stop(self, index: int, tokens: Sequence[int]) -> int | None:
        return self._stoppers[self._to_run[index]].should_stop(tokens)

    def _report(self, index: int, completion: Completion) -> PromptReport:
        prompt, levels = self._prompts[index], self._tree.levels if self._tree else 0
        text = self._stoppers[index].finish() if self._stoppers else None
        return PromptReport(
            prompt.id, prompt.category, prompt.ids, completion, text, levels, prompt.settings
        )


def tokenize(
    prompts: Sequence[str | Sequence[int] | Prompt],
    tokenizer: Tokenizer,
    use_chat: bool = False,
    thinking: bool | None = None,
) -> list[tuple[int, ...]]:
    """The exact ids of prompts, as `generate` continues them.

    Args:
      use_chat: text is a user's message in the chat template.
      thinking: on or off, where the chat template has that switch; None leaves it alone.

    Raises:
      InputError: an empty prompt, or no template.
    """
    encoded = encode_prompts(_numbered(prompts), tokenizer, use_chat, thinking)
    return [prompt.ids for prompt in encoded]


def stream(
    generator: Generator,
    prompts: Sequence[str | Sequence[int] | Prompt],
    tokenizer: Tokenizer | None = None,
    sampling: SamplingConfig = GREEDY,
) -> TextRun:
    """The continuations of prompts while they come, piece by piece.

    Raises:
      InputError: a prompt or a setting that cannot be used.
    """
    return TextRun(generator, encode_prompts(_numbered(prompts), tokenizer), tokenizer, sampling)


def generate(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[str | Sequence[int] | Prompt],
    config: GenerateConfig,
    tokenizer: Tokenizer | None = None,
    sampling: SamplingConfig = GREEDY,
) -> GenerateReport:
    """The continuations of prompts, given as text, as ids or as `Prompt`s, and the run's figures.

    Compiles anew at every call; `generator.Generator` compiles once for many.

    Raises:
      InputError: a prompt or a setting that cannot be used. A prompt that fills the context fails
        alone, unless all do: its report says so.
      ContractError: draft and target do not belong together.
    """
    encoded = encode_prompts(_numbered(prompts), tokenizer)
    sampling.check(encoded, has_text=tokenizer is not None)
    check_requests(encoded, sampling, target.config, config)
    generator = Generator(target, draft, config)
    run = TextRun(generator, encoded, tokenizer, sampling)
    return report_of(generator, target, draft, run.finish(), run.run)


def _numbered(prompts: Sequence[str | Sequence[int] | Prompt]) -> list[Prompt]:
    """Prompts that are text or ids, numbered from 0; those that have an id keep it."""
    if isinstance(prompts, str):
        raise InputError("prompts are one text; give a list, if only of that one")
    if not prompts:
        raise InputError("no prompt was given")
    numbered = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, Prompt):
            numbered.append(prompt)
            continue
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, tuple(prompt))
        numbered.append(Prompt(str(index), text=text, ids=ids, where=f"prompt {index}"))
    return numbered
