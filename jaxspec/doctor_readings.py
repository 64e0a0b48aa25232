"""What a draft's checkpoint may really mean: other readings of its claims, as a table.

A `Case` is one way to run a draft. A reading is the declared case with one thing changed, and the
flag or field that would make it the declared one. Nothing here looks at any text.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import LatentDraftConfig, RotaryConfig
from jaxspec.contracts import Boundaries
from jaxspec.convert.prepare import abstract_draft, parameters_of
from jaxspec.draft import Borrowed, Draft
from jaxspec.target import Ends

__all__ = ["FAMILIES", "Case", "Family", "Reading", "readings_of"]

Variants = Iterator[tuple[str, str, "Case"]]
"""Of a family: each one's name, what would make it the declared one, and how that runs."""
BASES = (10000.0, 50000.0, 1000000.0)
"""Of rotary embeddings: what frameworks fall back to, Kimi's, and that of published drafts."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run a draft, teacher-forced.

    Attributes:
      draft: without its claim, which `boundaries` takes the place of.
      boundaries: what its features are made of, in this order.
      lag: how far the features stand behind what EAGLE-3 pairs: f(t - lag) with token t + 1.
      drafted_pos: added to the positions of drafted tokens alone. What is added to all positions
        changes nothing under a rotary embedding.
      final_norm: whether each boundary goes through the target's final norm first.
    """

    draft: Draft
    boundaries: tuple[int, ...]
    lag: int = 0
    drafted_pos: int = 0
    final_norm: bool = False

    @classmethod
    def declared(cls, draft: Draft) -> "Case":
        """The draft as its checkpoint states it."""
        return cls(_changed(draft), draft.config.boundaries.ids)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The declared case with one thing changed.

    Attributes:
      fault: what is wrong with the declared one, if this one is right.
      change: the flag or field that makes this one the declared one.
    """

    family: str
    name: str
    fault: str
    change: str
    case: Case


@dataclasses.dataclass(frozen=True)
class Family:
    """Readings of one kind; those that a draft leaves no room for are not among its variants."""

    name: str
    fault: str
    variants: Callable[[Case, Ends], Variants]


def readings_of(case: Case, target: Ends, families: tuple[Family, ...]) -> list[Reading]:
    """All readings of a declared case that its shapes allow, each once."""
    found: dict[str, Reading] = {}
    for family in families:
        for name, change, other in family.variants(case, target):
            found.setdefault(name, Reading(family.name, name, family.fault, change, other))
    return list(found.values())


def _boundaries(case: Case, target: Ends) -> Variants:
    """Both conventions, the frameworks' defaults, and one boundary in place of another."""
    ids, last = case.boundaries, target.config.num_hidden_layers
    defaults = (2, last // 2, last - 3)
    whole = [tuple(b + by for b in ids) for by in (1, -1)]
    if len(ids) == len(defaults):
        whole += [defaults, tuple(b + 1 for b in defaults)]
    for place, b in enumerate(ids):
        others = [b - 1, b + 1, 0, last, *defaults[place : place + 1]]
        if b == 0:  # which hardly anybody means: then it could be any
            others = list(range(1, last + 1))
        whole += [(*ids[:place], other, *ids[place + 1 :]) for other in others]
    for other in dict.fromkeys(whole):
        if other != ids and min(other) >= 0 and max(other) <= last:
            yield _of_boundaries(case, other)


def _order(case: Case, target: Ends) -> Variants:
    ids = case.boundaries
    orders = itertools.permutations(ids) if len(ids) <= 3 else iter([ids[::-1]])
    for other in dict.fromkeys(orders):
        if other != ids:
            yield _of_boundaries(case, other)


def _of_boundaries(case: Case, ids: tuple[int, ...]) -> tuple[str, str, Case]:
    change = f"eagle_aux_hidden_state_layer_ids {list(ids)}, capture_convention 'before'"
    return f"boundaries {ids}", change, dataclasses.replace(case, boundaries=ids)


def _lag(case: Case, target: Ends) -> Variants:
    for by in (-1, 1):
        behind = 1 + case.lag + by
        change = "how features and tokens are paired; EAGLE-3 has token t + 1 with features of t"
        other = dataclasses.replace(case, lag=case.lag + by)
        yield f"features {behind} behind their token", change, other


def _positions(case: Case, target: Ends) -> Variants:
    for by, name in ((1, "one further on"), (-1, "one further back")):
        other = dataclasses.replace(case, drafted_pos=case.drafted_pos + by)
        yield f"drafted tokens {name}", "the engine's positions of drafted tokens", other


def _feature_norms(case: Case, target: Ends) -> Variants:
    c = case.draft.config
    other = dataclasses.replace(case, final_norm=not case.final_norm)
    name = "boundaries before the final norm" if case.final_norm else "boundaries normed as outputs"
    yield name, "where the engine captures: before any norm, or after the final one", other
    if c.fc_norm or c.norm_before_fc:
        flag = "fc_norm" if c.fc_norm else "norm_before_fc"
        without = _changed(case.draft, fc_norm=False, norm_before_fc=False)
        yield f"no {flag}", f"{flag} false", dataclasses.replace(case, draft=without)
        return
    chunks, width = c.num_aux_hidden_states, c.boundaries.width
    dtype = case.draft.numerics.jnp_dtype
    for flag, shape in (("fc_norm", (chunks, width)), ("norm_before_fc", (1, chunks * width))):
        edits = {"feature_norm.weight": jnp.ones(shape, dtype)}
        draft = _changed(case.draft, edits, **{flag: True})
        yield f"{flag}, weights of one", f"{flag} true", dataclasses.replace(case, draft=draft)


def _flag(flag: str) -> Callable[[Case, Ends], Variants]:
    """The other value of one flag of the config."""

    def variants(case: Case, target: Ends) -> Variants:
        value = not getattr(case.draft.config, flag)
        said = f"{flag} {str(value).lower()}"
        draft = _changed(case.draft, **{flag: value})
        yield said, said, dataclasses.replace(case, draft=draft)

    return variants


def _rotary(case: Case, target: Ends) -> Variants:
    stated, of_target = case.draft.config.rotary, target.config.rotary

    def reading(name: str, json: str, other: RotaryConfig) -> tuple[str, str, Case]:
        draft = _changed(case.draft, rotary=other)
        change = f"--draft-rotary '{{{json}}}'"
        return f"rotary {name}", change, dataclasses.replace(case, draft=draft)

    for theta in dict.fromkeys((*BASES, of_target.theta)):
        if theta != stated.theta:
            other = dataclasses.replace(stated, theta=theta)
            yield reading(f"base {theta:g}", f'"rope_theta": {theta:.0f}', other)
    if stated.scaling is not None:
        yield reading("without scaling", '"rope_scaling": null', stated.scaled_by(None))
    if of_target.scaling not in (None, stated.scaling):
        other = stated.scaled_by(of_target.scaling)
        yield reading("scaled as the target's", '"rope_scaling": {the target\'s}', other)


def _pairing(case: Case, target: Ends) -> Variants:
    c = case.draft.config
    other: RotaryConfig = dataclasses.replace(
        c.rotary, kind="halves" if c.rotary.kind == "pairs" else "pairs"
    )
    draft = _changed(case.draft, rotary=other)
    change = "the order of the rows of q_proj and k_proj"
    if isinstance(c, LatentDraftConfig):
        stored = str(other.kind == "pairs").lower()
        change = f"--draft-rotary '{{\"rope_interleave\": {stored}}}'"
    yield f"rotary {other.kind}", change, dataclasses.replace(case, draft=draft)


def _vocabulary(case: Case, target: Ends) -> Variants:
    """`d2t` read otherwise, where that gives a token to every draft id, and no two the same."""
    ids, vocab_size = np.asarray(case.draft.target_of_draft[...]), case.draft.config.vocab_size
    own = np.arange(len(ids), dtype=ids.dtype)
    for name, other in (
        ("d2t as absolute ids", ids - own),
        ("draft ids as target ids", own),
    ):
        is_map = other.min() >= 0 and other.max() < vocab_size and len(set(other)) == len(other)
        if is_map and (other != ids).any():
            draft = _changed(case.draft, {"target_of_draft": jnp.asarray(other)})
            change = "tensor d2t, which holds offsets from the draft id"
            yield name, change, dataclasses.replace(case, draft=draft)


def _halves(case: Case, target: Ends) -> Variants:
    """The rows of the attention's inputs, of the embedding and of the hidden state, exchanged."""
    latent = isinstance(case.draft.config, LatentDraftConfig)
    names = ("q_a", "kv_a") if latent else ("query", "key", "value")
    paths = [f"attention.{name}" for name in names]
    have = _arrays(case.draft)
    half = case.draft.config.hidden_size
    edits = {path: jnp.roll(have[path], half, axis=0) for path in paths}
    draft = _changed(case.draft, edits)
    change = "the columns of the first layer's attention, which take [embedding, hidden]"
    yield "hidden state before the embedding", change, dataclasses.replace(case, draft=draft)


def _borrowed(case: Case, target: Ends) -> Variants:
    c, lent, dtype = case.draft.config, Borrowed.of(target), case.draft.numerics.jnp_dtype
    if c.has_embedding:
        draft = _changed(case.draft, {"embed": lent.embed.astype(dtype)})
        change = "drop embed_tokens.weight: the target's own is used then"
        yield "the target's embedding", change, dataclasses.replace(case, draft=draft)
    if c.has_head:
        columns = lent.head[:, case.draft.target_of_draft[...]]
        draft = _changed(case.draft, {"head": columns.astype(dtype)})
        change = "lm_head.weight: the target's rows for d2t's tokens"
        yield "the target's head", change, dataclasses.replace(case, draft=draft)


def _dtype(case: Case, target: Ends) -> Variants:
    now = case.draft.numerics
    other = "float32" if now.dtype == "bfloat16" else "bfloat16"
    numerics = dataclasses.replace(now, dtype=other)
    draft = _changed(case.draft, numerics=numerics)
    yield f"the draft in {other}", f"--dtype {other}", dataclasses.replace(case, draft=draft)


FAMILIES = (
    Family("boundaries", "it was trained on other boundaries than it states", _boundaries),
    Family("order", "its fc takes the boundaries in another order", _order),
    Family("token shift", "features and tokens are paired otherwise than it learned", _lag),
    Family("positions", "it learned other positions of drafted tokens", _positions),
    Family("feature norm", "its features are not normed as they were in training", _feature_norms),
    Family(
        "recurrence", "its recurrent state is on the other side of the norm", _flag("norm_output")
    ),
    Family("residual", "its residual starts elsewhere", _flag("norm_before_residual")),
    Family("rotary", "it was trained with another rotary embedding than it states", _rotary),
    Family("pairing", "its rotary embedding turns other pairs of dims", _pairing),
    Family("vocabulary", "its draft ids mean other tokens", _vocabulary),
    Family("halves", "its attention takes embedding and hidden state in the other order", _halves),
    Family("borrowed", "a tensor of its own should be the target's", _borrowed),
    Family("dtype", "its numbers are too coarse", _dtype),
)
"""All of them, in the order in which ties are listed."""


def _arrays(draft: Draft) -> dict[str, jax.Array]:
    return {path: leaf.get_value() for path, leaf in parameters_of(draft).items()}


def _changed(
    draft: Draft, edits: Mapping[str, Any] = MappingProxyType({}), /, **changes: Any
) -> Draft:
    """The draft with other parameters, another config or `numerics`, and with no claim of its own.

    All such drafts of one config are one program: what they claim and are called would each be
    another one, and `Case.boundaries` says what they are given.
    """
    width, chunks = draft.config.boundaries.width, draft.config.num_aux_hidden_states
    anything = Boundaries("any", tuple(range(chunks)), width, "whatever a reading says")
    numerics = changes.pop("numerics", draft.numerics)
    config = dataclasses.replace(draft.config, boundaries=anything, **changes)
    graph, state = nnx.split(abstract_draft(config, numerics, "reading"))
    have = _arrays(draft) | dict(edits)
    full = [
        (path, leaf.replace(have[".".join(map(str, path))].astype(leaf.get_value().dtype)))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(full))
