"""Routed experts by sorting: tokens of one expert lie together, so that one grouped product serves all experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from yunque.ops.rows import INVARIANT_ROWS, linear

# Shapes: T tokens, D model, E experts, I expert width, k experts per token, N = T * k rows sorted by expert.


#: Up to this many rows (tokens x experts per token) a matrix-vector product per row beats sorting: decode.
FEW_ROWS = 8


def routed_experts(
    x_TD: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    gate_up_EXD: Tensor,
    down_EDI: Tensor,
    *,
    invariant: bool = False,
) -> Tensor:
    """As ``reference.experts.routed_experts``: [T, D]. ``weight_Tk`` may be fp32 beside a narrower ``x_TD``.

    ``invariant`` gives a token the same bits whatever its neighbours are (see ``ops.rows.linear``).
    """
    per_token = expert_Tk.shape[1]
    if 0 < expert_Tk.numel() <= FEW_ROWS and not invariant:
        return _few(x_TD, expert_Tk, weight_Tk, gate_up_EXD, down_EDI)
    order_N = expert_Tk.flatten().argsort(stable=True)
    counts_E = torch.bincount(expert_Tk.flatten(), minlength=gate_up_EXD.shape[0])
    rows_ND = x_TD.index_select(0, order_N // per_token)
    if invariant or not _is_groupable(x_TD, down_EDI):
        sorted_experts = _one_by_one
    else:
        is_inference = x_TD.device.type == "cpu" and not torch.is_grad_enabled()
        sorted_experts = _only_chosen if is_inference else _grouped
    out_ND = sorted_experts(rows_ND, counts_E, gate_up_EXD, down_EDI)
    # Back in the token's own order of experts, the weighted sum is one small product per token.
    rank_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    return _weighted_sum(out_ND.index_select(0, rank_N), weight_Tk)


def _weighted_sum(out_ND: Tensor, weight_Tk: Tensor) -> Tensor:
    return torch.bmm(weight_Tk[:, None].to(out_ND.dtype), out_ND.unflatten(0, weight_Tk.shape)).squeeze(1)


def _few(x_TD: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, gate_up_EXD: Tensor, down_EDI: Tensor) -> Tensor:
    chosen, tokens = expert_Tk.tolist(), x_TD.unbind()
    pairs = [(e, token) for token, experts in zip(tokens, chosen, strict=True) for e in experts]
    gate, up = _products(pairs, gate_up_EXD).chunk(2, dim=1)
    experts = (e for e, _ in pairs)
    out_ND = _products(list(zip(experts, (F.silu(gate) * up).unbind(), strict=True)), down_EDI)
    return torch.mm(weight_Tk.to(out_ND.dtype), out_ND) if len(tokens) == 1 else _weighted_sum(out_ND, weight_Tk)


def _products(pairs: list[tuple[int, Tensor]], weight_EYX: Tensor) -> Tensor:
    """weight[expert] @ row for every pair, [N, Y]."""
    if torch.is_grad_enabled():
        return torch.stack([weight_EYX[e].mv(row) for e, row in pairs])
    out_NY = weight_EYX.new_empty((len(pairs), weight_EYX.shape[1]))
    for out_Y, (e, row) in zip(out_NY.unbind(), pairs, strict=True):
        torch.mv(weight_EYX[e], row, out=out_Y)
    return out_NY


def _is_groupable(x_TD: Tensor, down_EDI: Tensor) -> bool:
    """Grouped products want at most four bytes a number and rows of a multiple of 16 bytes."""
    size = x_TD.dtype.itemsize
    return size <= 4 and all(width * size % 16 == 0 for width in down_EDI.shape[1:])


def _grouped(rows_ND: Tensor, counts_E: Tensor, gate_up_EXD: Tensor, down_EDI: Tensor) -> Tensor:
    """All experts in one grouped product each way."""
    ends_E = counts_E.cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(rows_ND, gate_up_EXD.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, down_EDI.transpose(1, 2), offs=ends_E)


def _only_chosen(rows_ND: Tensor, counts_E: Tensor, gate_up_EXD: Tensor, down_EDI: Tensor) -> Tensor:
    """A product for each expert that somebody chose, into one tensor: on a CPU a grouped product is a slower loop."""
    spans, begin = [], 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            spans.append((expert, slice(begin, begin + count)))
            begin += count
    gate_up_NX = rows_ND.new_empty((len(rows_ND), gate_up_EXD.shape[1]))
    for expert, span in spans:
        torch.mm(rows_ND[span], gate_up_EXD[expert].t(), out=gate_up_NX[span])
    gate, up = gate_up_NX.chunk(2, dim=-1)
    inner_NI, out_ND = F.silu(gate) * up, torch.empty_like(rows_ND)
    for expert, span in spans:
        torch.mm(inner_NI[span], down_EDI[expert].t(), out=out_ND[span])
    return out_ND


def _one_by_one(rows_ND: Tensor, counts_E: Tensor, gate_up_EXD: Tensor, down_EDI: Tensor) -> Tensor:
    """Each expert on its own rows, padded to whole products of a fixed shape."""
    outs = []
    for expert, part in enumerate(rows_ND.split(counts_E.tolist())):
        padded = F.pad(part, (0, 0, 0, -part.shape[0] % INVARIANT_ROWS))
        gate, up = linear(padded, gate_up_EXD[expert], invariant=True).chunk(2, dim=-1)
        outs.append(linear(F.silu(gate) * up, down_EDI[expert], invariant=True)[: part.shape[0]])
    return torch.cat(outs)
