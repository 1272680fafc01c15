"""Argument values from the text a model wrote, typed by the tool's JSON schema."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from yunque.core.records import parse_json

Schema = Mapping[str, Any] | bool

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_UNIONS = ("anyOf", "oneOf")


def parameter_schema(parameters: Mapping[str, Any], name: str) -> Schema:
    """The schema of one argument inside a tool's ``parameters``; True (admits anything) if it has none.

    ``properties`` are looked for at the top, behind ``$ref``, in every ``allOf`` part (all of them hold) and
    in every ``anyOf``/``oneOf`` branch that names the argument (one of them holds); ``additionalProperties``
    speaks for names listed nowhere.
    """
    return _Resolver(parameters).parameter(parameters, name, frozenset())


def json_types(schema: Schema, parameters: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that the schema can admit, by JSON Schema's names; ``integer`` is apart from ``number``."""
    return _Resolver(parameters).types(schema, frozenset())


def is_text(schema: Schema, parameters: Mapping[str, Any]) -> bool:
    """Whether the schema admits strings only, so that a value is its text, whatever that looks like."""
    return json_types(schema, parameters) == {"string"}


def referenced(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> Any:
    """What the schema's ``$ref`` points at inside ``parameters``; None without one, or if it points elsewhere."""
    return next(_Resolver(parameters).target(schema), None)


def typed_value(text: str, schema: Schema, parameters: Mapping[str, Any]) -> Any:
    """The value that ``text`` stands for under ``schema``; ``parameters`` resolves its ``$ref``.

    The formats write strings as they are and everything else as JSON. So a parameter that is a string takes
    the text verbatim (antirez/ds4#569: ``"7"`` stays ``"7"``); otherwise JSON that the schema admits wins,
    then the text where the schema admits a string, then any JSON at all, then the text. JSON that is itself a
    string stays text, quotes included. Only ``type``, ``enum``, ``const`` and combinations decide; ranges and
    nested contents do not.
    """
    resolver = _Resolver(parameters)
    if resolver.types(schema, frozenset()) == {"string"}:
        return text
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return text
    if resolver.admits(value, schema, frozenset()):
        return value
    return text if resolver.admits(text, schema, frozenset()) else value


class _Resolver:
    """Reads a schema with its document's references. ``seen`` holds the schemas on the way: cycles end."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root

    def parameter(self, schema: Any, name: str, seen: frozenset[int]) -> Schema:
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return True
        seen |= {id(schema)}
        listed = _mapping(schema.get("properties"))
        found: list[Schema] = [listed[name]] if name in listed else []
        inner = (*self.target(schema), *_list(schema.get("allOf")))
        found += [self.parameter(part, name, seen) for part in inner]
        for union in _UNIONS:
            branches = [self.parameter(branch, name, seen) for branch in _list(schema.get(union))]
            speaking = [branch for branch in branches if branch is not True]
            found += [{"anyOf": speaking}] if speaking else []
        found = [part for part in found if part is not True]
        if not found and isinstance(schema.get("additionalProperties"), Mapping):
            return schema["additionalProperties"]
        if len(found) == 1:
            return found[0]
        return {"allOf": found} if found else True

    def types(self, schema: Any, seen: frozenset[int]) -> frozenset[str]:
        """The JSON types that the schema can admit; ``integer`` is apart from ``number``."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return _TYPES if schema is not False else frozenset()
        seen |= {id(schema)}
        types = _declared(schema)
        values = _enumerated(schema)
        if values is not None:
            types &= frozenset(_type_of(value) for value in values)
        for part in (*self.target(schema), *_list(schema.get("allOf"))):
            types &= self.types(part, seen)
        for union in _UNIONS:
            branches = [self.types(branch, seen) for branch in _list(schema.get(union))]
            if branches:
                types &= frozenset().union(*branches)
        return types

    def admits(self, value: Any, schema: Any, seen: frozenset[int]) -> bool:
        """Whether the schema's types, enums and combinations allow the value."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return schema is not False
        seen |= {id(schema)}
        values = _enumerated(schema)
        if values is not None and not any(_equal(value, allowed) for allowed in values):
            return False
        if _type_of(value) not in _declared(schema):
            return False
        parts = (*self.target(schema), *_list(schema.get("allOf")))
        if not all(self.admits(value, part, seen) for part in parts):
            return False
        unions = [_list(schema.get(union)) for union in _UNIONS]
        return all(any(self.admits(value, branch, seen) for branch in union) for union in unions if union)

    def target(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """What ``$ref`` points at inside the root document; nothing when it points elsewhere or nowhere."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return
        node: Any = self.root
        for step in reference[1:].split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                return
        yield node


def _declared(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that ``type`` and OpenAPI's ``nullable`` name; all types if a name is not JSON Schema's."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else _list(declared)
    if not names or not all(name in _TYPES for name in map(str, names)):
        return _TYPES
    implied = {"integer": "number" in names, "null": schema.get("nullable") is True}
    return frozenset([*names, *(name for name, is_implied in implied.items() if is_implied)])


def _enumerated(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that ``enum`` and ``const`` leave, or None when the schema has neither."""
    values = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if "const" not in schema:
        return values
    const = schema["const"]
    return [const] if values is None or any(_equal(const, value) for value in values) else []


def _type_of(value: Any) -> str:
    """The JSON type of a value; 7.0 is an integer to JSON Schema."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _equal(left: Any, right: Any) -> bool:
    """Equality of JSON values, in which true is not 1 but 1.0 is."""
    if isinstance(left, int | float | bool) and isinstance(right, int | float | bool):
        return isinstance(left, bool) == isinstance(right, bool) and left == right
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
