"""Orthogonalisation of many matrices at once, by batched Newton-Schulz."""

from __future__ import annotations

import torch
from torch import Tensor

from yunque.ops.reference.orthogonal import MIN_NORM, QUINTIC

# Shapes: B matrices, M rows, N columns.


def orthogonalise(matrices_BMN: Tensor, steps: int = 5) -> Tensor:
    """Every matrix by ``reference.orthogonal.newton_schulz``, as fused batched products; same shape and
    dtype.

    Computed in fp32 on a CPU, where bf16 products are slower, and in bf16 elsewhere, as the public Muon does.
    """
    a, b, c = QUINTIC
    tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x_BMN = matrices_BMN.mT if tall else matrices_BMN
    x_BMN = x_BMN.to(torch.float32)
    x_BMN = x_BMN / x_BMN.norm(dim=(1, 2), keepdim=True).clamp(min=MIN_NORM)
    if x_BMN.device.type != "cpu":
        x_BMN = x_BMN.to(torch.bfloat16)
    for _ in range(steps):
        gram_BMM = x_BMN @ x_BMN.mT
        mix_BMM = torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c)
        x_BMN = torch.baddbmm(x_BMN, mix_BMM, x_BMN, beta=a)
    return (x_BMN.mT if tall else x_BMN).to(matrices_BMN.dtype)
