"""Kimi's tokenizer, read from a checkpoint directory: byte-level BPE through tiktoken.

Source: `tokenization_kimi.py`, class `TikTokenTokenizer`, of Moonshot AI's repositories. Text of a
user is never read as control: `encode` takes `<|im_end|>` in it for the ten characters it is, and
`encode_chat` takes control tokens from the chat template alone.
"""

import base64
import binascii
import codecs
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from jaxspec.chat import Message, render_chat
from jaxspec.errors import InputError

__all__ = ["TextStream", "Tokenizer", "load_tokenizer"]

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Where text is cut before merging; `&&` is class intersection in tiktoken's regex."""

NUM_SPECIAL = 256 + 2
"""Ids after the last rank that have a name: Kimi's reserved 256 and, as in its code, two more."""

MAX_TEXT = 400_000
"""Characters tiktoken is given at once; Kimi cuts longer text there, whatever stands there."""

MAX_RUN = 25_000
"""Characters of white space, or of anything else, in a row before Kimi cuts."""


class Tokenizer:
    """Text to ids and back.

    Attributes:
      directory: where it was read.
      chat_template: the checkpoint's own, in Jinja; None where it has none.
      special_ids: id of every special token by name, reserved ones included.
    """

    def __init__(
        self,
        ranks: dict[bytes, int],
        added: dict[int, dict[str, Any]],
        chat_template: str | None = None,
        template_variables: dict[str, Any] | None = None,
        directory: Path | None = None,
    ) -> None:
        """Of merge ranks and a `tokenizer_config.json`'s `added_tokens_decoder`."""
        first = len(ranks)
        names = {i: f"<|reserved_token_{i}|>" for i in range(first, first + NUM_SPECIAL)}
        names |= {i: entry["content"] for i, entry in added.items()}
        self.special_ids = {name: i for i, name in names.items()}
        self._names = names
        self.chat_template = chat_template
        self.directory = directory
        self._variables = template_variables or {}
        # Kimi marks <think> and </think> as not special: they are control, and yet shown as text.
        self._hidden = {i for i in names if added.get(i, {}).get("special", True)}
        self._encoding = tiktoken.Encoding(
            "kimi",
            pat_str=KIMI_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.special_ids,
        )

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; the name of a special token in it is text like any other.

        Raises:
          InputError: half a surrogate pair, which is no character: what Python makes of bytes on a
            command line that are not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"text that is not Unicode: {error}") from None
        encode = self._encoding.encode_ordinary
        return [i for piece in _cut(text) for i in encode(piece)]

    def encode_chat(
        self,
        messages: list[Message],
        tools: Sequence[Any] = (),
        thinking: bool | None = None,
        begins_reply: bool = True,
    ) -> list[int]:
        """The ids of a conversation in the checkpoint's own chat template, reply begun.

        Args:
          tools, thinking, begins_reply: see `render_chat`.

        Raises:
          InputError: there is no template, or these messages cannot be rendered with it.
        """
        if self.chat_template is None:
            raise InputError(
                f"{self.directory}: no chat template (neither chat_template.jinja nor "
                '"chat_template" in tokenizer_config.json), so messages cannot be rendered; give '
                "the prompt as text, or as ids with --tokens"
            )
        pieces = render_chat(
            self.chat_template,
            messages,
            self.special_ids,
            self._variables,
            tools,
            thinking,
            begins_reply,
        )
        return [i for piece in pieces for i in self._encode_piece(*piece)]

    def _encode_piece(self, text: str, is_control: bool) -> list[int]:
        return [self.special_ids[text]] if is_control else self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens are left out, bytes that are not UTF-8 are U+FFFD."""
        return self.bytes_of(ids).decode("utf-8", errors="replace")

    def piece(self, i: int) -> str:
        """What token `i` is, to be looked at: its text, or its name if it is a control token."""
        return self._names.get(i) or self.decode([i])

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`; an id without a token, as padded vocabularies have, is a U+FFFD."""
        return b"".join(self._bytes_of(i) for i in ids)

    def _bytes_of(self, i: int) -> bytes:
        if i in self._hidden:
            return b""
        try:
            return self._encoding.decode_single_token_bytes(i)
        except KeyError:
            return "\ufffd".encode()


class TextStream:
    """Text from ids that come a few at a time, never half a character.

    All the pieces together are `Tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete."""
        return self._decoder.decode(self._tokenizer.bytes_of(ids))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole, or nothing."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(directory: Path | str) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory; None where it has no `tiktoken.model`.

    Raises:
      InputError: a file of it is broken.
    """
    directory = Path(directory)
    vocabulary = directory / "tiktoken.model"
    if not vocabulary.is_file():
        return None
    config_path = directory / "tokenizer_config.json"
    config = _read_config(config_path) if config_path.is_file() else {}
    ranks = _read_ranks(vocabulary)
    added = {int(i): entry for i, entry in config.get("added_tokens_decoder", {}).items()}
    taken = sorted(i for i in added if i < len(ranks))
    if taken:
        raise InputError(
            f"{config_path}: special token {added[taken[0]]['content']!r} has id {taken[0]}, but "
            f"{vocabulary.name} gives ids 0 to {len(ranks) - 1} to ordinary tokens"
        )
    own = directory / "chat_template.jinja"
    template = own.read_text("utf-8") if own.is_file() else _template_in(config)
    variables = {key: _name(value) for key, value in config.items() if key.endswith("_token")}
    return Tokenizer(ranks, added, template, variables, directory)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error


def _template_in(config: dict[str, Any]) -> str | None:
    """The chat template in a `tokenizer_config.json`; where there are several, the default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _name(token: Any) -> Any:
    """A special token's name, which some configs wrap in an object."""
    return token["content"] if isinstance(token, dict) else token


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes -> rank of a `tiktoken.model`: a token in base64 and its rank on each line."""
    ranks = {}
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise InputError(
                f"{path}, line {number}: expected a base64 token and its rank, found {line[:60]!r}"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) != len(lines):
        raise InputError(
            f"{path}: tokens and ranks must differ, and ranks run from 0 without a gap"
        )
    return ranks


def _cut(text: str) -> Iterator[str]:
    """The pieces that are merged on their own: all of `text`, unless it is very long."""
    for start in range(0, len(text), MAX_TEXT):
        chunk = text[start : start + MAX_TEXT]
        cuts = [
            cut
            for run in re.finditer(r"\s+|\S+", chunk)
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN)
        ]
        for begin, end in itertools.pairwise([0, *cuts, len(chunk)]):
            yield chunk[begin:end]
