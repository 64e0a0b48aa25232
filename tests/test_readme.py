"""README.md says what is: its error, its example, its map of files, its axis key, its commands."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from jaxspec import SHIPPED_TARGET, cli, dims

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import front_page  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
PROTOCOL = (ROOT / "benchmarks" / "PROTOCOL.md").read_text("utf-8")
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
RECIPE = (ROOT / "benchmarks" / "train_mini" / "README.md").read_text("utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def command_lines(page: str) -> Iterator[list[str]]:
    """The words of each command in a page's shell blocks, without where its output goes."""
    for block in blocks("sh", page):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                command, words = words[:end], words[end + 1 :]
                yield command[: command.index(">")] if ">" in command else command


def test_wrong_features_error_word_for_word(monkeypatch, capsys):
    (block,) = blocks("console")
    command, _, expected = block.partition("\n")
    assert command == '$ jaxspec generate "def fibonacci(n):" --capture 1,2,4'
    argv = ["jaxspec", "generate", "def fibonacci(n):", "--capture", "1,2,4"]
    monkeypatch.setattr(sys, "argv", [*argv, "--compile-cache", "none"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == expected


def test_map_names_every_file():
    section = README.split("## The files")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:jaxspec|kernels|convert)/\w*)`", section))
    modules = {f"jaxspec/{path.stem}" for path in (ROOT / "jaxspec").glob("[!_]*.py")}
    kernels = {
        f"kernels/{path.parent.name if path.stem == '__init__' else path.stem}"
        for path in [
            *(ROOT / "kernels").glob("[!_]*.py"),
            *(ROOT / "kernels").glob("*/__init__.py"),
        ]
    }
    links = {"jaxspec/kernels", "jaxspec/convert"}
    assert named - links == modules | kernels | {"convert/"}


def test_axis_key_is_that_of_the_code():
    assert dims.__doc__ is not None
    for line in dims.__doc__.splitlines():
        if line.startswith("|"):
            assert line in README


def test_commands_exist():
    known = {command.callback.__name__ for command in cli.app.registered_commands}
    for block in blocks("sh"):
        for name in re.findall(r"\bjaxspec ([\w-]+)", block):
            assert name.replace("-", "_") in known


@pytest.mark.parametrize(
    ("page", "fewest"), [(README, 10), (PROTOCOL, 15), (BENCHMARKS, 1), (RECIPE, 1)]
)
def test_flags_of_commands_exist(page, fewest):
    group, checked = typer.main.get_command(cli.app), 0
    for program, *words in command_lines(page):
        if program == "jaxspec":
            name, *arguments = words
            group.commands[name].make_context(name, arguments)  # raises for a flag there is not
            checked += 1
    assert checked >= fewest


def test_commands_of_the_first_screen():
    """CI runs these two lines as they stand."""
    lines = [line for line in README.splitlines() if line.startswith("python3 -m venv .venv")]
    assert [line.split(".venv/bin/")[-1].split()[0] for line in lines] == ["jaxspec", "pytest"]


def test_figures_are_those_of_the_results():
    for page in front_page.PAGES:
        assert page.read_text("utf-8") == front_page.made(page), "run benchmarks/front_page.py"


def test_front_page_tells_a_figure_that_was_typed(monkeypatch, tmp_path, capsys):
    """A copy of the page in which somebody wrote another number is found, and put right."""
    page = tmp_path / "README.md"
    (one,) = (blocks for path, blocks in front_page.PAGES.items() if path == ROOT / "README.md")
    monkeypatch.setattr(front_page, "PAGES", {page: one})
    monkeypatch.setattr(front_page, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["front_page.py", "--check"])
    page.write_text(README, "utf-8")
    assert front_page.main() == 0
    page.write_text(re.sub(r"becomes \d", "becomes 9", README, count=1), "utf-8")
    assert front_page.main() == 1
    assert "README.md is not what the files" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["front_page.py"])
    assert front_page.main() == 0
    assert page.read_text("utf-8") == README
    page.write_text(README.replace("<!-- end of story -->", ""), "utf-8")
    with pytest.raises(ValueError, match="story"):
        front_page.main()


def test_what_was_not_measured_says_why(monkeypatch):
    read = front_page.read

    def without(name):
        found = read(name)
        if name.startswith("suite"):
            found["parts"]["transformers"] = {"why_not": "--reference-python was not given"}
            found["parts"]["step"] = {"is_correct": False, "error": "MemoryError: too large"}
            del found["parts"]["start"]
        return found

    monkeypatch.setattr(front_page, "read", without)
    table = front_page.figures()
    assert "transformers' | not measured: --reference-python was not given |" in table
    assert table.count("not measured: MemoryError: too large") == 4
    assert table.count("not measured: not asked for") == 2


@pytest.mark.slow
def test_example_runs(capsys):
    (code,) = blocks("python")
    assert len(code.strip().splitlines()) <= 12
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith(names["report"].prompts[0].text)
    assert str(SHIPPED_TARGET).endswith("mini-target")
