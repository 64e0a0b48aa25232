"""A conversion that is killed, runs out of room or finds its source changed: nothing is lost."""

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxspec.convert import plan
from jaxspec.convert.manifest import part_of
from jaxspec.convert.problems import CheckpointError
from jaxspec.convert.stored import open_piece
from jaxspec.convert.write import ConvertConfig, convert
from tests import make_checkpoint

SMALL_PIECES = 8192
"""Bytes: two experts each, and several pieces of what else a layer has."""
NUM_BEFORE = 14
"""Pieces that a run has written when it is interrupted."""
LAST_SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, "language_model.model.")
    directory = make_checkpoint.write(tmp_path_factory.mktemp("source"), config, tensors, 2)
    (directory / "tiktoken.model").write_text("IQ== 0\n")
    return directory


@pytest.fixture
def own(source, tmp_path):
    """A copy of the source that a test may change."""
    return Path(shutil.copytree(source, tmp_path / "source"))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(plan, "PIECE_BYTES", SMALL_PIECES)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The conversion that nothing interrupted."""
    directory = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PIECE_BYTES", SMALL_PIECES)
        convert(source, directory)
    arrays = arrays_of(directory)
    names = {piece for piece, _ in arrays}
    assert {"embed", "layer_000.1", "layer_001.000006", "layer_003.1", "head"} < names
    assert len(names) > NUM_BEFORE
    return directory, arrays


def arrays_of(directory: Path) -> dict[tuple[str, str], np.ndarray]:
    """What each piece holds of each leaf."""
    pieces = json.loads((directory / "manifest.json").read_text())["pieces"]
    arrays = {}
    for piece in pieces:
        args = (piece["name"], piece["layer"], part_of(piece))
        leaves = open_piece(directory / "params", *args).leaves
        arrays |= {(piece["name"], path): leaf[...] for path, leaf in leaves.items()}
    return arrays


def assert_same_checkpoint(found: Path, whole: tuple[Path, dict]) -> None:
    """Asserts that both hold the same files and arrays, but for the store's own files."""
    directory, want = whole
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in directory.iterdir())
    for path in directory.iterdir():
        assert path.is_dir() or (found / path.name).read_bytes() == path.read_bytes(), path.name
    assert {p.name for p in (found / "params").iterdir()} == {piece for piece, _ in want}
    arrays = arrays_of(found)
    assert arrays.keys() == want.keys()
    for name, array in arrays.items():
        assert (array.dtype, array.shape) == (want[name].dtype, want[name].shape), name
        assert array.tobytes() == want[name].tobytes(), name
    assert not list(found.parent.glob(f"{found.name}.*"))


RUN = f"""
import sys
from jaxspec.convert import plan
from jaxspec.convert.write import convert
plan.PIECE_BYTES = {SMALL_PIECES}
print("ready", flush=True)
convert(sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize(
    "num_kills", [3, pytest.param(30, marks=pytest.mark.slow)], ids="kills={}".format
)
def test_killed_at_random_moments(source, whole, tmp_path, num_kills):
    """SIGKILL, again and again on one conversion; what comes out at last is what always does."""
    out, seed, pieces_seen = tmp_path / "out", random.randrange(10**6), []
    print("seed", seed)
    moments, started = random.Random(seed), time.monotonic()
    convert(source, tmp_path / "timed")
    seconds = time.monotonic() - started
    for _ in range(num_kills):
        with subprocess.Popen(
            [sys.executable, "-c", RUN, str(source), str(out)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0, seconds))
            process.send_signal(signal.SIGKILL)
        if out.exists():  # then it is complete, killed or not
            assert_same_checkpoint(out, whole)
            shutil.rmtree(out)
        pieces_seen.append(len(list(tmp_path.glob("out.partial/params/*/files.json"))))
    print("pieces after each kill", pieces_seen)
    convert(source, out)
    assert_same_checkpoint(out, whole)


class Killed(BaseException):
    """Stops a conversion where nothing catches it."""


def stop_at(monkeypatch: pytest.MonkeyPatch, place: Path, moment: int) -> list[str]:
    """Lets what renames and removes files under `place` do so `moment` times; the list of them."""
    done: list[str] = []
    for name in ("rename", "replace", "unlink"):
        original = getattr(os, name)

        def counted(path, *args, name=name, original=original, **kwargs):
            if str(path).startswith(str(place)):
                if len(done) == moment:
                    raise Killed
                done.append(f"{name} {Path(path).name}")
            return original(path, *args, **kwargs)

        monkeypatch.setattr(os, name, counted)
    return done


ENDING = ["replace manifest.json.tmp", "unlink hashes.json", "unlink partial.json"]
ENDING += ["rename out.partial"]


def test_stopped_before_each_of_the_first_and_last_steps(source, whole, tmp_path):
    """Each of them is one change of the file system, which happens or does not."""
    out = tmp_path / "out"
    for moment in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, out, moment)
            with pytest.raises(Killed):
                convert(source, out)
        assert not out.exists()
    all_pieces = len({piece for piece, _ in whole[1]})
    interrupt(source, out, all_pieces)
    for moment in range(len(ENDING) + 1):
        out = tmp_path / str(moment) / "out"
        shutil.copytree(tmp_path / "out.partial", tmp_path / str(moment) / "out.partial")
        with pytest.MonkeyPatch.context() as patch:
            done = stop_at(patch, out, moment)
            with pytest.raises(Killed) if moment < len(ENDING) else contextlib.nullcontext():
                convert(source, out)
            assert done == ENDING[:moment]
        assert out.exists() == (moment == len(ENDING))
        if not out.exists():
            assert convert(source, out).num_pieces_kept == all_pieces
        assert_same_checkpoint(out, whole)


def interrupt(source: Path, out: Path, num_pieces: int) -> None:
    """Leaves what a run that was stopped after so many pieces leaves."""
    calls = []

    def progress(*step):
        calls.append(step)
        if len(calls) == 1 + num_pieces:
            raise Killed

    with pytest.raises(Killed):
        convert(source, out, progress=progress)


def test_progress_goes_on_from_what_is_there(source, tmp_path):
    interrupt(source, tmp_path / "out", 9)
    seen = []
    report = convert(source, tmp_path / "out", progress=lambda *step: seen.append(step))
    assert report.num_pieces_kept == 9
    assert len(seen) == 1 + len(report.manifest.pieces) - 9
    assert 0 < seen[0][1] < seen[1][1]
    assert seen[-1][1] == seen[-1][2]


def grow(place: Path) -> None:
    """One tensor more, and so a file of another size."""
    config = json.loads((place / "source" / "config.json").read_text())
    tensors = make_checkpoint.target_tensors(config, "language_model.model.")
    tensors["vision_tower.x.weight"] = tensors["language_model.model.norm.weight"]
    make_checkpoint.write(place / "source", config, tensors, 2)


def flip(place: Path) -> None:
    """One bit of the last byte of a shard: names, shapes and sizes stay as they are."""
    path = place / "source" / LAST_SHARD
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change_norm(place: Path) -> None:
    """Other weights of the same shapes."""
    config = json.loads((place / "source" / "config.json").read_text())
    tensors = make_checkpoint.target_tensors(config, "language_model.model.")
    tensors["language_model.model.norm.weight"] *= 2
    make_checkpoint.write(place / "source", config, tensors, 2)


def edit_plan(key: str, value: object):
    def apply(place: Path) -> None:
        path = place / "out.partial" / "partial.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return apply


CHANGES = {
    "a file of another size": (grow, ["source that has changed since", ".safetensors was", "is"]),
    "other weights of the same size": (change_norm, ["source that has changed since", "kimi_k25@"]),
    "one bit of a file": (flip, [LAST_SHARD, "has changed since a part of it was", "SHA-256 was"]),
    "another version's format": (
        edit_plan("format", "jaxspec-checkpoint-0"),
        ["of format 'jaxspec-checkpoint-0'; this version writes 'jaxspec-checkpoint-1'"],
    ),
    "another version": (edit_plan("version", "0.0.1"), ["begun by jaxspec 0.0.1; this is"]),
    "a plan that was cut off": (
        lambda place: (place / "out.partial" / "partial.json").write_text("{"),
        ["its partial.json cannot be read"],
    ),
    "no plan": (
        lambda place: (place / "out.partial" / "partial.json").unlink(),
        ["its partial.json cannot be read"],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_was_begun_is_no_longer_the_same(own, tmp_path, case):
    """One clear message, and nothing that was written is lost."""
    change, fragments = CHANGES[case]
    interrupt(own, tmp_path / "out", NUM_BEFORE)
    change(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        convert(own, tmp_path / "out")
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert len(caught.value.problems) == 1
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_another_choice_is_named(source, tmp_path):
    interrupt(source, tmp_path / "out", 3)
    with pytest.raises(CheckpointError, match="latent_norm_eps was 1e-05, is 1e-06"):
        convert(source, tmp_path / "out", ConvertConfig(latent_norm_eps="transformers"))


def test_a_copy_of_the_source_is_the_same_source(source, own, whole, tmp_path):
    """Times of change and places differ; what counts is what the files hold."""
    interrupt(source, tmp_path / "out", NUM_BEFORE)
    for path in own.iterdir():
        os.utime(path, (1, 1))
    report = convert(own, tmp_path / "out")
    assert report.num_pieces_kept == NUM_BEFORE
    shutil.rmtree(own)
    assert_same_checkpoint(tmp_path / "out", whole)


def test_a_source_that_changes_meanwhile(own, tmp_path):
    seen = []

    def progress(*step):
        seen.append(step)
        if len(seen) == 5:
            flip(tmp_path)

    with pytest.raises(CheckpointError, match=f"{LAST_SHARD} has changed while it was being"):
        convert(own, tmp_path / "out", progress=progress)
    assert not (tmp_path / "out").exists()
    flip(tmp_path)  # back to what it was
    convert(own, tmp_path / "out")


def test_no_room_from_the_start(source, tmp_path, monkeypatch):
    """Said before anything is written, with both sizes."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"GB are to be written and its disk has 0.000 GB"):
        convert(source, tmp_path / "out")
    monkeypatch.undo()
    assert not list(tmp_path.glob("out.partial/params/*"))


def test_no_room_on_the_way(source, whole, tmp_path, monkeypatch):
    save, saved = ocp.Checkpointer.save, []

    def until_it_is_full(self, path, *args, **kwargs):
        if len(saved) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        saved.append(path)
        return save(self, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "save", until_it_is_full)
        said = r"stopped: No space left on device \(.*out.partial/params/.*\); 0.00. GB are to be "
        said += r"written and its disk has \d.* GB free; .* convert again, and it goes on"
        with pytest.raises(CheckpointError, match=said):
            convert(source, tmp_path / "out")
    monkeypatch.setattr(plan, "PIECE_BYTES", SMALL_PIECES)
    assert convert(source, tmp_path / "out").num_pieces_kept == 5
    assert_same_checkpoint(tmp_path / "out", whole)


FULL = """
mount -t tmpfs -o size=900k none "$2" || { echo "no mount"; exit 0; }
"$0" -m jaxspec convert "$1" "$2/out"; echo "first run: $?"
mount -o remount,size=30m "$2"
"$0" -m jaxspec convert "$1" "$2/out" --json; echo "second run: $?"
ls "$2"
"""


def test_a_disk_that_fills_up(source, tmp_path):
    """The real thing: a file system of 900 KB, which then grows."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here: no file system of a chosen size can be made")
    (tmp_path / "disk").mkdir()
    command = ["unshare", "-rm", "bash", "-c", FULL, sys.executable, str(source)]
    command.append(str(tmp_path / "disk"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout or done.stdout.startswith("no mount"):
        pytest.skip(f"no file system of a chosen size can be made here: {done.stderr}")
    first, json_line, second, *names = done.stdout.splitlines()
    assert (first, second, names) == ("first run: 2", "second run: 0", ["out"]), done.stderr
    message = f"jaxspec: {tmp_path}/disk/out.partial: the conversion stopped: No space left on dev"
    assert done.stderr.splitlines()[0].startswith(message)
    assert " GB are to be written and its disk has 0.00" in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr
    assert json.loads(json_line)["pieces_kept"] > 0


def test_a_file_system_that_takes_no_more(source, tmp_path):
    """An error inside the store's threads: files may not grow past a limit.

    TensorStore's threads print what they like after it; the one message is there all the same.
    """
    out = tmp_path / "out"
    command = [sys.executable, "-m", "jaxspec", "convert", str(source), str(out)]
    limited = ["bash", "-c", 'ulimit -f 39; exec "$@"', "bash", *command]  # of 1024 bytes
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    (message,) = re.findall(r"jaxspec: .*", done.stderr)
    assert message.startswith(f"jaxspec: {out}.partial: the conversion stopped: File too large")
    assert message.endswith("convert again, and it goes on")
    assert not out.exists()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
