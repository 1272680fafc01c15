"""Orthogonalisation of a matrix by Newton-Schulz iteration: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: M rows, N columns.

#: Quintic that is steepest at zero (Jordan et al. 2024, the Muon post; the value of every public Muon since).
#: Five steps bring singular values from [0.01, 1] into about [0.68, 1.14], not exactly to 1, which training
#: does not notice.
QUINTIC = (3.4445, -4.7750, 2.0315)
#: Below this Frobenius norm a matrix counts as (nearly) zero and its result shrinks with it instead of being
#: noise.
MIN_NORM = 1e-7


def newton_schulz(matrix_MN: Tensor, steps: int = 5) -> Tensor:
    """Approximately U V^T where matrix = U S V^T.

    X_0 = matrix / ||matrix||_F;  A = X X^T;  X <- a X + (b A + c A A) X with (a, b, c) = ``QUINTIC``. A
    matrix with more rows than columns is transposed first: the polynomial acts on singular values only, so
    the result is the same and the products are smaller. A zero matrix stays zero.
    """
    a, b, c = QUINTIC
    tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x = matrix_MN.T if tall else matrix_MN
    x = x / x.norm().clamp(min=MIN_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def polar_factor(matrix_MN: Tensor) -> Tensor:
    """Exactly U V^T, by singular value decomposition: what the iteration approximates."""
    u, _, vt = torch.linalg.svd(matrix_MN, full_matrices=False)
    return u @ vt
