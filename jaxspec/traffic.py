"""What a decode step has to read and to multiply at least, by arithmetic: nothing is compiled.

Counted are weights, caches and logits: what is large. Activations, and what a compiler adds, are
not. All is of one device of a mesh, the one with the most experts to read.
"""

import dataclasses

import numpy as np
from flax import nnx

from jaxspec.config import DraftConfig, LatentDraftConfig, LlamaDraftConfig, MeshConfig, TreeConfig
from jaxspec.draft import Draft
from jaxspec.sharding import held_bytes
from jaxspec.target import Target

__all__ = ["StepShape", "Work", "distinct_experts", "most_experts", "work_of_step"]

F32_BYTES = 4
MULTIPLY_ADD = 2


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes to and from memory, and multiplications and additions of products."""

    num_bytes: float
    num_flops: float


@dataclasses.dataclass(frozen=True)
class StepShape:
    """What decides the work of a step.

    Attributes:
      tree: None is plain decoding.
      batch: sequences, all of them running.
      kv_len: cached tokens of each.
    """

    tree: TreeConfig | None
    batch: int
    kv_len: int

    @property
    def nodes(self) -> int:
        """Tokens of a sequence that the target passes over."""
        return 1 if self.tree is None else self.tree.nodes


def distinct_experts(tokens: int, experts: int, chosen: int) -> float:
    """How many of a layer's experts are expected to be chosen by some token.

    Each token chooses `chosen` of them, every choice as likely, whatever the others choose: an
    expert is left out by all with probability (1 - chosen / experts) ** tokens. Tokens of one text
    choose more alike, so that this is on the high side.
    """
    return experts * (1 - (1 - chosen / experts) ** tokens)


def most_experts(tokens: int, experts: int, chosen: int, devices: int) -> float:
    """How many distinct experts the device with the most of them is expected to read in a layer.

    Under the assumption of `distinct_experts`, with as many experts on each device. Exact: given
    that u experts are chosen by some token, each set of u is as likely, so that the devices' counts
    are multivariate hypergeometric. All are at most k in

        [x^u] (sum over j <= k of C(held, j) x^j) ** devices

    of the C(experts, u) sets, held = experts / devices; the maximum's expectation is the sum over k
    of the probability that it is above k.
    """
    held = experts // devices
    # Divided by a power of two, which cancels, the numbers of sets stay within range.
    sets = _binomials(held) * 0.5**held
    all_sets = _binomials(experts) * 0.5**experts
    of_total = _distribution_of_distinct(tokens, experts, chosen)
    expected = 0.0
    for most in range(held):
        few = ways = np.where(np.arange(held + 1) <= most, sets, 0)
        for _ in range(devices - 1):
            ways = np.convolve(ways, few)
        expected += 1 - float(of_total @ (ways / all_sets))
    return expected


def _binomials(n: int) -> np.ndarray:
    """C(n, k) for k = 0 .. n."""
    k = np.arange(1, n + 1)
    return np.concatenate([[1.0], np.cumprod((n - k + 1) / k)])


def _distribution_of_distinct(tokens: int, experts: int, chosen: int) -> np.ndarray:
    """Probability that so many experts, 0 .. experts, are chosen by some token.

    Token by token: of `chosen` experts, those that nobody chose before are hypergeometric.
    """
    seen = np.arange(experts + 1)
    old = np.ones((experts + 1, chosen + 1))  # C(seen, k)
    for k in range(1, chosen + 1):
        old[:, k] = old[:, k - 1] * np.maximum(seen - k + 1, 0) / k
    new = old[::-1]  # C(experts - seen, k)
    choices = old[-1, -1]
    probability = (seen == 0).astype(float)
    for _ in range(tokens):
        following = np.zeros_like(probability)
        for count in range(chosen + 1):
            # Of `chosen` choices, `count` are new and the others are among the u seen before.
            moved = probability * new[:, count] * old[:, chosen - count] / choices
            following[count:] += moved[: len(moved) - count]
        probability = following
    return probability


def work_of_step(target: Target, draft: Draft | None, shape: StepShape) -> dict[str, Work]:
    """The work of one step, by part: what one device of the target's mesh does.

    `attention cache`: the target's, read once for all the tokens of a sequence, in every layer.
    `routed experts`: each that some token chose, once; `most_experts` says how many.
    `dense layers`: attention's matrices, the dense MLP, shared experts and routers.
    `head`: the target's, and the logits, written and read once in f32.
    `draft`: its layer, head and cache, once for each level of the tree; `fc` once.
    """
    mesh = target.numerics.mesh or MeshConfig(1, 1)
    batch = shape.batch // mesh.data
    tokens = batch * shape.nodes
    held = held_bytes(nnx.state(target), mesh)
    work = {
        "attention cache": _attention(target, mesh, tokens, batch, shape.kv_len),
        "routed experts": _experts(target, mesh, tokens, held),
        "dense layers": _dense(target, tokens, held),
        "head": _head(target, tokens, held),
    }
    if draft is not None and shape.tree is not None:
        work["draft"] = _draft(target, draft, mesh, shape.tree, batch, shape.kv_len)
    return work


def _dense(target: Target, tokens: int, held: dict[str, int]) -> Work:
    """Matrices that are read once, and that every token goes through."""
    routers = sum(size for name, size in held.items() if name.startswith("sparse.router."))
    others = sum(size for name, size in held.items() if name.startswith(("dense.", "sparse.")))
    parameters = routers / F32_BYTES + (others - routers) / target.numerics.jnp_dtype.itemsize
    return Work(others, MULTIPLY_ADD * tokens * parameters)


def _attention(target: Target, mesh: MeshConfig, tokens: int, batch: int, kv_len: int) -> Work:
    c, itemsize = target.config, target.numerics.jnp_dtype.itemsize
    width = c.kv_lora_rank + c.qk_rope_head_dim
    # A device attends with its heads to all slots, or with all heads to its slots.
    slots = kv_len / mesh.model if mesh.cache == "slots" else kv_len
    heads_times_slots = c.num_attention_heads * kv_len / mesh.model
    flops = MULTIPLY_ADD * tokens * heads_times_slots * (width + c.kv_lora_rank)
    layers = c.num_hidden_layers
    return Work(layers * batch * slots * width * itemsize, layers * flops)


def _experts(target: Target, mesh: MeshConfig, tokens: int, held: dict[str, int]) -> Work:
    c = target.config
    in_stacks = sum(size for name, size in held.items() if name.startswith("experts."))
    of_one = in_stacks / (c.num_sparse_layers * c.n_routed_experts // mesh.model)
    most = most_experts(tokens, c.n_routed_experts, c.num_experts_per_tok, mesh.model)
    parameters = 3 * c.hidden_size * c.moe_intermediate_size
    products = tokens * c.num_experts_per_tok / mesh.model * parameters
    layers = c.num_sparse_layers
    return Work(layers * most * of_one, layers * MULTIPLY_ADD * products)


def _head(target: Target, tokens: int, held: dict[str, int]) -> Work:
    parameters = held["head"] / target.numerics.jnp_dtype.itemsize
    logits = 2 * tokens * target.config.vocab_size * F32_BYTES
    return Work(held["head"] + logits, MULTIPLY_ADD * tokens * parameters)


def _draft(
    target: Target, draft: Draft, mesh: MeshConfig, tree: TreeConfig, batch: int, kv_len: int
) -> Work:
    """`levels - 1` passes over the beams, and one over the accepted path, with the features."""
    c, itemsize = draft.config, draft.numerics.jnp_dtype.itemsize
    held = held_bytes(nnx.state(draft), mesh)
    of_layers = ("attention.", "mlp.", "later.")
    layer = sum(size for name, size in held.items() if name.startswith(of_layers))
    head = held.get("head") or held_bytes(nnx.state(target), mesh)["head"]
    cache, scores = _draft_cache(c, mesh, kv_len)
    cache *= batch
    beams, path = batch * tree.branches, batch * (tree.levels + 1)
    passed = (tree.levels - 1) * beams + path
    flops = passed * (layer / itemsize + scores) + path * held["fc"] / itemsize
    flops += ((tree.levels - 1) * beams + batch) * head / itemsize
    num_bytes = tree.levels * (layer + head + cache * itemsize) + held["fc"]
    return Work(num_bytes, MULTIPLY_ADD * flops)


def _draft_cache(c: DraftConfig, mesh: MeshConfig, kv_len: int) -> tuple[float, float]:
    """What a device reads of a sequence's cache, in numbers, and multiplies with each query."""
    if isinstance(c, LatentDraftConfig):
        width = c.kv_lora_rank + c.qk_rope_head_dim
        slots = kv_len / mesh.model if mesh.cache == "slots" else kv_len
        scores = c.num_attention_heads * kv_len / mesh.model * (width + c.kv_lora_rank)
        return c.num_hidden_layers * slots * width, c.num_hidden_layers * scores
    assert isinstance(c, LlamaDraftConfig), "there are these two kinds"
    cache = c.num_hidden_layers * 2 * kv_len * c.num_key_value_heads // mesh.model * c.head_dim
    return cache, cache * (c.num_attention_heads // c.num_key_value_heads)
