"""CPU twin of operators.asap.dual: every family by its own fast path, where it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asapc.features.clouds import Budget, Clouds
from asapc.kernels import sliced
from asapc.operators.asap import clouds_from, feature_list

# family -> (clouds, parameter, weights [1|H, F], budget) -> columns @ weights [B, H, N], uncentred
CONTRIBUTIONS: dict[str, Callable[[Clouds, Tensor, Tensor, Budget], Tensor]] = {
    "sliced": sliced.contribution,
}


def dual(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    coefficients: Tensor,
    features: str,
    side: str,
    score_multiplier: float,
    half_steps: int,
    starts_on_x: bool,
) -> Tensor:
    """Arguments and result as operators.asap.dual; without gradients."""
    with torch.no_grad():
        clouds = clouds_from(q, k, keep, bias, score_multiplier, side)
        budget = Budget(half_steps, starts_on_x)
        total = torch.zeros_like(clouds.x[..., 0])
        used = 0
        for feature, parameter in zip(*feature_list(features, parameters), strict=True):
            fast = CONTRIBUTIONS.get(feature.family)
            if fast is not None and parameter is not None:
                weights = coefficients[:, used : used + feature.count].to(total.dtype)
                total += fast(clouds, parameter, weights, budget)
                used += feature.count
                continue
            columns = feature.columns(clouds, parameter, budget)
            weights = coefficients[:, used : used + columns.shape[-1]].to(total.dtype)
            total += (columns @ weights[:, :, None])[..., 0]
            used += columns.shape[-1]
        return clouds.centre(total) - clouds.cost_offset()
