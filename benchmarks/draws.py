"""Independent draws over all of Kimi's vocabulary, against their exact probabilities.

    python benchmarks/draws.py [--draws 200000]

Each draw has noise of its own for each of the 163,840 tokens: a thousand seeds, each at as many
positions as it takes. Pearson's chi-square in cells of about equal probability, by the tokens' ids
and by their ranks, and with the likeliest tokens in a cell each. Writes results/draws.json and ends
with that object on one line. Exit status 1 if a statistic is beyond its 99.99 % point, or if
`sampling.choose` draws other tokens.

tests/test_sampling.py does the same in two minutes with 204,800 draws of an eighth of the
vocabulary each, and 25,600 of all of it.
"""

import argparse
import json
import sys
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling import Sampling, choose, gumbel_noise

VOCABULARY, NUM_SEEDS, TEMPERATURE = 163_840, 1000, 0.8
CHUNK = 2000
"""Draws between two signs of life."""
NUM_CELLS = 500
MIN_EXPECTED = 20
"""Draws that a cell has to expect."""
NUM_COMPARED = 64
"""Draws that are also made by `choose`, which compiles to three times the work on a CPU."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200_000)
    num_draws = parser.parse_args().draws
    logits_V = 2 * np.random.default_rng(1).normal(size=VOCABULARY).astype(np.float32)
    tokens = drawn(logits_V, num_draws)
    scores_V = logits_V.astype(np.float64) / TEMPERATURE
    probability_V = np.exp(scores_V - scores_V.max())
    probability_V /= probability_V.sum()
    rank_V = np.argsort(np.argsort(-logits_V))
    by_rank = np.where(num_draws * probability_V >= MIN_EXPECTED, rank_V, VOCABULARY)
    figures: dict[str, Any] = {
        "measured": "chi-square of the drawn tokens against exact probabilities",
        "vocabulary": VOCABULARY,
        "draws": num_draws,
        "temperature": TEMPERATURE,
        "same_as_choose": bool((tokens[:NUM_COMPARED] == chosen(logits_V)).all()),
        "by_id": chi_square(
            tokens, probability_V, equal_cells(probability_V, np.arange(VOCABULARY))
        ),
        "by_rank": chi_square(tokens, probability_V, equal_cells(probability_V, rank_V)),
        "likeliest_tokens": chi_square(tokens, probability_V, by_rank),
    }
    print(json.dumps(json.loads(common.write_result("draws", figures).read_text())))
    cells = (figures["by_id"], figures["by_rank"], figures["likeliest_tokens"])
    return 0 if figures["same_as_choose"] and all(one["holds"] for one in cells) else 1


def drawn(logits_V: np.ndarray, num_draws: int) -> np.ndarray:
    """The tokens of so many places, one after the other."""
    score_V = jnp.asarray(logits_V) / TEMPERATURE

    def draw(place: jax.Array) -> jax.Array:
        seed = (place % NUM_SEEDS).astype(jnp.uint32)[None]
        noise_V = gumbel_noise(seed, place[None, None] // NUM_SEEDS + 1, VOCABULARY)[0, 0]
        # Apart from each other, the noise and its maximum are a third of the work of both at once.
        noisy_V = jax.lax.optimization_barrier(score_V + noise_V)
        return jnp.where(noisy_V >= noisy_V.max(), jnp.arange(VOCABULARY), VOCABULARY).min()

    draw_all = jax.jit(lambda places: jax.lax.map(draw, places))
    found = []
    for first in range(0, num_draws, CHUNK):
        found.append(np.asarray(draw_all(first + jnp.arange(CHUNK))))
        print(f"{first + CHUNK} of {num_draws}", file=sys.stderr, flush=True)
    return np.concatenate(found)[:num_draws]


def chosen(logits_V: np.ndarray) -> np.ndarray:
    """The tokens of the first places, by what the step calls."""
    seeds = Sampling.of(NUM_COMPARED, seed=np.arange(NUM_COMPARED), temperature=TEMPERATURE)
    logits_BJV = jnp.broadcast_to(jnp.asarray(logits_V), (NUM_COMPARED, 1, VOCABULARY))
    root_BJ, length_B = jnp.zeros((NUM_COMPARED, 1), int), jnp.zeros(NUM_COMPARED, int)
    return np.asarray(choose(logits_BJV, root_BJ, length_B, seeds, levels=0))[:, 0]


def equal_cells(probability_V: np.ndarray, place_V: np.ndarray) -> np.ndarray:
    """The cell of each token: tokens in the order of their places, cut where shares are equal."""
    order = np.argsort(place_V)
    cell_V = np.empty(VOCABULARY, int)
    share = np.cumsum(probability_V[order])
    cell_V[order] = np.minimum((share * NUM_CELLS).astype(int), NUM_CELLS - 1)
    return cell_V


def chi_square(tokens: np.ndarray, probability_V: np.ndarray, cell_V: np.ndarray) -> dict[str, Any]:
    """The statistic over cells, its degrees of freedom, and the 99.99 % point of these."""
    counts = np.bincount(cell_V[tokens], minlength=cell_V.max() + 1)
    expected = len(tokens) * np.bincount(cell_V, probability_V)
    kept = expected >= MIN_EXPECTED
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    part = 2 / (9 * degrees)  # Wilson and Hilferty's approximation of the point
    point = degrees * (1 - part + 3.719 * part**0.5) ** 3
    return {
        "statistic": statistic,
        "degrees": degrees,
        "point_99_99": point,
        "holds": statistic < point,
    }


if __name__ == "__main__":
    sys.exit(main())
