import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.tree import build, only_root
from tests import trees

BATCH = 64
jitted_build = jax.jit(build, static_argnames=("nodes", "levels"))


def random_pool(branches: int, levels: int, seed: int, log_probs) -> dict[str, np.ndarray]:
    """Pools as `propose` makes them: every level's best candidates go on; ties are common."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray:
        return rng.choice(log_probs, (BATCH, count)).astype(np.float32)

    scores, parents = [draw(branches)], [np.full((BATCH, branches), -1)]
    beams, size = np.tile(np.arange(branches), (BATCH, 1)), branches
    for _ in range(1, levels):
        pool = np.concatenate(scores, axis=1)
        scores.append(
            np.repeat(np.take_along_axis(pool, beams, 1), branches, 1) + draw(branches**2)
        )
        parents.append(np.repeat(beams, branches, 1))
        best = np.argsort(-scores[-1], axis=1, kind="stable")[:, :branches]
        beams, size = size + best, size + branches**2
    level = np.repeat(np.arange(levels), [branches] + [branches**2] * (levels - 1))
    return {
        "score": np.concatenate(scores, axis=1),
        "token": rng.integers(0, 1000, (BATCH, size)),
        "parent": np.concatenate(parents, axis=1),
        "level": level,
    }


def built(pool: dict[str, np.ndarray], nodes: int, levels: int):
    root = np.arange(BATCH) + 5000
    arguments = (jnp.asarray(root), *(jnp.asarray(pool[name]) for name in pool))
    return jitted_build(*arguments, nodes=nodes, levels=levels)


@pytest.mark.parametrize(
    ("branches", "levels", "nodes"),
    [(1, 1, 2), (1, 4, 5), (4, 3, 16), (3, 4, 31), (8, 5, 32), (4, 1, 5)],
)
@pytest.mark.parametrize("log_probs", [(-0.1, -0.5, -1.7, -3.1), (0.0, -1.0)], ids=["", "certain"])
def test_tree_of_the_best(branches, levels, nodes, log_probs):
    """The best of the pool, of equals the first; parents are nodes too, and come before."""
    pool = random_pool(branches, levels, 0, log_probs)
    tree = built(pool, nodes, levels)
    for b in range(BATCH):
        order = sorted(range(len(pool["level"])), key=lambda i: (-pool["score"][b, i], i))
        kept = sorted(order[: nodes - 1])
        node_of = {-1: 0} | {candidate: 1 + j for j, candidate in enumerate(kept)}
        parents = [-1] + [node_of[pool["parent"][b, candidate]] for candidate in kept]
        assert tree.tokens[b].tolist() == [5000 + b, *pool["token"][b, kept]]
        assert tree.parent[b].tolist() == parents
        assert all(parent < node for node, parent in enumerate(parents))
        np.testing.assert_array_equal(tree.depth[b], trees.depths(parents))
        np.testing.assert_array_equal(tree.ancestors[b], trees.ancestors(parents))


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_scores_that_are_no_numbers_make_a_tree_all_the_same(share):
    """Parents stay in range and before their children, so that every walk ends."""
    pool, rng = random_pool(4, 3, 1, (-0.1, -1.0)), np.random.default_rng(0)
    for i in range(pool["score"].shape[1]):
        above = pool["parent"][:, i]
        is_bad = (above >= 0) & np.isnan(pool["score"][np.arange(BATCH), above])
        pool["score"][is_bad | (rng.random(BATCH) < share), i] = np.nan
    tree = built(pool, 16, 3)
    parent = np.asarray(tree.parent)
    assert (parent[:, 0] == -1).all()
    assert ((parent[:, 1:] >= 0) & (parent[:, 1:] < np.arange(1, 16))).all()
    for b in range(BATCH):
        np.testing.assert_array_equal(tree.ancestors[b], trees.ancestors(parent[b].tolist()))


def test_only_root():
    tree = only_root(jnp.array([7, 8]))
    assert tree.tokens.tolist() == [[7], [8]]
    assert tree.parent.tolist() == [[-1], [-1]]
    assert tree.ancestors.tolist() == [[[True]], [[True]]]
    assert tree.levels == 0
