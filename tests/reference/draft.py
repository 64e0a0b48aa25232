"""An EAGLE-3 draft of the Llama type over one whole sequence, from its published formulas.

    e = input_layernorm(embed(token));  g = hidden_norm(h)
    y = (g if norm_before_residual else h) + attention([e, g])
    out = y + mlp(post_attention_layernorm(y));  logits = lm_head(norm(out))

where h is fc(features), or the `out` of the row that proposed the token.
"""

import numpy as np

from tests.reference import formulas


class ReferenceDraft:
    """The model of a directory's tensors and `config.json`.

    Args:
      tensors: name -> array, weights [out, in]; the layer is `midlayer.` or `layers.0.`.
      embed, head: the target's, [V,D] each, for a draft that has none of its own.
    """

    def __init__(
        self,
        tensors: dict[str, np.ndarray],
        config: dict,
        *,
        embed: np.ndarray | None = None,
        head: np.ndarray | None = None,
    ) -> None:
        self.config = config
        weights = {}
        for name, tensor in tensors.items():
            name = name.removeprefix("model.").removeprefix("midlayer.").removeprefix("layers.0.")
            exact = name in ("d2t", "t2d")
            weights[name.removesuffix(".weight")] = tensor if exact else tensor.astype(np.float64)
        self.weights = weights
        self.embed = weights.get("embed_tokens", embed)
        self.head = weights.get("lm_head", head)
        draft_ids = np.arange(len(self.head))
        self.target_of_draft = draft_ids + weights.get("d2t", np.zeros_like(draft_ids))

    def fuse(self, features: np.ndarray) -> np.ndarray:
        """The hidden states [T,D] that stand for the target's features [T,G]."""
        return features @ self.weights["fc"].T

    def run(
        self, hidden: np.ndarray, tokens: np.ndarray, positions: np.ndarray, sees: np.ndarray
    ) -> np.ndarray:
        """The outputs before the final norm [T,D]: what the next level takes as its hidden."""
        c, w, eps = self.config, self.weights, self.config["rms_norm_eps"]
        e = formulas.rms_norm(self.embed[np.asarray(tokens)], w["input_layernorm"], eps)
        g = formulas.rms_norm(hidden, w["hidden_norm"], eps)
        residual = g if c.get("norm_before_residual", False) else hidden
        y = residual + self._attention(np.concatenate([e, g], axis=-1), positions, sees)
        normed = formulas.rms_norm(y, w["post_attention_layernorm"], eps)
        return y + formulas.swiglu(normed, *(w[f"mlp.{n}_proj"] for n in ("gate", "up", "down")))

    def logits(self, out: np.ndarray) -> np.ndarray:
        """Logits over the draft's own vocabulary."""
        return (
            formulas.rms_norm(out, self.weights["norm"], self.config["rms_norm_eps"]) @ self.head.T
        )

    def _attention(self, x: np.ndarray, positions: np.ndarray, sees: np.ndarray) -> np.ndarray:
        c, w, length = self.config, self.weights, len(x)
        heads, kv_heads, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        yarn = formulas.yarn_of(c)
        angle = np.asarray(positions)[:, None, None] * formulas.inverse_frequencies(
            width, formulas.theta_of(c), yarn
        )
        factor = formulas.cos_sin_factor(yarn)
        q, k, v = ((x @ w[f"self_attn.{n}_proj"].T).reshape(length, -1, width) for n in "qkv")
        q, k = factor * formulas.rotate_halves(q, angle), factor * formulas.rotate_halves(k, angle)
        mixed = np.zeros((length, heads, width))
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, kv].T / np.sqrt(width)
            mixed[:, head] = formulas.softmax(np.where(sees, scores, -np.inf)) @ v[:, kv]
        return mixed.reshape(length, -1) @ w["self_attn.o_proj"].T
