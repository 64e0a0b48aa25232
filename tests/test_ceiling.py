"""The ceiling against a loop without cache or batch, and against what no draft can do."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import ceiling as ceilings
from jaxspec import known_texts
from jaxspec.ceiling import Ceiling, accept_ceiling
from jaxspec.config import TreeConfig
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.requests import Request
from tests import tiny
from tests.reference import formulas
from tests.reference.draft import ReferenceDraft
from tests.reference.target import ReferenceTarget

SAMPLED, CUT, GREEDY = (
    {"temperature": 0.5},
    {"temperature": 0.9, "top_k": 6, "top_p": 0.8, "min_p": 0.2},
    {"temperature": 0.0},
)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Passes of eight tokens, so that short texts cross from one into the next."""
    monkeypatch.setattr(known_texts, "CHUNK", 8)


class Candidate(NamedTuple):
    """A path below the root, and its log-probability."""

    path: tuple[int, ...]
    score: float


def log_probs(logits: np.ndarray, request: Request) -> np.ndarray:
    """What is chosen from, [V]."""
    if not request.temperature:
        return np.where(np.arange(len(logits)) == logits.argmax(), 0.0, -np.inf)
    scores = logits / request.temperature
    order = np.argsort(-scores, kind="stable")[: request.top_k or None]
    mass = np.cumsum(formulas.softmax(scores[order]))
    order = order[: np.searchsorted(mass, request.top_p) + 1]
    order = order[np.exp(scores[order] - scores[order[0]]) >= request.min_p]
    kept = np.full_like(scores, -np.inf)
    kept[order] = scores[order]
    return formulas.log_softmax(kept)


def slow_ceiling(
    target: ReferenceTarget, request: Request, emitted: list[int], tree: TreeConfig
) -> list[int]:
    """The drafted tokens accepted in each step, everything from scratch at every node."""
    tokens, root, accepted = [*request.prompt_ids, *emitted], len(request.prompt_ids), []
    while root + 1 < len(tokens):

        def extended(beam: Candidate, root: int = root) -> list[Candidate]:
            logits = target.run([*tokens[: root + 1], *beam.path]).logits[-1]
            log_p = log_probs(logits, request)
            best = np.argsort(-log_p, kind="stable")[: tree.branches]
            return [Candidate((*beam.path, int(t)), beam.score + log_p[t]) for t in best]

        pool, beams = [], [Candidate((), 0.0)]
        for _ in range(tree.levels):
            level = [candidate for beam in beams for candidate in extended(beam)]
            pool += level
            beams = sorted(level, key=lambda c: -c.score)[: tree.branches]
        kept = {c.path for c in sorted(pool, key=lambda c: -c.score)[: tree.nodes - 1]}
        depths = range(1, min(tree.levels, len(tokens) - 1 - root) + 1)
        right = [d for d in depths if tuple(tokens[root + 1 : root + 1 + d]) in kept]
        accepted.append(max(right, default=0))
        root += accepted[-1] + 1
    return accepted


def sampled_text(
    target: ReferenceTarget, prompt_len: int, num_tokens: int, seed: int, **how
) -> tuple[Request, list[int]]:
    """A random prompt and what the target went on with."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, target.config["vocab_size"], prompt_len).tolist()
    request, tokens = Request(tuple(prompt), **how), list(prompt)
    for _ in range(num_tokens):
        p = np.exp(log_probs(target.run(tokens).logits[-1], request))
        tokens.append(int(rng.choice(len(p), p=p)))
    return request, tokens[prompt_len:]


def test_accepts_what_the_slow_loop_accepts(target, reference_target):
    """Ragged texts, one of them without a step; a batch that is not full."""
    shape = TreeConfig.parse("3x1x4")
    texts = [
        sampled_text(reference_target, 9, 14, 1, **SAMPLED),
        sampled_text(reference_target, 5, 11, 2, **CUT),
        sampled_text(reference_target, 3, 14, 3, **GREEDY),
        sampled_text(reference_target, 7, 1, 4, **SAMPLED),
        sampled_text(reference_target, 2, 16, 5, **SAMPLED),
    ]
    ceiling = accept_ceiling(target, *zip(*texts, strict=True), shape, batch_size=3)
    wanted = [slow_ceiling(reference_target, *text, shape) for text in texts]
    assert [list(text.accepted) for text in ceiling.texts] == wanted
    steps = [count for of_text in wanted for count in of_text]
    assert ceiling.accept_length == sum(len(tokens) - 1 for _, tokens in texts) / len(steps)
    assert ceiling.accept_per_depth == tuple(
        sum(count > depth for count in steps) / len(steps) for depth in range(shape.levels)
    )
    # Greedy text could be foreseen to its end, which cuts the last step short.
    assert ceiling.texts[2].accepted == (3, 3, 3, 1)
    assert ceiling.draft_first_token is None
    assert ceiling.top1_agreement is None


def check_trees_and_first_guesses(
    target, draft, reference_target, reference_draft: ReferenceDraft
) -> None:
    shape = TreeConfig.parse("3x3x8")
    texts = [
        sampled_text(reference_target, 9, 24, 6, **SAMPLED),
        sampled_text(reference_target, 4, 22, 7, **CUT),
    ]
    ceiling = accept_ceiling(target, *zip(*texts, strict=True), shape, draft)
    for (request, emitted), found in zip(texts, ceiling.texts, strict=True):
        assert list(found.accepted) == slow_ceiling(reference_target, request, emitted, shape)
        tokens = [*request.prompt_ids, *emitted]
        run = reference_target.run(tokens)
        hidden = reference_draft.fuse(run.features(tiny.BOUNDARIES)[:-1])
        rows = np.arange(len(hidden))
        out = reference_draft.run(hidden, tokens[1:], rows, formulas.causal(len(rows)))
        guess = reference_draft.target_of_draft[reference_draft.logits(out).argmax(-1)]
        roots = range(len(request.prompt_ids), len(tokens) - 1)
        p = [np.exp(log_probs(run.logits[r], request)) for r in roots]
        np.testing.assert_allclose(found.best, [x.max() for x in p], rtol=1e-4)
        mine = [x[guess[r - 1]] for x, r in zip(p, roots, strict=True)]
        np.testing.assert_allclose(found.draft, mine, rtol=1e-4, atol=1e-7)
        agrees = [x.argmax() == guess[r - 1] for x, r in zip(p, roots, strict=True)]
        assert found.agrees.tolist() == agrees
    assert 0 < ceiling.draft_first_token <= ceiling.first_token < 1
    assert 0 < ceiling.top1_agreement < 1


def test_trees_and_first_guesses(target, draft, reference_target, reference_draft):
    """Beams and the re-rank; probabilities of the likeliest token and of the draft's guess."""
    check_trees_and_first_guesses(target, draft, reference_target, reference_draft)


@pytest.mark.slow
def test_a_draft_whose_temperature_is_ignored(
    monkeypatch, target, draft, reference_target, reference_draft
):
    """Our drafts propose their likeliest tokens, which temperature does not reorder: here alone a
    draft's probabilities are the request's, and at temperature 1 they would be others."""
    honest = ceilings._log_probs

    def at_one(logits_BTV, sampling):
        one_B = jnp.minimum(jnp.ceil(sampling.temperature), 1.0)
        return honest(logits_BTV, dataclasses.replace(sampling, temperature=one_B))

    monkeypatch.setattr(ceilings, "_log_probs", at_one)
    with pytest.raises(AssertionError):
        check_trees_and_first_guesses(target, draft, reference_target, reference_draft)


def test_no_draft_beats_it(target, draft):
    """A chain's acceptance, beyond the noise of the run it is measured on."""
    tree = TreeConfig(1, 1, 2)
    config = GenerateConfig(tree, 60, 128, batch_size=8, prefill_chunk=16)
    requests = [Request((i, 3, i + 1), temperature=0.5, seed=i) for i in range(16)]
    run = Generator(target, draft, config).run(requests)
    emitted = [completion.tokens for completion in run.completions]
    ceiling = accept_ceiling(target, requests, emitted, tree, draft)
    accepted = [count for completion in run.completions for count in completion.accepted]
    assert all((text.draft <= text.best + 1e-6).all() for text in ceiling.texts)
    noise = np.std(accepted) / np.sqrt(len(accepted))
    # The run proposes after some tokens only; over all of them the draft's guess does as well.
    assert abs(np.mean(accepted) - ceiling.draft_first_token) < 4 * noise
    assert np.mean(accepted) < ceiling.accept_per_depth[0] + 4 * noise


def test_refuses_what_it_cannot_measure(target):
    with pytest.raises(InputError, match="without a prompt"):
        accept_ceiling(target, [Request(())], [[1, 2]], TreeConfig(1, 1, 2))
    with pytest.raises(InputError, match="more branches than the target has tokens"):
        accept_ceiling(target, [Request((1,))], [[1, 2]], TreeConfig(1, 30, 2))


def test_figures_of_no_text():
    """None, and no zero that would read as a bad draft."""
    assert Ceiling((), 2).accept_length is None
    assert Ceiling((), 2).accept_per_depth == (None, None)
    assert Ceiling((), 2).first_token is None
