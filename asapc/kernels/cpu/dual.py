"""CPU twins of operators.asap.dual and dual_and_row_mass: each family's fast path, where it has one."""

from __future__ import annotations

from asapc.kernels.cpu import coarse, sliced
from asapc.kernels.dual import Backend

_BACKEND = Backend({"sliced": sliced.contribution}, coarse.dual_and_mass)
dual = _BACKEND.dual
dual_and_row_mass = _BACKEND.dual_and_row_mass
