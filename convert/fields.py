"""Reading a JSON config in which every key must be known."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.convert.problems import Problems

__all__ = ["Claim", "Fields"]

_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Claim:
    """A fact about a checkpoint, and where it was read."""

    value: Any
    origin: str


class Fields:
    """One JSON object, every key of which is taken, expected or ignored for a stated reason.

    A key that nobody knows may change the model: `finish` makes it a problem.

    Attributes:
      data: the object.
      where: its place, as in `config.json: text_config`.
      claims: what was taken, by key, with where it stood.
      seen: the keys that are accounted for.
    """

    def __init__(self, data: Mapping[str, Any], where: str, problems: Problems) -> None:
        self.data, self.where, self.problems = data, where, problems
        self.claims: dict[str, Claim] = {}
        self.seen: set[str] = set()

    def place(self, key: str) -> str:
        """Where `key` stands: `config.json: text_config.key`."""
        return f"{self.where}{'.' if ': ' in self.where else ': '}{key}"

    def nested(self, key: str) -> "Fields":
        """The object under `key`, which counts as taken; empty where there is none."""
        self.seen.add(key)
        data = self.data.get(key)
        if data is not None and not isinstance(data, Mapping):
            self.problems.add(f"{self.place(key)} is {data!r}; expected an object")
            data = None
        return Fields(data or {}, self.place(key), self.problems)

    def take(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of `key`; null counts as absent. A whole number is a float, a bool no number.

        A missing or malformed value becomes a problem, and an empty `kind()` is returned: call
        `problems.raise_any()` before computing with what was taken.
        """
        self.seen.add(key)
        value = self.data.get(key)
        if value is None:
            if default is _REQUIRED:
                self.problems.add(f"{self.place(key)} is missing")
                return kind()
            self.claims[key] = Claim(default, f"default; {self.where} has no {key}")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.problems.add(f"{self.place(key)} is {value!r}; expected {_KINDS[kind]}")
            return kind()
        self.claims[key] = Claim(value, self.place(key))
        return value

    def take_ids(self, key: str) -> tuple[int, ...] | None:
        """The value of `key`, a whole number or a list of them, or None where it is absent."""
        self.seen.add(key)
        value = self.data.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not ids or any(type(one) is not int for one in ids):
            self.problems.add(f"{self.place(key)} is {value!r}; expected a list of whole numbers")
            return None
        self.claims[key] = Claim(ids, self.place(key))
        return tuple(ids)

    def expect(self, key: str, *supported: Any, why: str = "") -> None:
        """Makes any other value of `key` a problem; None among `supported` lets it be absent."""
        self.seen.add(key)
        value = self.data.get(key)
        if not any(value == one and type(value) is type(one) for one in supported):
            found = repr(value) if key in self.data else "absent"
            options = " or ".join("absent" if one is None else repr(one) for one in supported)
            self.problems.add(
                f"{self.place(key)} is {found}; supported: {options}{f' ({why})' if why else ''}"
            )

    def ignore(self, reasons: Mapping[str, str]) -> None:
        """Lets these keys be, each for the reason the table gives."""
        self.seen.update(reasons)

    def finish(self) -> None:
        """Makes every key that was neither taken, expected nor ignored a problem."""
        for key in sorted(set(self.data) - self.seen):
            self.problems.add(
                f"{self.place(key)} is {self.data[key]!r}: jaxspec does not know this key, and it "
                "may change the model"
            )


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}
