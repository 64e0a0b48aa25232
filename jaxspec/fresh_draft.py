"""A draft that has learned nothing yet, of the sizes that its target suggests."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import (
    DraftConfig,
    LatentDraftConfig,
    LatentSizes,
    LlamaDraftConfig,
    Numerics,
    RotaryConfig,
)
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.target import Target

__all__ = ["DraftShape", "fresh_draft"]

MOST_DRAFT_IDS = 32000
"""Of a draft vocabulary that nobody chose: what most published drafts have."""
FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
FRACTIONS = ("rms_norm_eps", "latent_norm_eps", "rope_theta")
BY_TARGET = ("vocab_size", "hidden_size", "draft_vocab_size", "num_aux_hidden_states", "rotary")
BY_TARGET += ("boundaries", "has_embedding", "has_head")


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """What kind of draft.

    Attributes:
      kind: Llama's attention, or latent attention as the target has it.
      capture: the boundaries it reads; None takes EAGLE-3's own, (2, n // 2, n - 3) of n layers.
      capture_from: where that was said.
      vocab_size: of its own vocabulary, the most frequent ids of the data; None takes 32000, or all
        where the target has no more. With all of them it borrows the target's head.
      sizes: fields of its config under Hugging Face's names, in place of the target's.
    """

    kind: Literal["llama", "latent"] = "llama"
    capture: tuple[int, ...] | None = None
    capture_from: str = "--capture"
    vocab_size: int | None = None
    sizes: Mapping[str, Any] = MappingProxyType({})

    def num_ids(self, target_vocab: int) -> int:
        """Of the draft's vocabulary.

        Raises:
          InputError: the target has not as many.
        """
        count = min(MOST_DRAFT_IDS, target_vocab) if self.vocab_size is None else self.vocab_size
        if not 1 <= count <= target_vocab:
            raise InputError(
                f"a draft vocabulary of {count} ids, where the target has {target_vocab}"
            )
        return count


def fresh_draft(target: Target, shape: DraftShape, ids_U: np.ndarray, seed: int) -> Draft:
    """A draft in f32, random but for head and final norm, which begin as the target's.

    It is the same one whatever the target's mesh.

    Args:
      ids_U: the target's ids that its vocabulary stands for, ascending.

    Raises:
      InputError: there is no such boundary, or no such size.
    """
    config = _config(target, shape, len(ids_U))
    numerics = Numerics(dtype="float32", mesh=target.numerics.mesh)
    draft = Draft(config, numerics, nnx.Rngs(seed), "fresh")
    draft.target_of_draft.set_value(jnp.asarray(ids_U, jnp.int32))
    draft.norm.weight.set_value(target.norm.weight[...].astype(jnp.float32))
    if draft.head is not None:
        draft.head.set_value(target.head[...][:, ids_U].astype(jnp.float32))
    return draft


def _config(target: Target, shape: DraftShape, num_ids: int) -> DraftConfig:
    t = target.config
    layers = t.num_hidden_layers
    ids, origin = shape.capture, f"train-draft, set by {shape.capture_from}"
    if ids is None:
        ids, origin = (2, layers // 2, layers - 3), "train-draft, EAGLE-3's own choice"
        if len(set(ids)) < 3 or min(ids) < 0:
            raise InputError(
                f"of {layers} layers there is no usual choice of boundaries ({ids} are no three): "
                "say it with --capture"
            )
    latent = {
        field.name: getattr(t, field.name)
        for field in dataclasses.fields(LatentSizes)
        if field.name != "rotary"
    }
    common = {
        "vocab_size": t.vocab_size,
        "draft_vocab_size": num_ids,
        "hidden_size": t.hidden_size,
        "intermediate_size": t.intermediate_size,
        "num_attention_heads": t.num_attention_heads,
        "num_aux_hidden_states": len(ids),
        "rms_norm_eps": t.rms_norm_eps,
        "norm_before_residual": False,
        "boundaries": target.boundaries(ids, origin),
        "has_embedding": False,
        "has_head": num_ids < t.vocab_size,
    }
    sizes = dict(shape.sizes)
    if shape.kind == "latent":
        kind, common = LatentDraftConfig, common | latent
    else:
        kind = LlamaDraftConfig
        heads = sizes.get("num_attention_heads", t.num_attention_heads)
        common |= {
            "num_key_value_heads": heads,
            "head_dim": t.hidden_size // max(heads, 1) // 2 * 2,
        }
    known = {field.name for field in dataclasses.fields(kind)} - set(BY_TARGET) | {"rope_theta"}
    if strange := sizes.keys() - known:
        raise InputError(
            f"a {shape.kind} draft has no {', '.join(sorted(strange))} to choose; there are "
            f"{', '.join(sorted(known))}"
        )
    for name, value in sizes.items():
        is_flag = name in FLAGS
        types = (bool,) if is_flag else (int, float) if name in FRACTIONS else (int,)
        if type(value) not in types:
            wanted = "true or false" if is_flag else "a number" if float in types else "an integer"
            raise InputError(f"{name} is {value!r}; expected {wanted}")
        if not is_flag and not 0 < value < math.inf:
            raise InputError(f"{name} is {value!r}; it is positive")
    theta = sizes.pop("rope_theta", t.rotary.theta)
    common |= sizes
    width = common["qk_rope_head_dim" if shape.kind == "latent" else "head_dim"]
    if width % 2:
        raise InputError(f"{width} dims of a head would be rotated, an odd number")
    if shape.kind == "latent":
        rotary = dataclasses.replace(t.rotary, width=width, theta=float(theta))
    else:
        rotary = RotaryConfig(width, float(theta), "halves")
        if common["num_attention_heads"] % common["num_key_value_heads"]:
            raise InputError(
                f"num_key_value_heads {common['num_key_value_heads']} does not divide "
                f"num_attention_heads {common['num_attention_heads']}"
            )
    return kind(**common, rotary=rotary)
