"""What an update of Muon is: of a matrix, its gradient with all singular values made alike."""

import jax
import numpy as np
import pytest

from jaxspec.optimizer import OptimizerConfig

RATE = 1e-2
RNG = np.random.default_rng(0)
AS_MATRICES = {
    "attention.query": lambda x: x.reshape(6, 8),
    "attention.out": lambda x: x.reshape(8, 6),
    "later.attention.q_b": lambda x: x.reshape(2, 3, 8),
    "later.mlp.gate": lambda x: x,
    "attention.k_up": lambda x: x,
    "fc": lambda x: x,
}
"""Input and output axes apart, any axis of separate matrices first."""
SHAPES = {
    "attention.query": (6, 2, 4),
    "attention.out": (2, 4, 6),
    "later.attention.q_b": (2, 3, 2, 4),
    "later.mlp.gate": (2, 6, 8),
    "attention.k_up": (2, 4, 6),
    "fc": (9, 6),
    "head": (6, 8),
    "later.norm.weight": (2, 6),
    "feature_norm.weight": (3, 6),
}


@pytest.fixture(scope="module", autouse=True)
def little_optimisation():
    """Half the time to compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def first_update():
    """Gradients and the first update, by name."""
    gradient = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    config = OptimizerConfig(RATE, 10, warm_up=0, clip=1e9, name="muon", final_rate=0.0)
    params = jax.tree.map(np.zeros_like, gradient)
    optimizer = config.make(params)
    with jax.numpy_dtype_promotion("standard"):
        update, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    return gradient, jax.tree.map(np.asarray, update)


@pytest.mark.parametrize("name", AS_MATRICES)
def test_a_matrix(name, first_update):
    gradient, update = (AS_MATRICES[name](part[name]) for part in first_update)
    size = RATE * 0.2 * max(gradient.shape[-2:]) ** 0.5
    values = np.linalg.svd(update, compute_uv=False) / size
    # Newton and Schulz's five steps leave them between 0.68 and 1.13 (Jordan 2024).
    assert values.min() > 0.6 and values.max() < 1.2
    assert np.vdot(gradient, update) < 0


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - AS_MATRICES.keys()))
def test_all_else_is_adams(name, first_update):
    gradient, update = (part[name] for part in first_update)
    # optax's Muon has Nesterov's momentum in its Adam, too: after one step, of 0.9.
    step = RATE * (1 + 0.9 * (1 - 0.9) / (1 - 0.9**2))
    np.testing.assert_allclose(update, -step * np.sign(gradient), rtol=1e-3)


def test_the_rate_ends_where_it_is_said_to():
    config = OptimizerConfig(RATE, 4, warm_up=0, clip=1e9, final_rate=0.0)
    params = {"fc": np.ones((2, 2), np.float32)}
    optimizer = config.make(params)
    state, sizes = optimizer.init(params), []
    step = jax.jit(optimizer.update)
    for _ in range(5):
        with jax.numpy_dtype_promotion("standard"):
            update, state = step(params, state, params)
        sizes.append(float(np.abs(update["fc"]).max()))
    assert sizes[0] == pytest.approx(RATE, rel=1e-3) and sizes[4] == 0
    assert sizes[2] == pytest.approx(RATE / 2, rel=1e-3)  # half way along the cosine
