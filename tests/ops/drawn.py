"""Drawn visibilities of every kind that a view can produce, and a meter of what an operation allocates."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yunque.model.batch import PackedBatch
from yunque.model.cache import PackedView, StepView
from yunque.ops.blockwise.topk import all_visible
from yunque.ops.reference.topk import top_positions
from yunque.ops.visibility import Block, Selection, Visibility


def packed(lengths: Sequence[int]) -> Visibility:
    """Documents end to end."""
    return PackedView(PackedBatch.from_documents([[0] * length for length in lengths])).visibility


def stepped(lengths: Sequence[int], counts: Sequence[int], capacity: int) -> Visibility:
    """Sequences of ``lengths`` earlier rows, ``capacity`` apart, that ``counts`` queries extend."""
    return StepView({}, capacity, lengths, counts, torch.device("cpu")).visibility


def masked(first: Sequence[int], last: Sequence[int], num_rows: int) -> Visibility:
    """One block in which each query has a range of its own, which may be empty."""
    block = Block(0, len(first), len(first), 0, num_rows, num_rows, 1, causal=False)
    return Visibility.of(torch.tensor(first), torch.tensor(last), (block,))


@dataclass(frozen=True)
class Drawn:
    """A visibility over a pool of ``num_rows`` rows, and what was drawn."""

    visibility: Visibility
    num_rows: int
    label: str

    @property
    def num_queries(self) -> int:
        return self.visibility.first_T.shape[0]


def draw_visibility(seed: int) -> Drawn:
    """Packed documents, chunks over earlier keys, decode, or ranges with empty ones, by turns."""
    draw = random.Random(seed)
    kind = ("packed", "alike", "chunk", "decode", "ranges")[seed % 5]
    if kind in ("packed", "alike"):
        lengths = [draw.choice([1, 1, 2, 7, 31, 33, 70]) for _ in range(draw.randint(1, 6))]
        if kind == "alike":
            lengths = [draw.choice([33, 150, 290])] * draw.randint(2, 3) + lengths[:2]
        return Drawn(packed(lengths), sum(lengths), f"{kind} {lengths}")
    capacity = 60
    if kind == "ranges":
        first = [draw.randint(0, 40) for _ in range(draw.randint(1, 50))]
        last = [min(start + draw.randint(-1, 30), capacity - 1) for start in first]
        return Drawn(masked(first, last, capacity), capacity, f"ranges {first} {last}")
    sequences = draw.randint(1, 5)
    lengths = [draw.randint(0, 50) for _ in range(sequences)]
    counts = [1] * sequences if kind == "decode" else [draw.randint(0, 9) for _ in range(sequences)]
    counts[draw.randrange(sequences)] = 1
    return Drawn(stepped(lengths, counts, capacity), sequences * capacity, f"{kind} {lengths} {counts}")


def draw_selection(drawn: Drawn, k: int, seed: int) -> Selection:
    """``k`` random visible keys of each query."""
    scores = torch.rand(drawn.num_queries, drawn.num_rows, generator=torch.Generator().manual_seed(seed))
    visibility = drawn.visibility
    return Selection(top_positions(scores, visibility.first_T, visibility.last_T, k))


def select_everything(visibility: Visibility) -> Selection:
    """All visible keys, spelled out."""
    return Selection(all_visible(visibility.first_T, visibility.last_T, max(visibility.max_visible, 1)))


class LargestTensor(TorchDispatchMode):
    """While active: the most elements that any one result had."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def kept_for_backward(run: Callable[[], Tensor]) -> int:
    """Elements of all distinct storages that the backward pass of ``run()`` keeps alive."""
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    total = sum(t.untyped_storage().nbytes() // t.element_size() for t in storages.values())
    del out
    return total


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
