"""Mistakes planted in jaxspec itself: the comparison with the oracle must see every one.

`test_oracle.py` makes the same mistakes in the oracle, which is cheaper; these are the proof that
it does not matter on which side they are.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxspec import draft as draft_module
from jaxspec import propose as propose_module
from jaxspec import step as step_module
from jaxspec.cache import commit
from jaxspec.config import TreeConfig
from jaxspec.contracts import TargetIds
from jaxspec.draft import Draft, DraftPass
from jaxspec.layers import rotary_angles
from jaxspec.mla import Pass
from tests import tiny
from tests.reference.eagle import Oracle
from tests.speculation import Stepper, differences
from tests.test_oracle import CHUNK, NUM_TOKENS, REQUESTS, SLOTS, VOCAB
from tests.test_sampling import (
    noise_keyed_by_node,
    noise_reused_across_positions,
    top_p_before_temperature,
)

TREE = TreeConfig.parse("3x4x16")


def own_hidden_in_accepted_rows(monkeypatch) -> None:
    """The draft extends over the accepted path with its own hidden, not the target's features."""
    seeds, honest_propose, honest_fuse = [], step_module.propose, Draft.fuse

    def propose(draft, seed, *args):
        seeds.append(seed)
        return honest_propose(draft, seed, *args)

    def fuse(self, features, tokens, at, cache, target):
        honest = honest_fuse(self, features, tokens, at, cache, target)
        if tokens.ids.shape[1] != TREE.levels + 1:
            return honest
        hidden = seeds[-1].recurrent[:, None]
        rows = jax.tree.map(lambda slots: slots[..., :0, :], cache)
        for j in range(TREE.levels + 1):
            sees = jnp.ones((len(hidden), 1, j + 1), bool)
            here = Pass(at.pos[:, j : j + 1], at.kv_len, sees)
            token = TargetIds(tokens.ids[:, j : j + 1], tokens.vocab_size)
            out = self.recur(hidden, token, here, cache, rows, target)
            hidden = out.recurrent
            rows = jax.tree.map(lambda *p: jnp.concatenate(p, axis=-2), rows, out.rows)
        return DraftPass(honest.recurrent, rows)

    monkeypatch.setattr(step_module, "propose", propose)
    monkeypatch.setattr(Draft, "fuse", fuse)


def short_rotary_table(monkeypatch) -> None:
    """The draft's positions end where its config's `max_position_embeddings` does."""
    last = tiny.DRAFT_CONFIG["max_position_embeddings"] - 1

    def short(config, pos):
        return rotary_angles(config, jnp.minimum(pos, last))

    monkeypatch.setattr(draft_module, "rotary_angles", short)


def compaction_in_place(monkeypatch) -> None:
    """Accepted rows are moved within their buffer, last one first."""

    def compact(cache, rows, row_BP, start_B, count_B, stripe=None):
        def moved(buffer: jax.Array) -> jax.Array:
            for i in reversed(range(row_BP.shape[1])):
                for b in range(row_BP.shape[0]):
                    row = buffer[..., b, row_BP[b, i], :]
                    is_path = i < count_B[b]
                    kept = jnp.where(is_path, row, buffer[..., b, i, :])
                    buffer = buffer.at[..., b, i, :].set(kept)
            return buffer

        in_order = jnp.broadcast_to(jnp.arange(row_BP.shape[1]), row_BP.shape)
        return commit(cache, jax.tree.map(moved, rows), in_order, start_B, count_B, stripe)

    monkeypatch.setattr(step_module, "commit", compact)


def positions_one_ahead(monkeypatch) -> None:
    """The draft's levels stand one position further than the tokens they propose after."""

    def ahead(pos, kv_len, sees):
        return Pass(pos + 1, kv_len, sees)

    monkeypatch.setattr(propose_module, "Pass", ahead)


def one_slot_too_many(monkeypatch) -> None:
    """The draft's levels see one slot past the committed rows, whatever was there before."""

    def longer(pos, kv_len, sees):
        return Pass(pos, kv_len + 1, sees)

    monkeypatch.setattr(propose_module, "Pass", longer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        noise_reused_across_positions,
        noise_keyed_by_node,
        top_p_before_temperature,
        own_hidden_in_accepted_rows,
        short_rotary_table,
        compaction_in_place,
        positions_one_ahead,
        one_slot_too_many,
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_fault_is_seen(
    monkeypatch, target, draft, reference_target, reference_draft, plant
):
    plant(monkeypatch)
    oracle = functools.partial(Oracle, reference_target, reference_draft, tiny.BOUNDARIES)
    stepper = Stepper(target, draft, len(REQUESTS), SLOTS, CHUNK, optimise=False)
    runs = stepper.run(REQUESTS, TREE, NUM_TOKENS)
    found = []
    for request, run in zip(REQUESTS, runs, strict=True):
        found += differences(oracle(request.choose(VOCAB)), request, TREE, NUM_TOKENS, run)
    assert any(not difference.is_near_tie for difference in found)
