"""The tables of a TOML file to one frozen dataclass and back; unknown keys are refused with the nearest valid name.

A configuration is a frozen standard-library dataclass. Its fields are scalars, paths, literals, enums,
tuples, ``dict[str, X]``, ``X | None``, other such dataclasses, or unions of dataclasses told apart by a
``kind`` literal:

    @dataclass(frozen=True)
    class AdamW:
        kind: Literal["adamw"] = "adamw"
        lr: float = 3e-4

    @dataclass(frozen=True)
    class Train:
        steps: int
        optimizer: AdamW | Muon = AdamW()

This module owns tables and their keys. The values in them are pydantic's business, in strict mode (no "3"
for 3), so ``Annotated[float, Field(gt=0)]`` works. A ValueError from ``__post_init__`` gets the key in front.
"""

import dataclasses
import enum
import functools
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypeVar

import tomli_w
from pydantic import TypeAdapter, ValidationError

from yunque.core.errors import ConfigError, unknown

T = TypeVar("T")
_ABSENT: Any = object()


def from_mapping(cls: type[T], data: Mapping[str, Any], *, where: str = "") -> T:
    """``cls`` from plain tables, lists and scalars; ``where`` is the dotted key of ``data`` for messages."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"a configuration is a dataclass, got {cls!r}")
    return _build(cls, data, where)


def to_mapping(obj: Any) -> dict[str, Any]:
    """The plain tables, lists and scalars of a configuration; `from_mapping` gives an equal object back.

    TOML has no None: a field that is None is left out, and refused (ConfigError) where leaving it out would
    read back as something else.
    """
    return _plain_table(obj, "")


def to_toml(obj: Any) -> str:
    """A configuration as the text of a TOML file; `from_mapping` of its tables gives an equal object back."""
    return tomli_w.dumps(to_mapping(obj))


def with_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``data`` with each ``key.path=value`` set in turn.

    The value is read as TOML (``3e-4``, ``true``, ``[1, 2]``, ``{kind = "adamw"}``); what starts like none of
    these is taken as a string, so that ``device=cpu`` needs no quotes.
    """
    result = _copy_tables(data)
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(f"override {override!r} is not of the form key.path=value")
        table = result
        for depth, name in enumerate(names[:-1], start=1):
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {override!r}: {'.'.join(names[:depth])!r} is a value, not a table")
        table[names[-1]] = _override_value(override, text.strip())
    return result


def _override_value(override: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
        if len(parsed) == 1:
            return parsed["value"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"override {override!r}: value is not TOML: {error}") from error
    return text


def _copy_tables(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy_tables(value) if isinstance(value, Mapping) else value for key, value in data.items()}


# --- reading: from plain values to typed ones ---


def _build(wanted: Any, value: Any, where: str) -> Any:
    """Turn ``value`` into the type ``wanted``, descending only where a dataclass can be."""
    if not _holds_dataclass(wanted):
        return _build_leaf(wanted, value, where)
    if dataclasses.is_dataclass(wanted):
        return _build_dataclass(typing.cast(type, wanted), value, where)
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Annotated:
        return _build(arguments[0], value, where)
    if origin in (typing.Union, types.UnionType):
        return _build_union(arguments, value, where)
    if origin is tuple:
        return _build_tuple(arguments, value, where)
    if origin is dict:
        table = _expect_table(value, where)
        return {key: _build(arguments[1], item, _join(where, key)) for key, item in table.items()}
    raise TypeError(f"{where or 'configuration'}: a dataclass cannot stand inside {wanted}")


def _build_dataclass(cls: type, value: Any, where: str) -> Any:
    if isinstance(value, cls):
        return value
    table = _expect_table(value, where)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    strangers = [unknown("key", key, fields, where=_table_name(where)) for key in table if key not in fields]
    if strangers:
        raise ConfigError("\n".join(strangers))
    missing = [name for name, field in fields.items() if name not in table and _default(field) is _ABSENT]
    if missing:
        keys = f"key{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}"
        raise ConfigError(f"missing {keys}{_in_table(where)}")
    hints = _hints(cls)
    arguments = {key: _build(hints[key], item, _join(where, key)) for key, item in table.items()}
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ConfigError(f"{_table_name(where)}: {error}" if where else str(error)) from error


def _build_union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    """The member ``value`` belongs to: None, the dataclass of its ``kind``, or one of the other types."""
    if value is None and type(None) in members:
        return None
    records = [member for member in members if dataclasses.is_dataclass(member)]
    others = [member for member in members if member not in records and member is not type(None)]
    for record in records:
        if isinstance(value, typing.cast(type, record)):
            return value
    if others and not isinstance(value, Mapping):
        return _build(typing.Union[tuple(others)], value, where)  # noqa: UP007  (a union made at run time)
    if len(records) == 1:
        return _build(records[0], value, where)
    table = _expect_table(value, where)
    by_kind = {kind: record for record in records for kind in _kinds(record)}
    if "kind" not in table:
        raise ConfigError(f"missing key 'kind'{_in_table(where)}; valid: {', '.join(sorted(by_kind))}")
    if table["kind"] not in by_kind:
        raise ConfigError(unknown("kind", str(table["kind"]), by_kind, where=_table_name(where)))
    return _build(by_kind[table["kind"]], value, where)


def _build_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} = {value!r}: expected a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        raise ConfigError(f"{where}: expected {len(arguments)} items, got {len(value)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(_build(wanted, item, f"{where}[{index}]") for index, (wanted, item) in enumerate(pairs))


def _build_leaf(wanted: Any, value: Any, where: str) -> Any:
    choices = _choices(wanted)
    if choices and isinstance(value, str) and value not in choices:
        raise ConfigError(unknown("value", value, choices, where=where))
    try:
        # Strict JSON rules suit TOML: a list for a tuple, an int for a float, a string for a path.
        return _adapter(wanted).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_leaf_messages(error, value, where))) from error


def _leaf_messages(error: ValidationError, value: Any, where: str) -> Iterable[str]:
    for detail in error.errors(include_url=False):
        place, at = where, value
        for step in detail["loc"]:
            if isinstance(at, list | tuple) and isinstance(step, int) and step < len(at):
                place, at = f"{place}[{step}]", at[step]
            elif isinstance(at, Mapping) and step in at:
                place, at = _join(place, str(step)), at[step]
        yield f"{place} = {at!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"


# --- writing: from typed values to plain ones ---


def _plain_table(obj: Any, where: str) -> dict[str, Any]:
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        raise TypeError(f"a configuration is a dataclass instance, got {obj!r}")
    table = {}
    for field in dataclasses.fields(obj):
        value = getattr(obj, field.name)
        if not field.init:
            continue
        if value is not None:
            table[field.name] = _plain(value, _join(where, field.name))
        elif _default(field) is not None:
            key = _join(where, field.name)
            raise ConfigError(f"{key} is None, which TOML cannot say: only a field whose default is None can be")
    return table


def _plain(value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain_table(value, where)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, _join(where, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if value is None:
        raise ConfigError(f"{where} is None, which TOML cannot say inside a list or table")
    return value


# --- what a type says about itself ---


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def _adapter(wanted: Any) -> TypeAdapter[Any]:
    return TypeAdapter(wanted)


def _holds_dataclass(wanted: Any) -> bool:
    return dataclasses.is_dataclass(wanted) or any(map(_holds_dataclass, typing.get_args(wanted)))


def _choices(wanted: Any) -> list[str]:
    """The strings that a literal or enum (maybe optional) admits; empty when it admits anything else."""
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return [str(member.value) for member in wanted]
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return [str(argument) for argument in arguments]
    if origin in (typing.Union, types.UnionType):
        parts = [_choices(argument) for argument in arguments if argument is not type(None)]
        return [choice for part in parts for choice in part] if all(parts) else []
    return []


def _kinds(record: Any) -> tuple[str, ...]:
    return typing.get_args(_hints(record).get("kind"))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else _ABSENT


def _expect_table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} = {value!r}: expected a table")
    return value


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _table_name(where: str) -> str:
    return f"[{where}]" if where else ""


def _in_table(where: str) -> str:
    return f" in [{where}]" if where else ""
