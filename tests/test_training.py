"""One step of the training-time test, against numpy in float64; and what a step changes.

Gradients: along a random direction of every tensor, the loss rises as much as central differences
of the numpy loss say.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpoint import load_draft
from jaxspec.contracts import Features
from jaxspec.convert.draft_export import tensors_of_draft
from jaxspec.convert.problems import Problems
from jaxspec.draft import Borrowed
from jaxspec.training import LossConfig, draft_loss
from tests import draft_kinds, make_checkpoint, tiny, torch_reference
from tests.reference import formulas
from tests.reference.draft import ReferenceDraft
from tests.reference.training import training_loss

BATCH, LENGTH, STEPS, WEIGHT = 2, 8, 3, 0.7
VOCAB, WIDTH = tiny.TARGET_CONFIG["vocab_size"], tiny.TARGET_CONFIG["hidden_size"]
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCAB, (BATCH, LENGTH))
LOGITS = 3 * RNG.normal(size=(BATCH, LENGTH, VOCAB))
IS_LEARNED = RNG.random((BATCH, LENGTH)) < 0.7
IS_LEARNED[:, -3:] = True  # or a step might have nothing to learn
IS_LEARNED[1, -2:] = False
CONFIG = LossConfig(STEPS, WEIGHT)
UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""Half the time to compile."""
BY_DEFAULT = "SafeAILab"
"""The others, with latent attention, norms and several layers, are slow tests."""
EACH = [
    pytest.param(name, marks=[] if name == BY_DEFAULT else [pytest.mark.slow])
    for name in draft_kinds.LAYOUTS
]


def reference_loss(
    draft: ReferenceDraft, features: np.ndarray, labels: str = "covered"
) -> tuple[float, list[float]]:
    """The loss and that of each step, over the rows of both sequences together."""
    kept = draft.target_of_draft
    if labels == "within":
        probs = np.exp(formulas.log_softmax(LOGITS[:, :, kept]))
    else:
        probs = np.exp(formulas.log_softmax(LOGITS))[:, :, kept]
    counts = np.array([[row[s + 1 :].sum() for row in IS_LEARNED] for s in range(STEPS)])
    of_rows = np.zeros((STEPS, BATCH))
    for b in range(BATCH):
        args = (features[b], TOKENS[b], probs[b], IS_LEARNED[b])
        num_steps = int((counts[:, b] > 0).sum())
        of_rows[:num_steps, b] = training_loss(draft, *args, num_steps)
    losses = (of_rows * counts).sum(1) / counts.sum(1)
    return float(losses @ WEIGHT ** np.arange(STEPS)), losses.tolist()


@pytest.mark.parametrize("name", EACH)
def test_loss_and_gradients(name, target, tmp_path):
    config, tensors = draft_kinds.LAYOUTS[name]()
    directory = make_checkpoint.write(tmp_path / "draft", config, tensors)
    draft = load_draft(directory, tiny.NUMERICS, target=target)
    features = RNG.normal(size=(BATCH, LENGTH, draft.config.num_aux_hidden_states * WIDTH))
    embed = np.asarray(target.embed[...], float)
    make = functools.partial(ReferenceDraft, config=config, embed=embed)
    graph, trained, rest = nnx.split(draft, nnx.Param, ...)

    @functools.partial(jax.jit, compiler_options=UNOPTIMISED)
    def value_and_grad(trained):
        def loss(trained):
            return draft_loss(
                nnx.merge(graph, trained, rest),
                Borrowed.of(target),
                Features(jnp.asarray(features, jnp.float32), draft.config.boundaries),
                jnp.asarray(TOKENS, jnp.int32),
                jnp.asarray(LOGITS, jnp.float32),
                jnp.asarray(IS_LEARNED),
                CONFIG,
            )

        return jax.value_and_grad(loss, has_aux=True)(trained)

    (loss, sums), gradient = value_and_grad(trained)
    wanted, of_steps = reference_loss(make(tensors), features)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert sums.mean("loss") == pytest.approx(of_steps, rel=1e-5)

    # What leads from tensors to parameters moves numbers and changes none, so that a gradient
    # goes back the same way.
    found = {
        ".".join(map(str, path)): np.asarray(leaf.get_value())
        for path, leaf in [*nnx.to_flat_state(gradient), *nnx.to_flat_state(rest)]
    }
    slopes = tensors_of_draft(found, draft.config, Problems("the gradient"))
    first = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
    named = {one.replace("midlayer.", first): slope for one, slope in slopes.items()}
    named = {one.replace("fc_norm.weight", "input_norm.weight"): s for one, s in named.items()}
    rng, h = np.random.default_rng(5), 1e-5
    weights = sorted(tensors.keys() - {"d2t", "t2d"})
    assert set(weights) <= named.keys()
    for one in weights:
        away, sides = rng.normal(size=tensors[one].shape), []
        for step in (h, -h):
            moved = tensors | {one: tensors[one].astype(float) + step * away}
            sides.append(reference_loss(make(moved), features)[0])
        slope, ours = (sides[0] - sides[1]) / (2 * h), named[one].astype(float)
        # Where the direction happens to lie along the contour, the slope is small for its size.
        size = np.linalg.norm(ours) * 0.1
        assert size > 0, f"{one} learns nothing"
        assert np.vdot(ours, away) == pytest.approx(slope, rel=1e-4, abs=1e-4 * size), one


def test_labels_within_the_draft_vocabulary(draft, target, draft_tensors):
    """They sum to 1 there, as speculators has them."""
    graph, params = nnx.split(draft)
    features = RNG.normal(size=(BATCH, LENGTH, 3 * WIDTH))

    @functools.partial(jax.jit, compiler_options=UNOPTIMISED)
    def loss(params):
        return draft_loss(
            nnx.merge(graph, params),
            Borrowed.of(target),
            Features(jnp.asarray(features, jnp.float32), draft.config.boundaries),
            jnp.asarray(TOKENS, jnp.int32),
            jnp.asarray(LOGITS, jnp.float32),
            jnp.asarray(IS_LEARNED),
            dataclasses.replace(CONFIG, labels="within"),
        )[0]

    reference = ReferenceDraft(draft_tensors, tiny.DRAFT_CONFIG)
    wanted, _ = reference_loss(reference, features, "within")
    assert float(loss(params)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.torch_reference
@pytest.mark.parametrize("name", ["tiny-draft", "tiny-draft-normed"])
def test_loss_and_gradients_against_speculators(name, target, tmp_path):
    """Its training forward and torch's autograd, from the same directory, within 1e-4."""
    directory = torch_reference.draft_directory(name, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    draft = load_draft(directory, tiny.NUMERICS, target=target)
    features = RNG.normal(size=(1, LENGTH, 3 * WIDTH)).astype(np.float32)
    logits = LOGITS[:1, :, np.asarray(draft.target_of_draft[...])].astype(np.float32)
    inputs = {"tokens": TOKENS[0], "features": features[0], "logits": logits[0]}
    theirs = torch_reference.make_draft_step(
        directory, tmp_path / "step.safetensors", inputs | {"is_learned": IS_LEARNED[0]}, STEPS,
        WEIGHT,
    )  # fmt: skip
    graph, trained, rest = nnx.split(draft, nnx.Param, ...)

    @functools.partial(jax.jit, compiler_options=UNOPTIMISED)
    def value_and_grad(trained):
        return jax.value_and_grad(
            lambda trained: draft_loss(
                nnx.merge(graph, trained, rest),
                Borrowed.of(target),
                Features(jnp.asarray(features), draft.config.boundaries),
                jnp.asarray(TOKENS[:1], jnp.int32),
                jnp.asarray(LOGITS[:1], jnp.float32),
                jnp.asarray(IS_LEARNED[:1]),
                dataclasses.replace(CONFIG, labels="within"),
            )[0]
        )(trained)

    loss, gradient = value_and_grad(trained)
    found = {
        ".".join(map(str, path)): np.asarray(leaf.get_value())
        for path, leaf in [*nnx.to_flat_state(gradient), *nnx.to_flat_state(rest)]
    }
    ours = tensors_of_draft(found, draft.config, Problems("the gradient"))
    # Theirs is the divergence: cross-entropy less the entropy of the labels.
    log = formulas.log_softmax(logits[0].astype(float))
    entropy = -(np.exp(log) * log).sum(-1)
    of_steps = [entropy[s + 1 :][IS_LEARNED[0, s + 1 :]].mean() for s in range(STEPS)]
    wanted = float(theirs.pop("loss")[0]) + float(of_steps @ WEIGHT ** np.arange(STEPS))
    assert float(loss) == pytest.approx(wanted, rel=1e-4)
    learned = {one for one, tensor in ours.items() if np.issubdtype(tensor.dtype, np.floating)}
    assert learned - {"embed_tokens.weight"} <= theirs.keys(), config
    for one, gradient in theirs.items():
        away = np.linalg.norm(ours[one] - gradient) / np.linalg.norm(gradient)
        assert away <= 1e-4, f"{one}: {away:.1e}"
