"""The target against transformers' DeepSeek-V3, in f32, from the same directory.

Every boundary and the logits agree within 1e-5 per row (norm-wise), in a pass over the whole
sequence, in chunks, and token by token; the chosen experts are the same. A choice may differ only
where transformers' own margin is below `NEAR_TIE`; rows from there on are then left out, counted,
and printed.
"""

from pathlib import Path

import numpy as np
import pytest

from jaxspec import recording
from jaxspec.checkpoint import load_target
from jaxspec.config import Numerics
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.isolation import isolate_record
from jaxspec.record_comparison import compare_records
from jaxspec.requests import Request
from jaxspec.target import Target
from tests import tiny, torch_reference
from tests.torch_reference import MINI_TARGET, NEAR_TIE, Record, row_error

TOLERANCE = 1e-5
MAX_LEFT_OUT = 0.1
"""Share of rows that near-ties may cost: more of them is another error."""
MAX_PARTED = 2
"""Continuations, of 64, that near-ties may cost."""

NAMES = ("tiny-kimi", "tiny-deepseek", "tiny-k2", "mini-target")


def case_of(source: torch_reference.Source, name: str, folder: Path, *options: str):
    """The directory of a target and transformers' record of it."""
    directory = torch_reference.target_directory(name, folder)
    if source == "golden":
        record = torch_reference.golden("-".join([name, *options[1:]]))
    else:
        out = folder / "record.safetensors"
        record = torch_reference.make_target_record(directory, out, source, *options)
    record.check_made_from(directory)
    return directory, record


@pytest.fixture(scope="module", params=torch_reference.each_source(NAMES, slow=["tiny-k2"]))
def case(request, tmp_path_factory) -> tuple[Target, Record]:
    directory, record = case_of(*request.param, tmp_path_factory.mktemp("case"))
    return load_target(directory, tiny.NUMERICS), record


@pytest.mark.parametrize("chunk", [None, 7, 1], ids=["prompt", "chunked", "cached"])
def test_boundaries_logits_and_experts(case, chunk, capsys):
    target, record = case
    show(capsys, compare(run(target, record, chunk), record))


@pytest.mark.parametrize("source_and_name", torch_reference.each_source(["tiny-kimi"]))
def test_rounded_expert_product(source_and_name, tmp_path):
    """q x scale rounded to bf16, as transformers' own loading leaves it, is a choice of ours too;
    and it is no small one: the exact product is further away than any tolerance here."""
    directory, record = case_of(*source_and_name, tmp_path, "--expert-product", "bfloat16")
    assert record.metadata["expert_product"] == "bfloat16"
    rounded = Numerics(dtype="float32", expert_product="bfloat16")
    compare(run(load_target(directory, rounded), record), record)
    exact = run(load_target(directory, tiny.NUMERICS), record)
    is_real, theirs = record.is_real, record.arrays["logits"]
    assert row_error(exact["logits"][is_real], theirs[is_real]).max() > 1e-3


@pytest.mark.parametrize(
    "source_and_name", torch_reference.each_source(["tiny-kimi"], ["tiny-kimi"])
)
@pytest.mark.parametrize("product", ["exact", "bfloat16"])
def test_compare_says_that_experts_differ(source_and_name, product, tmp_path):
    """`jaxspec compare` takes transformers' record as it is. With experts as transformers itself
    loads them, their layers alone depart from the weights, and it is said why."""
    source, name = source_and_name
    options = () if product == "exact" else ("--expert-product", product)
    directory, theirs = case_of(source, name, tmp_path, *options)
    path = tmp_path / "record.safetensors"
    if source == "golden":
        path = torch_reference.GOLDEN / f"{'-'.join([name, *options[1:]])}.safetensors"
    target = load_target(directory, tiny.NUMERICS)
    rows, lengths = theirs.arrays["tokens"].tolist(), theirs.arrays["lengths"]
    sequences = [ids[:length] for ids, length in zip(rows, lengths, strict=True)]
    recording.record(target, None, sequences).save(tmp_path / "ours.safetensors")
    whole = compare_records(path, tmp_path / "ours.safetensors", require=("boundary", "logits"))
    alone = isolate_record(path, target)
    first = target.config.first_k_dense_replace
    if product == "exact":
        assert whole.holds and alone.holds, (whole.finding(), alone.finding())
        return
    assert not whole.holds and f"layer {first} (sparse" in whole.finding()
    far = [part for part in alone.parts if not part.holds]
    assert [part.layer for part in far] == list(range(first, target.config.num_hidden_layers))
    assert far[0].readings[0] == "q x scale rounded to bfloat16", alone.finding()
    assert far[0].blocks[0] == "routed experts"


@pytest.mark.torch_reference
def test_transformers_own_loading(tmp_path, capsys):
    """What transformers makes of a packed checkpoint by itself, asked for f32: its experts are what
    differs, and by q x scale in bf16, which is what `expert_product="bfloat16"` is."""
    directory = torch_reference.target_directory("tiny-packed", tmp_path)
    out = tmp_path / "theirs.safetensors"
    theirs = torch_reference.make_target_record(directory, out, "live", "--loading", "theirs")
    rounded = Numerics(dtype="float32", expert_product="bfloat16")
    show(capsys, compare(run(load_target(directory, rounded), theirs), theirs))

    exact = load_target(directory, tiny.NUMERICS)
    rows, lengths = theirs.arrays["tokens"].tolist(), theirs.arrays["lengths"]
    sequences = [ids[:length] for ids, length in zip(rows, lengths, strict=True)]
    recording.record(exact, None, sequences).save(tmp_path / "ours.safetensors")
    whole = compare_records(out, tmp_path / "ours.safetensors")
    alone = isolate_record(out, exact)
    assert not whole.holds and "layer 1 (sparse" in whole.finding()
    far = [part for part in alone.parts if not part.holds]
    assert [(part.layer, part.kind) for part in far] == [(i, "sparse") for i in (1, 2, 3)]
    assert far[0].readings[0] == "q x scale rounded to bfloat16", alone.finding()
    assert far[0].blocks[0] == "routed experts", alone.finding()
    # Rounding to bf16 is at most 2^-9 of a weight, and a layer gives more than its experts do.
    assert all(1e-4 < part.worst < 2**-9 for part in far), alone.finding()
    show(capsys, alone.finding())


@pytest.mark.parametrize(
    "source_and_name",
    [
        *torch_reference.each_source(["mini-greedy"]),
        *torch_reference.each_source(["tiny-k2", "tiny-deepseek"])[2:],
    ],
)
def test_greedy_continuations(source_and_name, tmp_path, capsys):
    """The tokens of `--draft none` are those of transformers' own `generate`, for 64 prompts of
    different lengths in a batch of 8: held-out ones of the shipped checkpoint, and random ones of
    random weights. A sequence may part where a margin of transformers is below `NEAR_TIE`."""
    source, name = source_and_name
    out = tmp_path / "greedy.safetensors"
    if name == "mini-greedy":
        directory, prompts, options = MINI_TARGET, torch_reference.prompt_ids(), ()
    else:
        directory = torch_reference.target_directory(name, tmp_path)
        rng = np.random.RandomState(1)  # its stream is frozen (NEP 19)
        prompts = [rng.randint(24, size=5 + 4 * (index % 2)).tolist() for index in range(64)]
        options = ("--batch",)
    if source == "golden":
        record = torch_reference.golden(name)
    else:
        record = torch_reference.make_greedy_record(directory, prompts, out, *options)
    record.check_made_from(directory)
    theirs_BN = record.arrays["tokens"]
    longest, new_tokens = max(map(len, prompts)), theirs_BN.shape[1]
    config = GenerateConfig(
        tree=None,
        batch_size=8,
        max_new_tokens=new_tokens,
        context_length=longest + new_tokens,
        ignore_eos=True,
    )
    requests = [Request(tuple(ids)) for ids in prompts]
    generator = Generator(load_target(directory, tiny.NUMERICS), None, config)
    ours_BN = np.array([of.tokens for of in generator.run(requests).completions])
    notes = []
    for row in np.flatnonzero((ours_BN != theirs_BN).any(-1)):
        parted = int((ours_BN[row] != theirs_BN[row]).argmax())
        # A flipped choice of an expert may show in a later token; a near-tie of logits at once.
        margin = min(
            record.arrays["logit_margin"][row, parted],
            record.arrays["router_margin"][row, : parted + 1].min(),
        )
        notes.append(f"prompt {row} parts at token {parted}, margin {margin:.1e}")
        assert margin < NEAR_TIE, notes
    assert len(notes) <= MAX_PARTED, notes
    show(capsys, "; ".join(notes))


def show(capsys, note: str) -> None:
    """Prints an exception that was made, past pytest's capturing."""
    if note:
        with capsys.disabled():
            print(f"\n{note}")


def run(target: Target, tokens: Record, chunk: int | None = None) -> dict[str, np.ndarray]:
    """jaxspec's own record, `chunk` tokens a pass; None: all of them in one."""
    rows, lengths = tokens.arrays["tokens"].tolist(), tokens.arrays["lengths"]
    sequences = [ids[:length] for ids, length in zip(rows, lengths, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "CHUNK", chunk or int(lengths.max()))
        return recording.record(target, None, sequences).arrays


def compare(ours: dict[str, np.ndarray], record: Record) -> str:
    """A line on the rows left out, empty if none were.

    Raises:
      AssertionError: naming the array, the row and how far apart the two are.
    """
    theirs, is_real = record.arrays, record.is_real
    is_compared, notes = is_real.copy(), []
    differs = {
        name: (np.sort(ours[name], axis=-1) != theirs[name]).any(-1) & is_real
        for name in theirs
        if name.startswith("router.")
    }
    for row in range(len(is_real)):
        at = [(int(d[row].argmax()), name) for name, d in differs.items() if d[row].any()]
        if not at:
            continue
        position, name = min(at)
        margin = theirs[name.replace("router", "router_margin")][row, position]
        assert margin < NEAR_TIE, (
            f"{name}, sequence {row}, position {position}: experts "
            f"{ours[name][row, position]} where transformers chose {theirs[name][row, position]}, "
            f"with a margin of {margin:.1e}"
        )
        is_compared[row, position:] = False
        notes.append(f"{name} of sequence {row} parts at position {position}, margin {margin:.1e}")
    left_out = int((is_real & ~is_compared).sum())
    assert left_out <= MAX_LEFT_OUT * is_real.sum(), (left_out, notes)
    names = [name for name in theirs if name.startswith("boundary.")]
    assert names == [name for name in ours if name.startswith("boundary.")]
    for name in differs:
        name = name.replace("router", "router_margin")
        error = np.abs(ours[name] - theirs[name])[is_compared].max()
        assert error <= TOLERANCE, f"{name}: apart by {error:.2e}"
    for name in [*names, "logits"]:
        error = row_error(ours[name][is_compared], theirs[name][is_compared])
        row, position = np.argwhere(is_compared)[error.argmax()]
        assert error.max() <= TOLERANCE, (
            f"{name}, sequence {row}, position {position}: relative error {error.max():.2e}"
        )
    if not left_out:
        return ""
    return f"{record.metadata['model']}: {left_out} of {is_real.sum()} rows left out: {notes}"
