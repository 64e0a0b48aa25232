"""The generator at its edges: capacity, limits, refilled places, ends of sequence, NaNs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import TreeConfig
from jaxspec.generator import GenerateConfig, Generator, Request

SLOTS, CHUNK = 40, 8
TREE = TreeConfig(3, 2, 6)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, 24, length).tolist())


def make(target, draft, stop=(), tree=TREE, batch=2):
    target = nnx.clone(target)
    target.config = dataclasses.replace(target.config, eos_token_ids=tuple(stop))
    config = GenerateConfig(
        tree=tree, context_length=SLOTS, batch_size=batch, prefill_chunk=CHUNK, steps_per_call=3
    )
    return Generator(target, draft if tree else None, config)


@pytest.fixture(scope="module")
def free(target, draft):
    return make(target, draft)


def tokens_of(generator, *requests):
    return [c.tokens for c in generator.run(list(requests)).completions]


def test_capacity_and_limits(free):
    wanted = tokens_of(free, Request(prompt(5), max_new_tokens=35))[0]
    run = free.run(
        [
            Request(prompt(SLOTS - 1), max_new_tokens=9),
            Request(prompt(5), max_new_tokens=1),
            Request(prompt(5), max_new_tokens=500),
            Request(prompt(5), max_new_tokens=35),
            Request(prompt(5), max_new_tokens=2),
            Request(prompt(SLOTS - 2), max_new_tokens=9),
        ]
    )
    done = run.completions
    assert [c.finish for c in done] == [
        "capacity",
        "length",
        "capacity",
        "length",
        "length",
        "capacity",
    ]
    assert [len(c.tokens) for c in done] == [1, 1, 35, 35, 2, 2]
    assert done[0].accepted == done[1].accepted == ()
    for c in done[1:5]:
        assert c.tokens == wanted[: len(c.tokens)]
    for c in done:
        assert sum(c.accepted) + len(c.accepted) >= len(c.tokens) - 1


def test_admitted_while_others_run(free):
    """Six ragged requests over two places, with seeds: each as if alone."""
    requests = [
        Request(prompt(3 + 4 * i), temperature=0.9 * (i % 2), seed=i, max_new_tokens=3 + 2 * i)
        for i in range(6)
    ]
    together = free.run(requests).completions
    for request, done in zip(requests, together, strict=True):
        assert free.run([request]).completions[0].tokens == done.tokens
        assert free.run([request]).completions[0].accepted == done.accepted


def test_end_of_sequence_everywhere(target, draft, free):
    whole = tokens_of(free, Request(prompt(5), max_new_tokens=30))[0]
    accepted = free.run([Request(prompt(5), max_new_tokens=30)]).completions[0].accepted
    assert max(accepted) >= 2
    # The first place: EOS from prefill. The second: inside an accepted block, not at its end.
    ends = np.cumsum([a + 1 for a in accepted])  # of each step, as indices of its last token
    inside = next(
        i
        for i in range(1, len(whole))
        if whole.index(whole[i]) == i and i not in ends and i + 1 not in ends
    )
    for place in (0, inside):
        (c,) = (
            make(target, draft, (whole[place],))
            .run([Request(prompt(5), max_new_tokens=30)])
            .completions
        )
        assert c.tokens == whole[: place + 1]
        assert c.finish == "eos"
        # Every emitted token of the cut step was drafted: its bonus token is not among them.
        assert sum(c.accepted) + max(len(c.accepted) - 1, 0) == len(c.tokens) - 1


def test_a_nan_leaves_the_generator_usable(target, draft):
    """After a NaN in one request the next run starts clean: no place of the failed one runs on."""
    bad = nnx.clone(target)
    bad.embed[...] = bad.embed[...].at[23].set(jnp.nan)
    generator = make(bad, draft)
    finished = []
    with pytest.raises(FloatingPointError, match="request 1: the target"):
        generator.run(
            [Request((1, 2, 3), max_new_tokens=1), Request((4, 23), max_new_tokens=5)],
            on_finish=lambda index, completion: finished.append(index),
        )
    assert finished == [0], "what ended in the same call is handed over first"
    (fine,) = generator.run([Request((1, 2, 3), max_new_tokens=4)]).completions
    (again,) = make(bad, draft).run([Request((1, 2, 3), max_new_tokens=4)]).completions
    assert fine.tokens == again.tokens


def test_a_draft_that_is_nan_is_not_silent(target, draft):
    """Lossless, and nobody is told: acceptance is just low."""
    bad = nnx.clone(draft)
    bad.fc[...] = bad.fc[...] * jnp.nan
    generator = make(target, bad)
    with pytest.raises(FloatingPointError, match="draft"):
        generator.run([Request(prompt(5), max_new_tokens=20)])
