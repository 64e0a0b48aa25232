"""Step times of trees at one batch size, all of a round on the same texts, one after another."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.aliases import Progress
from jaxspec.config import TreeConfig
from jaxspec.draft import Draft
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.requests import Request
from jaxspec.sweep_config import SweepConfig
from jaxspec.sweep_log import SweepLog
from jaxspec.sweep_report import PLAIN, report_of
from jaxspec.target import Target

__all__ = ["Timer"]

NUM_CORNERS = 5
CORNER_ROUNDS = 3


@dataclasses.dataclass
class Timer:
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
                texts = self._texts_of(number, 4 * self.batch_size)
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
            names = [PLAIN, *map(str, chosen)]
            label = f"corners of the grid, batch {self.batch_size}"
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
