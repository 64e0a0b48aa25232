"""The draft against speculators' Eagle3DraftModel, in f32, from the same directory.

The first depth (`fuse`) over every position of a sequence, and recurrent steps (`recur`) from every
position at once, each row seeing the rows of the first depth up to its own and its own chain:
pre-norm output and logits agree within 1e-5 per row (norm-wise).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpoint import load_draft, load_target
from jaxspec.contracts import Features
from tests import tiny, torch_reference
from tests.torch_reference import Record, row_error

TOLERANCE = 1e-5
TARGET_OF = {
    "tiny-draft": "tiny-kimi",
    "tiny-draft-normed": "tiny-kimi",
    "mini-draft": "mini-target",
}


@pytest.fixture(params=torch_reference.each_source(TARGET_OF))
def case(request, tmp_path) -> tuple[Path, Path, Record]:
    """The directories of a draft and of its target, and speculators' record of the draft."""
    source, name = request.param
    directory = torch_reference.draft_directory(name, tmp_path)
    target = torch_reference.target_directory(TARGET_OF[name], tmp_path)
    if source == "golden":
        record = torch_reference.golden(name)
    else:
        out = tmp_path / "record.safetensors"
        record = torch_reference.make_draft_record(directory, target, out, source)
    record.check_made_from(directory)
    return directory, target, record


def test_hidden_and_logits_of_every_depth(case):
    directory, target_directory, record = case
    target = load_target(target_directory, tiny.NUMERICS)
    draft = load_draft(directory, tiny.NUMERICS, target=target)
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


def _joined(earlier_LNBTH: jax.Array, new_LNBTH: jax.Array) -> jax.Array:
    return jnp.concatenate([earlier_LNBTH, new_LNBTH], axis=3)
