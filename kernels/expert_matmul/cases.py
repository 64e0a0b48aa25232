"""Named real shapes of `expert_matmul`, shared by tests and benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.kernels.expert_matmul.packing import BLOCK, GROUP, PackedInt4

__all__ = ["CASES", "Case", "arguments", "experts", "shapes"]

WIDTH, HIDDEN, MODEL_EXPERTS, CHOICES = 7168, 2048, 384, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One call at Kimi-K2.5's widths.

    Attributes:
      tokens: of the whole batch; each chooses 8 of the model's 384 experts.
      experts: how many of those are here. Choices of the others are no expert.
      is_shared: every token chooses the same 8, all of them here.
    """

    name: str
    tokens: int
    experts: int
    is_shared: bool = False

    def num_bytes(self, expert_MX: np.ndarray) -> int:
        """What must move at least: each chosen expert and each of its tokens once, the output."""
        chosen = expert_MX[expert_MX < self.experts]
        matrices = np.unique(chosen).size * 3 * WIDTH * HIDDEN
        return matrices // 2 + matrices // GROUP * 2 + self.tokens * WIDTH * (2 + 4)

    def num_flops(self, expert_MX: np.ndarray) -> int:
        """Three products for each choice that is an expert here."""
        return int((expert_MX < self.experts).sum()) * 3 * 2 * WIDTH * HIDDEN


CASES = {
    case.name: case
    for case in [
        *(Case(f"eighth-{tokens}t", tokens, 48) for tokens in (1, 4, 8, 17, 32, 64, 128, 256, 512)),
        *(Case(f"all-{tokens}t", tokens, 384) for tokens in (1, 8, 17, 128)),
        Case("shared-16t", 16, 48, is_shared=True),
    ]
}
"""By name. `eighth`: the experts of one of eight devices; `all`: a whole layer's."""


def shapes(case: Case, layers: int = 2) -> dict[str, Any]:
    """`expert_matmul`'s arguments by name, as shapes."""

    def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def packed(out_features: int, in_features: int, *lead: int) -> PackedInt4:
        words = shape(*lead, out_features, in_features // 8, dtype=jnp.int32)
        scales = shape(*lead, in_features // BLOCK, BLOCK // GROUP, out_features)
        return PackedInt4(words, scales, in_features)

    choices = case.tokens, CHOICES
    return {
        "x_MD": shape(case.tokens, WIDTH),
        "gate_up": packed(HIDDEN, WIDTH, layers, case.experts, 2),
        "down": packed(WIDTH, HIDDEN, layers, case.experts),
        "layer": shape(dtype=jnp.int32),
        "expert_MX": shape(*choices, dtype=jnp.int32),
        "weight_MX": shape(*choices, dtype=jnp.float32),
    }


def experts(case: Case, seed: int) -> np.ndarray:
    """Evenly drawn choices [M, 8], distinct for each token; those not here are `case.experts`."""
    rng = np.random.default_rng(seed)
    if case.is_shared:
        return np.tile(rng.permutation(case.experts)[:CHOICES], (case.tokens, 1)).astype(np.int32)
    drawn = [rng.permutation(MODEL_EXPERTS)[:CHOICES] for _ in range(case.tokens)]
    return np.minimum(np.stack(drawn), case.experts).astype(np.int32)


def arguments(case: Case, seed: int, layers: int = 2) -> dict[str, Any]:
    """Random arguments, drawn on the default device: the words of a layer take gigabytes."""

    def drawn(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == jnp.int32:
            return jax.lax.bitcast_convert_type(jax.random.bits(key, shape.shape), jnp.int32)
        return 0.01 * jax.random.normal(key, shape.shape, shape.dtype)

    wanted = shapes(case, layers)
    leaves, tree = jax.tree.flatten([wanted[name] for name in ("x_MD", "gate_up", "down")])
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    x_MD, gate_up, down = jax.tree.unflatten(tree, map(drawn, keys, leaves))
    weight_MX = jnp.full((case.tokens, CHOICES), 1 / CHOICES, jnp.float32)
    return {
        "x_MD": x_MD * 100,
        "gate_up": gate_up,
        "down": down,
        "layer": jnp.int32(layers - 1),
        "expert_MX": jnp.asarray(experts(case, seed)),
        "weight_MX": weight_MX,
    }
