import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import KeyValues, Latents, commit

LAYERS, BATCH, SLOTS, ROWS, HEADS = 2, 4, 8, 5, 3
KINDS = {
    "latents": lambda n: (Latents, (LAYERS, BATCH, n, 6), (LAYERS, BATCH, n, 2)),
    "key values": lambda n: (KeyValues, (LAYERS, HEADS, BATCH, n, 6), (LAYERS, HEADS, BATCH, n, 6)),
}
PATH = np.array([[0, 1, 3, 4], [0, 2, 2, 2], [0, 1, 2, 3], [0, 4, 4, 4]], np.int32)


def random(kind: str, num: int, seed: int):
    make, *shapes = KINDS[kind](num)
    rng = np.random.default_rng(seed)
    return make(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))


def expected(slots: jax.Array, rows: jax.Array, start: list[int], count: list[int]) -> np.ndarray:
    """One row after another, those without a slot left out."""
    out = np.array(slots)
    for b in range(BATCH):
        for i in range(count[b]):
            if start[b] + i < SLOTS:
                out[..., b, start[b] + i, :] = rows[..., b, PATH[b, i], :]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("start", "count"),
    [
        ([0, 2, 3, 1], [4, 2, 3, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([4, 5, 6, 7], [4, 4, 4, 4]),  # up to the last slot, and one, two, three rows past it
        ([8, 8, 7, 8], [4, 0, 0, 1]),  # a full cache
    ],
    ids=["ragged", "nothing", "over the end", "full"],
)
def test_commit(kind, start, count):
    cache, rows = random(kind, SLOTS, 0), random(kind, ROWS, 1)
    got = jax.jit(commit)(cache, rows, PATH, jnp.array(start), jnp.array(count))
    for mine, slots, row in zip(*map(jax.tree.leaves, (got, cache, rows)), strict=True):
        np.testing.assert_array_equal(mine, expected(slots, row, start, count))
