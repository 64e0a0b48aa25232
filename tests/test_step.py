"""`prefill` and `decode` as programs: where sequences stop, and what leaves others alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import TreeConfig
from jaxspec.sampling import Sampling
from jaxspec.step import (
    NUM_STOP_IDS,
    Admission,
    Settings,
    State,
    Status,
    decode,
    empty_state,
    prefill,
)
from tests import tiny
from tests.reference.eagle import Oracle
from tests.speculation import NEAR_TIE

VOCAB, BATCH, SLOTS = tiny.TARGET_CONFIG["vocab_size"], 4, 48
POISON = VOCAB - 1
"""A token that no prompt holds unless a test wants it; its embedding can be made NaN."""
LENGTHS = (1, 8, 6, 19)
PROMPTS = [np.random.default_rng(length).integers(0, POISON, length).tolist() for length in LENGTHS]
TEMPERATURES = (0.0, 0.8, 1.0, 0.0)


class Programs:
    """The two programs, jitted, over a tiny pair."""

    def __init__(self, target, draft) -> None:
        capture = target.boundaries(draft.config.boundaries.ids, "test")
        settings = Settings(TreeConfig.parse("3x4x16"), capture, 8)
        graph, self.params = nnx.split((target, draft))
        self.empty = empty_state(target, draft, BATCH, SLOTS)

        def admit(params, state, new):
            return prefill(*nnx.merge(graph, params), state, new, settings)

        def run(params, state, max_steps):
            return decode(*nnx.merge(graph, params), state, max_steps, settings)

        options = {"xla_backend_optimization_level": 0}
        self.admit = jax.jit(admit, compiler_options=options)
        self.run = jax.jit(run, compiler_options=options)

    def all(self, new: Admission, params=None, max_steps: int = 100) -> State:
        """The state after both, from an empty one."""
        params = self.params if params is None else params
        return self.run(params, self.admit(params, self.empty, new), jnp.int32(max_steps))


def admission(limits, admitted=(True,) * BATCH, prompts=PROMPTS, stop: int = -1) -> Admission:
    ids = np.zeros((BATCH, SLOTS), np.int32)
    for b, prompt in enumerate(prompts):
        ids[b, : len(prompt)] = prompt
    return Admission(
        jnp.asarray(admitted),
        jnp.asarray(ids),
        jnp.array([len(prompt) for prompt in prompts]),
        jnp.broadcast_to(jnp.asarray(limits, jnp.int32), (BATCH,)),
        jnp.full((BATCH, NUM_STOP_IDS), stop),
        Sampling.of(BATCH, seed=jnp.arange(BATCH, dtype=jnp.uint32), temperature=TEMPERATURES),
    )


def tokens(state: State, b: int) -> list[int]:
    return state.tokens[b, : state.num_tokens[b]].tolist()


def accepted(state: State, b: int) -> list[int]:
    return state.accepted[b, : state.num_steps[b]].tolist()


@pytest.fixture(scope="module")
def programs(target, draft) -> Programs:
    return Programs(target, draft)


@pytest.fixture(scope="module")
def free_run(programs) -> State:
    """24 tokens of every sequence, with nothing to stop them."""
    state = programs.all(admission(24))
    assert (state.status == Status.LENGTH).all()
    assert (state.num_tokens == 24).all()
    assert (state.length == jnp.array(LENGTHS) + 24 - 1).all()
    return state


def test_emitted_tokens_are_accepted_ones_and_a_bonus_each(free_run):
    for b in range(BATCH):
        *full, last = accepted(free_run, b)
        left = 24 - 1 - sum(count + 1 for count in full)
        # The limit may cut the last block, its bonus token first.
        assert last <= left <= 4
        assert last == left or last + 1 == left


def test_limits(programs, free_run):
    """Every sequence stops at its own limit, with the tokens it would have had without one."""
    limits = [1, 2, 7, 24]
    state = programs.all(admission(limits))
    for b, limit in enumerate(limits):
        assert tokens(state, b) == tokens(free_run, b)[:limit]
        assert state.status[b] == Status.LENGTH
        assert state.length[b] == LENGTHS[b] + limit - 1
    assert accepted(state, 0) == [], "the only token of a limit of one comes from prefill"


def test_a_step_at_a_time(programs, free_run):
    """Streaming: however many steps a call takes, the state it ends in is the same, bit for bit."""
    state = programs.admit(programs.params, programs.empty, admission(24))
    for _ in range(100):
        before = state
        state = programs.run(programs.params, state, jnp.int32(1))
        assert (state.num_steps <= before.num_steps + 1).all()
        if not (state.status == Status.RUNNING).any():
            break
    for mine, theirs in zip(*map(jax.tree.leaves, (state, free_run)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_full_context(programs, reference_target):
    """Prompt and tokens fill the slots to the last; the tokens are those of plain decoding."""
    limits = [SLOTS - length for length in LENGTHS]
    state = programs.all(admission(limits))
    assert (state.status == Status.LENGTH).all()
    assert (state.length == SLOTS - 1).all()
    for b in (0, 3):
        oracle = Oracle(reference_target, None, ())
        plain = oracle.plain(PROMPTS[b], limits[b])
        certain = next((i for i, c in enumerate(plain) if c.margin < NEAR_TIE), limits[b])
        assert tokens(state, b)[:certain] == [choice.token for choice in plain[:certain]]
        assert len(tokens(state, b)) == limits[b]


def test_stop_token_inside_an_accepted_block(programs, free_run):
    """Emission ends with the stop token, whatever was accepted after it; nothing after counts."""

    def block_with(b: int) -> tuple[int, int, int] | None:
        """A token that first appears before the end of a block: its id, index and step."""
        ids, start = tokens(free_run, b), 1
        for step, count in enumerate(accepted(free_run, b)):
            for index in range(start, start + count):
                if ids.index(ids[index]) == index:
                    return ids[index], index, step
            start += count + 1
        return None

    b, (stop, index, step) = next((b, found) for b in range(BATCH) if (found := block_with(b)))
    state = programs.all(admission(24, stop=stop))
    assert state.status[b] == Status.STOPPED
    assert tokens(state, b) == tokens(free_run, b)[: index + 1]
    before = accepted(free_run, b)[:step]
    emitted_before = 1 + sum(count + 1 for count in before)
    assert accepted(state, b) == [*before, index + 1 - emitted_before]
    for other in range(BATCH):
        wanted = tokens(free_run, other)
        if stop in wanted:
            wanted = wanted[: wanted.index(stop) + 1]
        assert tokens(state, other) == wanted
        assert (state.status[other] == Status.STOPPED) == (stop in wanted)


def test_a_place_is_refilled_while_others_go_on(programs, free_run):
    """A new sequence in one place: the others' tokens and rows stay, bit for bit."""
    first = programs.admit(programs.params, programs.empty, admission([24, 2, 24, 24]))
    midway = programs.run(programs.params, first, jnp.int32(4))
    assert midway.status[1] == Status.LENGTH
    refilled = programs.admit(programs.params, midway, admission(24, (False, True, False, False)))
    for b in (0, 2, 3):
        untouched = [
            (refilled.length, midway.length),
            (refilled.root, midway.root),
            (refilled.status, midway.status),
        ]
        for mine, theirs in untouched:
            assert mine[b] == theirs[b]
        for cache in ("target_cache", "draft_cache"):
            pairs = zip(
                *(jax.tree.leaves(getattr(s, cache)) for s in (refilled, midway)), strict=True
            )
            for mine, theirs in pairs:
                np.testing.assert_array_equal(
                    np.moveaxis(mine, -3, 0)[b], np.moveaxis(theirs, -3, 0)[b]
                )
    state = programs.run(programs.params, refilled, jnp.int32(100))
    for b in range(BATCH):
        assert tokens(state, b) == tokens(free_run, b)
        assert accepted(state, b) == accepted(free_run, b)


def test_idle_places_change_nothing(programs, free_run):
    state = programs.all(admission(24, (False, True, False, True)))
    for b in (1, 3):
        assert tokens(state, b) == tokens(free_run, b)
    for b in (0, 2):
        assert state.status[b] == Status.IDLE
        assert state.num_tokens[b] == 0


def with_leaf(programs: Programs, which: int, path: tuple[str, ...], change):
    """The programs' parameters with one of target (0) or draft (1) changed."""
    flat = dict(nnx.to_flat_state(programs.params))
    variable = flat[(which, *path)]
    flat[(which, *path)] = variable.replace(change(variable.get_value()))
    return nnx.from_flat_state(flat)


def test_a_target_that_is_not_finite_ends_its_sequence_alone(programs, free_run):
    params = with_leaf(programs, 0, ("embed",), lambda embed: embed.at[POISON].set(jnp.nan))
    prompts = [*PROMPTS[:3], [*PROMPTS[3][:-1], POISON]]
    state = programs.all(admission(24, prompts=prompts), params)
    assert state.status[3] == Status.TARGET_NOT_FINITE
    for b in range(3):
        if POISON not in tokens(free_run, b):
            assert tokens(state, b) == tokens(free_run, b)


def test_a_draft_head_of_nans_costs_speed_and_no_token(programs, free_run):
    """A malformed tree is still a tree: every step emits the target's own choice."""
    params = with_leaf(programs, 1, ("head",), functools.partial(jnp.full_like, fill_value=jnp.nan))
    state = programs.all(admission(24), params)
    for b in range(BATCH):
        assert tokens(state, b) == tokens(free_run, b)


def test_a_draft_that_is_not_finite_is_told(programs):
    """It would be lossless and never accepted; here it is so from the prompt on."""
    params = with_leaf(programs, 1, ("fc",), lambda fc: fc.at[0, 0].set(jnp.nan))
    state = programs.all(admission(24), params)
    assert (state.status == Status.DRAFT_NOT_FINITE).all()
    assert (state.num_tokens == 0).all()
