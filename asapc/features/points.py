"""Families of one line each: the point itself, half its squared norm, and whether it is a real token.

raw:    x [B, H, N, D]. Source: ASAP, Table F.3 (the control "raw projections").
norm:   |x|^2 / 2 [B, H, N, 1], the dual in cost coordinates of a cloud y at the origin, up to a constant;
        a coefficient of 1 cancels the change to score coordinates. Source: ours.
active: 1 on real tokens, 0 on padded ones [B, H, N, 1]; all 0 where nothing is known to be padding. A
        teacher that gives padded queries mass leaves a level between them and the real ones, which this
        column carries. Source: ours.
"""

from __future__ import annotations

from torch import Tensor

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
