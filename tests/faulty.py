"""A numpy model with one fault planted, and its records: the other framework of comparisons."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from jaxspec.record_file import FORMAT
from jaxspec.recording import Record
from tests import tiny
from tests.reference import formulas
from tests.reference.target import LATENT_WEIGHTS, ReferenceTarget, latent_attention

SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 11, 23, 7], [8, 9, 7, 2, 3], [11]]
CONFIG = tiny.TARGET_CONFIG
FIRST_SPARSE = CONFIG["first_k_dense_replace"]


def tensors_of(config: dict) -> dict[str, np.ndarray]:
    """Weights that bf16 holds, and embeddings as small as real ones: there an epsilon matters."""
    tensors = tiny.target_tensors(config)
    embed = "model.embed_tokens.weight"
    tensors[embed] = 0.002 * tensors[embed]
    return {
        name: bfloat16(x) if np.issubdtype(x.dtype, np.floating) else x
        for name, x in tensors.items()
    }


def bfloat16(x: np.ndarray) -> np.ndarray:
    """`x` rounded, in its own dtype."""
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


TENSORS = tensors_of(CONFIG)

FAULTS = {
    "an embedding": 0,
    "rotary halves for pairs": 1,
    "mscale left out": 1,
    "mscale on cosine and sine": 1,
    "epsilon 1e-6 for 1e-5": 1,
    "router bias in the weights": FIRST_SPARSE + 1,
    "scaling factor dropped": FIRST_SPARSE + 1,
    "shared expert left out": FIRST_SPARSE + 1,
    "int4 offset 7 for 8": FIRST_SPARSE + 1,
    "gate and up swapped in layer 2": 3,
    "a scale off by one group in layer 3": 4,
}
"""Of each, the first boundary that it reaches."""


class Faulty(ReferenceTarget):
    """A model with one fault planted."""

    def __init__(
        self,
        fault: str,
        tensors: dict[str, np.ndarray] = TENSORS,
        config: dict = CONFIG,
        round_state: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    ) -> None:
        self.fault = fault
        if fault == "scaling factor dropped":
            config = config | {"routed_scaling_factor": 1.0}
        if fault == "epsilon 1e-6 for 1e-5":
            config = config | {"rms_norm_eps": 1e-6}
        super().__init__(tensors, config, round_state=round_state)
        experts = range(config["n_routed_experts"])
        if fault == "gate and up swapped in layer 2":
            for e in experts:
                one = self.layers[2]
                gate, up = f"mlp.experts.{e}.gate_proj", f"mlp.experts.{e}.up_proj"
                one[gate], one[up] = one[up], one[gate]
        if fault == "a scale off by one group in layer 3":
            expert = ReferenceTarget(tensors, config).run(SEQUENCES[0]).experts[2][0, 0]
            name = f"mlp.experts.{expert}.gate_proj"
            scale = self._scale(3, name)
            self.layers[3][name] *= np.roll(scale, self.group_size, axis=1) / scale
        if fault == "int4 offset 7 for 8":
            for index, weights in enumerate(self.layers[FIRST_SPARSE:], FIRST_SPARSE):
                for e in experts:
                    for name in ("gate", "up", "down"):
                        one = f"mlp.experts.{e}.{name}_proj"
                        weights[one] = weights[one] + self._scale(index, one)
        if fault == "an embedding":
            self.embed = self.embed.copy()
            self.embed[4] *= 1.01

    def _scale(self, layer: int, name: str) -> np.ndarray:
        """Of each element of a packed matrix, its group's scale."""
        scale = self.tensors[f"{self.prefix}layers.{layer}.{name}.weight_scale"]
        return scale.astype(np.float64).repeat(self.group_size, axis=1)

    def attention(self, weights, x, positions, sees):
        rotate = formulas.rotate_pairs
        if self.fault == "rotary halves for pairs":
            rotate = formulas.rotate_halves
        own = {name: weights[f"self_attn.{name}"] for name in LATENT_WEIGHTS}
        with pytest.MonkeyPatch.context() as patch:
            if self.fault == "mscale left out":
                patch.setattr(formulas, "magnitude", lambda factor, mscale: 1.0)
            if self.fault == "mscale on cosine and sine":
                factor = formulas.magnitude(CONFIG["rope_scaling"]["factor"], 1.0)
                patch.setattr(formulas, "cos_sin_factor", lambda yarn: factor)
            return latent_attention(
                own, self.config, self.latent_norm_eps, x, positions, sees, rotate
            )

    def route(self, weights, x):
        chosen, share, margin = super().route(weights, x)
        if self.fault == "router bias in the weights":
            # The scores that choose take the place of those that weigh.
            bias = weights["mlp.gate.e_score_correction_bias"][chosen]
            score = 1 / (1 + np.exp(-x @ weights["mlp.gate"].T))
            share = np.take_along_axis(score, chosen, axis=-1) + bias
            share = share / share.sum(-1, keepdims=True) * self.config["routed_scaling_factor"]
        return chosen, share, margin

    def mixture(self, weights, x, chosen, share):
        if self.fault == "shared expert left out":
            names = (f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down"))
            left_out = formulas.swiglu(x, *(weights[name] for name in names))
            return super().mixture(weights, x, chosen, share) - left_out
        return super().mixture(weights, x, chosen, share)


def record_of(
    model: ReferenceTarget, dtype: str = "float32", sequences: Sequence[list[int]] = SEQUENCES
) -> Record:
    """What `model` says of the sequences, in f32."""
    config, runs = model.config, [model.run(ids) for ids in sequences]
    batch, longest = len(sequences), max(map(len, sequences))

    def padded(rows: list[np.ndarray]) -> np.ndarray:
        out = np.zeros((batch, longest, *rows[0].shape[1:]), np.asarray(rows[0]).dtype)
        for row, values in zip(out, rows, strict=True):
            row[: len(values)] = values
        return out

    arrays = {
        "tokens": padded([np.array(ids, np.int32) for ids in sequences]),
        "lengths": np.array([len(ids) for ids in sequences], np.int32),
        "logits": padded([run.logits for run in runs]).astype(np.float32),
    }
    for b in range(config["num_hidden_layers"] + 1):
        arrays[f"boundary.{b:03d}"] = padded([r.boundaries[b] for r in runs]).astype(np.float32)
    for i in range(len(runs[0].experts)):
        layer = FIRST_SPARSE + i
        arrays[f"router.{layer:03d}"] = padded([r.experts[i] for r in runs]).astype(np.int32)
        margins = padded([r.margins[i] for r in runs]).astype(np.float32)
        arrays[f"router_margin.{layer:03d}"] = margins
    return Record(arrays, {"format": FORMAT, "framework": "numpy", "dtype": dtype})
