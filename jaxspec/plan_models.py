"""What is planned: the models as shapes, from configs alone."""

import dataclasses
from pathlib import Path

from jaxspec.aliases import PathLike
from jaxspec.checkpoint import locate
from jaxspec.config import DraftConfig, MeshConfig, Numerics, TargetConfig, TreeConfig
from jaxspec.convert.configs import read_target_config
from jaxspec.convert.draft_configs import UNTIED, read_draft
from jaxspec.convert.manifest import is_converted, read_manifest
from jaxspec.convert.prepare import TargetCard, abstract_draft, abstract_target, tie
from jaxspec.convert.problems import CheckpointError, Problems
from jaxspec.convert.source import Source
from jaxspec.draft import Draft
from jaxspec.environment import KIMI_DRAFT_CONFIG, KIMI_TARGET_CONFIG
from jaxspec.hardware import Assumptions
from jaxspec.sharding import check_draft, check_target
from jaxspec.target import Target

__all__ = ["PlanConfig", "abstract_models"]

MESH = MeshConfig(1, 8)
CONTEXT = 32768


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """What is planned.

    Attributes:
      target: a checkpoint's directory, or its config.json; None is Kimi-K2.5's.
      draft: likewise; None is the published Llama-type draft for Kimi-K2.5, "none" is none.
      trees: a step is planned with each.
      context_length: tokens that every sequence has room for, and has filled.
    """

    target: PathLike | None = None
    draft: PathLike | None = None
    mesh: MeshConfig = MESH
    trees: tuple[TreeConfig, ...] = (TreeConfig(3, 1, 4),)
    batch_size: int = 1
    context_length: int = CONTEXT
    assumed: Assumptions = dataclasses.field(default_factory=Assumptions)


def abstract_models(config: PlanConfig) -> tuple[Target, Draft | None]:
    """The models as shapes, on the plan's mesh, from what their configs say.

    Of a draft's config alone, nothing says whether it has an embedding and a head of its own: it
    is taken to have both, which is the most it can take.

    Raises:
      InputError: a config that cannot be read, or that the mesh does not cut evenly.
    """
    numerics = Numerics("bfloat16", implementation="mosaic", mesh=config.mesh)
    where = _place(config.target or KIMI_TARGET_CONFIG)
    problems = Problems(str(where))
    if is_converted(where):
        manifest = read_manifest(where)
        of_target, identity = manifest.config, manifest.identity
    else:
        facts = read_target_config(Source(where, needs_weights=False), problems)
        of_target, identity = facts.config, f"{facts.model_type}@config"
    if not isinstance(of_target, TargetConfig):
        raise CheckpointError(str(where), ["this is a draft, not a target"])
    check_target(config.mesh, of_target)
    target = abstract_target(of_target, numerics, identity)
    if config.draft == "none":
        return target, None
    of_draft, identity = _draft_config(_place(config.draft or KIMI_DRAFT_CONFIG), target)
    check_draft(config.mesh, of_draft)
    return target, abstract_draft(of_draft, numerics, identity)


def _draft_config(where: Path, target: Target) -> tuple[DraftConfig, str]:
    """A draft's config, tied to the target, and the draft's identity."""
    problems = Problems(str(where))
    if is_converted(where):
        manifest = read_manifest(where)
        found, identity = manifest.config, manifest.identity
    else:
        has_weights = any((*where.glob("*.safetensors"), *where.glob("pytorch_model*.bin")))
        found, _ = read_draft(Source(where, needs_weights=has_weights), problems)
        identity = "eagle3@config"
        if not has_weights:
            found = dataclasses.replace(found, has_embedding=True, has_head=True)
    if not isinstance(found, DraftConfig):
        raise CheckpointError(str(where), ["this is a target, not a draft"])
    if found.boundaries.target == UNTIED:
        found = tie(found, TargetCard(target.identity, target.config), problems, "to plan")
    problems.raise_any()
    return found, identity


def _place(path: PathLike) -> Path:
    """The directory of a checkpoint; that of a config.json, for the file itself."""
    file = Path(path)
    return file.parent if file.name == "config.json" and file.is_file() else locate(path)
