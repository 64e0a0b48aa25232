"""What the code promises of itself: imports go one way, array names say their axes."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec import dims

ROOT = Path(__file__).parent.parent
FILES = [*(ROOT / "jaxspec").glob("*.py"), *(ROOT / "convert").glob("*.py")]
FILES += (ROOT / "kernels").rglob("*.py")
ANNOTATED = re.compile(r"(?:Float|Int|UInt|Bool)\[Array, '(.*)'\]")
SUFFIX = re.compile(r"_([A-Z][A-Z0-9]*)$")


def key() -> set[str]:
    """The letters that the axis key explains."""
    assert dims.__doc__ is not None
    rows = re.findall(r"^\| ([A-Z](?:, [A-Z])*) +\|", dims.__doc__, re.MULTILINE)
    return {letter for row in rows for letter in row.split(", ")}


def name_of(path: Path) -> str:
    """A file as the README's map has it: `jaxspec/step`, `kernels/mla_attention`."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return f"{folder}/{rest[0]}"


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, inside functions too, submodules named in full."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """What a file imports of this project, as the README's map names it."""
    names = set()
    for module in imports(path):
        package, *rest = module.split(".")
        assert package not in ("kernels", "convert"), f"{path}: {module} without jaxspec before it"
        if package != "jaxspec" or not rest:
            continue
        if rest[0] in ("kernels", "convert"):
            names.add("/".join(rest[:2]))
        elif (ROOT / "jaxspec" / f"{rest[0]}.py").is_file():
            names.add(f"jaxspec/{rest[0]}")
        else:
            names.add("jaxspec/__init__")
    return names - {name_of(path)}


def order() -> dict[str, int]:
    """Row of each file in the README's map; all of `convert/` is one row."""
    section = (ROOT / "README.md").read_text("utf-8").split("## The files")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    names = [re.findall(r"`([\w/]+)`", row.split("|")[1]) for row in rows]
    return {name: index for index, row in enumerate(names) for name in row}


def test_imports_go_one_way():
    """A file imports from rows above its own, and from its own row."""
    row = order()
    wrong = []
    for path in FILES:
        if path.stem in ("__init__", "__main__") and path.parent.name == "jaxspec":
            continue  # the package's face, and the command: they may import anything
        name = name_of(path)
        at = row["convert/"] if name.startswith("convert/") else row.get(name)
        if at is None:
            assert name == "kernels/__init__", name
            continue
        for other in own_imports(path):
            above = row["convert/"] if other.startswith("convert/") else row[other]
            if above > at:
                wrong.append(f"{name} imports {other}, which the README has further down")
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ("kernels/*", r"kernels/"),
        ("jaxspec/dims", r"nothing"),
        ("jaxspec/cache", r"jaxspec/dims"),
        ("jaxspec/tree", r"jaxspec/dims"),
        ("jaxspec/verify", r"kernels/tree_verify|jaxspec/(dims|tree)"),
        ("jaxspec/contracts", r"jaxspec/(errors|dims)"),
        # Neither model knows the other: what they share is a contract.
        ("jaxspec/target", r"kernels/|jaxspec/(?!draft|step|propose|generator)"),
        ("jaxspec/draft", r"kernels/|jaxspec/(?!target|moe|step|propose|generator)"),
        # Conversion needs shapes, never a way to run them.
        ("convert/*", r"convert/|kernels/|jaxspec/(?!step|propose|generator|sampling|checkpoint)"),
    ],
)
def test_who_knows_whom(files, allowed):
    paths = [p for p in FILES if re.fullmatch(files.replace("*", ".*"), name_of(p))]
    assert paths
    for path in paths:
        strangers = {name for name in own_imports(path) if not re.match(allowed, name)}
        assert not strangers, f"{name_of(path)} imports {strangers}"


def test_what_is_not_imported():
    """No other framework anywhere; kernels know jax, numpy and the standard library alone."""
    for path in FILES:
        packages = {module.split(".")[0] for module in imports(path)}
        assert not packages & {"torch", "transformers", "tensorflow"}, path
        if name_of(path).startswith("kernels/"):
            packages -= {"jax", "numpy", "jaxspec", *sys.stdlib_module_names}
            assert not packages, f"{path} imports {packages}"


def parameters() -> Iterator[tuple[str, str, str | None]]:
    """(where, name, jaxtyping axes or None) of every parameter of every function."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    written = argument.annotation and ast.unparse(argument.annotation)
                    axes = ANNOTATED.match(written) if written else None
                    where = f"{name_of(path)}.{node.name}"
                    yield where, argument.arg, axes[1] if axes else None


def test_names_end_in_their_annotated_axes():
    """`latent_BSC: Float[Array, "B S C"]`. Axes that are words, and scalars, need no letters."""
    checked, wrong = 0, []
    for where, name, axes in parameters():
        letters = (axes or "").split()
        if letters and all(re.fullmatch(r"[A-Z]\d?", letter) for letter in letters):
            checked += 1
            suffix = SUFFIX.search(name)
            if suffix is None or suffix[1] != "".join(letters):
                wrong.append(f"{where}: {name} is annotated {axes!r}")
    assert not wrong, wrong
    assert checked > 30, "the annotations are read as they are written"


def test_letters_are_in_the_key():
    known = key()
    assert {"B", "T", "U", "V"} <= known
    wrong = []
    for where, name, _ in parameters():
        suffix = SUFFIX.search(name)
        strange = {c for c in suffix[1] if c.isalpha()} - known if suffix else set()
        if strange:
            wrong.append(f"{where}: {name} has {sorted(strange)}")
    assert not wrong, wrong


def test_attributes_are_plain_words():
    """Fields of classes carry no axis letters: their docstrings and annotations say the axes."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        assert not SUFFIX.search(field.target.id), f"{path}: {field.target.id}"


def test_the_reference_is_independent():
    """What jaxspec is compared with imports neither jaxspec nor jax, and no test either."""
    for path in (ROOT / "tests" / "reference").glob("*.py"):
        for module in imports(path):
            assert module.split(".")[0] not in ("jax", "jaxspec", "flax"), path
            assert not module.startswith("tests.") or module.startswith("tests.reference"), path
