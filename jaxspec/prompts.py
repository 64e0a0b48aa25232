"""Prompts, from the command line and from files, and the ids they become."""

import collections
import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxspec.chat import Message, check_messages, shown
from jaxspec.errors import InputError
from jaxspec.tokenizer import Tokenizer

__all__ = [
    "SETTINGS",
    "EncodedPrompt",
    "Prompt",
    "check_prompts",
    "encode_prompts",
    "read_prompts",
    "read_text",
    "read_tokens",
    "told_to_template",
    "whole_conversation",
]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What is to be continued: exactly one of text, messages and ids.

    Attributes:
      id: unique in its file; the run file resumes by it.
      category: of a benchmark's prompt, or None.
      tools: that the messages may call, as the chat template wants them.
      thinking: on or off in the chat template; None leaves it alone.
      settings: some of `SETTINGS`, which come before those of the run.
      where: what an error calls it: its file and line.
    """

    id: str
    category: str | None = None
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    ids: tuple[int, ...] | None = None
    tools: tuple[Any, ...] = ()
    thinking: bool | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    where: str = "the prompt"


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as ids; the rest as in `Prompt`."""

    id: str
    ids: tuple[int, ...]
    category: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    where: str = "the prompt"


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: plain text, one a line, or JSON lines, one object a line.

    A file is JSON lines if its name says so (.jsonl, .ndjson, .json) or its first line is an
    object with a prompt in it. Of an object, the first of these keys counts: `prompt` or else
    `messages`, `conversations` (ShareGPT), `turns` (MT-bench), `question` (GSM8K); `id` or
    `question_id`, and `category`, are kept. A conversation is taken up to its last turn that is
    not the assistant's, and of `turns` the first: what follows is what the model is to write.
    `tools` and `thinking` stand beside messages; `sampling` is an object of `SETTINGS`.

    Raises:
      InputError: names the file and the line.
    """
    lines = read_text(path).split("\n")
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
            try:
                _check_text(line)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            prompts.append(Prompt(str(number - 1), text=line, where=where))
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
        entries = json.loads(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: expected a list of lists of token ids, found {shown(entries)}")
    prompts = []
    for index, entry in enumerate(entries):
        where = f"{path}, entry {index}"
        # bool is an int to Python, and never an id.
        if not isinstance(entry, list) or any(type(i) is not int for i in entry):
            raise InputError(f"{where}: expected a list of token ids, found {shown(entry)}")
        if not entry:
            raise InputError(f"{where}: empty prompt")
        prompts.append(Prompt(str(index), ids=tuple(entry), where=where))
    return prompts


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    use_chat: bool = False,
    thinking: bool | None = None,
) -> list[EncodedPrompt]:
    """The prompts as ids.

    Args:
      use_chat: text becomes a user's message in the chat template. Messages always go through it.
      thinking: on or off in the chat template, of prompts that do not say; None leaves it alone.

    Raises:
      InputError: names the prompt: an empty one, no tokenizer, or no template; or one that has
        tools, or thinking on or off, where nothing reads it.
    """
    encoded = []
    for prompt in prompts:
        chosen = thinking if prompt.thinking is None else prompt.thinking
        try:
            ids = _ids_of(prompt, tokenizer, use_chat, chosen)
        except InputError as error:
            raise InputError(f"{prompt.where}: {error}") from error
        encoded.append(
            EncodedPrompt(prompt.id, ids, prompt.category, prompt.settings, prompt.where)
        )
    return encoded


def check_prompts(prompts: Sequence[EncodedPrompt], vocab_size: int, context_length: int) -> None:
    """Raises InputError, naming the prompt, for ids of no token, or if no prompt has room.

    One that is too long among others fails alone, when its turn comes.
    """
    for prompt in prompts:
        wrong = [i for i in prompt.ids if not 0 <= i < vocab_size]
        if wrong:
            raise InputError(
                f"{prompt.where}: token id {wrong[0]}, but the target's vocabulary has ids 0 to "
                f"{vocab_size - 1}"
            )
    if all(len(prompt.ids) >= context_length for prompt in prompts):
        raise InputError(
            f"{prompts[0].where}: {len(prompts[0].ids)} tokens leave no room for a new one in a "
            f"context of {context_length}; raise --context-length"
        )


def _ids_of(
    prompt: Prompt, tokenizer: Tokenizer | None, use_chat: bool, thinking: bool | None
) -> tuple[int, ...]:
    messages = prompt.messages
    if prompt.text is not None:
        _check_text(prompt.text)
        if use_chat:
            messages = ({"role": "user", "content": prompt.text},)
    if messages is None and (prompt.tools or thinking is not None):
        what = "tools are" if prompt.tools else "thinking on or off is"
        raise InputError(f"{what} read by a chat template: give messages, or --chat")
    if prompt.ids is not None:
        return prompt.ids
    if tokenizer is None:
        raise InputError(
            "the target's directory has no tiktoken.model, so text cannot become ids; give ids "
            "with --tokens"
        )
    if messages is not None:
        return tuple(tokenizer.encode_chat(list(messages), list(prompt.tools), thinking))
    if prompt.text is None:
        raise InputError("neither text nor messages nor ids")
    return tuple(tokenizer.encode(prompt.text))


def _from_json(line: str, default_id: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected an object, found {shown(entry)}")
    form = next((key for key in _FORMS if key in entry), None)
    if form is None:
        raise InputError(
            f"{where}: expected one of the keys {', '.join(_FORMS)}; found {', '.join(entry)}"
        )
    if "prompt" in entry and "messages" in entry:
        raise InputError(f"{where}: both 'prompt' and 'messages'; give one of the two")
    astray = [key for key in SETTINGS if key in entry]
    if astray:
        raise InputError(
            f"{where}: {astray[0]!r} stands beside the prompt, where nothing reads it; settings "
            f'stand in an object, as in "sampling": {{"{astray[0]}": ...}}'
        )
    for key in entry.keys() - _READ:
        if near := difflib.get_close_matches(key, _READ, n=1, cutoff=0.88):
            raise InputError(f"{where}: nothing reads {key!r}; is it {near[0]!r}?")
    name = entry.get("id", entry.get("question_id", default_id))
    try:
        content = _FORMS[form](entry[form])
    except InputError as error:
        raise InputError(f"{where}, {form!r}: {error}") from error
    if content.keys() == {"messages"}:
        try:
            content |= told_to_template(entry)
        except InputError as error:
            raise InputError(f"{where}, {error}") from error
    elif "thinking" in entry or "tools" in entry:
        raise InputError(f"{where}: 'tools' and 'thinking' stand beside 'messages', not {form!r}")
    settings = _settings(entry.get("sampling"), f"{where}, 'sampling'")
    return Prompt(str(name), entry.get("category"), **content, settings=settings, where=where)


def told_to_template(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What stands beside the turns of a line: `tools`, a tuple, and `thinking`, None if left out.

    Raises:
      InputError: they are none.
    """
    tools, thinking = entry.get("tools") or [], entry.get("thinking")
    if not isinstance(tools, list):
        raise InputError(f"'tools': expected a list, found {shown(tools)}")
    if thinking is not None and not isinstance(thinking, bool):
        raise InputError(f"'thinking': expected true or false, found {shown(thinking)}")
    return {"tools": tuple(tools), "thinking": thinking}


def _settings(value: Any, where: str) -> dict[str, Any]:
    """The settings of a prompt's own, of the right kinds; their ranges are checked with the run."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object, found {shown(value)}")
    settings = {}
    for name, given in value.items():
        if name not in SETTINGS:
            raise InputError(f"{where}: no setting {name!r}; there are {', '.join(SETTINGS)}")
        wanted, kinds, of = SETTINGS[name]
        parts = given if isinstance(given, list) and of else [given]
        # bool is an int to Python.
        if any(isinstance(part, bool) or not isinstance(part, kinds) for part in parts):
            raise InputError(f"{where}, {name!r}: expected {wanted}, found {shown(given)}")
        settings[name] = tuple(parts) if of else given
    return settings


SETTINGS = {
    "temperature": ("a number", (int, float), False),
    "top_k": ("an integer", int, False),
    "top_p": ("a number", (int, float), False),
    "min_p": ("a number", (int, float), False),
    "seed": ("an integer", int, False),
    "max_new_tokens": ("an integer", int, False),
    "stop": ("text, or a list of texts", str, True),
    "stop_ids": ("an id, or a list of ids", int, True),
}
"""What a prompt can say of how it is continued: in words, its type, and whether there may be
several."""


def _text(value: Any) -> dict[str, Any]:
    return {"text": _check_text(value)}


def _first_turn(value: Any) -> dict[str, Any]:
    return {"text": _check_text(_list(value)[0])}


def whole_conversation(entry: Mapping[str, Any]) -> list[Message] | None:
    """All turns of a line's messages or ShareGPT conversation, replies too; None of other forms.

    Raises:
      InputError: they are no turns.
    """
    if "messages" in entry:
        turns = _list(entry["messages"])
    elif "conversations" in entry:
        turns = _share_gpt_turns(entry["conversations"])
    else:
        return None
    check_messages(turns)
    return turns


def _messages(value: Any) -> dict[str, Any]:
    messages = _list(value)
    check_messages(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise InputError("empty prompt (the assistant's turns alone)")
    if not messages[-1].get("content"):
        raise InputError("empty prompt (its last turn has no content)")
    return {"messages": tuple(messages)}


def _share_gpt(value: Any) -> dict[str, Any]:
    return _messages(_share_gpt_turns(value))


def _share_gpt_turns(value: Any) -> list[Message]:
    messages = []
    for turn in _list(value):
        if not isinstance(turn, dict) or turn.get("from") not in _SHARE_GPT_ROLES:
            raise InputError(
                f'expected turns whose "from" is one of {", ".join(_SHARE_GPT_ROLES)}; '
                f"found {turn.get('from') if isinstance(turn, dict) else shown(turn)!r}"
            )
        messages.append({"role": _SHARE_GPT_ROLES[turn["from"]], "content": turn.get("value")})
    return messages


_SHARE_GPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}

_FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "prompt": _text,
    "messages": _messages,
    "conversations": _share_gpt,
    "turns": _first_turn,
    "question": _text,
}
_READ = (*_FORMS, "id", "question_id", "category", "sampling", "tools", "thinking")
"""All keys of a line that mean something; others are of a data set's own."""


def _is_prompt_object(line: str) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and not _FORMS.keys().isdisjoint(entry)


def _check_text(text: Any) -> str:
    if not isinstance(text, str):
        raise InputError(f"expected text, found {shown(text)}")
    if not text.strip():
        raise InputError("empty prompt")
    return text


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"expected a list, found {shown(value)}")
    if not value:
        raise InputError("empty prompt (a list of nothing)")
    return value


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
      InputError: it is not there, or not UTF-8.
    """
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
