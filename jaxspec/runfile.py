"""Run files: what a run gave, request by request, in the JSON lines that `compare` reads."""

import json
import os
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError
from jaxspec.generator import Completion
from jaxspec.report import PromptReport

__all__ = ["FORMAT", "RunFile", "entry_of"]

FORMAT = "jaxspec-run-1"


class RunFile:
    """A file that a run is appended to, and that an interrupted run goes on with.

    Attributes:
      entries: the requests in it, by id.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Of a new file, or of one that this very run began and whose last line may be cut off.

        Args:
          header: engine, version, flags, target_hash, draft_hash and machine: what must be equal
            for two parts of a file to be one run.

        Raises:
          InputError: the file is no run file, or of another run.
        """
        self._path, self.entries = path, {}
        header = {"format": FORMAT, **header}
        try:
            content = path.read_bytes() if path.exists() else b""
            if content:
                whole, _, cut_off = content.rpartition(b"\n")
                first, *others = whole.decode("utf-8", errors="replace").split("\n")
                self._check(first, header)
                self.entries = {entry["id"]: entry for entry in map(json.loads, others)}
                os.truncate(path, len(content) - len(cut_off))
            else:
                path.write_text(json.dumps(header) + "\n", "utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from error

    def append(self, entry: dict[str, Any]) -> None:
        """Writes a request's entry, at once."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self.entries[entry["id"]] = entry

    def completion(self, id: str, prompt_ids: tuple[int, ...]) -> Completion | None:
        """What the file already holds of a request, or None.

        Raises:
          InputError: it holds a request of that id with another prompt.
        """
        entry = self.entries.get(id)
        if entry is None:
            return None
        if tuple(entry["prompt_ids"]) != prompt_ids:
            raise InputError(
                f"{self._path}: request {id!r} in it has another prompt than the one given now; "
                "name another file"
            )
        return Completion(
            tuple(entry["output_ids"]),
            entry["finish"],
            tuple(entry["accepted"]),
            entry["ttft_ms"],
            entry["decode_ms"],
        )

    def _check(self, line: str, header: dict[str, Any]) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise InputError(f"{self._path}: exists and is no {FORMAT} file; name another one")
        for key in header.keys() | found.keys():
            if found.get(key) != header.get(key):
                raise InputError(
                    f"{self._path}: holds another run, which cannot be gone on with: {key} is "
                    f"{found.get(key)!r} there and {header.get(key)!r} here; name another file"
                )


def entry_of(report: PromptReport) -> dict[str, Any]:
    """A request's line."""
    done = report.completion
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
    }
