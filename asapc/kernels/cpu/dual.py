"""CPU twins of operators.asap.dual and dual_and_row_mass: each family's fast path, where it has one."""

from __future__ import annotations

from torch import Tensor

from asapc.features import coarse
from asapc.features.clouds import Budget, Clouds
from asapc.kernels import native
from asapc.kernels.cpu import sliced
from asapc.kernels.dual import Backend


def _dual_and_mass(
    clouds: Clouds, pivots: Tensor | None, count: int, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """As features.coarse.dual_and_mass, the dual up to a constant; without gradients."""
    found = None
    if native.missing() is None and budget.half_steps > 0:
        found = native.coarse(clouds, pivots, count, budget, want_mass)
    return coarse.dual_and_mass(clouds, pivots, count, budget, want_mass) if found is None else found


_BACKEND = Backend({"sliced": sliced.contribution}, _dual_and_mass)
dual = _BACKEND.dual
dual_and_row_mass = _BACKEND.dual_and_row_mass
