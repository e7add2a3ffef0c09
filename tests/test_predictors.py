"""The coarse and gaussian predictors: closed forms, and their CPU twins against the meaning."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.calibration.teacher import TeacherDuals
from asapc.features.clouds import Clouds
from asapc.features.farthest import farthest_points
from asapc.features.gaussian import brenier_potential
from asapc.features.predictor import transform_plan
from asapc.ir import Convention, OutputFactor, SiteTensors
from asapc.operators import asap as meaning

SCALE = 0.4


def convention(half_steps: int, first_side: str) -> Convention:
    return Convention(
        half_steps=half_steps,
        first_side=first_side,  # type: ignore[arg-type]
        score_multiplier=SCALE,
        output_factor=OutputFactor(queries=1),
        mask="key",
        bias=False,
        early_stop=False,
    )


def site(n: int, m: int, masked: bool, seed: int = 0, spread: float = 1.0) -> SiteTensors:
    generator = torch.Generator().manual_seed(seed)
    q = spread * torch.randn(2, 2, n, 4, dtype=torch.float64, generator=generator)
    k = torch.randn(2, 2, m, 4, dtype=torch.float64, generator=generator)
    keep = None
    if masked:
        keep = torch.arange(m) < torch.tensor([[m - 3], [2]])
    return SiteTensors(q, k, keep)


def centred(values: Tensor, keep: Tensor | None) -> Tensor:
    """Minus the mean over points with mass, 0 elsewhere."""
    weight = torch.ones_like(values) if keep is None else keep[:, None, :].to(values.dtype)
    finite = torch.where(weight > 0, values, 0.0)
    mean = finite.sum(-1, keepdim=True) / weight.expand_as(values).sum(-1, keepdim=True)
    return (finite - mean) * (weight > 0)


@pytest.mark.parametrize("masked", [False, True], ids=["open", "masked"])
@pytest.mark.parametrize("first_side", ["row", "column"])
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("c_transforms", [1, 2])
def test_a_cluster_for_every_point_gives_the_teachers_dual(side, c_transforms, first_side, masked):
    """Without spread within clusters the coarse problem is the teacher's own."""
    own = site(7, 9, masked)
    rule = convention(11 if first_side == "row" else 12, first_side)
    for half_steps in (rule.half_steps, rule.half_steps - 1):
        plan = transform_plan(convention(half_steps, first_side), c_transforms, side)  # type: ignore[arg-type]
        if plan is not None and plan.c_transforms == c_transforms:
            break
    used = convention(half_steps, first_side)
    budget = plan.budget(used, plan.sides()[0])
    points = own.k if side == "source" else own.q
    if masked and side == "source":
        points = points.masked_fill(~own.keep[:, None, :, None], 0.0)  # type: ignore[index]
    root = SCALE**0.5
    f, g = TeacherDuals(own, used).after(budget.half_steps)
    exact = f if side == "source" else g
    keep = own.keep if side == "target" else None
    for example in range(2):  # every example has its own points, hence its own pivots
        one = slice(example, example + 1)
        arguments = (
            own.q[one], own.k[one], None if own.keep is None else own.keep[one], None,
            [points[example] * root], torch.ones(1, 1), "coarse:9", side, SCALE,
            budget.half_steps, budget.starts_on_x,
        )  # fmt: skip
        wanted = centred(exact[one], None if keep is None else keep[one])
        for function in (meaning.dual, torch.ops.asapc.dual):
            found = function(*arguments)
            found = centred(found, None if keep is None else keep[one])
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_the_gaussian_potential_solves_the_gaussian_problem():
    """On clouds sampled densely from Gaussians it is the converged dual, up to its gauge."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 1500, 1, dtype=torch.float64, generator=generator) * 1.3 + 0.5
    y = torch.randn(1, 1, 1500, 1, dtype=torch.float64, generator=generator) * 0.8 - 1.0
    tensors = SiteTensors(x, y)
    used = Convention(400, "row", 1.0, OutputFactor(queries=1), "none", False, False)
    f, _ = TeacherDuals(tensors, used).after(400)
    from asapc.features.clouds import Clouds

    found = -brenier_potential(Clouds(x, y))  # in score coordinates: the dual less |x|^2 / 2
    difference = centred(found, None) - centred(f, None)
    assert float(difference.square().mean().sqrt()) < 0.02 * float(centred(f, None).std())


def test_farthest_points_one_after_the_other():
    """By hand, with NumPy's argmax; masked points are never chosen, and few points repeat."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(3, 2, 11, 4, generator=generator, dtype=torch.float64)
    keep = torch.rand(3, 11, generator=generator) < 0.6
    keep[2] = torch.arange(11) < 2
    found = farthest_points(Clouds(y, y, y_keep=keep), 5)
    assert found.shape == (3, 2, 5, 4)
    for example, head in itertools.product(range(3), range(2)):
        there = y[example, head, keep[example]].numpy()
        centre = there.mean(0)
        chosen = [there[((there - centre) ** 2).sum(-1).argmax()]]
        while len(chosen) < 5:
            away = np.stack([((there - pivot) ** 2).sum(-1) for pivot in chosen]).min(0)
            chosen.append(there[away.argmax()])
        distinct = min(5, len(there))
        own = found[example, head].numpy()
        np.testing.assert_allclose(own[:distinct], np.stack(chosen[:distinct]), rtol=0, atol=1e-12)
        for pivot in own:
            assert np.abs(there - pivot).sum(-1).min() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e3], ids=["narrow", "wide", "huge"])
@pytest.mark.parametrize(("side", "masked"), [("source", False), ("target", True)])
@pytest.mark.parametrize("features", ["coarse:5", "farthest:5", "gaussian", "coarse:3 gaussian norm"])
def test_cpu_twins_are_within_the_honest_error(features, side, masked, spread, dtype):
    """Narrow scores stay in the linear domain, wide ones go to float64, huge ones to logarithms."""
    own = site(33, 20, masked, seed=3, spread=spread)
    generator = torch.Generator().manual_seed(1)
    count = int(features.split(":")[1].split()[0]) if "coarse" in features else 0
    pivots = [torch.randn(2, count, 4, generator=generator) * SCALE**0.5] if count else []
    columns = {"coarse:5": 1, "farthest:5": 1, "gaussian": 3, "coarse:3 gaussian norm": 5}[features]
    weights = torch.rand(1, columns, generator=generator)
    for half_steps, starts_on_x in ((1, True), (8, False), (9, True)):
        tail = (None, pivots, weights, features, side, SCALE, half_steps, starts_on_x)
        exact = meaning.dual(own.q, own.k, own.keep, *tail)
        q, k = own.q.to(dtype), own.k.to(dtype)
        honest = (meaning.dual(q, k, own.keep, *tail).double() - exact).abs().max()
        found = torch.ops.asapc.dual(q, k, own.keep, *tail)
        scale = max(1.0, float(exact.abs().max()))
        # In float64 the reference is exact only up to where its square root stops, 1e-10.
        rounding = 1e-6 if dtype == torch.float32 else 1e-9
        assert float((found.double() - exact).abs().max()) <= 2 * float(honest) + rounding * scale


@pytest.mark.parametrize("features", ["coarse:5", "farthest:5"])
def test_coarse_duals_do_not_depend_on_how_many_examples_are_done_together(features, monkeypatch):
    own = site(19, 23, True, seed=3)
    pivots = [torch.randn(2, 5, 4).double()] if features == "coarse:5" else []
    tail = (None, pivots, torch.ones(1, 1), features, SCALE, 5, True)
    together = torch.ops.asapc.dual_and_row_mass(own.q, own.k, own.keep, *tail)
    monkeypatch.setattr("asapc.kernels.cpu.coarse.ENTRIES", 1)
    torch.testing.assert_close(torch.ops.asapc.dual_and_row_mass(own.q, own.k, own.keep, *tail), together)
