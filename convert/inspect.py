"""`inspect`: the contract of a checkpoint, converted or not, without reading its weights."""

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

from jaxspec.config import DraftConfig, TargetConfig
from jaxspec.convert.manifest import Manifest, is_converted, read_manifest
from jaxspec.convert.write import ConvertConfig, manifest_of, prepare

__all__ = ["Inspection", "inspect"]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a checkpoint is, and where each claim about it was read."""

    directory: Path
    form: Literal["converted", "hugging-face"]
    manifest: Manifest

    @property
    def num_parameters(self) -> int:
        """Weights, packed ones counted one by one; scales and the vocabulary map are none."""
        config, total = self.manifest.config, 0
        for leaf in self.manifest.leaves:
            path, shape = leaf["path"], leaf["shape"]
            if path.endswith("_scales") or path == "target_of_draft":
                continue
            if path.endswith("_words"):
                assert isinstance(config, TargetConfig)
                is_down = "down" in path
                width = config.moe_intermediate_size if is_down else config.hidden_size
                shape = [*shape[:-1], width]
            total += math.prod(shape)
        return total

    def to_dict(self) -> dict[str, Any]:
        """The contract as JSON: its heads first, then every claim."""
        manifest, config = self.manifest, self.manifest.config
        bytes_of: collections.Counter[str] = collections.Counter()
        for leaf in manifest.leaves:
            bytes_of["+".join(leaf["dtypes"])] += leaf["bytes"]
        if isinstance(config, DraftConfig):
            boundaries = dataclasses.asdict(config.boundaries)
            vocabularies = {"target": config.vocab_size, "draft": config.draft_vocab_size}
        else:
            layers = config.num_hidden_layers
            boundaries = {"ids": list(range(layers + 1)), "width": config.hidden_size}
            vocabularies = {"target": config.vocab_size}
        unused = collections.Counter(entry["reason"] for entry in manifest.unused)
        return {
            "directory": str(self.directory),
            "form": self.form,
            "kind": manifest.kind,
            "identity": manifest.identity,
            "boundaries": boundaries,
            "vocabularies": vocabularies,
            "rotary": dataclasses.asdict(config.rotary),
            "parameters": self.num_parameters,
            "bytes": sum(bytes_of.values()),
            "bytes_by_dtype": dict(bytes_of),
            "unused": dict(unused),
            "config": dataclasses.asdict(config),
            "claims": {name: dataclasses.asdict(claim) for name, claim in manifest.claims.items()},
        }


def inspect(directory: Path, config: ConvertConfig | None = None) -> Inspection:
    """The contract of the checkpoint in a directory.

    Args:
      config: how a directory that is not converted is read.

    Raises:
      CheckpointError: everything that is wrong with it, as far as headers show.
    """
    if is_converted(directory):
        return Inspection(directory, "converted", read_manifest(directory))
    prepared = prepare(directory, config or ConvertConfig())
    return Inspection(directory, "hugging-face", manifest_of(prepared))
