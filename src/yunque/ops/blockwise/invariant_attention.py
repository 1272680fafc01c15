"""Selection and attention whose bits for a query do not depend on its neighbours: every product has one shape.

A query's keys are taken from the start of its own document in chunks of ``KEY_CHUNK`` and added up chunk by chunk
(online softmax, Milakov and Gimelshein 2018); a chunk that it does not see changes nothing, to the bit. So training,
chunked prefill, decode and any batch give the same numbers. This is the slow, exact setting: rows are gathered for
each query.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from yunque.ops.blockwise.topk import top_positions
from yunque.ops.paged_rows import Rows, take_rows
from yunque.ops.visibility import Selection, Visibility

# Shapes: T queries, P pool rows, H heads, R latent + rope width, C latent width, J index heads, d index width;
# G queries of a tile, W keys of a chunk, N keys of all chunks, K kept.

QUERY_TILE = 32
KEY_CHUNK = 64


@torch.no_grad()
def select_invariant(q_TJd: Tensor, k_Pd: Rows, w_TJ: Tensor, visibility: Visibility, k: int) -> Selection:
    """As ``reference.selection.select``, the same bits in any batch."""
    parts = [torch.empty((0, k), dtype=torch.int32, device=q_TJd.device)]
    for start in range(0, q_TJd.shape[0], QUERY_TILE):
        span = slice(start, start + QUERY_TILE)
        first_G, count_G = _document(visibility, span)
        q_GJd, w_G1J = _padded(q_TJd[span].float()), _padded(w_TJ[span].float())[:, None]
        chunks = []
        for offset in range(0, max(int(count_G.max()), 1), KEY_CHUNK):
            keys_GWd = _take(k_Pd, first_G, _window(offset, count_G)).float()
            chunks.append(torch.bmm(w_G1J, torch.bmm(q_GJd, keys_GWd.transpose(1, 2)).relu_())[:, 0])
        scores_GN = torch.cat(chunks, dim=1)
        rows = q_TJd[span].shape[0]
        zeros_G = torch.zeros_like(count_G[:rows])
        parts.append(top_positions(scores_GN[:rows], zeros_G, count_G[:rows] - 1, k))
    return Selection(torch.cat(parts))


def attend_invariant(
    q_THR: Tensor,
    pool_PR: Rows,
    visibility: Visibility,
    *,
    scale: float,
    value_dim: int,
    selection: Selection | None,
) -> Tensor:
    """As ``reference.attention.attend``, the same bits in any batch; keys that a selection kept and keys that are
    all visible go through the same sums, so a selection of everything changes nothing. Differentiable."""
    parts = [q_THR[:0, :, :value_dim]]
    for start in range(0, q_THR.shape[0], QUERY_TILE):
        span = slice(start, start + QUERY_TILE)
        first_G, count_G = _document(visibility, span)
        if selection is None:
            positions_GN = _window(0, count_G, int(count_G.max()))
        else:
            positions_GN = _padded(selection.positions_TK[span].long(), value=-1)
        inputs = (_padded(q_THR[span]), pool_PR, first_G, positions_GN, scale, value_dim)
        if torch.is_grad_enabled():
            out_GHC = checkpoint(_attend_tile, *inputs, use_reentrant=False)
        else:
            out_GHC = _attend_tile(*inputs)
        assert isinstance(out_GHC, Tensor)
        parts.append(out_GHC[: q_THR[span].shape[0]])
    return torch.cat(parts)


def _attend_tile(
    q_GHR: Tensor, pool_PR: Rows, first_G: Tensor, positions_GN: Tensor, scale: float, value_dim: int
) -> Tensor:
    """Online softmax over chunks of keys; a query without keys gives zeros."""
    wide = torch.promote_types(q_GHR.dtype, torch.float32)
    shape = q_GHR.shape[:2]
    top_GH1 = torch.full((*shape, 1), -torch.inf, dtype=wide, device=q_GHR.device)
    sum_GH1, out_GHC = torch.zeros_like(top_GH1), top_GH1.new_zeros((*shape, value_dim))
    positions_GN = F.pad(positions_GN, (0, -positions_GN.shape[1] % KEY_CHUNK), value=-1)
    for positions_GW in positions_GN.split(KEY_CHUNK, dim=1):
        rows_GWR = _take(pool_PR, first_G, positions_GW)
        logits = torch.bmm(q_GHR, rows_GWR.transpose(1, 2)).to(wide) * scale
        logits = logits.masked_fill((positions_GW < 0)[:, None], -torch.inf)
        new_top = torch.maximum(top_GH1, logits.amax(dim=-1, keepdim=True).detach())
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
        kept, weights = (top_GH1 - shift).exp(), (logits - shift).exp()
        sum_GH1 = sum_GH1 * kept + weights.sum(dim=-1, keepdim=True)
        values = torch.bmm(weights.to(q_GHR.dtype), rows_GWR[..., :value_dim])
        out_GHC = out_GHC * kept + values.to(wide)
        top_GH1 = new_top
    return (out_GHC / sum_GH1.masked_fill(sum_GH1 == 0, 1.0)).to(q_GHR.dtype)


def _document(visibility: Visibility, span: slice) -> tuple[Tensor, Tensor]:
    """First pool row and number of visible keys of the tile's queries, padded with queries that see nothing."""
    first_G = _padded(visibility.first_T[span])
    return first_G, _padded(visibility.last_T[span] - visibility.first_T[span] + 1).clamp(min=0)


def _padded(rows: Tensor, value: float = 0) -> Tensor:
    missing = QUERY_TILE - rows.shape[0]
    return F.pad(rows, (*[0, 0] * (rows.dim() - 1), 0, missing), value=value) if missing else rows


def _window(offset: int, count_G: Tensor, length: int = KEY_CHUNK) -> Tensor:
    """Positions offset, offset + 1, ... of each query's document; -1 where it sees no such key."""
    positions = torch.arange(offset, offset + length, device=count_G.device)
    return torch.where(positions < count_G[:, None], positions, -1)


def _take(pool_PX: Rows, first_G: Tensor, positions_GW: Tensor) -> Tensor:
    """Pool rows at document positions [G, W, X]; hidden positions take the document's first row."""
    index = positions_GW.clamp(min=0) + first_G[:, None]
    return take_rows(pool_PX, index.flatten()).view(*index.shape, -1)
