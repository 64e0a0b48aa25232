"""Every way to feed a draft something else than it was trained on: an error while tracing.

Nothing here is ever run; `jax.eval_shape` traces, and that is where the errors come from.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.contracts import (
    Boundaries,
    ContractError,
    DraftIds,
    Features,
    TargetIds,
    VocabMap,
)
from jaxspec.draft import Borrowed
from jaxspec.mla import Pass
from tests import tiny

VOCAB, WIDTH = tiny.TARGET_CONFIG["vocab_size"], tiny.TARGET_CONFIG["hidden_size"]
TRAINED_ON = '[draft manifest: eagle_config ids [0, 1, 3], convention "after"]'
CAPTURED = "[target capture, set by --capture]"
AT = Pass(jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32))


@pytest.fixture(scope="module")
def draft(target, draft_tensors):
    claim = target.boundaries(tiny.BOUNDARIES, TRAINED_ON[1:-1])
    return tiny.draft_module(draft_tensors, tiny.draft_config(tiny.DRAFT_CONFIG, claim))


def refusal(target, draft, capture: Boundaries, change=lambda features: features, tokens=None):
    """What the draft says, while tracing, to features that the target captured under `capture`."""
    ids = TargetIds(jnp.zeros((1, 2), jnp.int32), VOCAB)

    def program():
        features = target(ids, AT, target.empty_cache(1, 4), capture).features
        borrowed = Borrowed.of(target)
        shifted = ids if tokens is None else tokens
        return draft.fuse(change(features), shifted, AT, draft.empty_cache(1, 4), borrowed)

    with pytest.raises(ContractError) as caught:
        jax.eval_shape(lambda: program().recurrent)
    return str(caught.value)


def capture(target, *ids: int) -> Boundaries:
    return target.boundaries(ids, CAPTURED[1:-1])


WANTS = f"wants: boundaries (1, 2, 4) of tiny@1, 64 wide each   {TRAINED_ON}"
SAME_WIDTH = "both are 192 wide, so nothing else would have failed."


@pytest.mark.parametrize(
    ("ids", "last_line"),
    [
        ((4,), "that is 64 wide where 192 are wanted."),
        ((0, 2, 4), SAME_WIDTH),
        ((0, 1, 3), SAME_WIDTH),
        ((2, 3, 4), SAME_WIDTH),
        ((4, 2, 1), SAME_WIDTH),
    ],
    ids=["one hidden state", "embedding", "one below", "one above", "other order"],
)
def test_other_boundaries(target, draft, ids, last_line):
    assert refusal(target, draft, capture(target, *ids)).splitlines() == [
        "draft.fuse: these are not the features this draft was trained on",
        f"  {WANTS}",
        f"  given: boundaries {ids} of tiny@1, 64 wide each   {CAPTURED}",
        f"  {last_line}",
    ]


def test_a_slice_keeps_its_claim_and_is_refused(target, draft):
    def cut(features: Features) -> Features:
        return dataclasses.replace(features, data=features.data[..., :WIDTH])

    message = refusal(target, draft, capture(target, *tiny.BOUNDARIES), cut)
    assert WANTS in message
    assert f"given: boundaries (1, 2, 4) of tiny@1, 64 wide each   {CAPTURED}" in message
    assert "the array itself is 64 wide where its own claim makes it 192" in message


def test_draft_of_another_target(target, draft):
    other = dataclasses.replace(draft.config.boundaries, target="bigger@7")
    draft = nnx.clone(draft)
    draft.config = dataclasses.replace(draft.config, boundaries=other)
    message = refusal(target, draft, capture(target, *tiny.BOUNDARIES))
    assert f"wants: boundaries (1, 2, 4) of bigger@7, 64 wide each   {TRAINED_ON}" in message
    assert f"given: boundaries (1, 2, 4) of tiny@1, 64 wide each   {CAPTURED}" in message
    assert SAME_WIDTH in message


@pytest.mark.parametrize("draft_vocab_size", [20, VOCAB])
def test_draft_ids_where_target_ids_belong(target, draft, draft_vocab_size):
    """Even those of a draft with as large a vocabulary as the target's."""
    ids = DraftIds(jnp.zeros((1, 2), jnp.int32), draft_vocab_size)
    message = refusal(target, draft, capture(target, *tiny.BOUNDARIES), tokens=ids)
    assert "wants: target ids of a vocabulary of 24" in message
    assert f"given: draft ids of a vocabulary of {draft_vocab_size}" in message
    assert "VocabMap.to_target" in message
    with pytest.raises(ContractError, match=f"draft ids of a vocabulary of {draft_vocab_size}"):
        target(ids, AT, target.empty_cache(1, 4), None)


def test_bare_ids(target, draft):
    bare = jnp.zeros((1, 2), jnp.int32)
    message = refusal(target, draft, capture(target, *tiny.BOUNDARIES), tokens=bare)
    assert re.search(r"wants: target ids .*\n  given: a bare \w+, which says of no vocab", message)


def test_vocabulary_of_another_size(target, draft):
    ids = TargetIds(jnp.zeros((1, 2), jnp.int32), VOCAB + 8)
    message = refusal(target, draft, capture(target, *tiny.BOUNDARIES), tokens=ids)
    assert "wants: target ids of a vocabulary of 24" in message
    assert "given: target ids of a vocabulary of 32" in message


def test_map_of_another_draft_vocabulary():
    ids = DraftIds(jnp.zeros((1, 2), jnp.int32), 20)
    with pytest.raises(
        ContractError, match=r"draft ids of a vocabulary of 24(.|\n)*vocabulary of 20"
    ):
        VocabMap(jnp.arange(VOCAB), VOCAB).to_target(ids)


def test_target_ids_where_draft_ids_belong():
    ids = TargetIds(jnp.zeros((1, 2), jnp.int32), VOCAB)
    with pytest.raises(ContractError, match=r"wants: draft ids(.|\n)*given: target ids"):
        VocabMap(jnp.arange(VOCAB), VOCAB).to_target(ids)


def test_right_features_pass(target, draft):
    """The eight refusals above are not refusals of everything."""
    ids = TargetIds(jnp.zeros((1, 2), jnp.int32), VOCAB)

    def program():
        claim = capture(target, *tiny.BOUNDARIES)
        features = target(ids, AT, target.empty_cache(1, 4), claim).features
        borrowed = Borrowed.of(target)
        return draft.fuse(features, ids, AT, draft.empty_cache(1, 4), borrowed).recurrent

    assert jax.eval_shape(program).shape == (1, 2, WIDTH)


def test_the_source_named_is_the_one_of_this_run():
    """Equal claims read in two places: a cached trace must not name the other's place."""

    @jax.jit
    def passes_through(features: Features) -> Features:
        return Features(2 * features.data, features.boundaries)

    want = Boundaries("tiny@1", (1, 2, 4), 2, "the draft")
    messages = []
    for origin in ("first.json", "second.json", "first.json"):
        features = Features(jnp.zeros((1, 1, 6)), Boundaries("tiny@1", (0, 2, 4), 2, origin))
        with pytest.raises(ContractError) as caught:
            jax.eval_shape(lambda f: passes_through(f).require(want, "draft.fuse"), features)
        messages.append(str(caught.value))
    assert ["first.json" in message for message in messages] == [True, False, True]
    assert ["second.json" in message for message in messages] == [False, True, False]
    assert Boundaries("t", (1,), 2, "here") != Boundaries("t", (1,), 2, "there")
    assert Boundaries("t", (1,), 2, "here").agrees_with(Boundaries("t", (1,), 2, "there"))


def test_claims_survive_scan_and_branches():
    """JAX itself compares the claim wherever two values must be of one kind."""
    right, wrong = (Boundaries("t", ids, 2, "test") for ids in ((0, 1), (1, 0)))
    features = Features(jnp.zeros((1, 1, 4)), right)
    carried, _ = jax.lax.scan(lambda f, _: (f, None), features, None, length=2)
    assert carried.boundaries == right

    def swap(f: Features) -> Features:
        return Features(f.data, wrong)

    with pytest.raises(TypeError):
        jax.lax.cond(True, swap, lambda f: f, features)
    with pytest.raises(TypeError):
        jax.lax.scan(lambda f, _: (swap(f), None), features, None, length=2)


def test_take_rows_keeps_the_claim():
    claim = Boundaries("t", (0, 1), 2, "test")
    data = jnp.arange(24.0).reshape(2, 3, 4)
    taken = Features(data, claim).take_rows(jnp.array([[2, 0], [1, 1]]))
    assert taken.boundaries == claim
    wanted = np.stack([data[0, [2, 0]], data[1, [1, 1]]])
    np.testing.assert_array_equal(taken.require(claim, "test"), wanted)
