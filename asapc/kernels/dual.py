"""A predicted dual from the fast paths of one backend: what kernels/cpu/dual.py and gpu/dual.py share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asapc.features import CLUSTERED, Feature, feature_list
from asapc.features.clouds import Budget, Clouds, active_share, clouds_from
from asapc.features.farthest import farthest_points

# (clouds, parameter, weights [1|H, F], budget) -> columns @ weights [B, H, N], uncentred
Contribution = Callable[[Clouds, Any, Tensor, Budget], Tensor]


def finished(total: Tensor, clouds: Clouds) -> Tensor:
    """centre(total) - |x|^2 / 2: [B, H, N], a predicted dual in score coordinates."""
    return clouds.centre(total) - clouds.cost_offset()


@dataclass(frozen=True)
class Backend:
    """contributions: the families that have a fast path; the others run their reference.

    dual_and_mass: of the families with clusters.  farthest: features.farthest.farthest_points.  finish:
    `finished`, unless a backend has its own.
    """

    contributions: Mapping[str, Contribution]
    dual_and_mass: Callable[[Clouds, Tensor, Budget, bool], tuple[Tensor, Tensor | None]]
    farthest: Callable[[Clouds, int], Tensor] = farthest_points
    finish: Callable[[Tensor, Clouds], Tensor] = finished

    def dual(
        self,
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
            return self._predicted(clouds, listed, coefficients, Budget(half_steps, starts_on_x), {})

    def dual_and_row_mass(
        self,
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
            clouds = clouds_from(q, k, keep, bias, score_multiplier, "target")
            listed = list(zip(*feature_list(features, parameters), strict=True))
            budget = Budget(half_steps, starts_on_x)
            clustered = (i for i, (own, _) in enumerate(listed) if own.family in CLUSTERED)
            first = next(clustered, None)
            if first is None:
                predicted = self._predicted(clouds, listed, coefficients, budget, {})
                return predicted, active_share(clouds)
            pivots = self._parameter(clouds, *listed[first])
            assert pivots is not None
            column, mass = self.dual_and_mass(clouds, pivots, budget, True)
            assert mass is not None
            return self._predicted(clouds, listed, coefficients, budget, {first: column}), mass

    def _parameter(self, clouds: Clouds, feature: Feature, parameter: Tensor | None) -> Tensor | None:
        return self.farthest(clouds, feature.count) if feature.family == "farthest" else parameter

    def _predicted(
        self,
        clouds: Clouds,
        listed: Sequence[tuple[Feature, Tensor | None]],
        coefficients: Tensor,
        budget: Budget,
        known: Mapping[int, Tensor],
    ) -> Tensor:
        """known: features of one column that are there already, [B, H, N] each."""
        total: Tensor | None = None
        used = 0
        for index, (feature, parameter) in enumerate(listed):
            width = feature.width(clouds)
            weights = coefficients[:, used : used + width].to(clouds.x.dtype)
            used += width
            fast = self.contributions.get(feature.family)
            if index in known:
                contribution = known[index] * weights
            elif feature.family in CLUSTERED:
                pivots = self._parameter(clouds, feature, parameter)
                assert pivots is not None
                contribution = self.dual_and_mass(clouds, pivots, budget, False)[0] * weights
            elif fast is not None:
                contribution = fast(clouds, parameter, weights, budget)
            else:
                columns = feature.columns(clouds, parameter, budget)
                contribution = (columns @ weights[:, :, None])[..., 0]
            total = contribution if total is None else total + contribution
        return self.finish(torch.zeros_like(clouds.x[..., 0]) if total is None else total, clouds)
