"""What commands that run models begin with: the other processes, the mesh, the tree."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from jaxspec.aliases import CacheLayout
from jaxspec.errors import InputError
from jaxspec.flags import DEFAULT_TREE
from jaxspec.version import version

if TYPE_CHECKING:
    from jaxspec.config import MeshConfig, TreeConfig

__all__ = ["join", "mesh_of", "tree_of", "trees_of"]

OWN = ("coordinator", "process_index", "join_timeout", "as_json", "compile_cache")
"""What each of several processes may be given in its own way."""


def join(context: typer.Context) -> None:
    """Joins the other processes, where the flags say that there are some.

    Raises:
      InputError: the others do not come, or were given other flags.
    """
    flags = context.params
    given = (flags["coordinator"], flags["num_processes"], flags["process_index"])
    timeout_s = flags["join_timeout"]
    if given == (None, None, None):
        if timeout_s is not None:
            raise InputError(
                "--join-timeout without --coordinator: there are no others to wait for"
            )
        return
    if None in given:
        raise InputError(
            "--coordinator, --num-processes and --process-index are given together or not at all"
        )
    if flags["mesh"] is None:
        raise InputError("--coordinator without --mesh: several processes share a mesh")
    from jaxspec import processes

    processes.join(
        processes.Processes(*given, processes.JOIN_TIMEOUT_S if timeout_s is None else timeout_s)
    )
    known = [param for param in context.command.params if param.name in flags]
    shared = {flag.opts[0]: str(flags[flag.name]) for flag in known if flag.name not in OWN}
    processes.check_agreement(shared | {"version of jaxspec": version()})


def mesh_of(text: str | None, cache: CacheLayout | None) -> "MeshConfig | None":
    """The mesh, if one was asked for."""
    from jaxspec.config import MeshConfig

    if text is None:
        if cache is not None:
            raise InputError(f"--cache {cache} is of a mesh: give one with --mesh, as in 1x8")
        return None
    return MeshConfig.parse(text, cache or "replicated")


def tree_of(
    text: str | None, sglang: tuple[int | None, int | None, int | None], has_draft: bool
) -> "TreeConfig | None":
    """The tree, from whichever of its two spellings was used."""
    from jaxspec.config import TreeConfig

    steps, topk, nodes = sglang
    is_sglang = any(value is not None for value in sglang)
    if not has_draft:
        _check_no_tree(text is not None or is_sglang)
        return None
    if text is not None and is_sglang:
        raise InputError("--tree and --speculative-... say the same thing: give one of the two")
    if not is_sglang:
        return TreeConfig.parse(text or DEFAULT_TREE)
    if steps is None or topk is None or nodes is None:
        raise InputError(
            "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens "
            "are given together or not at all"
        )
    tree = TreeConfig(steps, topk, nodes)
    tree.check()
    return tree


def trees_of(texts: Sequence[str] | None, has_draft: bool) -> "tuple[TreeConfig, ...]":
    """The trees of a --tree that may be repeated; none without a draft."""
    from jaxspec.config import TreeConfig

    if not has_draft:
        _check_no_tree(bool(texts))
        return ()
    return tuple(map(TreeConfig.parse, texts or [DEFAULT_TREE]))


def _check_no_tree(is_given: bool) -> None:
    if is_given:
        raise InputError("--draft none decodes plainly: there is no tree to give a shape to")
