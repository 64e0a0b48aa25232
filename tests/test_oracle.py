"""jaxspec's steps against the slow oracle: same trees, same accepted counts, same tokens."""

import numpy as np
import pytest

from jaxspec.config import TreeConfig
from tests import tiny
from tests.reference.eagle import FAULTS, Fault, Oracle
from tests.speculation import NEAR_TIE, Request, Stepper, first_difference

VOCAB = tiny.TARGET_CONFIG["vocab_size"]
SLOTS, CHUNK, NUM_TOKENS = 64, 8, 24
TREES = ["1x1x2", "3x1x4", "3x4x16", "5x8x32"]


def prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, VOCAB, length).tolist())


# Ragged: the prompts end before, at, and after the end of a prefill chunk.
REQUESTS = [
    Request(prompt(1)),
    Request(prompt(8), temperature=0.8, seed=1),
    Request(prompt(6), temperature=1.0, top_p=0.95, seed=2),
    Request(prompt(19), temperature=1.2, top_k=7, seed=3),
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
    return Stepper(target, draft, len(REQUESTS), SLOTS, CHUNK)


@pytest.fixture(scope="module")
def runs(stepper):
    """What jaxspec did for the requests, by tree."""
    return {}


def run_of(runs, stepper, tree: str):
    if tree not in runs:
        runs[tree] = stepper.run(REQUESTS, TreeConfig.parse(tree), NUM_TOKENS)
    return runs[tree]


def assert_same(oracle, requests, tree: str, ours) -> None:
    """Asserts step-for-step equality; a near-tie that fell otherwise is printed, and no failure."""
    near_ties = []
    for request, run in zip(requests, ours, strict=True):
        parted = first_difference(oracle(request), request, TreeConfig.parse(tree), NUM_TOKENS, run)
        if parted is not None:
            what, margin = parted
            assert margin < NEAR_TIE, f"{request}: {what}, decided by {margin:.2e}"
            near_ties.append(f"near-tie: {request}: {what}, decided by {margin:.2e}")
    print(*near_ties, sep="\n")
    assert len(near_ties) <= 1


@pytest.mark.parametrize("tree", TREES)
def test_steps(oracle, stepper, runs, tree):
    ours = run_of(runs, stepper, tree)
    assert_same(oracle, REQUESTS, tree, ours)
    # Whole paths were accepted, so that commit and extend had something to do.
    deepest = max(step.accepted for _, run in ours for step in run)
    assert deepest >= {"1x1x2": 1, "3x1x4": 2, "3x4x16": 2, "5x8x32": 2}[tree]


def test_batch_of_one(oracle, target, draft):
    alone = Stepper(target, draft, 1, SLOTS, CHUNK)
    ours = alone.run(REQUESTS[3:], TreeConfig.parse("3x4x16"), NUM_TOKENS)
    assert_same(oracle, REQUESTS[3:], "3x4x16", ours)


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
    parted = [
        first_difference(oracle(request, fault), request, TreeConfig.parse(tree), NUM_TOKENS, run)
        for request, run in zip(REQUESTS, run_of(runs, stepper, tree), strict=True)
    ]
    assert any(difference is not None and difference[1] > NEAR_TIE for difference in parted)
