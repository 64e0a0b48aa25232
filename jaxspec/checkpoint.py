"""Loading a target or a draft: from a Hugging Face directory or a converted one, the same model."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxspec.aliases import Convention, PathLike, Progress
from jaxspec.config import DraftConfig, Numerics, TargetConfig
from jaxspec.convert.configs import TRANSFORMERS_EPS, LatentNormEps
from jaxspec.convert.draft_configs import AS_STATED, UNTIED
from jaxspec.convert.drafts import is_draft
from jaxspec.convert.manifest import Manifest, is_converted, read_manifest
from jaxspec.convert.pieces import pieces_of
from jaxspec.convert.plan import Part, Piece, Rule
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
from jaxspec.convert.rotary import RotaryChoice
from jaxspec.convert.source import Source
from jaxspec.draft import Draft
from jaxspec.environment import hub_cache
from jaxspec.sharding import Devices, check_draft, check_target
from jaxspec.target import Target

if TYPE_CHECKING:
    from jaxspec.convert.stored import StoredLeaf, StoredPiece

__all__ = ["CheckpointError", "load_draft", "load_target", "locate"]

DEFAULT_NUMERICS = Numerics()
Box = tuple[np.ndarray, np.ndarray]
"""Where a part of a parameter begins and ends, along every axis."""


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
    if directory.exists():
        raise CheckpointError(
            str(path), ["a file; a checkpoint is a directory: give the one it is of"]
        )
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
    rotary: RotaryChoice = AS_STATED,
    progress: Progress | None = None,
) -> Draft:
    """The draft in a directory, in `numerics.dtype`.

    A draft that names no target is taken to be `target`'s, if its shapes allow it. One that was
    converted for another target keeps that claim, and is refused when it is traced.

    Args:
      capture_convention: what its boundary ids mean, where the checkpoint leaves it open.
      capture: the boundaries its `fc` takes, where the checkpoint states none. One that states
        its own keeps them.
      rotary: the rotary embedding, in place of what its config says.

    Raises:
      CheckpointError: everything that is wrong with the checkpoint, alone or with this target.
    """
    directory = locate(path)
    found = _open(
        directory, "draft", lambda source: prepare_draft(source, capture_convention, choice=rotary)
    )
    config, problems = found.config, Problems(str(directory))
    assert isinstance(config, DraftConfig)
    if isinstance(found, Manifest) and capture_convention is not None:
        problems.add(
            "converted already, which settled what its boundary ids mean: "
            f"{config.boundaries.ids} [{config.boundaries.origin}]; convert it again with another "
            "--capture-convention"
        )
    if isinstance(found, Manifest) and rotary:
        problems.add(
            f"converted already, which settled its rotary embedding: {config.rotary} "
            f"[{found.claims['rotary'].origin}]; convert it again with another --draft-rotary"
        )
    if not config.boundaries.ids and capture is not None:
        if len(capture) != config.num_aux_hidden_states:
            problems.add(
                f"--capture names {len(capture)} boundaries {capture}; the draft's fc takes "
                f"{config.num_aux_hidden_states}"
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


def _fill[Model: (Target, Draft)](
    model: Model, directory: Path, found: Prepared | Manifest, progress: Progress | None
) -> Model:
    """The model, its shapes replaced by the checkpoint's arrays, a piece at a time.

    Of a converted checkpoint a process reads the chunks that its devices' parts lie in; of Hugging
    Face's files, experts and the vocabulary's rows in whole pieces, and all of the rest. Besides
    the devices' parts, memory holds what is read of one piece, which is at most 512 MiB or one
    matrix: twice where its element type changes, and once more where the devices are not the host.
    """
    graph, state = nnx.split(model)
    variables = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    want = {path: leaf.get_value() for path, (_, leaf) in variables.items()}
    mesh = model.numerics.mesh
    shardings = None if mesh is None else Devices.of(mesh).shardings(want)
    shares = _shares(want, shardings)
    hull = {path: _hull([share.box[path] for share in shares]) for path in want}
    seen: set[str] = set()
    problems = Problems(str(directory))
    total, pieces = pieces_of(found, directory, problems, functools.partial(_is_needed, hull))
    for done, piece in enumerate(pieces, start=1):
        slabs = {}
        for path, leaf in piece.leaves.items():
            if path not in want or leaf.shape != _shape_of(piece, want[path]):
                problems.add(
                    f"piece {piece.name} holds {path} {list(leaf.shape)}, which this model's "
                    "config has no room for"
                )
                problems.raise_any()
            if (slab := _Slab.of(piece, leaf, hull[path], want[path])) is not None:
                slabs[path] = slab
        seen |= piece.leaves.keys()
        for share in shares:
            share.take(slabs)
        del piece, leaf, slabs, slab  # before the next piece is read
        if progress is not None:
            progress(f"loading {directory.name}", done, total)
    if isinstance(found, Manifest) and (missing := want.keys() - seen):
        problems.add(f"no piece holds {', '.join(sorted(missing))}")
    problems.raise_any()
    if shardings is None:
        filled = shares[0].arrays
    else:
        filled = {
            path: jax.make_array_from_single_device_arrays(
                shape.shape, shardings[path], [share.arrays[path] for share in shares]
            )
            for path, shape in want.items()
        }
    full = [(path, leaf.replace(filled[name])) for name, (path, leaf) in variables.items()]
    return nnx.merge(graph, nnx.from_flat_state(full))


@dataclasses.dataclass(frozen=True)
class _Slab:
    """Values of a parameter, from `first` on along each of its axes."""

    first: np.ndarray
    data: np.ndarray

    @classmethod
    def of(
        cls,
        piece: "Piece | StoredPiece",
        leaf: "np.ndarray | StoredLeaf",
        hull: Box,
        want: jax.ShapeDtypeStruct,
    ) -> Self | None:
        """What a piece's leaf has in a hull, in the wanted element type; None for nothing."""
        lead = len(want.shape) - len(leaf.shape)
        first = np.zeros(len(want.shape), np.int32)
        start = _start_of(piece.layer, piece.part)
        first[: len(start)] = start
        low, high = _overlap((first, first + np.asarray((1,) * lead + leaf.shape)), hull)
        if (low >= high).any():
            return None
        cut = tuple(map(slice, (low - first).tolist(), (high - first).tolist()))
        data = leaf[cut[lead:]].astype(want.dtype, copy=False)
        return cls(low, data.reshape(high - low))


class _Share:
    """What one device holds of a model that is being filled.

    Attributes:
      arrays: by parameter. A stack is allocated once, and each piece placed into it.
    """

    def __init__(
        self, want: dict[str, jax.ShapeDtypeStruct], box: dict[str, Box], device: Any | None
    ) -> None:
        """Args:
        box: the part of each parameter that it holds.
        device: None is the default one.
        """
        self._want, self.box, self._device = want, box, device
        self.arrays: dict[str, jax.Array] = {}

    def take(self, slabs: dict[str, _Slab]) -> None:
        """Keeps what belongs here of some slabs."""
        whole, mine, starts = {}, {}, {}
        for path, slab in slabs.items():
            begin, end = self.box[path]
            low, high = _overlap((slab.first, slab.first + slab.data.shape), (begin, end))
            if (low >= high).any():
                continue
            data = slab.data[tuple(map(slice, low - slab.first, high - slab.first))]
            if data.shape == tuple(end - begin):
                whole[path] = data
            else:
                mine[path], starts[path] = data, low - begin
        self.arrays |= jax.device_put(whole, self._device)
        if not mine:
            return
        if new := [path for path in mine if path not in self.arrays]:
            self.arrays |= self._allocate(new)
        stacks = {path: self.arrays.pop(path) for path in mine}
        self.arrays |= _place(stacks, mine, starts)

    def _allocate(self, paths: list[str]) -> dict[str, jax.Array]:
        """Zeros for all of them by one program, since each one compiled takes its time."""

        def zeros() -> dict[str, jax.Array]:
            shapes = {path: np.subtract(*self.box[path][::-1]).tolist() for path in paths}
            return {
                path: jnp.zeros(shape, self._want[path].dtype) for path, shape in shapes.items()
            }

        where = None if self._device is None else SingleDeviceSharding(self._device)
        return jax.jit(zeros, out_shardings=where)()


def _shares(
    want: dict[str, jax.ShapeDtypeStruct], shardings: dict[str, NamedSharding] | None
) -> list[_Share]:
    """The shares of this process's devices, in the order in which a sharding lists them."""
    if shardings is None:
        return [_Share(want, {path: _box(s.shape) for path, s in want.items()}, None)]
    boxes: dict[Any, dict[str, Box]] = {}
    for path, shape in want.items():
        cuts = shardings[path].addressable_devices_indices_map(shape.shape)
        for device, cut in cuts.items():
            boxes.setdefault(device, {})[path] = _box(shape.shape, cut)
    return [_Share(want, box, device) for device, box in boxes.items()]


def _box(shape: tuple[int, ...], cut: tuple[slice, ...] | None = None) -> Box:
    """First and end along every axis, of a cut or of all."""
    cut = cut or (slice(None),) * len(shape)
    bounds = [one.indices(size)[:2] for one, size in zip(cut, shape, strict=True)]
    begin, end = np.asarray(bounds, np.int32).reshape(-1, 2).T
    return begin, end


def _hull(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds them all."""
    begins, ends = zip(*boxes, strict=True)
    return np.min(begins, axis=0), np.max(ends, axis=0)


def _overlap(one: Box, other: Box) -> Box:
    """What two boxes share; nothing, if it does not begin before it ends."""
    return np.maximum(one[0], other[0]), np.minimum(one[1], other[1])


def _is_needed(hull: dict[str, Box], rule: Rule) -> bool:
    """Whether something of a rule's leaves lies in the hull."""
    return any(_meets(hull[leaf], rule.layer, rule.part) for leaf in rule.leaves)


def _meets(box: Box, layer: int | None, part: Part | None) -> bool:
    """Whether a box has something of a layer's part."""
    ranges = {} if layer is None else {0: (layer, layer + 1)}
    if part is not None:
        axis = part.axis + (layer is not None)
        ranges[axis] = (part.first, part.first + part.count)
    begin, end = box
    return all(low < end[axis] and begin[axis] < high for axis, (low, high) in ranges.items())


def _shape_of(piece: "Piece | StoredPiece", want: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of what a piece holds of a parameter."""
    shape = want.shape[piece.layer is not None :]
    if piece.part is None:
        return shape
    axis = piece.part.axis
    return (*shape[:axis], piece.part.count, *shape[axis + 1 :])


def _start_of(layer: int | None, part: Part | None) -> list[int]:
    """Where in its parameters a piece begins, along their first axes; at 0 along the others."""
    start = [] if layer is None else [layer]
    if part is not None:
        start += [0] * part.axis + [part.first]
    return start


@functools.partial(jax.jit, donate_argnums=0)
def _place(
    stacks: dict[str, jax.Array], leaves: dict[str, Any], starts: dict[str, Any]
) -> dict[str, jax.Array]:
    """The stacks with the leaves in their place, which is written to and not copied."""
    return {
        path: jax.lax.dynamic_update_slice(stack, leaves[path], list(starts[path]))
        for path, stack in stacks.items()
    }
