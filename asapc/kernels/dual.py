"""A predicted dual from the fast paths of one backend: what library/beside.py and gpu/dual.py share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from asapc.features import CLUSTERED, feature_list
from asapc.features.clouds import Budget, Clouds, active_share, clouds_from

# (clouds, parameter, weights [1|H, F], budget) -> columns @ weights [B, H, N], uncentred, or None
Contribution = Callable[[Clouds, Any, Tensor, Budget], Tensor | None]


def finished(total: Tensor, clouds: Clouds) -> Tensor:
    """centre(total) - |x|^2 / 2: [B, H, N], a predicted dual in score coordinates."""
    return clouds.centre(total) - clouds.cost_offset()


@dataclass(frozen=True)
class Backend:
    """contributions: the families that have a fast path; the others run their reference.

    dual_and_mass: of the families with clusters, as features.coarse.dual_and_mass.  finish: `finished`,
    unless a backend has its own.
    """

    contributions: Mapping[str, Contribution]
    dual_and_mass: Callable[[Clouds, Tensor | None, int, Budget, bool], tuple[Tensor, Tensor | None]]
    finish: Callable[[Tensor, Clouds], Tensor] = finished

    @torch.no_grad()
    def dual(
        self, q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None,
        parameters: Sequence[Tensor], coefficients: Tensor, features: str, side: str,
        score_multiplier: float, half_steps: int, starts_on_x: bool,
    ) -> Tensor:  # fmt: skip
        """Arguments and result as operators.asap.dual; without gradients."""
        clouds = clouds_from(q, k, keep, bias, score_multiplier, side)
        budget = Budget(half_steps, starts_on_x)
        return self._predicted(clouds, features, parameters, coefficients, budget, False)[0]

    @torch.no_grad()
    def dual_and_row_mass(
        self, q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None,
        parameters: Sequence[Tensor], coefficients: Tensor, features: str, score_multiplier: float,
        half_steps: int, starts_on_x: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As operators.asap.dual_and_row_mass; the coarse loop runs once for both."""
        clouds = clouds_from(q, k, keep, bias, score_multiplier, "target")
        budget = Budget(half_steps, starts_on_x)
        predicted, mass = self._predicted(clouds, features, parameters, coefficients, budget, True)
        share = active_share(clouds)
        return predicted, share if mass is None else mass * share

    def _predicted(
        self, clouds: Clouds, features: str, parameters: Sequence[Tensor], coefficients: Tensor,
        budget: Budget, want_mass: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The dual; and the mass of the other side's points where it is wanted, by the first feature with
        clusters, None without one."""
        contributions, used = list[Tensor](), 0
        mass: Tensor | None = None
        for feature, parameter in zip(*feature_list(features, parameters), strict=True):
            width = feature.width(clouds.x.shape[3], clouds.x.shape[2])
            assert width is not None
            weights = coefficients[:, used : used + width].to(clouds.x.dtype)
            used += width
            if feature.family in CLUSTERED:
                wanted = want_mass and mass is None
                column, found = self.dual_and_mass(clouds, parameter, feature.count, budget, wanted)
                mass = found if mass is None else mass
                contributions.append(column * weights)
                continue
            fast = self.contributions.get(feature.family)
            contribution = fast and fast(clouds, parameter, weights, budget)
            if contribution is None:
                columns = feature.columns(clouds, parameter, budget)
                contribution = (columns @ weights[:, :, None])[..., 0]
            contributions.append(contribution)
        if not contributions:
            contributions.append(torch.zeros_like(clouds.x[..., 0]))
        return self.finish(reduce(torch.add, contributions), clouds), mass
