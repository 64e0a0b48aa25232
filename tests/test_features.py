"""Features on disk: what they are is what they claim, and training reads them so."""

import collections

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import features
from jaxspec.contracts import ContractError
from jaxspec.errors import InputError
from jaxspec.features import FeaturesDirectory, first_shard, record_features
from jaxspec.identify import identify
from jaxspec.optimizer import OptimizerConfig
from jaxspec.training import LossConfig, Trainer
from jaxspec.training_data import Sample, Windows
from tests import make_checkpoint, tiny

LENGTH = 12
IDS = np.random.default_rng(0).integers(0, 24, 55).astype(np.int32)
WINDOWS = Windows.of([Sample(IDS, IDS % 5 > 0, "the test's")], LENGTH, 24)


@pytest.fixture(scope="module", autouse=True)
def little_optimisation():
    """Half the time to compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def recorded(target, tmp_path_factory):
    """A directory of three shards, of which the recording stopped after two."""
    out = tmp_path_factory.mktemp("features") / "out"
    claim = target.boundaries(tiny.BOUNDARIES, "the test's")

    def stop(_: str, done: int, __: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "PER_SHARD", 2)
        with pytest.raises(KeyboardInterrupt):
            record_features(target, claim, WINDOWS, out, stop)
        with pytest.raises(InputError, match="1 of 3 shards are missing"):
            FeaturesDirectory.open(out)
        kept = [path.stat().st_mtime_ns for path in sorted(out.glob("*.safetensors"))]
        found = record_features(target, claim, WINDOWS, out)
        again = [path.stat().st_mtime_ns for path in found.shards]
        assert len(kept) == 2 and again[:2] == kept
        yield found


def test_windows_come_back(recorded):
    windows = recorded.windows()
    assert len(windows) == 5 and windows.lengths.tolist() == [12, 12, 12, 12, 7]
    np.testing.assert_array_equal(windows.tokens, WINDOWS.tokens)
    np.testing.assert_array_equal(windows.is_learned, WINDOWS.is_learned)
    two, same = windows.take([4, 1]).batch(np.array([0, 1])), windows.batch(np.array([4, 1]))
    np.testing.assert_array_equal(two.hidden, same.hidden)
    assert two.hidden.shape == (2, LENGTH, 64) and two.hidden[0, 6].any()
    assert not two.hidden[0, 7:].any(), "zeros past the end"


def test_inspect_names_what_each_chunk_is(recorded, target):
    shard = first_shard(recorded.path)
    assert shard is not None and first_shard(shard) is None
    report = identify(shard, target)
    assert report.found == report.claimed == tiny.BOUNDARIES


def test_another_claim_is_refused_by_name(recorded, target):
    other = target.boundaries((1, 2, 3), "the draft's manifest")
    with pytest.raises(ContractError, match=r"wants: boundaries \(1, 2, 3\)") as refused:
        recorded.require(other)
    assert "given: boundaries (1, 2, 4)" in str(refused.value)
    with pytest.raises(InputError, match=r"of another run, .*: boundaries\.ids is"):
        record_features(target, other, WINDOWS, recorded.path)


def test_a_damaged_shard_is_named(recorded, tmp_path, monkeypatch, target):
    claim = target.boundaries(tiny.BOUNDARIES, "the test's")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in recorded.path.iterdir():
        (copy / path.name).write_bytes(path.read_bytes()[: -200 if "00001" in path.name else None])
    with pytest.raises(InputError, match=r"features-00001\.safetensors: cannot be read"):
        FeaturesDirectory.open(copy).windows()
    (copy / "features-00001.safetensors").unlink()
    record_features(target, claim, WINDOWS, copy)
    whole, found = (load_file(one / "features-00001.safetensors") for one in (recorded.path, copy))
    np.testing.assert_array_equal(found["features"], whole["features"])
    nothing_free = collections.namedtuple("usage", "total used free")(1, 1, 0)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: nothing_free)
    with pytest.raises(InputError, match=r"GB are to come, and 0\.000 GB are free"):
        record_features(target, claim, WINDOWS, tmp_path / "full")


@pytest.mark.slow
def test_training_from_disk_is_training_on_the_fly(recorded, target, draft):
    """The same loss, up to the rounding of one pass in chunks and one in a piece."""
    losses = []
    for windows in (WINDOWS, recorded.windows()):
        trainer = Trainer(target, draft, LossConfig(2), OptimizerConfig(num_batches=4, warm_up=1))
        (batch,) = windows.in_order(8)
        losses.append(trainer.sums(trainer.new_state(), batch).mean("loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_the_commands(tmp_path, monkeypatch, command):
    config = make_checkpoint.target_config("flat")
    make_checkpoint.write(tmp_path / "target", config, make_checkpoint.target_tensors(config))
    (tmp_path / "ids.json").write_text(str([IDS.tolist(), IDS[::-1].tolist()]))
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str]:
        flags = ("--target", "target", "--compile-cache", "none")
        status, out, err = command(*line.split(), *flags)
        return status, out + err

    record = "record --features --tokens ids.json --draft none --length 12 --out"
    status, said = run(f"{record} kept --capture 1,2,4")
    assert status == 0 and "10 windows, 0.000 GB, of boundaries (1, 2, 4)" in said
    status, said = run("inspect kept")
    assert status == 0 and "chunk 2 is boundary 4" in said
    sizes = "--batch-size 2 --batches 2 --warm-up 1 --num-steps 2 --accept-prompts 0"
    status, said = run(f"train-draft --features kept --out run {sizes}")
    assert status == 0, said
    status, said = run(f"train-draft --features kept --draft run/draft --out more {sizes}")
    assert status == 0, said
    status, said = run(f"{record} other --capture 1,2,3")
    assert status == 0, said
    status, said = run(f"train-draft --features other --draft run/draft --out no {sizes}")
    assert status == 2 and "wants: boundaries (1, 2, 4)" in said
    status, said = run(f"train-draft --features kept --dtype bfloat16 --out no {sizes}")
    assert status == 2 and "recorded in float32" in said
