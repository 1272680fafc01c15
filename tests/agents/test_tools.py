"""Functions as tools: schemas, checked arguments, errors as results."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import Field

from yunque.agents import Tool, ToolResult, Toolset, load_tools
from yunque.agents.docstrings import described
from yunque.core.errors import ConfigError
from yunque.core.records import ToolCall


class Unit(Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


@dataclass
class Place:
    city: str
    country: str = "fr"


def forecast(
    place: Place,
    days: Annotated[int, Field(ge=1, le=7)],
    unit: Unit = Unit.CELSIUS,
    detail: Literal["low", "high"] = "low",
    tags: list[str] | None = None,
    *,
    schema: bool = False,
) -> dict[str, Any]:
    """Look up the weather.

    It may rain.

    Args:
        place: Where: a city
            and its country.
        days (int): How many days.

    Returns:
        What comes.
    """
    return {"place": place, "days": days, "unit": unit, "detail": detail, "tags": tags, "schema": schema}


def call(function: Callable[..., Any], timeout_s: float | None = None, **arguments: Any) -> ToolResult:
    return asyncio.run(Tool.of(function).call(arguments, timeout_s=timeout_s))


def test_the_schema_says_what_annotations_and_docstring_say() -> None:
    spec = Tool.of(forecast).spec
    assert (spec.name, spec.description) == ("forecast", "Look up the weather.\n\nIt may rain.")
    schema = spec.parameters
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["required"] == ["place", "days"]
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert properties["days"] == {"type": "integer", "minimum": 1, "maximum": 7, "description": "How many days."}
    assert properties["place"]["description"] == "Where: a city and its country."
    assert (properties["unit"]["default"], properties["detail"]["enum"]) == ("c", ["low", "high"])
    assert properties["schema"] == {"type": "boolean", "default": False}
    assert "title" not in properties["tags"]


@pytest.mark.parametrize(
    ("arguments", "is_valid"),
    [
        ({"place": {"city": "Paris"}, "days": 2}, True),
        ({"place": {"city": "Paris"}, "days": 2, "unit": "f", "tags": ["a"], "schema": True}, True),
        ({"place": {"city": "Paris"}, "days": 9}, False),
        ({"place": {"city": "Paris"}}, False),
        ({"place": {}, "days": 2}, False),
        ({"place": {"city": "Paris"}, "days": 2, "unit": "k"}, False),
        ({"place": {"city": "Paris"}, "days": 2, "wind": 1}, False),
    ],
)
def test_what_the_schema_admits_is_run_and_nothing_else(arguments: dict[str, Any], is_valid: bool) -> None:
    schema = Tool.of(forecast).spec.parameters
    assert jsonschema.Draft202012Validator(schema).is_valid(arguments) is is_valid
    assert call(forecast, **arguments).is_error is not is_valid


def test_arguments_arrive_as_the_annotated_types() -> None:
    seen: list[Any] = []

    def keep(place: Place, unit: Unit = Unit.CELSIUS) -> None:
        seen.extend([place, unit])

    assert call(keep, place={"city": "Lyon"}, unit="f") == ToolResult("null")
    assert seen == [Place("Lyon"), Unit.FAHRENHEIT]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain é", "plain é"),
        ({"a": [1, 2.5, None]}, '{"a":[1,2.5,null]}'),
        (Place("x"), '{"city":"x","country":"fr"}'),
        (7, "7"),
        (None, "null"),
        (Path("/a"), '"/a"'),
        ("\ud800", "?"),
    ],
)
def test_results_are_text_or_json(value: Any, text: str) -> None:
    def give() -> Any:
        return value

    assert call(give) == ToolResult(text)


def _circle() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


def _fails(kind: str) -> None:
    if kind == "exit":
        sys.exit(3)
    if kind == "stop":
        raise StopIteration
    raise {"value": ValueError("7 is too much"), "time": TimeoutError("far away"), "bare": KeyError}[kind]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("value", "Error: ValueError: 7 is too much"),
        ("time", "Error: TimeoutError: far away"),
        ("bare", "Error: KeyError"),
        ("exit", "Error: SystemExit: 3"),
        ("stop", "Error: RuntimeError: coroutine raised StopIteration"),
    ],
)
def test_exceptions_are_results_with_their_type(kind: str, text: str) -> None:
    async def fails(kind: str) -> None:
        _fails(kind)

    assert call(_fails, kind=kind) == ToolResult(text, is_error=True)
    assert call(fails, kind=kind) == ToolResult(text, is_error=True)


def test_a_result_that_cannot_be_written_is_an_error() -> None:
    assert call(_circle).is_error


def test_faults_of_arguments_name_each_argument() -> None:
    text = call(forecast, place={"city": 3}, days="many", wind=1).text
    assert all(f"{place}: " in text for place in ("place.city", "days", "wind"))


def test_functions_that_are_not_async_leave_the_event_loop_free() -> None:
    names: list[str] = []

    def slow() -> int:
        names.append(threading.current_thread().name)
        time.sleep(0.2)
        return 1

    async def run() -> int:
        ticks = 0
        task = asyncio.ensure_future(Tool.of(slow).call({}))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return ticks

    assert asyncio.run(run()) >= 5
    assert names == ["yunque-tool"]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_tool_that_takes_too_long_is_left(is_async: bool) -> None:
    async def waits() -> None:
        await asyncio.sleep(30)

    def sleeps() -> None:
        time.sleep(2)

    begin = time.monotonic()
    assert call(waits if is_async else sleeps, timeout_s=0.05) == ToolResult("Error: no result within 0.05 s", True)
    assert time.monotonic() - begin < 1.5  # nobody waits for the thread, at the loop's end neither


def positional(x: int, /) -> None: ...
def many(*xs: int) -> None: ...
def keywords(**xs: int) -> None: ...
def untyped(x) -> None: ...
def strange(x: threading.Lock) -> None: ...
def unknown_type(x: "Nothing") -> None: ...  # noqa: F821  # pyright: ignore


@pytest.mark.parametrize("function", [positional, many, keywords, untyped, strange, unknown_type])
def test_functions_that_cannot_be_tools_are_refused_by_name(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=function.__name__):
        Tool.of(function)


def test_methods_are_tools_without_their_self() -> None:
    class Counter:
        total = 0

        def add(self, n: int) -> int:
            self.total += n
            return self.total

    counter = Counter()
    assert call(counter.add, n=2) == call(counter.add, n=0) == ToolResult("2")
    assert list(Tool.of(counter.add).spec.parameters["properties"]) == ["n"]


def test_a_set_refuses_two_of_a_name_and_answers_unknown_names() -> None:
    with pytest.raises(ConfigError, match="two tools"):
        Toolset([forecast, forecast])
    result = asyncio.run(Toolset([forecast]).call(ToolCall("forcast", {})))
    assert result.is_error
    assert "did you mean 'forecast'" in result.text


def test_long_results_are_cut_in_the_middle() -> None:
    def long() -> str:
        return "a" * 600 + "b" * 600

    text = asyncio.run(Toolset([long], max_chars=100).call(ToolCall("long", {}))).text
    assert text == "a" * 50 + "\n[... 1100 characters left out ...]\n" + "b" * 50


@pytest.mark.parametrize(
    ("docstring", "summary", "parameters"),
    [
        (None, "", {}),
        ("One line.", "One line.", {}),
        (
            "S.\n\n:param x: the x\n:param int y: the y\n    goes on\n:return: z",
            "S.",
            {"x": "the x", "y": "the y goes on"},
        ),
        ("S.\n\nArgs:\n    x (int, optional): a: b\n    y:\n        below\n", "S.", {"x": "a: b", "y": "below"}),
        ("S.\n\nRaises:\n    ValueError: never\n", "S.", {}),
        ("S: with a colon.\nAnd more.", "S: with a colon.\nAnd more.", {}),
    ],
)
def test_docstrings(docstring: str | None, summary: str, parameters: dict[str, str]) -> None:
    found = described(docstring)
    assert (found.summary, found.parameters) == (summary, parameters)


FILE = '''
from __future__ import annotations
import os
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Box:
    size: int

def second(box: Box) -> int:
    """Twice."""
    return 2 * box.size

async def first(name: str = "x") -> str:
    return name

def _hidden(x): ...
'''


def test_a_file_gives_its_public_functions_in_order(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    tools = Toolset(load_tools(tmp_path / "mine.py"))
    assert [tool.spec.name for tool in tools] == ["second", "first"]
    assert asyncio.run(tools.call(ToolCall("second", {"box": {"size": 4}}))) == ToolResult("8")
    (tmp_path / "mine.py").write_text(FILE + "\n__all__ = ['first']\n")
    assert [tool.spec.name for tool in load_tools(tmp_path / "mine.py")] == ["first"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:", "SyntaxError"),
        ("import no_such_module_here", "ModuleNotFoundError"),
        ("raise SystemExit(1)", "SystemExit"),
        ("x = 1", "no public function"),
        ("def f(x): ...", "has no type"),
    ],
)
def test_files_that_give_no_tools_say_why(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_tools(tmp_path / "bad.py")
    with pytest.raises(ConfigError, match="no such file"):
        load_tools(tmp_path / "nothing.py")
