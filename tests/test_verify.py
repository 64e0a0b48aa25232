import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.tree import Tree, only_root
from jaxspec.verify import accept
from tests import trees


def tree_of(parents: list[list[int]], tokens, levels: int) -> Tree:
    return Tree(
        jnp.asarray(tokens),
        jnp.asarray(parents),
        jnp.asarray(np.stack([trees.depths(p) for p in parents])),
        jnp.asarray(np.stack([trees.ancestors(p) for p in parents])),
        levels,
    )


def walk(parents: list[int], tokens: list[int], chosen: list[int]) -> list[int]:
    """The accepted nodes: from the root, on to the child that is the target's choice."""
    path = [0]
    while True:
        children = [j for j, parent in enumerate(parents) if parent == path[-1]]
        wanted = [j for j in children if tokens[j] == chosen[path[-1]]]
        if not wanted:
            return path
        path.append(wanted[0])


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_every_tree_and_every_choice(nodes):
    """All trees of up to five nodes, all tokens of two kinds and all choices of three."""
    cases = []
    for parents in itertools.product(*(range(j) for j in range(1, nodes))):
        parents = [-1, *parents]
        for drafted in itertools.product(range(2), repeat=nodes - 1):
            siblings = list(zip(parents[1:], drafted, strict=True))
            if len(set(siblings)) < len(siblings):
                continue  # siblings are distinct in a well-formed tree
            for chosen in itertools.product(range(3), repeat=nodes):
                cases.append((parents, [9, *drafted], list(chosen)))
    by_parents = {tuple(p): (trees.depths(p), trees.ancestors(p)) for p, _, _ in cases}
    depth, ancestors = (np.stack([by_parents[tuple(p)][i] for p, _, _ in cases]) for i in range(2))
    parents, tokens, chosen = (jnp.asarray([case[i] for case in cases]) for i in range(3))
    tree = Tree(tokens, parents, jnp.asarray(depth), jnp.asarray(ancestors), nodes - 1)
    got = jax.tree.map(np.asarray, jax.jit(accept)(tree, chosen))
    for index, case in enumerate(cases):
        path = walk(*case)
        length = len(path)
        assert got.count[index] == length - 1
        assert got.path[index, :length].tolist() == path
        assert (got.path[index, length:] == path[-1]).all()
        assert got.tokens[index, :length].tolist() == [case[2][node] for node in path]


def test_known_trees():
    """The greedy case of SGLang's tests/speculative/test_eagle_utils.py, as parents."""
    parents = [[-1, 0, 1, 0, 3, 4], [-1, 0, 1, 2, 0, 4]]
    tokens = [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]
    chosen = [[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]]
    got = accept(tree_of(parents, tokens, 3), jnp.asarray(chosen))
    assert got.count.tolist() == [3, 2]
    assert got.path.tolist() == [[0, 3, 4, 5], [0, 4, 5, 5]]
    assert got.tokens.tolist() == [[3, 4, 5, 18], [11, 12, 18, 18]]


def test_of_equal_siblings_the_first_counts():
    got = accept(tree_of([[-1, 0, 0, 2]], [[9, 4, 4, 5]], 3), jnp.asarray([[4, 6, 5, 7]]))
    assert got.path[0, : got.count[0] + 1].tolist() in ([0, 1], [0, 2, 3])


def test_plain_decoding_is_a_root_alone():
    got = accept(only_root(jnp.array([3, 4])), jnp.array([[8], [9]]))
    assert got.count.tolist() == [0, 0]
    assert got.tokens.tolist() == [[8], [9]]
