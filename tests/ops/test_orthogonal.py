"""Batched Newton-Schulz against its specification and against the exact polar factor."""

from __future__ import annotations

import math

import pytest
import torch

from yunque.ops.orthogonal import orthogonalise
from yunque.ops.reference.orthogonal import QUINTIC, newton_schulz, polar_factor


@pytest.mark.parametrize("shape", [(3, 5, 9), (4, 9, 5), (1, 8, 8), (2, 1, 6), (5, 6, 1)])
def test_batched_result_equals_the_reference_matrix_by_matrix(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([newton_schulz(matrix) for matrix in matrices])
    assert (orthogonalise(matrices) - expected).abs().max() < 1e-5


def test_singular_values_follow_the_quintic_by_hand() -> None:
    """diag(3, 4) is normalised to diag(0.6, 0.8); one step maps s to a s + b s^3 + c s^5."""
    a, b, c = QUINTIC
    expected = [a * s + b * s**3 + c * s**5 for s in (0.6, 0.8)]
    result = orthogonalise(torch.diag(torch.tensor([3.0, 4.0]))[None], steps=1)[0]
    assert result.diag().tolist() == pytest.approx(expected, abs=1e-6)
    assert result[0, 1].abs() < 1e-7


def test_five_steps_keep_singular_values_near_one_and_vectors_exactly() -> None:
    matrix = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    result = orthogonalise(matrix[None])[0]
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.68
    assert values.max() < 1.14
    assert (polar_factor(result) - polar_factor(matrix)).abs().max() < 1e-4


def test_rms_of_a_semi_orthogonal_matrix_is_one_over_root_of_the_longer_side() -> None:
    """||U V^T||_F^2 = min(m, n), so its RMS is sqrt(min / (m n)) = 1 / sqrt(max(m, n)): Muon's scale rests on
    it."""
    for m, n in ((6, 20), (20, 6), (7, 7)):
        factor = polar_factor(torch.randn(m, n, generator=torch.Generator().manual_seed(2)))
        assert factor.square().mean().sqrt().item() == pytest.approx(1 / math.sqrt(max(m, n)), rel=1e-5)


def test_a_zero_matrix_stays_zero_and_scale_does_not_matter() -> None:
    matrix = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(3))
    assert orthogonalise(torch.zeros(1, 3, 4)).abs().max() == 0
    assert (orthogonalise(matrix) - orthogonalise(matrix * 1e-3)).abs().max() < 1e-5
