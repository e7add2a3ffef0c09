"""Norm: |x|^2 / 2, the dual in cost coordinates of a cloud y at the origin, up to a constant.

Column [B, H, N, 1]. Cost O(N D) a head. A coefficient of 1 cancels the change to score coordinates.
Source: ours.
"""

from __future__ import annotations

from torch import Tensor

from asapc.features.clouds import Budget, Clouds


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """|x|^2 / 2: [B, H, N, 1]."""
    return clouds.cost_offset()[..., None]
