"""Whether a target and a draft, each of either form, belong together."""

from pathlib import Path

from jaxspec.config import DraftConfig, TargetConfig
from jaxspec.convert.draft_configs import UNTIED
from jaxspec.convert.manifest import Manifest, is_converted, read_manifest
from jaxspec.convert.prepare import Prepared, TargetCard, tie
from jaxspec.convert.problems import Problems
from jaxspec.convert.write import ConvertConfig, prepare

__all__ = ["check_pair", "fingerprint_of", "read_checkpoint"]


def read_checkpoint(directory: Path) -> Prepared | Manifest:
    """What a checkpoint of either form says of itself.

    Raises:
      CheckpointError: everything that is wrong with it, as far as headers show.
    """
    if is_converted(directory):
        return read_manifest(directory)
    return prepare(directory, ConvertConfig())


def check_pair(
    one: Prepared | Manifest, other: Prepared | Manifest, where: str, problems: Problems
) -> None:
    """Makes a problem of two checkpoints that are not a target and a draft of it.

    A draft that names no target belongs to every one that its shapes allow. One that was tied to a
    target belongs to those weights, under whatever name: exported flat, Kimi-K2.5 has another one.

    Args:
      where: what the other one is called.
    """
    if one.kind == other.kind:
        problems.add(f"a {one.kind}, and so is {where}: a pair is a target and a draft")
        return
    target, draft = (one, other) if one.kind == "target" else (other, one)
    assert isinstance(target.config, TargetConfig), "kinds are of their configs"
    assert isinstance(draft.config, DraftConfig), "kinds are of their configs"
    want = draft.config.boundaries
    if want.target == UNTIED:
        found = Problems(where)
        tie(draft.config, TargetCard(target.identity, target.config), found, "by --pair")
        for message in found.found:
            problems.add(f"{where} is no {other.kind} for it: {message}")
    elif fingerprint_of(want.target) != fingerprint_of(target.identity):
        problems.add(
            f"{where} is no {other.kind} for it: the draft {draft.identity} belongs to "
            f"{want.target} [{want.origin}], and the target is {target.identity}"
        )


def fingerprint_of(identity: str) -> str:
    """The weights' fingerprint in an identity, `name@fingerprint`; "" where there is none."""
    return identity.partition("@")[2]
