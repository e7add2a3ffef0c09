"""Active: 1 on real tokens, 0 on padded ones; all 0 where nothing is known to be padding.

A teacher that gives padded queries mass leaves a level between them and the real ones, which this
column carries. Column [B, H, N, 1]; no cost.
Source: ours.
"""

from __future__ import annotations

from torch import Tensor

from asapc.features.clouds import Budget, Clouds


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """1 where x_real: [B, H, N, 1]."""
    column = clouds.x.new_zeros((*clouds.x.shape[:3], 1))
    if clouds.x_real is None:
        return column
    return column + clouds.x_real[:, None, :, None].to(column.dtype)
