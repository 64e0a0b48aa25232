"""Whether a run's answers are right: exact match on GSM8K."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from jaxspec.aliases import PathLike
from jaxspec.errors import InputError
from jaxspec.prompts import read_text
from jaxspec.run_comparison import Entry, read_run

__all__ = ["Score", "ScoreGroup", "score_gsm8k"]

GOLD = re.compile(r"#### (-?[0-9.,]+)")
"""Where an answer of GSM8K states its number (openai/grade-school-math, `dataset.py`)."""
NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
NORMAL_95 = 1.959963984540054


@dataclasses.dataclass(frozen=True)
class ScoreGroup:
    """The requests of a category, or all of them.

    Attributes:
      num_correct: whose last number is the gold one.
      num_without_number: of the wrong ones, those whose text holds no number at all.
      num_unfinished: of the wrong ones, those that ran out of tokens: a longer limit may mend them.
    """

    name: str
    num_requests: int
    num_correct: int
    num_without_number: int
    num_unfinished: int

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_requests

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval of the accuracy, 95 % (JASA 22, 1927, p. 209)."""
        n, z = self.num_requests, NORMAL_95
        share = self.num_correct / n
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        away = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
        return max(middle - away, 0.0), min(middle + away, 1.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "accuracy": self.accuracy,
            "interval": list(self.interval),
        }


@dataclasses.dataclass(frozen=True)
class Score:
    """What a run got right.

    Attributes:
      groups: all requests first, then each category, if there are some.
      num_not_run: answers of which the run holds no request.
      wrong: ids of the requests that are not right, and the number that was read in each.
    """

    run: Path
    answers: Path
    groups: tuple[ScoreGroup, ...]
    num_not_run: int
    wrong: dict[str, str | None]

    def finding(self) -> str:
        """The verdict in a sentence."""
        whole = self.groups[0]
        low, high = whole.interval
        text = (
            f"{whole.num_correct} of {whole.num_requests} right: {whole.accuracy:.1%}, "
            f"95 % between {low:.1%} and {high:.1%}"
        )
        if whole.num_unfinished:
            text += f"; {whole.num_unfinished} of the wrong ones ran out of tokens"
        if self.num_not_run:
            text += f"; {self.num_not_run} questions are not in the run"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return {
            "kind": "gsm8k",
            "run": str(self.run),
            "answers": str(self.answers),
            "groups": [group.to_dict() for group in self.groups],
            "accuracy": self.groups[0].accuracy,
            "num_not_run": self.num_not_run,
            "wrong": self.wrong,
            "finding": self.finding(),
        }


def score_gsm8k(
    run: PathLike, answers: PathLike, decode: Callable[[Sequence[int]], str] | None = None
) -> Score:
    """The exact-match accuracy of a run on GSM8K's questions.

    The last number of a text is its answer, whatever stands before it (the lm-evaluation-harness
    calls that `flexible-extract`); dollar signs and the commas of thousands are dropped, and
    numbers are compared as numbers: 42.00 is 42.

    Args:
      answers: JSON lines as GSM8K has them: `{"question", "answer": "... #### 42"}`, and an `id`
        as in the prompt file that was run. Without one the line's number from 0 is its id, as it
        is for prompts.
      decode: text of ids, for a run whose lines hold no `text`.

    Raises:
      InputError: a file cannot be read, a line's answer states no number, a request is of no
        answer, or there is no text and nothing to decode ids with.
    """
    run, answers = Path(run), Path(answers)
    _, entries = read_run(run)
    gold = _read_answers(answers)
    if not entries:
        raise InputError(f"{run}: holds no request, so there is nothing to score")
    strangers = [id for id in entries if id not in gold]
    if strangers:
        raise InputError(
            f"{run}: {len(strangers)} of {len(entries)} requests, as {strangers[0]!r}, have no "
            f"answer in {answers}, whose ids begin {', '.join(map(repr, list(gold)[:3]))}: "
            "expected the answers of the prompts that were run, with the same ids"
        )
    said = {id: last_number(_text(run, one, decode)) for id, one in entries.items()}
    wrong = {id: number for id, number in said.items() if not _is_equal(number, gold[id])}

    def group(name: str, ids: Sequence[str]) -> ScoreGroup:
        missed = [id for id in ids if id in wrong]
        return ScoreGroup(
            name,
            len(ids),
            len(ids) - len(missed),
            sum(wrong[id] is None for id in missed),
            sum(entries[id].finish in ("length", "capacity") for id in missed),
        )

    groups = [group("all", list(entries))]
    for category in sorted({one.category for one in entries.values() if one.category is not None}):
        groups.append(
            group(category, [i for i, one in entries.items() if one.category == category])
        )
    return Score(run, answers, tuple(groups), len(gold) - len(entries), wrong)


def last_number(text: str) -> str | None:
    """The last number of a text, without dollar signs and commas; None where there is none.

    A hyphen right after a digit or letter is none of its sign: of `3-5` it is 5.
    """
    found = next(reversed(list(NUMBER.finditer(text))), None)
    if found is None:
        return None
    number = found[0].replace("$", "").replace(",", "")
    is_joined = found.start() > 0 and text[found.start() - 1].isalnum()
    return number.removeprefix("-") if is_joined else number


def _is_equal(number: str | None, gold: Decimal) -> bool:
    return number is not None and Decimal(number) == gold


def _text(run: Path, entry: Entry, decode: Callable[[Sequence[int]], str] | None) -> str:
    if entry.text is not None:
        return entry.text
    if decode is None:
        raise InputError(
            f"{run}: request {entry.id!r} holds no text, only ids; give the target whose tokenizer "
            "decodes them, --target DIR"
        )
    return decode(entry.output_ids)


def _read_answers(path: Path) -> dict[str, Decimal]:
    """The gold number of each id."""
    gold: dict[str, Decimal] = {}
    for number, line in enumerate(read_text(path).split("\n")):
        if not line.strip():
            continue
        where = f"{path}, line {number + 1}"
        try:
            entry = json.loads(line)
            id, answer = str(entry.get("id", entry.get("question_id", number))), entry["answer"]
            stated = GOLD.findall(answer)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            expected = '{"question": ..., "answer": "... #### 42"}'
            raise InputError(f"{where}: expected GSM8K's {expected} ({error!r})") from error
        value = last_number(stated[-1]) if stated else None
        if value is None:
            raise InputError(f"{where}: its answer states no number after ####")
        if id in gold:
            raise InputError(f"{where}: a second answer of id {id!r}")
        gold[id] = Decimal(value)
    return gold
