"""Loading a target or a draft: from a Hugging Face directory or a converted one, the same model."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.aliases import Convention, PathLike, Progress
from jaxspec.config import DraftConfig, Numerics, TargetConfig
from jaxspec.convert.configs import TRANSFORMERS_EPS, LatentNormEps
from jaxspec.convert.drafts import NUM_DEFAULT_BOUNDARIES, UNTIED, is_draft
from jaxspec.convert.manifest import Manifest, is_converted, read_manifest
from jaxspec.convert.plan import Piece
from jaxspec.convert.prepare import (
    Experts,
    Prepared,
    TargetCard,
    abstract_draft,
    abstract_target,
    prepare_draft,
    prepare_target,
    tie,
)
from jaxspec.convert.problems import CheckpointError, Problems
from jaxspec.convert.source import Source
from jaxspec.draft import Draft
from jaxspec.environment import hub_cache
from jaxspec.sharding import Devices, check_draft, check_target
from jaxspec.target import Target

__all__ = ["CheckpointError", "load_draft", "load_target", "locate"]

DEFAULT_NUMERICS = Numerics()


def locate(path: PathLike) -> Path:
    """The directory that a path, or the id of a repository in the local hub cache, means.

    Raises:
      CheckpointError: there is neither. Nothing is downloaded.
    """
    directory = Path(path)
    if directory.is_dir():
        return directory
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        repository = hub_cache() / f"models--{str(path).replace('/', '--')}"
        main = repository / "refs" / "main"
        if main.is_file():
            return repository / "snapshots" / main.read_text().strip()
    raise CheckpointError(
        str(path), [f"no such directory, and no such repository in the local cache {hub_cache()}"]
    )


def load_target(
    path: PathLike,
    numerics: Numerics = DEFAULT_NUMERICS,
    *,
    experts: Experts = "stored",
    latent_norm_eps: LatentNormEps | None = None,
    progress: Progress | None = None,
) -> Target:
    """The target in a directory, in `numerics.dtype`; packed experts stay packed.

    Args:
      experts: "int4" quantises plain or fp8 routed experts on the way.
      latent_norm_eps: None takes what the conversion recorded, or the config's own.

    Raises:
      CheckpointError: everything that is wrong with the checkpoint.
    """
    directory = locate(path)
    found = _open(directory, "target", lambda source: prepare_target(source, experts))
    config = found.config
    assert isinstance(config, TargetConfig)
    if experts == "int4" and config.num_bits is None:
        raise CheckpointError(
            str(directory), ["converted with plain experts; convert it again with --experts int4"]
        )
    eps = {
        None: config.latent_norm_eps,
        "transformers": TRANSFORMERS_EPS,
        "rms_norm_eps": config.rms_norm_eps,
    }
    config = dataclasses.replace(config, latent_norm_eps=eps[latent_norm_eps])
    if numerics.mesh is not None:
        check_target(numerics.mesh, config)
    model = abstract_target(config, numerics, found.identity)
    return _fill(model, directory, found, progress)


def load_draft(
    path: PathLike,
    numerics: Numerics = DEFAULT_NUMERICS,
    *,
    target: Target,
    capture_convention: Convention | None = None,
    capture: tuple[int, ...] | None = None,
    progress: Progress | None = None,
) -> Draft:
    """The draft in a directory, in `numerics.dtype`.

    A draft that names no target is taken to be `target`'s, if its shapes allow it. One that was
    converted for another target keeps that claim, and is refused when it is traced.

    Args:
      capture_convention: what its boundary ids mean, where the checkpoint leaves it open.
      capture: the boundaries its `fc` takes, where the checkpoint states none. One that states
        its own keeps them.

    Raises:
      CheckpointError: everything that is wrong with the checkpoint, alone or with this target.
    """
    directory = locate(path)
    found = _open(directory, "draft", lambda source: prepare_draft(source, capture_convention))
    config, problems = found.config, Problems(str(directory))
    assert isinstance(config, DraftConfig)
    if isinstance(found, Manifest) and capture_convention is not None:
        problems.add(
            "converted already, which settled what its boundary ids mean: "
            f"{config.boundaries.ids} [{config.boundaries.origin}]; convert it again with another "
            "--capture-convention"
        )
    if not config.boundaries.ids and capture is not None:
        if len(capture) != NUM_DEFAULT_BOUNDARIES:
            problems.add(
                f"--capture names {len(capture)} boundaries {capture}; the draft's fc takes "
                f"{NUM_DEFAULT_BOUNDARIES}"
            )
        said = {"ids": capture, "origin": "set by --capture; the checkpoint states none"}
        boundaries = dataclasses.replace(config.boundaries, **said)
        config = dataclasses.replace(config, boundaries=boundaries)
    if config.boundaries.target == UNTIED:
        card = TargetCard(target.identity, target.config)
        config = tie(config, card, problems, "when it was loaded")
    problems.raise_any()
    if numerics.mesh is not None:
        check_draft(numerics.mesh, config)
    return _fill(abstract_draft(config, numerics, found.identity), directory, found, progress)


def _open(directory: Path, kind: str, prepare: Callable[[Source], Prepared]) -> Prepared | Manifest:
    """What the directory says of itself, from its manifest or from Hugging Face's headers."""
    if is_converted(directory):
        manifest = read_manifest(directory)
        _check_kind(directory, manifest.kind, kind)
        return manifest
    source = Source(directory)
    _check_kind(directory, "draft" if is_draft(source) else "target", kind)
    return prepare(source)


def _check_kind(directory: Path, found: str, expected: str) -> None:
    if found != expected:
        raise CheckpointError(str(directory), [f"this is a {found}, not a {expected}"])


def _pieces(
    found: Prepared | Manifest, directory: Path, problems: Problems
) -> tuple[int, Iterator[Piece]]:
    if isinstance(found, Prepared):
        return len({rule.piece for rule in found.rules}), found.pieces(problems)
    # Orbax takes half a second to import, and only a converted checkpoint needs it.
    from jaxspec.convert.store import read_piece

    params = directory / "params"
    names = ((piece["name"], piece["layer"]) for piece in found.pieces)
    return len(found.pieces), (read_piece(params, *name) for name in names)


def _fill[Model: (Target, Draft)](
    model: Model, directory: Path, found: Prepared | Manifest, progress: Progress | None
) -> Model:
    """The model, its shapes replaced by the checkpoint's arrays, a piece at a time.

    A stack is allocated once and each layer placed into it: nothing is held twice. On a mesh each
    device is sent its own part alone.
    """
    mesh = model.numerics.mesh
    devices = None if mesh is None else Devices.of(mesh)
    graph, state = nnx.split(model)
    variables = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    want = {path: leaf.get_value() for path, (_, leaf) in variables.items()}
    filled: dict[str, jax.Array] = {}
    problems = Problems(str(directory))
    total, pieces = _pieces(found, directory, problems)
    for done, piece in enumerate(pieces, start=1):
        leaves = {}
        for path, array in piece.leaves.items():
            if path not in want or array.shape != want[path].shape[piece.layer is not None :]:
                problems.add(
                    f"piece {piece.name} holds {path} {list(array.shape)}, which this model's "
                    "config has no room for"
                )
                problems.raise_any()
            leaves[path] = array.astype(want[path].dtype, copy=False)
        if devices is not None:
            leaves = devices.put(leaves)
        if piece.layer is None:
            filled |= {path: jnp.asarray(array) for path, array in leaves.items()}
        else:
            if new := {path: want[path] for path in leaves if path not in filled}:
                filled |= _allocate(new, devices)
            stacks = {path: filled.pop(path) for path in leaves}
            filled |= _place(stacks, leaves, np.int32(piece.layer))
            del stacks
        del piece, leaves, array  # before the next piece is read
        if progress is not None:
            progress(f"loading {directory.name}", done, total)
    if missing := want.keys() - filled.keys():
        problems.add(f"no piece holds {', '.join(sorted(missing))}")
    problems.raise_any()
    full = [(path, leaf.replace(filled[name])) for name, (path, leaf) in variables.items()]
    return nnx.merge(graph, nnx.from_flat_state(full))


def _allocate(
    shapes: dict[str, jax.ShapeDtypeStruct], devices: Devices | None
) -> dict[str, jax.Array]:
    """Zeros of these shapes: one program for all, since each program compiled takes its time."""
    where = None if devices is None else devices.shardings(shapes)
    zeros = {path: functools.partial(jnp.zeros, s.shape, s.dtype) for path, s in shapes.items()}
    make = jax.jit(lambda: {path: zero() for path, zero in zeros.items()}, out_shardings=where)
    return make()


@functools.partial(jax.jit, donate_argnums=0)
def _place(
    stacks: dict[str, jax.Array], leaves: dict[str, Any], layer: jax.Array
) -> dict[str, jax.Array]:
    """The stacks with one layer replaced, in place."""
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
    return {path: put(stack, leaves[path]) for path, stack in stacks.items()}
