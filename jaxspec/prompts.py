"""Prompts, from the command line and from files, and the ids they become."""

import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.chat import Message
from jaxspec.errors import InputError
from jaxspec.tokenizer import Tokenizer

__all__ = [
    "EncodedPrompt",
    "Prompt",
    "check_prompts",
    "encode_prompts",
    "read_prompts",
    "read_tokens",
]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What is to be continued: exactly one of text, messages and ids.

    Attributes:
      id: unique in its file; the run file resumes by it.
      category: of a benchmark's prompt, or None.
      where: what an error calls it: its file and line.
    """

    id: str
    category: str | None = None
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    ids: tuple[int, ...] | None = None
    where: str = "the prompt"


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as ids; the rest as in `Prompt`."""

    id: str
    ids: tuple[int, ...]
    category: str | None = None
    where: str = "the prompt"


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: plain text, one a line, or JSON lines, one object a line.

    A file is JSON lines if its name says so (.jsonl, .ndjson, .json) or its first line is an
    object with a prompt in it. Of an object, the first of these keys counts: `prompt`,
    `messages`, `conversations` (ShareGPT), `turns` (MT-bench), `question` (GSM8K); `id` or
    `question_id`, and `category`, are kept. A conversation is taken up to its last turn that is
    not the assistant's, and of `turns` the first: what follows is what the model is to write.

    Raises:
      InputError: names the file and the line.
    """
    lines = _read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise InputError(f"{path}: no prompt in it")
    is_json = path.suffix in {".jsonl", ".ndjson", ".json"} or _is_prompt_object(lines[0])
    prompts = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if is_json and line.strip():
            prompts.append(_from_json(line, str(number - 1), where))
        elif not is_json:
            text = _non_empty(line, where)
            prompts.append(Prompt(str(number - 1), text=text, where=where))
    where_of = collections.defaultdict(list)
    for prompt in prompts:
        where_of[prompt.id].append(prompt.where)
    for name, places in where_of.items():
        if len(places) > 1:
            raise InputError(f"{places[1]}: id {name!r} is also that of {places[0]}")
    return prompts


def read_tokens(path: Path) -> list[Prompt]:
    """The prompts of a JSON list of lists of ids.

    Raises:
      InputError: names the file and the entry.
    """
    try:
        entries = json.loads(_read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: expected a list of lists of token ids, found {_kind(entries)}")
    prompts = []
    for index, entry in enumerate(entries):
        where = f"{path}, entry {index}"
        # bool is an int to Python, and never an id.
        if not isinstance(entry, list) or any(type(i) is not int for i in entry):
            raise InputError(f"{where}: expected a list of token ids, found {_kind(entry)}")
        if not entry:
            raise InputError(f"{where}: empty prompt")
        prompts.append(Prompt(str(index), ids=tuple(entry), where=where))
    return prompts


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, use_chat: bool = False
) -> list[EncodedPrompt]:
    """The prompts as ids.

    Args:
      use_chat: text becomes a user's message in the chat template. Messages always go through it.

    Raises:
      InputError: names the prompt: an empty one, no tokenizer, or no template.
    """
    return [
        EncodedPrompt(
            prompt.id, _ids_of(prompt, tokenizer, use_chat), prompt.category, prompt.where
        )
        for prompt in prompts
    ]


def check_prompts(prompts: Sequence[EncodedPrompt], vocab_size: int, context_length: int) -> None:
    """Raises InputError, naming the prompt, for ids of no token or a prompt beyond capacity."""
    for prompt in prompts:
        wrong = [i for i in prompt.ids if not 0 <= i < vocab_size]
        if wrong:
            raise InputError(
                f"{prompt.where}: token id {wrong[0]}, but the target's vocabulary has ids 0 to "
                f"{vocab_size - 1}"
            )
        if len(prompt.ids) >= context_length:
            raise InputError(
                f"{prompt.where}: {len(prompt.ids)} tokens leave no room for a new one in a "
                f"context of {context_length}; raise --context-length"
            )


def _ids_of(prompt: Prompt, tokenizer: Tokenizer | None, use_chat: bool) -> tuple[int, ...]:
    if prompt.ids is not None:
        return prompt.ids
    if prompt.text is not None:
        _non_empty(prompt.text, prompt.where)
    if tokenizer is None:
        raise InputError(
            f"{prompt.where}: the target's directory has no tiktoken.model, so text cannot become "
            "ids; give ids with --tokens"
        )
    if prompt.messages is not None:
        return tuple(tokenizer.encode_chat(list(prompt.messages)))
    assert prompt.text is not None
    if use_chat:
        return tuple(tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))
    return tuple(tokenizer.encode(prompt.text))


def _from_json(line: str, default_id: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected an object, found {_kind(entry)}")
    form = next((key for key in _FORMS if key in entry), None)
    if form is None:
        raise InputError(
            f"{where}: expected one of the keys {', '.join(_FORMS)}; found {', '.join(entry)}"
        )
    content = _FORMS[form](entry[form], f"{where}, {form!r}")
    name = entry.get("id", entry.get("question_id", default_id))
    return Prompt(str(name), entry.get("category"), **content, where=where)


def _text(value: Any, where: str) -> dict[str, Any]:
    return {"text": _non_empty(value, where)}


def _first_turn(value: Any, where: str) -> dict[str, Any]:
    return {"text": _non_empty(_list(value, where)[0], where)}


def _messages(value: Any, where: str) -> dict[str, Any]:
    messages = _list(value, where)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f'{where}: expected objects with a "role", found {_kind(message)}')
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise InputError(f"{where}: empty prompt (the assistant's turns alone)")
    if not messages[-1].get("content"):
        raise InputError(f"{where}: empty prompt (its last turn has no content)")
    return {"messages": tuple(messages)}


def _share_gpt(value: Any, where: str) -> dict[str, Any]:
    messages = []
    for turn in _list(value, where):
        if not isinstance(turn, dict) or turn.get("from") not in _SHARE_GPT_ROLES:
            raise InputError(
                f'{where}: expected turns whose "from" is one of {", ".join(_SHARE_GPT_ROLES)}; '
                f"found {turn.get('from') if isinstance(turn, dict) else _kind(turn)!r}"
            )
        messages.append({"role": _SHARE_GPT_ROLES[turn["from"]], "content": turn.get("value")})
    return _messages(messages, where)


_SHARE_GPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}

_FORMS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "prompt": _text,
    "messages": _messages,
    "conversations": _share_gpt,
    "turns": _first_turn,
    "question": _text,
}


def _is_prompt_object(line: str) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and not _FORMS.keys().isdisjoint(entry)


def _non_empty(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{where}: expected text, found {_kind(text)}")
    if not text.strip():
        raise InputError(f"{where}: empty prompt")
    return text


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: expected a list, found {_kind(value)}")
    if not value:
        raise InputError(f"{where}: empty prompt (a list of nothing)")
    return value


def _kind(value: Any) -> str:
    """A value as an error shows it: its JSON, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
