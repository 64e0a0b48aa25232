"""A record against weights, layer by layer: planted faults are named, in f32 and in bf16."""

import numpy as np
import pytest

from jaxspec.comparison_view import plot_isolation, tables_of_isolation
from jaxspec.config import Numerics
from jaxspec.errors import InputError
from jaxspec.isolation import Isolation, isolate_record
from jaxspec.recording import Record
from tests import tiny
from tests.faulty import (
    CONFIG,
    FAULTS,
    FIRST_SPARSE,
    TENSORS,
    Faulty,
    bfloat16,
    record_of,
    tensors_of,
)

NAMES = {
    "rotary halves for pairs": ("rotary halves for pairs", "attention"),
    "mscale left out": ("mscale left out", "attention"),
    "mscale on cosine and sine": (
        "mscale on cosine and sine as well as on the softmax",
        "attention",
    ),
    "epsilon 1e-6 for 1e-5": ("epsilon 1e-06 in all norms", "norms"),
    "router bias in the weights": ("router bias in the weights", "router"),
    "scaling factor dropped": ("scaling factor dropped", "router"),
    "shared expert left out": ("shared expert left out", "shared expert"),
    "int4 offset 7 for 8": ("int4 offset 7 for 8", "routed experts"),
    "gate and up swapped in layer 2": (
        "gate and up swapped in the routed experts",
        "routed experts",
    ),
}
"""What the fault is called, and where in the layer it is; others have no name."""


@pytest.fixture(scope="module")
def exact():
    return tiny.target_module(TENSORS, CONFIG)


@pytest.fixture
def saved(tmp_path):
    def save(record: Record):
        record.save(tmp_path / "r.safetensors")
        return tmp_path / "r.safetensors"

    return save


def is_named(found: Isolation, fault: str) -> bool:
    """Whether the first part that departs is the fault's, and is called by its name."""
    first = next(part for part in found.parts if not part.holds)
    if FAULTS[fault] == 0:
        return first.kind == "embedding"
    layer = FAULTS[fault] - 1
    is_place = first.layer == layer and first.kind == (
        "dense" if layer < FIRST_SPARSE else "sparse"
    )
    if fault in NAMES:
        name, block = NAMES[fault]
        is_first = first.readings[0] == name
        if found.dtype != "float32":  # where latents are large, their norm's epsilon is no matter
            is_first = name in first.readings
        return is_place and is_first and first.blocks[0] == block
    return is_place and not first.readings and "all chose expert" in str(first.hint)


def test_a_right_record_holds(exact, saved):
    record = record_of(Faulty("none"))
    found = isolate_record(saved(record), exact)
    assert found.holds and not found.not_compared, found.finding()
    kinds = ["embedding", "dense", "sparse", "sparse", "sparse", "head"]
    assert [part.kind for part in found.parts] == kinds
    for name in ("boundary.002", "logits"):
        del record.arrays[name]
    found = isolate_record(saved(record), exact)
    assert found.holds and found.not_compared == ("layer 1", "layer 2", "head")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, exact, saved):
    found = isolate_record(saved(record_of(Faulty(fault))), exact)
    assert not found.holds and is_named(found, fault), found.finding()
    if fault in ("gate and up swapped in layer 2", "a scale off by one group in layer 3"):
        far = [part.layer for part in found.parts if not part.holds]
        assert far == [FAULTS[fault] - 1], "no other layer departs: nothing compounds"


DEEP = CONFIG | {"num_hidden_layers": 61}


@pytest.fixture(scope="module")
def deep():
    """Weights of 61 layers, and their target in f32 and in bf16."""
    tensors = tensors_of(DEEP)
    models = (tiny.target_module(tensors, DEEP, Numerics(dtype=d)) for d in ("float32", "bfloat16"))
    return tensors, *models


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_a_planted_fault_is_named_in_bf16(fault, deep, saved):
    tensors, exact, coarse = deep
    record = record_of(Faulty(fault, tensors, DEEP, bfloat16), "bfloat16")
    found = isolate_record(saved(record), exact, coarse)
    assert len(found.parts) == 63
    if fault == "none":
        assert found.holds, found.finding()
    else:
        assert not found.holds and is_named(found, fault), found.finding()


@pytest.mark.slow
def test_what_no_row_betrays(saved):
    """With larger embeddings bf16 rounds more than the epsilon does: all rows together show it."""
    embed = "model.embed_tokens.weight"
    tensors = TENSORS | {embed: bfloat16(3 * TENSORS[embed])}
    exact = tiny.target_module(tensors, CONFIG)
    coarse = tiny.target_module(tensors, CONFIG, Numerics(dtype="bfloat16"))
    sequences = np.random.default_rng(0).integers(24, size=(12, 24)).tolist()
    first = []
    for fault in ("none", "epsilon 1e-6 for 1e-5"):
        model = Faulty(fault, tensors, CONFIG, bfloat16)
        found = isolate_record(saved(record_of(model, "bfloat16", sequences)), exact, coarse)
        assert all(part.is_near for part in found.parts), found.finding()
        first += [part for part in found.parts if not part.holds][:1]
    (one,) = first
    (name, share, error), *_ = one.faint
    assert one.layer == 0 and name.startswith("epsilon 1e-06") and one.blocks[0] == "norms"
    assert share == pytest.approx(1, abs=3 * error) and error < 0.1


def test_the_record_says_which_experts(exact, saved):
    """Experts that the record's own state does not lead to are counted, and are no rounding."""
    record = record_of(Faulty("none"))
    experts = record.arrays["router.002"]
    experts[0, 3] = (experts[0, 3] + 1) % CONFIG["n_routed_experts"]
    found = isolate_record(saved(record), exact)
    one = next(part for part in found.parts if part.layer == 2)
    assert (one.num_other, one.num_ties, one.num_rows) == (1, 0, 18)
    assert not found.holds and "has other experts in 1 of 18 rows" in found.finding()


def test_bad_input(exact, saved):
    record = record_of(Faulty("none"))
    short = Record(record.arrays, record.metadata | {"dtype": "bfloat16"})
    with pytest.raises(InputError, match=r"in bfloat16: it is judged by these weights in lower"):
        isolate_record(saved(short), exact)
    strange = Record(record.arrays | {"tokens": record.arrays["tokens"] + 20}, record.metadata)
    with pytest.raises(InputError, match=r"has ids 0 to 23: a record of another model"):
        isolate_record(saved(strange), exact)
    wide = {n: x[..., :32] if n.startswith("boundary") else x for n, x in record.arrays.items()}
    with pytest.raises(InputError, match=r"boundary.000 is 32 wide and tiny@1 64"):
        isolate_record(saved(Record(wide, record.metadata)), exact)
    nothing = {"tokens": record.arrays["tokens"]}
    found = isolate_record(saved(Record(nothing, record.metadata)), exact)
    assert not found.holds and "nothing was compared" in found.finding()


def test_tables_and_picture(exact, saved, tmp_path):
    found = isolate_record(saved(record_of(Faulty("scaling factor dropped"))), exact)
    (table,) = tables_of_isolation(found)
    assert table.row_count == 6
    plot_isolation([found, found], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000
    assert found.to_dict()["holds"] is False
