"""Training on features that another project made, once it is known what they are."""

import dataclasses
import functools

import numpy as np

from jaxspec.aliases import Dtype, Progress
from jaxspec.config import Numerics
from jaxspec.contracts import Boundaries, ContractError, Features
from jaxspec.errors import InputError
from jaxspec.feature_files import FeatureFiles
from jaxspec.identify import FeaturesReport, identify
from jaxspec.target import Target
from jaxspec.training_data import FEWEST, Sample, Windows

__all__ = ["OtherFeatures", "claim_features"]


@dataclasses.dataclass(frozen=True)
class OtherFeatures:
    """Feature files under a claim of what they are; what `features.FeaturesDirectory` is of ours.

    Attributes:
      is_normed: whether their last states are those after the final norm.
      dtype: what they are read as.
    """

    files: FeatureFiles
    boundaries: Boundaries
    is_normed: bool
    dtype: Dtype

    def require(self, want: Boundaries) -> None:
        """Raises ContractError where these are not the features that a draft is trained on."""
        self.boundaries.require(want, "train-draft")

    @functools.cached_property
    def _samples(self) -> dict[int, Sample]:
        """Of the files in which something is learned, by their index."""
        samples = {}
        for index, file in enumerate(self.files.files):
            found = self.files.read(index, has_states=False)
            is_learned = np.ones(len(found.tokens), bool)
            if found.is_said is not None:  # after a token, the assistant's next one is learned
                is_learned = np.append(found.is_said[1:], False)
            if len(found.tokens) >= FEWEST and is_learned[1:].any():
                samples[index] = Sample(found.tokens, is_learned, str(file))
        return samples

    @functools.cached_property
    def length(self) -> int:
        """Tokens of the longest sample."""
        return max((len(sample.ids) for sample in self._samples.values()), default=FEWEST)

    def windows(self, vocab_size: int) -> Windows:
        """Each sample as a window.

        Raises:
          InputError: none is left, a token is none of the vocabulary's, or a file is damaged.
        """
        windows = Windows.of(list(self._samples.values()), self.length, vocab_size)
        return dataclasses.replace(windows, recorded=self, rows=np.array(list(self._samples)))

    def read(self, rows: np.ndarray) -> tuple[Features, np.ndarray]:
        """The features of some files and their last states [B,length,D], zero past the ends."""
        of_rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for row in rows.tolist():
            sample = self.files.read(row)
            for kept, array in zip(of_rows, (sample.features, sample.last), strict=True):
                assert array is not None, "read with its states"
                rest = self.length - len(array)
                kept.append(np.pad(array, [(0, rest), (0, 0)]))
        dtype = Numerics(dtype=self.dtype).jnp_dtype
        features, last = (np.stack(kept).astype(dtype) for kept in of_rows)
        return Features(features, self.boundaries), last


def claim_features(
    files: FeatureFiles,
    target: Target,
    stated: tuple[int, ...] | None,
    dtype: Dtype,
    progress: Progress | None = None,
) -> tuple[OtherFeatures, FeaturesReport]:
    """The files under a claim, and what their comparison with the target says of them.

    Args:
      stated: the boundaries that the user says they are; None takes what the project's own config
        says, or else what they turn out to be.

    Raises:
      ContractError: two of these three say otherwise.
      InputError: it is said nowhere, and they are no states of this target; or the last ones are
        not.
    """
    ids, origin = stated, "set by --capture"
    if files.claim is not None:
        if stated not in (None, files.claim):
            raise ContractError(
                f"{files.path}: boundaries {files.claim} [{files.claim_from}], and {stated} "
                f"[{origin}]: leave out --capture, or the config is wrong"
            )
        ids, origin = files.claim, files.claim_from
    report = identify(files.path, target, progress)
    if report.last == "neither":
        raise InputError(
            f"{files.path}: the last states are not those of {target.identity}, before its final "
            f"norm or after it, so that nothing can be learned from them\n{report.summary()}"
        )
    if ids is None:
        if None in report.found:
            raise InputError(
                f"{files.path}: nothing says which boundaries these are, and comparison does not "
                f"tell; give --capture\n{report.summary()}"
            )
        ids = tuple(b for b in report.found if b is not None)
        origin = f"{files.path}, by comparison with the target"
    is_other = (found not in (None, said) for found, said in zip(report.found, ids, strict=False))
    if len(ids) != len(report.found) or any(is_other):
        raise ContractError(
            f"{files.path}: said to be boundaries {ids} [{origin}], and they are others\n"
            f"{report.summary()}"
        )
    claim = target.boundaries(ids, origin)
    return OtherFeatures(files, claim, report.last == "after", dtype), report
