"""Families of few lines.

raw:    x [B, H, N, D]. Source: ASAP, Table F.3 (the control "raw projections").
norm:   |x|^2 / 2 [B, H, N, 1], the dual in cost coordinates of a cloud y at the origin, up to a constant;
        a coefficient of 1 cancels the change to score coordinates. Source: ours.
active: 1 on real tokens, 0 on padded ones [B, H, N, 1]; all 0 where nothing is known to be padding. A
        teacher that gives padded queries mass leaves a level between them and the real ones, which this
        column carries. Source: ours.
lse:    -LSE_j(x_i . y_j + bias_ij) + |x_i|^2 / 2 over the points y with mass [B, H, N, 1]: the dual after
        one c-transform from zero, the start of a residual fit, in cost coordinates like every column.
        The masses' constant is left out, centring removes it. A row without any y with mass gives 0.
        Cost O(N M D) a head, as much as a c-transform; one example's scores are held at a time (gradients
        hold them all). Source: ASAP, Eq. 15 at g = 0 and Appendix E.4 (the residual log-sum-exp fit).
token_bias: one learnt value per position, for models whose sequences have one length: the identity
        [B, H, N, N], F = N; no cost but the product by omega. Source: ASAP, Appendix E.4 (the token bias
        of the MNIST layers).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.features.clouds import Budget, Clouds


def raw(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    return clouds.x


def norm(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    return clouds.cost_offset()[..., None]


def active(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    column = clouds.x.new_zeros((*clouds.x.shape[:3], 1))
    if clouds.x_real is None:
        return column
    return column + clouds.x_real[:, None, :, None].to(column.dtype)


def lse(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
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


def token_bias(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """Raises InputError where the lengths vary."""
    if clouds.x_keep is not None or clouds.x_real is not None:
        raise InputError(
            "token_bias: needs sequences of one length",
            got="a padding mask",
            help="leave token_bias out of the candidate's features",
        )
    batch, heads, num_x, _ = clouds.x.shape
    identity = torch.eye(num_x, dtype=clouds.x.dtype, device=clouds.x.device)
    return identity.expand(batch, heads, num_x, num_x)
