"""Choosing a token from logits: argmax, or an exact sample by noise that depends on position only.

What `kernels/tree_verify` does in plain XLA, step by step and checked.
"""

from jaxtyping import Array, Bool, Float, Int, Integer

from jaxspec.dims import typed
from jaxspec.kernels.tree_verify import Sampling, xla
from jaxspec.kernels.tree_verify import sampling as kernel

__all__ = ["Sampling", "choose", "gumbel_noise", "keep_top"]


@typed
def choose(
    logits_BJV: Float[Array, "B J V"],
    depth_BJ: Int[Array, "B J"],
    length_B: Int[Array, "B"],
    sampling: Sampling,
    *,
    levels: int,
) -> Int[Array, "B J"]:
    """The token that follows each node; see `xla.choose`."""
    return xla.choose(logits_BJV, depth_BJ, length_B, sampling, levels=levels)


@typed
def gumbel_noise(
    seed_B: Integer[Array, "B"], pos_BP: Int[Array, "B P"], vocab_size: int
) -> Float[Array, "B P V"]:
    """Standard Gumbel noise for the tokens at absolute positions `pos_BP`, f32."""
    return kernel.gumbel_noise(seed_B, pos_BP, vocab_size)


@typed
def keep_top(score_BJV: Float[Array, "B J V"], sampling: Sampling) -> Bool[Array, "B J V"]:
    """Which tokens top-k, then top-p, then min-p keep; see `sampling.keep_top`."""
    return kernel.keep_top(score_BJV, sampling)
