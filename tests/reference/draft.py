"""An EAGLE-3 draft over one whole sequence, from its published formulas.

    h = fc(features), each chunk of them, or all, through a norm first in some drafts
    e = input_layernorm(embed(token));  g = hidden_norm(h)
    y = (g if norm_before_residual else h) + attention([e, g])
    z = y + mlp(post_attention_layernorm(y));  further layers are ordinary ones, over z
    logits = lm_head(norm(z))

where h is fc(features), or what the row that proposed the token hands on: z, or norm(z) with
`norm_output`. The attention is Llama's, or with `kv_lora_rank` latent.
"""

import numpy as np

from tests.reference import formulas
from tests.reference.target import LATENT_WEIGHTS, latent_attention


class ReferenceDraft:
    """The model of a directory's tensors and `config.json`.

    Args:
      tensors: name -> array, weights [out, in]; the first layer is `midlayer.` or `layers.0.`.
      config: flat, or speculators' with the layer's config nested.
      embed, head: the target's, [V,D] each, for a draft that has none of its own.
      pairing: "pairs" or "halves"; None is what the kind of attention has.
    """

    def __init__(
        self,
        tensors: dict[str, np.ndarray],
        config: dict,
        *,
        embed: np.ndarray | None = None,
        head: np.ndarray | None = None,
        pairing: str | None = None,
    ) -> None:
        self.config = config.get("transformer_layer_config", {}) | config
        weights = {}
        for name, tensor in tensors.items():
            name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
            exact = name in ("d2t", "t2d")
            weights[name.removesuffix(".weight")] = tensor if exact else tensor.astype(np.float64)
        self.weights = weights
        self.is_latent = "kv_lora_rank" in self.config
        pairing = pairing or ("pairs" if self.is_latent else "halves")
        self.rotate = {"pairs": formulas.rotate_pairs, "halves": formulas.rotate_halves}[pairing]
        self.embed = weights.get("embed_tokens", embed)
        self.head = weights.get("lm_head", head)
        draft_ids = np.arange(len(self.head))
        self.target_of_draft = draft_ids + weights.get("d2t", np.zeros_like(draft_ids))

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """The hidden states [T,D] that stand for the target's features [T,G]."""
        w, eps, chunk_norms = self.weights, self.config["rms_norm_eps"], []
        while f"fc_norm.{len(chunk_norms)}" in w:
            chunk_norms.append(w[f"fc_norm.{len(chunk_norms)}"])
        if chunk_norms:
            chunks = np.split(features, len(chunk_norms), axis=-1)
            pairs = zip(chunks, chunk_norms, strict=True)
            normed = [formulas.rms_norm(chunk, weight, eps) for chunk, weight in pairs]
            features = np.concatenate(normed, axis=-1)
        elif "input_norm" in w:
            features = formulas.rms_norm(features, w["input_norm"], eps)
        return features @ w["fc"].T

    def run(
        self, hidden: np.ndarray, tokens: np.ndarray, positions: np.ndarray, sees: np.ndarray
    ) -> np.ndarray:
        """What the rows hand on [T,D]: the next level takes it as its hidden."""
        c, eps = self.config, self.config["rms_norm_eps"]
        w = self._layer(0)
        e = formulas.rms_norm(self.embed[np.asarray(tokens)], w["input_layernorm"], eps)
        g = formulas.rms_norm(hidden, w["hidden_norm"], eps)
        residual = g if c.get("norm_before_residual", False) else hidden
        y = residual + self._attention(w, np.concatenate([e, g], axis=-1), positions, sees)
        z = y + self._mlp(w, y)
        for index in range(1, c.get("num_hidden_layers", 1)):
            w = self._layer(index)
            normed = formulas.rms_norm(z, w["input_layernorm"], eps)
            y = z + self._attention(w, normed, positions, sees)
            z = y + self._mlp(w, y)
        return formulas.rms_norm(z, self.weights["norm"], eps) if c.get("norm_output") else z

    def logits(self, out: np.ndarray) -> np.ndarray:
        """Logits over the draft's own vocabulary."""
        if not self.config.get("norm_output"):
            out = formulas.rms_norm(out, self.weights["norm"], self.config["rms_norm_eps"])
        return out @ self.head.T

    def _layer(self, index: int) -> dict[str, np.ndarray]:
        before = f"layers.{index}."
        return {
            name.removeprefix(before): weight
            for name, weight in self.weights.items()
            if name.startswith(before)
        }

    def _mlp(self, w: dict[str, np.ndarray], y: np.ndarray) -> np.ndarray:
        normed = formulas.rms_norm(y, w["post_attention_layernorm"], self.config["rms_norm_eps"])
        return formulas.swiglu(normed, *(w[f"mlp.{n}_proj"] for n in ("gate", "up", "down")))

    def _attention(
        self, w: dict[str, np.ndarray], x: np.ndarray, positions: np.ndarray, sees: np.ndarray
    ) -> np.ndarray:
        c, length = self.config, len(x)
        if self.is_latent:
            own = {name: w[f"self_attn.{name}"] for name in LATENT_WEIGHTS}
            return latent_attention(own, c, c["rms_norm_eps"], x, positions, sees, self.rotate)
        heads, kv_heads, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        yarn = formulas.yarn_of(c)
        angle = np.asarray(positions)[:, None, None] * formulas.inverse_frequencies(
            width, formulas.theta_of(c), yarn
        )
        factor = formulas.cos_sin_factor(yarn)
        q, k, v = ((x @ w[f"self_attn.{n}_proj"].T).reshape(length, -1, width) for n in "qkv")
        q, k = factor * self.rotate(q, angle), factor * self.rotate(k, angle)
        mixed = np.zeros((length, heads, width))
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, kv].T / np.sqrt(width)
            mixed[:, head] = formulas.softmax(np.where(sees, scores, -np.inf)) @ v[:, kv]
        return mixed.reshape(length, -1) @ w["self_attn.o_proj"].T
