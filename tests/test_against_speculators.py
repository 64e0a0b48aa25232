"""Drafts against speculators' Eagle3DraftModel, in f32, from the same directory.

EAGLE-3.1's norms, the norm before `fc`, two and three boundaries, YaRN and three layers are in
`tiny-specforge` and `tiny-speculators`.

The first depth (`fuse`) over every position of a sequence, and recurrent steps (`recur`) from every
position at once, each row seeing the rows of the first depth up to its own and its own chain:
what is handed on and logits agree within 1e-5 per row (norm-wise).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import recording
from jaxspec.checkpoint import load_draft, load_target
from jaxspec.contracts import Features
from jaxspec.draft import Draft
from jaxspec.target import Target
from tests import tiny, torch_reference
from tests.torch_reference import Record, row_error

TOLERANCE = 1e-5
TARGET_OF = {
    "tiny-draft": "tiny-kimi",
    "tiny-draft-normed": "tiny-kimi",
    "tiny-specforge": "tiny-kimi",
    "tiny-speculators": "tiny-kimi",
    "mini-draft": "mini-target",
}
SLOW = ("tiny-specforge", "tiny-speculators")
"""`test_draft_kinds.py` has them against numpy, among the tests that always run."""


@pytest.fixture(scope="module", params=torch_reference.each_source(TARGET_OF, SLOW))
def case(request, tmp_path_factory) -> tuple[Target, Draft, Record]:
    """A draft's target, the draft, and speculators' record of it."""
    source, name = request.param
    folder = tmp_path_factory.mktemp("case")
    directory = torch_reference.draft_directory(name, folder)
    target_directory = torch_reference.target_directory(TARGET_OF[name], folder)
    if source == "golden":
        record = torch_reference.golden(name)
    else:
        out = folder / "record.safetensors"
        record = torch_reference.make_draft_record(directory, target_directory, out, source)
    record.check_made_from(directory)
    target = load_target(target_directory, tiny.NUMERICS)
    return target, load_draft(directory, tiny.NUMERICS, target=target), record


def test_hidden_and_logits_of_every_depth(case):
    target, draft, record = case
    theirs = record.arrays
    claim = draft.config.boundaries
    assert record.metadata["boundaries"] == ",".join(map(str, claim.ids))
    assert record.metadata["norm_before_residual"] == str(draft.config.norm_before_residual)

    graph, params = nnx.split(draft)
    batch, length = theirs["tokens"].shape
    pos_BT = jnp.broadcast_to(jnp.arange(length), (batch, length))
    nothing_B, cache = jnp.zeros(batch, jnp.int32), draft.empty_cache(batch, 1)
    borrowed = target.embed[...], target.head[...]
    source, earlier = Features(jnp.asarray(theirs["features"]), claim), None
    sees_TT = jnp.tril(jnp.ones((length, length), bool))
    num_depths = sum(name.startswith("draft.hidden") for name in theirs)
    assert num_depths > 1
    for depth in range(num_depths):
        suffix = f".{depth}" if depth else ""
        logits, source, rows = tiny.run_draft(
            graph,
            params,
            source,
            jnp.asarray(theirs[f"draft.tokens{suffix}"]),
            pos_BT + depth,
            nothing_B,
            cache,
            earlier,
            jnp.broadcast_to(sees_TT, (batch, *sees_TT.shape)),
            borrowed,
        )
        for name, ours in (("hidden", source), ("logits", logits)):
            name = f"draft.{name}{suffix}"
            is_real = record.is_real
            worst = row_error(np.asarray(ours)[is_real], theirs[name][is_real]).max()
            assert worst <= TOLERANCE, f"{name}: {worst:.2e}"
        parts = rows if earlier is None else (earlier, rows)
        earlier = rows if earlier is None else jax.tree.map(_joined, *parts)
        sees_TT = jnp.concatenate([sees_TT, jnp.eye(length, dtype=bool)], axis=1)


def test_record_of_target_and_draft(case):
    """`jaxspec record`, from tokens to draft logits, is transformers followed by speculators."""
    target, draft, record = case
    rows, lengths = record.arrays["tokens"].tolist(), record.arrays["lengths"]
    sequences = [ids[:length] for ids, length in zip(rows, lengths, strict=True)]
    ours = recording.record(target, draft, sequences).arrays
    for name in ("features", "draft.logits"):
        worst = row_error(ours[name][record.is_real], record.arrays[name][record.is_real]).max()
        assert worst <= TOLERANCE, f"{name}: {worst:.2e}"


def _joined(earlier_LNBTH: jax.Array, new_LNBTH: jax.Array) -> jax.Array:
    return jnp.concatenate([earlier_LNBTH, new_LNBTH], axis=3)
