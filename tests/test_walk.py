"""The walk along a known text against what real runs accept, step by step."""

import numpy as np
import pytest

from jaxspec.config import TreeConfig
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.requests import Request
from jaxspec.walk import Walker, steps_along

TREES = [TreeConfig.parse(text) for text in ("1x1x2", "3x1x4", "1x3x4", "2x3x4", "3x3x9")]
NEW = 24


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Greedy and sampled ones, of several lengths."""
    rng = np.random.default_rng(0)
    lengths, temperatures = (3, 5, 9, 17, 2), (0.0, 0.0, 0.7, 1.0, 0.5)
    return [
        Request(tuple(rng.integers(0, 24, n).tolist()), temperature, seed=seed)
        for seed, (n, temperature) in enumerate(zip(lengths, temperatures, strict=True))
    ]


@pytest.fixture(scope="module")
def runs(target, draft, requests) -> dict[TreeConfig, list]:
    """What the real steps gave with each tree."""
    return {
        tree: Generator(target, draft, GenerateConfig(tree, NEW, 48, 5, 16))
        .run(requests)
        .completions
        for tree in TREES
    }


@pytest.fixture(scope="module")
def walker(target, draft) -> Walker:
    return Walker(target, draft, 48, NEW, batch_size=3)


def test_finds_every_step_of_the_real_runs(walker, requests, runs):
    """All trees from one pass over the text of one of them; a batch that is not full."""
    texts = [
        (request.prompt_ids, done.tokens)
        for request, done in zip(requests, runs[TREES[0]], strict=True)
    ]
    found = walker.accepted(texts, TREES)
    assert sum(sum(done.accepted) for done in runs[TREES[-1]]) > 20
    for tree in TREES:
        for done, (_, written), accepted in zip(runs[tree], texts, found[tree], strict=True):
            assert done.tokens == written
            assert steps_along(accepted) == done.accepted


def test_surprise(walker, reference_target):
    """Against the numpy target's own log-probabilities."""
    prompts = [(3, 1, 4, 1, 5, 9), (2, 6), (7,), (5, 3, 5, 8, 9, 7, 9)]
    found = walker.surprise(prompts)
    assert np.isnan(found[2])
    for ids, mine in zip(prompts, found, strict=True):
        if len(ids) > 1:
            logits = reference_target.run(ids).logits[:-1]
            log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            wanted = -np.mean([row[i] for row, i in zip(log_p, ids[1:], strict=True)])
            assert mine == pytest.approx(wanted, rel=1e-4)


def test_steps_along():
    assert steps_along(np.array([0, 2, 1, 1, 0])) == (0, 2, 0)
    assert steps_along(np.array([], int)) == ()


def test_refuses_what_it_cannot_walk(walker):
    with pytest.raises(InputError, match="branches"):
        walker.accepted([((1,), (2, 3))], [TreeConfig(1, 30, 2)])
    with pytest.raises(InputError, match="too long"):
        walker.accepted([((1,), tuple(range(2, 60)))], [TREES[0]])
