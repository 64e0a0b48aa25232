"""Which tree is fastest here: acceptance of a whole grid from one pass, step times of some of it.

    texts    the target writes on, by plain decoding: with any tree the tokens are these
    walk     what every tree of the grid accepts along them (walk.py)
    trees    a few corners of the grid are timed, and the times of all others guessed from those;
             what promises most is timed in earnest
    rounds   in each, every tree and plain decoding once, on the same texts, with all places running
    whole    the fastest against plain decoding, over whole texts, with fresh times

What is compared was timed in the same round: what else the machine does then falls on all.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxspec.aliases import Progress
from jaxspec.config import TreeConfig
from jaxspec.doctor_texts import Text, loop_start, write_on
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.prompts import EncodedPrompt
from jaxspec.report import command, machine
from jaxspec.requests import Request
from jaxspec.sweep_log import SweepLog
from jaxspec.sweep_report import PLAIN, SweepReport, report_of
from jaxspec.target import Target
from jaxspec.text import SamplingConfig
from jaxspec.version import version
from jaxspec.walk import Walker, steps_along

__all__ = ["DEFAULT_GRID", "SweepConfig", "grid", "measure", "sweep"]

NO_ENV: Mapping[str, str] = MappingProxyType({})
NUM_CORNERS = 5
CORNER_ROUNDS = 3
MOST_STEPS = 32
"""In one timed call of a step."""
FEWEST_JUDGED = 8
"""Tokens of a prompt below which it cannot be told from random ones by itself."""
MOST_NAMED = 16
"""Trees whose names all stand in a log's first line."""
WALK_BATCH = 32
"""Texts at a time."""


def grid(
    levels: Sequence[int], branches: Sequence[int], nodes: Sequence[int]
) -> tuple[TreeConfig, ...]:
    """All trees of these sizes that there are; of a chain, the one that all its levels fit in.

    Raises:
      InputError: there is none.
    """
    found = []
    for depth, width, size in itertools.product(levels, branches, nodes):
        tree = TreeConfig(depth, width, depth + 1 if width == 1 else size)
        # A tree that has no node for each of its levels is one of fewer levels, and slower.
        if tree.nodes > tree.levels and tree.nodes - 1 <= tree.num_candidates:
            tree.check()
            found.append(tree)
    if not found:
        raise InputError("there is no tree of these levels, branches and nodes")
    return tuple(dict.fromkeys(found))


DEFAULT_GRID = grid(range(1, 11), (1, 2, 4, 8), (3, 4, 6, 8, 12, 16, 24, 32))


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """What is measured.

    Attributes:
      trees: whose acceptance is measured.
      batch_sizes: for each of them the fastest is found.
      max_new_tokens: of a text.
      temperature: of its tokens; 0 is greedy.
      rounds: of timing.
      num_timed: trees that are timed at a batch size, besides the corners of the grid; a grid of
        no more than both is timed whole.
    """

    trees: tuple[TreeConfig, ...] = DEFAULT_GRID
    batch_sizes: tuple[int, ...] = (1, 4)
    max_new_tokens: int = 96
    temperature: float = 0.0
    rounds: int = 6
    num_timed: int = 4

    def check(self) -> None:
        """Raises InputError for what cannot be measured."""
        if not self.trees or not self.batch_sizes:
            raise InputError("there is nothing to sweep: no tree, or no batch size")
        for tree in self.trees:
            tree.check()
        for name, least in (("max_new_tokens", 16), ("rounds", 1), ("num_timed", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it starts at {least}")
        if min(self.batch_sizes) < 1:
            raise InputError(f"batch_sizes are {self.batch_sizes}; they start at 1")
        Request((0,), self.temperature).check_settings()

    def num_steps(self, tree: TreeConfig | None) -> int:
        """Of a timed call: so many that no text can end before."""
        levels = 0 if tree is None else tree.levels
        return min(MOST_STEPS, (self.max_new_tokens - 1) // (levels + 1) or 1)


DEFAULT_CONFIG = SweepConfig()


def sweep(
    target: Target,
    draft: Draft,
    prompts: Sequence[Text],
    config: SweepConfig = DEFAULT_CONFIG,
    *,
    out: Path | None = None,
    progress: Progress | None = None,
) -> SweepReport:
    """The fastest tree of each batch size, and the acceptance of all of them.

    Args:
      out: a file of JSON lines; the same sweep, interrupted, goes on with it.
      progress: called with what is done, and how much of how much.

    Raises:
      ContractError: draft and target do not belong together.
      InputError: a config that cannot run, prompts that are no text to this target, too few texts
        that do not loop, or `out` is of another sweep.
    """
    log = measure(target, draft, prompts, config, out=out, progress=progress)
    return report_of(log.header, log.entries, command())


def measure(
    target: Target,
    draft: Draft,
    prompts: Sequence[Text],
    config: SweepConfig,
    *,
    out: Path | None = None,
    env: Mapping[str, str] = NO_ENV,
    num_rounds: int | None = None,
    progress: Progress | None = None,
) -> SweepLog:
    """The log of a sweep; see `sweep`, which reports on it.

    Args:
      env: environment variables that this process was started with, under which it is filed.
      num_rounds: stop after so many; None is all of them.
    """
    config.check()
    target.asked_for(draft.config.boundaries).require(draft.config.boundaries, "sweep")
    log = SweepLog(_header(target, draft, prompts, config), out)
    show = progress or (lambda *_: None)
    texts = _texts(log, target, draft, prompts, config, show)
    num_rounds = config.rounds if num_rounds is None else min(num_rounds, config.rounds)
    for batch_size in config.batch_sizes:
        if batch_size > len(texts):
            raise InputError(
                f"batch size {batch_size}: only {len(texts)} texts do not loop, and a text in two "
                "places would share its experts: give more prompts"
            )
        timer = _Timer(target, draft, config, texts, batch_size, log, dict(env), show)
        timer.run(num_rounds)
    return log


def _header(
    target: Target, draft: Draft, prompts: Sequence[Text], config: SweepConfig
) -> dict[str, Any]:
    asked = json.dumps([[prompt.id, prompt.ids] for prompt in prompts])
    mesh = target.numerics.mesh
    flags = {
        **dataclasses.asdict(config),
        "trees": _named(config.trees),
        "batch_sizes": list(config.batch_sizes),
        "dtype": target.numerics.dtype,
        "mesh": None if mesh is None else f"{mesh} {mesh.cache}",
        "prompts": hashlib.sha256(asked.encode()).hexdigest()[:12],
    }
    return {
        "version": version(),
        "target_hash": target.identity,
        "draft_hash": draft.identity,
        "machine": machine(),
        "flags": flags,
    }


def _named(trees: Sequence[TreeConfig]) -> str:
    """All of them, or of many how many and which."""
    names = " ".join(map(str, trees))
    if len(trees) <= MOST_NAMED:
        return names
    return f"{len(trees)} ({hashlib.sha256(names.encode()).hexdigest()[:12]})"


def _texts(
    log: SweepLog,
    target: Target,
    draft: Draft,
    prompts: Sequence[Text],
    config: SweepConfig,
    show: Progress,
) -> list[dict[str, Any]]:
    """The texts that do not loop, written and walked along, unless the log has them.

    Raises:
      InputError: the prompts are no text, or all that is written loops.
    """
    batch = min(len(prompts), WALK_BATCH)
    slots = max((len(prompt.ids) for prompt in prompts), default=0) + config.max_new_tokens
    walker = Walker(target, draft, slots, config.max_new_tokens - 1, batch)
    entry = log.find("texts")
    if entry is None:
        surprise, uniform = _surprise(walker, prompts, target.config.vocab_size)
        show("the target writes", 0, 1)
        asked = [EncodedPrompt(prompt.id, prompt.ids) for prompt in prompts]
        sampling = SamplingConfig(config.temperature)
        written = write_on(target, asked, None, sampling, config.max_new_tokens, batch)
        show("the target writes", 1, 1)
        texts = [
            {
                "id": text.id,
                "seed": seed,
                "prompt_ids": list(text.ids[: text.prompt_len]),
                "output_ids": list(text.ids[text.prompt_len :]),
                # A text of one token has no step.
                "loops": loop_start(text.ids) is not None or len(text.ids) < text.prompt_len + 2,
            }
            for seed, text in enumerate(written)
        ]
        entry = log.append("texts", texts=texts, surprise=surprise, uniform=uniform)
    kept = [text for text in entry["texts"] if not text["loops"]]
    if not kept:
        raise InputError(
            f"all of {len(entry['texts'])} texts repeat themselves, which any draft foresees: give "
            "other prompts, or a temperature"
        )
    if log.find("walk") is None:
        pairs = [(text["prompt_ids"], text["output_ids"]) for text in kept]
        accepted = walker.accepted(pairs, config.trees, show)
        steps = {
            str(tree): [steps_along(of_text) for of_text in some] for tree, some in accepted.items()
        }
        log.append("walk", steps=steps)
    return kept


def _surprise(walker: Walker, prompts: Sequence[Text], vocab_size: int) -> tuple[float, float]:
    """Nats a token that the target finds in the prompts, and that uniform guessing would.

    Raises:
      InputError: no prompt, or some that are to the target what random tokens are.
    """
    if not prompts:
        raise InputError("there is no prompt")
    uniform = math.log(vocab_size)
    lengths = np.array([len(prompt.ids) - 1 for prompt in prompts])
    found = np.nan_to_num(walker.surprise([prompt.ids for prompt in prompts]))
    mean = float((found * lengths).sum() / max(lengths.sum(), 1))
    random = [
        f"{prompt.id!r} {nats:.2f}"
        for prompt, nats, length in zip(prompts, found, lengths, strict=True)
        if nats >= uniform and length >= FEWEST_JUDGED
    ]
    if random or mean >= uniform:
        named = f": {', '.join(random[:5])}" if random else ""
        raise InputError(
            f"{len(random) or len(prompts)} of {len(prompts)} prompts are random tokens to this "
            f"target, {mean:.2f} nats a token on the whole where guessing among {vocab_size} has "
            f"{uniform:.2f}{named}; acceptance on them says nothing: give text of the kind that "
            "will be served"
        )
    return mean, uniform


@dataclasses.dataclass
class _Timer:
    """Times trees at one batch size; what the log has already is not timed again."""

    target: Target
    draft: Draft
    config: SweepConfig
    texts: Sequence[Mapping[str, Any]]
    batch_size: int
    log: SweepLog
    env: Mapping[str, str]
    show: Progress
    generators: dict[str, Generator] = dataclasses.field(default_factory=dict)

    def run(self, num_rounds: int) -> None:
        """Rounds up to a number; after the last, as many runs of the fastest over whole texts."""
        here = {"env": self.env, "batch_size": self.batch_size}
        missing = [r for r in range(num_rounds) if self.log.find("round", **here, round=r) is None]
        label, done = f"timing, batch {self.batch_size}", 0
        if missing:
            names = [PLAIN, *self._timed_trees()]
            self._compile(names)
            for number in missing:
                texts = self._texts_of(number, self.batch_size)
                order = names if number % 2 else names[::-1]
                cells = {}
                for name in order:
                    cells[name] = self._call(name, texts)
                    done += 1
                    self.show(label, done, len(missing) * len(names))
                in_order = {name: cells[name] for name in names}
                self.log.append("round", **here, round=number, texts=texts, cells=in_order)
        if num_rounds < self.config.rounds:
            return
        report = report_of(self.log.header, self.log.entries, "")
        setting = next(one for one in report.settings if one.env == self.env)
        best = next(b for b in setting.batches if b.batch_size == self.batch_size).best.tree
        for number in range(num_rounds):
            if self.log.find("whole", **here, round=number, tree=best) is None:
                texts = self._texts_of(number, max(self.batch_size, 4))
                order = (PLAIN, best) if number % 2 else (best, PLAIN)
                cells = {name: self._whole(name, texts) for name in order}
                self.log.append("whole", **here, round=number, tree=best, texts=texts, cells=cells)
            self.show(f"{best} over whole texts", number + 1, num_rounds)

    def _timed_trees(self) -> list[str]:
        """What is timed at this batch size, under whatever environment: the corners first."""
        known = self.log.find("trees", batch_size=self.batch_size)
        if known is not None:
            return known["trees"]
        trees, lengths = self.config.trees, self._accept_lengths()
        chosen = _corners(trees, NUM_CORNERS)
        if len(trees) <= NUM_CORNERS + self.config.num_timed:
            chosen = list(trees)
        else:
            names, label = (
                [PLAIN, *map(str, chosen)],
                f"corners of the grid, batch {self.batch_size}",
            )
            self._compile(names)
            ms: dict[str, list[float]] = {name: [] for name in names}
            for number, name in itertools.product(range(CORNER_ROUNDS), names):
                cell = self._call(name, self._texts_of(number, self.batch_size))
                ms[name].append(cell["ms"] / cell["steps"])
                self.show(label, sum(map(len, ms.values())), CORNER_ROUNDS * len(names))
            least = {name: min(values) for name, values in ms.items()}
            guess_ms = _guess_ms(chosen, [least[str(tree)] for tree in chosen], trees)
            promise = {
                tree: lengths[str(tree)] / max(guess, least[PLAIN])
                for tree, guess in zip(trees, guess_ms, strict=True)
                if tree not in chosen
            }
            chosen += sorted(promise, key=lambda tree: -promise[tree])[: self.config.num_timed]
        timed = [str(tree) for tree in chosen]
        self.log.append("trees", batch_size=self.batch_size, trees=timed)
        return timed

    def _accept_lengths(self) -> dict[str, float]:
        """Of every tree, along all texts."""
        walk = self.log.find("walk")
        assert walk is not None, "it comes before"
        return {
            name: 1 + sum(map(sum, steps)) / sum(map(len, steps))
            for name, steps in walk["steps"].items()
        }

    def _texts_of(self, number: int, count: int) -> list[int]:
        """The texts of a round, one for each place: the next ones, around and around."""
        return [(number * count + b) % len(self.texts) for b in range(count)]

    def _compile(self, names: Sequence[str]) -> None:
        """Before anything is timed, so that what is compared is timed one after another."""
        for index, name in enumerate(names, start=1):
            self._generator(name)
            self.show(f"compiling, batch {self.batch_size}", index, len(names))

    def _generator(self, name: str) -> Generator:
        """Compiled, and run once."""
        if name in self.generators:
            return self.generators[name]
        tree = None if name == PLAIN else TreeConfig.parse(name)
        longest = max(len(text["prompt_ids"]) for text in self.texts)
        config = GenerateConfig(
            tree,
            self.config.max_new_tokens,
            longest + self.config.max_new_tokens,
            self.batch_size,
            ignore_eos=True,
            steps_per_call=self.config.num_steps(tree),
        )
        generator = Generator(self.target, None if tree is None else self.draft, config)
        generator.run(self._requests(self._texts_of(0, self.batch_size)))
        self.generators[name] = generator
        return generator

    def _requests(self, texts: Sequence[int]) -> list[Request]:
        return [
            Request(
                tuple(self.texts[index]["prompt_ids"]),
                self.config.temperature,
                seed=self.texts[index]["seed"],
            )
            for index in texts
        ]

    def _call(self, name: str, texts: Sequence[int]) -> dict[str, Any]:
        """One call of the step with every place running: its time, and what it emitted."""
        generator = self._generator(name)
        stream = generator.stream(self._requests(texts))
        emitted = [-1] * len(texts)  # a prefill's token is no step's
        # Each place has a piece from the prefill, and one from the first call.
        for piece in itertools.islice(stream, 2 * len(texts)):
            emitted[piece.index] += len(piece.tokens)
        return {
            "ms": stream.decode_ms,
            "steps": generator.config.steps_per_call,
            "emitted": emitted,
        }

    def _whole(self, name: str, texts: Sequence[int]) -> dict[str, Any]:
        """Whole texts, as `jaxspec generate` would write them."""
        run = self._generator(name).run(self._requests(texts))
        emitted = [len(done.tokens) - 1 for done in run.completions]
        return {"ms": run.decode_ms, "emitted": emitted}


def _corners(trees: Sequence[TreeConfig], count: int) -> list[TreeConfig]:
    """The smallest tree, and others that are as far from each other as can be."""
    points = np.log([dataclasses.astuple(tree) for tree in trees])
    points /= np.maximum(np.ptp(points, axis=0), 1e-9)
    chosen = [int(points.sum(1).argmin())]
    while len(chosen) < min(count, len(trees)):
        away = np.linalg.norm(points[:, None] - points[None, chosen], axis=-1).min(1)
        chosen.append(int(away.argmax()))
    return [trees[index] for index in chosen]


def _guess_ms(
    timed: Sequence[TreeConfig], ms: Sequence[float], trees: Sequence[TreeConfig]
) -> np.ndarray:
    """Step times of trees from those of some: so much a step, a level, a beam of one, a node.

    Least squares of relative errors; nothing costs less than nothing.
    """

    def terms(some: Sequence[TreeConfig]) -> np.ndarray:
        return np.array([[1, t.levels, t.levels * t.branches, t.nodes] for t in some], float)

    per_ms = terms(timed) / np.asarray(ms)[:, None]
    cost, free = np.zeros(per_ms.shape[1]), np.ones(per_ms.shape[1], bool)
    while True:
        cost[free] = np.linalg.lstsq(per_ms[:, free], np.ones(len(ms)), rcond=None)[0]
        if (cost >= 0).all():
            return terms(trees) @ cost
        free &= cost > 0
        cost[~free] = 0
