"""Where every array lives on a mesh of devices: one table of axes, and one of rules.

A mesh has the axes `data` and `model`. `AXES` names the axes of every parameter, of every array of
the state and of every input; `RULES` says which of these names a mesh axis cuts. Programs run whole
inside one `shard_map` on what each device has, and talk only in `collectives.py`: nothing is left
for XLA's partitioner to guess. (But an optimiser's update, which is no part of any step.)
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.config import DraftConfig, LlamaDraftConfig, MeshConfig, TargetConfig
from jaxspec.errors import InputError

__all__ = [
    "Devices",
    "check_batch",
    "check_draft",
    "check_target",
    "devices_of",
    "held_bytes",
    "spec_of",
    "specs_of",
]

RULES = {
    "batch": "data",
    "heads": "model",
    "experts": "model",
    "inner": "model",
    "vocab": "model",
    "slots": "model",  # where the mesh says so: see `MeshConfig.cache`
}

# By the last words of an array's name; axes that stand before these, as a stack's layers, are not
# cut. What is replicated is small, or needed whole by every device: latents serve all heads.
AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": (None, "vocab"),
    "attention.q_a": (),
    "attention.q_b": (None, "heads", None),
    "attention.kv_a": (),
    "attention.k_up": ("heads", None, None),
    "attention.v_up": ("heads", None, None),
    "attention.query": (None, "heads", None),
    "attention.key": (None, "heads", None),
    "attention.value": (None, "heads", None),
    "attention.out": ("heads", None, None),
    "mlp.gate": (None, "inner"),
    "mlp.up": (None, "inner"),
    "mlp.down": ("inner", None),
    "shared.gate": (None, "inner"),
    "shared.up": (None, "inner"),
    "shared.down": ("inner", None),
    "router.weight": (),
    "router.bias": (),
    "experts.gate_up": ("experts", None, None, None),
    "experts.down": ("experts", None, None),
    "experts.gate_up_words": ("experts", None, None, None),
    "experts.gate_up_scales": ("experts", None, None, None, None),
    "experts.down_words": ("experts", None, None),
    "experts.down_scales": ("experts", None, None, None),
    "q_a_norm.weight": (),
    "kv_a_norm.weight": (),
    "input_norm.weight": (),
    "hidden_norm.weight": (),
    "post_norm.weight": (),
    "norm.weight": (),
    "feature_norm.weight": (),
    "fc": (),
    "target_of_draft": (),
    # Caches, state and inputs of the step.
    "latent": ("batch", "slots", None),
    "rotary": ("batch", "slots", None),
    "key": ("heads", "batch", None, None),
    "value": ("heads", "batch", None, None),
    "seed.recurrent": ("batch", None),
    "seed.log_probs": ("batch", None),
    "seed.tokens": ("batch", None),
    "root": ("batch",),
    "length": ("batch",),
    "status": ("batch",),
    "seed": ("batch",),
    "temperature": ("batch",),
    "top_k": ("batch",),
    "top_p": ("batch",),
    "min_p": ("batch",),
    "stop_ids": ("batch", None),
    "limit": ("batch",),
    "tokens": ("batch", None),
    "num_tokens": ("batch",),
    "accepted": ("batch", None),
    "num_steps": ("batch",),
    "is_admitted": ("batch",),
    "prompt": ("batch", None),
    "prompt_len": ("batch",),
}


def spec_of(name: str, num_axes: int, mesh: MeshConfig) -> P:
    """How the array of that dotted name is cut; a number is not.

    Raises:
      KeyError: no rule names it.
    """
    if not num_axes:
        return P()
    words = name.split(".")
    known = [known for known in (".".join(words[-2:]), words[-1]) if known in AXES]
    if not known:
        raise KeyError(f"{name}: sharding.AXES names no axes of it")
    axes = AXES[known[0]]
    cut = [None if axis is None else RULES[axis] for axis in axes]
    if mesh.cache == "replicated":
        cut = [None if axis == "slots" else by for axis, by in zip(axes, cut, strict=True)]
    return P(*[None] * (num_axes - len(cut)), *cut) if any(cut) else P()


def specs_of(tree: Any, mesh: MeshConfig) -> Any:
    """`spec_of` every array of a tree of parameters, state or inputs, in the tree's structure."""

    def spec(path: tuple[Any, ...], leaf: Any) -> Any:
        name = ".".join(_word(key) for key in path)
        if isinstance(leaf, nnx.Variable):
            return leaf.replace(spec_of(name, leaf.get_value().ndim, mesh))
        return spec_of(name, leaf.ndim, mesh)

    return jax.tree_util.tree_map_with_path(spec, tree, is_leaf=_is_variable)


def held_bytes(tree: Any, mesh: MeshConfig) -> dict[str, int]:
    """Bytes of each array that one device of a mesh holds, by the table alone, by dotted name."""
    parts = {"data": mesh.data, "model": mesh.model}
    held = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable):
        leaf = leaf.get_value() if _is_variable(leaf) else leaf
        name = ".".join(map(_word, path))
        cuts = math.prod(parts[axis] for axis in spec_of(name, leaf.ndim, mesh) if axis)
        held[name] = leaf.size * leaf.dtype.itemsize // cuts
    return held


def _is_variable(tree: Any) -> bool:
    return isinstance(tree, nnx.Variable)


def _is_spec(tree: Any) -> bool:
    return isinstance(tree, P)


def _word(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"{key!r} is no step of a path that has a name")


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a mesh: how arrays and programs get onto them."""

    config: MeshConfig
    mesh: Mesh

    @classmethod
    def of(cls, config: MeshConfig) -> "Devices":
        """The first devices there are, in a grid.

        Raises:
          InputError: there are fewer, or more than a mesh over several processes may leave out.
        """
        devices, wanted = jax.devices(), config.data * config.model
        found = f"there are {len(devices)} ({devices[0].device_kind})"
        if wanted > len(devices):
            raise InputError(
                f"mesh {config} takes {wanted} devices, and {found}; give a smaller --mesh, or run "
                "with more devices"
            )
        if jax.process_count() > 1 and wanted != len(devices):
            raise InputError(
                f"mesh {config} takes {wanted} devices, and {found} in {jax.process_count()} "
                "processes; a mesh over several processes takes all of them"
            )
        grid = np.array(devices[:wanted]).reshape(config.data, config.model)
        return cls(config, Mesh(grid, ("data", "model")))

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def shardings(self, tree: Any) -> Any:
        """Where the tree's arrays are to live, in its structure."""
        return jax.tree.map(self.sharding, specs_of(tree, self.config), is_leaf=_is_spec)

    def shapes(self, tree: Any) -> Any:
        """The tree's shapes, and where they are to live: what a program is lowered with."""

        def shape(leaf: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree.map(shape, tree, self.shardings(tree))

    def put(self, tree: Any) -> Any:
        """The tree, each device with its part; what lies there already is not copied."""
        return jax.tree.map(self.put_as, tree, specs_of(tree, self.config))

    def put_as(self, array: Any, spec: P) -> jax.Array:
        """One array that every process has whole, each device with its part."""
        wanted = self.sharding(spec)
        if isinstance(array, jax.Array) and array.sharding == wanted:
            return array
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, wanted, lambda index: host[index])

    def fetch(self, tree: Any) -> Any:
        """The tree's arrays, whole, on the host of every process."""
        if jax.process_count() == 1:
            return jax.device_get(tree)
        return multihost_utils.process_allgather(tree, tiled=True)

    def spread(self, program: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable:
        """The program, run on every device with its part of each argument.

        The types that would follow which values are the same on all devices are off: they ask
        every kernel's loop to declare it. `collectives.py` says why decisions are, and a test
        compares the devices.
        """
        return jax.shard_map(
            program, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def devices_of(target: Any, draft: Any | None, batch: int | None) -> Devices | None:
    """The devices that a target and a draft are computed on, by their numerics; None without mesh.

    Args:
      batch: None where it is not known yet.

    Raises:
      InputError: there are too few, or they do not cut the models or the batch evenly.
    """
    mesh = target.numerics.mesh
    if draft is not None and draft.numerics.mesh != mesh:
        raise InputError(f"the target is on mesh {mesh}, and its draft on {draft.numerics.mesh}")
    if mesh is None:
        return None
    check_target(mesh, target.config)
    if draft is not None:
        check_draft(mesh, draft.config)
    if batch is not None:
        check_batch(mesh, batch)
    return Devices.of(mesh)


def check_target(mesh: MeshConfig, config: TargetConfig) -> None:
    """Raises InputError for a target whose layers a mesh does not cut evenly."""
    _check(
        mesh,
        "target",
        {
            "num_attention_heads": config.num_attention_heads,
            "n_routed_experts": config.n_routed_experts,
            "vocab_size": config.vocab_size,
            "intermediate_size": config.intermediate_size,
            "n_shared_experts x moe_intermediate_size": config.n_shared_experts
            * config.moe_intermediate_size,
        },
    )


def check_draft(mesh: MeshConfig, config: DraftConfig) -> None:
    """Raises InputError for a draft whose layer a mesh does not cut evenly."""
    names = ["num_attention_heads", "intermediate_size", "vocab_size", "draft_vocab_size"]
    if isinstance(config, LlamaDraftConfig):
        names.append("num_key_value_heads")
    _check(mesh, "draft", {name: getattr(config, name) for name in names})


def check_batch(mesh: MeshConfig, batch: int) -> None:
    """Raises InputError for a batch that a mesh does not cut evenly."""
    if batch % mesh.data:
        raise InputError(
            f"mesh {mesh}: its {mesh.data} groups of devices (DATA) do not divide a batch of "
            f"{batch}; give a multiple of {mesh.data} with --batch-size, or another --mesh"
        )


def _check(mesh: MeshConfig, who: str, sizes: dict[str, int]) -> None:
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % mesh.model]
    if uneven:
        raise InputError(
            f"mesh {mesh}: its {mesh.model} devices (MODEL) do not divide the {who}'s "
            f"{', '.join(uneven)}; give another --mesh"
        )
