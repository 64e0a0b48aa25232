"""The slow oracle of speculative decoding: one request, no cache, no batch, all from scratch.

A step, as EAGLE-3 describes it (arXiv:2503.01840; the tree is EAGLE-2's, arXiv:2406.16858):

1. The draft's context is one row per verified position i < L: the target's features of position i
   and the token at i + 1. Its last row proposes what may follow the root, the token at L.
2. Level by level, every beam extends its own chain of rows, each pairing the draft's output on the
   row above with the token proposed there, at positions L, L + 1, ...
3. The best candidates of all levels make the tree; the target reads all nodes at once.
4. From the root, follow the child that is the token the target chose, until there is none.

`FAULTS` are mistakes that real systems made. The oracle can make them on request, so that a test
can show that a comparison with it would notice.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np

from tests.reference import formulas
from tests.reference.draft import ReferenceDraft
from tests.reference.target import ReferenceTarget

Fault = Literal[
    "accepted rows keep the draft's hidden",
    "rotary table ends early",
    "compaction reads overwritten rows",
    "recurrent positions one ahead",
    "rejected rows stay",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class Choice(NamedTuple):
    """A decision, and how far it was from falling otherwise."""

    token: int
    margin: float


class Proposed(NamedTuple):
    """A drafted token.

    Attributes:
      score: log-probability of the path that ends in it.
      parent: the one it continues; None directly below the root.
      hidden: the draft's output that proposed it.
    """

    token: int
    score: float
    parent: "Proposed | None"
    hidden: np.ndarray

    def path(self) -> "list[Proposed]":
        """The candidates from the first level down to this one."""
        return [*(self.parent.path() if self.parent else []), self]


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step did.

    Attributes:
      tokens, parents: of the tree's nodes, root first (its parent is -1).
      accepted: drafted tokens that the target confirmed.
      emitted: those tokens, and the bonus token.
      margin: the least by which any decision of this step was taken.
      router_margin: the least by which any expert was chosen, for any row so far.
    """

    tokens: list[int]
    parents: list[int]
    accepted: int
    emitted: list[int]
    margin: float = np.inf
    router_margin: float = np.inf


@dataclasses.dataclass(frozen=True)
class Row:
    """An input row of the draft."""

    hidden: np.ndarray
    token: int
    position: int


def greedy(logits: np.ndarray, position: int) -> Choice:
    """The most probable token; of equal ones the lowest id."""
    best, second = np.sort(logits)[::-1][:2]
    return Choice(int(np.argmax(logits)), best - second)


def sampler(
    noise: Callable[[int], np.ndarray],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Callable[[np.ndarray, int], Choice]:
    """A choice by noise(position) [V], added to the log-probabilities of what is not cut.

    The margin is the least of the choice's own and those of the cuts.
    """

    def choose(logits: np.ndarray, position: int) -> Choice:
        scores, margin = logits / temperature, np.inf
        order = np.argsort(-scores, kind="stable")
        if top_k:
            margin = min(margin, scores[order[top_k - 1]] - scores[order[top_k]])
            order = order[:top_k]
        if top_p < 1:
            mass = np.cumsum(formulas.softmax(scores[order]))
            # The token that crosses the threshold is kept.
            margin = min(margin, np.abs(mass - top_p).min())
            order = order[: np.searchsorted(mass, top_p) + 1]
        if min_p:
            of_best = np.exp(scores[order] - scores[order[0]])
            margin = min(margin, np.abs(of_best - min_p).min())
            order = order[of_best >= min_p]
        kept = np.full_like(scores, -np.inf)
        kept[order] = scores[order]
        choice = greedy(kept + noise(position), position)
        return Choice(choice.token, min(margin, choice.margin))

    return choose


class Oracle:
    """Speculative decoding of one request.

    Args:
      boundaries: what the draft's `fc` reads, in order.
      choose: (logits, position of the token being chosen) -> its choice.
      faults: mistakes to make.
    """

    def __init__(
        self,
        target: ReferenceTarget,
        draft: ReferenceDraft,
        boundaries: tuple[int, ...],
        choose: Callable[[np.ndarray, int], Choice] = greedy,
        faults: frozenset[Fault] = frozenset(),
    ) -> None:
        self.target, self.draft, self.boundaries = target, draft, boundaries
        self.choose, self.faults = choose, faults

    def first(self, prompt: list[int]) -> Choice:
        """The token after the prompt."""
        return self.choose(self.target.run(prompt).logits[-1], len(prompt))

    def steps(self, tokens: list[int], levels: int, branches: int, nodes: int) -> Iterator[Step]:
        """The steps after `tokens`, a prompt and its first token, without an end."""
        tokens, memory = list(tokens), Memory()
        while True:
            step = self._step(tokens, levels, branches, nodes, memory)
            tokens += step.emitted
            yield step

    def plain(self, prompt: list[int], num_tokens: int) -> list[Choice]:
        """The same request without a draft, a whole pass for every token."""
        tokens, choices = list(prompt), []
        for _ in range(num_tokens):
            choices.append(self.choose(self.target.run(tokens).logits[-1], len(tokens)))
            tokens.append(choices[-1].token)
        return choices

    def _step(
        self, tokens: list[int], levels: int, branches: int, nodes: int, memory: "Memory"
    ) -> Step:
        pool, margin, extended = self._propose(tokens, levels, branches, memory)
        order = np.argsort([-c.score for c in pool], kind="stable")
        kept = [pool[i] for i in sorted(order[: nodes - 1])]
        if nodes - 1 < len(pool):
            margin = min(margin, pool[order[nodes - 2]].score - pool[order[nodes - 1]].score)
        parents = [-1] + [0 if c.parent is None else 1 + _index(kept, c.parent) for c in kept]

        choices, features, router_margin = self._read(tokens, kept, parents)
        path = [0]
        while True:
            wanted = choices[path[-1]].token
            margin = min(margin, choices[path[-1]].margin)
            children = [j for j, parent in enumerate(parents) if parent == path[-1]]
            matching = [j for j in children if kept[j - 1].token == wanted]
            if not matching:
                break
            path.append(matching[0])
        self._misremember(len(tokens) - 1, kept, path, features, extended, memory)
        return Step(
            [tokens[-1], *(c.token for c in kept)],
            parents,
            len(path) - 1,
            [choices[node].token for node in path],
            margin,
            router_margin,
        )

    def _propose(
        self, tokens: list[int], levels: int, branches: int, memory: "Memory"
    ) -> tuple[list[Proposed], float, list[Proposed]]:
        """All candidates, level by level; the margin of the beams' choice; the extended beams."""
        length = len(tokens) - 1
        features = self.target.run(tokens[:length]).features(self.boundaries)
        hidden = self.draft.fuse(features)
        for position, changed in memory.hidden.items():
            hidden[position] = changed
        context = [Row(hidden[i], tokens[i + 1], i) for i in range(length)]
        context = memory.stale_rows + context

        last = self._outputs(context, [[]])[0]
        beams, margin = self._continuations(None, last, branches)
        pool, extended = list(beams), []
        for _ in range(1, levels):
            chains = [[self._row(c, length) for c in beam.path()] for beam in beams]
            level = []
            for beam, out in zip(beams, self._outputs(context, chains), strict=True):
                continuations, gap = self._continuations(beam, out, branches)
                level += continuations
                margin = min(margin, gap)
            pool += level
            extended += beams
            ranked = sorted(range(len(level)), key=lambda i: -level[i].score)
            beams = [level[i] for i in ranked[:branches]]
            margin = min(margin, _least_gap([level[i].score for i in ranked], branches))
        return pool, margin, extended

    def _row(self, proposed: Proposed, length: int) -> Row:
        ahead = "recurrent positions one ahead" in self.faults
        depth = len(proposed.path())
        return Row(proposed.hidden, proposed.token, length + depth - 1 + ahead)

    def _outputs(self, context: list[Row], chains: list[list[Row]]) -> list[np.ndarray]:
        """The draft's output on the last row of every chain, each over context and chain alone.

        One pass: a row sees the context's rows and those of its own chain, none that come later.
        """
        rows = [*context, *itertools.chain(*chains)]
        ends = np.cumsum([len(context), *map(len, chains)])
        chain_of_row = np.repeat(np.arange(len(ends)), [len(context), *map(len, chains)])
        sees = (chain_of_row == 0) | (chain_of_row == chain_of_row[:, None])
        sees &= formulas.causal(len(rows))
        position = np.array([row.position for row in rows])
        if "rotary table ends early" in self.faults:
            position = np.minimum(position, self.draft.config["max_position_embeddings"] - 1)
        hidden = np.stack([row.hidden for row in rows])
        token = np.array([row.token for row in rows])
        return list(self.draft.run(hidden, token, position, sees)[ends[1:] - 1])

    def _continuations(
        self, parent: Proposed | None, out: np.ndarray, branches: int
    ) -> tuple[list[Proposed], float]:
        """The best tokens after a row, best first, and the least gap between them."""
        log_p = formulas.log_softmax(self.draft.logits(out))
        order = np.argsort(-log_p, kind="stable")
        before = 0.0 if parent is None else parent.score
        found = [
            Proposed(int(self.draft.target_of_draft[i]), before + log_p[i], parent, out)
            for i in order[:branches]
        ]
        return found, _least_gap(list(log_p[order]), branches)

    def _read(
        self, tokens: list[int], kept: list[Proposed], parents: list[int]
    ) -> tuple[list[Choice], np.ndarray, float]:
        """The target's choice after every node, the nodes' features, the routers' least margin."""
        length, nodes = len(tokens) - 1, len(parents)
        sees = np.zeros((length + nodes, length + nodes), bool)
        sees[:length, :length] = formulas.causal(length)
        sees[length:, :length] = True
        depth = [0] * nodes
        for j, parent in enumerate(parents):
            if parent >= 0:
                depth[j] = depth[parent] + 1
                sees[length + j] |= sees[length + parent]
            sees[length + j, length + j] = True
        positions = [*range(length), *(length + d for d in depth)]
        run = self.target.run([*tokens, *(c.token for c in kept)], positions, sees)
        choices = [self.choose(run.logits[length + j], length + depth[j] + 1) for j in range(nodes)]
        return choices, run.features(self.boundaries)[length:], run.margins.min()

    def _misremember(
        self,
        length: int,
        kept: list[Proposed],
        path: list[int],
        features: np.ndarray,
        extended: list[Proposed],
        memory: "Memory",
    ) -> None:
        """What a faulty system carries over to the next step; nothing without faults."""
        if "accepted rows keep the draft's hidden" in self.faults:
            for depth, node in enumerate(path[1:]):
                memory.hidden[length + depth] = kept[node - 1].hidden
        if "compaction reads overwritten rows" in self.faults:
            buffer = features.copy()
            for slot in reversed(range(len(path))):
                buffer[slot] = buffer[path[slot]]
            for slot in range(len(path)):
                memory.hidden[length + slot] = self.draft.fuse(buffer[slot])
        if "rejected rows stay" in self.faults:
            accepted = [kept[node - 1] for node in path[1:]]
            rejected = [beam for beam in extended if not any(beam is a for a in accepted)]
            memory.stale_rows += [self._row(beam, length) for beam in rejected]


class Memory:
    """What a faulty system remembers wrongly; stays empty in an honest one.

    Attributes:
      hidden: position -> the hidden state of its row in place of the fused features.
      stale_rows: rows of rejected candidates that every later row sees.
    """

    def __init__(self) -> None:
        self.hidden: dict[int, np.ndarray] = {}
        self.stale_rows: list[Row] = []


def _index(kept: list[Proposed], wanted: Proposed) -> int:
    return next(i for i, candidate in enumerate(kept) if candidate is wanted)


def _least_gap(ranked: list[float], count: int) -> float:
    """The least gap among the first `count` scores, and to the one after them."""
    pairs = itertools.pairwise(ranked[: count + 1])
    return min((better - worse for better, worse in pairs), default=np.inf)
