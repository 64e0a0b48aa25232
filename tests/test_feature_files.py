"""Feature files of SpecForge, speculators and vLLM: read without torch, compared with the target,
refused where what is said of them is not so, and learned from.

The files of the first two were written by torch, with `benchmarks/reference_env/save_features.py`,
from the numpy reference's states.
"""

import json
import shutil
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.contracts import ContractError
from jaxspec.errors import InputError
from jaxspec.feature_files import FeatureFiles
from jaxspec.identify import identify
from jaxspec.optimizer import OptimizerConfig
from jaxspec.other_features import claim_features
from jaxspec.training import LossConfig, Trainer
from jaxspec.training_data import Sample, Windows
from tests import feature_samples, make_checkpoint, torch_reference
from tests.feature_samples import BOUNDARIES, MASKS, TOKENS

PROJECTS = ("SpecForge", "speculators", "vLLM")
LAST = {"SpecForge": "after", "speculators": "after", "vLLM": "before"}


@pytest.fixture(scope="module", autouse=True)
def little_optimisation():
    """Half the time to compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def write(project: str, folder: Path, layer_ids: list[int] | None = None) -> Path:
    """A directory of both samples, laid out as the project does.

    Args:
      layer_ids: what speculators' config says; None leaves the config out.
    """
    for index in range(2):
        if project == "SpecForge":
            (folder / "rows_0-2000").mkdir(parents=True, exist_ok=True)
            golden = torch_reference.GOLDEN / f"specforge-{index}.ckpt"
            shutil.copyfile(golden, folder / "rows_0-2000" / f"data_{index}.ckpt")
        elif project == "speculators":
            folder.mkdir(exist_ok=True)
            golden = torch_reference.GOLDEN / f"speculators-{index}.pt"
            shutil.copyfile(golden, folder / f"data_{index}.pt")
        else:
            # The tenth comes after the second.
            file = folder / "hidden_states" / f"hs_{9 * index + 1}.safetensors"
            feature_samples.save_vllm(index, file)
    if layer_ids is not None:
        about = {"version": "2.0", "hidden_states": {"layer_ids": layer_ids}}
        (folder / "data_config.json").write_text(json.dumps(about))
    return folder


def found(folder: Path) -> FeatureFiles:
    files = FeatureFiles.find(folder)
    assert files is not None
    return files


@pytest.mark.parametrize("project", PROJECTS)
def test_what_is_read(project, tmp_path):
    files = found(write(project, tmp_path / "made"))
    assert (files.project, len(files.files), files.claim) == (project, 2, None)
    for index in range(2):
        sample, tokens = files.read(index), files.read(index, has_states=False)
        assert sample.tokens.tolist() == tokens.tokens.tolist() == TOKENS[index]
        if project != "vLLM":
            assert sample.is_said.tolist() == [bool(bit) for bit in MASKS[index]]
        every, normed = feature_samples.states(index)
        wanted = np.concatenate([every[b] for b in BOUNDARIES], axis=-1)
        np.testing.assert_array_equal(sample.features, wanted.astype(ml_dtypes.bfloat16))
        last = normed if LAST[project] == "after" else every[-1]
        np.testing.assert_array_equal(sample.last, last.astype(ml_dtypes.bfloat16))


@pytest.mark.torch_reference
@pytest.mark.parametrize("name", ["specforge-1.ckpt", "speculators-0.pt"])
def test_what_torch_writes(name, tmp_path):
    """The committed files are what torch writes, to the last byte of every tensor."""
    project, index = name.partition(".")[0].split("-")
    out = tmp_path / f"data_{index}{Path(name).suffix}"
    feature_samples.save(project, int(index), out)
    golden = tmp_path / "golden" / out.name
    golden.parent.mkdir()
    shutil.copyfile(torch_reference.GOLDEN / name, golden)
    made, kept = (found(path).read(0) for path in (out, golden))
    for part in ("tokens", "is_said", "features", "last"):
        np.testing.assert_array_equal(getattr(made, part), getattr(kept, part))


@pytest.mark.parametrize("project", PROJECTS)
def test_inspect_names_what_each_chunk_is(project, tmp_path, target):
    report = identify(write(project, tmp_path / "made"), target)
    assert (report.found, report.claimed, report.last) == (BOUNDARIES, None, LAST[project])
    assert report.holds and "the last states are " in report.summary()


def test_a_claim_is_compared_with_what_they_are(tmp_path, target):
    """speculators' config counts layers' outputs; --capture counts boundaries."""
    folder = write("speculators", tmp_path / "made", [0, 1, 3, 3])
    made, report = claim_features(found(folder), target, None, "float32")
    assert report.claimed == report.found == BOUNDARIES and made.boundaries.ids == BOUNDARIES
    assert "data_config.json: hidden_states.layer_ids [0, 1, 3]" in made.boundaries.origin
    with pytest.raises(ContractError, match=r"boundaries \(1, 2, 4\) \[.*\], and \(1, 2, 3\)"):
        claim_features(found(folder), target, (1, 2, 3), "float32")
    write("speculators", folder, [1, 2, 3, 3])  # as if they were ids of layers' inputs
    assert not identify(folder, target).holds
    with pytest.raises(ContractError, match=r"(?s)to be boundaries \(2, 3, 4\).*0 is bound"):
        claim_features(found(folder), target, None, "float32")


def test_without_a_claim(tmp_path, target):
    """What comparison finds; where it finds nothing, what the user says; never what is wrong."""
    folder = write("SpecForge", tmp_path / "made")
    made, _ = claim_features(found(folder), target, None, "float32")
    assert made.boundaries.ids == BOUNDARIES and "by comparison" in made.boundaries.origin
    with pytest.raises(ContractError, match=r"\(1, 2\) \[set by --capture\], and they are others"):
        claim_features(found(folder), target, (1, 2), "float32")
    other = target.boundaries((1, 2, 3), "the draft's manifest")
    with pytest.raises(ContractError, match=r"wants: boundaries \(1, 2, 3\)"):
        made.require(other)
    strange = feature_samples.save_vllm(0, tmp_path / "strange" / "hs_0.safetensors")
    arrays = load_file(strange)
    arrays["hidden_states"][:, 1] = 1
    save_file(arrays, strange)
    with pytest.raises(InputError, match="nothing says which boundaries these are"):
        claim_features(found(strange.parent), target, None, "float32")
    made, _ = claim_features(found(strange.parent), target, BOUNDARIES, "float32")
    assert made.boundaries.origin == "set by --capture"
    arrays["hidden_states"][:, -1] = 1
    save_file(arrays, strange)
    with pytest.raises(InputError, match="the last states are not those of tiny@1"):
        claim_features(found(strange.parent), target, BOUNDARIES, "float32")


def test_masks_of_the_dataset_beside(tmp_path):
    """vLLM's files say nothing of turns: speculators' Arrow dataset does."""
    pyarrow = pytest.importorskip("pyarrow", reason="reads speculators' datasets")
    folder = tmp_path / "made"
    for index in range(2):
        feature_samples.save_vllm(index, folder / "hidden_states" / f"hs_{index}.safetensors")
    assert not found(folder).has_masks and found(folder).read(0).is_said is None
    rows = {"input_ids": TOKENS, "loss_mask": MASKS, "seq_len": [len(ids) for ids in TOKENS]}

    def save(rows: dict) -> None:
        table = pyarrow.table(rows)
        with (
            (folder / "data-00000-of-00001.arrow").open("wb") as stream,
            pyarrow.ipc.new_stream(stream, table.schema) as writer,
        ):
            writer.write_table(table)

    save(rows)
    assert found(folder).has_masks
    assert found(folder).read(1).is_said.tolist() == [bool(bit) for bit in MASKS[1]]
    save(rows | {"input_ids": TOKENS[::-1], "loss_mask": MASKS[::-1]})
    with pytest.raises(InputError, match="of other tokens than its row"):
        found(folder).read(0)
    save(rows | {"loss_mask": [MASKS[0][1:], MASKS[1]]})
    with pytest.raises(InputError, match="9 tokens, and a loss_mask of 8 in its row"):
        found(folder).read(0)


def rewritten(path: Path, **members: bytes | None) -> Path:
    """A file of torch's with members of its archive changed, or left out."""
    with zipfile.ZipFile(path) as old:
        kept = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in kept.items():
            short = name.partition("/")[2].replace("/", "_").replace(".", "_")
            data = members.get(short, data)
            if data is not None:
                new.writestr(name, data)
    return path


def test_bad_files(tmp_path, monkeypatch):
    assert FeatureFiles.find(tmp_path) is None
    folder = write("SpecForge", tmp_path / "one")
    file = folder / "rows_0-2000" / "data_1.ckpt"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(InputError, match=r"data_1\.ckpt: not a zip archive: truncated"):
        found(folder).read(1)
    shutil.copyfile(torch_reference.GOLDEN / "speculators-0.pt", file)
    with pytest.raises(InputError, match=r"data_1\.ckpt: hidden_state \[\], aux_hidden_state \[\]"):
        found(folder).read(1)
    rewritten(file, data_pkl=b"cposix\nsystem\n(S'touch ran'\ntR.")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"nothing is run: it names posix\.system"):
        found(folder).read(1)
    assert not (tmp_path / "ran").exists()
    file.rename(file.with_name("data_1.ckpt.gz"))
    (folder / "rows_0-2000" / "data_0.ckpt").unlink()
    with pytest.raises(InputError, match="compressed; unpack them first"):
        FeatureFiles.find(folder)
    folder = write("speculators", tmp_path / "two", [0, 1, 3, 3])
    (folder / "data_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"data_config\.json: no hidden_states\.layer_ids in it"):
        FeatureFiles.find(folder)
    file = feature_samples.save_vllm(0, tmp_path / "three" / "hs_0.safetensors")
    arrays = load_file(file)
    for changed, said in (
        (arrays | {"hidden_states_scales": np.ones(9, np.float32)}, "not quantised"),
        ({"token_ids": arrays["token_ids"]}, "token_ids; expected token_ids and hidden_states"),
        (arrays | {"token_ids": arrays["token_ids"][1:]}, r"token_ids \[8\]; expected"),
        (arrays | {"token_ids": arrays["token_ids"][:, None]}, r"token_ids \[9, 1\]; expected"),
        (arrays | {"hidden_states": arrays["hidden_states"][:, :1]}, "two layers at least"),
        (arrays | {"token_ids": arrays["token_ids"] + 0.5}, "in float64; expected integers"),
    ):
        save_file({name: np.ascontiguousarray(a) for name, a in changed.items()}, file)
        with pytest.raises(InputError, match=said):
            found(file).read(0)
    nothing = {name: array[:0] for name, array in arrays.items()}
    save_file(nothing, file)
    assert len(found(file).read(0).tokens) == 0


def test_bytes_that_were_changed(tmp_path):
    """Whatever three of them are: read, or one message; never another error."""
    golden = (torch_reference.GOLDEN / "speculators-0.pt").read_bytes()
    file, rng = tmp_path / "data_0.pt", np.random.default_rng(0)
    refused = 0
    for _ in range(150):  # the 26th had zipfile, and the 136th numpy, raise errors of their own
        content = bytearray(golden)
        for _ in range(3):
            content[rng.integers(len(content))] = rng.integers(256)
        file.write_bytes(content)
        try:
            found(file).read(0)
        except InputError:
            refused += 1
    assert 0 < refused < 150


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS)
def test_training_on_them_is_training_on_the_fly(project, tmp_path, target, draft):
    """The same loss, up to the states' bf16."""
    made, _ = claim_features(found(write(project, tmp_path / "made")), target, None, "float32")
    windows = made.windows(24)
    masks = [np.ones_like(mask) for mask in MASKS] if project == "vLLM" else MASKS
    samples = [
        Sample(np.array(ids, np.int32), _learned(mask, project), "")
        for ids, mask in zip(TOKENS, masks, strict=True)
    ]
    fresh = Windows.of(samples, 9, 24)
    np.testing.assert_array_equal(windows.tokens, fresh.tokens)
    np.testing.assert_array_equal(windows.is_learned, fresh.is_learned)
    losses = []
    for some in (fresh, windows):
        trainer = Trainer(target, draft, LossConfig(2), OptimizerConfig(num_batches=4, warm_up=1))
        (batch,) = some.in_order(3)
        losses.append(trainer.sums(trainer.new_state(), batch).mean("loss"))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def _learned(mask: list[int], project: str) -> np.ndarray:
    """What is learned after a token: the assistant's next one; all of it where nothing says."""
    if project == "vLLM":
        return np.ones(len(mask), bool)
    return np.append(np.array(mask[1:]) != 0, False)


@pytest.mark.slow
def test_the_commands(tmp_path, monkeypatch, command):
    config = make_checkpoint.target_config("flat")
    make_checkpoint.write(tmp_path / "target", config, make_checkpoint.target_tensors(config))
    write("SpecForge", tmp_path / "forge")
    write("speculators", tmp_path / "spec", [0, 1, 3, 3])
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str]:
        flags = ("--target", "target", "--compile-cache", "none")
        status, out, err = command(*line.split(), *flags)
        return status, out + err

    status, said = run("inspect forge")
    assert status == 0 and "chunk 2 is boundary 4" in said and "after the final norm" in said
    sizes = "--batch-size 1 --batches 2 --warm-up 1 --num-steps 2 --accept-prompts 0"
    status, said = run(f"train-draft --features forge --out run {sizes}")
    assert status == 0, said
    status, said = run(f"train-draft --features spec --draft run/draft --out more {sizes}")
    assert status == 0, said
    status, said = run(f"train-draft --features forge --capture 1,2,3 --out no {sizes}")
    assert status == 2 and "said to be boundaries (1, 2, 3) [set by --capture]" in said
    status, said = run(f"train-draft --features spec --capture 1,2,3 --out no {sizes}")
    assert status == 2 and "leave out --capture, or the config is wrong" in said
