"""The mini target in its training form: Kimi-K2.5's architecture as pure functions over f32 arrays.

MLA is expanded (keys and values per head), the experts are gathered up to a capacity, and linear
weights are stored `[in, out]`. `export.py` transposes them into the published layout.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

Params = dict


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes, under Hugging Face's names. All RMSNorms, the latents' too, use rms_norm_eps."""

    vocab_size: int = 320
    hidden_size: int = 256
    num_hidden_layers: int = 6
    intermediate_size: int = 256
    moe_intermediate_size: int = 256
    n_routed_experts: int = 16
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.5
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 50000.0
    rope_factor: float = 4.0
    rope_original_length: int = 256
    group_size: int = 32


def yarn_inv_freq(config: Config) -> np.ndarray:
    """Returns the `[rope dim / 2]` rotary frequencies under YaRN (beta_fast 32, beta_slow 1)."""
    dim, base = config.qk_rope_head_dim, config.rope_theta

    def corrected(rotations: float) -> float:
        cycle = config.rope_original_length / (rotations * 2 * math.pi)
        return dim * math.log(cycle) / (2 * math.log(base))

    low = max(math.floor(corrected(32.0)), 0)
    high = min(math.ceil(corrected(1.0)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    plain = base ** (-2.0 * np.arange(dim // 2) / dim)
    return (plain / config.rope_factor * ramp + plain * (1 - ramp)).astype(np.float32)


def softmax_scale(config: Config) -> float:
    """Returns the attention scale, YaRN's mscale (mscale = mscale_all_dim = 1) included."""
    mscale = 0.1 * math.log(config.rope_factor) + 1
    return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * mscale**2


def init(config: Config, seed: int) -> Params:
    """Returns fresh f32 parameters: layer 0 dense, the others mixtures of experts."""
    rng = np.random.default_rng(seed)
    d, heads, f = config.hidden_size, config.num_attention_heads, config.moe_intermediate_size
    e, depth = config.n_routed_experts, 2 * config.num_hidden_layers

    def normal(*shape: int, gain: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0, gain * shape[-2] ** -0.5, shape), jnp.float32)

    def mlp(*lead: int, inner: int) -> Params:
        down = normal(*lead, inner, d, gain=depth**-0.5)
        return {"gate": normal(*lead, d, inner), "up": normal(*lead, d, inner), "down": down}

    def layer(index: int) -> Params:
        qk = config.qk_nope_head_dim + config.qk_rope_head_dim
        kv_out = heads * (config.qk_nope_head_dim + config.v_head_dim)
        out = {
            "input_norm": jnp.ones(d),
            "post_norm": jnp.ones(d),
            "q_a_norm": jnp.ones(config.q_lora_rank),
            "kv_a_norm": jnp.ones(config.kv_lora_rank),
            "q_a": normal(d, config.q_lora_rank),
            "q_b": normal(config.q_lora_rank, heads * qk),
            "kv_a": normal(d, config.kv_lora_rank + config.qk_rope_head_dim),
            "kv_b": normal(config.kv_lora_rank, kv_out),
            "o": normal(heads * config.v_head_dim, d, gain=depth**-0.5),
        }
        if index == 0:
            return out | {"mlp": mlp(inner=config.intermediate_size)}
        router = {"router": normal(d, e), "router_bias": jnp.zeros(e)}
        return out | router | {"experts": mlp(e, inner=f), "shared": mlp(inner=f)}

    return {
        "embed": jnp.asarray(rng.normal(0, 0.5, (config.vocab_size, d)), jnp.float32),
        "norm": jnp.ones(d),
        "head": normal(d, config.vocab_size, gain=0.5),
        "layers": [layer(i) for i in range(config.num_hidden_layers)],
    }


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns x over its root mean square along the last axis, times the weight."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def rotate(x_BTNR: jax.Array, cos_TR: jax.Array, sin_TR: jax.Array) -> jax.Array:
    """Returns x rotated in interleaved pairs (2i, 2i + 1), DeepSeek's checkpoint layout."""
    even, odd = x_BTNR[..., 0::2], x_BTNR[..., 1::2]
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x_BTNR.shape)


def attention(config: Config, p: Params, x_BTD: jax.Array) -> jax.Array:
    """Returns MLA's output, causal over positions 0..T-1, before the residual sum."""
    (b, t, _), n, eps = x_BTD.shape, config.num_attention_heads, config.rms_norm_eps
    h, c = config.qk_nope_head_dim, config.kv_lora_rank
    angle = np.arange(t)[:, None] * yarn_inv_freq(config)
    cos, sin = jnp.asarray(np.cos(angle)), jnp.asarray(np.sin(angle))
    q = (rms_norm(x_BTD @ p["q_a"], p["q_a_norm"], eps) @ p["q_b"]).reshape(b, t, n, -1)
    latent = x_BTD @ p["kv_a"]
    kv = (rms_norm(latent[..., :c], p["kv_a_norm"], eps) @ p["kv_b"]).reshape(b, t, n, -1)
    k_rope = rotate(latent[..., None, c:], cos, sin)
    k_rope = jnp.broadcast_to(k_rope, (b, t, n, config.qk_rope_head_dim))
    q = jnp.concatenate([q[..., :h], rotate(q[..., h:], cos, sin)], -1)
    k = jnp.concatenate([kv[..., :h], k_rope], -1)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * softmax_scale(config)
    probs = jax.nn.softmax(jnp.where(np.tri(t, dtype=bool), scores, -1e30), -1)
    return jnp.einsum("bnts,bsno->btno", probs, kv[..., h:]).reshape(b, t, -1) @ p["o"]


def mlp(p: Params, x: jax.Array) -> jax.Array:
    """Returns the gated SiLU MLP's output."""
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def quantise(w_in_out: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """Returns int4 values as f32 `[.., in/group, group, out]` and their bf16-valued scales.

    Symmetric, one scale per `group` inputs; the published value is exactly value * scale.
    """
    *lead, rows, cols = w_in_out.shape
    grouped = w_in_out.reshape(*lead, rows // group, group, cols)
    scale = jnp.max(jnp.abs(grouped), -2, keepdims=True) / 7.0
    scale = jnp.maximum(scale, 1e-8).astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.clip(jnp.round(grouped / scale), -8, 7), scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fake_int4(w: jax.Array, group: int) -> jax.Array:
    """Returns the weights as int4 stores them; gradients pass straight through."""
    value, scale = quantise(w, group)
    return (value * scale).reshape(w.shape)


fake_int4.defvjp(lambda w, group: (fake_int4(w, group), None), lambda group, _, grad: (grad,))


@jax.custom_vjp
def take_rows(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Returns x[index]; rows `back[i]` (k per row of x) of the result are the copies of x[i].

    An index one past the end reads zeros. Knowing both directions makes the gradient a gather as
    well: XLA's CPU scatter is serial.
    """
    del back
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _take_rows_back(back, grad):
    rows = jnp.take(grad, back.reshape(-1), axis=0, mode="fill", fill_value=0)
    return rows.reshape(*back.shape, -1).sum(1), None, None


take_rows.defvjp(lambda x, i, b: (take_rows(x, i, b), b), _take_rows_back)


def moe(
    config: Config, p: Params, x_MD: jax.Array, capacity: int, is_int4: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (output, tokens per expert, choices dropped for want of capacity), M tokens."""
    m, k, e = x_MD.shape[0], config.num_experts_per_tok, config.n_routed_experts
    scores = jax.nn.sigmoid(x_MD @ p["router"])
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores + p["router_bias"]), k)
    picked = jax.nn.one_hot(chosen, e)  # [M, k, E]: a product with it has a cheap gradient
    weight = jnp.einsum("mke,me->mk", picked, scores)
    weight = weight / (weight.sum(-1, keepdims=True) + 1e-20) * config.routed_scaling_factor
    flat = picked.reshape(m * k, e)
    rank = jnp.einsum("ae,ae->a", jnp.cumsum(flat, 0) - 1, flat).astype(jnp.int32)
    flat_expert, slots = chosen.reshape(-1), e * capacity
    slot = jnp.where(rank < capacity, flat_expert * capacity + rank, slots)  # [M*k]
    choice_of_slot = jnp.full(slots, m * k).at[slot].set(jnp.arange(m * k), mode="drop")
    token_of_slot = jnp.where(choice_of_slot < m * k, choice_of_slot // k, m)
    rows = take_rows(x_MD, token_of_slot, slot.reshape(m, k)).reshape(e, capacity, -1)
    experts = p["experts"]
    if is_int4:
        experts = jax.tree.map(lambda w: fake_int4(w, config.group_size), experts)
    inner = jax.nn.silu(rows @ experts["gate"]) * (rows @ experts["up"])
    out = (inner @ experts["down"]).reshape(slots, -1)
    back = take_rows(out, slot, choice_of_slot[:, None]).reshape(m, k, -1)
    y = jnp.einsum("mk,mkd->md", weight, back) + mlp(p["shared"], x_MD)
    return y, flat.sum(0), (slot == slots).sum()


def forward(
    config: Config, params: Params, ids_BT: jax.Array, capacity_factor: float, is_int4: bool
) -> tuple[jax.Array, list[jax.Array], jax.Array, jax.Array]:
    """Returns (logits, boundaries 0..N, tokens per expert `[N-1, E]`, choices dropped).

    Boundary b is the un-normed residual stream that enters layer b; N enters the final norm.
    `is_int4` computes with the routed experts as the checkpoint stores them.
    """
    eps, (b, t) = config.rms_norm_eps, ids_BT.shape
    fair = b * t * config.num_experts_per_tok / config.n_routed_experts
    capacity = min(b * t, math.ceil(fair * capacity_factor / 8) * 8)
    x = params["embed"][ids_BT]
    boundaries, loads, dropped = [x], [], jnp.zeros((), jnp.int32)
    for p in params["layers"]:
        x = x + attention(config, p, rms_norm(x, p["input_norm"], eps))
        y = rms_norm(x, p["post_norm"], eps)
        if "mlp" in p:
            x = x + mlp(p["mlp"], y)
        else:
            out, load, lost = moe(config, p, y.reshape(b * t, -1), capacity, is_int4)
            x, dropped = x + out.reshape(x.shape), dropped + lost
            loads.append(load)
        boundaries.append(x)
    logits = rms_norm(x, params["norm"], eps) @ params["head"]
    return logits, boundaries, jnp.stack(loads), dropped
