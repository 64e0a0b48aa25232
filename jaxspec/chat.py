"""Chat templates, rendered so that no message can forge a control token."""

import datetime
import json
import re
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from jaxspec.errors import InputError

__all__ = ["Message", "render_chat"]

Message = dict[str, Any]
"""`{"role": ..., "content": ...}` and whatever else the template reads."""


def render_chat(
    template: str, messages: list[Message], control: Collection[str], variables: dict[str, Any]
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

    Raises:
      InputError: the template is not Jinja, or refuses these messages.
    """
    import jinja2
    import jinja2.sandbox

    openers = sorted({name[0] for name in control})
    masks = dict(zip(openers, _unused_characters(template, messages), strict=False))
    to_mask, to_text = str.maketrans(masks), str.maketrans({m: c for c, m in masks.items()})
    # The environment that transformers gives to chat templates.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        rendered = environment.from_string(template).render(
            messages=_translated(messages, to_mask), add_generation_prompt=True, **variables
        )
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"chat template: {type(error).__name__}: {error}") from error
    # Longest first: where one name begins another, the longer is the one that is meant.
    names = sorted(control, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", rendered)
    pieces = [(part.translate(to_text), bool(i % 2)) for i, part in enumerate(parts)]
    return [piece for piece in pieces if piece[0]]


def _unused_characters(template: str, messages: list[Message]) -> Iterator[str]:
    """Private-use characters that neither the template nor a message holds."""
    used = set(template) | set(json.dumps(messages, ensure_ascii=False, default=str))
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


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
