"""What the target learns beside the next token: to be read by a draft.

Multi-token prediction (arXiv:2412.19437, section 2.2) with EAGLE-3's one layer as the module, and
the target's own distribution as what it has to say: it reads the boundaries that the draft will
read, and its gradient teaches the target to keep in them what a draft needs. It is thrown away;
the draft that ships begins with nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import target
from target import Params, rms_norm

CAPTURED = (2, 3, 5)
HEADS, HEAD_DIM, MLP = 4, 96, 768
ROPE_THETA = 10000.0


def init(config: target.Config, seed: int) -> Params:
    """Returns fresh parameters."""
    rng = np.random.default_rng(seed)
    d, width = config.hidden_size, HEADS * HEAD_DIM

    def normal(rows: int, cols: int, gain: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0, gain * rows**-0.5, (rows, cols)), jnp.float32)

    norms = {name: jnp.ones(d) for name in ("input_norm", "hidden_norm", "post_norm", "norm")}
    return norms | {
        "fc": normal(len(CAPTURED) * d, d),
        **{name: normal(2 * d, width) for name in "qkv"},
        "o": normal(width, d, gain=0.5),
        "gate": normal(d, MLP),
        "up": normal(d, MLP),
        "down": normal(MLP, d, gain=0.5),
    }


def rotate(x_BTNH: jax.Array) -> jax.Array:
    """Returns x rotated at positions 0, 1, ..., halves paired (Llama's way)."""
    half = HEAD_DIM // 2
    inv_freq = ROPE_THETA ** (-np.arange(half) / half)
    angle = (np.arange(x_BTNH.shape[1])[:, None] * inv_freq).astype(np.float32)[:, None]
    low, high = x_BTNH[..., :half], x_BTNH[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def logits(
    config: target.Config,
    params: Params,
    boundaries: list[jax.Array],
    ids_BT: jax.Array,
    depths: int,
) -> list[jax.Array]:
    """Returns what is said of the tokens after the next one, `[B, T - d, V]` for depth d = 1, ...

    Row t of depth d is given tokens t + 1 ... t + d and speaks of token t + d + 1. A depth past
    the first goes on from the hidden states of the one before.
    """
    p, eps, out = params["ahead"], config.rms_norm_eps, []
    x = jnp.concatenate([boundaries[b] for b in CAPTURED], -1) @ p["fc"]
    for depth in range(1, depths + 1):
        x = layer(p, x[:, :-1], params["embed"][ids_BT[:, depth:]], eps)
        out.append(rms_norm(x, p["norm"], eps) @ params["head"])
    return out


def layer(p: Params, x: jax.Array, token: jax.Array, eps: float) -> jax.Array:
    """Returns the layer's hidden states, given those before (features at first) and the tokens."""
    x = rms_norm(x, p["hidden_norm"], eps)
    both = jnp.concatenate([rms_norm(token, p["input_norm"], eps), x], -1)
    q, k, v = ((both @ p[name]).reshape(*x.shape[:2], HEADS, HEAD_DIM) for name in "qkv")
    scores = jnp.einsum("btnh,bsnh->bnts", rotate(q) * HEAD_DIM**-0.5, rotate(k))
    probs = jax.nn.softmax(jnp.where(np.tri(x.shape[1], dtype=bool), scores, -1e30), -1)
    out = jnp.einsum("bnts,bsnh->btnh", probs, v).reshape(*x.shape[:2], -1)
    x = x + out @ p["o"]  # the residual is the normed state: `norm_before_residual`
    return x + target.mlp(p, rms_norm(x, p["post_norm"], eps))
