"""CPU twins of operators.asap.dual and dual_and_row_mass: the engine's features, where it runs."""

from __future__ import annotations

from torch import Tensor

from asapc.features import coarse, gaussian
from asapc.features.clouds import Budget, Clouds
from asapc.kernels import native
from asapc.kernels.dual import Backend


def _dual_and_mass(
    clouds: Clouds, pivots: Tensor | None, count: int, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """As features.coarse.dual_and_mass, the dual up to a constant; without gradients."""
    if native.missing() is None and budget.half_steps > 0:
        column, mass, held = native.feature("coarse", clouds, pivots, None, count, budget, want_mass)
        if held:
            return column, mass
    return coarse.dual_and_mass(clouds, pivots, count, budget, want_mass)


def _sliced(clouds: Clouds, theta: Tensor, weights: Tensor, budget: Budget) -> Tensor | None:
    return None if native.missing() else native.feature("sliced", clouds, theta, weights)[0]


def _gaussian(clouds: Clouds, parameter: None, weights: Tensor, budget: Budget) -> Tensor | None:
    beta = None if native.missing() else native.brenier_potential(clouds)
    return None if beta is None else gaussian.weighted(clouds, beta, weights)


_BACKEND = Backend({"sliced": _sliced, "gaussian": _gaussian}, _dual_and_mass)
dual = _BACKEND.dual
dual_and_row_mass = _BACKEND.dual_and_row_mass
