"""Nested state comes back with the same types and bits, through JSON."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from yunque.core.errors import CheckpointError
from yunque.weights.trees import flatten, unflatten

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(0, 255), max_size=4).map(lambda v: torch.tensor(v, dtype=torch.uint8)),
    st.floats(width=32).map(torch.tensor),
)
keys = st.one_of(st.text(max_size=4), st.sampled_from(["$tensor", "$tuple", "a/b", "a", "__metadata__"]), st.integers())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


def _same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        if math.isnan(left):
            return math.isnan(right)
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return left == right


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@given(trees)
def test_any_tree_comes_back_with_its_types_and_bits(tree):
    value, tensors = flatten(tree)
    text = json.dumps(value, allow_nan=False)
    assert _same(unflatten(json.loads(text), tensors), tree)


def test_optimiser_state_and_random_streams_survive():
    weight = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    tree = {"optimizer": optimizer.state_dict(), "torch": torch.get_rng_state()}
    value, tensors = flatten(tree)
    back = unflatten(json.loads(json.dumps(value)), tensors)
    assert _same(back, tree)
    optimizer.load_state_dict(back["optimizer"])
    torch.set_rng_state(back["torch"])


@pytest.mark.parametrize("leaf", [object(), b"bytes", {1, 2}, torch.float32])
def test_leaf_that_cannot_be_saved_is_named_with_its_path(leaf):
    with pytest.raises(TypeError, match=r"state at groups/0/thing holds a"):
        flatten({"groups": [{"thing": leaf}]})
    with pytest.raises(TypeError, match=r"state at groups has the key 1\.5"):
        flatten({"groups": {1.5: 0}})


def test_lost_tensor_is_named():
    value, _ = flatten({"m": torch.ones(1)})
    with pytest.raises(CheckpointError, match="'m', which is not stored"):
        unflatten(value, {})
