"""`tree_verify`: XLA against the reference, Mosaic under the interpreter against both, bit for bit.

Races on, unset memory NaN. The interpreter takes the logarithms of the CPU, so that noise, and with
it every sampled token, is exactly the XLA form's.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.kernels.tree_verify import Sampling, tree_verify, why_not_mosaic
from jaxspec.kernels.tree_verify.mosaic import Tuning, supported, tree_verify_mosaic
from jaxspec.kernels.tree_verify.mosaic_walk import Shares, walk
from jaxspec.kernels.tree_verify.reference import tree_verify_reference
from jaxspec.kernels.tree_verify.sampling import sortable
from jaxspec.kernels.tree_verify.threefry import bits_at, fold_in
from jaxspec.kernels.tree_verify.xla import choose
from tests import trees

TUNING = Tuning(top_block=128, sample_block=256, nodes=2)
NODES, LEVELS, VOCAB = 5, 4, 328

# jax 0.11 prints a race; 0.12 raises, which leaves the interpreter unusable, or logs it.
IS_LOGGED = "on_race" in {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}
INTERPRETER = plgpu.InterpretGPUParams(
    detect_races=True, **({"on_race": "warn"} if IS_LOGGED else {})
)


@pytest.fixture(autouse=True)
def _no_race(capfd, caplog):
    yield
    logged = [record.getMessage() for record in caplog.get_records("call")]
    said = logged if IS_LOGGED else [capfd.readouterr().out]
    assert not any("RACE DETECTED" in text for text in said)


@functools.cache
def compiled(levels: int, tuning: Tuning = TUNING):
    """The kernels, compiled once for tests of the same shapes."""

    @jax.jit
    def run(logits, tree, length, sampling):
        return tree_verify_mosaic(
            logits, *tree[:3], length, sampling, levels=levels, tuning=tuning, interpret=INTERPRETER
        )

    return run


@functools.partial(jax.jit, static_argnames="levels")
def in_xla(logits, tree, length, sampling, *, levels):
    return tree_verify(logits, *tree, length, sampling, levels=levels, implementation="xla")


@functools.partial(jax.jit, static_argnames="levels")
def reference(logits, tree, length, sampling, *, levels):
    return tree_verify_reference(logits, *tree[:3], length, sampling, levels=levels)


def tree_of(parents, tokens):
    """Tokens, parents, depths and ancestors of a tree for each sequence."""
    depth = np.stack([trees.depths(p) for p in parents])
    ancestors = np.stack([trees.ancestors(p) for p in parents])
    ints = (jnp.asarray(x, jnp.int32) for x in (tokens, parents, depth))
    return (*ints, jnp.asarray(ancestors))


def sampling_of(batch: int, temperature=0.0, seed=0, **cuts) -> Sampling:
    seeds = np.arange(batch, dtype=np.uint32) + np.uint32(seed)
    return Sampling.of(batch, seed=seeds, temperature=temperature, **cuts)


MIXED = sampling_of(
    6,
    temperature=[0, 1, 0.7, 1.3, 1, 2],
    top_k=[3, 0, 5, 0, 40, 0],
    top_p=[1, 1, 1, 0.6, 0.8, 1],
    min_p=[0.5, 0, 0, 0, 0.05, 0.2],
)
"""Greedy, plainly sampled, top-k, top-p, all three, min-p."""


def random_logits(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(2 * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def drafted(parents, logits, length, sampling, seed: int = 0) -> np.ndarray:
    """Tokens of which two thirds are what is chosen after their parents."""
    levels = max(int(trees.depths(p).max()) for p in parents)
    depth = jnp.asarray(np.stack([trees.depths(p) for p in parents]), jnp.int32)
    chosen = np.asarray(choose(logits, depth, length, sampling, levels=levels))
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, logits.shape[-1], chosen.shape)
    for b, p in enumerate(parents):
        for j in range(1, len(p)):
            is_first = p.index(p[j]) == j  # siblings are distinct
            tokens[b, j] = chosen[b, p[j]] if is_first and rng.random() < 0.67 else tokens[b, j]
    return tokens


def assert_same(got, want) -> None:
    for name, a, b in zip(
        ("path", "count", "tokens", "is_nan"), *map(jax.tree.leaves, (got, want)), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=name)


# 328 ids are no multiple of either block; bf16 makes ties.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_three_agree(dtype):
    """Greedy and sampled sequences side by side; nodes of a depth apart from one another too."""
    some = [trees.chain(NODES), trees.star(NODES), *(trees.random_tree(NODES, s) for s in range(4))]
    logits = random_logits(6, NODES, VOCAB).astype(dtype)
    logits = logits.at[1, 0, 7].set(jnp.nan).at[4, NODES - 1].set(jnp.nan)
    length = jnp.array([0, 1, 17, 4000, 100_000, 3], jnp.int32)
    args = logits, tree_of(some, drafted(some, logits, length, MIXED)), length, MIXED
    want = reference(*args, levels=LEVELS)
    assert len(np.unique(want.accepted.count)) > 2
    assert_same(in_xla(*args, levels=LEVELS), want)
    assert_same(compiled(LEVELS)(*args), want)


def test_every_tree_and_every_path():
    """All trees of up to five nodes, and in each all nodes at which the walk can end.

    Off the path every node goes on to its first child, as if it were accepted.
    """
    cases = []
    for nodes in range(1, NODES + 1):
        for above in itertools.product(*(range(j) for j in range(1, nodes))):
            parents = [-1, *above]
            cases += [(parents, end) for end in range(nodes)]
    assert len(cases) == 1 * 1 + 1 * 2 + 2 * 3 + 6 * 4 + 24 * 5
    # A token is its place among its siblings: other branches hold the same ones.
    tokens = np.full((len(cases), NODES), -1)
    above, chosen = np.full_like(tokens, -2), np.zeros_like(tokens)
    for i, (parents, end) in enumerate(cases):
        above[i, : len(parents)] = parents
        tokens[i, : len(parents)] = [parents[:j].count(p) for j, p in enumerate(parents)]
        for node in trees.path(parents, end)[1:]:
            chosen[i, parents[node]] = tokens[i, node]
        chosen[i, end] = NODES
    found = np.zeros((*tokens.shape, 3, 128), np.int32)
    found[:, :, 1, 0] = chosen
    shares = Shares(jnp.asarray(found), 1)
    got = jax.tree.map(
        np.asarray,
        walk(
            *(jnp.asarray(x, jnp.int32) for x in (tokens, above)),
            shares,
            shares,
            jnp.zeros(len(cases), bool),
            levels=LEVELS,
            interpret=INTERPRETER,
        ),
    )
    for i, (parents, end) in enumerate(cases):
        path = [0]
        while wanted := [
            j
            for j, p in enumerate(parents)
            if p == path[-1] and tokens[i, j] == chosen[i, path[-1]]
        ]:
            path += wanted
        assert path == trees.path(parents, end)
        assert got.accepted.count[i] == len(path) - 1
        path += [end] * (NODES - len(path))
        assert got.accepted.path[i].tolist() == path
        assert got.accepted.tokens[i].tolist() == chosen[i, path].tolist()


def test_known_trees():
    """The greedy case of SGLang's tests/speculative/test_eagle_utils.py, as parents."""
    parents = [[-1, 0, 1, 0, 3, 4], [-1, 0, 1, 2, 0, 4]]
    tokens = [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]
    logits = np.zeros((2, 6, 128), np.float32)
    logits[:, :, :20] = 1
    logits[:, :, 18] = 10
    for b, node, token in [(0, 0, 3), (0, 3, 4), (0, 4, 5), (1, 0, 11), (1, 4, 12)]:
        logits[b, node, [18, token]] = 1, 10
    args = jnp.asarray(logits), tree_of(parents, tokens), jnp.zeros(2, jnp.int32), sampling_of(2)
    for got in (compiled(3)(*args), in_xla(*args, levels=3)):
        assert got.accepted.count.tolist() == [3, 2]
        assert got.accepted.path.tolist() == [[0, 3, 4, 5], [0, 4, 5, 5]]
        assert got.accepted.tokens.tolist() == [[3, 4, 5, 18], [11, 12, 18, 18]]


ROWS = 8


def root_alone(rows: np.ndarray, sampling: Sampling):
    """Of each row as the logits after a root: Mosaic's verdict, which is also XLA's."""
    assert len(rows) == ROWS, "all tests share one compilation"
    tree = tree_of([[-1]] * ROWS, np.zeros((ROWS, 1), int))
    args = jnp.asarray(rows)[:, None], tree, jnp.zeros(ROWS, jnp.int32), sampling
    got = compiled(0)(*args)
    assert_same(got, in_xla(*args, levels=0))
    return got


def test_what_is_no_number():
    """NaN counts as -inf and is told; rows of which nothing is left, and infinite ones, hold."""
    rows = np.asarray(random_logits(ROWS, VOCAB)).copy()
    rows[4:] = rows[:4]
    rows[[0, 4], :] = np.nan
    rows[[1, 5], :] = -np.inf
    for row in (2, 6):
        rows[row, [0, 127, 128, VOCAB - 1]] = np.nan
    for row in (3, 7):
        rows[row, [150, 280]] = np.inf
    got = root_alone(rows, sampling_of(ROWS, [0] * 4 + [1] * 4))
    tokens = got.accepted.tokens[:, 0].tolist()
    assert got.is_nan.tolist() == [True, False, True, False] * 2
    assert tokens[:2] == tokens[4:6] == [0, 0]
    assert tokens[3] == tokens[7] == 150
    assert not np.isnan(rows[[2, 6], [tokens[2], tokens[6]]]).any()


def test_of_equals_the_lowest_id_wins():
    """Within a share, across the border of two, where the last one overlaps; and 0 is -0.

    At a temperature that makes all else -inf, noise decides between equals.
    """
    rows = np.full((ROWS, VOCAB), -1, np.float32)
    pairs = [(3, 100), (127, 128), (199, 327), (200, 255)]
    for row, equals in enumerate(pairs):
        rows[row, equals] = rows[row + 4, equals] = [-0.0, 0.0]
    got = root_alone(rows, sampling_of(ROWS, [0] * 4 + [1e-45] * 4))
    tokens = got.accepted.tokens[:, 0].tolist()
    assert tokens[:4] == [lowest for lowest, _ in pairs]
    assert all(token in pair for token, pair in zip(tokens[4:], pairs, strict=True))


def test_a_low_temperature_is_greedy():
    rows = np.asarray(random_logits(ROWS, VOCAB))
    got = root_alone(rows, sampling_of(ROWS, 1e-30))
    np.testing.assert_array_equal(got.accepted.tokens[:, 0], rows.argmax(-1))


def test_a_nan_off_the_path_is_none():
    logits = random_logits(2, 3, 128).at[:, 2, 5].set(jnp.nan)
    best = jnp.argmax(logits[:, 0], -1)
    tokens = [[0, 128, best[0].item()], [0, best[1].item(), 128]]
    tree = tree_of([[-1, 0, 0]] * 2, tokens)
    got = compiled(2)(logits, tree, jnp.zeros(2, jnp.int32), sampling_of(2))
    assert got.accepted.path.tolist() == [[0, 2, 2], [0, 1, 1]]
    assert got.is_nan.tolist() == [True, False]


def test_tuning_does_not_change_a_token():
    """Other shares, and groups of which the last one is not full; the highest seed."""
    some = [trees.random_tree(NODES, 5)]
    logits, length = random_logits(1, NODES, VOCAB), jnp.array([5], jnp.int32)
    sampling = sampling_of(1, 0.9, seed=2**32 - 1)
    args = logits, tree_of(some, drafted(some, logits, length, sampling)), length, sampling
    assert_same(compiled(LEVELS, Tuning(128, 128, 3))(*args), in_xla(*args, levels=LEVELS))


def test_full_vocabulary():
    """163840 ids; the first pass is the whole of a greedy sequence."""
    logits = random_logits(1, 2, 163840)
    sampling, length = sampling_of(1, 0.8), jnp.array([11], jnp.int32)
    some = [[-1, 0]]
    args = logits, tree_of(some, drafted(some, logits, length, sampling)), length, sampling
    assert_same(compiled(1, Tuning(8192, 2048, 2))(*args), in_xla(*args, levels=1))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_noise_is_made_of_the_bits_of_jax(seed):
    for pos in (0, 1, 262_143):
        key = jax.random.fold_in(jax.random.key(jnp.uint32(seed), impl="threefry2x32"), pos)
        want = jax.random.bits(key, (1001,), "uint32")
        words = fold_in(jnp.uint32(seed).view(jnp.int32), jnp.int32(pos))
        got = bits_at(words, jnp.arange(1001, dtype=jnp.int32))
        np.testing.assert_array_equal(np.asarray(got).view(np.uint32), want)


def test_sortable_has_the_order_of_floats():
    values = np.array([-np.inf, -2, -1e-45, -0.0, 0.0, 1e-45, 3, np.inf], np.float32)
    order = np.asarray(sortable(jnp.asarray(values)))
    np.testing.assert_array_equal(np.sign(np.diff(order)), np.sign(np.diff(values)))


def test_a_parent_after_its_child_ends_all_the_same():
    """No tree: the walk stays within its nodes and takes no more than `levels` steps."""
    tree = tuple(jnp.array([x] * 2, jnp.int32) for x in ([3, 3, 3], [1, 0, 1], [0, 1, 1]))
    logits = jax.nn.one_hot(jnp.full((2, 3), 3), 128)
    got = compiled(2)(logits, tree, jnp.zeros(2, jnp.int32), sampling_of(2))
    assert got.accepted.path.tolist() == [[0, 1, 0]] * 2
    assert got.accepted.count.tolist() == [2, 2]


SHAPES = {
    "logits": jax.ShapeDtypeStruct((2, 3, 256), jnp.float32),
    "tokens": jax.ShapeDtypeStruct((2, 3), jnp.int32),
    "parent": jax.ShapeDtypeStruct((2, 3), jnp.int32),
    "depth": jax.ShapeDtypeStruct((2, 3), jnp.int32),
    "ancestors": jax.ShapeDtypeStruct((2, 3, 3), jnp.bool_),
    "length": jax.ShapeDtypeStruct((2,), jnp.int32),
}


def traced(implementation=None, levels: int = 2, **changed):
    run = functools.partial(tree_verify, levels=levels, implementation=implementation)
    return jax.eval_shape(run, *(SHAPES | changed).values(), sampling_of(2))


def test_what_is_not_supported():
    def reason(*shape: int, dtype=jnp.float32, levels: int = 2):
        return supported(jax.ShapeDtypeStruct(shape, dtype), levels)

    assert reason(8, 128, 163840) is None
    assert reason(1, 2, 256, dtype=jnp.float16) == "logits are float16, not float32 or bfloat16"
    assert reason(1, 129, 256) == "a tree of 129 nodes: at most 128"
    assert reason(1, 2, 256, levels=128) == "a path of 129 nodes: at most 128"
    for wrong in (120, 1001):
        assert reason(1, 2, wrong) == (f"a vocabulary of {wrong}: only multiples of 8 from 128 on")
    assert reason(128, 128, 163840) == "2684354560 logits: less than 2147483648 can be counted"
    logits = jax.ShapeDtypeStruct((2, 3, 120), jnp.float32)
    with pytest.raises(ValueError, match="the mosaic kernels cannot run: a vocabulary of 120"):
        traced("mosaic", logits=logits)


def test_without_a_gpu_the_best_is_xla():
    reason = why_not_mosaic(SHAPES["logits"], 2)
    assert reason == "the default backend is cpu, not a Hopper GPU"
    assert traced() == traced("xla")


def test_unknown_implementation():
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        traced("cuda")


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("tokens", ((2, 4), jnp.int32), r"tokens is \(2, 4\) where logits \(2, 3, 256\) make it"),
        ("ancestors", ((2, 3), jnp.bool_), r"ancestors is \(2, 3\)"),
        ("ancestors", ((2, 3, 3), jnp.int32), "ancestors is int32 where bool"),
        ("length", ((2,), jnp.float32), "length is float32 where integer"),
        ("logits", ((2, 3, 256), jnp.int32), "logits are int32 where floats"),
    ],
)
def test_operands_that_do_not_belong_together(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        traced(**{name: jax.ShapeDtypeStruct(*wrong)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top_block": 100}, "top_block is 100"),
        ({"sample_block": 4096}, "sample_block is 4096"),
        ({"nodes": 0}, "0 nodes"),
    ],
)
def test_tuning_out_of_range(changed, message):
    with pytest.raises(ValueError, match=message):
        Tuning(**changed)
