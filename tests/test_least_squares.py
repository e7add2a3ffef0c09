"""Ridge normal equations against a direct solve, and their additivity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asapc.calibration.least_squares import NormalEquations
from asapc.errors import InputError


def rows(seed=0, batch=3, heads=2, tokens=7, features=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, tokens, features, generator=generator, dtype=torch.float64)
    y = torch.randn(batch, heads, tokens, generator=generator, dtype=torch.float64)
    return x, y


def direct(x, y, ridge):
    """Eq. 20 as an augmented least-squares problem, which never forms X'X."""
    x, y = x.reshape(-1, x.shape[-1]).numpy(), y.reshape(-1).numpy()
    augmented = np.vstack([x, math.sqrt(len(x) * ridge) * np.eye(x.shape[1])])
    omega = np.linalg.lstsq(augmented, np.append(y, np.zeros(x.shape[1])), rcond=None)[0]
    r2 = 1 - ((y - x @ omega) ** 2).sum() / (y**2).sum()
    return torch.from_numpy(omega), r2, np.linalg.cond(augmented) ** 2


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0])
def test_pooled_equals_direct_solve(ridge):
    x, y = rows()
    equations = NormalEquations(4)
    equations.add(x, y)
    fit = equations.solve(ridge)
    omega, r2, condition = direct(x, y, ridge)
    assert fit.coefficients.shape == (1, 4) and equations.tokens == 3 * 2 * 7
    torch.testing.assert_close(fit.coefficients[0], omega)
    assert fit.quality.r2[0] == pytest.approx(r2, abs=1e-12)
    assert fit.quality.condition_number[0] == pytest.approx(condition, rel=1e-9)


def test_duplicated_feature_gets_the_least_norm_solution():
    x, y = rows()
    x[..., 3] = x[..., 2]
    equations = NormalEquations(4)
    equations.add(x, y)
    fit = equations.solve(0.0)
    torch.testing.assert_close(fit.coefficients[0], direct(x, y, 0.0)[0])
    assert fit.coefficients[0, 2] == pytest.approx(fit.coefficients[0, 3])
    assert fit.quality.condition_number == (None,)
    assert equations.solve(1e-3).quality.condition_number[0] is not None


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_zero_features_and_zero_target(ridge):
    equations = NormalEquations(4)
    x, y = rows()
    equations.add(torch.zeros_like(x), y)
    fit = equations.solve(ridge)
    assert torch.equal(fit.coefficients, torch.zeros(1, 4).double()) and fit.quality.r2 == (0.0,)
    equations = NormalEquations(4)
    equations.add(x, torch.zeros_like(y))
    fit = equations.solve(ridge)
    assert torch.equal(fit.coefficients, torch.zeros(1, 4).double()) and fit.quality.r2 == (1.0,)


def test_too_few_rows():
    x, y = rows(batch=1, heads=1, tokens=3)
    equations = NormalEquations(4)
    equations.add(x, y)
    with pytest.raises(InputError, match=r"4 coefficients .* got 3"):
        equations.solve(1e-3)
