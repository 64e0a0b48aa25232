"""Comparing records: a numpy model of the formulas is the other framework, faults planted in it."""

import numpy as np
import pytest

from jaxspec.comparison_view import plot_records, tables_of_records
from jaxspec.errors import InputError
from jaxspec.record_comparison import compare_records
from jaxspec.record_file import FORMAT
from jaxspec.recording import Record, RecordConfig, record
from tests import tiny
from tests.faulty import CONFIG, FAULTS, FIRST_SPARSE, SEQUENCES, TENSORS, Faulty, record_of
from tests.reference import formulas
from tests.reference.target import ReferenceTarget


def changed(done: Record, metadata: dict[str, str] | None = None, **arrays) -> Record:
    """The record with arrays replaced; None takes one away."""
    kept = {**done.arrays, **{name.replace("__", "."): x for name, x in arrays.items()}}
    kept = {name: array for name, array in kept.items() if array is not None}
    return Record(kept, done.metadata | (metadata or {}))


@pytest.fixture(scope="module")
def healthy() -> Record:
    return record_of(ReferenceTarget(TENSORS, CONFIG))


@pytest.fixture
def saved(tmp_path):
    """Saves records, and returns where they are."""

    def save(*records: Record):
        paths = [tmp_path / f"{name}.safetensors" for name, _ in zip("abr", records, strict=False)]
        for path, one in zip(paths, records, strict=True):
            one.save(path)
        return paths

    return save


def test_two_frameworks_agree(healthy, saved, tmp_path):
    target = tiny.target_module(TENSORS, CONFIG)
    ours = record(target, None, SEQUENCES, RecordConfig())
    found = compare_records(*saved(ours, healthy), require=("boundary", "router", "logits"))
    assert found.holds, found.finding()
    assert found.finding() == "they agree"
    assert found.num_tokens == sum(map(len, SEQUENCES))
    assert len(found.boundaries) == CONFIG["num_hidden_layers"] + 1
    assert [one.top1 for one in found.logits] == [1.0]
    assert found.logits[0].kl == pytest.approx(0, abs=1e-9)
    # Of one array, by the definitions: norms in f64 over all real rows.
    name = f"boundary.{CONFIG['num_hidden_layers']:03d}"
    rows = np.arange(ours.arrays["tokens"].shape[1]) < ours.arrays["lengths"][:, None]
    a, b = (one.arrays[name][rows].astype(np.float64) for one in (ours, healthy))
    one = found.boundaries[-1]
    assert one.error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-3)
    errors = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    assert one.worst == pytest.approx(errors.max(), rel=1e-3)
    assert one.middle == pytest.approx(np.median(errors), rel=1e-3)
    assert one.largest == pytest.approx(np.abs(a - b).max(), rel=1e-3)
    for path in (tmp_path / "p.png", tmp_path / "p.pdf"):
        plot_records(found, path)
        assert path.stat().st_size > 5000
    assert len(tables_of_records(found)) == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_its_layer(fault, healthy, saved):
    found = compare_records(*saved(record_of(Faulty(fault)), healthy))
    assert not found.holds
    first = next(one for one in found.boundaries if not one.holds)
    assert first.depth == FAULTS[fault], found.finding()
    said = found.finding()
    assert said.startswith(f"{first.name} is the first to differ")
    if first.depth == 0:
        assert "the embedding" in said
    else:
        kind = "dense" if first.depth <= FIRST_SPARSE else "sparse"
        assert f"layer {first.depth - 1} ({kind}" in said


def test_a_head_of_its_own(healthy, saved):
    logits = 1.001 * healthy.arrays["logits"]
    found = compare_records(*saved(changed(healthy, logits=logits), healthy))
    assert "logits differ" in found.finding() and "final norm or the head" in found.finding()
    assert found.logits[0].top1 == 1.0 and found.logits[0].kl > 0


def test_logits_by_their_definitions(healthy, saved):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=healthy.arrays["logits"].shape).astype(np.float32)
    found = compare_records(*saved(changed(healthy, logits=logits), healthy)).logits[0]
    rows = np.arange(logits.shape[1]) < healthy.arrays["lengths"][:, None]
    a, b = logits[rows], healthy.arrays["logits"][rows]
    p, q = np.exp(formulas.log_softmax(a)), np.exp(formulas.log_softmax(b))
    assert found.kl == pytest.approx((q * np.log(q / p)).sum(-1).mean(), rel=1e-4)
    assert found.top1 == (a.argmax(-1) == b.argmax(-1)).mean()
    ranks = [sorted(-x).index(-x[y.argmax()]) + 1 for x, y in zip(a, b, strict=True)]
    assert found.rank == max(ranks)


def test_only_the_best_logits(healthy, saved):
    def best(done: Record, k: int) -> Record:
        order = np.argsort(-done.arrays["logits"], axis=-1)[..., :k].astype(np.int32)
        top = np.take_along_axis(done.arrays["logits"], order, axis=-1)
        return changed(done, logits=None, logits__top=top, logits__top_ids=order)

    found = compare_records(*saved(best(healthy, 3), best(healthy, 5)))
    assert found.holds and found.logits[0].top1 == 1.0
    assert found.logits[0].kl is None and found.logits[0].rank == 1
    without_ids = changed(best(healthy, 3), logits__top_ids=None)
    found = compare_records(*saved(without_ids, best(healthy, 5)), require=("logits",))
    assert not found.holds and found.missing == ("logits",)
    assert "logits.top" in found.not_compared


def test_the_best_logits_of_other_tokens(healthy, saved):
    """Without one id in common, rows of logits are far from each other."""
    order = np.argsort(-healthy.arrays["logits"], axis=-1).astype(np.int32)

    def of(ids: np.ndarray) -> Record:
        top = np.take_along_axis(healthy.arrays["logits"], ids, axis=-1)
        return changed(healthy, logits=None, logits__top=top, logits__top_ids=ids)

    found = compare_records(*saved(of(order[..., :3]), of(order[..., 5:8])))
    assert not found.holds and found.logits[0].top1 == 0.0


def test_a_near_tie_that_reaches_every_row(healthy, saved):
    """Nothing is left to compare below it: no agreement."""
    router, margin = f"router.{FIRST_SPARSE:03d}", f"router_margin.{FIRST_SPARSE:03d}"
    experts, margins = healthy.arrays[router].copy(), healthy.arrays[margin].copy()
    experts[:, 0] = (experts[:, 0] + 1) % CONFIG["n_routed_experts"]
    margins[:, 0] = 1e-6
    other = changed(
        healthy,
        **{router.replace(".", "__"): experts, margin.replace(".", "__"): margins},
        boundary__004=2 * healthy.arrays["boundary.004"],
    )
    found = compare_records(*saved(other, healthy))
    assert not found.holds and "boundary.004" in found.missing
    assert "near-ties of routers reach 18 of 18 rows" in found.finding()


def test_names_in_the_order_of_their_numbers(saved):
    rng = np.random.default_rng(0)
    arrays = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3)}
    arrays |= {f"boundary.{b}": rng.normal(size=(2, 3, 8)).astype("float32") for b in range(12)}
    wrong = arrays | {f"boundary.{b}": 2 * arrays[f"boundary.{b}"] for b in range(3, 12)}
    metadata = {"format": FORMAT}
    found = compare_records(*saved(Record(arrays, metadata), Record(wrong, metadata)))
    assert found.finding().startswith("boundary.3 is the first to differ")


def test_dtypes_that_differ_are_judged_by_their_own(healthy, saved):
    """A right bf16 record is further from the reference than a right f32 one, and not at fault."""
    rng = np.random.default_rng(0)
    coarse = {
        name: (x * (1 + 2e-3 * rng.normal(size=x.shape))).astype(np.float32)
        for name, x in healthy.arrays.items()
        if name.startswith("boundary")
    }
    rounded = Record(healthy.arrays | coarse, healthy.metadata | {"dtype": "bfloat16"})
    a, b, reference = saved(healthy, rounded, healthy)
    assert compare_records(a, b, reference).holds
    wrong = record_of(Faulty("scaling factor dropped"))
    a, b, reference = saved(wrong, rounded, healthy)
    assert compare_records(a, b, reference).boundaries[FIRST_SPARSE + 1].flagged == "a"


def test_a_near_tie_is_left_out_and_counted(healthy, saved):
    layer, at = FIRST_SPARSE, (0, 5)
    router, margin = f"router.{layer:03d}", f"router_margin.{layer:03d}"
    experts, margins = healthy.arrays[router].copy(), healthy.arrays[margin].copy()
    experts[at] = (experts[at] + 1) % CONFIG["n_routed_experts"]
    other = {router.replace(".", "__"): experts}
    spoilt = healthy.arrays["boundary.004"].copy()
    spoilt[0, 7] += 1  # a later position of the same sequence, in a deeper layer
    other["boundary__004"] = spoilt
    found = compare_records(*saved(changed(healthy, **other), healthy))
    assert not found.holds, "the margin was no tie's"
    margins[at] = 1e-6
    tie = {margin.replace(".", "__"): margins}
    found = compare_records(*saved(changed(healthy, **other, **tie), healthy))
    assert found.holds, found.finding()
    assert found.routers[0].num_other == found.routers[0].num_ties == 1
    assert found.num_left_out == len(SEQUENCES[0]) - 5
    spoilt[1, 2] += 1  # another sequence: nothing excuses it
    found = compare_records(*saved(changed(healthy, **other, **tie), healthy))
    assert not found.holds and found.boundaries[-1].worst_at == (1, 2)


def test_a_reference_tells_who_is_wrong(healthy, saved):
    rng = np.random.default_rng(0)

    def rounded(done: Record) -> Record:
        arrays = {
            name: (x * (1 + 2e-3 * rng.normal(size=x.shape))).astype(np.float32)
            for name, x in done.arrays.items()
            if name.startswith("boundary") and name != "boundary.000"
        }
        kept = {"tokens", "lengths", "boundary.000"}
        kept = {name: x for name, x in done.arrays.items() if name in kept}
        return Record(kept | arrays, done.metadata | {"dtype": "bfloat16"})

    right = rounded(healthy)
    found = compare_records(*saved(right, rounded(healthy), healthy)[:2])
    assert found.holds and found.dtypes == ("bfloat16", "bfloat16")
    wrong = rounded(record_of(Faulty("a scale off by one group in layer 3")))
    a, b, reference = saved(wrong, right, healthy)
    found = compare_records(a, b, reference)
    assert found.boundaries[4].flagged == "a" and found.boundaries[3].holds, found.finding()
    assert "a is at fault" in found.finding()
    assert compare_records(b, a, reference).boundaries[4].flagged == "b"
    with pytest.raises(InputError, match=r"a reference is in float32, and this is bfloat16"):
        compare_records(a, reference, b)


def test_a_row_beyond_rounding(healthy, saved):
    """In bf16 the middle row is judged, which one row of another text is not; and that is said."""
    rounded = {"dtype": "bfloat16"}
    right, other = changed(healthy, rounded), healthy.arrays["boundary.004"].copy()
    found = compare_records(*saved(right, right))
    assert found.holds and found.finding().startswith("they agree as far as middle rows tell")
    other[1, 2] *= -1
    found = compare_records(*saved(changed(healthy, rounded, boundary__004=other), right))
    assert not found.holds
    assert "boundary.004 is the first to differ (error 2.0e+00 at 1:2, beyond" in found.finding()
    other[1, 2] *= -1.1
    assert compare_records(*saved(changed(healthy, rounded, boundary__004=other), right)).holds


def test_features_by_the_boundary_they_are(healthy, saved):
    def with_features(ids: tuple[int, ...], said: str) -> Record:
        features = np.concatenate([healthy.arrays[f"boundary.{b:03d}"] for b in ids], axis=-1)
        return changed(healthy, {"boundaries": said}, features=features)

    right = with_features((1, 2, 4), "1,2,4")
    found = compare_records(*saved(right, with_features((1, 3, 4), "1,2,4")))
    assert "what is captured as features" in found.finding()
    differing = [one.name for one in found.arrays if not one.holds]
    assert differing == ["features[1] (boundary 2)"]
    with pytest.raises(InputError, match="features of other boundaries"):
        compare_records(*saved(right, with_features((1, 3, 4), "1,3,4")))


def test_nothing_in_common(healthy, saved):
    only_tokens = {n: healthy.arrays[n] for n in ("tokens", "lengths")}
    found = compare_records(*saved(Record(only_tokens, healthy.metadata), healthy))
    assert found.is_empty and not found.holds
    assert "nothing was compared" in found.finding()


def test_other_tokens(healthy, saved):
    tokens = healthy.arrays["tokens"].copy()
    tokens[0, 9] = 0
    other = changed(healthy, tokens=tokens)
    with pytest.raises(InputError, match=r"in sequence 0 at position 9 0 and 11; --align"):
        compare_records(*saved(other, healthy))
    found = compare_records(*saved(other, healthy), aligns=True)
    assert found.holds and found.num_tokens == sum(map(len, SEQUENCES)) - 3
    shorter = changed(healthy, lengths=healthy.arrays["lengths"] - np.array([1, 0, 0], np.int32))
    with pytest.raises(InputError, match=r"lengths \[11, 5, 1\] and \[12, 5, 1\]"):
        compare_records(*saved(shorter, healthy))
    apart = changed(healthy, tokens=tokens + 1)
    with pytest.raises(InputError, match="not one token in common"):
        compare_records(*saved(apart, healthy), aligns=True)


def test_files_that_are_no_records(healthy, saved, tmp_path):
    good, other = saved(healthy, healthy)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(good.read_bytes()[:-100])
    nan = healthy.arrays["boundary.002"].copy()
    nan[1, 3, 5] = np.nan
    bad = {
        "cannot be read as safetensors": cut,
        "such file": tmp_path / "missing.safetensors",
        "says format None": saved(Record(healthy.arrays, {}))[0],
    }
    for message, path in bad.items():
        with pytest.raises(InputError, match=message):
            compare_records(path, other)
    for message, done in {
        r"boundary.002 holds nan in sequence 1 at position 3 \(1 such": changed(
            healthy, boundary__002=nan
        ),
        "a record without `tokens`": changed(healthy, tokens=None),
        r"lengths are \[99, 5, 1\]": changed(healthy, lengths=np.array([99, 5, 1], np.int32)),
        "records of other models": changed(healthy, logits=healthy.arrays["logits"][..., :9]),
        "the first two are theirs": changed(healthy, logits=healthy.arrays["logits"][:2]),
        "it has 3 axes": changed(healthy, boundary__002=healthy.arrays["boundary.002"][..., 0]),
    }.items():
        path = tmp_path / "bad.safetensors"
        done.save(path)
        with pytest.raises(InputError, match=message):
            compare_records(path, other)
