"""Run files: what a run gave, request by request, in the JSON lines that `compare` reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxspec.errors import InputError
from jaxspec.report import PromptReport
from jaxspec.requests import Completion

__all__ = ["FORMAT", "LinesFile", "RunFile", "entry_of"]

FORMAT = "jaxspec-run-1"


class LinesFile:
    """JSON lines that a run is appended to, and that an interrupted run goes on with.

    Nothing is written before the first entry, and the first line says whose entries they are.

    Attributes:
      unit: what a line is of.
    """

    unit = "part"

    def __init__(self, path: Path, kind: str, header: dict[str, Any]) -> None:
        """Of a new file, or of one that this very run began and whose last line may be cut off.

        Args:
          kind: the format's name.
          header: what must be equal for two parts of a file to be one run.

        Raises:
          InputError: the file is not of this kind, or of another run, or has no place to be.
        """
        self._path, self._kind, self._header = path, kind, {"format": kind, **header}
        self._size = 0
        if not path.parent.is_dir():
            raise InputError(f"{path}: there is no directory {path.parent}")
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        if content:
            whole, _, cut_off = content.rpartition(b"\n")
            first, *others = whole.decode("utf-8", errors="replace").split("\n")
            self._check(first)
            for number, line in enumerate(others, start=2):
                try:
                    self._keep(json.loads(line))
                except (ValueError, TypeError, KeyError) as error:
                    raise InputError(
                        f"{path}, line {number}: damaged ({error!r}); remove the line, and its "
                        f"{self.unit} is run again"
                    ) from error
            self._size = len(content) - len(cut_off)

    def _keep(self, entry: Any) -> None:
        """Takes note of an entry that is in the file now."""
        raise NotImplementedError

    def append(self, entry: dict[str, Any]) -> None:
        """Writes an entry, at once; the first one brings the header with it.

        Raises:
          InputError: the file cannot be written.
        """
        lines = [entry] if self._size else [self._header, entry]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            with self._path.open("r+b" if self._size else "wb") as file:
                file.truncate(self._size)
                file.seek(self._size)
                self._size += file.write(text.encode())
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written ({error.strerror})") from error
        self._keep(entry)

    def _check(self, line: str) -> None:
        header = self._header
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("format") != self._kind:
            raise InputError(f"{self._path}: exists and is no {self._kind} file; name another one")
        there, here = _flat(found), _flat(header)
        for key in sorted(here.keys() | there.keys()):
            if there.get(key) != here.get(key):
                raise InputError(
                    f"{self._path}: holds another run, which cannot be gone on with: {key} is "
                    f"{there.get(key)!r} there and {here.get(key)!r} here; name another file"
                )


class RunFile(LinesFile):
    """The file of a run of requests.

    Its header: engine, version, flags, target_hash, draft_hash and machine.
    """

    unit = "request"

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """See `LinesFile`; raises InputError likewise."""
        self._done: dict[str, tuple[dict[str, Any], Completion]] = {}
        super().__init__(path, FORMAT, header)

    def _keep(self, entry: dict[str, Any]) -> None:
        self._done[entry["id"]] = _completion_in(entry)

    def completion(
        self,
        id: str,
        prompt_ids: tuple[int, ...],
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> Completion | None:
        """What the file already holds of a request, or None.

        Raises:
          InputError: it holds a request of that id with another prompt or other settings.
        """
        if id not in self._done:
            return None
        asked, completion = self._done[id]
        for name, now in _asked(prompt_ids, settings).items():
            if asked[name] != now:
                raise InputError(
                    f"{self._path}: request {id!r} in it has another {name} than the one given "
                    "now; name another file"
                )
        return completion


def _flat(header: dict[str, Any]) -> dict[str, Any]:
    """A header with each flag by itself."""
    flags = header.get("flags")
    of_flags = flags if isinstance(flags, dict) else {}
    rest = {name: value for name, value in header.items() if value is not of_flags}
    return rest | {f"flag {name}": value for name, value in of_flags.items()}


def _asked(prompt_ids: Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, as it is after a turn as JSON."""
    return json.loads(json.dumps({"prompt": list(prompt_ids), "sampling": dict(settings)}))


def _completion_in(entry: dict[str, Any]) -> tuple[dict[str, Any], Completion]:
    """What a request's line asked for, and its completion."""
    completion = Completion(
        tuple(entry["output_ids"]),
        entry["finish"],
        tuple(entry.get("accepted", ())),  # not every engine says what it accepted
        entry["ttft_ms"],
        entry["decode_ms"],
        entry.get("error"),
    )
    return _asked(entry["prompt_ids"], entry.get("sampling", {})), completion


def entry_of(report: PromptReport) -> dict[str, Any]:
    """A request's line; text, settings of its own and an error stand there where it has some."""
    done = report.completion
    extra = {"sampling": dict(report.settings), "error": done.error}
    text = {} if report.text is None else {"text": report.text}
    return {
        "id": report.id,
        "category": report.category,
        "prompt_ids": list(report.prompt_ids),
        "output_ids": list(done.tokens),
        "finish": done.finish,
        "verify_steps": len(done.accepted),
        "accepted": list(done.accepted),
        "ttft_ms": done.prefill_ms,
        "decode_ms": done.decode_ms,
        **text,
        **{name: value for name, value in extra.items() if value},
    }
