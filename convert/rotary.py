"""Rotary embeddings as configs state them, and what may be asked for in their place."""

import dataclasses
import json
from typing import Any, Literal

from jaxspec.config import Llama3Scaling, RotaryConfig, Yarn
from jaxspec.convert.fields import Claim, Fields
from jaxspec.convert.problems import Problems
from jaxspec.errors import InputError

__all__ = ["AsStated", "RotaryChoice", "read_rotary"]

AsStated = Literal["as stated"]


@dataclasses.dataclass(frozen=True)
class RotaryChoice:
    """What a draft's rotary embedding is, where its files are known to be wrong about it.

    TorchSpec trained latent drafts with base 10000 under configs that say 50000; copies of one
    Llama draft differ in base and scaling. Which is right shows in the acceptance alone.

    Attributes:
      theta, kind: None leaves what the config says; `scaling` does at "as stated".
    """

    theta: float | None = None
    scaling: Yarn | Llama3Scaling | AsStated | None = "as stated"
    kind: Literal["pairs", "halves"] | None = None

    @classmethod
    def parse(cls, text: str) -> "RotaryChoice":
        """The choice as `--draft-rotary` writes it: a JSON object of a config's own keys.

        Raises:
          InputError: it is none, or has a key or a value that is unknown.
        """
        where = "--draft-rotary"
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise InputError(
                f"{where} is {text!r}: expected a JSON object with rope_theta, rope_scaling (an "
                "object, or null for none) or rope_interleave, as a config has them"
            )
        problems = Problems(where)
        fields, choice = Fields(data, f"{where}: ", problems), cls()
        if "rope_theta" in data:
            theta = fields.take("rope_theta", float)
            if not 0 < theta < float("inf"):
                problems.add(f"rope_theta is {data['rope_theta']!r}; expected a positive number")
            choice = dataclasses.replace(choice, theta=theta)
        if "rope_scaling" in data:
            scaling = fields.nested("rope_scaling")
            asked = _read_scaling(scaling) if scaling.data else None
            choice = dataclasses.replace(choice, scaling=asked)
        if "rope_interleave" in data:
            kind = "pairs" if fields.take("rope_interleave", bool) else "halves"
            choice = dataclasses.replace(choice, kind=kind)
        fields.finish()
        problems.raise_any()
        return choice

    def __bool__(self) -> bool:
        """Whether it changes anything."""
        return self != RotaryChoice()

    def apply(self, stated: RotaryConfig, claims: dict[str, Claim]) -> RotaryConfig:
        """The embedding with what was asked for; the claims say what the config has instead."""
        changed: dict[str, Any] = {}
        if self.theta is not None:
            changed["theta"] = self.theta
        if self.kind is not None:
            changed["kind"] = self.kind
        rotary = dataclasses.replace(stated, **changed)
        if self.scaling != "as stated":
            rotary = rotary.scaled_by(self.scaling)
        of_rotary, of_kind = claims["rotary"], claims["rotary_kind"]
        if "theta" in changed or "yarn" in changed:
            origin = f"as asked for; {of_rotary.origin} says {json.dumps(of_rotary.value)}"
            claims["rotary"] = Claim(_as_claim(rotary), origin)
        if "kind" in changed:
            origin = f"as asked for; {of_kind.origin} says {of_kind.value!r}"
            claims["rotary_kind"] = Claim(rotary.kind, origin)
        return rotary


def _as_claim(rotary: RotaryConfig) -> dict[str, Any]:
    claim = {"theta": rotary.theta, "yarn": rotary.yarn and dataclasses.asdict(rotary.yarn)}
    if rotary.llama3 is not None:
        claim["llama3"] = dataclasses.asdict(rotary.llama3)
    return claim


def read_rotary(fields: Fields, width: int, kind: Literal["pairs", "halves"]) -> RotaryConfig:
    """The rotary embedding, from `rope_theta` and `rope_scaling`, or from `rope_parameters`.

    The base is required: every framework that fell back to 10000 here was wrong for Kimi once.
    """
    problems = fields.problems
    scaling, parameters = fields.nested("rope_scaling"), fields.nested("rope_parameters")
    theta = fields.take("rope_theta", float, 0.0)
    if parameters.data:
        of_parameters = parameters.take("rope_theta", float, theta)
        if theta and of_parameters != theta:
            problems.add(
                f"{fields.place('rope_theta')} is {theta}, but "
                f"{parameters.place('rope_theta')} is {of_parameters}"
            )
        theta = of_parameters
    if theta <= 0:
        problems.add(f"{fields.place('rope_theta')} is missing, or not a positive number")
    scalings = [_read_scaling(one) for one in (scaling, parameters) if one.data]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        problems.add(f"{scaling.where} and {parameters.where} disagree")
    rotary = RotaryConfig(width, theta, kind).scaled_by(scalings[0] if scalings else None)
    fields.claims["rotary"] = Claim(
        _as_claim(rotary),
        parameters.where if parameters.data else fields.place("rope_theta and rope_scaling"),
    )
    return rotary


def _read_scaling(fields: Fields) -> Yarn | Llama3Scaling | None:
    """The scaling of an object that has one, or None for the plain rotary embedding."""
    names = {fields.data[key] for key in ("type", "rope_type") if fields.data.get(key)}
    fields.ignore({"type": "read above", "rope_type": "read above"})
    fields.expect("partial_rotary_factor", None, 1.0, 1, why="the whole width is rotated")
    scaling, positive = None, ()
    if names == {"yarn"}:
        scaling = Yarn(
            factor=fields.take("factor", float),
            original_max_position_embeddings=fields.take("original_max_position_embeddings", int),
            beta_fast=fields.take("beta_fast", float, 32.0),
            beta_slow=fields.take("beta_slow", float, 1.0),
            mscale=fields.take("mscale", float, 1.0),
            mscale_all_dim=fields.take("mscale_all_dim", float, 0.0),
        )
        positive = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        fields.expect("attention_factor", None, why="magnitudes come from mscale alone")
        fields.expect("truncate", None, True, why="the ramp starts and ends at whole pairs")
    elif names == {"llama3"}:
        positive = tuple(field.name for field in dataclasses.fields(Llama3Scaling))
        scaling = Llama3Scaling(
            factor=fields.take("factor", float),
            original_max_position_embeddings=fields.take("original_max_position_embeddings", int),
            low_freq_factor=fields.take("low_freq_factor", float),
            high_freq_factor=fields.take("high_freq_factor", float),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor > 0:
            fields.problems.add(
                f"{fields.place('low_freq_factor')} is {scaling.low_freq_factor}; expected less "
                f"than high_freq_factor {scaling.high_freq_factor}"
            )
    elif names - {"default"}:
        fields.problems.add(
            f"{fields.place('type')} is {' and '.join(map(repr, sorted(names)))}; supported: "
            "'yarn', 'llama3' or 'default'"
        )
        return None
    for key in positive:
        if fields.data.get(key) is not None and not getattr(scaling, key) > 0:
            fields.problems.add(
                f"{fields.place(key)} is {fields.data[key]!r}; expected a positive number"
            )
    fields.finish()
    return scaling
