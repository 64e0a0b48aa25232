"""Trees of nodes for tests: parents (-1 for the root, parents first) and who sees whom."""

import numpy as np


def chain(nodes: int) -> list[int]:
    """Every node continues the one before."""
    return list(range(-1, nodes - 1))


def star(nodes: int) -> list[int]:
    """Every node continues the root."""
    return [-1, *[0] * (nodes - 1)]


def random_tree(nodes: int, seed: int) -> list[int]:
    """Every node continues some earlier one."""
    rng = np.random.default_rng(seed)
    return [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]


def path(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to `node`."""
    return [*(path(parents, parents[node]) if parents[node] >= 0 else []), node]


def depths(parents: list[int]) -> np.ndarray:
    """Each node's distance from the root."""
    return np.array([len(path(parents, node)) - 1 for node in range(len(parents))])


def ancestors(parents: list[int]) -> np.ndarray:
    """[J,J], whether node k is on the path to node j."""
    sees = np.zeros((len(parents),) * 2, bool)
    for node in range(len(parents)):
        sees[node, path(parents, node)] = True
    return sees
