"""Requests and what they gave: plain data, checked."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from jaxspec.config import TargetConfig
from jaxspec.errors import InputError
from jaxspec.sampling import Sampling
from jaxspec.step import NUM_STOP_IDS

__all__ = ["Completion", "Finish", "Piece", "Request", "Run", "check_seed", "sampling_of"]

Finish = Literal["eos", "stop", "length", "capacity"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, how its tokens are chosen, and what ends it.

    Attributes:
      temperature: 0 is greedy, exactly.
      top_k, top_p, min_p: what may be chosen at all; 0, 1 and 0 are off. See `sampling.Sampling`.
      seed: of the noise, from 0 to 2^32 - 1; the same request with the same seed has the same
        tokens.
      max_new_tokens: None takes the config's.
      stop_ids: tokens that end it, themselves emitted, besides the target's end-of-sequence.
    """

    prompt_ids: tuple[int, ...]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()

    def check_settings(self) -> None:
        """Raises InputError for settings by which no token can be chosen, or none is to be."""
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}; 0 is greedy, else it is positive")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it lies above 0, and 1 is off")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}; it lies between 0, which is off, and 1")
        if not 0 <= self.top_k < 2**31:
            raise InputError(f"top_k is {self.top_k}; 0 is off, else it is positive, below 2^31")
        check_seed(self.seed)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; it starts at 1")

    def check(self, target: TargetConfig, ignore_eos: bool = False) -> None:
        """Raises InputError for what this target cannot serve, whatever the capacity."""
        if not self.prompt_ids:
            raise InputError("the prompt is empty")
        for name, ids in (("token", self.prompt_ids), ("stop", self.stop_ids)):
            bad = next((i for i in ids if not 0 <= i < target.vocab_size), None)
            if bad is not None:
                raise InputError(f"{name} id {bad} is not in a vocabulary of {target.vocab_size}")
        self.check_settings()
        both = [i for i in self.stop_ids if i in target.eos_token_ids]
        if ignore_eos and both:
            raise InputError(
                f"stop id {both[0]} is the target's end of sequence, and ignore_eos goes on past "
                "it: drop one of the two"
            )
        count = len(self.all_stop_ids(target, ignore_eos))
        if count > NUM_STOP_IDS:
            raise InputError(
                f"{count} stop ids, the target's end of sequence among them; at most {NUM_STOP_IDS}"
            )

    def all_stop_ids(self, target: TargetConfig, ignore_eos: bool) -> tuple[int, ...]:
        """The ids that end it: the target's end of sequence and its own."""
        of_target = () if ignore_eos else target.eos_token_ids
        return tuple(dict.fromkeys(of_target + self.stop_ids))


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a request gave.

    Attributes:
      tokens: the emitted ids; a token that ended it is the last of them.
      finish: why it ended: "capacity" is a context that was full before `max_new_tokens`.
      accepted: drafted tokens accepted in each verify step; the first token comes from prefill.
      prefill_ms, decode_ms: wall time of the calls it took part in.
      error: why there is not one token: its prompt alone fills the context. None for all others.
    """

    tokens: tuple[int, ...]
    finish: Finish
    accepted: tuple[int, ...]
    prefill_ms: float
    decode_ms: float
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """The next tokens of a request.

    Attributes:
      index: of the request.
      tokens: those that came since its last piece. All of its pieces together are its tokens.
      completion: of a request that has ended with this piece; else None.
    """

    index: int
    tokens: tuple[int, ...]
    completion: Completion | None


@dataclasses.dataclass(frozen=True)
class Run:
    """The completions of all requests, in their order, and the wall time of all calls together."""

    completions: tuple[Completion, ...]
    prefill_ms: float
    decode_ms: float


def check_seed(seed: int) -> None:
    """Raises InputError for a seed of which no random numbers come."""
    if not 0 <= seed < 2**32:
        raise InputError(f"seed is {seed}; it lies between 0 and {2**32 - 1}")


def sampling_of(requests: Mapping[int, Request], batch: int) -> Sampling:
    """The sampling of requests at their places in a batch, on the host; other places are greedy."""
    of_none = Request(())
    rows = [requests.get(b, of_none) for b in range(batch)]
    return Sampling(
        np.array([row.seed for row in rows], np.uint32),
        np.array([row.temperature for row in rows], np.float32),
        np.array([row.top_k for row in rows], np.int32),
        np.array([row.top_p for row in rows], np.float32),
        np.array([row.min_p for row in rows], np.float32),
    )
