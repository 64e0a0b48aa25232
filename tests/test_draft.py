import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.cache import KeyValues, commit
from jaxspec.contracts import DraftIds, Features
from tests import tiny, trees
from tests.reference import formulas
from tests.reference.draft import ReferenceDraft
from tests.test_target import assert_rows_close

VOCAB, WIDTH = tiny.TARGET_CONFIG["vocab_size"], tiny.TARGET_CONFIG["hidden_size"]
TOKENS, SLOTS = 6, 16
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, (2, TOKENS))
FEATURES = RNG.normal(size=(2, TOKENS, 3 * WIDTH)).astype(np.float32)
POS = np.broadcast_to(np.arange(TOKENS), (2, TOKENS))
FAR = tiny.DRAFT_CONFIG["max_position_embeddings"] + 100


def fuse(draft, ids, pos, kv_len, cache, features=FEATURES, target=None):
    """Logits, recurrent hidden and rows of a pass over features."""
    stamped = Features(jnp.asarray(features), draft.config.boundaries)
    ids, pos, kv_len = (jnp.asarray(x, jnp.int32) for x in (ids, pos, kv_len))
    return tiny.run_draft(*nnx.split(draft), stamped, ids, pos, kv_len, cache, None, None, target)


def poisoned(draft) -> KeyValues:
    """A cache whose every slot is NaN."""
    return jax.tree.map(lambda slots: jnp.full_like(slots, jnp.nan), draft.empty_cache(2, SLOTS))


def expected(reference: ReferenceDraft, first_pos: int = 0) -> list[np.ndarray]:
    """The reference's recurrent hidden of both sequences."""
    pos, causal = first_pos + np.arange(TOKENS), formulas.causal(TOKENS)
    hidden = [reference.fuse(features.astype(float)) for features in FEATURES]
    return [reference.run(hidden[b], IDS[b], pos, causal) for b in range(2)]


def assert_same(outputs, reference, wanted, at: slice = slice(None)) -> None:
    for b in range(2):
        assert_rows_close(outputs[1][b], wanted[b][at])
        assert_rows_close(outputs[0][b], reference.logits(wanted[b][at]))


# Positions past `max_position_embeddings` are as good as any: there is no table to run out of.
@pytest.mark.parametrize("first_pos", [0, FAR])
def test_fuse(draft, reference_draft, first_pos):
    outputs = fuse(draft, IDS, first_pos + POS, [0, 0], poisoned(draft))
    assert_same(outputs, reference_draft, expected(reference_draft, first_pos))


def test_fuse_after_cached_rows(draft, reference_draft):
    rows = fuse(draft, IDS, POS, [0, 0], poisoned(draft))[2]
    cache = commit(poisoned(draft), rows, jnp.asarray(POS), jnp.zeros(2, jnp.int32), jnp.full(2, 3))
    at = slice(3, TOKENS)
    outputs = fuse(draft, IDS[:, at], POS[:, at], [3, 3], cache, FEATURES[:, at])
    assert_same(outputs, reference_draft, expected(reference_draft), at)


def test_recur_sees_prefix_ancestors_and_itself(draft, reference_draft):
    """Two levels of two rows after prefixes of different lengths: each is its own chain's end."""
    prefix = np.array([4, 6])
    rows = fuse(draft, IDS, POS, [0, 0], poisoned(draft))[2]
    cache = commit(
        poisoned(draft), rows, jnp.asarray(POS), jnp.zeros(2, jnp.int32), jnp.asarray(prefix)
    )
    rng = np.random.default_rng(5)
    ids, hidden = rng.integers(0, VOCAB, (2, 4)), rng.normal(size=(2, 4, WIDTH))
    parents = [0, 1, 1, 0]  # rows 2 and 3 continue rows 1 and 0
    is_seen = np.eye(4, dtype=bool)
    is_seen[[2, 3], [1, 0]] = True
    graph, params = nnx.split(draft)
    earlier = jax.tree.map(lambda slots: slots[..., :0, :], cache)
    outs = []
    for level in range(2):
        at = slice(2 * level, 2 * level + 2)
        sees = jnp.broadcast_to(is_seen[at, : 2 * level + 2], (2, 2, 2 * level + 2))
        pos = jnp.broadcast_to(prefix[:, None] + level, (2, 2))
        source = jnp.asarray(hidden[:, at], jnp.float32)
        args = jnp.asarray(ids[:, at]), pos, jnp.asarray(prefix), cache, earlier, sees
        logits, out, rows = tiny.run_draft(graph, params, source, *args)
        earlier = jax.tree.map(lambda *p: jnp.concatenate(p, axis=-2), earlier, rows)
        outs.append((logits, out))
    for b, row in np.ndindex(2, 4):
        chain = [row] if row < 2 else [parents[row], row]
        length = prefix[b] + len(chain)
        before = reference_draft.fuse(FEATURES[b, : prefix[b]].astype(float))
        alone = reference_draft.run(
            np.concatenate([before, hidden[b, chain].astype(np.float32)]),
            [*IDS[b, : prefix[b]], *ids[b, chain]],
            np.arange(length),
            formulas.causal(length),
        )[-1:]
        logits, out = outs[row // 2]
        assert_rows_close(out[b, row % 2][None], alone)
        assert_rows_close(logits[b, row % 2][None], reference_draft.logits(alone))


def test_borrowed_weights_and_normed_residual(target, draft_tensors):
    """A draft without an embedding or head of its own, whose residual is the normed hidden."""
    tensors = {n: t for n, t in draft_tensors.items() if n not in ("embed_tokens.weight",)}
    tensors["lm_head.weight"] = np.asarray(target.head[...]).T
    tensors["d2t"] = np.zeros(VOCAB, int)
    config = tiny.DRAFT_CONFIG | {"norm_before_residual": True, "draft_vocab_size": VOCAB}
    claim = target.boundaries(tiny.BOUNDARIES, "test")
    changes = {"has_embedding": False, "has_head": False}
    draft = tiny.draft_module(tensors, tiny.draft_config(config, claim, **changes))
    reference = ReferenceDraft(tensors, config, embed=np.asarray(target.embed[...], float))
    borrowed = target.embed[...], target.head[...]
    outputs = fuse(draft, IDS, POS, [0, 0], poisoned(draft), target=borrowed)
    assert_same(outputs, reference, expected(reference))


def test_own_weights_are_not_the_targets(target, draft, reference_draft):
    """A draft that has its own embedding and head reads neither of the target's."""
    nothing = jnp.full((VOCAB, WIDTH), jnp.nan), jnp.full((WIDTH, VOCAB), jnp.nan)
    outputs = fuse(draft, IDS, POS, [0, 0], poisoned(draft), target=nothing)
    assert_same(outputs, reference_draft, expected(reference_draft))


def test_vocabulary_map(draft, reference_draft):
    every = DraftIds(jnp.arange(draft.config.draft_vocab_size), draft.config.draft_vocab_size)
    mapped = draft.vocab_map.to_target(every)
    np.testing.assert_array_equal(mapped.require(VOCAB, "test"), reference_draft.target_of_draft)
    assert len(set(mapped.ids.tolist())) == draft.config.draft_vocab_size


def test_reference_reads_masked_rows_as_chains(reference_draft):
    """What the oracle builds on: a masked pass is its paths one by one."""
    parents, rng = trees.random_tree(5, 1), np.random.default_rng(0)
    hidden, ids = rng.normal(size=(5, WIDTH)), rng.integers(0, VOCAB, 5)
    sees, depth = trees.ancestors(parents), trees.depths(parents)
    together = reference_draft.run(hidden, ids, depth, sees)
    for node in range(5):
        path = trees.path(parents, node)
        causal = formulas.causal(len(path))
        alone = reference_draft.run(hidden[path], ids[path], np.arange(len(path)), causal)
        np.testing.assert_allclose(together[node], alone[-1], rtol=1e-9)
