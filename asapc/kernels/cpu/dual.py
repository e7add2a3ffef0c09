"""CPU twins of operators.asap.dual and dual_and_row_mass: each family's fast path, where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asapc.features import Feature
from asapc.features.clouds import Budget, Clouds
from asapc.kernels.cpu import coarse, gaussian, sliced
from asapc.operators.asap import active_share, clouds_from, feature_list

# family -> (clouds, parameter, weights [1|H, F], budget) -> columns @ weights [B, H, N], uncentred
Contribution = Callable[[Clouds, Any, Tensor, Budget], Tensor]
CONTRIBUTIONS: dict[str, Contribution] = {
    "coarse": coarse.contribution,
    "gaussian": gaussian.contribution,
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
        listed = list(zip(*feature_list(features, parameters), strict=True))
        return _predicted(clouds, listed, coefficients, Budget(half_steps, starts_on_x), {})


def dual_and_row_mass(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    coefficients: Tensor,
    features: str,
    score_multiplier: float,
    half_steps: int,
    starts_on_x: bool,
) -> tuple[Tensor, Tensor]:
    """As operators.asap.dual_and_row_mass; the coarse loop runs once for both."""
    with torch.no_grad():
        clouds = clouds_from(q, k, keep, bias, score_multiplier, "key")
        listed = list(zip(*feature_list(features, parameters), strict=True))
        budget = Budget(half_steps, starts_on_x)
        first = next((i for i, (own, _) in enumerate(listed) if own.family == "coarse"), None)
        if first is None:
            return _predicted(clouds, listed, coefficients, budget, {}), active_share(clouds)
        pivots = listed[first][1]
        assert pivots is not None
        column, mass = coarse.dual_and_mass(clouds, pivots, budget, want_mass=True)
        assert mass is not None
        return _predicted(clouds, listed, coefficients, budget, {first: column}), mass


def _predicted(
    clouds: Clouds,
    listed: Sequence[tuple[Feature, Tensor | None]],
    coefficients: Tensor,
    budget: Budget,
    known: Mapping[int, Tensor],
) -> Tensor:
    """known: features of one column that are there already, [B, H, N] each."""
    total = torch.zeros_like(clouds.x[..., 0])
    used = 0
    for index, (feature, parameter) in enumerate(listed):
        width = feature.width(clouds)
        weights = coefficients[:, used : used + width].to(total.dtype)
        used += width
        fast = CONTRIBUTIONS.get(feature.family)
        if index in known:
            total += known[index] * weights
        elif fast is not None:
            total += fast(clouds, parameter, weights, budget)
        else:
            columns = feature.columns(clouds, parameter, budget)
            total += (columns @ weights[:, :, None])[..., 0]
    return clouds.centre(total) - clouds.cost_offset()
