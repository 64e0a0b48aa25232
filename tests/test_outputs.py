"""Where commands may write, and whose run it is that lies there."""

import re

import pytest

from jaxspec.errors import InputError
from jaxspec.outputs import check_file, check_folder, check_same_run


def test_files_that_can_be(tmp_path):
    (tmp_path / "there").write_text("kept")
    for name in ("there", "new"):
        check_file(tmp_path / name, name)
    assert (tmp_path / "there").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is left behind"


def test_files_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path, "cannot be written (Is a directory)"),
        (tmp_path / "no" / "file", f"there is no directory {tmp_path / 'no'}"),
        (tmp_path / "file" / "inner", "there is no directory"),
    ):
        with pytest.raises(InputError, match=re.escape(f"--out it: {reason}")):
            check_file(path, "--out it")


def test_a_folder_in_which_nothing_can_be_made(tmp_path, monkeypatch):
    def full(dir):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    for check, path in ((check_folder, tmp_path), (check_file, tmp_path / "new")):
        with pytest.raises(InputError, match=r"--plot it: cannot be written \(No space left on de"):
            check(path, "--plot it")


def test_the_same_run(tmp_path):
    """By what is in it, however deep; what is left out is None."""
    about = {"machine": "m", "flags": {"trees": ["a"], "mesh": None}}
    check_same_run(tmp_path, about, {"machine": "m", "flags": {"trees": ["a"]}})
    for wanted, said in (
        ({**about, "machine": "n"}, "machine is 'm' there and 'n' here"),
        ({**about, "flags": {"trees": ["b"]}}, "flags.trees is ['a'] there and ['b'] here"),
        ({"machine": "m"}, "flags.trees is ['a'] there and None here"),
    ):
        with pytest.raises(InputError, match=re.escape(f"{tmp_path}: of another run, ")) as raised:
            check_same_run(tmp_path, about, wanted)
        assert said in str(raised.value)
