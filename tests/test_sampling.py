import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxspec.kernels.tree_verify import xla
from jaxspec.kernels.tree_verify.sampling import gumbel
from jaxspec.sampling import Sampling, choose, gumbel_noise, keep_top
from tests.reference import formulas

jitted_choose = jax.jit(choose, static_argnames="levels")
jitted_keep_top = jax.jit(keep_top)


def sampling(batch: int, temperature=1.0, seed=None, **cuts) -> Sampling:
    seed = np.arange(batch) if seed is None else seed
    return Sampling.of(batch, seed=seed, temperature=temperature, **cuts)


def chosen(logits_BJV, settings: Sampling, depth=None, length=0, levels: int = 0) -> np.ndarray:
    logits_BJV = jnp.asarray(logits_BJV, jnp.float32)
    batch, nodes, _ = logits_BJV.shape
    depth = jnp.zeros((batch, nodes), jnp.int32) if depth is None else jnp.asarray(depth)
    lengths = jnp.broadcast_to(jnp.asarray(length), (batch,))
    return np.asarray(jitted_choose(logits_BJV, depth, lengths, settings, levels=levels))


def random_logits(*shape: int, seed: int = 0) -> np.ndarray:
    return 2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_temperature_zero_is_argmax_whatever_the_rest():
    logits = random_logits(4, 3, 50)
    got = chosen(logits, sampling(4, temperature=0, top_k=7, top_p=0.3))
    np.testing.assert_array_equal(got, logits.argmax(-1))
    assert chosen(np.zeros((1, 1, 5)), sampling(1, 0)).item() == 0, "of equals the lowest id"


def test_greedy_and_sampled_sequences_side_by_side():
    logits = random_logits(3, 2, 50)
    mixed = sampling(3, temperature=[0, 1.0, 0.5], top_p=[1, 0.9, 1])
    together = chosen(logits, mixed)
    for b in range(3):
        alone = sampling(1, [0, 1.0, 0.5][b], top_p=[1, 0.9, 1][b], seed=b)
        np.testing.assert_array_equal(chosen(logits[b : b + 1], alone)[0], together[b])


def check_noise_depends_on_seed_and_position_alone() -> None:
    """Nodes of a depth share it; a later root with shallower nodes stands at the same positions."""
    logits = np.broadcast_to(random_logits(1, 1, 50), (2, 4, 50))
    depths = np.array([[0, 1, 1, 2], [0, 1, 2, 2]])
    first = chosen(logits, sampling(2, seed=3), depths, length=10, levels=2)
    assert first[0, 1] == first[0, 2] == first[1, 1]
    assert first[0, 3] == first[1, 2] == first[1, 3]
    later = chosen(logits, sampling(2, seed=3), depths, length=11, levels=2)
    assert later[0, 0] == first[0, 1]
    assert later[0, 1] == first[0, 3]
    noise = gumbel_noise(jnp.arange(40, dtype=jnp.uint32), jnp.tile(jnp.arange(5), (40, 1)), 11)
    assert len(np.unique(noise)) == 40 * 5 * 11, "no two draws are one"


def test_noise_depends_on_seed_and_position_alone():
    check_noise_depends_on_seed_and_position_alone()


def test_noise_does_not_follow_the_users_default_generator():
    seed, pos = jnp.zeros(1, jnp.uint32), jnp.zeros((1, 1), jnp.int32)
    before = gumbel_noise(seed, pos, 16)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(gumbel_noise(seed, pos, 16), before)


def test_noise_is_fine_where_it_is_great():
    """Against f64; 32 bits reach to 22.9. A token of 1e-7 is drawn by noise above 16 or so."""
    edges = [0, 1, 2, 511, 512, 2**26 - 1, 2**26, 2**31, 2**32 - 2**9, 2**32 - 1]
    some = np.random.default_rng(0).integers(0, 2**32, 1000)
    bits = np.concatenate([edges, some, some >> 20]).astype(np.uint32)
    x = (bits.astype(np.float64) + 0.5) / 2**32
    got = np.asarray(jax.jit(gumbel)(jnp.asarray(bits.view(np.int32))))
    is_fine = x < 0.9  # above, x is rounded: the least noise is never what decides
    np.testing.assert_allclose(got[is_fine], -np.log(-np.log1p(-x[is_fine])), rtol=0, atol=4e-6)
    assert np.isfinite(got).all()
    assert got.max() > 22.8


def kept_by_sorting(scores: np.ndarray, top_k=0, top_p=1.0, min_p=0.0) -> set[int]:
    """What top-k, then top-p, then min-p, keep of distinct scores."""
    order = np.argsort(-scores)[: top_k or None]
    if top_p < 1:
        mass = np.cumsum(formulas.softmax(scores[order].astype(float)))
        order = order[: np.searchsorted(mass, top_p) + 1]
    share = formulas.softmax(scores[order].astype(float))
    return set(order[share >= min_p * share[0]].tolist())


@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 99])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.03, 0.3, 1.0])
def test_what_is_kept(top_k, top_p, min_p):
    scores, cuts = random_logits(3, 2, 50), {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    kept = jitted_keep_top(jnp.asarray(scores), sampling(3, **cuts))
    for b, j in np.ndindex(3, 2):
        assert set(np.flatnonzero(kept[b, j]).tolist()) == kept_by_sorting(scores[b, j], **cuts)


def test_equals_of_the_last_one_kept_stay():
    scores = jnp.array([[[0.0, 1.0, 1.0, 1.0, 2.0, -jnp.inf]]])
    kept = jitted_keep_top(scores, sampling(1, top_k=2))
    assert kept[0, 0].tolist() == [False, True, True, True, True, False]


def test_negative_zero_is_zero():
    scores = jnp.array([[[0.0, -0.0, -1.0]]])
    assert keep_top(scores, sampling(1, top_k=1))[0, 0].tolist() in (
        [True, False, False],
        [True, True, False],
    )


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 4},
    {"temperature": 0.5, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.15},
]


def check_samples_follow_the_distribution(settings: dict[str, float]) -> None:
    """Pearson's chi-square over 20 000 seeds; the bound is its 99.99 % point for 9 degrees."""
    draws, logits = 20_000, random_logits(10)
    got = chosen(np.broadcast_to(logits, (draws, 1, 10)), sampling(draws, **settings))
    cuts = {name: value for name, value in settings.items() if name != "temperature"}
    scores = logits.astype(float) / settings["temperature"]
    kept = sorted(kept_by_sorting(scores, **cuts))
    expected = draws * formulas.softmax(scores[kept])
    counts = np.bincount(got[:, 0], minlength=10)
    assert counts.sum() == counts[kept].sum(), "a token that was cut was chosen"
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 33.7


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_samples_follow_the_distribution(settings):
    check_samples_follow_the_distribution(settings)


def check_two_tokens_in_a_row_are_independent() -> None:
    """All 16 pairs of what follows a root and its child, over 20 000 seeds: exact products.

    The bound is the 99.99 % point of chi-square for 15 degrees.
    """
    draws, logits = 20_000, random_logits(2, 4)
    depths = np.broadcast_to([0, 1], (draws, 2))
    got = chosen(np.broadcast_to(logits, (draws, 2, 4)), sampling(draws), depths, levels=1)
    counts = np.bincount(got[:, 0] * 4 + got[:, 1], minlength=16)
    first, second = (formulas.softmax(row.astype(float)) for row in logits)
    expected = draws * np.outer(first, second).ravel()
    assert ((counts - expected) ** 2 / expected).sum() < 44.3


def test_two_tokens_in_a_row_are_independent():
    check_two_tokens_in_a_row_are_independent()


def noise_reused_across_positions(monkeypatch) -> None:
    honest = xla.gumbel_noise
    monkeypatch.setattr(xla, "gumbel_noise", lambda s, pos, v: honest(s, jnp.zeros_like(pos), v))


def noise_keyed_by_node(monkeypatch) -> None:
    honest = xla.choose

    def choose(logits, depth, length, settings, *, levels):
        node = jnp.broadcast_to(jnp.arange(depth.shape[1]), depth.shape)
        return honest(logits, node, length, settings, levels=depth.shape[1] - 1)

    monkeypatch.setattr(xla, "choose", choose)


def top_p_before_temperature(monkeypatch) -> None:
    honest = xla.keep_top

    def keep_top(score, settings):
        return honest(score * settings.temperature[:, None, None], settings)

    monkeypatch.setattr(xla, "keep_top", keep_top)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (noise_reused_across_positions, check_two_tokens_in_a_row_are_independent),
        (noise_keyed_by_node, check_noise_depends_on_seed_and_position_alone),
        (top_p_before_temperature, lambda: check_samples_follow_the_distribution(SETTINGS[3])),
    ],
    ids=["noise_reused_across_positions", "noise_keyed_by_node", "top_p_before_temperature"],
)
def test_sabotage_makes_a_test_fail(monkeypatch, plant, check):
    plant(monkeypatch)
    fresh = jax.jit(lambda *args, levels: choose(*args, levels=levels), static_argnames="levels")
    monkeypatch.setattr(sys.modules[__name__], "jitted_choose", fresh)
    with pytest.raises(AssertionError):
        check()


VOCABULARY, PARTS, DRAWS = 163_840, 8, 25_600


def chi_square_point(degrees: int) -> float:
    """The 99.99 % point for so many degrees of freedom, as Wilson and Hilferty approximate it."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.719 * part**0.5) ** 3


@pytest.mark.slow
def test_samples_follow_the_distribution_at_full_vocabulary():
    """204,800 draws over Kimi's vocabulary, by their place in it and by their probability.

    The noise of a position serves eight nodes, each of which may choose in an eighth of the
    vocabulary: no two of these draws see the same numbers. A ninth node chooses in all of it.
    """
    logits = 2 * np.random.default_rng(1).normal(size=VOCABULARY).astype(np.float32)
    part = np.arange(VOCABULARY) * PARTS // VOCABULARY
    rows = [np.where(part == p, logits, -np.inf) for p in range(PARTS)] + [logits]
    logits_JV, depth_J = jnp.asarray(np.stack(rows), jnp.float32), jnp.zeros((1, PARTS + 1), int)

    @jax.jit
    def drawn(logits_JV, place):
        # A thousand seeds, each at many positions.
        how = Sampling.of(1, seed=place % 1000, temperature=0.8)
        return choose(logits_JV[None], depth_J, place[None] // 1000, how, levels=0)[0]

    places = jnp.arange(DRAWS)
    got = np.asarray(
        jax.jit(lambda logits, at: lax.map(lambda i: drawn(logits, i), at))(logits_JV, places)
    )
    probability = np.stack([formulas.softmax(row.astype(float) / 0.8) for row in rows])
    rank = np.empty(VOCABULARY, int)
    rank[np.argsort(-logits)] = np.arange(VOCABULARY)
    for node in range(PARTS + 1):
        assert (probability[node, got[:, node]] > 0).all()
    by_part = (got[:, :PARTS], probability[:PARTS])
    for tokens, p in (by_part, (got[:, PARTS:], probability[PARTS:])):
        # Cells of about equal probability: runs of ids, and runs of ranks.
        for order in (np.arange(VOCABULARY), rank):
            mass = np.zeros(VOCABULARY)
            mass[order] = p.sum(0) / len(p)
            cell = np.minimum((np.cumsum(mass) * 500).astype(int), 499)[order]
            counts = np.bincount(cell[tokens].ravel(), minlength=500)
            expected = tokens.size * np.bincount(cell, p.sum(0) / len(p), minlength=500)
            cells = expected > 20
            assert cells.sum() > 400
            statistic = ((counts - expected) ** 2 / np.where(cells, expected, 1))[cells].sum()
            assert statistic < chi_square_point(int(cells.sum()))


def test_logits_that_are_no_numbers_are_never_chosen():
    logits = random_logits(2, 1, 6)
    logits[:, :, [0, 3]] = np.nan
    for temperature in (0, 1):
        assert not set(chosen(logits, sampling(2, temperature)).ravel().tolist()) & {0, 3}
