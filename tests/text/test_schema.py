import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.text.schema import is_text, json_types, parameter_schema, referenced, typed_value

from .conversations import JSON, TEXT


def value_of(text: str, schema: Any, **definitions: Any) -> Any:
    """The value of ``text`` as the argument ``x`` of a tool whose ``x`` has that schema."""
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
    return typed_value(text, parameter_schema(parameters, "x"), parameters)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "string"}, "7"),
        ("true", {"type": "string"}, "true"),
        (' {"a": 1}\n', {"type": "string"}, ' {"a": 1}\n'),
        ("7", {"type": "integer"}, 7),
        ("7.5", {"type": "number"}, 7.5),
        ("7", {"type": "number"}, 7),
        (" [1, 2]\n", {"type": "array"}, [1, 2]),
        ('{"a": "b"}', {"type": "object"}, {"a": "b"}),
        ("true", {"type": "boolean"}, True),
        ("null", {"type": "null"}, None),
        ("seven", {"type": "integer"}, "seven"),
        ("1.5", {"type": "integer"}, 1.5),
        ("True", {"type": "boolean"}, "True"),
        ("7", {}, 7),
        ("seven", {}, "seven"),
        ('"seven"', {}, '"seven"'),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {}, "1e999"),
    ],
)
def test_a_value_has_the_type_its_schema_declares(text: str, schema: Any, value: Any) -> None:
    """antirez/ds4#569: every value became a string; a string that looks like a number stays one."""
    result = value_of(text, schema)
    assert (type(result), result) == (type(value), value)


NAME = {"type": "string"}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": ["string", "integer"]}, 7),
        ("7.5", {"type": ["string", "integer"]}, "7.5"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nil", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "nil"),
        ("null", {"type": "string", "nullable": True}, None),
        ('"a"', {"oneOf": [{"type": "string"}, {"type": "integer"}]}, '"a"'),
        ("[1]", {"oneOf": [{"type": "string"}, {"type": "array"}]}, [1]),
        ("7", {"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "7"),
        ("7", {"enum": ["7", 8]}, "7"),
        ("8", {"enum": ["7", 8]}, 8),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("true", {"enum": [1, "true"]}, "true"),
        ("1", {"const": 1.0}, 1),
        ("7", {"$ref": "#/$defs/name"}, "7"),
        ("7", {"$ref": "#/$defs/alias"}, "7"),
        ("7", {"$ref": "#/$defs/a~1b%25"}, "7"),
        ("7", {"$ref": "#/$defs/list/1"}, "7"),
        ("7", {"$ref": "#/$defs/loop"}, 7),
        ("7", {"$ref": "#/$defs/nowhere"}, 7),
        ("7", {"$ref": "other.json#/name"}, 7),
        ("null", {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]}, None),
        ("7", True, 7),
        ("7", {"type": "str"}, 7),
        ("7", {"type": [{}]}, 7),
    ],
)
def test_unions_references_and_combinations(text: str, schema: Any, value: Any) -> None:
    definitions = {
        "name": NAME,
        "alias": {"$ref": "#/$defs/name"},
        "a/b%": NAME,
        "list": [{"type": "integer"}, NAME],
        "loop": {"$ref": "#/$defs/loop"},
    }
    result = value_of(text, schema, **definitions)
    assert (type(result), result) == (type(value), value)


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({"properties": {"y": NAME}}, 7),
        ({"additionalProperties": NAME}, "7"),
        ({"properties": {"x": {"type": "integer"}}, "additionalProperties": NAME}, 7),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"x": NAME}}}}, "7"),
        ({"allOf": [{"properties": {"y": {}}}, {"properties": {"x": NAME}}]}, "7"),
        ({"anyOf": [{"properties": {"x": NAME}}, {"properties": {"y": {}}}]}, "7"),
        ({"oneOf": [{"properties": {"x": NAME}}, {"properties": {"x": {"type": "array"}}}]}, "7"),
        ({"oneOf": [{"properties": {"x": NAME}}, {"properties": {"x": {"type": "integer"}}}]}, 7),
        ({"properties": {"x": NAME}, "allOf": [{"properties": {"x": {"minLength": 1}}}]}, "7"),
        ({"properties": "nonsense", "allOf": 3}, 7),
    ],
)
def test_where_a_parameter_is_declared(parameters: dict, value: Any) -> None:
    result = typed_value("7", parameter_schema(parameters, "x"), parameters)
    assert (type(result), result) == (type(value), value)


@pytest.mark.parametrize(
    ("schema", "only_text"),
    [
        ({"type": "string"}, True),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/name"}]}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, False),
        ({"allOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/name"}]}, True),
        ({"enum": ["7", "8"]}, True),
        ({"enum": ["7", 8]}, False),
        ({"const": "7"}, True),
        ({}, False),
        (True, False),
        (False, False),
    ],
)
def test_parameters_that_hold_nothing_but_text(schema: Any, only_text: bool) -> None:
    """These are streamed while they grow."""
    assert is_text(schema, {"$defs": {"name": NAME}}) is only_text


@given(TEXT)
def test_a_string_parameter_takes_any_text_verbatim(text: str) -> None:
    parameters = {"properties": {"x": {"type": "string"}}}
    schema = parameter_schema(parameters, "x")
    assert is_text(schema, parameters)
    assert typed_value(text, schema, parameters) == text


@given(JSON.filter(lambda value: not isinstance(value, str)))
def test_json_values_come_back(value: Any) -> None:
    for schema in (
        {},
        True,
        {"type": ["object", "array", "number", "boolean", "null"]},
        {"enum": ["x", value]},
    ):
        assert value_of(json.dumps(value, ensure_ascii=False), schema) == value


SIMPLE = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["string", "integer", "number", "null", "boolean", ["string", "null"], ["array", "integer"]]
        ),
        "enum": st.lists(st.sampled_from(["7", 7, "null", None, True, "x", [1]]), min_size=1),
        "const": st.sampled_from(["7", 7, None]),
    },
)
SCHEMAS = st.recursive(
    SIMPLE,
    lambda inner: st.builds(
        lambda base, word, parts: {**base, word: parts},
        SIMPLE,
        st.sampled_from(["anyOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)


@given(st.sampled_from(["7", "7.0", "7.5", "null", "true", "x", "[1]", '"7"', ""]), SCHEMAS)
def test_a_value_is_admissible_whenever_one_reading_of_the_text_is(text: str, schema: Any) -> None:
    """Against an independent validator: JSON first, then the text, never an inadmissible one of the two."""
    validator = jsonschema.Draft202012Validator(schema)
    readings: list[Any] = [text]
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = text
    if not isinstance(parsed, str):
        readings.insert(0, parsed)
    admissible = [reading for reading in readings if validator.is_valid(reading)]
    result = value_of(text, schema)
    if admissible:
        assert (type(result), result) == (type(admissible[0]), admissible[0])


def test_json_types_and_references_are_read_through_the_whole_document():
    parameters = {"$defs": {"n": {"type": ["number", "null"]}, "s": {"type": "string"}}}
    assert json_types({"$ref": "#/$defs/n"}, parameters) == {"number", "integer", "null"}
    assert json_types({"anyOf": [{"$ref": "#/$defs/s"}, {"const": True}]}, parameters) == {"string", "boolean"}
    assert len(json_types(True, parameters)) == 7
    assert referenced({"$ref": "#/$defs/s"}, parameters) == {"type": "string"}
    assert referenced({"$ref": "elsewhere.json"}, parameters) is None
    assert referenced({"type": "string"}, parameters) is None
