"""The kernels to be measured, each in the same form: cases, operands, a call, a reference, floors.

A kernel that joins is an entry of `OPS`.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.kernels.expert_matmul import PackedInt4, expert_matmul
from jaxspec.kernels.expert_matmul import cases as expert_cases
from jaxspec.kernels.expert_matmul.mosaic import tuning_for
from jaxspec.kernels.expert_matmul.reference import expert_matmul_reference
from jaxspec.kernels.mla_attention import cases as mla_cases
from jaxspec.kernels.mla_attention import mla_attention
from jaxspec.kernels.mla_attention.mosaic import STAGES, num_splits
from jaxspec.kernels.mla_attention.mosaic import Tuning as MlaTuning
from jaxspec.kernels.mla_attention.reference import mla_attention_reference
from jaxspec.kernels.tree_verify import Verified, tree_verify
from jaxspec.kernels.tree_verify import cases as tree_cases
from jaxspec.kernels.tree_verify.mosaic import tuning_for as tree_tuning_for
from jaxspec.kernels.tree_verify.reference import tree_verify_reference

__all__ = [
    "MAX_COSINE_DIFFERENCE",
    "MAX_ERROR",
    "OPS",
    "Agreement",
    "Op",
    "Work",
    "agreement",
    "chosen",
    "layers_of",
]

MAX_ERROR = 1e-2
"""Of the norm, relative: three roundings to bf16 make 3e-3."""
MAX_COSINE_DIFFERENCE = 5e-6
MAX_LSE_ERROR = 1e-3
"""Of a natural log-sum-exp: a part's weight in a merge is off by a thousandth."""
SCALE = 192**-0.5
"""Kimi-K2.5's, without the factor of its long contexts."""
TOKENS_AT_ONCE = 8
"""Tokens whose experts the reference unpacks together: at most 64, 11 GB in f32."""


Arguments = dict[str, Any]
"""Of a call, by name; arrays or shapes."""


class Work(NamedTuple):
    """What a call must do at least, and how much of it is a layer's own.

    Attributes:
      num_bytes: to and from memory.
      num_flops: multiplications and additions of products.
      layer_bytes: of `num_bytes`, read from the stack: what walking over layers renews.
    """

    num_bytes: int
    num_flops: int
    layer_bytes: int


class Agreement(NamedTuple):
    """How far an output is from the reference.

    Attributes:
      error: norm of the difference over the reference's norm.
      cosine_difference: 1 - cosine of the angle between them.
      lse_error: the largest difference of log-sum-exps; 0 where there are none.
    """

    error: float
    cosine_difference: float
    lse_error: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether all are within their limits; NaN never is."""
        return (
            self.error <= MAX_ERROR
            and self.cosine_difference <= MAX_COSINE_DIFFERENCE
            and self.lse_error <= MAX_LSE_ERROR
        )


@dataclasses.dataclass(frozen=True)
class Op:
    """One public function of `kernels/`.

    Attributes:
      cases: by name.
      foremost: names of the cases to measure first, in this order.
      small: a case that a CPU computes in a second or two, to check the harness with.
      shapes: (case, layers) -> arguments by name, as shapes.
      arguments: (case, layers) -> random arguments on the default device. Where nothing is stacked,
        both are a tuple of so many sets of arguments.
      call: (arguments, layer, implementation) -> outputs. With sets `layer` is 0 always, but only
        known when the call before has ended: it must go into something.
      agreement: (arguments, outputs) -> their distance from the reference.
      work: case -> what one call must do.
      most_layers: at most so many sets of arguments, because each is a call in the program.
      tuning: case -> by name of each Mosaic kernel, how it is launched.
    """

    cases: Mapping[str, Any]
    foremost: tuple[str, ...]
    small: Any
    shapes: Callable[[Any, int], Arguments | tuple[Arguments, ...]]
    arguments: Callable[[Any, int], Arguments | tuple[Arguments, ...]]
    call: Callable[[Arguments, jax.Array, Any], Any]
    agreement: Callable[[Arguments, Any], Agreement]
    work: Callable[[Any], Work]
    tuning: Callable[[Any], dict[str, dict[str, int]]]
    most_layers: int | None = None


@jax.jit
def _distance(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Relative error of the norm, and cosine difference: in f32, so not as 1 minus a cosine."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    got_norm, want_norm = jnp.linalg.norm(got.ravel()), jnp.linalg.norm(want.ravel())
    between = jnp.linalg.norm((got / got_norm - want / want_norm).ravel())
    return jnp.linalg.norm((got - want).ravel()) / want_norm, between**2 / 2


def agreement(got: jax.Array, want: jax.Array) -> Agreement:
    """Of one array with another."""
    return Agreement(*map(float, _distance(got, want)))


_MLA_REFERENCE = jax.jit(functools.partial(mla_attention_reference, scale=SCALE))
_EXPERT_REFERENCE = jax.jit(expert_matmul_reference)
_TREE_REFERENCE = jax.jit(tree_verify_reference, static_argnames="levels")


def _call_mla(args: Arguments, layer: jax.Array, implementation: Any) -> Any:
    return mla_attention(**args | {"layer": layer}, scale=SCALE, implementation=implementation)


def _mla_agreement(args: Arguments, outputs: Any) -> Agreement:
    with jax.default_matmul_precision("highest"):
        want, want_lse = _MLA_REFERENCE(**args)
    out, lse = outputs
    lse_error = float(jnp.abs(lse - want_lse).max())
    return agreement(out, want)._replace(lse_error=lse_error)


def _mla_work(case: mla_cases.Case) -> Work:
    row_bytes = 2 * (mla_cases.LATENT_WIDTH + mla_cases.ROTARY_WIDTH)
    return Work(case.num_bytes, case.num_flops, sum(case.kv_len) * row_bytes)


def _mla_tuning(case: mla_cases.Case) -> dict[str, dict[str, int]]:
    tuning = MlaTuning()
    splits = num_splits(len(case.kv_len), case.tokens, case.heads, case.slots, tuning)
    attention = dataclasses.asdict(tuning) | {"splits": splits, "stages": STAGES}
    merge = {"mla_merge": {"splits": splits}} if splits > 1 else {}
    return {"mla_attention": attention} | merge


def _expert_seed(case: expert_cases.Case) -> int:
    """The first seed whose choices meet as many experts here as are to be expected."""
    share = 1 - (1 - expert_cases.CHOICES / expert_cases.MODEL_EXPERTS) ** case.tokens
    expected = max(1, round(case.experts * share))
    if case.is_shared:
        return 0
    for seed in range(1000):
        chosen = expert_cases.experts(case, seed)
        if np.unique(chosen[chosen < case.experts]).size == expected:
            return seed
    raise ValueError(f"{case}: none of 1000 draws meets {expected} of the experts")


def _call_experts(args: Arguments, layer: jax.Array, implementation: Any) -> Any:
    # For all that XLA can tell, a layer chooses its own experts, as in the model: what is computed
    # from the choices is not moved out of a loop over layers.
    expert_MX = jnp.where(layer < 0, jnp.int32(0), args["expert_MX"])
    return expert_matmul(
        **args | {"layer": layer, "expert_MX": expert_MX}, implementation=implementation
    )


def _expert_agreement(args: Arguments, outputs: jax.Array) -> Agreement:
    """Some tokens at a time, over the experts that they chose: a whole layer is 67 GB in f32."""
    num_tokens, num_choices = args["expert_MX"].shape
    num_experts = args["down"].words.shape[1]
    at_once = min(TOKENS_AT_ONCE, num_tokens)
    room = min(at_once * num_choices, num_experts)
    wanted = []
    for first in range(0, num_tokens, at_once):
        tokens = slice(first, first + at_once)
        expert_MX = np.asarray(args["expert_MX"][tokens])
        chosen = np.unique(expert_MX[expert_MX < num_experts])
        here = np.resize(chosen, room) if chosen.size else np.zeros(room, np.int32)
        place_MX = np.where(expert_MX < num_experts, np.searchsorted(chosen, expert_MX), room)
        with jax.default_matmul_precision("highest"):
            wanted.append(
                _EXPERT_REFERENCE(
                    args["x_MD"][tokens],
                    _only(args["gate_up"], args["layer"], here),
                    _only(args["down"], args["layer"], here),
                    0,
                    jnp.asarray(place_MX, jnp.int32),
                    args["weight_MX"][tokens],
                )
            )
    return agreement(outputs, jnp.concatenate(wanted))


def _only(packed: PackedInt4, layer: jax.Array, experts: np.ndarray) -> PackedInt4:
    """A stack of one layer, and of it only those experts."""
    words, scales = (array[layer, experts][None] for array in (packed.words, packed.scales))
    return PackedInt4(words, scales, packed.in_features)


def _expert_work(case: expert_cases.Case) -> Work:
    expert_MX = expert_cases.experts(case, _expert_seed(case))
    num_bytes = case.num_bytes(expert_MX)
    without_weights = case.tokens * expert_cases.WIDTH * (2 + 4)
    return Work(num_bytes, case.num_flops(expert_MX), num_bytes - without_weights)


def _expert_tuning(case: expert_cases.Case) -> dict[str, dict[str, int]]:
    tuning = dataclasses.asdict(tuning_for(case.tokens, case.experts))
    return {"expert_gate_up": tuning, "expert_down": tuning}


def _levels(args: Arguments) -> int:
    return min(args["tokens_BJ"].shape[1] - 1, tree_cases.MAX_LEVELS)


def _call_tree(args: Arguments, layer: jax.Array, implementation: Any) -> Verified:
    later = {"length_B": args["length_B"] + layer}
    return tree_verify(**args | later, levels=_levels(args), implementation=implementation)


def _tree_agreement(args: Arguments, outputs: Verified) -> Agreement:
    """As error, the share of sequences in which anything differs."""
    needed = {name: value for name, value in args.items() if name != "ancestors_BJJ"}
    want = _TREE_REFERENCE(**needed, levels=_levels(args))
    is_equal_B = outputs.is_nan == want.is_nan
    for mine, theirs in zip(outputs.accepted, want.accepted, strict=True):
        is_equal_B &= (mine == theirs).reshape(is_equal_B.shape[0], -1).all(1)
    return Agreement(1 - float(is_equal_B.astype(jnp.float32).mean()), 0.0)


def _tree_tuning(case: tree_cases.Case) -> dict[str, dict[str, int]]:
    tuning = dataclasses.asdict(tree_tuning_for(case.batch * case.nodes))
    top, sample = {"block": tuning.pop("top_block")}, {"block": tuning.pop("sample_block")}
    return {"tree_top": top, "tree_sample": sample | tuning, "tree_walk": {}}


def _drawn(
    arguments: Callable[[Any, int, int], Arguments], seed: Callable[[Any], int]
) -> Callable[[Any, int], Arguments]:
    """(case, layers) -> arguments drawn by one program: less to compile, and no temporaries."""
    return lambda case, layers: jax.jit(lambda: arguments(case, seed(case), layers))()


OPS: dict[str, Op] = {
    "mla_attention": Op(
        cases=mla_cases.CASES,
        foremost=(
            "8h-1t-32k",
            "64h-8t-32k",
            "8h-16t-32k",
            "tree-8",
            "decode-8",
            "64h-16t-128k",
            "8h-8t-128k",
            "chunk-late",
            "64h-1t-32k",
            "8h-1t-4k",
            "ragged-8",
            "chunk-64h",
        ),
        small=mla_cases.Case("small", 4, 8, (100,), 128, has_tree=True),
        shapes=mla_cases.shapes,
        arguments=_drawn(mla_cases.arguments, lambda case: 0),
        call=_call_mla,
        agreement=_mla_agreement,
        work=_mla_work,
        tuning=_mla_tuning,
    ),
    "expert_matmul": Op(
        cases=expert_cases.CASES,
        foremost=(
            "eighth-8t",
            "eighth-17t",
            "eighth-1t",
            "all-8t",
            "eighth-128t",
            "shared-16t",
            "all-17t",
            "eighth-4t",
            "eighth-512t",
        ),
        small=expert_cases.Case("small", 8, 2),
        shapes=expert_cases.shapes,
        arguments=_drawn(expert_cases.arguments, _expert_seed),
        call=_call_experts,
        agreement=_expert_agreement,
        work=_expert_work,
        tuning=_expert_tuning,
    ),
    "tree_verify": Op(
        cases=tree_cases.CASES,
        foremost=(
            "16n-1b-greedy",
            "16n-1b-sampled",
            "1n-1b-greedy",
            "16n-8b-sampled",
            "64n-8b-sampled",
            "128n-32b-greedy",
            "16n-1b-cut",
        ),
        small=tree_cases.Case("small", 4, 2, is_sampled=True),
        shapes=lambda case, layers: (tree_cases.shapes(case),) * layers,
        arguments=lambda case, layers: tuple(
            tree_cases.arguments(case, seed) for seed in range(layers)
        ),
        call=_call_tree,
        agreement=_tree_agreement,
        work=lambda case: Work(case.num_bytes, 0, case.num_bytes),
        tuning=_tree_tuning,
        most_layers=64,
    ),
}


def layers_of(op: Op, work: Work, rotated_bytes: int) -> int:
    """Layers over which `rotated_bytes` are read before any is read again, as far as the op can
    have so many; 1 if none is read."""
    if not work.layer_bytes:
        return 1
    return min(max(1, math.ceil(rotated_bytes / work.layer_bytes)), op.most_layers or sys.maxsize)


def chosen(only: Sequence[str] | None, quick: bool) -> Iterator[tuple[str, str]]:
    """(kernel, case) of all cases asked for, the foremost of all kernels first, in turn.

    Raises:
      ValueError: a name that is no kernel, case or both.
    """
    everything = [(op, case) for op in OPS for case in OPS[op].cases]
    foremost = sorted(
        ((rank, op, case) for op in OPS for rank, case in enumerate(OPS[op].foremost)),
        key=lambda entry: entry[0],
    )
    first = [(op, case) for _, op, case in foremost]
    cases = first if quick else [*first, *(case for case in everything if case not in first)]
    if not only:
        yield from cases
        return
    known = {name for op, case in everything for name in (op, case, f"{op}/{case}")}
    for name in only:
        if name not in known:
            raise ValueError(f"--only {name}: no kernel or case; kernels are {', '.join(OPS)}")
    # A case that is named is measured, with --quick too.
    wanted = [c for c in everything if {c[1], "/".join(c)} & set(only)]
    yield from (c for c in cases if c[0] in only and c not in wanted)
    yield from wanted
