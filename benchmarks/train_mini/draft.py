"""The mini draft in its training form: EAGLE-3 (Llama type) with training-time test.

Slot i takes (features of position i, embedding of token i + 1) and predicts token i + 2. Later
steps feed the draft its own hidden state instead of the features, as it will run when it drafts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import target


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes, under Hugging Face's names; `boundaries` in this project's numbering."""

    hidden_size: int = 256
    intermediate_size: int = 384
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 48
    draft_vocab_size: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    boundaries: tuple[int, ...] = (2, 3, 5)


def init(config: Config, target_params: target.Params, draft_ids: np.ndarray, seed: int):
    """Returns fresh parameters; the head starts as the target's own rows for the draft's ids."""
    rng = np.random.default_rng(seed)
    d, head_dim = config.hidden_size, config.head_dim

    def normal(rows: int, cols: int, gain: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0, gain * rows**-0.5, (rows, cols)), jnp.float32)

    return {
        "fc": normal(len(config.boundaries) * d, d),
        "input_norm": jnp.ones(d),
        "hidden_norm": jnp.ones(d),
        "post_norm": jnp.ones(d),
        "norm": jnp.array(target_params["norm"]),
        "q": normal(2 * d, config.num_attention_heads * head_dim),
        "k": normal(2 * d, config.num_key_value_heads * head_dim),
        "v": normal(2 * d, config.num_key_value_heads * head_dim),
        "o": normal(config.num_attention_heads * head_dim, d, gain=0.5),
        "gate": normal(d, config.intermediate_size),
        "up": normal(d, config.intermediate_size),
        "down": normal(config.intermediate_size, d, gain=0.5),
        "head": jnp.asarray(target_params["head"])[:, draft_ids],
    }


def rotate(config: Config, x_BTNH: jax.Array, first_pos: int) -> jax.Array:
    """Returns x rotated at positions first_pos, first_pos + 1, ..., halves paired (Llama's way)."""
    half, t = config.head_dim // 2, x_BTNH.shape[1]
    inv_freq = config.rope_theta ** (-np.arange(half) / half)
    angle = ((first_pos + np.arange(t))[:, None] * inv_freq).astype(np.float32)[:, None]
    low, high = x_BTNH[..., :half], x_BTNH[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def layer(config: Config, p: dict, x_BTD, embedding_BTD, past: list, depth: int):
    """Returns (pre-norm output, past with this depth's keys and values) of the one layer.

    Row i of depth r stands at position i + r. It sees the rows 0..i of depth 0 (the causal block)
    and its own chain: row i of the depths 1..r (one diagonal each).
    """
    (b, t, _), eps = x_BTD.shape, config.rms_norm_eps
    e = target.rms_norm(embedding_BTD, p["input_norm"], eps)
    both = jnp.concatenate([e, target.rms_norm(x_BTD, p["hidden_norm"], eps)], -1)
    groups = config.num_attention_heads // config.num_key_value_heads

    def heads(name: str) -> jax.Array:
        return (both @ p[name]).reshape(b, t, -1, config.head_dim)

    q = rotate(config, heads("q"), depth) * config.head_dim**-0.5
    k = jnp.repeat(rotate(config, heads("k"), depth), groups, 2)
    past = [*past, (k, jnp.repeat(heads("v"), groups, 2))]
    (k0, v0), chain = past[0], past[1:]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k0)
    scores = [jnp.where(np.tri(t, dtype=bool), scores, -1e30)]
    scores += [jnp.einsum("btnh,btnh->bnt", q, k)[..., None] for k, _ in chain]
    probs = jax.nn.softmax(jnp.concatenate(scores, -1), -1)
    out = jnp.einsum("bnts,bsnh->btnh", probs[..., :t], v0)
    for r, (_, v) in enumerate(chain):
        out += jnp.einsum("bnt,btnh->btnh", probs[..., t + r], v)
    y = x_BTD + out.reshape(b, t, -1) @ p["o"]
    return y + target.mlp(p, target.rms_norm(y, p["post_norm"], eps)), past


def unroll(config: Config, p: dict, features_BTG, embed, ids_BT, num_steps: int):
    """Returns the draft logits `[B, T - num_steps, U]` of every step.

    Row i of step s has seen the true tokens up to i + 1 + s and predicts token i + 2 + s.
    """
    t = ids_BT.shape[1] - num_steps
    x, past, logits = features_BTG[:, :t] @ p["fc"], [], []
    for s in range(num_steps):
        x, past = layer(config, p, x, embed[ids_BT[:, s + 1 : s + 1 + t]], past, s)
        logits.append(target.rms_norm(x, p["norm"], config.rms_norm_eps) @ p["head"])
    return logits
