"""The grammar of one GLM tool call: which names, arguments and values a set of tools allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from yunque.core.records import ToolSpec
from yunque.protocol.errors import RequestError
from yunque.text import SpecialTokens
from yunque.text.schema import Schema, json_types, parameter_schema, referenced

Translate = Callable[[str, str], str]
"""From a regular expression, and which of its classes are ASCII only, to the inside of ``/.../`` in Lark."""

MAX_ARGUMENTS = 64
"""Arguments of one tool: those given so far are a set of bits in the grammar."""

JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""How JSON inside an argument is spaced: as the formats write it, or without the spaces."""

_UNENFORCED = (
    "anyOf",
    "oneOf",
    "not",
    "if",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "minProperties",
    "maxProperties",
    "patternProperties",
    "propertyNames",
)
_SPACE = r"[ \t\n\r]*"
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_ANY_TEXT = "/(?s:.*)/"
_NO_CLOSING_TAG = r"~/(?s:.*)<\/arg_value>(?s:.*)/"
_NOT_JSON = rf"~/{_SPACE}({_NUMBER}|true|false|null){_SPACE}/ & ~/{_SPACE}[\[{{](?s:.*)/"


def call_grammar(tools: Sequence[ToolSpec], special: SpecialTokens, to_lark: Translate) -> str:
    """A Lark grammar of what follows ``<tool_call>``, up to and with ``</tool_call>``.

    ``to_lark`` is ``llguidance.regex_to_lark``.

    Listed parameters come in any order, each at most once, the required ones always; others never. A string is
    its text, without the spelling of the closing tag; any other value is JSON of the parameter's schema. Where
    the schema admits both, text that reads as other JSON is left out, so that the value's type is never in doubt.
    A string's ``format`` is not enforced. Raises ``RequestError`` naming the tool and what cannot be enforced.
    """
    if not tools:
        raise RequestError("a tool constraint needs at least one tool", param="tools")
    lines = ["%llguidance {}", "start: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        lines += _Call(index, tool, special, to_lark).lines()
    return "\n".join(lines) + "\n"


class _Call:
    """The rules of one tool's call; ``index`` makes their names unique."""

    def __init__(self, index: int, tool: ToolSpec, special: SpecialTokens, to_lark: Translate) -> None:
        self.index = index
        self.tool = tool
        self.special = special
        self.to_lark = to_lark

    def lines(self) -> Iterator[str]:
        names, required = self._properties()
        if len(names) > MAX_ARGUMENTS:
            raise self._refused(f"has {len(names)} parameters; at most {MAX_ARGUMENTS} can be constrained")
        arguments = f"args_{self.index}::0x0 " if names else ""
        yield f"call_{self.index}: {json.dumps(self.tool.name)} {arguments}{self._tag('</tool_call>')}"
        if not names:
            return
        yield f"args_{self.index}::_: " + (f'"" %if is_ones([0:{len(required)}])' if required else '""')
        for bit in range(len(names)):
            yield f"  | arg_{self.index}_{bit} args_{self.index}::set_bit({bit}) %if bit_clear({bit})"
        for bit, name in enumerate(names):
            yield from self._argument(bit, name)

    def _argument(self, bit: int, name: str) -> Iterator[str]:
        schema = parameter_schema(self.tool.parameters, name)
        types = json_types(schema, self.tool.parameters)
        others = sorted(types - {"string"})
        terminal = f"TEXT_{self.index}_{bit}"
        values = []
        if "string" in types:
            parts = [_ANY_TEXT, _NO_CLOSING_TAG, *([_NOT_JSON] if others else []), *self._text_parts(schema)]
            yield f"{terminal}: " + " & ".join(parts)
            values.append(terminal)
        if others:
            values.append("%json " + json.dumps(self._json_schema(schema, others)))
        if not values:
            raise self._refused(f"has the parameter {name!r}, which admits no value")
        key = f"{self._tag('<arg_key>')} {json.dumps(name)} {self._tag('</arg_key>')}"
        value = f"{self._tag('<arg_value>')} ({' | '.join(values)}) {self._tag('</arg_value>')}"
        yield f"arg_{self.index}_{bit}: {key} {value}"

    def _tag(self, tag: str) -> str:
        return f"<[{self.special[tag]}]>"

    def _properties(self) -> tuple[list[str], list[str]]:
        """The names of the parameters, the required ones first, and the required ones."""
        names: dict[str, None] = {}
        required: dict[str, None] = {}
        pending: list[tuple[Any, int]] = [(self.tool.parameters, 0)]
        while pending:
            schema, depth = pending.pop(0)
            if not isinstance(schema, Mapping) or depth > 8:
                continue
            if schema.get("type", "object") not in ("object", ["object"]):
                raise self._refused(f"has parameters of type {schema['type']!r}; they must be an object")
            unenforced = [key for key in _UNENFORCED if schema.get(key)]
            if unenforced:
                raise self._refused(f"has {unenforced[0]!r} on its parameters, which cannot be enforced")
            names |= dict.fromkeys(schema.get("properties") or ())
            required |= dict.fromkeys(schema.get("required") or ())
            inner = [referenced(schema, self.tool.parameters), *(schema.get("allOf") or ())]
            pending += [(part, depth + 1) for part in inner]
        return [*required, *(name for name in names if name not in required)], list(required)

    def _text_parts(self, schema: Schema, depth: int = 0) -> list[str]:
        """Terminals of which a string of ``schema`` must match every one."""
        if not isinstance(schema, Mapping) or depth > 8:
            return []
        parts = []
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            strings = [value for value in values if isinstance(value, str)]
            parts.append("(" + " | ".join(map(json.dumps, strings)) + ")")
        if "minLength" in schema or "maxLength" in schema:
            parts.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        if "pattern" in schema:
            parts.append(f"/{containing(schema['pattern'], self.to_lark)}/")
        for part in (referenced(schema, self.tool.parameters), *(schema.get("allOf") or ())):
            parts += self._text_parts(part, depth + 1)
        for union in ("anyOf", "oneOf"):
            branches = [
                self._text_parts(branch, depth + 1)
                for branch in schema.get(union) or ()
                if "string" in json_types(branch, self.tool.parameters)
            ]
            if branches and all(branches):
                parts.append("(" + " | ".join("(" + " & ".join(branch) + ")" for branch in branches) + ")")
        return parts

    def _json_schema(self, schema: Schema, types: Sequence[str]) -> dict[str, Any]:
        """``schema`` for the values of ``types`` alone, as a document of its own."""
        types = [name for name in types if name != "integer" or "number" not in types]
        within = {} if isinstance(schema, bool) else _moved_references(schema)
        is_plain = not {"$ref", "allOf", "anyOf", "oneOf", "enum", "const"} & within.keys()
        typed = {**within, "type": types} if is_plain else {"allOf": [within, {"type": types}]}
        root = {"$defs": {"root": _moved_references(self.tool.parameters)}} if "$ref" in json.dumps(within) else {}
        return {**typed, **root, "x-guidance": JSON_LAYOUT}

    def _refused(self, reason: str) -> RequestError:
        return RequestError(f"tool {self.tool.name!r} {reason}", param="tools")


def containing(pattern: str, to_lark: Translate) -> str:
    """The regular expression of a whole text in which ``pattern`` is found, as JSON Schema reads it.

    ``^`` and ``$`` are understood at the ends of the pattern and of its outermost alternatives.
    """
    found = []
    for alternative in _alternatives(pattern):
        is_end = alternative.endswith("$") and not alternative.endswith("\\$")
        inner = alternative.removeprefix("^")
        inner = inner.removesuffix("$") if is_end else inner
        before = "" if alternative.startswith("^") else "(?s:.*)"
        after = "" if is_end else "(?s:.*)"
        found.append(f"{before}(?:{to_lark(inner, 'dw')}){after}")
    return "|".join(found)


def _alternatives(pattern: str) -> list[str]:
    """``pattern`` cut at the ``|`` that stand outside groups and classes."""
    parts, depth, in_class, escaped = [""], 0, False, False
    for character in pattern:
        if character == "|" and not (depth or in_class or escaped):
            parts.append("")
            continue
        parts[-1] += character
        if escaped or character == "\\":
            escaped = not escaped
        elif in_class or character == "[":
            in_class = character != "]"
        else:
            depth += (character == "(") - (character == ")")
    return parts


def _moved_references(schema: Any) -> Any:
    """``schema`` with its references made relative to ``$defs/root``."""
    if isinstance(schema, Mapping):
        return {
            key: "#/$defs/root" + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved_references(value)
            for key, value in schema.items()
        }
    return [_moved_references(part) for part in schema] if isinstance(schema, list) else schema
