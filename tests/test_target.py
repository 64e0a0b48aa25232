import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.cache import Latents, commit
from jaxspec.contracts import Boundaries, ContractError, TargetIds
from jaxspec.mla import Pass
from jaxspec.target import Target
from tests import tiny, trees
from tests.reference.target import ReferenceTarget, TargetRun

VOCAB, LAYERS = tiny.TARGET_CONFIG["vocab_size"], tiny.TARGET_CONFIG["num_hidden_layers"]
ALL = tuple(range(LAYERS + 1))
TOKENS, SLOTS = 12, 20
IDS = np.random.default_rng(0).integers(0, VOCAB, (2, TOKENS))


def assert_rows_close(got, want, tolerance: float = 1e-5) -> None:
    """Every row [..., width] within a share of the row's own largest entry."""
    error = np.abs(np.asarray(got, float) - want).max(-1) / np.abs(want).max(-1)
    assert error.max() <= tolerance, f"worst row is off by {error.max():.2e}"


def run(target: Target, ids, pos, kv_len, cache: Latents, capture=ALL, sees=None, is_real=None):
    claim = target.boundaries(capture, "test")
    ids, pos, kv_len = (jnp.asarray(x, jnp.int32) for x in (ids, pos, kv_len))
    return tiny.run_target(*nnx.split(target), ids, pos, kv_len, cache, claim, sees, is_real)


def poisoned(target: Target) -> Latents:
    """A cache whose every slot is NaN."""
    return jax.tree.map(lambda slots: jnp.full_like(slots, jnp.nan), target.empty_cache(2, SLOTS))


@pytest.fixture(scope="module")
def wanted(reference_target) -> list[TargetRun]:
    runs = [reference_target.run(ids) for ids in IDS]
    # Below this an f32 model may choose other experts, and no tolerance would make sense.
    assert min(run.margins.min() for run in runs) > 1e-5
    return runs


def assert_same(outputs, wanted: list[TargetRun], at: slice, capture=ALL) -> None:
    logits, features, _, experts, margins = outputs
    for b, run in enumerate(wanted):
        assert_rows_close(logits[b], run.logits[at])
        assert_rows_close(features[b], run.features(capture)[at])
        np.testing.assert_array_equal(experts[:, b], run.experts[:, at])
        np.testing.assert_allclose(margins[:, b], run.margins[:, at], atol=2e-6)


def test_prompt_pass(target, wanted):
    pos = np.broadcast_to(np.arange(TOKENS), (2, TOKENS))
    assert_same(run(target, IDS, pos, [0, 0], poisoned(target)), wanted, slice(None))


@pytest.mark.parametrize("chunk", [4, 1])
def test_chunks_and_cached_decode(target, wanted, chunk):
    """Chunk by chunk, or token by token, from a cache whose unfilled slots are NaN."""
    cache, every_row = poisoned(target), jnp.broadcast_to(jnp.arange(chunk), (2, chunk))
    for start in range(0, TOKENS, chunk):
        at, starts = slice(start, start + chunk), jnp.full(2, start)
        outputs = run(target, IDS[:, at], start + every_row, starts, cache)
        assert_same(outputs, wanted, at)
        cache = commit(cache, outputs[2], every_row, starts, jnp.full(2, chunk))


def test_any_boundaries_in_any_order(target, wanted):
    pos, capture = np.broadcast_to(np.arange(4), (2, 4)), (4, 0, 2, 2)
    outputs = run(target, IDS[:, :4], pos, [0, 0], poisoned(target), capture)
    assert_same(outputs, wanted, slice(4), capture)


@pytest.fixture(scope="module")
def prefixes(target) -> tuple[Latents, np.ndarray]:
    """A cache of prefixes of different lengths, NaN past them, and the lengths."""
    pos, lengths = jnp.broadcast_to(jnp.arange(TOKENS), (2, TOKENS)), np.array([5, 9])
    empty = poisoned(target)
    rows = run(target, IDS, pos, [0, 0], empty)[2]
    return commit(empty, rows, pos, jnp.zeros(2, jnp.int32), jnp.asarray(lengths)), lengths


PARENTS = [trees.random_tree(4, 5), trees.star(4)]
NODE_IDS = np.random.default_rng(1).integers(0, VOCAB, (2, 4))


def tree_pass(target, cache, lengths, parents=PARENTS, ids=NODE_IDS, is_real=None):
    pos = lengths[:, None] + np.stack([trees.depths(p) for p in parents])
    sees = jnp.asarray(np.stack([trees.ancestors(p) for p in parents]))
    return run(target, ids, pos, lengths, cache, sees=sees, is_real=is_real)


def test_every_node_is_the_end_of_its_own_sequence(target, reference_target, prefixes):
    """A tree after prefixes of different lengths, against each node's path run as plain text."""
    cache, lengths = prefixes
    logits, features, _, experts, _ = tree_pass(target, cache, lengths)
    for b, node in np.ndindex(2, 4):
        path = trees.path(PARENTS[b], node)
        alone = reference_target.run([*IDS[b, : lengths[b]], *NODE_IDS[b, path]])
        assert_rows_close(logits[b, node], alone.logits[-1])
        assert_rows_close(features[b, node], alone.features(ALL)[-1])
        np.testing.assert_array_equal(experts[:, b, node], alone.experts[:, -1])


def test_reference_reads_a_tree_as_its_paths(reference_target):
    """The oracle's one masked pass is what its paths are one by one."""
    parents, prefix = trees.random_tree(6, 5), list(IDS[0, :5])
    nodes = np.random.default_rng(3).integers(0, VOCAB, 6)
    sees = np.zeros((11, 11), bool)
    sees[:5, :5] = trees.ancestors(trees.chain(5))
    sees[5:, :5], sees[5:, 5:] = True, trees.ancestors(parents)
    positions = [*range(5), *(5 + trees.depths(parents))]
    together = reference_target.run([*prefix, *nodes], positions, sees)
    for node in range(6):
        alone = reference_target.run([*prefix, *nodes[trees.path(parents, node)]])
        np.testing.assert_allclose(together.logits[5 + node], alone.logits[-1], rtol=1e-9)


def test_other_sequences_do_not_change_a_bit(target, prefixes):
    """The same compiled shape with another sequence beside it, another tree, or padding."""
    cache, lengths = prefixes
    both_real, one_idle = jnp.ones((2, 4), bool), jnp.array([[True] * 4, [False] * 4])
    first = tree_pass(target, cache, lengths, is_real=both_real)
    other_ids = np.stack([NODE_IDS[0], (NODE_IDS[1] + 7) % VOCAB])
    other_parents = [PARENTS[0], trees.chain(4)]
    for is_real in (both_real, one_idle):
        other_lengths = np.array([lengths[0], 3])
        second = tree_pass(target, cache, other_lengths, other_parents, other_ids, is_real)
        for mine, theirs in zip(first[:2], second[:2], strict=True):
            np.testing.assert_array_equal(mine[0], theirs[0])
        for mine, theirs in zip(*map(jax.tree.leaves, (first[2], second[2])), strict=True):
            np.testing.assert_array_equal(mine[:, 0], theirs[:, 0])


def test_plain_experts_groups_and_another_latent_epsilon():
    """DeepSeek-V3's grouped router over plain weights, two dense layers, mscale only half used."""
    config = {k: v for k, v in tiny.TARGET_CONFIG.items() if k != "quantization_config"}
    config |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "latent_norm_eps": 0.3}
    config["rope_scaling"] = config["rope_scaling"] | {"mscale_all_dim": 0.5}
    tensors = tiny.target_tensors(config, seed=4)
    target = tiny.target_module(tensors, config)
    reference = ReferenceTarget(tensors, config, latent_norm_eps=0.3)
    pos = np.broadcast_to(np.arange(4), (2, 4))
    wanted = [reference.run(ids) for ids in IDS[:, :4]]
    assert_same(run(target, IDS[:, :4], pos, [0, 0], poisoned(target)), wanted, slice(None))


def trace(target: Target, tokens: TargetIds, capture: Boundaries) -> None:
    at = Pass(jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32))
    jax.eval_shape(lambda: target(tokens, at, target.empty_cache(2, SLOTS), capture).hidden)


def test_boundaries_that_do_not_exist(target):
    for ids in ((), (-1, 2), (0, 5)):
        with pytest.raises(ContractError, match=r"boundaries 0 .* to 4 \(before the final norm\)"):
            target.boundaries(ids, "test")


def test_capture_claimed_of_another_target(target):
    claim = Boundaries("other@2", (1, 2), 64, "somewhere")
    with pytest.raises(ContractError, match=r"other@2(.|\n)*this target is tiny@1"):
        trace(target, TargetIds(jnp.zeros((2, 4), jnp.int32), VOCAB), claim)


def test_ids_of_another_vocabulary(target):
    claim = target.boundaries((1,), "test")
    with pytest.raises(ContractError, match=r"vocabulary of 24(.|\n)*vocabulary of 25"):
        trace(target, TargetIds(jnp.zeros((2, 4), jnp.int32), VOCAB + 1), claim)
