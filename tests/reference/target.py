"""A DeepSeek-V3-type decoder (Kimi-K2, Kimi-K2.5) over one whole sequence, keys materialised.

Written from the formulas of DeepSeek-V3 (arXiv:2412.19437; its inference/model.py). Frameworks
differ on two points: here masked groups score -inf, and the latent norms' epsilon is an argument.
"""

import dataclasses

import numpy as np

from tests.reference import formulas


@dataclasses.dataclass(frozen=True)
class TargetRun:
    """What one pass shows.

    Attributes:
      boundaries: [N+1,T,D], the residual stream entering every layer, and leaving the last.
      logits: [T,V].
      experts: [sparse layers,T,X], chosen experts, best first.
      margins: [sparse layers,T], gap between the last chosen and the best rejected choice score,
        of experts or of groups, whichever is smaller.
    """

    boundaries: np.ndarray
    logits: np.ndarray
    experts: np.ndarray
    margins: np.ndarray

    def features(self, ids: tuple[int, ...]) -> np.ndarray:
        """Boundaries side by side, [T,G]."""
        return np.concatenate([self.boundaries[b] for b in ids], axis=-1)


class ReferenceTarget:
    """The model of a directory's tensors and `config.json`.

    Args:
      tensors: name -> array, weights [out, in]; any prefix before `embed_tokens`.
      config: the whole config, wrapped (`text_config`) or flat.
      latent_norm_eps: epsilon of the two latent norms; None takes `rms_norm_eps`.
      round_product: applied to the experts' q x scale, where another framework rounds it.
      round_state: applied to every state between blocks, as lower precision does.
    """

    def __init__(
        self,
        tensors: dict[str, np.ndarray],
        config: dict,
        *,
        latent_norm_eps: float | None = None,
        round_product=lambda weight: weight,
        round_state=lambda x: x,
    ) -> None:
        quantization = config.get("quantization_config")
        self.config = config = config.get("text_config", config)
        quantization = config.get("quantization_config", quantization)
        self.tensors, self.round_product = tensors, round_product
        self.round_state = round_state
        self.prefix = next(n for n in tensors if n.endswith("embed_tokens.weight"))[
            : -len("embed_tokens.weight")
        ]
        self.latent_norm_eps = (
            config["rms_norm_eps"] if latent_norm_eps is None else latent_norm_eps
        )
        if quantization is not None:
            (group,) = quantization["config_groups"].values()
            self.group_size = group["weights"]["group_size"]
        head = self.prefix.removesuffix("model.") + "lm_head.weight"
        self.head = tensors[head].astype(np.float64)
        self.embed = self._weight("embed_tokens")
        self.norm = self._weight("norm")
        self.layers = [self._layer_weights(i) for i in range(config["num_hidden_layers"])]

    def run(
        self,
        tokens: list[int],
        positions: list[int] | None = None,
        sees: np.ndarray | None = None,
    ) -> TargetRun:
        """One pass over a whole sequence, or, with `positions` and `sees` [T,T], over a tree."""
        tokens = np.asarray(tokens)
        positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
        sees = formulas.causal(len(tokens)) if sees is None else sees
        eps, rounded = self.config["rms_norm_eps"], self.round_state
        x, boundaries, experts, margins = rounded(self.embed[tokens]), [], [], []
        for weights in self.layers:
            boundaries.append(x)
            normed = rounded(formulas.rms_norm(x, weights["input_layernorm"], eps))
            x = rounded(x + rounded(self.attention(weights, normed, positions, sees)))
            normed = rounded(formulas.rms_norm(x, weights["post_attention_layernorm"], eps))
            if "mlp.gate" in weights:
                chosen, share, margin = self.route(weights, normed)
                x = rounded(x + rounded(self.mixture(weights, normed, chosen, share)))
                experts.append(chosen)
                margins.append(margin)
            else:
                matrices = (weights[f"mlp.{n}_proj"] for n in ("gate", "up", "down"))
                x = rounded(x + rounded(formulas.swiglu(normed, *matrices)))
        boundaries.append(x)
        logits = formulas.rms_norm(x, self.norm, eps) @ self.head.T
        return TargetRun(np.stack(boundaries), logits, np.array(experts), np.array(margins))

    def attention(
        self, weights: dict, x: np.ndarray, positions: np.ndarray, sees: np.ndarray
    ) -> np.ndarray:
        """The attention of one layer."""
        own = {name: weights[f"self_attn.{name}"] for name in LATENT_WEIGHTS}
        return latent_attention(own, self.config, self.latent_norm_eps, x, positions, sees)

    def route(self, weights: dict, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Chosen experts [T,X], their shares [T,X], and the margins [T] of the choice."""
        c, num_chosen = self.config, self.config["num_experts_per_tok"]
        score = 1 / (1 + np.exp(-x @ weights["mlp.gate"].T))
        choice = score + weights["mlp.gate.e_score_correction_bias"]
        groups, group_margin = c.get("n_group", 1), np.inf
        if groups > 1:
            grouped = choice.reshape(len(x), groups, -1)
            group_score = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
            kept = np.argsort(-group_score, axis=-1, kind="stable")[:, : c["topk_group"]]
            for t in range(len(x)):
                grouped[t, [g for g in range(groups) if g not in kept[t]]] = -np.inf
            choice = grouped.reshape(len(x), -1)
            ranked = -np.sort(-group_score, axis=-1)
            group_margin = ranked[:, c["topk_group"] - 1] - ranked[:, c["topk_group"]]
        order = np.argsort(-choice, axis=-1, kind="stable")
        chosen = order[:, :num_chosen]
        share = np.take_along_axis(score, chosen, axis=-1)
        if c["norm_topk_prob"]:
            share = share / (share.sum(-1, keepdims=True) + 1e-20)
        ranked = np.take_along_axis(choice, order, axis=-1)
        margin = ranked[:, num_chosen - 1] - ranked[:, num_chosen]
        return chosen, share * c["routed_scaling_factor"], np.minimum(margin, group_margin)

    def mixture(
        self, weights: dict, x: np.ndarray, chosen: np.ndarray, share: np.ndarray
    ) -> np.ndarray:
        """The chosen experts' weighted sum, and the shared experts."""
        out = np.zeros_like(x)
        for expert in range(self.config["n_routed_experts"]):
            token, place = np.nonzero(chosen == expert)
            matrices = (weights[f"mlp.experts.{expert}.{n}_proj"] for n in ("gate", "up", "down"))
            out[token] += share[token, place][:, None] * formulas.swiglu(x[token], *matrices)
        names = (f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down"))
        return out + formulas.swiglu(x, *(weights[name] for name in names))

    def _layer_weights(self, index: int) -> dict[str, np.ndarray]:
        """The weights of one layer in f64, under their names without prefix and suffix."""
        start = f"{self.prefix}layers.{index}."
        inside = [name.removeprefix(start) for name in self.tensors if name.startswith(start)]
        bases = {
            name.removesuffix("_packed")
            .removesuffix("_scale")
            .removesuffix("_shape")
            .removesuffix(".weight")
            for name in inside
        }
        return {base: self._weight(f"layers.{index}.{base}") for base in bases}

    def _weight(self, base: str) -> np.ndarray:
        name = self.prefix + base
        if f"{name}.weight_packed" in self.tensors:
            return self._unpacked(name)
        plain = name if name in self.tensors else f"{name}.weight"
        return self.tensors[plain].astype(np.float64)

    def _unpacked(self, name: str) -> np.ndarray:
        """q x scale of a pack-quantized matrix."""
        packed, scale = self.tensors[f"{name}.weight_packed"], self.tensors[f"{name}.weight_scale"]
        rows, columns = self.tensors[f"{name}.weight_shape"]
        q = unpack_words(packed, columns)
        assert q.shape == (rows, columns)
        return self.round_product(q * scale.astype(np.float64).repeat(self.group_size, axis=1))


LATENT_WEIGHTS = (
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
)


def latent_attention(
    weights: dict[str, np.ndarray],
    config: dict,
    eps: float,
    x: np.ndarray,
    positions: np.ndarray,
    sees: np.ndarray,
    rotate=formulas.rotate_pairs,
) -> np.ndarray:
    """Latent attention, every head with keys and values of its own.

    Args:
      weights: by the names of `LATENT_WEIGHTS`.
      eps: of the two latent norms.
      rotate: how dims are paired.
    """
    c, w, length = config, weights, len(x)
    heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    yarn = formulas.yarn_of(c)
    frequencies = formulas.inverse_frequencies(rope, formulas.theta_of(c), yarn)
    angle, factor = np.asarray(positions)[:, None] * frequencies, formulas.cos_sin_factor(yarn)

    q = formulas.rms_norm(x @ w["q_a_proj"].T, w["q_a_layernorm"], eps)
    q = (q @ w["q_b_proj"].T).reshape(length, heads, nope + rope)
    q[..., nope:] = factor * rotate(q[..., nope:], angle[:, None])

    latent, k_rope = np.split(x @ w["kv_a_proj_with_mqa"].T, [c["kv_lora_rank"]], axis=-1)
    latent = formulas.rms_norm(latent, w["kv_a_layernorm"], eps)
    k_rope = factor * rotate(k_rope, angle)
    up = (latent @ w["kv_b_proj"].T).reshape(length, heads, -1)
    k_nope, value = np.split(up, [nope], axis=-1)
    shared = np.broadcast_to(k_rope[:, None], (length, heads, rope))
    key = np.concatenate([k_nope, shared], axis=-1)

    scale = (nope + rope) ** -0.5
    if yarn is not None and yarn.get("mscale_all_dim"):
        scale *= formulas.magnitude(yarn["factor"], yarn["mscale_all_dim"]) ** 2
    scores = scale * np.einsum("tnh,snh->nts", q, key)
    mixture = formulas.softmax(np.where(sees, scores, -np.inf))
    mixed = np.einsum("nts,sno->tno", mixture, value)
    return mixed.reshape(length, -1) @ w["o_proj"].T


def unpack_words(packed: np.ndarray, columns: int) -> np.ndarray:
    """Signed values [rows, columns] of int32 words [rows, columns / 8], lowest nibble first."""
    q = np.zeros((len(packed), columns))
    for column in range(columns):
        word = packed[:, column // 8].astype(np.int64)
        q[:, column] = ((word >> (4 * (column % 8))) & 0xF) - 8
    return q
