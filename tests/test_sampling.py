import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_noise_depends_on_seed_and_position_alone():
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


def test_noise_does_not_follow_the_users_default_generator():
    seed, pos = jnp.zeros(1, jnp.uint32), jnp.zeros((1, 1), jnp.int32)
    before = gumbel_noise(seed, pos, 16)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(gumbel_noise(seed, pos, 16), before)


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


def test_logits_that_are_no_numbers_are_never_chosen():
    logits = random_logits(2, 1, 6)
    logits[:, :, [0, 3]] = np.nan
    for temperature in (0, 1):
        assert not set(chosen(logits, sampling(2, temperature)).ravel().tolist()) & {0, 3}
