"""Speculative decoding changes no token: the shipped pair against its target decoding plainly.

In f32, rows of another shape are not bitwise equal, so a sequence may part from the plain one where
the plain one was itself nearly another: from the first position on at which what is argmaxed, or a
router's choice, was decided by less than `NEAR_TIE`. Such exceptions are printed, and at most
`MAX_PARTED` of 64 sequences may be one.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import load_draft, load_target
from jaxspec.config import TreeConfig
from jaxspec.draft import Draft
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.recording import RecordConfig, record
from jaxspec.requests import Request, sampling_of
from jaxspec.sampling import gumbel_noise, keep_top
from jaxspec.target import Target
from tests import tiny
from tests.torch_reference import MINI_DRAFT, MINI_TARGET, NEAR_TIE, prompt_ids

NEW_TOKENS = 64
MAX_PARTED = 2
TREES = ("1x1x2", "3x1x4", "3x4x16", "5x8x32")
BATCHES = (1, 8)
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
}

CUTS = ({}, {"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.05})
MIXED = [{"temperature": t, **cut} for t in (0.5, 0.8, 1.2) for cut in CUTS] + [{}]
"""Every prompt with each of them, side by side in one batch, greedy ones among them."""
MIXED_TOKENS = 16
"""New tokens of each of these."""

Tokens = Sequence[tuple[int, ...]]
"""The emitted ones of each request."""
SLICE = 8
"""Prompts that the tests not marked slow take: one batch of each sampling."""


@functools.cache
def models() -> tuple[Target, Draft]:
    target = load_target(MINI_TARGET, tiny.NUMERICS)
    return target, load_draft(MINI_DRAFT, tiny.NUMERICS, target=target)


@functools.cache
def generator(tree: str | None, batch_size: int) -> Generator:
    """For the whole matrix: a context that the longest prompt fills. None decodes plainly."""
    target, draft = models()
    config = GenerateConfig(
        tree=tree and TreeConfig.parse(tree),
        max_new_tokens=NEW_TOKENS,
        context_length=max(map(len, prompt_ids())) + NEW_TOKENS,
        batch_size=batch_size,
        prefill_chunk=16,
        ignore_eos=True,
    )
    return Generator(target, draft if tree else None, config)


def requests(num_prompts: int, sampling: str) -> list[Request]:
    """The first held-out prompts, each with a seed of its own; "mixed" is all of `MIXED`."""
    if sampling == "mixed":
        every = [(ids, how) for ids in prompt_ids()[:num_prompts] for how in MIXED]
        return [
            Request(tuple(ids), **how, seed=seed, max_new_tokens=MIXED_TOKENS)
            for seed, (ids, how) in enumerate(every)
        ]
    return [
        Request(tuple(ids), **SAMPLINGS[sampling], seed=seed)
        for seed, ids in enumerate(prompt_ids()[:num_prompts])
    ]


@functools.cache
def plain(num_prompts: int, sampling: str, batch_size: int) -> tuple[tuple[int, ...], ...]:
    """The tokens of plain decoding."""
    run = generator(None, batch_size).run(requests(num_prompts, sampling))
    return tuple(completion.tokens for completion in run.completions)


def first_near_ties(wanted: Sequence[Request], tokens: Sequence[Sequence[int]]) -> list[int]:
    """The index of each sequence's first token that was nearly another; its length if none was."""
    if not wanted:
        return []
    texts = [[*r.prompt_ids, *emitted[:-1]] for r, emitted in zip(wanted, tokens, strict=True)]
    arrays = record(models()[0], None, texts, RecordConfig(boundaries=())).arrays
    routers_LRT = np.stack([a for name, a in arrays.items() if name.startswith("router_margin.")])
    found = []
    for row, request in enumerate(wanted):
        # The token at position p was chosen from the row at p - 1, which saw every row above it.
        first, end = len(request.prompt_ids) - 1, len(texts[row])
        router_T = np.minimum.accumulate(routers_LRT[:, row, :end].min(0))[first:]
        choice_T = margins(arrays["logits"][row, first:end], request)
        is_near_T = np.minimum(choice_T, router_T) < NEAR_TIE
        found.append(int(is_near_T.argmax()) if is_near_T.any() else len(is_near_T))
    return found


def margins(logits_TV: np.ndarray, request: Request) -> np.ndarray:
    """By how much each of a request's tokens beat the next best one."""
    score_TV = jnp.asarray(logits_TV)
    if request.temperature:
        score_TV = score_TV / request.temperature
        kept_1TV = keep_top(score_TV[None], jax.tree.map(jnp.asarray, sampling_of({0: request}, 1)))
        score_TV = jnp.where(kept_1TV[0], score_TV, -jnp.inf)
        seed, pos = jnp.full(1, request.seed), jnp.arange(len(logits_TV)) + len(request.prompt_ids)
        score_TV += gumbel_noise(seed, pos[None], logits_TV.shape[-1])[0]
    best_T2 = jax.lax.top_k(score_TV, 2)[0]
    return np.asarray(best_T2[:, 0] - best_T2[:, 1])


def check(num_prompts: int, sampling: str, tree: str | None, batch_size: int, capsys) -> None:
    """The tokens are those of plain decoding, up to near-ties, which are printed and few."""
    asked, wanted = requests(num_prompts, sampling), plain(num_prompts, sampling, batch_size)
    ours = [done.tokens for done in generator(tree, batch_size).run(asked).completions]
    lengths = [request.max_new_tokens or NEW_TOKENS for request in asked]
    assert list(map(len, ours)) == list(map(len, wanted)) == lengths
    check_same(asked, wanted, ours, f"{sampling}, tree {tree}, batch {batch_size}", capsys)


def check_same(asked: Sequence[Request], wanted: Tokens, ours: Tokens, what: str, capsys) -> None:
    """The tokens are those that are wanted, up to near-ties, which are printed and few."""
    parted = [index for index in range(len(asked)) if ours[index] != wanted[index]]
    near_ties = first_near_ties([asked[i] for i in parted], [wanted[i] for i in parted])
    notes = []
    for index, near_tie in zip(parted, near_ties, strict=True):
        pairs = enumerate(zip(ours[index], wanted[index], strict=True))
        at = next(i for i, (mine, theirs) in pairs if mine != theirs)
        notes.append(f"request {index} parts at token {at}, the first near-tie is at {near_tie}")
        assert at >= near_tie, notes[-1]
    if notes:
        with capsys.disabled():
            print(f"\n{what}: {'; '.join(notes)}")
    assert len(notes) <= max(MAX_PARTED, MAX_PARTED * len(asked) // 64), notes


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", ["3x1x4", "3x4x16"])
def test_slice(tree, sampling, capsys):
    check(SLICE, sampling, tree, 8, capsys)


def test_mixed_slice(capsys):
    """Temperatures and cuts of all kinds side by side in one batch."""
    check(2, "mixed", "3x4x16", 8, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["1x1x2", "3x4x16", "5x8x32"])
def test_mixed_matrix(tree, capsys):
    check(len(prompt_ids()), "mixed", tree, 8, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize("tree", TREES)
def test_matrix(tree, batch_size, sampling, capsys):
    check(len(prompt_ids()), sampling, tree, batch_size, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_decoding_of_one_and_of_eight(sampling, capsys):
    """What the two columns of the matrix are compared with is the same text."""
    one, eight = (plain(len(prompt_ids()), sampling, batch_size) for batch_size in BATCHES)
    parted = [index for index, ids in enumerate(one) if ids != eight[index]]
    assert len(parted) <= MAX_PARTED, parted


def test_the_drafted_tokens_are_used():
    """The slice above would hold for a draft that is never right as well."""
    run = generator("3x4x16", 8).run(requests(SLICE, "greedy"))
    accepted = [count for completion in run.completions for count in completion.accepted]
    assert max(accepted) == 3
    assert len(accepted) < SLICE * (NEW_TOKENS - 1)


@pytest.mark.parametrize("tree", ["3x4x16", None])
def test_other_rows_change_nothing(tree):
    """Within one compiled shape: a request alone, and the same one among seven others."""
    generate, together = generator(tree, 8), requests(SLICE, "temperature 0.8")
    alone = generate.run(together[:1]).completions[0]
    among = generate.run(together).completions[0]
    assert alone.tokens == among.tokens
    assert alone.accepted == among.accepted


RAGGED = 32
"""Requests of many lengths, settings and limits, which come and go at different steps."""


def ragged() -> list[Request]:
    return [
        Request(
            tuple(ids[: 1 + 5 * index % len(ids)]),
            **MIXED[index % len(MIXED)],
            seed=index,
            max_new_tokens=4 + 7 * index % 17,
        )
        for index, ids in enumerate(prompt_ids()[:RAGGED])
    ]


@pytest.mark.slow
def test_company_changes_nothing(capsys):
    """Alone, and with 31 others in three orders: bit for bit in one compiled shape, that of eight
    places; in that of one place up to near-ties."""
    asked, eight, one = ragged(), generator("3x4x16", 8), generator("3x4x16", 1)
    assert len(asked) == RAGGED
    assert len({len(request.prompt_ids) for request in asked}) > 8

    def outcome(done):
        return done.tokens, done.accepted, done.finish

    alone = [outcome(eight.run([request]).completions[0]) for request in asked]
    assert any(max(accepted, default=0) for _, accepted, _ in alone)
    orders = [*range(RAGGED)], [*range(RAGGED)][::-1], np.random.default_rng(0).permutation(RAGGED)
    for order in orders:
        together = eight.run([asked[index] for index in order]).completions
        assert [outcome(done) for done in together] == [alone[index] for index in order]
    singly = [done.tokens for done in one.run(asked).completions]
    check_same(asked, [tokens for tokens, _, _ in alone], singly, "one place and eight", capsys)


def test_compiled_once_for_all_lengths():
    generate, ids = generator("3x4x16", 8), prompt_ids()[0] * 4
    lengths = [1, 2, 7, 15, 16, 17, 20, 31, 32, 33]
    run = generate.run([Request(tuple(ids[:length]), max_new_tokens=3) for length in lengths])
    assert [len(completion.tokens) for completion in run.completions] == [3] * len(lengths)
    assert generate.num_traces == {"prefill": 1, "decode": 1}
