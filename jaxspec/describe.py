"""What `inspect` prints for a reader: the contract of a checkpoint, claim by claim."""

import json
from typing import Any

from jaxspec.convert.inspect import Inspection

__all__ = ["describe"]

NO_END = "nothing: no config names an end-of-sequence id"


def describe(inspection: Inspection) -> str:
    """The checkpoint's heads, then every claim with where it was read."""
    facts = inspection.to_dict()
    boundaries, vocabularies = facts["boundaries"], facts["vocabularies"]
    by_dtype = ", ".join(f"{name} {_size(n)}" for name, n in facts["bytes_by_dtype"].items())
    heads = {
        "parameters": f"{facts['parameters']:,} in {_size(facts['bytes'])} ({by_dtype})",
        "boundaries": f"{_ids(boundaries['ids']) or 'none stated'}, "
        f"{boundaries['width']} wide each",
        "vocabulary": ", ".join(f"{size} ({whose})" for whose, size in vocabularies.items()),
    }
    if facts["kind"] == "target":
        heads["ends with"] = _ids(facts["config"]["eos_token_ids"]) or NO_END
    lines = [f"{facts['identity']}: a {facts['kind']}, {facts['form']} layout"]
    lines += [f"  {name:<11}{text}" for name, text in heads.items()]
    rows = [(n, json.dumps(c["value"]), c["origin"]) for n, c in facts["claims"].items()]
    wide = max(len(name) for name, _, _ in rows)
    lines += [
        "claims",
        *(f"  {name:<{wide}}  {value}   [{origin}]" for name, value, origin in rows),
    ]
    if facts["unused"]:
        counts = facts["unused"].items()
        lines += ["not used", *(f"  {count} tensors: {reason}" for reason, count in counts)]
    return "\n".join(lines)


def _ids(ids: list[int]) -> str:
    """Ids as they are, or their ends where they are all there are; none at all is no text."""
    if len(ids) > 3 and list(ids) == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]} to {ids[-1]}"
    return ", ".join(map(str, ids))


def _size(count: Any) -> str:
    """Bytes in a unit that leaves at least one digit before the point."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable: the last unit takes any number")
