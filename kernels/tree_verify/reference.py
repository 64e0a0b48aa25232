"""The definition of correct for `tree_verify`: each node's token by a sort, then a walk by hand."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.tree_verify.sampling import Sampling, gumbel_noise
from jaxspec.kernels.tree_verify.xla import Accepted, Verified

__all__ = ["tree_verify_reference"]


def tree_verify_reference(
    logits_BJV: jax.Array,
    tokens_BJ: jax.Array,
    parent_BJ: jax.Array,
    depth_BJ: jax.Array,
    length_B: jax.Array,
    sampling: Sampling,
    *,
    levels: int,
) -> Verified:
    """As `tree_verify`; of equal siblings the first one counts."""
    logits_BJV = logits_BJV.astype(jnp.float32)
    noise_BJV = gumbel_noise(sampling.seed, length_B[:, None] + 1 + depth_BJ, logits_BJV.shape[-1])
    chosen_BJ = jax.vmap(_chosen)(
        logits_BJV,
        noise_BJV,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
    )

    def walk(tokens_J: jax.Array, parent_J: jax.Array, chosen_J: jax.Array) -> Accepted:
        def step(node: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            is_next_J = (parent_J == node) & (tokens_J == chosen_J[node])
            return jnp.where(is_next_J.any(), jnp.argmax(is_next_J), node), node

        _, path_P = lax.scan(step, jnp.int32(0), None, levels + 1)
        return Accepted(path_P, (path_P[1:] != path_P[:-1]).sum(), chosen_J[path_P])

    accepted = jax.vmap(walk)(tokens_BJ, parent_BJ, chosen_BJ)
    is_nan_BJ = jnp.isnan(logits_BJV).any(-1)
    return Verified(accepted, jnp.take_along_axis(is_nan_BJ, accepted.path, axis=1).any(1))


def _chosen(
    logits_JV: jax.Array,
    noise_JV: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> jax.Array:
    """The token after each node of one sequence, [J] int32."""
    vocab_size = logits_JV.shape[-1]
    logits_JV = jnp.where(jnp.isnan(logits_JV), -jnp.inf, logits_JV)
    score_JV = logits_JV - logits_JV.max(-1, keepdims=True)
    score_JV = score_JV / jnp.where(temperature > 0, temperature, 1.0)
    sorted_JV = -jnp.sort(-score_JV, axis=-1)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size) - 1
    is_kept_JV = score_JV >= sorted_JV[:, last, None]
    probability_JV = jax.nn.softmax(jnp.where(is_kept_JV, score_JV, -jnp.inf), axis=-1)
    mass_JV = jnp.cumsum(-jnp.sort(-probability_JV, axis=-1), axis=-1)
    # The first place at which the most probable ones reach the share; all, where rounding keeps
    # them from it.
    place_J = jnp.minimum((mass_JV < top_p).sum(-1), vocab_size - 1)
    nucleus_J1 = jnp.take_along_axis(sorted_JV, place_J[:, None], axis=-1)
    is_kept_JV &= (score_JV >= nucleus_J1) | (top_p >= 1)
    is_kept_JV &= probability_JV >= min_p * probability_JV.max(-1, keepdims=True)
    noisy_JV = jnp.where(is_kept_JV, score_JV, -jnp.inf) + noise_JV
    return jnp.where(
        temperature > 0, jnp.argmax(noisy_JV, axis=-1), jnp.argmax(logits_JV, axis=-1)
    ).astype(jnp.int32)
