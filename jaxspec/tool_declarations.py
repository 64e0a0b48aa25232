"""Tools as Kimi-K2.5 was trained to read them: TypeScript in place of JSON.

Source: `tool_declaration_ts.py` of Moonshot AI's repository, which its `apply_chat_template` runs
over the tools, their keys sorted; the chat template finds the text in `tools_ts_str`:

    # Tools

    ## functions
    namespace functions {
    // Read weather
    type weather = (_: {
      // City name
      city: string,
      units?: "c" | "f"
    }) => any;
    }
"""

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["declare_tools", "with_sorted_keys"]

INDENT = "  "
OF_UNIONS = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
"""What stands for a type that is one of several."""
CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""Keys of a schema that are told in a comment, by its type."""
PYTHON_TYPES = {"string": str, "number": (int, float), "integer": int, "boolean": bool}


def with_sorted_keys(value: Any) -> Any:
    """`value` with the keys of every object in it sorted: Kimi's tokenizer code gives tools to
    its chat template so."""
    if isinstance(value, dict):
        return {key: with_sorted_keys(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return [with_sorted_keys(one) for one in value]
    return value


def declare_tools(tools: Sequence[Any]) -> str | None:
    """The declarations of tools in OpenAI's form; "" if none of them is a function.

    None for a schema that cannot be declared so: the template then writes them all as JSON, as it
    does for Kimi's own code.
    """
    try:
        functions = [
            _Declaration().of_function(tool["function"])
            for tool in tools
            if tool.get("type") == "function" and tool.get("function")
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # a schema is anybody's JSON: whatever is not where it belongs in it
    if not functions:
        return ""
    return "\n".join(["# Tools", "", "## functions", "namespace functions {", *functions, "}", ""])


class _Declaration:
    """Writes one function.

    Attributes:
      definitions: schemas that a `$ref` may name, each an interface before the function.
      is_recursive: whether the parameters name themselves, and so are an interface too.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.is_recursive = False

    def of_function(self, function: dict[str, Any]) -> str:
        """The interfaces, the function's description, and its type."""
        parameters = function.get("parameters") or {}
        argument, lines = self._object(parameters, ""), []
        if self.is_recursive:
            fields = list(self._fields(parameters, INDENT).values())
            argument = "parameters"
            lines.append(f"interface parameters {_braces(fields, '') if fields else '{}'}")
        for name, schema in list(self.definitions.items()):
            if schema.get("description"):
                lines.append(_comment(schema["description"], ""))
            lines.append(f"interface {name} {self._type(schema, '')}")
        if function.get("description"):
            lines.append(_comment(function["description"], ""))
        name = function.get("name", "function")
        return "\n".join([*lines, f"type {name} = (_: {argument}) => any;"])

    def _type(self, schema: Any, indent: str) -> str:
        """The type that a schema describes.

        Raises:
          KeyError, TypeError, ValueError: it describes none.
        """
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(one, indent) for one in schema["anyOf"])
        if "enum" in schema:
            return _enum(schema)
        kind = schema["type"] if schema else "any"
        if isinstance(kind, list):
            return " | ".join(OF_UNIONS[one] for one in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return "number" if kind == "integer" else kind

    def _object(self, schema: dict[str, Any], indent: str) -> str:
        """Its fields by name, the required ones first."""
        self.definitions |= schema.get("$defs") or {}
        others, required = schema.get("additionalProperties"), schema.get("required", [])
        fields = self._fields(schema, indent + INDENT)
        lines = [fields[name] for name in sorted(fields, key=lambda n: (n not in required, n))]
        if others is not None:
            of_others = "never" if others is False else self._type(others, indent + INDENT)
            lines.append(f"{indent}{INDENT}[k: string]: {of_others}")
        return _braces(lines, indent) if lines else "{}"

    def _fields(self, schema: dict[str, Any], indent: str) -> dict[str, str]:
        """Each property under its comments, in the schema's order."""
        required, fields = schema.get("required", []), {}
        for name, of in schema.get("properties", {}).items():
            comments = _comments(of, indent)
            default = of.get("default") if isinstance(of, dict) else None
            if default is not None:
                is_number = isinstance(default, int | float)
                shown = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
                comments.append(f"{indent}// Default: {shown}")
            mark = "" if name in required else "?"
            fields[name] = "\n".join([*comments, f"{indent}{name}{mark}: {self._type(of, indent)}"])
        return fields

    def _array(self, schema: dict[str, Any], indent: str) -> str:
        items = schema.get("items") or {}
        inner = indent + INDENT
        if comments := _comments(items, inner):
            return "\n".join(
                ["Array<", *comments, f"{inner}{self._type(items, inner)}", f"{indent}>"]
            )
        return f"Array<{self._type(items, indent)}>"

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self.is_recursive = True
            return "parameters"
        name = reference.rpartition("/")[2]
        if not reference.startswith("#/$defs/") or name not in self.definitions:
            raise ValueError(f"no definition {reference}")
        return name


def _braces(fields: list[str], indent: str) -> str:
    return "\n".join(["{", ",\n".join(fields), f"{indent}}}"])


def _comment(text: str, indent: str) -> str:
    """A description as comment lines; an empty line of it is one."""
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _comments(schema: Any, indent: str) -> list[str]:
    """What is said of a value before its type: its description, and its bounds."""
    if isinstance(schema, bool):
        return []
    comments = []
    if schema.get("description"):
        comments.append(_comment(schema["description"], indent))
    kind = schema.get("type")
    is_plain = isinstance(kind, str) and not {"$ref", "anyOf", "enum"} & schema.keys()
    keys = CONSTRAINTS.get(kind, ()) if is_plain else ()
    if bounds := [f"{key}: {schema[key]}" for key in keys if key in schema]:
        comments.append(f"{indent}// {', '.join(bounds)}")
    return comments


def _enum(schema: dict[str, Any]) -> str:
    """Its values; null fits every type, and a type that is stated has to fit the others."""
    kind: Any = schema.get("type")
    values = schema["enum"]
    if isinstance(kind, list):
        if not (len(kind) == 1 or (len(kind) == 2 and "null" in kind)):
            raise ValueError(f"an enum of types {kind}")
        kind = next((one for one in kind if one != "null"), "null")
    wanted = PYTHON_TYPES.get(kind, object)
    if any(value is not None and not isinstance(value, wanted) for value in values):
        raise ValueError(f"an enum of type {kind} with {values}")
    return " | ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in values)
