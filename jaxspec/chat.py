"""Chat templates, rendered so that no message can forge a control token."""

import datetime
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from jaxspec.errors import InputError
from jaxspec.tool_declarations import declare_tools, with_sorted_keys

__all__ = ["ROLES", "Message", "check_messages", "render_chat", "shown"]

Message = dict[str, Any]
"""`{"role": ..., "content": ...}` and whatever else the template reads."""

ROLES = ("system", "user", "assistant", "tool")


def check_messages(messages: Sequence[Any]) -> None:
    """Raises InputError for what is no message: an unknown role, or content that is not text.

    Content is text, or a list of `{"type": "text", "text": ...}`; with tool calls it may be absent.
    """
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f'expected objects with a "role", found {shown(message)}')
        if message["role"] not in ROLES:
            raise InputError(f"role {message['role']!r}: there are {', '.join(ROLES)}")
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, dict) and "type" in part and part["type"] != "text":
                raise InputError(
                    f"content of type {part['type']!r}: jaxspec reads text only, so far; its "
                    "targets see no images"
                )
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str) and content is not None:
                raise InputError(
                    f'content: expected text, or parts with a "type" and a "text", found '
                    f"{shown(part)}"
                )


def render_chat(
    template: str,
    messages: list[Message],
    control: Collection[str],
    variables: dict[str, Any],
    tools: Sequence[Any] = (),
    thinking: bool | None = None,
    begins_reply: bool = True,
) -> list[tuple[str, bool]]:
    """The conversation as pieces of (text, whether it is a control token), with the reply begun.

    Control tokens come from the template only. Before rendering, every character that could begin
    a control token's name is replaced, in the messages, by a private-use character that stands
    nowhere else; whatever control names the rendered text holds are then the template's, and the
    characters are put back in the text between them. So a template that searches its messages for
    a control token finds none.

    Args:
      control: names of the control tokens.
      variables: what else the template may read (`bos_token` and the like).
      tools: that the messages may call, in the form the template wants. A template that reads
        `tools_ts_str`, Kimi-K2.5's, gets their declarations in it.
      thinking: its variable of that name; None leaves it undefined.
      begins_reply: whether the reply is begun; a conversation that is over has all of its own.

    Raises:
      InputError: messages that `check_messages` refuses; the template is not Jinja, or refuses
        them itself; or it does not read tools, or thinking, where these are given.
    """
    import jinja2.meta
    import jinja2.sandbox

    check_messages(messages)
    openers = sorted({name[0] for name in control})
    asked: dict[str, Any] = {"tools": with_sorted_keys(list(tools))} if tools else {}
    if thinking is not None:
        asked["thinking"] = thinking
    declared = declare_tools(asked["tools"]) if tools else None
    masks = dict(zip(openers, _unused_characters(template, [messages, asked]), strict=False))
    to_mask, to_text = str.maketrans(masks), str.maketrans({m: c for c, m in masks.items()})
    # The environment that transformers gives to chat templates.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        read = jinja2.meta.find_undeclared_variables(environment.parse(template))
        rendered = environment.from_string(template).render(
            messages=_translated(messages, to_mask),
            add_generation_prompt=begins_reply,
            **variables,
            **_translated(asked, to_mask),
            **({} if declared is None else {"tools_ts_str": declared.translate(to_mask)}),
        )
    except Exception as error:  # whatever a template does wrong, it is the template's
        raise InputError(f"chat template: {type(error).__name__}: {error}") from error
    for name in asked:
        if name not in read:
            raise InputError(
                f"chat template: it reads no {name!r}, so this checkpoint knows nothing of it; "
                "leave it out"
            )
    # Longest first: where one name begins another, the longer is the one that is meant.
    names = sorted(control, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", rendered)
    pieces = [(part.translate(to_text), bool(i % 2)) for i, part in enumerate(parts)]
    return [piece for piece in pieces if piece[0]]


def _unused_characters(template: str, values: list[Any]) -> Iterator[str]:
    """Private-use characters that neither the template nor what it is given holds."""
    used = set(template) | set(json.dumps(values, ensure_ascii=False, default=str))
    return (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)


def _translated(value: Any, table: dict[int, str]) -> Any:
    """`value` with every string in it translated."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, dict):
        return {_translated(k, table): _translated(v, table) for k, v in value.items()}
    if isinstance(value, list):
        return [_translated(item, table) for item in value]
    return value


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None
) -> str:
    """JSON as transformers' templates get it: Jinja's own `tojson` escapes HTML."""
    if ensure_ascii:
        _raise("tojson(ensure_ascii=True) would escape the characters that mask control tokens")
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


def shown(value: Any) -> str:
    """A value as an error shows it: its JSON, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
