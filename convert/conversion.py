"""The doing of a conversion: what is written, in which order, and how an interrupted one goes on.

Everything is written into `DST.partial`, and one rename makes it `DST`:

    partial.json    the manifest that it will have, without hashes: which conversion this is
    hashes.json     hashes of the source's files, as far as they are known
    params/PIECE/   complete once it has a `files.json`
    manifest.json   comes after all pieces; then the first two go
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import shutil
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxspec.aliases import Progress
from jaxspec.convert.hashes import Hashes
from jaxspec.convert.manifest import FORMAT, MANIFEST, PARTIAL, Manifest, read_manifest, write_whole
from jaxspec.convert.plan import Piece, Reader, Rule, build_piece
from jaxspec.convert.prepare import Prepared
from jaxspec.convert.problems import CheckpointError, Problems
from jaxspec.convert.source import Source
from jaxspec.convert.store import remove_unfinished, writing_to
from jaxspec.convert.stored import is_written, sizes_of

__all__ = ["SOURCE_CONFIG", "copied_from", "files_of", "write_checkpoint"]

RECORD = f"{PARTIAL}.json"
HASHES = "hashes.json"
SOURCE_CONFIG = "source_config.json"
"""The source's `config.json`, as it was: an export says what it writes otherwise."""
COPIED = (
    "*.py",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that go along as they are: a converted target needs its tokenizer, and other engines that
tokenizer's own code, which is never run here."""


def copied_from(directory: Path) -> list[Path]:
    """The files of a checkpoint that go along as they are."""
    return [path for name in COPIED for path in sorted(directory.glob(name)) if path.is_file()]


def files_of(source: Source) -> list[Path]:
    """Every file that a conversion reads."""
    own = [source.directory / name for name in ("config.json", source.index_file)]
    copied = copied_from(source.directory)
    return [
        *(path for path in own if path.is_file()),
        *copied,
        *(source.directory / name for name in source.files),
    ]


def write_checkpoint(
    prepared: Prepared, manifest: Manifest, destination: Path, progress: Progress | None
) -> tuple[Manifest, int]:
    """The manifest with its hashes, and how many pieces an earlier run had written.

    While a piece is written the next one is built, so two are in memory.

    Raises:
      CheckpointError: values of the source that are no numbers (everything written is removed
        then), an earlier run that was another conversion, a file system that has no room or fails
        (everything written is kept).
    """
    partial = destination.with_name(f"{destination.name}.{PARTIAL}")
    try:
        if (partial / MANIFEST).is_file() and not (partial / RECORD).exists():
            # Killed just before the rename.
            found, num_kept = read_manifest(partial), len(manifest.pieces)
            _compare(json.loads((partial / MANIFEST).read_text()), manifest, partial)
            manifest = found
        else:
            manifest, num_kept = _fill(prepared, manifest, partial, progress)
        partial.rename(destination)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno == errno.ENOSPC:
            where += f"; {_Room.of(manifest, partial)}"
        raise CheckpointError(
            str(partial),
            [
                f"the conversion stopped: {error.strerror or error}{where}; what is written so far "
                "is kept: with that put right, convert again, and it goes on"
            ],
        ) from error
    return manifest, num_kept


def _fill(
    prepared: Prepared, manifest: Manifest, partial: Path, progress: Progress | None
) -> tuple[Manifest, int]:
    """Writes what `partial` lacks; the same two things."""
    source, rules = prepared.source, prepared.rules_by_piece()
    kept = _resume(manifest, partial)
    work = _Work(source, rules, kept, progress)
    _check_room(manifest, partial)
    problems = Problems(str(source.directory))
    reader = prepared.reader(problems)
    with (
        Hashes(_in_order(source, rules), partial / HASHES) as hashes,
        writing_to(partial / "params") as write,
        contextlib.closing(_one_ahead(_pieces(prepared, reader, hashes, kept))) as pieces,
    ):
        hashes.recheck()
        for piece in pieces:
            if not problems.found:
                write(piece)
            reader.give_back(piece)
            work.done(piece.name)
            del piece  # before the one after the next is built
        if not problems.found:
            digests = hashes.result()
    if problems.found:
        shutil.rmtree(partial)
        problems.raise_any()
    for path in copied_from(source.directory):
        shutil.copyfile(path, partial / path.name)
    shutil.copyfile(source.directory / "config.json", partial / SOURCE_CONFIG)
    sources = [entry | {"sha256": digests[entry["file"]]} for entry in manifest.sources]
    manifest = dataclasses.replace(manifest, sources=sources)
    write_whole(partial / MANIFEST, manifest.to_dict())
    (partial / HASHES).unlink()
    (partial / RECORD).unlink()  # from here on it is complete, but for its name
    return manifest, len(kept)


class _Work:
    """Bytes of the source that are converted, and that there are."""

    def __init__(
        self,
        source: Source,
        rules: dict[str, list[Rule]],
        kept: set[str],
        progress: Progress | None,
    ) -> None:
        self._bytes = {
            name: sum(rule.source_bytes(source) for rule in of_piece)
            for name, of_piece in rules.items()
        }
        self.done_bytes = sum(self._bytes[name] for name in kept)
        self.total_bytes = sum(self._bytes.values())
        self._progress = progress
        self._report()

    def done(self, name: str) -> None:
        self.done_bytes += self._bytes[name]
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress("converting", self.done_bytes, self.total_bytes)


def _pieces(prepared: Prepared, reader: Reader, hashes: Hashes, kept: set[str]) -> Iterator[Piece]:
    """The pieces that are not kept, each built when the files it comes from are hashed."""
    source, rules = prepared.source, prepared.rules_by_piece()
    wanted = {name: _tensors_read(rules[name]) for name in rules if name not in kept}
    last = {tensor: name for name, tensors in wanted.items() for tensor in tensors}
    for name, tensors in wanted.items():
        hashes.wait_for(_files_of(source, tensors))
        yield build_piece(rules[name], reader)
        source.uncache(tensor for tensor in tensors if last[tensor] == name)


def _one_ahead[Item](items: Iterator[Item]) -> Generator[Item, None, None]:
    """The same items; while one is in use, the next is made in another thread."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
            del item


def _tensors_read(rules: Iterable[Rule]) -> dict[str, None]:
    """Names of the tensors that these rules read, once each."""
    return dict.fromkeys(itertools.chain.from_iterable(rule.names for rule in rules))


def _files_of(source: Source, tensors: Iterable[str]) -> dict[str, None]:
    """Names of the files that hold these tensors, in order, once each."""
    return dict.fromkeys(source.tensors[name].file for name in tensors)


def _in_order(source: Source, rules: dict[str, list[Rule]]) -> list[Path]:
    """Every file once: the small ones, then shards as they are needed, then what no rule reads."""
    read = _files_of(source, _tensors_read(itertools.chain.from_iterable(rules.values())))
    all_files = {path.name: path for path in files_of(source)}
    small = [name for name in all_files if name not in source.files]
    return [all_files[name] for name in dict.fromkeys((*small, *read, *all_files))]


def _resume(manifest: Manifest, partial: Path) -> set[str]:
    """Names of the pieces that `partial` holds already, of the same conversion.

    Raises:
      CheckpointError: it holds another one.
    """
    record, params = partial / RECORD, partial / "params"
    if not record.exists() and not params.exists():
        partial.mkdir(parents=True, exist_ok=True)
        write_whole(record, manifest.to_dict())
        return set()
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        found = None
    _compare(found, manifest, partial)
    remove_unfinished(params)
    return {piece["name"] for piece in manifest.pieces if is_written(params, piece["name"])}


def _compare(found: Any, manifest: Manifest, partial: Path) -> None:
    """Raises CheckpointError unless a manifest found on disk is of this conversion."""
    plan = json.loads(json.dumps(manifest.to_dict()))
    if isinstance(found, dict) and isinstance(found.get("sources"), list):
        found = found | {"sources": [one | {"sha256": None} for one in found["sources"]]}
    if found != plan:
        raise CheckpointError(
            str(partial),
            [
                f"is left from another conversion ({_difference(found, plan)}); remove it and "
                "convert again, or convert as it was begun"
            ],
        )


def _difference(found: Any, plan: dict[str, Any]) -> str:
    """The first thing in which two plans differ, in words."""
    if not isinstance(found, dict):
        return f"its {RECORD} cannot be read"
    if found.get("format") != FORMAT:
        return f"of format {found.get('format')!r}; this version writes {FORMAT!r}"
    if found.get("version") != plan["version"]:
        return f"begun by jaxspec {found.get('version')}; this is {plan['version']}"
    then, now = ({one["file"]: one["bytes"] for one in p["sources"]} for p in (found, plan))
    for file in sorted(then.keys() | now.keys()):
        if then.get(file) != now.get(file):
            sizes = [
                f"{n} bytes" if n is not None else "not there"
                for n in (then.get(file), now.get(file))
            ]
            return f"of a source that has changed since: {file} was {sizes[0]}, is {sizes[1]}"
    for name in sorted(found["claims"].keys() | plan["claims"].keys()):
        then, now = (p["claims"].get(name, {}).get("value") for p in (found, plan))
        if then != now:
            return f"{name} was {then}, is {now}"
    if found["identity"] != plan["identity"]:
        return f"of a source that has changed since: {found['identity']}, is {plan['identity']}"
    return f"they differ in {', '.join(key for key in plan if found.get(key) != plan[key])}"


@dataclasses.dataclass(frozen=True)
class _Room:
    """Bytes that are still to be written, and that the disk has free."""

    needed: int
    free: int

    @classmethod
    def of(cls, manifest: Manifest, partial: Path) -> "_Room":
        params = partial / "params"
        names = [piece["name"] for piece in manifest.pieces if is_written(params, piece["name"])]
        written = sum(sum(sizes_of(params / name).values()) for name in names)
        whole = sum(leaf["bytes"] for leaf in manifest.leaves)
        return cls(max(0, whole - written), shutil.disk_usage(partial).free)

    def __str__(self) -> str:
        return (
            f"{self.needed / 1e9:.3f} GB are to be written and its disk has {self.free / 1e9:.3f} "
            "GB free"
        )


def _check_room(manifest: Manifest, partial: Path) -> None:
    """Raises CheckpointError where the disk cannot hold what is to be written."""
    room = _Room.of(manifest, partial)
    if room.needed > room.free:
        raise CheckpointError(str(partial), [f"{room}; make room, or choose another destination"])
