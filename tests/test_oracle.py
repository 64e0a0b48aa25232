"""jaxspec's steps against the slow oracle: same trees, same accepted counts, same tokens."""

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes  # noqa: F401  by which numpy knows bfloat16
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint import load_draft, load_target
from jaxspec.config import TreeConfig
from jaxspec.draft import Draft
from jaxspec.target import Target
from tests import tiny
from tests.reference.draft import ReferenceDraft
from tests.reference.eagle import FAULTS, Fault, Oracle, Step
from tests.reference.target import ReferenceTarget
from tests.speculation import NEAR_TIE, Request, Stepper, differences
from tests.torch_reference import MINI_DRAFT, MINI_TARGET, boundaries_of, prompt_ids

VOCAB = tiny.TARGET_CONFIG["vocab_size"]
SLOTS, CHUNK, NUM_TOKENS = 64, 8, 24
TREES = ["1x1x2", "3x1x4", "3x4x16", "5x8x32"]


def prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, VOCAB, length).tolist())


# Ragged: the prompts end before, at, and after the end of a prefill chunk.
REQUESTS = [
    Request(prompt(1)),
    Request(prompt(8), temperature=0.8, seed=1),
    Request(prompt(6), temperature=0.6, top_p=0.9, seed=2),
    Request(prompt(19), temperature=1.2, top_k=9, min_p=0.05, seed=3),
]


@pytest.fixture(scope="module")
def oracle(reference_target, reference_draft):
    def make(request: Request, fault: Fault | None = None) -> Oracle:
        faults = frozenset(() if fault is None else (fault,))
        choose = request.choose(VOCAB)
        return Oracle(reference_target, reference_draft, tiny.BOUNDARIES, choose, faults)

    return make


@pytest.fixture(scope="module")
def stepper(target, draft) -> Stepper:
    return Stepper(target, draft, len(REQUESTS), SLOTS, CHUNK, optimise=False)


@pytest.fixture(scope="module")
def runs(stepper):
    """What jaxspec did for the requests, by tree."""
    return {}


def run_of(runs, stepper, tree: str):
    if tree not in runs:
        runs[tree] = stepper.run(REQUESTS, TreeConfig.parse(tree), NUM_TOKENS)
    return runs[tree]


def near_ties(oracle, requests, tree: str, num_tokens: int, ours) -> list[str]:
    """The steps that differ from the oracle's by a near-tie; asserts that none does otherwise."""
    shape, found = TreeConfig.parse(tree), []
    for request, run in zip(requests, ours, strict=True):
        for difference in differences(oracle(request), request, shape, num_tokens, run):
            assert difference.is_near_tie, (request, difference)
            found.append(f"tree {tree}, seed {request.seed}, a near-tie: {difference}")
    return found


@pytest.mark.parametrize("tree", TREES)
def test_steps(oracle, stepper, runs, tree):
    ours = run_of(runs, stepper, tree)
    assert not near_ties(oracle, REQUESTS, tree, NUM_TOKENS, ours)
    # Whole paths were accepted, so that commit and extend had something to do.
    deepest = max(step.accepted for _, run in ours for step in run)
    assert deepest >= {"1x1x2": 1, "3x1x4": 2, "3x4x16": 2, "5x8x32": 2}[tree]


def test_batch_of_one(oracle, target, draft):
    alone = Stepper(target, draft, 1, SLOTS, CHUNK, optimise=False)
    ours = alone.run(REQUESTS[3:], TreeConfig.parse("3x4x16"), NUM_TOKENS)
    assert not near_ties(oracle, REQUESTS[3:], "3x4x16", NUM_TOKENS, ours)


def test_every_tree_gives_the_plain_tokens(oracle, stepper, runs):
    """Lossless: the tokens of the oracle's plain decoding, greedy or sampled, whatever the tree."""
    for b, request in enumerate(REQUESTS):
        plain = oracle(request).plain(list(request.prompt), NUM_TOKENS)
        certain = next((i for i, c in enumerate(plain) if c.margin < NEAR_TIE), NUM_TOKENS)
        for tree in TREES:
            first, run = run_of(runs, stepper, tree)[b]
            tokens = [first, *(token for step in run for token in step.emitted)]
            assert len(tokens) == NUM_TOKENS
            assert tokens[:certain] == [choice.token for choice in plain[:certain]], tree


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(oracle, stepper, runs, fault):
    """Were jaxspec right and the oracle wrong in this way, or the reverse, the two would part."""
    tree = "3x4x16"
    found = []
    for request, run in zip(REQUESTS, run_of(runs, stepper, tree), strict=True):
        shape = TreeConfig.parse(tree)
        # From its first mistake on, the oracle's step depends on its own past: look no further.
        found += itertools.islice(
            differences(oracle(request, fault), request, shape, NUM_TOKENS, run), 1
        )
    assert any(not difference.is_near_tie for difference in found)


@functools.cache
def shipped() -> tuple[Target, Draft, ReferenceTarget, ReferenceDraft]:
    """The shipped pair in jaxspec and in numpy."""
    target = load_target(MINI_TARGET, tiny.NUMERICS)
    draft = load_draft(MINI_DRAFT, tiny.NUMERICS, target=target)
    target_config, draft_config = (
        json.loads((directory / "config.json").read_text())
        for directory in (MINI_TARGET, MINI_DRAFT)
    )
    reference = ReferenceTarget(tensors_of(MINI_TARGET), target_config)
    embed, head = reference.embed, reference.head
    return (
        target,
        draft,
        reference,
        ReferenceDraft(tensors_of(MINI_DRAFT), draft_config, embed=embed, head=head),
    )


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a directory's safetensors files."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@functools.cache
def shipped_stepper(batch: int) -> Stepper:
    target, draft, *_ = shipped()
    return Stepper(target, draft, batch, max(map(len, prompt_ids())) + 64, 16)


class Remembering(Oracle):
    """An honest oracle: its step depends on the tokens before it alone, and is taken once."""

    seen: dict[tuple[int, ...], Step]

    def steps(self, tokens: list[int], levels: int, branches: int, nodes: int) -> Iterator[Step]:
        """See `Oracle`."""
        tokens = list(tokens)
        while True:
            at = levels, branches, nodes, *tokens
            if at not in self.seen:
                self.seen[at] = next(super().steps(tokens, levels, branches, nodes))
            tokens += self.seen[at].emitted
            yield self.seen[at]


@functools.cache
def shipped_oracle(request: Request) -> Oracle:
    """For the batches of every size."""
    _, _, target, draft = shipped()
    choose = request.choose(target.config["vocab_size"])
    oracle = Remembering(target, draft, boundaries_of(MINI_DRAFT), choose)
    oracle.seen = {}
    return oracle


SAMPLINGS = ({}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.95})


def check_shipped(count: int, batch: int, tree: str, num_tokens: int, capsys) -> None:
    """The first held-out prompts, every third of them greedy, against the oracle."""
    requests = [
        Request(tuple(ids), seed=seed, **SAMPLINGS[seed % 3])
        for seed, ids in enumerate(prompt_ids()[:count])
    ]
    notes, num_steps = [], 0
    for start in range(0, count, batch):
        some = requests[start : start + batch]
        ours = shipped_stepper(batch).run(some, TreeConfig.parse(tree), num_tokens)
        notes += near_ties(shipped_oracle, some, tree, num_tokens, ours)
        num_steps += sum(len(run) for _, run in ours)
    if notes:
        with capsys.disabled():
            print("", *notes, sep="\n")
    assert len(notes) <= 0.01 * num_steps


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("batch", [8, 1])
def test_shipped_pair(tree, batch, capsys):
    check_shipped(len(prompt_ids()), batch, tree, 64, capsys)
