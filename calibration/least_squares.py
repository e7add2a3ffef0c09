"""ASAP-LS: ridge normal equations in float64, additive over batches and processes.

    omega = (X'X + lambda I)^-1 X'y          ASAP, Eq. 20
    lambda = rows * ridge                    the risk-normalised form after Eq. 20

X and y are centred over each example's queries, so no intercept is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asapc.calibration.checked import check_tensor, tensor_of
from asapc.calibration.stored import FitQuality
from asapc.device import CPU, moved
from asapc.errors import InputError

# A target whose root mean square is below this (units of epsilon) varies by rounding only.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class DualFit:
    """The fit of one dual, or of several that share their coefficients [1|H, F], float64."""

    coefficients: Tensor
    quality: FitQuality


class NormalEquations:
    """Sufficient statistics of a least-squares fit: X'X, X'y and y'y, never the rows themselves.

    groups: 1 pools the heads into one fit, H fits each head on its own.
    """

    def __init__(self, features: int, groups: int = 1) -> None:
        self.gram = torch.zeros(groups, features, features, dtype=torch.float64)
        self.moment = torch.zeros(groups, features, dtype=torch.float64)
        self.energy = torch.zeros(groups, dtype=torch.float64)
        self.tokens = 0

    @property
    def groups(self) -> int:
        return self.gram.shape[0]

    @property
    def features(self) -> int:
        return self.gram.shape[1]

    def add(self, x: Tensor, y: Tensor, points: int | None = None) -> None:
        """Add the regression rows x [B, H, N, F], y [B, H, N] of one batch.

        Example by example, in order: sums of many do not depend on how they were cut into batches.
        points: how many of the B * N are real where others, all zero, only fill the tensors up.
        """
        heads = x.shape[1]
        x, y = (values.detach().double() for values in (x, y))
        for example, target in zip(x, y, strict=True):  # [H, N, F], [H, N]
            rows = example.reshape(self.groups, -1, self.features)
            targets = target.reshape(self.groups, -1)
            self.gram += moved(rows.transpose(1, 2) @ rows, CPU)
            self.moment += moved((rows.transpose(1, 2) @ targets[..., None])[..., 0], CPU)
            self.energy += moved(targets.square().sum(-1), CPU)
        count = x.shape[0] * x.shape[2] if points is None else points
        self.tokens += count * (heads // self.groups)

    def __add__(self, other: NormalEquations) -> NormalEquations:
        """The statistics of two parts of the data together."""
        if self.gram.shape != other.gram.shape:
            raise ValueError(f"cannot add {other.gram.shape} to {self.gram.shape}")
        total = NormalEquations(self.features, self.groups)
        total.gram, total.moment = self.gram + other.gram, self.moment + other.moment
        total.energy, total.tokens = self.energy + other.energy, self.tokens + other.tokens
        return total

    def solve(self, ridge: float, *, direct: bool = False) -> DualFit:
        """Coefficients at lambda = tokens * ridge; the least-norm ones where X'X is singular.

        direct: lambda = ridge.  Raises InputError on fewer regression rows than coefficients.
        """
        if self.tokens < self.features:
            raise InputError(
                f"a fit of {self.features} coefficients needs at least as many regression rows",
                got=self.tokens,
                help="calibrate on more examples, or use fewer slices in `features`",
            )
        values, vectors = torch.linalg.eigh(self.gram)
        shifted = values.clamp(min=0.0) + (ridge if direct else self.tokens * ridge)  # ascending
        largest, smallest = shifted[:, -1:], shifted[:, :1]
        noise = largest * self.features * torch.finfo(torch.float64).eps
        inverse = torch.where(shifted > noise, 1 / shifted, 0.0)
        projected = (vectors.transpose(1, 2) @ self.moment[..., None])[..., 0]
        coefficients = (vectors @ (inverse * projected)[..., None])[..., 0]
        condition = torch.where(smallest > noise, largest / smallest, math.inf)[:, 0].tolist()
        conditions = tuple(x if math.isfinite(x) else None for x in condition)
        return DualFit(coefficients, FitQuality("ls", self.r2(coefficients), conditions))

    def r2(self, coefficients: Tensor) -> tuple[float, ...]:
        """R^2 of the predictions X omega, per group; 1 where the target does not vary."""
        residual = (
            self.energy
            - 2 * (coefficients * self.moment).sum(-1)
            + ((coefficients[:, None, :] @ self.gram)[:, 0] * coefficients).sum(-1)
        )
        constant = self.energy <= self.tokens * _ROUNDING**2
        r2 = torch.where(constant, 1.0, 1 - residual.clamp(min=0) / self.energy)
        return tuple(r2.tolist())

    def to_tensors(self) -> dict[str, Tensor]:
        """The state as tensors, for a file; from_tensors is the inverse."""
        return {
            "gram": self.gram,
            "moment": self.moment,
            "energy": self.energy,
            "tokens": torch.tensor(self.tokens),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], groups: int | None = None, features: int | None = None
    ) -> NormalEquations:
        """Inverse of to_tensors.  groups, features: as many as there must be, where that is known.

        Raises InputError for an entry that is missing or has another shape or dtype.
        """
        gram = tensor_of(tensors, "gram", (groups, features, features), torch.float64)
        groups, features, _ = gram.shape
        equations = cls(features, groups)
        check_tensor("gram", gram, equations.gram.shape, torch.float64)
        equations.gram = gram.clone()
        equations.moment = tensor_of(tensors, "moment", (groups, features), torch.float64).clone()
        equations.energy = tensor_of(tensors, "energy", (groups,), torch.float64).clone()
        equations.tokens = int(tensor_of(tensors, "tokens", (), torch.int64))
        return equations
