"""The walk along a known text against what real runs accept, step by step."""

import jax
import numpy as np
import pytest

from jaxspec import (
    SHIPPED_DRAFT,
    SHIPPED_PROMPTS,
    SHIPPED_TARGET,
    Numerics,
    load_draft,
    load_target,
    load_tokenizer,
)
from jaxspec.config import TreeConfig
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.prompts import encode_prompts, read_prompts
from jaxspec.requests import Completion, Request
from jaxspec.walk import Walker, steps_along
from tests.reference import formulas

NEW = 24


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled():
    """Programs that run for moments: a third of the time goes with the optimising."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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
def walker(target, draft) -> Walker:
    return Walker(target, draft, 48, NEW, batch_size=3)


def run(target, draft, requests, tree: TreeConfig, slots: int) -> tuple[Completion, ...]:
    """What the real steps give."""
    config = GenerateConfig(tree, NEW, slots, len(requests), 16)
    return Generator(target, draft, config).run(requests).completions


@pytest.mark.slow
def test_finds_every_step_of_real_runs(target, draft, walker, requests):
    """From one pass: chains, one level, trees that share their candidates; a batch that is not
    full. `test_sweep` has a slice of it."""
    trees = [TreeConfig.parse(tree) for tree in ("1x1x2", "3x1x4", "1x3x4", "2x3x4", "3x3x9")]
    runs = {tree: run(target, draft, requests, tree, 48) for tree in trees}
    texts = [
        (request.prompt_ids, done.tokens)
        for request, done in zip(requests, runs[trees[0]], strict=True)
    ]
    found = walker.accepted(texts, trees)
    assert sum(sum(done.accepted) for done in runs[trees[-1]]) > 20
    for tree in trees:
        for done, (_, written), accepted in zip(runs[tree], texts, found[tree], strict=True):
            assert done.tokens == written
            assert steps_along(accepted) == done.accepted


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_six_trees_of_the_shipped_pair(temperature):
    """Within 3 % of the accept_length of real runs, near-ties of rounding included."""
    numerics = Numerics("float32")
    target = load_target(SHIPPED_TARGET, numerics)
    draft = load_draft(SHIPPED_DRAFT, numerics, target=target)
    prompts = encode_prompts(read_prompts(SHIPPED_PROMPTS), load_tokenizer(SHIPPED_TARGET))[:8]
    requests = [Request(p.ids, temperature, seed=i) for i, p in enumerate(prompts)]
    trees = [
        TreeConfig.parse(tree) for tree in ("1x1x2", "3x1x4", "6x1x7", "2x4x6", "3x4x16", "5x8x24")
    ]
    config = GenerateConfig(None, 48, 160, 8)
    plain = Generator(target, None, config).run(requests).completions
    walker = Walker(target, draft, 160, 47, 8)
    texts = [(r.prompt_ids, done.tokens) for r, done in zip(requests, plain, strict=True)]
    walked = walker.accepted(texts, trees)
    for tree in trees:
        config = GenerateConfig(tree, 48, 160, 8)
        real = Generator(target, draft, config).run(requests).completions
        steps = [count for done in real for count in done.accepted]
        found = [count for accepted in walked[tree] for count in steps_along(accepted)]
        length, foretold = (1 + sum(some) / len(some) for some in (steps, found))
        assert foretold == pytest.approx(length, rel=0.03), tree


def test_surprise(walker, reference_target):
    """Against the numpy target's own log-probabilities."""
    prompts = [(3, 1, 4, 1, 5, 9), (2, 6), (7,), (5, 3, 5, 8, 9, 7, 9)]
    found = walker.surprise(prompts)
    assert np.isnan(found[2])
    for ids, mine in zip(prompts, found, strict=True):
        if len(ids) > 1:
            log_p = formulas.log_softmax(reference_target.run(ids).logits[:-1])
            wanted = -np.mean([row[i] for row, i in zip(log_p, ids[1:], strict=True)])
            assert mine == pytest.approx(wanted, rel=1e-4)


def test_steps_along():
    assert steps_along(np.array([0, 2, 1, 1, 0])) == (0, 2, 0)
    assert steps_along(np.array([], int)) == ()


def test_refuses_what_it_cannot_walk(walker):
    with pytest.raises(InputError, match="30 branches over a draft vocabulary of 20"):
        walker.accepted([((1,), (2, 3))], [TreeConfig(1, 30, 2)])
    with pytest.raises(InputError, match="too long"):
        walker.accepted([((1,), tuple(range(2, 60)))], [TreeConfig(1, 1, 2)])
