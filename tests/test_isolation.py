"""A record against weights, layer by layer: planted faults are named, in f32 and in bf16."""

import numpy as np
import pytest

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
        return is_place and (first.readings[0], first.blocks[0]) == NAMES[fault]
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


@pytest.mark.parametrize(
    "fault",
    [
        "int4 offset 7 for 8",
        "a scale off by one group in layer 3",
        "an embedding",
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in FAULTS
            if fault
            not in ("int4 offset 7 for 8", "a scale off by one group in layer 3", "an embedding")
        ),
    ],
)
def test_a_planted_fault_is_named(fault, exact, saved):
    found = isolate_record(saved(record_of(Faulty(fault))), exact)
    assert not found.holds and is_named(found, fault), found.finding()
    far = [part.layer for part in found.parts if not part.holds]
    if fault in ("gate and up swapped in layer 2", "a scale off by one group in layer 3"):
        assert far == [FAULTS[fault] - 1], "no other layer departs: nothing compounds"
