"""Targets that close to the teacher, site statistics, and the calibration folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from collected import site_tensors, take

from asapc.calibration import collect, stream
from asapc.calibration.collect import finish
from asapc.calibration.least_squares import NormalEquations
from asapc.calibration.stored import Calibration, load_calibration, save_calibration
from asapc.calibration.teacher import TeacherDuals
from asapc.errors import InputError
from asapc.features import feature_columns
from asapc.features.clouds import clouds_of, shown_queries
from asapc.features.predictor import transform_plan
from asapc.inputs.recipe import Recipe, load_recipe
from asapc.ir import Convention, OutputFactor, SiteTensors
from asapc.operators.asap import asap_attention
from asapc.operators.sinkhorn import factor_terms, sinkhorn_attention
from asapc.processes import ALONE
from asapc.program.apply import apply_replacement, predict
from asapc.stages.calibrate import site_collector
from asapc.terminal.progress import make_progress


def convention(half_steps=10, first_side="row", **rest):
    return Convention(half_steps, first_side, score_multiplier=0.5, **rest)


def statistics_of(batches, rule=None, name="layer", **fields):
    """Statistics of one site; `fields` are those of its recipe."""
    rule = rule or convention()
    defaults = {"operator": "asap", "side": "source", "c_transforms": 3, "features": ("sliced:4",)}
    recipe = Recipe(**{**defaults, **fields})
    statistics = site_collector(name, rule, recipe)
    for batch in batches:
        take(statistics, batch)
    return statistics


def fit(batches, rule=None, name="layer", **fields):
    return finish({name: statistics_of(batches, rule, name, **fields)})[name]


def coefficients_of(site, index=0):
    return site.amortised.predictors[index].coefficients


def regression_rows(site, batches, index=0):
    """X [H, rows, F] and y [H, rows, 1] of one predicted dual, made from what was fitted."""
    own = site.amortised.predictors[index]
    multiplier = site.convention.score_multiplier
    x, y = [], []
    for batch in batches:
        clouds = clouds_of(batch, multiplier, own.side)
        x.append(feature_columns(own.features, own.parameters, clouds, own.budget).double())
        target = TeacherDuals(batch, site.convention).target(own.budget.half_steps, own.side)
        y.append(target[..., None])
    rows, targets = torch.cat(x).transpose(0, 1), torch.cat(y).transpose(0, 1)
    return rows.flatten(1, 2), targets.flatten(1, 2)


def settings_of(rule):
    return (rule.score_multiplier, rule.half_steps, rule.first_side == "row",
            factor_terms(rule.output_factor))  # fmt: skip


def double(tensors):
    bias = None if tensors.bias is None else tensors.bias.double()
    return tensors.q.double(), tensors.k.double(), tensors.keep, bias


def assert_closes(tensors, rule, f, g, c_transforms, half_steps=None):
    """f and g, through the c-transforms, are the loop of the rule, or one of other half-steps."""
    loop = rule if half_steps is None else dataclasses.replace(rule, half_steps=half_steps)
    factor = factor_terms(rule.output_factor)
    found = asap_attention(*double(tensors), f, g, 0.5, c_transforms, factor)
    exact = sinkhorn_attention(*double(tensors), *settings_of(loop))
    torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-10)


def cost_offset(tensors, side, multiplier=0.5):
    wide = SiteTensors(*double(tensors))
    return clouds_of(wide, multiplier, side).cost_offset()


# Targets


@pytest.mark.parametrize(("n", "m", "masked", "bias", "hidden"), [
    (9, 9, False, False, False), (7, 10, True, True, False), (7, 10, False, True, False),
    (1, 1, True, False, False), (9, 9, True, False, True), (7, 10, False, False, True),
])  # fmt: skip
@pytest.mark.parametrize(
    ("half_steps", "first_side", "side", "c_transforms"),
    [
        (10, "row", "source", 1), (10, "row", "source", 3), (5, "row", "source", 2),
        (5, "column", "source", 3), (6, "column", "source", 4), (10, "row", "target", 2),
        (5, "row", "target", 1), (5, "row", "target", 3), (6, "column", "target", 1),
    ],
)  # fmt: skip
def test_exact_target_reproduces_the_finite_teacher(
    half_steps, first_side, side, c_transforms, n, m, masked, bias, hidden
):
    """The rule of DESIGN section 4: c half-steps before the end, so c c-transforms are exact.

    Centring and the change to cost coordinates are undone by a gauge and by |x|^2 / 2.
    """
    tensors = site_tensors(n=n, m=m, masked=masked, bias=bias, hidden=hidden)
    rule = convention(half_steps, first_side)
    plan = transform_plan(rule, c_transforms, side)
    assert plan.c_transforms == c_transforms and not plan.rescaled
    target = TeacherDuals(tensors, rule).target(plan.half_steps, side)
    assert target.dtype == torch.float64
    keep = tensors.keep if side == "target" else shown_queries(tensors.bias)
    if keep is not None and not keep.all():
        assert float(target.masked_fill(keep[:, None], 0.0).abs().max()) == 0.0
    assert float(target.sum(-1).abs().max()) < 1e-11
    dual = target - cost_offset(tensors, side)
    assert_closes(tensors, rule, *((dual, None) if side == "source" else (None, dual)), c_transforms)


@pytest.mark.parametrize("hidden", [False, True], ids=["all queries", "some queries"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize(("half_steps", "first_side"), [(10, "row"), (5, "row"), (5, "column")])
def test_two_exact_targets_and_the_intercept_are_the_teacher(half_steps, first_side, masked, hidden):
    """No c-transform finds the mean of f + g that centring drops: the intercept is that mean."""
    tensors = site_tensors(n=7, m=10, masked=masked, bias=True, hidden=hidden)
    rule = convention(half_steps, first_side)
    duals = TeacherDuals(tensors, rule)
    plan = transform_plan(rule, 0, "both")
    f, g = (
        duals.target(plan.budget(rule, side).half_steps, side) - cost_offset(tensors, side)
        for side in plan.sides()
    )
    shift = duals.intercept(plan.half_steps)
    assert shift.shape == (3, 2)
    assert_closes(tensors, rule, f + shift[..., None], g, 0)


# Statistics


@pytest.mark.parametrize(("side", "c_transforms", "coefficients", "masked"), [
    ("source", 3, "pooled", False), ("source", 1, "per_head", True), ("target", 2, "shared", True),
    ("target", 1, "pooled", True), ("target", 2, "per_head", False),
])  # fmt: skip
def test_statistics_equal_a_direct_fit(side, c_transforms, coefficients, masked):
    batches = [site_tensors(seed, masked=masked, batch=4) for seed in range(3)]
    features = ("sliced:3", "gaussian")
    site = fit(
        batches, side=side, c_transforms=c_transforms, features=features, coefficients=coefficients,
        ridge=0,
    )
    groups = 2 if coefficients == "per_head" else 1
    rows, targets = regression_rows(site, batches)
    omega = torch.linalg.lstsq(
        rows.reshape(groups, -1, 6), targets.reshape(groups, -1, 1), driver="gelsd"
    ).solution
    torch.testing.assert_close(coefficients_of(site).double(), omega[..., 0], atol=2e-5, rtol=2e-5)
    (own,) = site.amortised.predictors
    assert own.coefficients.shape == (groups, 6) and own.coefficients.dtype == torch.float32
    assert own.parameters[0].shape == (3, 4) and own.parameters[1] is None
    points = sum(int(b.keep.sum()) for b in batches) if masked and side == "target" else 12 * 9
    assert (site.examples, site.tokens) == (12, points * 2 // groups)
    assert len(site.quality) == 1 and site.quality[0].fit == "ls"
    assert len(site.quality[0].r2) == groups and all(0 < r <= 1 for r in site.quality[0].r2)
    assert site.fit_seconds > 0 and site.sharing == coefficients


def test_the_ridge_is_per_row_or_lambda_itself():
    batches = [site_tensors(seed) for seed in range(2)]
    fields = {"features": ("norm", "gaussian"), "coefficients": "pooled"}
    rows, targets = (t.flatten(0, 1) for t in regression_rows(fit(batches, **fields), batches))
    for mode, penalty in (("risk", 0.3 * len(rows)), ("direct", 0.3)):
        own = coefficients_of(fit(batches, ridge=0.3, ridge_mode=mode, **fields))[0]
        gram = rows.T @ rows + penalty * torch.eye(rows.shape[1])
        omega = torch.linalg.solve(gram, rows.T @ targets)[:, 0]
        torch.testing.assert_close(own.double(), omega, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ls", "kl"])
def test_shared_coefficients_are_those_of_all_rows_of_all_sites(kind):
    """Two sites of different lengths and scales; each keeps its own slices and pivots."""
    data = {
        "layers.0": [site_tensors(seed, n=9) for seed in range(2)],
        "layers.1": [site_tensors(seed + 9, n=6, m=8, masked=True) for seed in range(3)],
    }
    fields = {"features": ("coarse:3", "gaussian"), "coefficients": "shared", "ridge": 1e-2, "fit": kind}
    statistics = {name: statistics_of(own, name=name, **fields) for name, own in data.items()}
    sites = finish(statistics)
    first, second = sites.values()
    assert torch.equal(coefficients_of(first), coefficients_of(second))
    assert coefficients_of(first).shape == (1, 4) and first.quality == second.quality
    pivots = [site.amortised.predictors[0].parameters[0] for site in sites.values()]
    assert not torch.equal(*pivots)
    assert (first.examples, second.examples) == (6, 9)
    assert (first.tokens, second.tokens) == (6 * 2 * 9, 9 * 2 * 6)
    if kind == "kl":
        assert first.quality[0].fit == "kl" and first.quality[0].converged == (True,)
        return
    equations = NormalEquations(4)
    for name, own in data.items():
        rows, targets = regression_rows(sites[name], own)
        equations.add(rows[None], targets[None, ..., 0])
    pooled = equations.solve(1e-2)
    torch.testing.assert_close(coefficients_of(first).double(), pooled.coefficients, atol=1e-5, rtol=1e-5)
    assert first.quality[0].r2 == pytest.approx(pooled.quality.r2, abs=1e-5)


def test_hidden_queries_do_not_enter_pivots():
    """The keys' dual has its pivots from the queries that carry mass, whatever the others hold."""
    pivots, quiet = [], make_progress(quiet=True)
    for noise in (0.0, 50.0):
        tensors = site_tensors(hidden=True)
        moved = torch.where(tensors.bias.isneginf(), tensors.q + noise, tensors.q)
        seen = dataclasses.replace(tensors, q=moved)
        own = site_collector("a", convention(), Recipe(features=("coarse:3",)))
        pending = [stream.Pending(0, "a", 0, own)]
        stream._prepare(pending, [None], lambda batch, seen=seen: [seen], quiet, ALONE)
        pivots.append(own.duals[0].parameters[0])
    assert torch.equal(*pivots)


def test_sites_with_different_columns_cannot_share():
    wide = statistics_of([site_tensors(dim=6)], name="b", features=("raw",), coefficients="shared")
    narrow = statistics_of([site_tensors()], name="a", features=("raw",), coefficients="shared")
    with pytest.raises(InputError, match=r"shared needs as many.*got 4 at a, 6 at b"):
        finish({"a": narrow, "b": wide})


@pytest.mark.parametrize("fields", [
    {"features": ("sliced:4",)},
    {"features": ("coarse:4", "gaussian"), "side": "target", "c_transforms": 2},
    {"features": ("gaussian",), "side": "both", "c_transforms": 0},
], ids=["source", "target", "both"])  # fmt: skip
def test_pieces_change_nothing(monkeypatch, fields):
    batches = [site_tensors(0, masked=True), site_tensors(1, masked=True, bias=True)]
    whole = statistics_of([], seed=5, **fields)
    cut = statistics_of([], seed=5, **fields)
    for batch in batches:
        take(whole, batch)
    monkeypatch.setattr(collect, "_PIECE", 1)
    assert len(collect.pieces(batches[0])) == 3
    for batch in batches:
        take(cut, batch)
    one, other = (finish({"layer": own})["layer"] for own in (whole, cut))
    for index in range(len(one.amortised.predictors)):
        one_own, other_own = coefficients_of(one, index), coefficients_of(other, index)
        torch.testing.assert_close(one_own, other_own, rtol=1e-3, atol=1e-4)
    assert (one.examples, one.tokens) == (other.examples, other.tokens)
    if one.amortised.intercept is not None:
        torch.testing.assert_close(one.amortised.intercept, other.amortised.intercept)


DEGENERATE = ("constant_q", "constant_k", "zero", "one_token", "one_key", "duplicated")


def degenerate(kind):
    tensors = site_tensors(batch=20)
    q, k, keep = tensors.q, tensors.k, None
    if kind == "constant_q":
        q = q[:, :, :1].expand_as(q)
    elif kind == "constant_k":
        k = k[:, :, :1].expand_as(k)
    elif kind == "zero":
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    elif kind == "one_token":
        q, k = q[:, :, :1], k[:, :, :1]
    elif kind == "duplicated":
        q, k = (t[:, :, :3].repeat(1, 1, 3, 1) for t in (q, k))
    else:
        keep = torch.zeros(20, 9, dtype=torch.bool)
        keep[:, 4] = True
    return SiteTensors(q, k, keep)


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize(("side", "c_transforms", "features"), [
    ("source", 3, ("sliced:8",)), ("target", 2, ("coarse:4", "gaussian", "norm", "active")),
    ("target", 1, ("farthest:4",)), ("both", 0, ("coarse:4", "gaussian")),
])  # fmt: skip
def test_degenerate_layers_fit_without_nan(kind, side, c_transforms, features):
    """Finite coefficients without a ridge, and a finite map that keeps the teacher's last sums."""
    tensors = degenerate(kind)
    for ridge in (0.0, 1e-3):
        site = fit([tensors], side=side, c_transforms=c_transforms, features=features, ridge=ridge)
        for index, quality in enumerate(site.quality):
            assert coefficients_of(site, index).isfinite().all()
            assert all(math.isfinite(r) for r in quality.r2)
        found = apply_replacement(site.convention, site.amortised, tensors, None)
        assert found.isfinite().all()
        if side != "both" and not site.amortised.plan.rescaled:
            keys = found.shape[-1]
            active = torch.ones(20, keys) if tensors.keep is None else tensors.keep.float()
            expected = active[:, None].expand(-1, 2, -1) / keys
            torch.testing.assert_close(found.sum(-2), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k", "bias"])
def test_non_finite_activations_name_the_site(where, value):
    tensors = site_tensors(bias=True)
    getattr(tensors, where)[0, 1, 2, 3] = value
    with pytest.raises(InputError, match=r"encoder\.layer3: .* must be finite.*example 0"):
        statistics_of([tensors], name="encoder.layer3")


@pytest.mark.parametrize(("side", "c_transforms", "features"), [
    ("source", 3, ("sliced:4",)), ("target", 2, ("sliced:4",)),
    ("target", 1, ("coarse:4", "gaussian", "lse")),
])  # fmt: skip
def test_what_is_masked_is_passed_over(side, c_transforms, features):
    """NaN in masked keys, and an example without an active key."""
    plain = site_tensors(masked=True, batch=8)
    k = torch.where(plain.keep[:, None, :, None], plain.k, math.nan)
    padded = SiteTensors(
        torch.cat([plain.q, plain.q[:1] * 7]), torch.cat([k, k[:1]]),
        torch.cat([plain.keep, torch.zeros(1, 9, dtype=torch.bool)]),
    )  # fmt: skip
    fields = {"side": side, "c_transforms": c_transforms, "features": features}
    sites = [fit([own], **fields) for own in (plain, padded)]
    torch.testing.assert_close(*map(coefficients_of, sites))
    assert coefficients_of(sites[1]).isfinite().all() and sites[1].examples == 8


def test_what_cannot_be_fitted_names_the_site():
    fields = {"name": "layer.0", "features": ("sliced:64",), "coefficients": "pooled"}
    with pytest.raises(InputError, match=r"layer\.0: calibration saw no examples"):
        fit([], **fields)
    with pytest.raises(InputError, match=r"layer\.0: .*64 coefficients.*got 18"):
        fit([site_tensors(batch=1)], **fields)
    huge = dataclasses.replace(site_tensors(), q=site_tensors().q * 1e25)
    with pytest.raises(InputError, match=r"layer: (the features norm overflow|teacher's duals must)"):
        statistics_of([huge], features=("norm",))
    long, short = site_tensors(n=9, batch=40), site_tensors(n=7, m=7, batch=40)
    assert coefficients_of(fit([long], features=("token_bias",))).shape == (2, 9)
    with pytest.raises(InputError, match=r"layer: .*one length, got 9 and 7 columns\n.*token_bias"):
        statistics_of([long, short], features=("token_bias",))


# The paper's protocol


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize(
    ("half_steps", "first_side", "side", "c_transforms", "given"),
    [
        (10, "row", "source", 3, 3), (10, "row", "source", 5, 6), (5, "row", "source", 2, 3),
        (5, "row", "source", 1, 1), (6, "column", "source", 4, 4), (6, "column", "target", 3, 3),
        (5, "row", "target", 3, 4), (1, "row", "source", 4, 4),
    ],
)  # fmt: skip
def test_c_transforms_go_on_from_the_last_dual(half_steps, first_side, side, c_transforms, given, masked):
    """They are the loop's own half-steps, continued: of a loop that is longer by as many."""
    tensors = site_tensors(masked=masked, bias=True)
    rule = convention(half_steps, first_side)
    plan = transform_plan(rule, given, side, "last")
    assert plan.aim == "last" and plan.c_transforms == c_transforms
    last = half_steps if rule.last_side == ("row" if side == "source" else "column") else half_steps - 1
    assert plan.half_steps == last == plan.budget(rule, side).half_steps
    dual = TeacherDuals(tensors, rule).target(plan.half_steps, side) - cost_offset(tensors, side)
    f, g = (dual, None) if side == "source" else (None, dual)
    assert_closes(tensors, rule, f, g, c_transforms, last + c_transforms)


def paper_row(q, k, theta):
    """Eq. 12, sorted by hand, in the order of the queries and centred.  q, k: [n, D]; theta: [L, D]."""
    columns = []
    for direction in theta.double():
        a, b = ((x @ direction / q.shape[1] ** 0.25).tolist() for x in (q, k))
        order, b = sorted(range(len(a)), key=lambda i: a[i]), sorted(b)
        phi, column = 0.0, [0.0] * len(a)
        for r, i in enumerate(order):
            if r > 0:
                phi += b[r - 1] * (a[i] - a[order[r - 1]])
            column[i] = a[i] ** 2 / 2 - phi
        mean = sum(column) / len(column)
        columns.append([x - mean for x in column])
    return torch.tensor(columns, dtype=torch.float64).T


def paper_loop(scores, f, steps, rows_next):
    """Eqs. 8 and 15 with mass 1/N each; f [N] and g after so many half-steps.  scores: [N, n]."""
    log_n, g = math.log(len(scores)), torch.zeros(scores.shape[1], dtype=torch.float64)
    for _ in range(steps):
        if rows_next:
            f = -log_n - torch.logsumexp(scores + g, 1)
        else:
            g = -log_n - torch.logsumexp(scores + f[:, None], 0)
        rows_next = not rows_next
    return f, g


def test_the_shipped_recipe_is_the_papers_protocol():
    """Targets, features, fit and operator of examples/recipes/asap.yaml, from the paper's equations."""
    recipe = load_recipe(Path(__file__).parents[1] / "examples/recipes/asap.yaml")
    assert recipe.features == ("sliced:32:random",) and recipe.fit == "ls" and recipe.operator == "asap"
    tensors = site_tensors(batch=6, n=24, m=24, masked=True)
    rule = convention(20, output_factor=OutputFactor(queries=1))
    fields = ("side", "c_transforms", "aim", "points", "features", "ridge", "ridge_mode", "coefficients")
    site = fit([tensors], rule, **{field: getattr(recipe, field) for field in fields})
    assert (site.amortised.plan.half_steps, site.amortised.plan.c_transforms) == (19, 3)
    (theta,) = site.amortised.predictors[0].parameters
    assert torch.allclose(theta.norm(dim=1), torch.ones(32))

    cases = []
    for example, head in itertools.product(range(6), range(2)):
        q, k = (x[example, head].double() for x in (tensors.q, tensors.k))
        keep = tensors.keep[example]
        scores, rho = q @ k[keep].T * 0.5, q.square().sum(1) / 4  # 2 sqrt(D) = 4
        f, _ = paper_loop(scores, torch.zeros(24, dtype=torch.float64), 19, True)
        target = (f + rho)[keep]
        cases.append((scores, rho, keep, paper_row(q[keep], k[keep], theta), target - target.mean()))
    x, y = (torch.cat([case[place] for case in cases]) for place in (3, 4))
    omega = torch.linalg.solve(x.T @ x + 1e-3 * torch.eye(32, dtype=torch.float64), x.T @ y)  # Eq. 20
    found = coefficients_of(site).double().reshape(-1)
    assert float((found - omega).norm()) <= 1e-4 * float(omega.norm())

    maps = apply_replacement(rule, site.amortised, tensors, None).double()
    for place, (scores, rho, keep, row, _) in enumerate(cases):
        f = torch.zeros(24, dtype=torch.float64)
        f[keep] = row @ omega - (row @ omega).mean()  # Eq. 13; queries without a row stay at 0
        f, g = paper_loop(scores, f - rho, 3, False)  # Eq. 16
        wanted = 24 * torch.exp(scores + f[:, None] + g)  # Eq. 17
        ours = maps[place // 2, place % 2]
        assert float((ours[:, keep] - wanted).abs().max()) <= 1e-3 * float(wanted.max())
        assert not ours[:, ~keep].any()


def test_active_points_do_not_see_padding():
    """Whatever padded queries are, the fit is the same, and so are the duals of the others."""
    tensors = site_tensors(masked=True)
    padded = ~tensors.keep[:, None, :, None]
    other = dataclasses.replace(tensors, q=tensors.q.masked_fill(padded, 3.0))
    rule = convention(2)  # the first dual of its loop does not depend on other queries
    fits = {
        (points, name): fit([given], rule, c_transforms=1, points=points, features=("sliced:4",))
        for points in ("all", "active") for name, given in (("own", tensors), ("other", other))
    }  # fmt: skip
    same = [coefficients_of(fits["active", name]) for name in ("own", "other")]
    torch.testing.assert_close(*same)
    moved = [coefficients_of(fits["all", name]) for name in ("own", "other")]
    assert float((moved[0] - moved[1]).abs().max()) > 1e-3
    site = fits["active", "own"]
    assert site.tokens == int(tensors.keep.sum()) and fits["all", "own"].tokens == tensors.keep.numel()
    predictor = site.amortised.predictors[0]
    ours, theirs = (predict(rule, predictor, t) for t in (tensors, other))
    keep = tensors.keep[:, None].expand_as(ours)
    torch.testing.assert_close(ours[keep], theirs[keep])
    # A padded query has the potential of a mean point: 0 in cost coordinates.
    offset = cost_offset(tensors, "source").float()
    torch.testing.assert_close(ours[~keep], -offset[~keep])


# The calibration folder


def calibration(**changes):
    sites = {}
    for name, fields in {
        "layers.0.attn": {"coefficients": "pooled"},
        "layers.1.attn": {"features": ("coarse:3", "norm", "sliced:2:axis"), "fit": "kl"},
        "layers.2.attn": {"side": "target", "c_transforms": 1, "features": ("coarse:3",)},
        "layers.3.attn": {"side": "both", "c_transforms": 0, "features": ("gaussian",)},
        "layers.4.attn": {"aim": "last", "points": "active"},
    }.items():
        sites[name] = (fit([site_tensors(batch=8)], name=name, **fields),)
    base = Calibration(
        "f" * 64, {"c_transforms": 3}, "whole", sites, "d.npz", "sequential", (0, 2**63, 2**64 - 1)
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def saved():
    return calibration()


def flat(value):
    """A dataclass, with everything in it, as nested lists; tensors become bytes."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.contiguous().numpy().tobytes()]
    if dataclasses.is_dataclass(value):
        return [(f.name, flat(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if isinstance(value, dict):
        return [(key, flat(item)) for key, item in sorted(value.items())]
    if isinstance(value, tuple):
        return [flat(item) for item in value]
    return value


def test_folder_round_trip(saved, tmp_path):
    save_calibration(tmp_path / "calib", saved)
    assert sorted(p.name for p in (tmp_path / "calib").iterdir()) == [
        "calibration.json", "calibration.safetensors", "timings.json",
    ]
    shutil.move(tmp_path / "calib", tmp_path / "moved")
    assert flat(load_calibration(tmp_path / "moved")) == flat(saved)
    with pytest.raises(InputError, match="not a calibration folder"):
        load_calibration(tmp_path / "calib")


def edited(*path, value=None):
    """Sets (or, for None, removes) an entry of calibration.json."""

    def change(folder):
        place = folder / "calibration.json"
        document = json.loads(place.read_text())
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        if value is None:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        place.write_text(json.dumps(document))

    return change


def overwritten(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


FIRST, KEY, BOTH = (("sites", f"layers.{index}.attn", 0) for index in (0, 2, 3))
DAMAGE = {
    "no tensors": (lambda f: (f / "calibration.safetensors").unlink(), "is missing"),
    "short tensors": (overwritten("calibration.safetensors", lambda b: b[:-5]), "damaged"),
    "old version": (edited("format_version", value=1), "format_version must be 6.*got 1"),
    "no teacher": (edited("teacher"), "damaged"),
    "bad order": (edited("order", value="random"), "order must be one of parallel, sequential"),
    "no times": (lambda f: (f / "timings.json").unlink(), "no timings.json"),
    "a time too few": (overwritten("timings.json", lambda b: b.replace(b"[", b"[[]", 1)), "damaged"),
    "impossible plan": (edited(*FIRST, "plan", "c_transforms", value=2), "plan must be what"),
    "other first side": (edited(*FIRST, "convention", "first_side", value="column"), "must be what the"),
    "not rescaled": (edited(*KEY, "plan", "rescaled", value=False), "plan must be what"),
    "one dual of two": (edited(*BOTH, "duals", 0), "damaged"),
    "unknown feature": (edited(*FIRST, "features", value=["slices:4"]), "features must be what"),
    "unknown setting": (edited(*FIRST, "settings", "features", value=["s:4"]), "unknown feature family"),
    "unknown fit": (edited(*FIRST, "duals", 0, "fit", value="l1"), "fit must be one of ls, kl"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_one_clear_message(saved, tmp_path, damage):
    folder = tmp_path / "calib"
    save_calibration(folder, saved)
    load_calibration(folder)
    change, rule = DAMAGE[damage]
    change(folder)
    with pytest.raises(InputError, match=rule) as caught:
        load_calibration(folder)
    assert "asapc calibrate" in str(caught.value)
