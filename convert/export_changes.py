"""What an exported `config.json` says otherwise than the one that the checkpoint came with."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxspec.convert import known_keys

__all__ = ["config_changes"]

DRAFT_PARTS = ("eagle_config", "transformer_layer_config")
"""Objects in which some layouts keep what others have at the top."""
OTHER_NAMES = {"dtype": "torch_dtype", "use_aux_norm": "fc_norm"}
ABSENT = (None, False, [], {})
"""What a missing key means as well."""


def config_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], kind: Literal["target", "draft"]
) -> tuple[str, ...]:
    """A line for each value that differs, old and new; one for all keys that nothing reads.

    Where a value stands, and what a key is called, is the layout's and no difference.
    """
    parts = DRAFT_PARTS if "text_config" in after else (*DRAFT_PARTS, "text_config")
    old, new = _facts(before, parts), _facts(after, parts)
    unread = sorted(key for key in old.keys() - new.keys() if key in known_keys.UNREAD[kind])
    lines = list(_changes({key: old[key] for key in old if key not in unread}, new, ""))
    if unread:
        lines.append(f"left out, since no weight or product depends on it: {', '.join(unread)}")
    return tuple(f"config.json: {line}" for line in lines)


def _facts(config: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """The values under one name each, wherever the layout has them; absent ones left out."""
    facts: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in ("rope_scaling", "rope_parameters"):
            value = _facts(value, parts)
            if key in parts:
                facts = value | facts
                continue
        facts[OTHER_NAMES.get(key, key)] = value
    rotary = dict(facts.pop("rope_scaling", None) or {})
    rotary |= facts.pop("rope_parameters", None) or {}
    if "rope_theta" in rotary:
        facts["rope_theta"] = rotary.pop("rope_theta")
    if "rope_type" in rotary:
        rotary["type"] = rotary.pop("rope_type")
    if rotary.get("type") not in (None, "default"):
        facts["rope_scaling"] = rotary
    return {key: value for key, value in facts.items() if value not in ABSENT}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], place: str) -> Iterator[str]:
    for key, was in old.items():
        now = new.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _changes(was, now, f"{place}{key}.")
        elif was not in (now, [now]) and now != [was]:
            said = "is not written" if key not in new else f"is {json.dumps(now)}"
            yield f"{place}{key} was {json.dumps(was)}, {said}"
