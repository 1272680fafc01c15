"""The Muon update: momentum, orthogonalised matrix by matrix, scaled to a fixed RMS."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from yunque.ops.orthogonal import orthogonalise
from yunque.train.roles import MatrixLayout

# Shapes: B matrices, M rows, N columns.

#: Matrices of one shape are orthogonalised together up to this many elements at a time.
_BATCH_ELEMENTS = 2**26


def update_scale(rows: int, columns: int, rms: float) -> float:
    """Factor that gives an orthogonalised [rows, columns] matrix the root mean square ``rms``.

    ||U V^T||_F^2 = min(rows, columns), hence RMS(U V^T) = 1 / sqrt(max(rows, columns)) and the factor is rms
    sqrt(max(rows, columns)) (Moonlight; GLM-4.5 with rms 0.2, AdamW's typical update, so that both share one
    learning rate). Newton-Schulz leaves singular values in [0.68, 1.14], so the real RMS is within that of
    ``rms``.
    """
    return rms * sqrt(max(rows, columns))


def lookahead(gradient: Tensor, momentum: Tensor, *, beta: float, nesterov: bool) -> Tensor:
    """Advance ``momentum`` in place, m <- beta m + g, and return a fresh beta m + g (Nesterov) or copy of m.

    Nesterov as in the public Muon; the GLM reports give the 0.95 but not the variant.
    """
    momentum.mul_(beta).add_(gradient)
    return momentum.mul(beta).add_(gradient) if nesterov else momentum.clone()


def matrices_of(tensor: Tensor, layout: MatrixLayout) -> tuple[Tensor, ...]:
    """Views of ``tensor`` as batches of matrices [B, M, N], one batch for each kind in ``layout``."""
    return tensor.view(layout.stacks, sum(layout.rows), layout.columns).split(layout.rows, dim=1)


@torch.no_grad()
def orthogonalise_all_(
    directions: Sequence[Tensor], layouts: Sequence[MatrixLayout], *, rms: float, steps: int
) -> None:
    """Replace every matrix inside ``directions`` by its orthogonalised form, scaled to ``rms``, in place.

    Matrices of equal shape (up to transposition, which orthogonalisation commutes with) share batched
    products, whichever parameter they come from: many small heads and experts cost one call.
    """
    buckets: dict[tuple[int, int], list[Tensor]] = {}
    for direction, layout in zip(directions, layouts, strict=True):
        for view in matrices_of(direction, layout):
            wide = view if view.shape[1] <= view.shape[2] else view.mT
            buckets.setdefault((wide.shape[1], wide.shape[2]), []).append(wide)
    for (rows, columns), views in buckets.items():
        scale = update_scale(rows, columns, rms)
        for chunk in _chunks(views, rows * columns):
            result = orthogonalise(chunk[0] if len(chunk) == 1 else torch.cat(chunk), steps).mul_(scale)
            for view, part in zip(chunk, result.split([v.shape[0] for v in chunk]), strict=True):
                view.copy_(part)


def _chunks(views: Sequence[Tensor], matrix_elements: int) -> list[list[Tensor]]:
    """Cut and group batches of matrices so that no group is above ``_BATCH_ELEMENTS`` (one matrix may be)."""
    limit = max(1, _BATCH_ELEMENTS // matrix_elements)
    groups: list[list[Tensor]] = []
    room = 0
    for view in views:
        for piece in view.split(limit):
            if piece.shape[0] > room:
                groups.append([])
                room = limit
            groups[-1].append(piece)
            room -= piece.shape[0]
    return groups
