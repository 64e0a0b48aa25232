"""Two run files, request by request: where the tokens part, and whether acceptance differs."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.aliases import PathLike
from jaxspec.errors import InputError
from jaxspec.figures import ratio
from jaxspec.runfile import FORMAT

__all__ = [
    "Difference",
    "Entry",
    "Estimate",
    "Group",
    "RunComparison",
    "compare_runs",
    "difference_interval",
    "read_run",
]

RESAMPLES = 2000
"""Of the requests, for an interval."""
FEWEST = 8
"""Requests, below which resampling them says nothing of what others would do."""

Question = tuple[list[int], tuple[int, int]]
Margins = Callable[[list[Question]], list[float]]
"""Of each (ids before them, two tokens): the distance of the tokens' logits after those ids."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One request of a run file.

    Attributes:
      accepted: drafted tokens, in each of its verify steps.
      finish, text: None where the file does not say.
    """

    id: str
    category: str | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    decode_ms: float | None
    finish: str | None = None
    text: str | None = None


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a request's tokens part.

    Attributes:
      index: of the first output token that differs; a text that ended earlier has None there.
      margin: distance of the two tokens' logits in the target; None where it was not asked for,
        or one text has simply ended.
    """

    id: str
    index: int
    a: int | None
    b: int | None
    margin: float | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure of each run.

    Attributes:
      difference: a - b.
      interval: of the difference, 95 % over requests; None for fewer than `FEWEST` of them.
    """

    a: float
    b: float
    difference: float
    interval: tuple[float, float] | None

    @property
    def differs(self) -> bool | None:
        """Whether zero is outside the interval of the difference; None without one."""
        return None if self.interval is None else not self.interval[0] <= 0 <= self.interval[1]

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "differs": self.differs}


@dataclasses.dataclass(frozen=True)
class Group:
    """The requests of a category, or all of them.

    Attributes:
      accept_length: tokens emitted by verify steps per verify step; None without steps.
      accept_per_depth: share of steps that accepted so many drafted tokens or more.
      ms_per_step, tokens_per_s: of a request, from its first token to its last, the mean over
        those that both runs timed; what others in its batch got meanwhile does not count, so that
        it is not a run's throughput. None without times.
    """

    name: str
    num_requests: int
    accept_length: Estimate | None
    accept_per_depth: tuple[Estimate, ...]
    ms_per_step: Estimate | None
    tokens_per_s: Estimate | None

    def to_dict(self) -> dict[str, Any]:
        figures = {
            name: None if one is None else one.to_dict()
            for name in ("accept_length", "ms_per_step", "tokens_per_s")
            for one in (getattr(self, name),)
        }
        per_depth = [one.to_dict() for one in self.accept_per_depth]
        return {
            "name": self.name,
            "num_requests": self.num_requests,
            "accept_per_depth": per_depth,
            **figures,
        }


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """Two runs of the same requests.

    Attributes:
      headers: the files' first lines.
      num_equal: requests whose tokens are the same.
      only_in: requests that only one file has, by file.
      tie: a margin below which a difference is no finding; None where no margins were asked for.
    """

    a: Path
    b: Path
    headers: tuple[dict[str, Any], dict[str, Any]]
    num_requests: int
    num_equal: int
    differences: tuple[Difference, ...]
    groups: tuple[Group, ...]
    only_in: dict[str, tuple[str, ...]]
    tie: float | None

    @property
    def num_ties(self) -> int:
        """Differences that a near-tie of the logits explains."""
        tie = self.tie
        if tie is None:
            return 0
        return sum(d.margin is not None and d.margin <= tie for d in self.differences)

    @property
    def holds(self) -> bool:
        """Whether both have the same requests, and the same tokens but for near-ties."""
        is_whole = not any(self.only_in.values())
        return self.num_requests > 0 and is_whole and len(self.differences) == self.num_ties

    @property
    def flags_that_differ(self) -> dict[str, tuple[Any, Any]]:
        """What the two headers say otherwise, but for the engine, its version and the machine.

        Of two engines, what both of them say: each has flags of its own, and not all name hashes.
        """
        said = []
        for header in self.headers:
            hashes = {name: header.get(name) for name in ("target_hash", "draft_hash")}
            known = {name: hash for name, hash in hashes.items() if hash is not None}
            said.append({**header.get("flags", {}), **known})
        names = said[0].keys() | said[1].keys()
        if self.headers[0].get("engine") != self.headers[1].get("engine"):
            names = said[0].keys() & said[1].keys()
        pairs = {name: (said[0].get(name), said[1].get(name)) for name in sorted(names)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def finding(self) -> str:
        """The verdict in a sentence."""
        text = f"{self.num_equal} of {self.num_requests} requests have the same tokens"
        if self.differences and self.tie is None:
            text += "; whether the others part at near-ties, --target DIR tells"
        elif self.differences:
            text += (
                f"; of the others {self.num_ties} part at a near-tie (margin up to {self.tie:g})"
            )
        for path, ids in self.only_in.items():
            if ids:
                text += f"; requests only in {path}: {len(ids)}"
        whole = self.groups[0].accept_length if self.groups else None
        if whole is not None:
            both = f"{whole.a:.3f} and {whole.b:.3f}"
            if whole.interval is None:
                text += f"; accept_length {both}, of too few requests to say whether it differs"
            else:
                verdict = "differs" if whole.differs else "does not differ"
                low, high = whole.interval
                text += (
                    f"; accept_length {verdict}: {both}, a - b between {low:+.3f} and {high:+.3f}"
                )
        if self.flags_that_differ:
            said = (f"{name} {a!r} and {b!r}" for name, (a, b) in self.flags_that_differ.items())
            text += f"; the runs were asked for other things: {', '.join(said)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        found = dataclasses.asdict(self)
        found |= {"a": str(self.a), "b": str(self.b), "headers": list(self.headers)}
        found["only_in"] = {path: list(ids) for path, ids in self.only_in.items()}
        found["groups"] = [group.to_dict() for group in self.groups]
        return {
            "kind": "runs",
            **found,
            "num_ties": self.num_ties,
            "flags_that_differ": {name: list(x) for name, x in self.flags_that_differ.items()},
            "finding": self.finding(),
            "holds": self.holds,
        }


def read_run(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """A run file's header, and its requests by id.

    Raises:
      InputError: it is none, or a line is damaged.
    """
    try:
        text = path.read_text("utf-8")
        # Only a newline ends a line: JSON may hold other separators as they are.
        first, *lines = text.split("\n")
        header = json.loads(first)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON lines ({error})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise InputError(f"{path}: its first line does not say format {FORMAT!r}: no run file")
    if lines and lines[-1]:
        raise InputError(
            f"{path}: its last line is cut off, so the run was interrupted; run it again with the "
            "same --out, and it goes on"
        )
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines[:-1], start=2):
        try:
            entry = _entry(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}, line {number}: damaged ({error!r})") from error
        if entry.id in entries:
            raise InputError(f"{path}, line {number}: a second request {entry.id!r}")
        entries[entry.id] = entry
    return header, entries


def _entry(found: dict[str, Any]) -> Entry:
    """A request's line; raises ValueError, TypeError or KeyError for what cannot be one."""
    category, accepted = found.get("category"), tuple(map(int, found.get("accepted") or ()))
    if min(accepted, default=0) < 0:
        raise ValueError(f"accepted is {list(accepted)}")
    finish, text = found.get("finish"), found.get("text")
    return Entry(
        str(found["id"]),
        None if category is None else str(category),
        tuple(map(int, found["prompt_ids"])),
        tuple(map(int, found["output_ids"])),
        accepted,
        None if found.get("decode_ms") is None else float(found["decode_ms"]),
        None if finish is None else str(finish),
        None if text is None else str(text),
    )


def compare_runs(
    a: PathLike, b: PathLike, margins: Margins | None = None, tie: float | None = None
) -> RunComparison:
    """The comparison of the requests that both files hold.

    Args:
      margins: of the logits where two texts part; None leaves them unknown.
      tie: the margin up to which it is a near-tie.

    Raises:
      InputError: a file is no run file, or a request has two prompts.
    """
    a, b = Path(a), Path(b)
    (header_a, run_a), (header_b, run_b) = read_run(a), read_run(b)
    for path, header in ((a, header_a), (b, header_b)):
        if margins is not None and header.get("flags", {}).get("temperature"):
            raise InputError(
                f"{path} was sampled: logits alone do not tell a near-tie there, so that margins "
                "are of greedy runs"
            )
    both = [id for id in run_a if id in run_b]
    for id in both:
        if run_a[id].prompt_ids != run_b[id].prompt_ids:
            raise InputError(
                f"{a} and {b}: request {id!r} has another prompt in each: runs of other prompts "
                "cannot be compared"
            )
    pairs = [(run_a[id], run_b[id]) for id in both]
    differences = _differences(pairs, margins)
    groups = [_group("all", pairs)] if pairs else []
    categories = sorted({one.category for one, _ in pairs if one.category is not None})
    for category in categories:
        groups.append(_group(category, [pair for pair in pairs if pair[0].category == category]))
    only_in = {
        str(path): tuple(id for id in run if id not in other)
        for path, run, other in ((a, run_a, run_b), (b, run_b, run_a))
    }
    return RunComparison(
        a,
        b,
        (header_a, header_b),
        len(pairs),
        len(pairs) - len(differences),
        tuple(differences),
        tuple(groups),
        only_in,
        tie,
    )


def _differences(pairs: Sequence[tuple[Entry, Entry]], margins: Margins | None) -> list[Difference]:
    found, questions = [], []
    for one, other in pairs:
        a, b = one.output_ids, other.output_ids
        if a == b:
            continue
        index = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        tokens = tuple(ids[index] if index < len(ids) else None for ids in (a, b))
        found.append(Difference(one.id, index, *tokens, margin=None))
        questions.append(([*one.prompt_ids, *a[:index]], tokens))
    if margins is None:
        return found
    asked = [i for i, (_, tokens) in enumerate(questions) if None not in tokens]
    for i, margin in zip(asked, margins([questions[i] for i in asked]), strict=True):
        found[i] = dataclasses.replace(found[i], margin=margin)
    return found


def _group(name: str, pairs: Sequence[tuple[Entry, Entry]]) -> Group:
    """The figures of requests, each a ratio of sums over them; intervals by resampling requests,
    the same ones for both runs."""

    def estimate(
        above: Callable[[Entry], float],
        below: Callable[[Entry], float],
        pairs: Sequence[tuple[Entry, Entry]] = pairs,
    ) -> Estimate | None:
        if not pairs:
            return None
        values = [
            (np.array([above(e) for e in side]), np.array([below(e) for e in side], float))
            for side in zip(*pairs, strict=True)
        ]
        a, b = (ratio(float(x.sum()), float(y.sum())) for x, y in values)
        if a is None or b is None:
            return None
        return Estimate(a, b, a - b, difference_interval(*values))

    deepest = max((n for pair in pairs for entry in pair for n in entry.accepted), default=0)
    per_depth = [
        estimate(lambda entry, d=depth: sum(n >= d for n in entry.accepted), _steps)
        for depth in range(1, deepest + 1)
    ]
    timed = [pair for pair in pairs if all(_decode_ms(entry) > 0 for entry in pair)]
    return Group(
        name,
        len(pairs),
        estimate(_decoded, _steps),
        tuple(one for one in per_depth if one is not None),
        estimate(_decode_ms, _steps, timed),
        estimate(_decoded, lambda entry: _decode_ms(entry) / 1e3, timed),
    )


def difference_interval(
    one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float] | None:
    """Where the difference of two figures lies, 95 %, by resampling requests, the same for both.

    None for fewer than `FEWEST` requests.

    Args:
      one, other: each a figure that is a quotient of sums: its two parts [requests].
    """
    num_requests = len(one[0])
    if num_requests < FEWEST:
        return None
    chosen = np.random.default_rng(0).integers(num_requests, size=(RESAMPLES, num_requests))
    drawn = []
    for above, below in (one, other):
        total = below[chosen].sum(axis=1)
        drawn.append(above[chosen].sum(axis=1) / np.where(total == 0, np.nan, total))
    low, high = np.nanpercentile(drawn[0] - drawn[1], [2.5, 97.5])
    return float(low), float(high)


def _steps(entry: Entry) -> int:
    return len(entry.accepted)


def _decoded(entry: Entry) -> int:
    """Tokens from steps: all but the first, which comes from prefill."""
    return max(len(entry.output_ids) - 1, 0)


def _decode_ms(entry: Entry) -> float:
    return entry.decode_ms or 0.0
