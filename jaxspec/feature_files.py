"""Features as SpecForge and speculators, with vLLM, leave them on disk: one file a sample, read
without torch, and without running what is pickled.

    SpecForge     **/data_N.ckpt        input_ids, loss_mask [T], hidden_state [1,T,D] after the
                                        final norm, aux_hidden_state [1,T,K*D]; torch.save
    speculators,  data_N.pt             input_ids, loss_mask [T], hidden_states, a list of K+1 of
    before 0.5                          [T,D]; torch.save. data_config.json: the layers' ids
    speculators   [hidden_states/]      token_ids [T], hidden_states [T,K+1,D], the last one before
    and vLLM      hs_N.safetensors      the final norm; the loss mask in the Arrow dataset beside

Of these only `data_config.json` says which states they are, as ids of layers whose output it is; so
what a file holds is found out by comparison with the target (`identify.py`).
"""

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors

from jaxspec.convert.problems import Problems
from jaxspec.convert.source import DTYPES
from jaxspec.convert.torch_file import read_torch_file
from jaxspec.errors import InputError

__all__ = ["FeatureFiles", "FeatureSample"]

Project = Literal["SpecForge", "speculators", "vLLM"]

FORMS: dict[Project, tuple[str, str]] = {
    "SpecForge": ("**/*.ckpt", r".*\.ckpt"),
    "speculators": ("data_*.pt", r"data_\d+\.pt"),
    "vLLM": ("hs_*.safetensors", r"hs_\d+\.safetensors"),
}
"""How each project's files are called: the pattern to look for, and the form of a name."""
CONFIG = "data_config.json"
ARROW = "data-*.arrow"


@dataclasses.dataclass(frozen=True)
class FeatureSample:
    """One file.

    Attributes:
      tokens: [T] int32.
      is_said: [T] whether the token is the assistant's; None where nothing says so.
      features, last: [T,K*D] and [T,D] in the file's dtype; None where they were not asked for.
    """

    tokens: np.ndarray
    is_said: np.ndarray | None
    features: np.ndarray | None = None
    last: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class FeatureFiles:
    """A directory of one project's files, or one file.

    Attributes:
      files: in the order of their numbers.
      claim: the boundaries that `claim_from` says they are; None where nothing does.
      masks: of each sample, by the number in its file's name, its ids and its loss mask; empty
        where masks are in the files themselves, or nowhere.
    """

    path: Path
    project: Project
    files: tuple[Path, ...]
    claim: tuple[int, ...] | None
    claim_from: str
    masks: dict[int, tuple[list[int], list[int]]]

    @classmethod
    def find(cls, path: Path) -> "FeatureFiles | None":
        """The files at a path; None where it is something else.

        Raises:
          InputError: they are compressed, or what stands beside them cannot be read.
        """
        if (path / "config.json").is_file():
            return None  # a checkpoint
        for project, (pattern, form) in FORMS.items():
            if path.is_file():
                found = [path] if re.fullmatch(form, path.name) else []
            else:
                inner = path / "hidden_states"
                folder = inner if project == "vLLM" and inner.is_dir() else path
                found = [file for file in folder.glob(pattern) if re.fullmatch(form, file.name)]
            if found:
                found.sort(key=lambda file: (_number(file), str(file)))
                return cls._of(path, project, tuple(found))
        if path.name.endswith(".ckpt.gz") or (path.is_dir() and any(path.rglob("*.ckpt.gz"))):
            raise InputError(
                f"{path}: SpecForge's files, compressed; unpack them first (gunzip -r)"
            )
        return None

    @classmethod
    def _of(cls, path: Path, project: Project, files: tuple[Path, ...]) -> "FeatureFiles":
        claim, said, masks = None, "", {}
        if project == "speculators" and (files[0].parent / CONFIG).is_file():
            claim, said = _claim(files[0].parent / CONFIG)
        if project == "vLLM":
            folders = (files[0].parent, files[0].parent.parent)
            masks = next((_masks(one) for one in folders if any(one.glob(ARROW))), {})
        return cls(path, project, files, claim, said, masks)

    @property
    def has_masks(self) -> bool:
        """Whether it is said what the assistant's tokens are."""
        return self.project != "vLLM" or bool(self.masks)

    def read(self, index: int, *, has_states: bool = True) -> FeatureSample:
        """One sample; without states, its tokens alone are read.

        Raises:
          InputError: the file is damaged or of another form; it is named.
        """
        file = self.files[index]
        if self.project == "SpecForge":
            return self._specforge(file, has_states)
        if self.project == "speculators":
            return self._speculators(file, has_states)
        return self._vllm(file, has_states)

    def _specforge(self, file: Path, has_states: bool) -> FeatureSample:
        tensors = _TorchFile(file)
        tokens, is_said = tensors.vector("input_ids"), tensors.vector("loss_mask") != 0
        tokens = _as_ids(tokens, file)
        length = tensors.rows("hidden_state", "aux_hidden_state")
        # Batches were padded to their longest; states were cut to the sample.
        if min(len(tokens), len(is_said)) < length:
            raise InputError(f"{file}: {len(tokens)} input_ids, states of {length} tokens")
        tokens, is_said = tokens[:length], is_said[:length]
        if not has_states:
            return FeatureSample(tokens, is_said)
        return FeatureSample(
            tokens, is_said, tensors.states("aux_hidden_state"), tensors.states("hidden_state")
        )

    def _speculators(self, file: Path, has_states: bool) -> FeatureSample:
        tensors = _TorchFile(file)
        names = [name for name in tensors.stored if name.startswith("hidden_states.")]
        tokens, is_said = tensors.vector("input_ids"), tensors.vector("loss_mask") != 0
        length = tensors.rows(*names) if len(names) > 1 else -1
        if not len(tokens) == len(is_said) == length:
            raise InputError(
                f"{file}: {len(tokens)} input_ids, {len(is_said)} of loss_mask, {len(names)} "
                f"hidden_states of {length} tokens; expected one length, and two layers at least"
            )
        tokens = _as_ids(tokens, file)
        if not has_states:
            return FeatureSample(tokens, is_said)
        *chunks, last = (tensors.states(name) for name in names)
        return FeatureSample(tokens, is_said, np.concatenate(chunks, axis=-1), last)

    def _vllm(self, file: Path, has_states: bool) -> FeatureSample:
        try:
            with safetensors.safe_open(file, framework="numpy") as opened:
                names = set(opened.keys())
                if {"token_ids", "hidden_states"} - names or "hidden_states_scales" in names:
                    raise InputError(
                        f"{file}: {', '.join(sorted(names))}; expected token_ids and "
                        "hidden_states, not quantised"
                    )
                tokens = _as_ids(opened.get_tensor("token_ids"), file)
                shape = opened.get_slice("hidden_states").get_shape()
                states_TKD = opened.get_tensor("hidden_states") if has_states else None
        except (OSError, safetensors.SafetensorError) as error:
            raise InputError(f"{file}: cannot be read as safetensors ({error})") from error
        if tokens.ndim != 1 or len(shape) != 3 or shape[0] != len(tokens) or shape[1] < 2:
            raise InputError(
                f"{file}: hidden_states {list(shape)} of token_ids {list(tokens.shape)}; expected "
                "[T, layers, width] of [T], and two layers at least: speculators' "
                "--include-last-layer adds the last"
            )
        is_said = None
        if self.masks:
            ids, mask = self.masks.get(_number(file), ([], []))
            if ids != tokens.tolist():
                raise InputError(f"{file}: of other tokens than its row in {ARROW} beside it")
            if len(mask) != len(ids):
                raise InputError(
                    f"{file}: {len(ids)} tokens, and a loss_mask of {len(mask)} in its row in "
                    f"{ARROW} beside it"
                )
            is_said = np.array(mask) != 0
        if states_TKD is None:
            return FeatureSample(tokens, is_said)
        flat = states_TKD[:, :-1].reshape(len(tokens), (shape[1] - 1) * shape[2])
        return FeatureSample(tokens, is_said, flat, states_TKD[:, -1])


class _TorchFile:
    """The tensors of a file of `torch.save`."""

    def __init__(self, path: Path) -> None:
        problems = Problems(str(path.parent))
        self.path, self.stored = path, read_torch_file(path, problems)
        problems.raise_any()

    def _read(self, name: str) -> np.ndarray:
        if name not in self.stored:
            raise InputError(f"{self.path}: no {name}; it has {', '.join(sorted(self.stored))}")
        dtype, shape, offset = self.stored[name]
        flat = np.fromfile(self.path, DTYPES[dtype], int(np.prod(shape)), offset=offset)
        return flat.reshape(shape)

    def vector(self, name: str) -> np.ndarray:
        """Numbers [T], whatever axes of one there are.

        Raises:
          InputError: there are none, or several rows of them.
        """
        numbers = self._read(name)
        if numbers.size != max(numbers.shape, default=0):
            raise InputError(f"{self.path}: {name} {list(numbers.shape)}; expected one sample, [T]")
        return numbers.reshape(-1)

    def states(self, name: str) -> np.ndarray:
        """States [T, width], which may be a batch of one."""
        return self._read(name).reshape(-1, self.stored[name].shape[-1])

    def rows(self, *names: str) -> int:
        """How many tokens the states are of.

        Raises:
          InputError: they are no states, or of different numbers.
        """
        shapes: list[tuple[int, ...]] = [
            self.stored[name].shape if name in self.stored else () for name in names
        ]
        is_batch = all(len(shape) == 2 or (len(shape) == 3 and shape[0] == 1) for shape in shapes)
        if not is_batch or len({shape[-2] for shape in shapes}) > 1:
            each = zip(names, shapes, strict=True)
            found = ", ".join(f"{name} {list(shape)}" for name, shape in each)
            raise InputError(f"{self.path}: {found}; expected states [T, width] of one T")
        return shapes[0][-2]


def _claim(path: Path) -> tuple[tuple[int, ...], str]:
    """The boundaries that speculators' own config says: outputs of the layers but the last."""
    try:
        *ids, _ = json.loads(path.read_text("utf-8"))["hidden_states"]["layer_ids"]
        boundaries = tuple(int(i) + 1 for i in ids)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: no hidden_states.layer_ids in it ({error!r})") from error
    return boundaries, f"{path}: hidden_states.layer_ids {ids}, outputs of layers"


def _masks(folder: Path) -> dict[int, tuple[list[int], list[int]]]:
    """The ids and loss masks of the rows of a dataset that `datasets` saved."""
    try:
        ipc: Any = importlib.import_module("pyarrow.ipc")
    except ImportError as error:
        raise InputError(
            f"{folder}: an Arrow dataset, which says which tokens are the assistant's; "
            "`pip install pyarrow` to have it read"
        ) from error
    rows: list[Any] = []
    for path in sorted(folder.glob(ARROW)):
        try:
            with path.open("rb") as stream:
                table = ipc.open_stream(stream).read_all().select(["input_ids", "loss_mask"])
        except (OSError, KeyError, ValueError) as error:
            raise InputError(f"{path}: no input_ids and loss_mask can be read ({error})") from error
        rows += [(row["input_ids"], row["loss_mask"]) for row in table.to_pylist()]
    return dict(enumerate(rows))


def _as_ids(tokens: np.ndarray, file: Path) -> np.ndarray:
    """Token ids as int32; raises InputError where they are no whole numbers."""
    if tokens.dtype.kind not in "iu":
        raise InputError(f"{file}: token ids in {tokens.dtype}; expected integers")
    return tokens.astype(np.int32)


def _number(file: Path) -> int:
    """The last number in a file's name."""
    numbers = re.findall(r"\d+", file.name.partition(".")[0])
    return int(numbers[-1]) if numbers else 0
