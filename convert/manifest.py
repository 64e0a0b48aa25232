"""`manifest.json`: what a converted checkpoint is, and where every claim about it was read."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from jaxspec.config import RotaryConfig, TargetConfig, Yarn
from jaxspec.convert.drafts import DraftFacts
from jaxspec.convert.fields import Claim
from jaxspec.convert.problems import CheckpointError

__all__ = ["FORMAT", "MANIFEST", "Manifest", "is_converted", "read_manifest"]

FORMAT = "jaxspec-checkpoint-1"
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contract of a checkpoint, as `inspect` prints it and a conversion writes it.

    Attributes:
      identity: name and fingerprint of the weights.
      facts: of a target its `TargetConfig`, of a draft its `DraftFacts`.
      leaves: `{"path", "shape", "dtypes", "bytes"}` of each parameter, stacked.
      pieces: `{"name", "layer"}` of each directory under `params/`, in order.
      sources: `{"file", "bytes", "sha256"}`; the hash is None where nothing was converted.
      unused: `{"tensor", "reason"}` of each source tensor that no parameter is built from.
    """

    kind: Literal["target", "draft"]
    identity: str
    facts: TargetConfig | DraftFacts
    claims: dict[str, Claim]
    leaves: list[dict[str, Any]]
    pieces: list[dict[str, Any]]
    sources: list[dict[str, Any]]
    unused: list[dict[str, str]]
    version: str

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        data = {"format": FORMAT} | {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        data["facts"] = dataclasses.asdict(self.facts)
        data["facts"].pop("claims", None)
        data["claims"] = {name: dataclasses.asdict(claim) for name, claim in self.claims.items()}
        return data


def is_converted(directory: Path) -> bool:
    """Whether the directory holds a finished conversion."""
    return (directory / MANIFEST).is_file()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a converted checkpoint.

    Raises:
      CheckpointError: it is none, of another format, or damaged.
    """
    path = directory / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(str(directory), [f"{MANIFEST}: not JSON ({error})"]) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(
            str(directory), [f"{MANIFEST}: format is {found!r}; this version reads {FORMAT!r}"]
        )
    try:
        claims = {name: Claim(**claim) for name, claim in data["claims"].items()}
        read = _target_config if data["kind"] == "target" else _draft_facts
        rest = {
            field.name: data[field.name]
            for field in dataclasses.fields(Manifest)
            if field.name not in ("facts", "claims")
        }
        return Manifest(facts=read(data["facts"], claims), claims=claims, **rest)
    except (KeyError, TypeError) as error:
        raise CheckpointError(str(directory), [f"{MANIFEST}: incomplete ({error})"]) from error


def _rotary(data: dict[str, Any]) -> RotaryConfig:
    return RotaryConfig(**data | {"yarn": data["yarn"] and Yarn(**data["yarn"])})


def _target_config(data: dict[str, Any], claims: dict[str, Claim]) -> TargetConfig:
    eos = tuple(data["eos_token_ids"])
    return TargetConfig(**data | {"rotary": _rotary(data["rotary"]), "eos_token_ids": eos})


def _draft_facts(data: dict[str, Any], claims: dict[str, Claim]) -> DraftFacts:
    ids = data["ids"] and tuple(data["ids"])
    return DraftFacts(**data | {"rotary": _rotary(data["rotary"]), "ids": ids, "claims": claims})
