"""Nested state (an optimiser's, a random stream's) as JSON plus named tensors, and back, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from yunque.core.errors import CheckpointError

#: Holds None, bool, int, float, str, tensors, and lists, tuples and dicts (keys str or int) of these.
Tree = Any

_TENSOR = "$tensor"
_TUPLE = "$tuple"
_ITEMS = "$items"
_FLOAT = "$float"


def flatten(tree: Tree) -> tuple[Any, dict[str, Tensor]]:
    """``(JSON value, tensors by their path)``. ``unflatten`` gives the same types and the same bits back.

    JSON has no tuples, integer keys, NaN or infinities: those become objects with one ``$`` key. Raises
    ``TypeError``, naming the path, for anything that a tree may not hold.
    """
    tensors: dict[str, Tensor] = {}
    return _flatten(tree, "", tensors), tensors


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """The tree that ``flatten`` took apart. Raises ``CheckpointError`` for a tensor that is not there."""
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": str(path)}:
            if path not in tensors:
                raise CheckpointError(f"state refers to tensor {path!r}, which is not stored")
            return tensors[path]
        case {"$tuple": list(items)}:
            return tuple(unflatten(item, tensors) for item in items)
        case {"$items": list(items)}:
            return {key: unflatten(item, tensors) for key, item in items}
        case {"$float": str(text)}:
            return float(text)
    return {key: unflatten(item, tensors) for key, item in value.items()}


def _flatten(tree: Tree, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        name = _free_name(path, tensors)
        tensors[name] = tree.detach()
        return {_TENSOR: name}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {_FLOAT: str(tree)}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if type(tree) is list:
        return _flatten_all(tree, path, tensors)
    if type(tree) is tuple:
        return {_TUPLE: _flatten_all(tree, path, tensors)}
    if isinstance(tree, Mapping):
        values = _flatten_all(list(tree.values()), path, tensors, names=list(tree))
        if all(type(key) is str and not key.startswith("$") for key in tree):
            return dict(zip(tree, values, strict=True))
        return {_ITEMS: [[key, value] for key, value in zip(tree, values, strict=True)]}
    raise TypeError(f"state{path and f' at {path}'} holds a {type(tree).__name__}, which cannot be saved: {tree!r}")


def _flatten_all(
    items: Sequence[Tree], path: str, tensors: dict[str, Tensor], names: Sequence[Any] | None = None
) -> list[Any]:
    out = []
    for name, item in zip(names or range(len(items)), items, strict=True):
        if type(name) not in (str, int):
            raise TypeError(f"state{path and f' at {path}'} has the key {name!r}; keys are str or int")
        out.append(_flatten(item, f"{path}/{name}" if path else str(name), tensors))
    return out


def _free_name(path: str, tensors: Mapping[str, Tensor]) -> str:
    name = path or "value"
    while name in tensors or name == "__metadata__":
        name += "~"
    return name
