import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxspec.moe import Router
from tests import tiny
from tests.reference.target import ReferenceTarget

WIDTH, EXPERTS = tiny.TARGET_CONFIG["hidden_size"], tiny.TARGET_CONFIG["n_routed_experts"]


def router_and_reference(changes: dict, bias: np.ndarray):
    """A router, and the reference's choice, over the same random weights."""
    config = tiny.TARGET_CONFIG | changes
    weight = np.random.default_rng(0).normal(size=(EXPERTS, WIDTH)).astype(np.float32) / 8
    router = Router(tiny.target_config(config), nnx.Rngs(0))
    router.weight[...], router.bias[...] = jnp.asarray(weight.T), jnp.asarray(bias, jnp.float32)
    reference = ReferenceTarget.__new__(ReferenceTarget)
    reference.config = config
    weights = {"mlp.gate": weight.astype(float), "mlp.gate.e_score_correction_bias": bias}
    return router, lambda x: reference.route(weights, x)


def tokens(count: int = 40) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(1, count, WIDTH)).astype(np.float32)


RANDOM_BIAS = 0.2 * np.random.default_rng(2).normal(size=EXPERTS)
FORMS = {
    "one group": ({}, RANDOM_BIAS),
    "unnormalised": ({"norm_topk_prob": False}, RANDOM_BIAS),
    "2 of 4 groups": ({"n_group": 4, "topk_group": 2}, RANDOM_BIAS),
    # All choice scores are negative: a masked group must lose to them, and 0 would not.
    "negative scores": ({"n_group": 4, "topk_group": 2}, RANDOM_BIAS - 3),
    "one of each": ({"n_group": 2, "topk_group": 1, "num_experts_per_tok": 1}, RANDOM_BIAS),
}


@pytest.mark.parametrize("name", FORMS)
def test_routing(name):
    router, reference = router_and_reference(*FORMS[name])
    got, x = router(jnp.asarray(tokens())), tokens()
    experts, shares, margins = reference(x[0].astype(float))
    np.testing.assert_array_equal(got.expert[0], experts)
    np.testing.assert_allclose(got.weight[0], shares, rtol=1e-5)
    np.testing.assert_allclose(got.margin[0], margins, atol=1e-6)
    assert margins.min() > 1e-6, "no choice of this test may hang on rounding"


def test_the_bias_only_chooses():
    router, _ = router_and_reference({}, np.zeros(EXPERTS))
    plain, scores = router(jnp.asarray(tokens())), jax.nn.sigmoid(tokens() @ router.weight[...])
    router.bias[...] = router.bias[...] + 7.0
    shifted = router(jnp.asarray(tokens()))
    np.testing.assert_array_equal(plain.expert, shifted.expert)
    np.testing.assert_array_equal(plain.weight, shifted.weight)
    router.bias[...] = jnp.zeros(EXPERTS).at[3].set(5.0)
    favoured = router(jnp.asarray(tokens()))
    assert (favoured.expert == 3).any(-1).all()
    chosen = jnp.take_along_axis(scores, favoured.expert, axis=-1)
    scale = tiny.TARGET_CONFIG["routed_scaling_factor"]
    want = scale * chosen / chosen.sum(-1, keepdims=True)
    np.testing.assert_allclose(favoured.weight, want, rtol=1e-5)


def test_weights_sum_to_the_scaling_factor():
    router, _ = router_and_reference({}, RANDOM_BIAS)
    total = router(jnp.asarray(tokens())).weight.sum(-1)
    np.testing.assert_allclose(total, tiny.TARGET_CONFIG["routed_scaling_factor"], rtol=1e-5)


def test_a_router_that_takes_all_has_no_margin():
    router, _ = router_and_reference({"num_experts_per_tok": EXPERTS}, RANDOM_BIAS)
    routing = router(jnp.asarray(tokens()))
    assert jnp.isinf(routing.margin).all()
    np.testing.assert_array_equal(jnp.sort(routing.expert, axis=-1)[0, 0], jnp.arange(EXPERTS))


def test_router_works_in_f32_for_bf16_states():
    router, reference = router_and_reference({}, RANDOM_BIAS)
    x_bf16 = jnp.asarray(tokens(), jnp.bfloat16)
    got = router(x_bf16)
    assert got.weight.dtype == jnp.float32
    experts, shares, _ = reference(np.asarray(x_bf16[0], np.float64))
    np.testing.assert_array_equal(got.expert[0], experts)
    np.testing.assert_allclose(got.weight[0], shares, rtol=1e-5)


@pytest.mark.parametrize("product", ["exact", "bfloat16"])
def test_experts(target, reference_target, product):
    """Layer 2 of the model, its second sparse one, with either rounding of q x scale."""
    layer, sparse_layer = 2, 1
    experts = nnx.clone(target.experts)
    experts.numerics = dataclasses.replace(tiny.NUMERICS, expert_product=product)
    stack = jax.tree.map(lambda x: x[sparse_layer], nnx.state(target.sparse))
    router = nnx.merge(nnx.graphdef(target.sparse), stack).router
    x = tokens(9)
    got = experts(jnp.asarray(x), router(jnp.asarray(x)), jnp.int32(sparse_layer))

    def rounded(weight: np.ndarray) -> np.ndarray:
        return weight.astype(ml_dtypes.bfloat16).astype(float)

    if product == "bfloat16":
        tensors = tiny.target_tensors(tiny.TARGET_CONFIG)
        reference_target = ReferenceTarget(tensors, tiny.TARGET_CONFIG, round_product=rounded)
    weights = dict(reference_target.layers[layer])
    for name in ("gate", "up", "down"):
        shared = f"mlp.shared_experts.{name}_proj"
        weights[shared] = np.zeros_like(weights[shared])
    x = x[0].astype(float)
    chosen, share, _ = reference_target.route(weights, x)
    want = reference_target.mixture(weights, x, chosen, share)
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=3e-6 * np.abs(want).max())
