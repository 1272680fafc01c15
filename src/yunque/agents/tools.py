"""Typed Python functions as tools: schemas from annotations and docstrings, calls with checked arguments."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, to_json
from typing_extensions import TypedDict  # pydantic's own, before Python 3.12

from yunque.agents.docstrings import described
from yunque.core.errors import ConfigError, unknown
from yunque.core.records import ToolCall, ToolSpec


@dataclass(frozen=True)
class ToolResult:
    """What a call gave, as the model reads it."""

    text: str
    is_error: bool = False


class _Schema(GenerateJsonSchema):
    """Titles only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


@dataclass(frozen=True)
class Tool:
    """A function and what the model is told of it."""

    spec: ToolSpec
    function: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]

    @staticmethod
    def of(function: Callable[..., Any]) -> "Tool":
        """A tool of the function's name. Every parameter has a type; its description comes from the docstring or from
        ``Annotated[..., Field(description=...)]``. Raises ``ConfigError`` for what cannot be called by name."""
        name = getattr(function, "__name__", type(function).__name__)
        told = described(inspect.getdoc(function))
        adapter, schema = _arguments_of(function, name, told.parameters)
        body = {"name": name, "description": told.summary, "parameters": schema}
        return Tool(ToolSpec.from_openai({"type": "function", "function": body}), function, adapter)

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float | None = None) -> ToolResult:
        """Run the function. Arguments that do not fit, exceptions and time-outs are results that say so.

        A function that is not async runs in a thread of its own; cancelled or late, it is left to end by itself.
        """
        try:
            values = self.arguments.validate_python(dict(arguments))
        except ValidationError as error:
            return ToolResult(f"Error: {self.spec.name}: {_faults(error)}", is_error=True)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return ToolResult(as_text(await self._run(values)))
        except TimeoutError as error:
            why = f"no result within {timeout_s:g} s" if limit.expired() and timeout_s else _named(error)
            return ToolResult(f"Error: {why}", is_error=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model reads what went wrong
            return ToolResult(f"Error: {_named(error)}", is_error=True)

    async def _run(self, values: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**values)
        value = await _in_thread(self.function, values)
        return await value if isinstance(value, Awaitable) else value


class Toolset:
    """Tools by name. Results longer than ``max_chars`` are cut in the middle, with a note."""

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        timeout_s: float | None = None,
        max_chars: int = 100_000,
    ) -> None:
        self._tools: dict[str, Tool] = {}
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        for given in tools:
            tool = given if isinstance(given, Tool) else Tool.of(given)
            if tool.spec.name in self._tools:
                raise ConfigError(f"two tools are named {tool.spec.name!r}")
            self._tools[tool.spec.name] = tool

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What the model is told."""
        return tuple(tool.spec for tool in self._tools.values())

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call; a name that is not there is a result too."""
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(f"Error: {unknown('tool', call.name, self._tools)}", is_error=True)
        result = await tool.call(call.arguments, timeout_s=self._timeout_s)
        return ToolResult(_cut(result.text, self._max_chars), result.is_error)


def as_text(value: Any) -> str:
    """Text as it is, other values as JSON; what JSON cannot hold as its ``str``. Raises ``TypeError``."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    try:
        return to_json(value, fallback=str).decode()
    except PydanticSerializationError as error:
        raise TypeError(f"the result cannot be written as JSON: {error}") from error


def _arguments_of(
    function: Callable[..., Any], name: str, texts: Mapping[str, str]
) -> tuple[TypeAdapter[dict[str, Any]], dict[str, Any]]:
    """What reads the arguments, and their JSON schema."""
    where = f"tool {name!r}"
    try:
        signature = inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: its signature cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: {parameter} cannot be given by name; tools have named parameters only")
        if parameter.name not in hints:
            raise ConfigError(f"{where}: the parameter {parameter.name!r} has no type")
        fields[parameter.name] = _field(parameter, hints[parameter.name], texts.get(parameter.name))
    shape: Any = TypedDict(name, fields)  # type: ignore[misc] - made at run time
    shape.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(shape)
        schema = adapter.json_schema(schema_generator=_Schema)
    except PydanticUserError as error:
        raise ConfigError(f"{where}: a type has no JSON schema: {error}") from error
    schema.pop("title", None)
    schema.pop("description", None)
    return adapter, schema


def _field(parameter: inspect.Parameter, hint: Any, text: str | None) -> Any:
    is_optional = parameter.default is not parameter.empty
    extra: dict[str, Any] = {}
    if is_optional:
        with suppress(PydanticSerializationError):  # the model need not know it
            extra["default"] = TypeAdapter(Any).dump_python(parameter.default, mode="json")
    told = {} if text is None else {"description": text}
    described_hint = Annotated[hint, Field(**told, json_schema_extra=extra or None)]  # type: ignore[valid-type]
    return NotRequired[described_hint] if is_optional else described_hint


async def _in_thread(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """The function's result from a thread that nobody waits for at the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def run() -> None:
        value, failure = None, None
        try:
            value = context.run(function, **values)
        except BaseException as error:  # noqa: BLE001 - raised again where the call is awaited
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, value, failure)

    threading.Thread(target=run, name="yunque-tool", daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return value


def _faults(error: ValidationError) -> str:
    faults = [f"{'.'.join(map(str, fault['loc'])) or 'arguments'}: {fault['msg']}" for fault in error.errors()]
    return "; ".join(faults)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[len(text) - half :]}"
