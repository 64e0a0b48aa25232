"""Matrices as checkpoints store them: plain, float8 in blocks, int4 in groups; and many as one."""

import collections
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxspec.config import TargetConfig
from jaxspec.convert import transforms
from jaxspec.convert.configs import Quantization
from jaxspec.convert.plan import Part, Reader, Rule, Want, cut
from jaxspec.convert.source import DTYPES, Source
from jaxspec.kernels.expert_matmul.packing import BLOCK, GROUP, padded

__all__ = ["Matrices", "experts_rules"]

NUM_READERS = min(8, os.cpu_count() or 1)
"""Experts read and repacked at once: what takes long of it runs beside Python."""


class Matrices:
    """What to want for the matrices of one checkpoint; without one, of what is to be written."""

    def __init__(self, source: Source | None, quantization: Quantization) -> None:
        self.quantization = quantization
        self._tensors = {} if source is None else source.tensors

    def dtype_of(self, name: str) -> str | None:
        """Safetensors' name of the weight's element type; None where there is no such tensor."""
        info = self._tensors.get(f"{name}.weight")
        return info.dtype if info else None

    def plain(self, name: str, out: int, in_features: int) -> Want:
        """The weight of a linear layer, in float8 where the config and the file say so."""
        shape = (out, in_features)
        if self.quantization.kind != "fp8" or self.dtype_of(name) != "F8_E4M3":
            return Want(f"{name}.weight", shape)
        rows, columns = self.quantization.block
        blocks = (-(-out // rows), -(-in_features // columns))
        scale = Want(f"{name}.weight_scale_inv", blocks, ("F32",))
        return Want(f"{name}.weight", shape, ("F8_E4M3",), scale)

    def packed(self, name: str, out: int, in_features: int) -> tuple[Want, Want, Want]:
        """An int4 matrix: words, scales, and its true shape."""
        return (
            Want(f"{name}.weight_packed", (out, in_features // 8), ("I32",)),
            Want(
                f"{name}.weight_scale",
                (out, in_features // self.quantization.group_size),
                ("BF16",),
            ),
            Want(f"{name}.weight_shape", (2,), ("I32", "I64")),
        )


def experts_rules(
    matrices: Matrices, piece: str, layer: int, name: str, config: TargetConfig
) -> Iterator[Rule]:
    """The rules of one layer's routed experts, some of them each.

    Args:
      name: what stands before the expert's number, as in `model.layers.3.mlp.experts.`.
    """
    c = config
    weights = 3 * c.hidden_size * c.moe_intermediate_size
    # Packed: half a byte each, and two for the scale of 32. An expert never weighs nothing.
    expert_bytes = weights * 9 // 16 if c.num_bits else 2 * weights
    for part_piece, part in cut(piece, 0, c.n_routed_experts, max(expert_bytes, 1)):
        yield _experts_rule(matrices, part_piece, layer, part, name, config)


def _experts_rule(
    matrices: Matrices, piece: str, layer: int, part: Part | None, name: str, config: TargetConfig
) -> Rule:
    """The rule of some experts: one array per kind, gate before up."""
    c, quantization = config, matrices.quantization
    experts = range(c.n_routed_experts) if part is None else part.rows
    shape_of = {
        "gate": (c.moe_intermediate_size, c.hidden_size),
        "up": (c.moe_intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.moe_intermediate_size),
    }
    slots = [(expert, kind) for expert in experts for kind in shape_of]
    tensor = {slot: f"{name}{slot[0]}.{slot[1]}_proj" for slot in slots}
    is_packed = quantization.kind == "int4"
    wants: dict[tuple[int, str], tuple[Want, ...]]
    if is_packed:
        wants = {slot: matrices.packed(tensor[slot], *shape_of[slot[1]]) for slot in slots}
    else:
        wants = {slot: (matrices.plain(tensor[slot], *shape_of[slot[1]]),) for slot in slots}
    # One array holds them all; from bf16 to f32 nothing is lost.
    is_f32 = any(matrices.dtype_of(tensor[slot]) == "F32" for slot in slots)

    def empty(reader: Reader, kind: str, *lead: int) -> list[np.ndarray]:
        out, in_features = shape_of[kind]
        if c.num_bits is None:
            return [reader.empty((*lead, out, in_features), DTYPES["F32" if is_f32 else "BF16"])]
        width = padded(in_features)
        return [
            reader.empty((*lead, out, width // 8), DTYPES["I32"]),
            reader.empty((*lead, width // BLOCK, BLOCK // GROUP, out), DTYPES["BF16"]),
        ]

    def fill(reader: Reader, slot: tuple[int, str], arrays: list[np.ndarray]) -> None:
        if not is_packed:
            weight = reader.read(wants[slot][0])
            built = (weight,) if c.num_bits is None else transforms.quantize_int4(weight)
        else:
            of_words, of_scale, of_shape = wants[slot]
            is_whole = arrays[0].shape == of_words.shape  # of whole blocks: nothing is padded
            words = reader.read(of_words, into=arrays[0] if is_whole else None)
            scale, shape = reader.read(of_scale), reader.read(of_shape)
            if tuple(shape.tolist()) != shape_of[slot[1]]:
                reader.report(
                    f"tensor {tensor[slot]}.weight_shape says {shape.tolist()}; expected "
                    f"{list(shape_of[slot[1]])}"
                )
            scales = transforms.repack_scales(scale, quantization.group_size)
            built = transforms.repack_words(words), scales
        for array, values in zip(arrays, built, strict=True):
            array[...] = values

    def build(reader: Reader) -> tuple[np.ndarray, ...]:
        gate_up = empty(reader, "gate", len(experts), 2)
        down = empty(reader, "down", len(experts))
        views = {"gate": [a[:, 0] for a in gate_up], "up": [a[:, 1] for a in gate_up], "down": down}

        def fill_slot(slot: tuple[int, str]) -> None:
            expert, kind = slot
            fill(reader, slot, [view[expert - experts.start] for view in views[kind]])

        with ThreadPoolExecutor(NUM_READERS) as pool:
            # Drawn to the end, so that an error in a thread is raised here.
            collections.deque(pool.map(fill_slot, slots), maxlen=0)
        return (*gate_up, *down)

    def restore(*leaves: np.ndarray) -> dict[str, np.ndarray]:
        """Of packed ones words, scales and shapes, in groups of 32; of plain ones the weights."""
        half = len(leaves) // 2
        gate_up, down = leaves[:half], leaves[half:]
        parts = {"gate": [a[:, 0] for a in gate_up], "up": [a[:, 1] for a in gate_up], "down": down}
        tensors = {}
        for expert, kind in slots:
            arrays = [part[expert - experts.start] for part in parts[kind]]
            matrix, shape = tensor[expert, kind], shape_of[kind]
            if not c.num_bits:
                tensors[f"{matrix}.weight"] = arrays[0]
                continue
            words, scales = arrays
            tensors[f"{matrix}.weight_packed"] = transforms.unpack_words(words, shape[1])
            tensors[f"{matrix}.weight_scale"] = transforms.unpack_scales(scales, shape[1])
            tensors[f"{matrix}.weight_shape"] = np.array(shape, np.int32)
        return tensors

    suffixes = ("_words", "_scales") if c.num_bits else ("",)
    leaves = tuple(f"experts.{kind}{suffix}" for kind in ("gate_up", "down") for suffix in suffixes)
    every_want = tuple(want for slot in slots for want in wants[slot])
    return Rule(piece, layer, leaves, every_want, build, restore, part)
