"""Feature families against closed forms, independent NumPy formulas, dropped padding and gradients."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.calibration.teacher import TeacherDuals
from asapc.errors import InputError
from asapc.features import MAX_COUNT, Feature, coarse, feature_columns, predict_dual, sliced
from asapc.features.clouds import Budget, Clouds
from asapc.features.coarse import farthest_points
from asapc.features.gaussian import brenier_potential
from asapc.features.points import lse, token_bias
from asapc.features.predictor import transform_plan
from asapc.ir import Convention, OutputFactor, SiteTensors
from asapc.kernels import native
from asapc.operators import asap as meaning

E = torch.float64
BUDGET = Budget(4, True)
ANYWHERE = ["farthest:4"]  # besides those in HERE; coarse is below
HERE = ["sliced:3", "raw", "norm", "active", "lse", "token_bias"]
sizes = st.integers(1, 9)
seeds = st.integers(0, 10_000)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def points(seed, num, dim=3, batch=2, heads=2):
    return torch.randn(batch, heads, num, dim, generator=generator(seed), dtype=E)


def some(seed, num, batch=2):
    """A mask [B, num] with about half of the points and at least one."""
    keep = torch.rand(batch, num, generator=generator(seed)) < 0.5
    keep[:, seed % num] = True
    return keep


def case(seed, n, m, x_masked=False, y_masked=False, **shape):
    x_keep = some(seed + 2, n) if x_masked else None
    y_keep = some(seed + 3, m) if y_masked else None
    return Clouds(points(seed, n, **shape), points(seed + 1, m, **shape), x_keep, y_keep)


def theta_for(seed, count=3, dim=3):
    return sliced.parameter(case(0, 1, 1, dim=dim), count, "random", seed)


def close(found, expected, atol=1e-11):
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-11)


def transport_cost(a, b):
    """Of two sorted lines with uniform masses, by the stairs of their coupling: no dual enters."""
    i = j = 0
    left, right, total = len(b), len(a), 0.0  # of a point's mass, in units of 1 / (n m)
    while i < len(a) and j < len(b):
        moved = min(left, right)
        total += moved * (a[i] - b[j]) ** 2 / 2
        left, right = left - moved, right - moved
        if left == 0:
            i, left = i + 1, len(b)
        if right == 0:
            j, right = j + 1, len(a)
    return total / (len(a) * len(b))


@settings(max_examples=100, deadline=None)
@given(
    seed=seeds, n=sizes, m=sizes, x_masked=st.booleans(), y_masked=st.booleans(), ties=st.booleans(),
    by_kernel=st.booleans(),
)  # fmt: skip
def test_the_duals_are_exact(seed, n, m, x_masked, y_masked, ties, by_kernel):
    """No gap: with g = min_i (c_ij - f_i), which is feasible, the means of both sum to the cost."""
    clouds = case(seed, n, m, x_masked, y_masked)
    if ties:
        clouds = Clouds(clouds.x.round(), clouds.y.round(), clouds.x_keep, clouds.y_keep)
    theta = torch.eye(3) if ties else theta_for(seed)
    f = sliced.columns(clouds, theta, BUDGET).numpy()  # [B, H, N, L]
    if by_kernel and native.missing() is None:
        own = [native.feature("sliced", clouds, theta[[s]], torch.ones(1, 1))[0] for s in range(3)]
        f = torch.stack(own, -1).numpy()
    directions = theta.double().numpy()
    for b, h, s in np.ndindex(f.shape[0], f.shape[1], f.shape[3]):
        mine = slice(None) if clouds.x_keep is None else clouds.x_keep[b].numpy()
        theirs = slice(None) if clouds.y_keep is None else clouds.y_keep[b].numpy()
        a = clouds.x[b, h].numpy()[mine] @ directions[s]
        ys = clouds.y[b, h].numpy()[theirs] @ directions[s]
        if 0 in (len(a), len(ys)):
            continue
        own = f[b, h, mine, s]
        g = ((a[:, None] - ys) ** 2 / 2 - own[:, None]).min(0)
        exact = transport_cost(np.sort(a), np.sort(ys))
        assert abs(own.mean() + g.mean() - exact) <= 1e-12 * max(1.0, exact)


# The others, each by its definition


def test_raw_norm_and_active_are_what_they_say():
    clouds = case(0, 4, 3)
    real = torch.tensor([[True, True, False, False], [True] * 4])
    clouds = Clouds(clouds.x, clouds.y, x_real=real)
    assert Feature("raw").columns(clouds, None, BUDGET) is clouds.x
    close(Feature("norm").columns(clouds, None, BUDGET)[..., 0], (clouds.x**2).sum(-1) / 2)
    active = Feature("active").columns(clouds, None, BUDGET)
    assert torch.equal(active, real[:, None, :, None].expand(2, 2, 4, 1).double())
    unknown = Feature("active").columns(Clouds(clouds.x, clouds.y), None, BUDGET)
    assert torch.equal(unknown, torch.zeros_like(active))


@pytest.mark.parametrize("bias_shape", [None, (2, 2, 5, 4), (1, 2, 5, 4), (1, 1, 1, 4)], ids=str)
def test_lse_closes_the_rows(bias_shape):
    """exp(S + u) has mass 1 in every row, over the kept y."""
    clouds = case(0, 5, 4, y_masked=True)
    bias = None if bias_shape is None else torch.randn(bias_shape, generator=generator(0), dtype=E)
    clouds = Clouds(clouds.x, clouds.y, y_keep=clouds.y_keep, bias=bias)
    u = lse(clouds, None, BUDGET)[..., 0] - clouds.cost_offset()
    scores = clouds.x @ clouds.y.mT + (0 if bias is None else bias)
    mass = (torch.exp(scores + u[..., None]) * clouds.y_keep[:, None, None, :]).sum(-1)
    close(mass, torch.ones_like(mass))


def test_lse_of_a_row_masked_by_its_bias_is_zero():
    bias = torch.zeros(1, 1, 5, 4, dtype=E)
    bias[0, 0, 2] = -math.inf
    clouds = case(0, 5, 4)
    column = lse(Clouds(clouds.x, clouds.y, bias=bias), None, BUDGET)
    assert column.isfinite().all() and (column[:, :, 2] == 0).all() and (column[:, :, 1] != 0).all()


def test_token_bias_learns_a_value_per_position_of_one_length():
    clouds = case(0, 4, 3)
    values = torch.tensor([[1.0, -2.0, 5.0, 0.0]])
    found = predict_dual([Feature("token_bias")], [None], values, clouds, BUDGET)
    close(found + clouds.cost_offset(), (values - values.mean()).double().expand(2, 2, 4))
    keep = torch.ones(2, 4, dtype=torch.bool)
    for padded in (Clouds(clouds.x, clouds.y, x_keep=keep), Clouds(clouds.x, clouds.y, x_real=keep)):
        with pytest.raises(InputError, match="token_bias: needs sequences of one length"):
            token_bias(padded, None, BUDGET)


# What holds for every family


def feature_of(text, sample, seed=0):
    feature = Feature.parse(text)
    return feature, feature.parameter(sample, seed)


def columns_of(text, clouds):
    feature, parameter = feature_of(text, clouds)
    return feature_columns([feature], [parameter], clouds, BUDGET)


@pytest.mark.parametrize("text", HERE + ANYWHERE)
@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes, m=sizes, padded=st.booleans())
def test_permutation_equivariant(text, seed, n, m, padded):
    """x permuted: the columns follow. y permuted together with its mask: nothing changes."""
    padded = padded and text != "token_bias"
    clouds = case(seed, n, m, x_masked=padded, y_masked=padded)
    rows = torch.randperm(n, generator=generator(seed))
    others = torch.randperm(m, generator=generator(seed))
    permuted = Clouds(
        clouds.x[:, :, rows], clouds.y[:, :, others],
        None if clouds.x_keep is None else clouds.x_keep[:, rows],
        None if clouds.y_keep is None else clouds.y_keep[:, others],
    )  # fmt: skip
    expected = columns_of(text, clouds)[:, :, rows]
    found = columns_of(text, permuted)
    if text == "token_bias":  # positions are its columns, too
        found = found[..., torch.argsort(rows)]
    close(found, expected)


@pytest.mark.parametrize("text", [text for text in HERE + ANYWHERE if text != "token_bias"])
@settings(max_examples=25, deadline=None)
@given(seed=seeds, n=sizes, m=sizes)
def test_points_without_mass_count_as_absent(text, seed, n, m):
    """Either side may be padded; what the padding holds is not read."""
    clouds = case(seed, n, m, True, True)
    x = torch.where(clouds.x_keep[:, None, :, None], clouds.x, 1e3)
    y = torch.where(clouds.y_keep[:, None, :, None], clouds.y, -1e3)
    found = columns_of(text, Clouds(x, y, clouds.x_keep, clouds.y_keep))
    for example in range(2):
        x_keep, y_keep = clouds.x_keep[example], clouds.y_keep[example]
        part = Clouds(clouds.x[example, :, x_keep][None], clouds.y[example, :, y_keep][None])
        close(found[example, :, x_keep][None], columns_of(text, part))
        assert (found[example, :, ~x_keep] == 0).all()


@pytest.mark.parametrize("text", HERE + ANYWHERE)
def test_one_point_gives_zero_and_equal_points_equal_values(text):
    one = columns_of(text, case(0, 1, 5))
    assert torch.equal(one, torch.zeros_like(one))
    if text == "token_bias":
        return
    clouds = case(0, 1, 5)
    equal = columns_of(text, Clouds(clouds.x.expand(-1, -1, 6, -1), clouds.y))
    close(equal, torch.zeros_like(equal), atol=1e-15)


@pytest.mark.parametrize("text", [text for text in HERE + ANYWHERE if text != "token_bias"])
def test_columns_and_gradients_are_finite_without_any_mass(text):
    """First example without any y, second without any x."""
    y_keep = torch.tensor([[False] * 4, [True] * 4])
    x_keep = torch.tensor([[True] * 5, [False] * 5])
    clouds = case(0, 5, 4)
    x, y = clouds.x.float().requires_grad_(), clouds.y.float().requires_grad_()
    found = columns_of(text, Clouds(x, y, x_keep, y_keep))
    assert found.dtype == torch.float32 and found.isfinite().all()
    if not found.requires_grad:
        return
    for gradient in torch.autograd.grad(found.square().sum(), (x, y), allow_unused=True):
        assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize("text", HERE)
def test_columns_are_finite_at_huge_values(text):
    clouds = case(0, 9, 6)
    huge = Clouds(clouds.x.float() * 1e15, clouds.y.float() * 1e15)
    assert columns_of(text, huge).isfinite().all()


@pytest.mark.parametrize("text", ["sliced:3", "raw", "norm", "lse"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_gradients(text, padded):
    clouds = case(4, 5, 4, heads=1)
    x_keep = torch.tensor([[True, True, False, True, True], [True] * 5]) if padded else None
    y_keep = torch.tensor([[True, False, True, True], [False] * 4]) if padded else None
    feature, parameter = feature_of(text, clouds)

    def columns(x, y):
        return feature_columns([feature], [parameter], Clouds(x, y, x_keep, y_keep), BUDGET)

    x, y = clouds.x.requires_grad_(), clouds.y.requires_grad_()
    assert torch.autograd.gradcheck(columns, (x, y))


# Slices


def sample(seed=0, dim=6):
    return case(seed, 9, 7, dim=dim)


@pytest.mark.parametrize("kind", sliced.KINDS)
@pytest.mark.parametrize("count", [1, 6])
def test_slices_are_unit_seeded_float32(kind, count):
    theta = sliced.parameter(sample(), count, kind, 7)
    assert theta.dtype == torch.float32 and theta.shape == (count, 6)
    torch.testing.assert_close(theta.norm(dim=-1), torch.ones(count))
    assert torch.equal(theta, sliced.parameter(sample(), count, kind, 7))
    by_seed = not torch.equal(theta, sliced.parameter(sample(), count, kind, 8))
    assert by_seed == (kind in ("random", "orthogonal"))


def test_principal_slices_are_the_leading_directions_of_the_points_with_mass():
    """Spread 3 and 1 of x, 2 of y along a rotated basis; means and padding that would dominate."""
    basis = torch.linalg.qr(torch.randn(3, 3, generator=generator(1), dtype=E)).Q
    signs = torch.where(basis.gather(0, basis.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0)
    cube = torch.tensor([[i, j, k] for i in (-1, 1) for j in (-1, 1) for k in (-1, 1)], dtype=E)

    def cloud(*spread):
        return ((cube * torch.tensor(spread, dtype=E)) @ basis.T).expand(2, 2, -1, -1)

    x, y = cloud(3, 0, 1) + 50.0 * torch.arange(2)[:, None, None], cloud(0, 2, 0) - 20.0
    junk = torch.full((2, 2, 2, 3), 1e4, dtype=E) * torch.tensor([[1.0], [-1.0]])
    keep = torch.tensor([True] * 8 + [False] * 2).expand(2, 10)
    padded = Clouds(torch.cat([x, junk], 2), torch.cat([y, junk], 2), keep, keep)
    found = sliced.parameter(padded, 3, "principal", 0)
    torch.testing.assert_close(found, (basis * signs).T.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["axis", "principal"])
def test_too_many_slices_of_a_basis_are_refused(kind):
    with pytest.raises(InputError, match=f"at most 6 of kind {kind}.*got 7\n.*help"):
        sliced.parameter(sample(), 7, kind, 0)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "unknown feature family ''"),
        ("slices:3", "unknown feature family 'slices'.*\n.*sliced, gaussian"),
        ("sliced", f"sliced is written sliced:<1 to {MAX_COUNT}>, then optionally one of random"),
        ("sliced:0", "sliced is written"),
        ("sliced:x", "sliced is written"),
        ("sliced:4097", "sliced is written"),
        ("sliced:3:diagonal", "sliced is written"),
        ("norm:1", "norm takes no number, got 'norm:1'"),
    ],
)
def test_malformed_features_are_refused(text, rule):
    with pytest.raises(InputError, match=f"^here: {rule}"):
        Feature.parse(text, "here")


# The CPU twin


@pytest.mark.skipif(native.missing() is not None, reason="the C++ engine is not here")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["sliced", "moments"])
def test_engine_does_not_depend_on_threads_or_neighbours(family, threads):
    clouds = case(0, 37, 29, True, True, heads=11, dim=16)
    clouds = Clouds(clouds.x.float(), clouds.y.float(), clouds.x_keep, clouds.y_keep)
    theta, weights = theta_for(0, 35, 16), torch.randn(11, 35, generator=generator(0))
    given = [(theta, weights), (theta, weights[3:4])] if family == "sliced" else [()] * 2
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = native.feature(family, clouds, *given[0])[0]
    finally:
        torch.set_num_threads(before)
    alone = Clouds(clouds.x[1:, 3:4], clouds.y[1:, 3:4], clouds.x_keep[1:], clouds.y_keep[1:])
    assert torch.equal(native.feature(family, alone, *given[1])[0][0, 0], whole[1, 3])


@pytest.mark.parametrize("features", ["gaussian", "sliced:3"])
def test_one_broken_example_does_not_break_the_others(features):
    q = torch.randn(3, 2, 8, 4, generator=generator(0))
    q[1, 0, 3] = math.nan
    slices = [theta_for(0, 3, 4)] if features == "sliced:3" else []
    tail = (slices, torch.ones(1, 3), features, "source", 0.5, 3, True)
    for function in (torch.ops.asapc.dual, meaning.dual):
        own = function(q, q.nan_to_num(), None, None, *tail)
        alone = function(q[:1], q[:1], None, None, *tail)
        assert bool(own[1, 0].isnan().any()) and bool(own[1, 1].isfinite().all())
        torch.testing.assert_close(own[:1], alone)


def test_lse_of_an_empty_batch() -> None:
    q = torch.randn(0, 2, 8, 4)
    own = torch.ops.asapc.dual(q, q, None, None, [], torch.ones(1, 1), "lse", "target", 0.5, 3, True)
    assert own.shape == (0, 2, 8)


# The coarse and gaussian predictors, and their CPU twins


SCALE = 0.4


def convention(half_steps: int, first_side: str) -> Convention:
    return Convention(half_steps, first_side, SCALE, OutputFactor(queries=1), "key")


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


@pytest.mark.skipif(native.missing() is not None, reason="the C++ engine is not here")
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("family", ["coarse", "sliced", "gaussian"])
def test_features_in_the_engine(family, seed):
    """Of all sizes, masks on both sides, and points that are alike, which share clusters and ranks."""
    draw = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if seed % 2 else torch.float64
    n, m, dim = (int(draw.choice(some)) for some in ((1, 5, 130), (1, 7, 129), (3, 40)))
    count, shown = int(draw.choice([1, 5, 33])), draw.choice([0.0, 0.7, 0.7])
    x, y = (torch.randn(2, size, 3, dim, generator=generator).transpose(1, 2) for size in (n, m))
    x_keep, y_keep = (
        None if draw.random() < 0.4 else torch.from_numpy(draw.random((2, size)) < shown)
        for size in (n, m)
    )
    if draw.random() < 0.3:
        y[:, :, : m // 2] = y[:, :, :1]
    if family == "sliced" and seed % 3 == 0:
        x[:, :, n // 3 :] = x[:, :, -1:]
    clouds = Clouds(x.to(dtype) * draw.choice([0.3, 2.0]), y.to(dtype), x_keep, y_keep)
    pivots = None if draw.random() < 0.4 else torch.randn(3, count, dim, generator=generator)
    if pivots is not None and count > 1 and dim == 3:  # products of wider ones may differ by rounding
        pivots[:, -1] = pivots[:, 0]
    half_steps = int(draw.choice([1, 4, 19]))
    of_loop = count, Budget(half_steps, half_steps % 2 == 1), True
    theta = theta_for(seed, count, dim)
    weights = torch.rand(1 + 2 * (seed % 2), count, generator=generator)

    def by_reference(clouds):
        if family == "coarse":
            return coarse.dual_and_mass(clouds, pivots, *of_loop)
        if family == "gaussian":
            return [brenier_potential(clouds)]
        columns = sliced.columns(clouds, theta, BUDGET)
        return [(columns @ weights.to(columns.dtype)[..., None])[..., 0]]

    given = {"coarse": (pivots, None, *of_loop), "sliced": (theta, weights)}
    exact = by_reference(replace(clouds, x=clouds.x.double(), y=clouds.y.double()))
    honest, found = by_reference(clouds), [native.brenier_potential(clouds)]
    if family in given:
        *found, held = native.feature(family, clouds, *given[family])
        assert held
    for own, plain, wanted, of in zip(found, honest, exact, (clouds.centre, Tensor.double), strict=False):
        error, usual = (float((of(some.double()) - of(wanted)).abs().max()) for some in (own, plain))
        size = max(1.0, float(of(wanted).abs().max()))
        root = 1e-9 if family == "gaussian" else 0.0  # what its steps leave
        assert error <= 2 * usual + max(50 * torch.finfo(dtype).eps, root) * size
