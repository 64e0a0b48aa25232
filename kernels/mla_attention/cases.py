"""Named real shapes of `mla_attention`, shared by tests and benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["CASES", "Case", "arguments", "shapes"]

LATENT_WIDTH, ROTARY_WIDTH = 512, 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One call at Kimi-K2.5's widths.

    Attributes:
      tokens: query tokens; a tree's nodes if `has_tree`, else a chain or a prompt chunk.
      heads: local heads: 64 over the devices of a tensor-parallel group.
      kv_len: filled slots of each sequence.
      slots: capacity of each sequence's cache.
    """

    name: str
    tokens: int
    heads: int
    kv_len: tuple[int, ...]
    slots: int
    has_tree: bool = False

    @property
    def num_bytes(self) -> int:
        """What must move at least: each filled and new row once, the queries, the outputs, the
        log-sum-exps."""
        batch, rows = len(self.kv_len), self.tokens * self.heads
        keys = sum(self.kv_len) + batch * self.tokens
        queries = batch * rows * (LATENT_WIDTH + ROTARY_WIDTH)
        outputs = batch * rows * LATENT_WIDTH
        return 2 * (keys * (LATENT_WIDTH + ROTARY_WIDTH) + queries + outputs) + 4 * batch * rows

    @property
    def num_flops(self) -> int:
        """Scores and mixtures over the keys that are seen, those of a tree counted as a chain's."""
        new = self.tokens * (self.tokens + 1) // 2
        seen = sum(self.tokens * length + new for length in self.kv_len)
        return seen * self.heads * 2 * (2 * LATENT_WIDTH + ROTARY_WIDTH)


def _grid() -> list[Case]:
    cases = []
    for heads in (8, 16, 32, 64):
        for tokens in (1, 4, 8, 16, 32, 64):
            for kilo in (4, 32, 128):
                slots, name = kilo * 1024, f"{heads}h-{tokens}t-{kilo}k"
                cases.append(Case(name, tokens, heads, (slots,), slots, has_tree=tokens > 1))
    return cases


CASES = {
    case.name: case
    for case in [
        *_grid(),
        Case("decode-8", 1, 8, (32768,) * 8, 32768),
        Case("tree-8", 16, 8, (32768,) * 8, 32768, has_tree=True),
        Case("ragged-8", 16, 8, (0, 1, 63, 1000, 4096, 10000, 20000, 32768), 32768, has_tree=True),
        Case("tree-23", 23, 8, (5000,), 32768, has_tree=True),
        Case("tree-128", 128, 8, (32768,), 32768, has_tree=True),
        Case("chunk-first", 2048, 8, (0,), 32768),
        Case("chunk-late", 2048, 8, (30720,), 32768),
        Case("chunk-64h", 2048, 64, (30720,), 32768),
    ]
}
"""By name. `<heads>h-<tokens>t-<slots / 1024>k`: one sequence, its cache full, a tree if T > 1."""


def shapes(case: Case, layers: int = 2) -> dict[str, jax.ShapeDtypeStruct | None]:
    """`mla_attention`'s arguments by name, as shapes; bf16."""
    batch, tokens, heads = len(case.kv_len), case.tokens, case.heads

    def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    return {
        "q_latent_BTNC": shape(batch, tokens, heads, LATENT_WIDTH),
        "q_rotary_BTNR": shape(batch, tokens, heads, ROTARY_WIDTH),
        "latent_LBSC": shape(layers, batch, case.slots, LATENT_WIDTH),
        "rotary_LBSR": shape(layers, batch, case.slots, ROTARY_WIDTH),
        "layer": shape(dtype=jnp.int32),
        "kv_len_B": shape(batch, dtype=jnp.int32),
        "new_latent_BTC": shape(batch, tokens, LATENT_WIDTH),
        "new_rotary_BTR": shape(batch, tokens, ROTARY_WIDTH),
        "sees_BTT": shape(batch, tokens, tokens, dtype=jnp.bool_) if case.has_tree else None,
    }


def arguments(case: Case, seed: int, layers: int = 2) -> dict[str, jax.Array | None]:
    """Random arguments: normal numbers, NaN in unfilled slots, a random tree for each sequence.

    Drawn on the default device: at the real sizes a host would take minutes.
    """
    kv_len_B = jnp.asarray(case.kv_len, jnp.int32)
    floats = {
        name: shape
        for name, shape in shapes(case, layers).items()
        if shape is not None and shape.dtype == jnp.bfloat16
    }
    drawn: dict[str, Any] = {
        name: 0.5 * jax.random.normal(key, shape.shape, shape.dtype)
        for key, (name, shape) in zip(
            jax.random.split(jax.random.key(seed), len(floats)), floats.items(), strict=True
        )
    }
    is_filled = jnp.arange(case.slots)[None] < kv_len_B[:, None]
    for name in ("latent_LBSC", "rotary_LBSR"):
        drawn[name] = jnp.where(is_filled[None, :, :, None], drawn[name], jnp.nan)
    drawn |= {"layer": jnp.int32(layers - 1), "kv_len_B": kv_len_B, "sees_BTT": None}
    if case.has_tree:
        rng = np.random.default_rng(seed)
        drawn["sees_BTT"] = jnp.asarray(
            np.stack([_random_tree(rng, case.tokens) for _ in case.kv_len])
        )
    return drawn


def _random_tree(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """[T,T], whether node k is on the path to node t; a parent is any earlier node."""
    sees = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        sees[node] |= sees[rng.integers(0, node)]
    return sees
