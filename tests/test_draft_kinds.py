"""Every published kind of draft, read from its own layout: what it computes, and what it decodes.

Against `tests/reference/draft.py`, in numpy, from the same tensors: the first depth over a
sequence, then four recurrent steps of two beams each, every beam on its own chain of rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.cache import commit
from jaxspec.checkpoint import load_draft
from jaxspec.config import TreeConfig
from jaxspec.contracts import Features
from jaxspec.draft import Draft
from tests import draft_kinds, make_checkpoint, tiny
from tests.reference import formulas
from tests.reference.draft import ReferenceDraft
from tests.reference.eagle import Oracle
from tests.speculation import NEAR_TIE, Request, Stepper, differences
from tests.torch_reference import row_error

TOLERANCE = 1e-5
TOKENS, SLOTS, STEPS, BEAMS = 6, 12, 4, 2
RNG = np.random.default_rng(0)
VOCAB, WIDTH = tiny.TARGET_CONFIG["vocab_size"], tiny.TARGET_CONFIG["hidden_size"]
IDS = RNG.integers(0, VOCAB, (2, TOKENS))
PREFIX = np.array([4, 6])
BEAM_IDS = RNG.integers(0, VOCAB, (STEPS, 2, BEAMS))
PARENTS = RNG.integers(0, BEAMS, (STEPS, 2, BEAMS))
"""Which of the step above each beam goes on from; of the first one, nothing."""


RUN = jax.jit(
    tiny.run_draft.__wrapped__,
    static_argnames="graph",
    compiler_options={"xla_backend_optimization_level": 0},  # half the time to compile
)


COMPILED_BY_DEFAULT = "ModelOpt MLA"
"""A whole step takes 10 seconds to compile; of the other kinds it is in the slow tests."""
EACH = [
    pytest.param(name, marks=[] if name == COMPILED_BY_DEFAULT else [pytest.mark.slow])
    for name in draft_kinds.LAYOUTS
]


@pytest.fixture(scope="module")
def kind(request, tmp_path_factory, target) -> tuple[Draft, ReferenceDraft]:
    """A draft read from its layout, and the same tensors in numpy."""
    config, tensors = draft_kinds.LAYOUTS[request.param]()
    directory = make_checkpoint.write(tmp_path_factory.mktemp("draft"), config, tensors)
    draft = load_draft(directory, tiny.NUMERICS, target=target)
    return draft, ReferenceDraft(tensors, config, embed=np.asarray(target.embed[...], float))


def features_of(draft: Draft) -> np.ndarray:
    """Random ones, of every chunk another size, which norms of chunks take out and others keep."""
    chunks = draft.config.num_aux_hidden_states
    rng = np.random.default_rng(chunks)
    sizes = np.repeat(3.0 ** np.arange(chunks), WIDTH)
    return (sizes * rng.normal(size=(2, TOKENS, chunks * WIDTH))).astype(np.float32)


@pytest.mark.parametrize("kind", draft_kinds.LAYOUTS, indirect=True)
def test_first_depth_and_four_recurrent_steps(kind, target):
    draft, reference = kind
    features = features_of(draft)
    graph, params = nnx.split(draft)
    borrowed = target.embed[...], target.head[...]
    run = functools.partial(RUN, graph, params)
    pos_BT = jnp.broadcast_to(jnp.arange(TOKENS), (2, TOKENS))
    empty = jax.tree.map(lambda slots: jnp.full_like(slots, jnp.nan), draft.empty_cache(2, SLOTS))
    nobody_B = jnp.zeros(2, jnp.int32)
    stamped = Features(jnp.asarray(features), draft.config.boundaries)
    ids_BT = jnp.asarray(IDS, jnp.int32)
    logits, hidden, rows = run(stamped, ids_BT, pos_BT, nobody_B, empty, None, None, borrowed)
    fused = [reference.fuse(features[b].astype(float)) for b in range(2)]
    causal = formulas.causal(TOKENS)
    for b in range(2):
        wanted = reference.run(fused[b], IDS[b], np.arange(TOKENS), causal)
        assert row_error(np.asarray(hidden)[b], wanted).max() <= TOLERANCE
        assert row_error(np.asarray(logits)[b], reference.logits(wanted)).max() <= TOLERANCE

    cache = jax.jit(commit)(empty, rows, pos_BT, nobody_B, jnp.asarray(PREFIX))
    # Each beam starts from the last committed row; then each from its parent of the step above.
    last = np.asarray(hidden)[np.arange(2), PREFIX - 1]
    chains = [[[] for _ in range(BEAMS)] for _ in range(2)]
    source = np.repeat(last[:, None], BEAMS, axis=1)
    scratch = jax.tree.map(lambda slots: slots[..., : STEPS * BEAMS, :] * 0, cache)
    chain_rows = np.zeros((2, BEAMS, STEPS * BEAMS), bool)
    for step in range(STEPS):
        if step:
            taken = PARENTS[step]
            source = np.take_along_axis(np.asarray(hidden), taken[:, :, None], axis=1)
            chains = [[[*chains[b][taken[b, k]]] for k in range(BEAMS)] for b in range(2)]
            chain_rows = np.take_along_axis(chain_rows, taken[:, :, None], axis=1)
            for b, k in np.ndindex(2, BEAMS):
                chain_rows[b, k, (step - 1) * BEAMS + taken[b, k]] = True
        itself = np.broadcast_to(np.eye(BEAMS, dtype=bool), (2, BEAMS, BEAMS))
        logits, hidden, rows = run(
            jnp.asarray(source),
            jnp.asarray(BEAM_IDS[step], jnp.int32),
            jnp.broadcast_to(PREFIX[:, None] + step, (2, BEAMS)),
            jnp.asarray(PREFIX, jnp.int32),
            cache,
            scratch,
            jnp.asarray(np.concatenate([chain_rows, itself], axis=-1)),
            borrowed,
        )
        at = step * BEAMS
        scratch = jax.tree.map(
            lambda old, new, at=at: old.at[..., at : at + BEAMS, :].set(new), scratch, rows
        )
        for b, k in np.ndindex(2, BEAMS):
            chains[b][k].append((source[b, k].astype(float), BEAM_IDS[step, b, k]))
            ours, theirs = np.asarray(hidden)[b, k], alone(reference, fused[b], b, chains[b][k])
            assert row_error(ours, theirs).max() <= TOLERANCE, (step, b, k)
            wanted = reference.logits(theirs)
            assert row_error(np.asarray(logits)[b, k], wanted).max() <= TOLERANCE, (step, b, k)


def alone(reference, fused, b: int, chain: list) -> np.ndarray:
    """What the last row of a chain hands on, after its sequence's prefix, all of it at once."""
    length = PREFIX[b] + len(chain)
    hidden = np.concatenate([fused[: PREFIX[b]], [state for state, _ in chain]])
    ids = [*IDS[b, : PREFIX[b]], *(token for _, token in chain)]
    return reference.run(hidden, np.array(ids), np.arange(length), formulas.causal(length))[-1]


# Ragged: the prompts end before and after the end of a prefill chunk.
REQUESTS = [
    Request(tuple(RNG.integers(0, VOCAB, 5).tolist())),
    Request(tuple(RNG.integers(0, VOCAB, 11).tolist()), temperature=1.0, seed=1),
]
NEW_TOKENS = 12
TREE = TreeConfig.parse("3x2x6")


@pytest.fixture(scope="module")
def plain(reference_target) -> list[list[int]]:
    """The tokens of decoding without a draft, which no draft may change."""
    oracles = [Oracle(reference_target, None, (), r.choose(VOCAB)) for r in REQUESTS]
    runs = [o.plain(list(r.prompt), NEW_TOKENS) for o, r in zip(oracles, REQUESTS, strict=True)]
    assert min(choice.margin for run in runs for choice in run) > NEAR_TIE, "nothing is a near-tie"
    return [[choice.token for choice in run] for run in runs]


@pytest.mark.parametrize("kind", EACH, indirect=True)
def test_decodes_as_without_a_draft(kind, target, reference_target, plain):
    """The whole step with this draft: the oracle's trees, and the tokens of `--draft none`."""
    draft, reference = kind
    stepper = Stepper(target, draft, len(REQUESTS), 32, 8, optimise=False)
    runs = stepper.run(REQUESTS, TREE, NEW_TOKENS)
    for request, tokens, (first, steps) in zip(REQUESTS, plain, runs, strict=True):
        assert [first, *(token for step in steps for token in step.emitted)] == tokens
        ids = draft.config.boundaries.ids
        oracle = Oracle(reference_target, reference, ids, request.choose(VOCAB))
        found = list(differences(oracle, request, TREE, NEW_TOKENS, (first, steps)))
        assert not [one for one in found if not one.is_near_tie]
        assert len(found) < len(steps), "they were compared, and not excused"
