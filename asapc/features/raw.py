"""Raw: the point itself.  Columns x [B, H, N, D]; no cost.

Source: ASAP, Table F.3 (the control "raw projections").
"""

from __future__ import annotations

from torch import Tensor

from asapc.features.clouds import Budget, Clouds


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """x: [B, H, N, D]."""
    return clouds.x
