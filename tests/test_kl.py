"""The KL fit against autograd, closed-form optima and hostile clouds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from asapc.calibration.kl import KlObjective, KlPiece, fit_kl
from asapc.calibration.least_squares import NormalEquations
from asapc.features.clouds import Clouds
from asapc.operators.c_transforms import close_columns, log_marginals
from asapc.operators.sinkhorn import run_half_steps

LAYOUTS = ["square", "N<M", "N>M", "y_keep", "x_keep", "bias"]


def clouds_for(layout, seed=0, batch=3, heads=2, spread=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points, others = {"N<M": (5, 9), "N>M": (9, 5)}.get(layout, (7, 7))

    def draw(*shape):
        return spread * torch.randn(*shape, generator=generator, dtype=dtype)

    x, y = draw(batch, heads, points, 4), draw(batch, heads, others, 4)
    keep = torch.arange(7) < torch.tensor([7, 4, 1])[torch.arange(batch) % 3, None]
    bias = None
    if layout == "bias":
        bias = draw(1, heads, points, others)
        bias[:, :, 2, 3] = -math.inf
    if layout == "y_keep":
        return Clouds(x, y.masked_fill(~keep[:, None, :, None], math.nan), y_keep=keep)
    if layout == "x_keep":
        return Clouds(x.masked_fill(~keep[:, None, :, None], math.nan), y, x_keep=keep)
    return Clouds(x, y, bias=bias)


def scores_of(clouds):
    """S [B, H, N, M] in float64, -inf where a point carries no mass."""
    x, y = clouds.x.double(), clouds.y.double()
    scores = x @ y.transpose(-1, -2)
    if clouds.bias is not None:
        scores = scores + clouds.bias
    if clouds.x_keep is not None:
        scores = scores.masked_fill(~clouds.x_keep[:, None, :, None], -math.inf)
    if clouds.y_keep is not None:
        scores = scores.masked_fill(~clouds.y_keep[:, None, None, :], -math.inf)
    return scores


def teacher_of(clouds, half_steps=9):
    """The dual of x after `half_steps` half-steps, cost coordinates, and r after the next c-transform."""
    scores = scores_of(clouds)
    points = scores.shape[-2]
    plain = scores.masked_fill(scores.isneginf(), -1e5)  # no mass up to rounding, no inf - inf
    _, log_nu = log_marginals(points, scores.shape[-1], clouds.y_keep, scores)
    zero = scores.new_zeros(())
    f, g = zero.expand(scores.shape[:3]), zero.expand(*scores.shape[:2], scores.shape[3])
    if clouds.y_keep is not None:
        g = g.masked_fill(~clouds.y_keep[:, None, :], -math.inf)
    f, g = run_half_steps(plain, f, g, half_steps, "row", clouds.y_keep)
    if clouds.x_keep is not None:
        f = f.masked_fill(~clouds.x_keep[:, None, :], -math.inf)
    g = close_columns(plain, f, log_nu)
    mass = torch.exp(plain + f[..., :, None] + g[..., None, :]).sum(-1)
    cost = f + clouds.x.double().square().sum(-1) / 2
    if clouds.x_keep is not None:
        cost = cost.masked_fill(~clouds.x_keep[:, None, :], 0.0)
    return clouds.centre(cost), mass


def piece_for(layout, seed=0, features=4, teacher=False, **options):
    """Random centred columns; teacher: the last one is the teacher's exact dual."""
    clouds = clouds_for(layout, seed, **options)
    dual, mass = teacher_of(clouds)
    generator = torch.Generator().manual_seed(seed + 1)
    columns = torch.randn(*dual.shape, features, generator=generator, dtype=torch.float64)
    if teacher:
        columns[..., -1] = dual
    return KlPiece(clouds.centre(columns), clouds, mass), dual


def direct_objective(piece, penalty, omega, head=None):
    """J as it is written, one example and head at a time."""
    scores, total = scores_of(piece.clouds), penalty / 2 * omega.square().sum()
    batch, heads, points, others = scores.shape
    for b in range(batch):
        rows = torch.arange(points)
        if piece.clouds.x_keep is not None:
            rows = rows[piece.clouds.x_keep[b]]
        cols = torch.arange(others)
        if piece.clouds.y_keep is not None:
            cols = cols[piece.clouds.y_keep[b]]
        for h in range(heads) if head is None else [head]:
            dual = piece.columns[b, h, rows] @ omega
            u = dual - piece.clouds.x[b, h, rows].square().sum(-1) / 2
            lse = torch.logsumexp(scores[b, h][rows][:, cols] + u[:, None], 0)
            total = total + lse.sum() / others - piece.mass[b, h, rows] @ dual
    return total


def split(piece, *cuts):
    """The same examples as several pieces."""
    batch = piece.columns.shape[0]
    edges = [0, *cuts, batch]

    def part(tensor, a, b):
        return None if tensor is None else tensor[a:b]

    done = []
    for a, b in itertools.pairwise(edges):
        c = piece.clouds
        clouds = Clouds(c.x[a:b], c.y[a:b], part(c.x_keep, a, b), part(c.y_keep, a, b), bias=c.bias)
        done.append(KlPiece(piece.columns[a:b], clouds, piece.mass[a:b]))
    return done


def solved(pieces, penalty=0.0, groups=1, start=None, **rest):
    start = torch.zeros(groups, pieces[0].columns.shape[-1]) if start is None else start
    return fit_kl(pieces, groups=groups, penalty=penalty, start=start, **rest)


def value(pieces, penalty, coefficients, head=None):
    """J at these coefficients."""
    return KlObjective(pieces, penalty, head).evaluate(coefficients.double()).value


@pytest.mark.parametrize("head", [None, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_value_and_gradient_against_autograd(layout, head):
    piece, _ = piece_for(layout)
    omega = torch.tensor([0.3, -0.7, 0.2, 0.5], dtype=torch.float64)
    objective = KlObjective([piece], 0.3, head)

    def exact(omega):
        return direct_objective(piece, 0.3, omega, head)

    got = objective.evaluate(omega)
    leaf = omega.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(exact(leaf), leaf)
    assert got.value == pytest.approx(float(exact(omega)), rel=1e-13)
    torch.testing.assert_close(got.gradient, gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_exact_dual_is_the_optimum_and_is_found(layout):
    piece, _ = piece_for(layout, teacher=True)
    exact = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    gradient = KlObjective([piece], 0.0).evaluate(exact).gradient
    assert gradient.abs().max() < 1e-13
    fit = solved([piece])
    assert fit.converged == (True,) and 0 < fit.iterations[0] < 20
    torch.testing.assert_close(fit.coefficients[0], exact, atol=1e-7, rtol=0)
    again = solved([piece], start=exact[None])
    assert again.iterations == (0,) and again.converged == (True,)
    assert torch.equal(again.coefficients, exact[None])


@pytest.mark.parametrize(("layout", "penalty"), [*((layout, 0.5) for layout in LAYOUTS), ("x_keep", 0.0)])
def test_beats_least_squares_on_its_own_objective(layout, penalty):
    piece, dual = piece_for(layout, seed=2)
    equations = NormalEquations(4)
    equations.add(piece.columns, dual)
    start = equations.solve(penalty / equations.tokens).coefficients
    fit = solved([piece], penalty, start=start)
    least = direct_objective(piece, penalty, fit.coefficients[0])
    assert fit.converged == (True,) and least < direct_objective(piece, penalty, start[0])
    keep = piece.clouds.x_keep
    rows = 2 * (3 * piece.mass.shape[2] if keep is None else int(keep.sum()))
    end = KlObjective([piece], penalty).evaluate(fit.coefficients[0])
    assert fit.gradient_norm[0] == pytest.approx(float(end.gradient.norm()) / rows)
    for other in torch.eye(4).double() * 1e-3:  # nothing near is lower
        assert direct_objective(piece, penalty, fit.coefficients[0] + other) > least


@pytest.mark.parametrize(("layout", "groups"), [("N<M", 1), ("x_keep", 2), ("y_keep", 2), ("bias", 1)])
def test_streaming_changes_nothing(layout, groups):
    piece, _ = piece_for(layout, batch=6)
    start = torch.zeros(groups, 4)
    whole = solved([piece], 0.01, groups=groups, start=start)
    parts = solved(split(piece, 1, 4), 0.01, groups=groups, start=start)
    torch.testing.assert_close(parts.coefficients, whole.coefficients, atol=1e-8, rtol=1e-8)
    assert all(parts.converged)


def finite(fit):
    return bool(fit.coefficients.isfinite().all()) and all(map(math.isfinite, fit.gradient_norm))


@pytest.mark.parametrize(("spread", "penalty"), [(5.0, 1e-3), (50.0, 0.0), (50.0, 1e6)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_never_nan_never_worse(layout, spread, penalty):
    piece, dual = piece_for(layout, spread=spread, teacher=True)  # huge: scores to 1e4
    equations = NormalEquations(4)
    equations.add(piece.columns[..., :4], dual)
    for start in (torch.zeros(1, 4), 10 * torch.ones(1, 4), 0.9 * equations.solve(1e-3).coefficients):
        fit = solved([piece], penalty, start=start)
        before, after = (value([piece], penalty, x[0]) for x in (start, fit.coefficients))
        assert finite(fit) and after <= before


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_dependent_and_constant_columns(penalty):
    piece, _ = piece_for("y_keep", batch=6)
    twice = KlPiece(
        torch.cat([piece.columns, piece.columns, torch.zeros_like(piece.columns)], -1), piece.clouds,
        piece.mass,
    )  # fmt: skip
    fit = solved([twice], penalty)
    once = solved([piece], penalty / 2)
    assert fit.converged == (True,)
    first, second, zero = fit.coefficients[0].split(4)
    torch.testing.assert_close(first, second, atol=1e-8, rtol=0)
    torch.testing.assert_close(first + second, once.coefficients[0], atol=1e-7, rtol=0)
    assert torch.equal(zero, torch.zeros(4).double())


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_nothing_to_learn(penalty):
    """One point, constant columns, no mass to close, no pieces: only the penalty moves the start."""
    start = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    x, y = torch.randn(2, 1, 1, 3), torch.randn(2, 1, 4, 3)
    none, some = torch.zeros(2, 4).bool(), torch.tensor([[True] * 4, [False] * 4])
    one = torch.full((2, 1, 1), 1.0)
    cases = [
        [KlPiece(torch.zeros(2, 1, 1, 2), Clouds(x, y), one)],
        [KlPiece(torch.zeros(2, 1, 1, 2), Clouds(x, y, y_keep=some), one)],
        [KlPiece(torch.zeros(2, 1, 4, 2), Clouds(y, y, y_keep=none), torch.zeros(2, 1, 4))],
        [],
    ]
    for pieces in cases:
        fit = solved(pieces, penalty, start=start)
        assert finite(fit) and fit.converged == (True,)
        expected = start if penalty == 0 else torch.zeros_like(start)
        torch.testing.assert_close(fit.coefficients, expected, atol=1e-6, rtol=0)


def test_says_when_it_did_not_converge():
    piece, _ = piece_for("square", spread=2.0, teacher=True)
    start = torch.full((1, 4), 30.0)
    cut = solved([piece], start=start, max_iterations=1)
    assert cut.converged == (False,) and cut.iterations == (1,)
    full = solved([piece], start=start)
    ends = [value([piece], 0.0, x) for x in (full.coefficients[0], cut.coefficients[0], start[0])]
    assert full.converged == (True,) and ends == sorted(ends) and ends[0] < ends[1]
    assert full.gradient_norm[0] < 1e-6 * cut.gradient_norm[0]
