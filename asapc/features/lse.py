"""LSE: the dual after one c-transform from zero, the start of a residual fit.

    -LSE_j(x_i . y_j + bias_ij) + |x_i|^2 / 2     over the points y with mass

in cost coordinates like every column; the masses' constant is left out, centring removes it. A row
without any y with mass gives 0. Column [B, H, N, 1]. Cost O(N M D) a head, as much as a c-transform;
one example's scores are held at a time (gradients hold them all).
Source: ASAP, Eq. 15 at g = 0 and Appendix E.4 (the residual log-sum-exp fit).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asapc.features.clouds import Budget, Clouds


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """[B, H, N, 1]."""
    batch, heads, num_x, _ = clouds.x.shape
    bias = clouds.bias
    if bias is not None:
        bias = bias.expand(batch, heads, num_x, clouds.y.shape[2])
    if batch == 0:
        return clouds.x[..., :1]
    rows = []
    for example, x in enumerate(clouds.x):  # [H, N, D]
        scores = x @ clouds.y[example].transpose(-1, -2)  # [H, N, M]
        if bias is not None:
            scores = scores + bias[example].to(scores.dtype)
        if clouds.y_keep is not None:
            scores = scores.masked_fill(~clouds.y_keep[example], -math.inf)
        total = torch.logsumexp(scores, -1)
        rows.append((x.square().sum(-1) / 2 - total).masked_fill(torch.isneginf(total), 0.0))
    return torch.stack(rows)[..., None]
