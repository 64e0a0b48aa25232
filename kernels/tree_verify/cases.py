"""Named real shapes of `tree_verify`, shared by tests and benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.kernels.tree_verify.sampling import Sampling

__all__ = ["CASES", "Case", "arguments", "shapes"]

VOCABULARY = 163840
MAX_LEVELS = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One call at Kimi-K2.5's vocabulary.

    Attributes:
      nodes: of each sequence's tree, the root among them.
      is_sampled: at a temperature above 0; else greedy.
      is_cut: by top-k and top-p too.
    """

    name: str
    nodes: int
    batch: int
    is_sampled: bool = False
    is_cut: bool = False
    dtype: str = "float32"

    @property
    def levels(self) -> int:
        """The greatest depth."""
        return min(self.nodes - 1, MAX_LEVELS)

    @property
    def num_bytes(self) -> int:
        """What must move at least: the logits once."""
        return self.batch * self.nodes * VOCABULARY * jnp.dtype(self.dtype).itemsize


def _grid() -> list[Case]:
    cases = []
    for nodes in (1, 4, 16, 32, 64, 128):
        for batch in (1, 8, 32):
            cases.append(Case(f"{nodes}n-{batch}b-greedy", nodes, batch))
            cases.append(Case(f"{nodes}n-{batch}b-sampled", nodes, batch, is_sampled=True))
    return cases


CASES = {
    case.name: case
    for case in [
        *_grid(),
        Case("16n-1b-cut", 16, 1, is_sampled=True, is_cut=True),
        Case("16n-1b-bf16", 16, 1, is_sampled=True, dtype="bfloat16"),
    ]
}
"""By name: nodes, sequences, and how tokens are chosen."""


def shapes(case: Case) -> dict[str, Any]:
    """`tree_verify`'s arguments by name, as shapes."""

    def shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    batch, nodes = case.batch, case.nodes
    return {
        "logits_BJV": shape(batch, nodes, VOCABULARY, dtype=jnp.dtype(case.dtype)),
        "tokens_BJ": shape(batch, nodes),
        "parent_BJ": shape(batch, nodes),
        "depth_BJ": shape(batch, nodes),
        "ancestors_BJJ": shape(batch, nodes, nodes, dtype=jnp.bool_),
        "length_B": shape(batch),
        "sampling": jax.eval_shape(lambda: Sampling.of(batch)),
    }


def arguments(case: Case, seed: int) -> dict[str, Any]:
    """Random arguments: normal logits, drawn on the default device; a tree for each sequence.

    A node's first child is the argmax of its logits, so that greedy walks reach a leaf.
    """
    rng, batch, nodes = np.random.default_rng(seed), case.batch, case.nodes
    parent, depth, ancestors = (
        np.stack(parts)
        for parts in zip(
            *(_random_tree(rng, nodes, case.levels) for _ in range(batch)), strict=True
        )
    )
    logits = jax.random.normal(jax.random.key(seed), (batch, nodes, VOCABULARY))
    logits = logits.astype(case.dtype)
    best, tokens = np.asarray(jnp.argmax(logits, -1)), rng.integers(0, VOCABULARY, (batch, nodes))
    for b in range(batch):
        firsts = {int(above): node for node, above in reversed([*enumerate(parent[b])][1:])}
        for above, node in firsts.items():
            tokens[b, node] = best[b, above]
    return {
        "logits_BJV": logits,
        "tokens_BJ": jnp.asarray(tokens, jnp.int32),
        "parent_BJ": jnp.asarray(parent, jnp.int32),
        "depth_BJ": jnp.asarray(depth, jnp.int32),
        "ancestors_BJJ": jnp.asarray(ancestors),
        "length_B": jnp.asarray(rng.integers(0, 1 << 17, batch), jnp.int32),
        "sampling": Sampling.of(
            batch,
            seed=np.arange(batch, dtype=np.uint32) + np.uint32(seed),
            temperature=float(case.is_sampled),
            **({"top_k": 50, "top_p": 0.95} if case.is_cut else {}),
        ),
    }


def _random_tree(
    rng: np.random.Generator, nodes: int, levels: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents, depths and who sees whom; level by level, as trees are built, evenly filled."""
    depth = np.zeros(nodes, int)
    depth[1:] = 1 + np.arange(nodes - 1) * levels // max(nodes - 1, 1)
    parent, sees = np.full(nodes, -1), np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        parent[node] = rng.choice(np.flatnonzero(depth == depth[node] - 1))
        sees[node] |= sees[parent[node]]
    return parent, depth, sees
