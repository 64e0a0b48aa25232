"""How much of a tree is accepted: what the rule of one coin and a residual would accept.

That rule walks down from the root: it takes a child with the probability that the target gives it,
all children together or none, and so on from there. So a path of d drafted tokens is accepted with
the total probability of the tree's paths of that length. Noise that is keyed to positions must give
neither more nor less: given a tree, what it accepts is drawn anew.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxspec import step as step_module
from jaxspec.checkpoint import load_draft, load_target
from jaxspec.config import TreeConfig
from jaxspec.sampling import Sampling
from jaxspec.step import NUM_STOP_IDS, Admission, Settings, State, Status, empty_state, prefill
from jaxspec.verify import verify
from tests import tiny
from tests.torch_reference import MINI_DRAFT, MINI_TARGET, prompt_ids

TREE = TreeConfig.parse("3x4x16")
BATCH, STEPS, ENOUGH = 32, 48, 20_000
TEMPERATURE, TOP_K = 0.8, 20
FAR = 4
"""Standard errors: as far off is one sound run in 16,000."""


def path_probabilities(logits_BJV, tree, temperature_B, is_cut_B) -> jax.Array:
    """[B,P], the total probability of the tree's paths of each length."""
    score_BJV = logits_BJV / temperature_B[:, None, None]
    kth_BJ1 = lax.top_k(score_BJV, TOP_K)[0][:, :, -1:]
    is_cut_BJV = is_cut_B[:, None, None] & (score_BJV < kth_BJ1)
    log_prob_BJV = jax.nn.log_softmax(jnp.where(is_cut_BJV, -jnp.inf, score_BJV), axis=-1)
    batch_B1 = jnp.arange(BATCH)[:, None]
    # What the target gives each node, given its parent; the root is there already.
    own_BJ = log_prob_BJV[batch_B1, jnp.maximum(tree.parent, 0), tree.tokens]
    own_BJ = jnp.where(tree.parent < 0, 0.0, own_BJ)
    path_BJ = jnp.exp(jnp.where(tree.ancestors, own_BJ[:, None, :], 0.0).sum(-1))
    is_at_BPJ = tree.depth[:, None, :] == jnp.arange(TREE.levels + 1)[None, :, None]
    return jnp.where(is_at_BPJ, path_BJ[:, None, :], 0.0).sum(-1)


@pytest.mark.slow
def test_as_much_as_the_one_coin_rule_accepts(capsys):
    """Level by level, at a temperature and with top-k too; another temperature would be seen."""
    target = load_target(MINI_TARGET, tiny.NUMERICS)
    draft = load_draft(MINI_DRAFT, tiny.NUMERICS, target=target)
    capture = target.asked_for(draft.config.boundaries)
    settings = Settings(TREE, capture, 16)
    slots = max(map(len, prompt_ids())) + STEPS * (TREE.levels + 1)
    graph, params = nnx.split((target, draft))
    temperature_B = jnp.full(BATCH, TEMPERATURE, jnp.float32)
    is_cut_B = jnp.arange(BATCH) % 2 == 1
    levels_1P = jnp.arange(TREE.levels + 1)[None]

    @jax.jit
    def admit(params, new: Admission) -> State:
        target, draft = nnx.merge(graph, params)
        return prefill(target, draft, empty_state(target, draft, BATCH, slots), new, settings)

    @jax.jit
    def advance(params, state: State):
        """By level: sequences that accepted so far, what was expected, at temperature 1 too."""

        def one(state, _):
            seen = {}

            def watched(logits_BJV, tree, *args):
                done = verify(logits_BJV, tree, *args)
                seen["expected"] = path_probabilities(logits_BJV, tree, temperature_B, is_cut_B)
                seen["at 1"] = path_probabilities(
                    logits_BJV, tree, jnp.ones_like(temperature_B), is_cut_B
                )
                seen["accepted"] = done.accepted.count[:, None] >= levels_1P
                return done

            is_running_B1 = (state.status == Status.RUNNING)[:, None]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(step_module, "verify", watched)
                state = step_module.step(*nnx.merge(graph, params), state, settings)
            expected_BP = seen["expected"]
            counts = (
                jnp.ones_like(expected_BP),
                seen["accepted"].astype(jnp.float32),
                expected_BP,
                expected_BP * (1 - expected_BP),
                seen["at 1"],
            )
            return state, [jnp.where(is_running_B1, count, 0).sum(0) for count in counts]

        return jax.tree.map(lambda x: x.sum(0), lax.scan(one, state, None, STEPS)[1])

    totals, turn = np.zeros((5, TREE.levels + 1)), 0
    while totals[0, 0] < ENOUGH:
        texts = [prompt_ids()[(turn * BATCH + b) % len(prompt_ids())] for b in range(BATCH)]
        prompt = np.zeros((BATCH, slots), np.int32)
        for b, ids in enumerate(texts):
            prompt[b, : len(ids)] = ids
        length = jnp.array(list(map(len, texts)))
        sampling = Sampling.of(
            BATCH,
            seed=np.arange(BATCH) + turn * BATCH,
            temperature=TEMPERATURE,
            top_k=np.where(is_cut_B, TOP_K, 0),
        )
        no_stop = jnp.full((BATCH, NUM_STOP_IDS), -1)
        new = Admission(jnp.ones(BATCH, bool), prompt, length, slots - length, no_stop, sampling)
        totals += np.stack(advance(params, admit(params, new)))
        turn += 1
    steps, accepted, expected, variance, at_one = totals[:, 1:]
    off = (accepted - expected) / np.sqrt(variance)
    with capsys.disabled():
        print(
            f"\n{int(steps[0])} steps; accepted {np.round(accepted / steps, 4)}, one coin "
            f"{np.round(expected / steps, 4)}, {np.round(off, 2)} standard errors apart"
        )
    assert (np.abs(off) < FAR).all()
    assert (np.abs(accepted - at_one) / np.sqrt(variance) > FAR).all()
