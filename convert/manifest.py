"""`manifest.json`: what a converted checkpoint is, and where every claim about it was read."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from jaxspec.config import (
    DraftConfig,
    LatentDraftConfig,
    Llama3Scaling,
    LlamaDraftConfig,
    RotaryConfig,
    TargetConfig,
    Yarn,
)
from jaxspec.contracts import Boundaries
from jaxspec.convert.fields import Claim
from jaxspec.convert.plan import Part
from jaxspec.convert.problems import CheckpointError

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PARTIAL",
    "Manifest",
    "is_converted",
    "part_of",
    "read_manifest",
    "write_whole",
]

FORMAT = "jaxspec-checkpoint-1"
MANIFEST = "manifest.json"
PARTIAL = "partial"
"""Last part of the name of a conversion that is not finished; its plan is in `partial.json`."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contract of a checkpoint, as `inspect` prints it and a conversion writes it.

    Attributes:
      identity: name and fingerprint of the weights.
      config: what the model is made from.
      leaves: `{"path", "shape", "dtypes", "bytes"}` of each parameter, stacked.
      pieces: `{"name", "layer"}` of each directory under `params/`, in order; and `"part"`,
        `{"axis", "first", "count"}`, of those that hold not all of their leaves' rows.
      sources: `{"file", "bytes", "sha256"}`; the hash is None where nothing was converted.
      unused: `{"tensor", "reason"}` of each source tensor that no parameter is built from.
    """

    kind: Literal["target", "draft"]
    identity: str
    config: TargetConfig | DraftConfig
    claims: dict[str, Claim]
    leaves: list[dict[str, Any]]
    pieces: list[dict[str, Any]]
    sources: list[dict[str, Any]]
    unused: list[dict[str, str]]
    version: str

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {"format": FORMAT} | dataclasses.asdict(self)


def part_of(piece: dict[str, Any]) -> Part | None:
    """What of its leaves a piece in a manifest holds; None: all."""
    return Part(**piece["part"]) if "part" in piece else None


def write_whole(path: Path, data: Any) -> None:
    """Writes JSON so that the file is there with all of it, or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def is_converted(directory: Path) -> bool:
    """Whether the directory holds a conversion, rather than a Hugging Face checkpoint.

    Raises:
      CheckpointError: it holds one that was interrupted.
    """
    if (directory / f"{PARTIAL}.json").is_file():
        raise CheckpointError(
            str(directory),
            ["a conversion that was interrupted; convert again, and it goes on where it stopped"],
        )
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
        rest = {
            field.name: data[field.name]
            for field in dataclasses.fields(Manifest)
            if field.name not in ("config", "claims")
        }
        return Manifest(config=_config(data["kind"], data["config"]), claims=claims, **rest)
    except (KeyError, TypeError) as error:
        raise CheckpointError(str(directory), [f"{MANIFEST}: incomplete ({error})"]) from error


def _config(kind: str, data: dict[str, Any]) -> TargetConfig | DraftConfig:
    """The config, back from JSON: nested objects are dataclasses again, lists tuples."""
    stated = data["rotary"]
    yarn, llama3 = stated["yarn"], stated.get("llama3")  # older manifests know nothing of llama3
    rotary = RotaryConfig(
        **stated
        | {
            "yarn": None if yarn is None else Yarn(**yarn),
            "llama3": None if llama3 is None else Llama3Scaling(**llama3),
        }
    )
    if kind == "target":
        eos = tuple(data["eos_token_ids"])
        return TargetConfig(**data | {"rotary": rotary, "eos_token_ids": eos})
    want = data["boundaries"]
    boundaries = Boundaries(**want | {"ids": tuple(want["ids"])})
    draft = LatentDraftConfig if "kv_lora_rank" in data else LlamaDraftConfig
    return draft(**data | {"rotary": rotary, "boundaries": boundaries})
