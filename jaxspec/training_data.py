"""What a draft is trained on: texts and conversations, as windows of ids.

All of it is in memory, five bytes a token; features that were recorded stay on disk. Batches come
by grain, which reads some ahead, and which comes when follows from the seed and its number alone: a
run that was killed needs no reader's state to go on.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import grain
import jax
import numpy as np

from jaxspec.chat import shown
from jaxspec.config import TargetConfig
from jaxspec.contracts import Features
from jaxspec.errors import InputError
from jaxspec.prompts import read_text, read_tokens, told_to_template, whole_conversation
from jaxspec.tokenizer import Tokenizer
from jaxspec.training import Batch

__all__ = ["Sample", "Windows", "read_samples"]

FEWEST = 3
"""Tokens of a window: one that is read, one that is fed, and what the target says after it."""
AHEAD = 2
"""Batches that are read while one is learned from."""
TEXTS = ("text", "prompt", "question")
JSON_LINES = (".jsonl", ".ndjson", ".json")


class Recorded(Protocol):
    """Features of windows, kept somewhere; see `features.FeaturesDirectory`."""

    @property
    def is_normed(self) -> bool: ...

    def read(self, rows: np.ndarray) -> tuple[Features, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """One text or conversation.

    Attributes:
      ids: [T] int32.
      is_learned: [T] whether what the target says after this token is learned: of a conversation,
        where it is the assistant's turn.
      where: what an error calls it.
    """

    ids: np.ndarray
    is_learned: np.ndarray
    where: str


@dataclasses.dataclass(frozen=True)
class Windows:
    """Pieces of samples, at most `length` tokens each.

    Attributes:
      tokens, is_learned: [n, length]; zero past the lengths.
      lengths: [n].
      where: of each, its sample and the position at which it begins there.
      recorded, rows: where features of theirs were recorded, and under which numbers; None where
        the target is to compute them.
    """

    tokens: np.ndarray
    is_learned: np.ndarray
    lengths: np.ndarray
    where: list[str]
    recorded: Recorded | None = None
    rows: np.ndarray | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], length: int, vocab_size: int) -> "Windows":
        """The windows of samples one after another. One in which nothing is learned is left out.

        Raises:
          InputError: nothing is left, or a token is none of the vocabulary's.
        """
        rows = []
        for sample in samples:
            wrong = sample.ids[(sample.ids < 0) | (sample.ids >= vocab_size)]
            if len(wrong):
                raise InputError(
                    f"{sample.where}: token id {wrong[0]}, but the target's vocabulary has ids 0 "
                    f"to {vocab_size - 1}"
                )
            for start in range(0, len(sample.ids), length):
                ids, is_learned = (
                    part[start : start + length] for part in (sample.ids, sample.is_learned)
                )
                if len(ids) >= FEWEST and is_learned[1:].any():
                    rows.append((ids, is_learned, f"{sample.where}, token {start}"))
        if not rows:
            raise InputError(
                f"nothing to learn from: of {len(samples)} samples, none has {FEWEST} tokens with "
                "something in them that the target would say (text, or an assistant's turn)"
            )
        tokens = np.zeros((len(rows), length), np.int32)
        mask = np.zeros((len(rows), length), bool)
        for row, (ids, is_learned, _) in enumerate(rows):
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids, is_learned
        lengths = np.array([len(ids) for ids, _, _ in rows], np.int32)
        return cls(tokens, mask, lengths, [where for _, _, where in rows])

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: Any) -> "Windows":
        """Some of them."""
        rows = np.arange(len(self))[rows]
        where = [self.where[row] for row in rows]
        kept = None if self.rows is None else self.rows[rows]
        return Windows(
            self.tokens[rows], self.is_learned[rows], self.lengths[rows], where, self.recorded, kept
        )

    def batch(self, rows: np.ndarray) -> Batch:
        """Some of them as a batch."""
        given = self.tokens[rows], self.lengths[rows], self.is_learned[rows]
        if self.recorded is None or self.rows is None:
            return Batch(*given)
        features, hidden = self.recorded.read(self.rows[rows])
        return Batch(*given, features, hidden, self.recorded.is_normed)

    def batches(
        self, batch_size: int, seed: int, begin: int, end: int
    ) -> Iterator[tuple[np.ndarray, Batch]]:
        """The batches of a run from one to another, each with the windows that are in it.

        Each window comes once, in another order each time around, without those that are left of a
        batch.
        """
        rows = (
            grain.MapDataset.range(len(self)).shuffle(seed).batch(batch_size, drop_remainder=True)
        )
        chosen = rows.repeat()[begin:end]
        ahead = grain.ReadOptions(num_threads=AHEAD, prefetch_buffer_size=AHEAD)
        return iter(chosen.map(lambda of: (of, self.batch(of))).to_iter_dataset(ahead))

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """All of them, the last batch filled up with empty windows, of which nothing counts."""
        for first in range(0, len(self), batch_size):
            rows = np.arange(first, min(first + batch_size, len(self)))
            missing = batch_size - len(rows)

            def filled(array: np.ndarray, missing: int = missing) -> np.ndarray:
                return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))

            yield jax.tree.map(filled, self.batch(rows))

    def frequent_ids(self, vocab_size: int, count: int) -> np.ndarray:
        """The ids that come oftest where something is learned, ascending; of equals the lowest."""
        is_next = np.pad(self.is_learned[:, :-1], [(0, 0), (1, 0)])
        is_next &= np.arange(self.tokens.shape[1]) < self.lengths[:, None]
        counts = np.bincount(self.tokens[is_next], minlength=vocab_size)
        return np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int32)

    @property
    def digest(self) -> str:
        """What tells them from others."""
        found = hashlib.sha256(np.ascontiguousarray(self.tokens).tobytes())
        found.update(self.is_learned.tobytes() + self.lengths.tobytes())
        return found.hexdigest()[:12]


def read_samples(
    path: Path, tokenizer: Tokenizer | None, target: TargetConfig, is_tokens: bool = False
) -> list[Sample]:
    """The samples of a file: one text, JSON lines, or lists of ids.

    JSON lines (the file's name says so, or its first line is an object) hold on each line an object
    with `messages` or `conversations` (ShareGPT), of which the assistant's turns are learned, or
    with `text`, `prompt` or `question`, of which all is. `tools` and `thinking` stand beside turns,
    as in a prompt file. Any other file is one text. A text ends with the target's end of sequence.

    Args:
      is_tokens: the file is a JSON list of lists of ids, and all of them are learned.

    Raises:
      InputError: names the file, the line, and what is wrong there.
    """
    if is_tokens:
        return [_all_of(prompt.ids or (), prompt.where) for prompt in read_tokens(path)]
    if tokenizer is None:
        raise InputError(
            f"{path}: the target's directory has no tiktoken.model, so text cannot become ids; "
            "give ids with --tokens"
        )
    text = read_text(path)
    end = target.eos_token_ids[:1]
    if not _is_json_lines(path, text):
        return [_all_of((*tokenizer.encode(text), *end), str(path))]
    samples = []
    # Only a newline ends a line: JSON may hold other separators as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            samples.append(_from_line(line, tokenizer, end, where))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    if not samples:
        raise InputError(f"{path}: no line in it")
    return samples


def _is_json_lines(path: Path, text: str) -> bool:
    if path.suffix in JSON_LINES:
        return True
    try:
        return isinstance(json.loads(text.partition("\n")[0]), dict)
    except ValueError:
        return False


def _from_line(line: str, tokenizer: Tokenizer, end: tuple[int, ...], where: str) -> Sample:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError(f"not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise InputError(f"expected an object, found {shown(entry)}")
    turns = whole_conversation(entry)
    if turns is not None:
        return _of_conversation(turns, told_to_template(entry), tokenizer, where)
    form = next((key for key in TEXTS if key in entry), None)
    if form is None or not isinstance(entry[form], str):
        found = ", ".join(entry) if form is None else f"{form!r}: {shown(entry[form])}"
        raise InputError(
            f"expected messages, conversations, or a text under {', '.join(TEXTS)}; found {found}"
        )
    return _all_of((*tokenizer.encode(entry[form]), *end), where)


def _all_of(ids: Sequence[int], where: str) -> Sample:
    return Sample(np.array(ids, np.int32), np.ones(len(ids), bool), where)


def _of_conversation(
    turns: list[Any], told: dict[str, Any], tokenizer: Tokenizer, where: str
) -> Sample:
    """A conversation, of which the assistant's turns are learned.

    A turn that the template writes otherwise once others follow, as some do with its thinking, is
    not what the target said there, and is not learned.
    """
    ids = tokenizer.encode_chat(turns, **told, begins_reply=False)
    is_said = np.zeros(len(ids), bool)
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant" or not index:
            continue
        until = tokenizer.encode_chat(turns[: index + 1], **told, begins_reply=False)
        if ids[: len(until)] != until:
            continue
        before = tokenizer.encode_chat(turns[:index], **told)
        same = (a == b for a, b in zip(before, ids, strict=False))
        begin = next((i for i, is_same in enumerate(same) if not is_same), len(before))
        is_said[begin : len(until)] = True
    return Sample(np.array(ids, np.int32), np.append(is_said[1:], False), where)
