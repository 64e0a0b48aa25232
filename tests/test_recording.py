import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from jaxspec import identify as identifying
from jaxspec import recording
from jaxspec.contracts import ContractError, Features
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.identify import identify
from jaxspec.recording import Record, RecordConfig, record
from jaxspec.target import Target
from tests import tiny

SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 9, 7, 2, 3], [11]]
NUM_LAYERS = tiny.TARGET_CONFIG["num_hidden_layers"]
ALL = tuple(range(NUM_LAYERS + 1))


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Draft]:
    target = tiny.target_module(tiny.target_tensors(tiny.TARGET_CONFIG), tiny.TARGET_CONFIG)
    claim = target.boundaries(tiny.BOUNDARIES, "test")
    config = tiny.draft_config(tiny.DRAFT_CONFIG, claim)
    return target, tiny.draft_module(tiny.draft_tensors(tiny.DRAFT_CONFIG), config)


@pytest.fixture(scope="module")
def done(pair) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "CHUNK", 4)  # three chunks, the last of one token
        return record(*pair, SEQUENCES)


def in_one_pass(pair) -> dict[str, np.ndarray]:
    """The same arrays from one pass over all of the sequences, wrong only past their ends."""
    target, draft = pair
    batch, longest = len(SEQUENCES), max(map(len, SEQUENCES))
    ids = np.zeros((batch, longest), np.int32)
    for row, sequence in zip(ids, SEQUENCES, strict=True):
        row[: len(sequence)] = sequence
    pos = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), ids.shape)
    nothing, claim = jnp.zeros((batch,), jnp.int32), target.boundaries(ALL, "test")
    logits, features, _, experts, margins = tiny.run_target(
        *nnx.split(target), jnp.asarray(ids), pos, nothing, target.empty_cache(batch, 1), claim
    )
    states = dict(zip(ALL, np.split(np.asarray(features), len(ALL), axis=-1), strict=True))
    wanted = np.concatenate([states[b] for b in tiny.BOUNDARIES], axis=-1)
    shifted = np.roll(ids, -1, axis=1)
    for row, sequence in enumerate(SEQUENCES):
        shifted[row, len(sequence) - 1] = logits[row, len(sequence) - 1].argmax()
    draft_logits, _, _ = tiny.run_draft(
        *nnx.split(draft),
        Features(jnp.asarray(wanted), draft.config.boundaries),
        jnp.asarray(shifted),
        pos,
        nothing,
        draft.empty_cache(batch, 1),
        target=(target.embed[...], target.head[...]),
    )
    arrays = {f"boundary.{b:03d}": state for b, state in states.items()}
    arrays |= {"features": wanted, "logits": logits, "draft.logits": draft_logits}
    for index, layer in enumerate(range(target.config.first_k_dense_replace, NUM_LAYERS)):
        arrays[f"router.{layer:03d}"] = experts[index]
        arrays[f"router_margin.{layer:03d}"] = margins[index]
    return {name: np.asarray(array) for name, array in arrays.items()}


def test_names_and_shapes_are_the_contract(done):
    c, batch, length = tiny.TARGET_CONFIG, len(SEQUENCES), 9
    width, experts = c["hidden_size"], c["num_experts_per_tok"]
    expected = {"tokens": (batch, length), "lengths": (batch,)}
    expected |= {f"boundary.{b:03d}": (batch, length, width) for b in ALL}
    expected |= {f"router.{b:03d}": (batch, length, experts) for b in ALL[1:-1]}
    expected |= {f"router_margin.{b:03d}": (batch, length) for b in ALL[1:-1]}
    expected["features"] = (batch, length, 3 * width)
    expected["logits"] = (batch, length, c["vocab_size"])
    expected["draft.logits"] = (batch, length, tiny.DRAFT_CONFIG["draft_vocab_size"])
    assert {name: array.shape for name, array in done.arrays.items()} == expected
    integers = {"tokens", "lengths", *(f"router.{b:03d}" for b in ALL[1:-1])}
    for name, array in done.arrays.items():
        assert array.dtype == ("int32" if name in integers else "float32"), name


def test_chunks_and_batches_change_nothing(pair, done):
    expected = in_one_pass(pair)
    assert expected.keys() == done.arrays.keys() - {"tokens", "lengths"}
    for name, array in expected.items():
        for row, sequence in enumerate(SEQUENCES):
            end = len(sequence)
            np.testing.assert_allclose(
                done.arrays[name][row, :end], array[row, :end], rtol=1e-4, atol=1e-5, err_msg=name
            )
            assert not done.arrays[name][row, end:].any(), name


def test_only_what_is_asked_for(pair):
    target, _ = pair
    capture = target.boundaries((4, 0), "test")
    some = record(target, None, [[1, 2, 3]], RecordConfig((2,), capture, top=3))
    assert {name for name in some.arrays if not name.startswith("router")} == {
        *("tokens", "lengths", "boundary.002", "features", "logits.top", "logits.top_ids"),
    }
    assert some.arrays["logits.top_ids"].shape == (1, 3, 3)
    assert (np.diff(some.arrays["logits.top"]) <= 0).all()
    assert some.arrays["features"].shape == (1, 3, 2 * target.config.hidden_size)
    assert some.metadata["boundaries"] == "4,0"


def test_other_features_than_the_draft_claims(pair):
    capture = pair[0].boundaries((2, 3, 4), "test")
    with pytest.raises(ContractError, match="not the features this draft was trained on"):
        record(*pair, [[1, 2]], RecordConfig(capture=capture))
    with pytest.raises(ContractError, match="has boundaries 0"):
        record(pair[0], None, [[1, 2]], RecordConfig(boundaries=(NUM_LAYERS + 1,)))


def test_nothing_to_record(pair):
    for sequences in ([], [[1], []]):
        with pytest.raises(InputError, match="nothing to record"):
            record(pair[0], None, sequences)
    with pytest.raises(InputError, match="a position has 24 logits"):
        record(pair[0], None, [[1]], RecordConfig(top=25))


def test_file(done, tmp_path):
    path = tmp_path / "r.safetensors"
    done.save(path)
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {
            "format": "jaxspec-record-1", "framework": "jaxspec",
            "framework_version": done.metadata["framework_version"], "model": tiny.IDENTITY,
            "draft": "draft@unnamed", "dtype": "float32", "boundaries": "1,2,4",
        }  # fmt: skip
        for name, array in done.arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.safetensors"]
    with pytest.raises(InputError, match="cannot be written"):
        done.save(tmp_path / "absent" / "r.safetensors")


def save(path, done: Record, **changes):
    metadata = {**done.metadata, **changes.pop("metadata", {})}
    Record({**done.arrays, **changes}, metadata).save(path)
    return path


def test_features_are_told_apart(pair, done, tmp_path):
    path = save(tmp_path / "r.safetensors", done)
    report = identify(path, pair[0])
    assert (report.found, report.claimed, report.holds) == ((1, 2, 4), (1, 2, 4), True)
    assert max(chunk.distance for chunk in report.chunks) < 1e-5
    assert min(chunk.next_distance for chunk in report.chunks) > 0.1
    out = report.to_dict()
    assert (out["found"], out["holds"], len(out["chunks"])) == ([1, 2, 4], True, 3)
    assert "chunk 1 is boundary 2" in report.summary()


def test_features_of_another_boundary_than_claimed(pair, done, tmp_path):
    path = save(tmp_path / "r.safetensors", done, metadata={"boundaries": "2,3,4"})
    report = identify(path, pair[0])
    assert (report.found, report.claimed, report.holds) == ((1, 2, 4), (2, 3, 4), False)
    assert "this does not hold" in report.summary()
    report = identify(save(path, done, metadata={"boundaries": ""}), pair[0])
    assert (report.claimed, report.holds) == (None, True)


def test_features_of_no_boundary(pair, done, tmp_path):
    shape = done.arrays["features"].shape
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    report = identify(save(tmp_path / "r.safetensors", done, features=noise), pair[0])
    assert (report.found, report.holds) == ((None, None, None), False)
    assert "chunk 0 is none" in report.summary()


def test_massive_activations_hide_nothing(pair, tmp_path, monkeypatch):
    """One position dwarfs all others, nearly the same at every boundary, as in real models."""
    rng = np.random.default_rng(0)
    states = rng.standard_normal((NUM_LAYERS + 1, 1, 9, 64)).astype(np.float32)
    states[3] = states[2] + 0.03 * rng.standard_normal((1, 9, 64))  # a layer that does nothing
    states[:, 0, 0, 5] += 1e4
    own = {f"boundary.{b:03d}": state for b, state in enumerate(states)}
    own["tokens"] = np.asarray([SEQUENCES[0]], np.int32)
    monkeypatch.setattr(identifying, "record", lambda *_: Record(own, {}))
    noise = 0.02 * rng.standard_normal((3, 1, 9, 64)).astype(np.float32)
    features = np.concatenate(list(states[[1, 4, 2]] + noise), axis=-1)
    path = tmp_path / "f.safetensors"
    Record({"tokens": own["tokens"], "features": features}, {}).save(path)
    report = identify(path, pair[0])
    assert report.found == (1, 4, None)
    assert [chunk.is_ambiguous for chunk in report.chunks] == [False, False, True]
    assert "chunk 2 is ambiguous" in report.summary()


def test_features_that_cannot_be_compared(pair, done, tmp_path):
    path = tmp_path / "r.safetensors"
    save(path, done, features=done.arrays["features"][:, :, :-1])
    with pytest.raises(InputError, match=r"expected \[B, T, a multiple of 64"):
        identify(path, pair[0])
    save(path, done, tokens=done.arrays["tokens"] + 20)
    with pytest.raises(InputError, match="outside the target's vocabulary of 24"):
        identify(path, pair[0])
    Record({"features": done.arrays["features"]}, {}).save(path)
    with pytest.raises(InputError, match="no array tokens; it has features"):
        identify(path, pair[0])
    save(path, done, metadata={"boundaries": "2, thirty"})
    with pytest.raises(InputError, match="its metadata says boundaries '2, thirty'"):
        identify(path, pair[0])
    path.write_text("x")
    with pytest.raises(InputError, match="not a safetensors file"):
        identify(path, pair[0])


def test_margins_of_tokens_that_part(pair, done, monkeypatch):
    """From the record's own logits at the same place; at least so much, where they are not kept."""
    target, _ = pair
    logits = done.arrays["logits"][0, 3]
    best, second, *_, last = np.argsort(-logits).tolist()
    monkeypatch.setattr(recording, "MARGIN_TOP", 2)
    asked = [(SEQUENCES[0][:4], tokens) for tokens in ((second, best), (best, last))]
    gap = float(logits[best] - logits[second])
    assert recording.logit_margins(target, asked) == pytest.approx([gap, gap], rel=1e-3)
