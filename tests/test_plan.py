"""The plan of scores that are given: the operator against closed forms and float64, and the family that
finds its loops wherever they stand."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plan_nets as nets
import pytest
import torch
from analyses import analysed, ran, random
from torch import Tensor, nn

import asapc
import asapc.kernels.library
from asapc.cli import main
from asapc.errors import BranchError
from asapc.inputs.program_operators import refused_call
from asapc.ir import Convention, OutputFactor, PlanConvention, Stabiliser, Written
from asapc.kernels import native
from asapc.operators import plan as reference
from asapc.operators.catalogue import convention_from_json
from asapc.passes.analyse import Analysis
from asapc.passes.capture import capture
from asapc.passes.experiment import snapped
from asapc.passes.plan import match
from asapc.passes.plan.loops import find_loops
from asapc.program.compiled import OwnCodeWarning

PLAIN = [1.0, 0.0, 0.0, 0.0]
op = torch.ops.asapc.plan


# The operator


def test_one_half_step_is_a_softmax() -> None:
    s = random(2, 3, 5, 7)
    rows = op(s, None, None, 2.0, 1, True, [1.0, 1.0, 0.0, 0.0])
    columns = op(s, None, None, -2.0, 1, False, [1.0, 0.0, 1.0, 0.0])
    assert torch.allclose(rows, torch.softmax(2 * s, -1))
    assert torch.allclose(columns, torch.softmax(-2 * s, -2))


def test_without_choice_the_plan_is_the_product_of_its_marginals() -> None:
    """Also of scores u + v, on which every loop ends after two half-steps; and one query or key."""
    log_mu, log_nu = random(2, 1, 5).log_softmax(-1), random(2, 1, 6, seed=1).log_softmax(-1)
    s = 3 * (random(2, 1, 5, 1, seed=2) + random(2, 1, 1, 6, seed=3))
    product = log_mu[..., :, None] + log_nu[..., None, :]
    assert torch.allclose(op(s, log_mu, log_nu, 1.0, 2, True, PLAIN, True), product, atol=1e-5)
    one = op(random(2, 1, 1, 6), None, log_nu, 5.0, 4, False, PLAIN)
    assert torch.allclose(one[:, :, 0], log_nu.exp(), atol=1e-6)


def by_hand(
    s: Tensor, log_mu: Tensor, log_nu: Tensor, half_steps: int, rows_first: bool,
    damping: tuple[float, float],
) -> Tensor:  # fmt: skip
    """log P, token by token, in float64."""
    s = s.double()
    b, h, n, m = s.shape
    mu, nu = log_mu.double().expand(b, h, n), log_nu.double().expand(b, h, m)
    f, g = s.new_zeros(b, h, n), s.new_zeros(b, h, m)
    for step in range(half_steps):
        if (step % 2 == 0) == rows_first:
            for i in range(n):
                f[..., i] = damping[0] * (mu[..., i] - torch.logsumexp(s[..., i, :] + g, -1))
        else:
            for j in range(m):
                g[..., j] = damping[1] * (nu[..., j] - torch.logsumexp(s[..., j] + f, -1))
    return s + f[..., None] + g[..., None, :]


SHAPES = ((300, 2, 4, 4), (5, 1, 7, 9), (2, 3, 20, 33), (1, 2, 90, 70), (2, 1, 60, 5))
MARGINALS = ("uniform", "shared", "own", "massless", "own")


def marginals(kind: str, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    b, h, n, m = shape
    if kind == "uniform":
        return None, None
    if kind == "shared":  # with totals other than 1, and not the same
        return random(n), random(m, seed=1) - 2
    if kind == "own":
        return random(b, h, n), random(b, 1, m, seed=1)
    log_mu, log_nu = torch.zeros(n), torch.zeros(b, 1, m)
    log_mu[0], log_nu[..., -2:] = -math.inf, -math.inf
    return log_mu, log_nu


@pytest.mark.parametrize(("shape", "kind"), [*zip(SHAPES, MARGINALS, strict=True)], ids=str)
def test_whole_and_damped_updates(shape: tuple[int, ...], kind: str) -> None:
    """The reference by hand; the kernel at most twice as wrong, where exp(S) leaves float32 as well."""
    log_mu, log_nu = marginals(kind, shape)
    *_, n, m = shape
    given = torch.full((n,), -math.log(n)) if log_mu is None else log_mu
    other = torch.full((m,), -math.log(m)) if log_nu is None else log_nu
    for spread, half_steps, rows_first, damping in itertools.product(
        (1.0, 30.0, 200.0), (1, 2, 7), (True, False), ((1.0, 1.0), (0.6, 1.0), (1.0, 0.01))
    ):
        s = spread * random(*shape)
        exact = by_hand(-0.7 * s.double(), given, other, half_steps, rows_first, damping)
        exact = exact + math.log(2 * n)  # the factor 2 N
        rest = (-0.7, half_steps, rows_first, [2.0, 1.0, 0.0, 0.0])
        for log in (True, False):
            wanted = exact.clamp(min=-80) if log else exact.exp()
            found = reference.plan(s.double(), log_mu, log_nu, *rest, log, damping=damping)
            found = found.clamp(min=-80) if log else found
            assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-4 if log else 1e-9)
            ours = op(s, log_mu, log_nu, *rest, log, damping=list(damping)).double()
            theirs = reference.plan(s, log_mu, log_nu, *rest, log, damping=damping).double()
            if log:
                ours, theirs = ours.clamp(min=-80), theirs.clamp(min=-80)
            honest = float((theirs - found).abs().max())
            assert float((ours - found).abs().max()) <= 2 * honest + 1e-5 * float(found.abs().max())


def test_an_unbalanced_loop_comes_to_its_penalised_optimum() -> None:
    """min <C, P> + eps sum P (log P - 1) + rho KL(P 1 | mu) + rho KL(P' 1 | nu), by its conditions:
    eps log P_ij = -C_ij - rho log(P 1 / mu)_i - rho log(P' 1 / nu)_j."""
    costs, epsilon, rho = random(1, 1, 5, 7).double().abs(), 0.3, 0.8
    damping = rho / (rho + epsilon)
    mu, nu = (random(n, seed=n).double().softmax(0) for n in (5, 7))
    found = reference.plan(
        costs, mu.log(), nu.log(), -1 / epsilon, 400, True, PLAIN, damping=(damping, damping)
    )
    rows, columns = (found.sum(-1) / mu).log(), (found.sum(-2) / nu).log()
    force = costs + rho * rows[..., None] + rho * columns[..., None, :] + epsilon * found.log()
    assert float(force.abs().max()) < 1e-9


@pytest.mark.parametrize("form, kind", [("plan", "add"), ("plan", "clamp"), ("scaling", "add"),
                                        ("scaling", "clamp")])  # fmt: skip
def test_the_constant_in_the_divisions_is_kept(form: str, kind: str) -> None:
    for size, start, shares, spread, rows_first in itertools.product(
        ((4, 5), (20, 30), (50, 6)), ("plain", "row", "matrix", "tensor", "softmax"), (True, False),
        (1.0, 40.0), (True, False),
    ):  # fmt: skip
        s = spread * random(7, 2, *size)
        s[:2] *= 1 / spread  # some matrices are held, and others are not
        constant = (1e-3, form, kind, start, shares, shares)
        mu = random(7, 1, size[0], seed=1).log_softmax(-1) - 25.0  # of another total
        mu[2, :, :2] = -math.inf  # of no mass
        nu = random(size[1]).log_softmax(-1)
        for masses in ((None, None), (mu, None), (mu, nu), (mu + 25.0, nu), (mu + 25.0, None)):
            rest = (*masses, -0.7, 6, rows_first, PLAIN, False, None, *constant)
            exact, found = reference.plan(s.double(), *rest), op(s, *rest)
            assert float((found - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


@pytest.mark.parametrize(("shape", "far", "damping"), [
    ((3, 2, 9, 7), -200.0, None), ((3, 2, 40, 30), -1e12, [0.7, 0.9]),
], ids=str)  # fmt: skip
def test_masses_that_are_lost_are_not_lost_in_a_log_plan(
    shape: tuple[int, ...], far: float, damping: Any
) -> None:
    """A float32 mass of exp(-200) is 0. Its row of log P is what the loop makes of -200."""
    b, _, n, m = shape
    scores = random(*shape)
    log_mu, log_nu = random(b, 1, n, seed=1).log_softmax(-1), random(b, 1, m, seed=2).log_softmax(-1)
    log_mu[0, :, -2:], log_nu[0, :, 0], log_nu[1, :, 3] = far, far, far
    scores[0, :, -2:], scores[0, ..., 0] = far, far
    settings = (1.0, 7, False, PLAIN, True, None, None, "plan", "clamp", "plain", False, False, damping)
    expected = reference.plan(scores.double(), log_mu.double(), log_nu.double(), *settings)
    found = op(scores, log_mu, log_nu, *settings)
    near = expected > -1e6
    assert bool((near == (found > -1e6)).all()) and bool(found.isfinite().all())
    torch.testing.assert_close(found[near].double(), expected[near], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[~near].double(), expected[~near], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("shape", [(3, 2, 9, 7), (1, 1, 90, 5)], ids=str)
def test_a_mass_that_is_lost_counts_where_it_is_damped(shape: tuple[int, ...], side: int) -> None:
    """exp(-200) is 0 in float32, and its damped dual exp(-2)."""
    scores, masses = random(*shape), [random(size).log_softmax(-1) for size in shape[-2:]]
    masses[side][-1], damping = -200.0, [0.7, 0.7]
    damping[side] = 0.01
    settings = (1.0, 7, True, PLAIN, False, None, None, "plan", "clamp", "plain", False, False, damping)
    exact = reference.plan(scores.double(), *(mass.double() for mass in masses), *settings)
    torch.testing.assert_close(op(scores, *masses, *settings).double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows_first", [True, False])
def test_a_side_that_is_never_closed_has_no_dual(rows_first: bool) -> None:
    scores, lost = random(1, 1, 30, 30), random(1, 1, 30, seed=1).log_softmax(-1)
    lost[..., :5] = -1e12
    marginals = (None, lost) if rows_first else (lost, None)
    settings = (1.0, 1, rows_first, PLAIN, True)
    expected = reference.plan(scores.double(), *marginals, *settings)
    torch.testing.assert_close(op(scores, *marginals, *settings).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 1, 2, 300), (2, 1, 30, 1), (3, 1, 10, 60)], ids=str)
@pytest.mark.parametrize("kind", ["clamp", "add"])
def test_many_half_steps_between_few_rows_and_many_columns(shape: tuple[int, ...], kind: str) -> None:
    """Each scaling by itself grows by M / N in a half-step; only their product stays what it is."""
    settings = (1.0, 100, False, PLAIN, False, None, 1e-6, "plan", kind)
    scores = random(*shape)
    expected = reference.plan(scores.double(), None, None, *settings)
    found = op(scores, None, None, *settings).double()
    assert bool(expected.isfinite().all())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.max()))


class Shifted(nn.Module):
    """A kernel that is positive on small data alone."""

    def forward(self, x: Tensor) -> Tensor:
        plan = x @ x.transpose(-1, -2) / 16 + 1
        for _ in range(4):
            plan = plan / plan.sum(-1, keepdim=True)
            plan = plan / plan.sum(-2, keepdim=True)
        return plan


class Filled(nn.Module):
    """A kernel with zeros, which its loop fills: one by one, or rows and columns of them."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        plan = (x @ x.transpose(-1, -2)).relu()
        for _ in range(4):
            sums = plan if self.dim is None else plan.sum(self.dim, keepdim=True)
            plan = torch.where(sums == 0, 1e-2, plan)
            plan = plan / (plan.sum(-1, keepdim=True) + 1e-9)
            plan = plan / (plan.sum(-2, keepdim=True) + 1e-9)
        return plan


@pytest.mark.parametrize("net", [Shifted(), Filled(None), Filled(-1), Filled(-2)], ids=str)
def test_a_kernel_that_may_be_negative_or_whose_zeros_are_filled_is_none(net: nn.Module) -> None:
    """Sharp scores have zeros, too, and rows and columns of them."""
    analysis = analysed(net, random(3, 10, 16) / (4 if isinstance(net, Shifted) else 1))
    (left,) = analysis.left_alone
    assert left.status == "refused" and not analysis.sites


def test_memory_layout_and_heads_do_not_matter() -> None:
    s = random(3, 20, 17, 2).permute(0, 3, 1, 2)
    by_head = [1.0, 2.5]
    found = op(s, None, None, 0.5, 4, True, PLAIN, False, by_head)
    for h, factor in enumerate(by_head):
        own = op(s[:, h : h + 1].contiguous(), None, None, 0.5 * factor, 4, True, PLAIN)
        assert torch.allclose(found[:, h : h + 1], own, rtol=1e-5)
    assert op(s[:0], None, None, 0.5, 4, True, PLAIN).shape == (0, 2, 20, 17)


def test_conventions_are_written_and_read() -> None:
    stabiliser = Stabiliser("plan", "clamp", 1e-12)
    for convention in (
        PlanConvention(5, "row", -0.5, OutputFactor(keys=1), True, "constant", "input"),
        PlanConvention(4, "column", 2.0, stabiliser=stabiliser, by_head=(1.0, 0.5)),
        PlanConvention(4, "column", 2.0, OutputFactor(0.5, keys=0.3), damping=(0.8, 1.0)),
        PlanConvention(4, "column", 2.0, written=Written("increments", True)),
    ):
        assert convention_from_json(json.loads(json.dumps(convention.to_json()))) == convention


def test_a_file_may_ask_for_no_other_constant() -> None:
    assert refused_call("asapc.plan.default", {"half_steps": 3}) is None
    assert refused_call("asapc.plan.default", {"constant": 1e-6, "form": "scaling"}) is None
    assert refused_call("asapc.plan.default", {"constant": 1e-6, "start": "nowhere"}) is not None
    assert refused_call("asapc.plan.default", {"constant": math.inf}) is not None
    assert refused_call("asapc.plan.default", {"form": "duals"}) is None
    assert refused_call("asapc.plan.default", {"form": "unheard of"}) is not None
    assert refused_call("asapc.plan.default", {"damping": [0.8, 1.0]}) is None
    beside = {"constant": 1e-6, "damping": [0.8, 1.0]}
    assert refused_call("asapc.plan.default", {**beside, "form": "scaling"}) is None
    assert refused_call("asapc.plan.default", {**beside, "form": "plan"}) is not None
    with pytest.raises(ValueError, match="of balanced loops alone"):
        op(random(1, 1, 3, 4), None, None, 1.0, 2, True, PLAIN, **beside)
    for damping in ([0.8], [0.8, 1.5], [0.0, 1.0], [float("nan"), 1.0]):
        assert refused_call("asapc.plan.default", {"damping": damping}) is not None


# The family

FOUND: dict[str, list[PlanConvention]] = {
    "Latents": [PlanConvention(6, "row", -math.exp(-0.3), OutputFactor(keys=1),
                               by_head=(1.0, math.exp(0.8)))],
    "Masses": [PlanConvention(6, "column", 1.0, OutputFactor(), False, "input", "input",
                              written=Written("duals"))],
    "MassesAnew": [PlanConvention(6, "column", 1.0, OutputFactor(), False, "input", "input",
                                  written=Written("duals"))],
    "MassesByScalings": [
        PlanConvention(6, "column", 1.0, OutputFactor(), False, "input", "input",
                       Stabiliser("scaling", "add", 1e-4)),
    ],
    "MassesOfAttention": [
        PlanConvention(6, "column", 1.0, OutputFactor(), False, "input", "input",
                       Stabiliser("scaling", "add", 1e-4)),
    ],
    "MassesInThePlan": [
        PlanConvention(6, "column", 1.0, OutputFactor(), False, "input", "input",
                       Stabiliser("plan", "add", 1e-3)),
    ],
    "ActiveMasses": [PlanConvention(6, "row", 1.0, OutputFactor(), False, "input", "input",
                                    written=Written("duals"))],
    "TokensFirst": [PlanConvention(4, "row", 1.0, OutputFactor(keys=1))],
    "Scaled": [
        PlanConvention(6, "column", 1.0, OutputFactor(queries=1),
                       stabiliser=Stabiliser("scaling", "add", 1e-8)),
    ],
    "Static": [PlanConvention(20, "row", 1.0, OutputFactor(queries=1))],
    "Products": [PlanConvention(6, "row", 1.0, OutputFactor(queries=1))],
    "TwoViews": [PlanConvention(6, "row", 1.0, OutputFactor(2.0, queries=1))],
    "Bridged": [
        PlanConvention(4, "row", 1.0, OutputFactor(), target_marginal="constant"),
        PlanConvention(4, "row", 1.0, OutputFactor(), source_marginal="constant",
                       written=Written("duals", True)),
    ],
    "PaddedMatcher": [PlanConvention(6, "row", 1.0, OutputFactor(), True, "input", "input",
                                     written=Written("duals"))],
}  # fmt: skip
DAMPED = {
    "rows alone": (nets.Damped(0.6, 1.0, 6), ()),
    "both, 1/N outside": (nets.Damped(0.5, 0.7, 6, unit=False, outside=True), ()),
    "scalings from 1/N": (nets.Unbalanced(), ()),
    "masses outside": (nets.Damped(0.5, 0.7, 6, outside=True), (9, 6)),
    "long, far from its end": (nets.Damped(0.8, 0.8, 20), (9, 6)),
    "long": (nets.Damped(0.3, 0.3, 40), ()),
}
REFUSED = {
    "OneQuery": "with one query the plan does not depend on the scores: it is kept as it is",
    "Stepped": "nearest are",
    "Stopping": "ends early where a residual is at most 0.01, which changes the plan",
    "Duals": "a value of the loop other than its plan is also used elsewhere",
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = getattr(nets, name)()
    return net.eval()


def alike(found: PlanConvention, expected: PlanConvention) -> None:
    assert found.score_multiplier == pytest.approx(expected.score_multiplier, rel=1e-6)
    if expected.by_head is not None:
        assert found.by_head == pytest.approx(expected.by_head, rel=1e-6)
    factor = replace(found.output_factor, coefficient=snapped(found.output_factor.coefficient))
    data, wanted = replace(found, output_factor=factor).to_json(), expected.to_json()
    if expected.written is None:  # which order of its sums a loop has is tested with hidden tokens
        data.pop("written", None)
    assert data.keys() == wanted.keys()
    assert all(data[key] == wanted[key] for key in data.keys() - {"score_multiplier", "by_head"})


def replays(net: nn.Module, analysis: Analysis, *inputs: Any) -> None:
    """The lossless rewrite is the untouched model, on these inputs and on four times the scale."""
    for scale in (1.0, 4.0):
        given = [x * scale if x.is_floating_point() and (x < 0).any() else x for x in inputs]
        with torch.no_grad():
            theirs = net(*given)
            ours = ran(analysis, *given)
        pairs = [(theirs, ours)] if isinstance(theirs, Tensor) else zip(theirs, ours, strict=True)
        for expected, found in pairs:
            if expected.is_floating_point():
                # Of a log plan, the entries that are not hidden, and that the others are.
                shown, kept = (x > -1e6 for x in (expected, found))
                assert bool((shown == kept).all()) and bool(found.isfinite().all())
                error = float((found - expected)[shown].abs().max()) / float(expected[shown].abs().max())
                assert error <= 1e-5


@pytest.mark.parametrize("name", FOUND)
def test_a_loop_is_found_wherever_it_stands(name: str) -> None:
    net = build(name)
    analysis = analysed(net, *nets.inputs_for(net))
    assert not analysis.left_alone and len(analysis.sites) == len(FOUND[name])
    for site, expected in zip(analysis.sites, FOUND[name], strict=True):
        assert isinstance(site.convention, PlanConvention) and site.head_dim is None
        alike(site.convention, expected)
    assert not find_loops(analysis.lifted[0].graph)  # nothing of the loops is left
    replays(net, analysis, *nets.inputs_for(net, batch=5, seed=1))
    if name != "TokensFirst":  # as many columns as in the example
        replays(net, analysis, *nets.inputs_for(net, batch=2, tokens=14, seed=2))


@pytest.mark.parametrize("name", DAMPED)
def test_an_unbalanced_loop_is_found(name: str) -> None:
    net, given = DAMPED[name]

    def inputs(batch: int, tokens: int, seed: int) -> tuple[Tensor, ...]:
        others = 6
        masses = [random(batch, n, seed=seed).softmax(-1) for n in (tokens, others)] if given else []
        return random(batch, tokens, others, seed=seed), *masses

    analysis = analysed(net, *inputs(3, 9, 0))
    assert not analysis.left_alone
    (site,) = analysis.sites
    assert isinstance(site.convention, PlanConvention) and not site.convention.balanced
    assert site.convention.damping == pytest.approx((net.rows, net.columns), rel=1e-6)
    assert site.convention.half_steps == (net.half_steps if name != "long" else pytest.approx(22, abs=4))
    replays(net, analysis, *inputs(5, 9, 1))
    if name != "long":  # of which all but the last half-steps are the same at few tokens
        replays(net, analysis, *inputs(2, 30, 2))


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_is_none_is_listed_with_a_reason(name: str) -> None:
    net = build(name)
    analysis = analysed(net, *nets.inputs_for(net))
    (left,) = analysis.left_alone
    assert left.status == "refused" and REFUSED[name] in left.reason


class Unknown(nn.Module):
    """Layers that all run the same loop, which is none that is known."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layers):
            plan = (x @ x.transpose(-1, -2) / 4).exp()
            for _ in range(3):
                plan = plan / plan.sum(-1, keepdim=True)
                plan = plan / plan.square().sum(-2, keepdim=True)
            x = x * plan.amax(-1, keepdim=True)
        return x


def test_what_failed_in_one_layer_is_not_tried_again_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    identified, tried = match._identified, 0

    def counted(*given: Any) -> Any:
        nonlocal tried
        tried += 1
        return identified(*given)

    monkeypatch.setattr(match, "_identified", counted)
    (alone,) = analysed(Unknown(1), random(3, 9, 8)).left_alone
    of_one, tried = tried, 0
    both = analysed(Unknown(2), random(3, 9, 8)).left_alone
    assert of_one and tried == of_one
    assert [left.reason for left in both] == 2 * [alone.reason]


class Slack(nn.Module):
    """Registration: a row and a column of slack that take part in the sums, and are not normalised."""

    def __init__(self, learned: bool = False, more: float = 0.0) -> None:
        super().__init__()
        self.bin = nn.Parameter(torch.tensor(0.3)) if learned else None
        self.more = more

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        scores = a @ b.transpose(1, 2)
        if self.bin is None:
            scores = nn.functional.pad(scores, (0, 1, 0, 1), value=-0.5)
        else:
            scores = torch.cat((scores, self.bin.expand(*scores.shape[:2], 1)), 2)
            last = self.bin + self.more if self.more else self.bin
            scores = torch.cat((scores, last.expand(len(scores), 1, scores.shape[2])), 1)
        for _ in range(3):
            rows, slack = scores[:, :-1], scores[:, -1:]
            scores = torch.cat((rows - rows.logsumexp(2, keepdim=True), slack), 1)
            columns, slack = scores[:, :, :-1], scores[:, :, -1:]
            scores = torch.cat((columns - columns.logsumexp(1, keepdim=True), slack), 2)
        return scores[:, :-1, :-1].exp() @ b


def test_slack_that_is_not_normalised_is_added_to_every_sum() -> None:
    inputs = random(2, 9, 3), random(2, 7, 3, seed=1)
    analysis = analysed(Slack(), *inputs)
    (site,) = analysis.sites
    assert isinstance(site.convention, Convention)
    assert site.convention.half_steps == 6 and site.convention.stabiliser is not None
    assert str(site.convention.stabiliser) == f"sums + {math.exp(-0.5):g}"
    for far in (1.0, 1e3):  # where exp of the scores is not finite
        replays(Slack(), analysis, far * random(3, 12, 3, seed=2), random(3, 5, 3, seed=3))
    trained = Slack(learned=True)
    analysis = analysed(trained, *inputs)
    (site,) = analysis.sites
    assert not site.constants and site.no_gradient is None
    for level in (-2.0, 4.0):
        trained.bin.data.fill_(level)
        replays(trained, analysis, random(3, 12, 3, seed=2), random(3, 5, 3, seed=3))
    (left,) = analysed(Slack(learned=True, more=1.0), *inputs).left_alone
    assert left.status == "refused" and "rows" in left.reason


@pytest.mark.parametrize("shape", [(2, 1, 5, 7), (2, 1, 40, 31)], ids=str)
@pytest.mark.parametrize("kind", ["add", "clamp"])
def test_powers_of_quotients_with_a_constant(kind: str, shape: tuple[int, ...]) -> None:
    """Against the scalings as they are written, on kernels with zeros, rows of them, and columns."""
    (n, m), scores = shape[2:], 2 * random(*shape)
    scores[0][scores[0] < -1] = scores[1, :, 2] = scores[1, ..., 3] = -math.inf
    kernel = scores.double().exp()
    a, b = kernel.new_ones(*shape[:2], n, 1) / n, kernel.new_ones(*shape[:2], m, 1)
    for _ in range(3):
        sums = kernel.mT @ a
        b = (1 / m / (sums + 1e-3 if kind == "add" else sums.clamp(min=1e-3))) ** 0.6
        sums = kernel @ b
        a = (1 / n / (sums + 1e-3 if kind == "add" else sums.clamp(min=1e-3))) ** 0.9
    exact = a * kernel * b.mT
    settings = {"constant": 1e-3, "form": "scaling", "kind": kind, "shares": True, "start_share": True}
    found = op(scores, None, None, 1.0, 6, False, PLAIN, damping=[0.9, 0.6], **settings)
    assert float((found - exact).abs().max() / exact.max()) <= 1e-6


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("kind", ["add", "clamp"])
def test_a_constant_beside_scores_beyond_what_exp_holds(kind: str, rows_first: bool) -> None:
    """Against the loop in the log domain, and its gradient."""
    scores, reach = 2e3 * torch.randn(2, 1, 5, 7, dtype=torch.float64), math.log(0.5)
    scores[0] /= 2e3
    scores[0, :, 0] = scores[0, ..., 0] = -1e4
    scores.requires_grad_()
    rows_turn = rows_first
    duals = [torch.zeros(()), torch.zeros(())]
    for _ in range(7):
        axis = -1 if rows_turn else -2
        total = (scores + duals[rows_turn]).logsumexp(axis, keepdim=True)
        least = torch.full_like(total, reach)
        duals[not rows_turn] = -(torch.logaddexp(total, least) if kind == "add" else total.maximum(least))
        rows_turn = not rows_turn
    logs = scores + duals[0] + duals[1]
    settings = {"constant": 0.5, "form": "scaling", "kind": kind, "start": "plain"}
    found = torch.ops.asapc.plan(scores, None, None, 1.0, 7, rows_first, [1.0, 0.0, 0.0, 0.0], **settings)
    last = 5 if rows_first else 7  # the factor of a plan whose last side is closed
    slopes = [torch.autograd.grad(x.square().sum(), scores)[0] for x in (found * last, logs.exp())]
    for one, other in ((found * last, logs.exp()), slopes):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
        assert bool((other.abs() > 0.01).any())


@pytest.mark.skipif(bool(native.missing()), reason="the plain operators run")
@pytest.mark.parametrize("form", ["plan", "scaling"])
@pytest.mark.parametrize("masses", [None, "shared", "own"])
@pytest.mark.parametrize("start", ["plain", "row"])
def test_a_constant_beside_scores_that_float32_does_not_hold(
    form: str, masses: str | None, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 by the engine, and not by the reference, which takes far longer."""
    def refused(*_: Any) -> None:
        raise AssertionError("the engine gave up")

    scores = torch.stack([random(13, 21), 25 * random(13, 21), 25 * random(13, 21, seed=1)])[:, None]
    of = 1 if masses == "shared" else 3
    log_mu = None if masses is None else random(of, 1, 13, seed=2).log_softmax(-1)
    log_nu = None if masses is None else random(of, 1, 21, seed=3).log_softmax(-1)
    settings = {"constant": 1e-8, "form": form, "start": start, "shares": True}
    with monkeypatch.context() as alone:
        alone.setattr(reference, "plan", refused)
        found = op(scores, log_mu, log_nu, 1.0, 6, False, PLAIN, **settings)
    wide = (None if x is None else x.double() for x in (log_mu, log_nu))
    exact = reference.plan(scores.double(), *wide, 1.0, 6, False, PLAIN, **settings)
    assert float((found - exact).abs().max() / exact.max()) <= 1e-6


class PaddedScores(nn.Module):
    """Padding that is cut off before the loop, with a number that exp does not hold."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        scores = nn.functional.pad(a @ b.transpose(1, 2), (0, 2), value=1e4)[..., :-2]
        for step in range(6):
            scores = scores.log_softmax(-1 - step % 2)
        return scores.exp() @ b


def test_padding_that_is_no_slack() -> None:
    (site,) = analysed(PaddedScores(), random(2, 9, 3), random(2, 7, 3, seed=1)).sites
    assert isinstance(site.convention, Convention) and site.convention.stabiliser is None


class OfPairs(nn.Module):
    """Scores of pairs that a layer has mixed over the heads, in rows of their own on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        s = heads @ heads.mT
        batch, count, rows, columns = s.shape
        flat = s.permute(0, 2, 3, 1).reshape(batch * rows * columns, count)
        s = self.mix(flat).view(batch, rows, columns, count).permute(0, 3, 1, 2)
        for step in range(5):
            s = s - s.logsumexp(-2 if step % 2 else -1, keepdim=True)
        return (s.exp() @ heads).transpose(1, 2).flatten(2)


def test_sizes_that_went_through_a_product() -> None:
    model = OfPairs().eval()
    analysis = analysed(model, random(3, 7, 8))
    assert [site.convention.half_steps for site in analysis.sites] == [5]
    x = random(4, 9, 8, seed=1)
    with torch.no_grad():
        ours = ran(analysis, x)
        torch.testing.assert_close(ours, model(x), rtol=1e-4, atol=1e-5)


def test_no_loop_is_tried_that_is_much_longer_than_it_has_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []

    def identify(samples: Any, guesses: Any, most: int | None = None, sums: int = 0) -> Any:
        longest.extend([most] if most else [])
        return match_plan(samples, guesses, **({"most": most} if most else {}), sums=sums)

    match_plan = match.identify_plan
    monkeypatch.setattr(match, "identify_plan", identify)
    net = build("Masses")
    assert not analysed(net, *nets.inputs_for(net)).left_alone
    assert longest and max(longest) <= 20  # of six sums


def test_a_loop_whose_sums_are_all_over_rows() -> None:
    net = nets.Turned().eval()
    analysis = analysed(net, random(3, 9, 8))
    (site,) = analysis.sites
    assert isinstance(site.convention, PlanConvention)
    assert (site.convention.half_steps, site.convention.first_side) == (6, "column")
    replays(net, analysis, random(2, 5, 8, seed=1))


@pytest.mark.parametrize("einsum", [False, True])
def test_a_weight_stands_between_two_loops(einsum: bool) -> None:
    torch.manual_seed(0)
    net = nets.Stacked(einsum).eval()
    analysis = analysed(net, random(3, 9, 8))
    assert not analysis.left_alone
    assert [site.convention.half_steps for site in analysis.sites] == [6, 6]
    x = random(2, 5, 8, seed=1)
    with torch.no_grad():
        ours = ran(analysis, x)
        torch.testing.assert_close(ours, net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("net, half_steps, example, other", [
    (nets.Columns(), 8, (9, 7), (6, 11)), (nets.Written(), 8, (3, 9, 7), (3, 6, 7)),
    (nets.Stopping(1e-12), 24, (4, 9, 7), (3, 9, 7)), (nets.Spread(), 6, (3, 9, 7), (2, 6, 7)),
], ids=["scalings are columns", "shares written into zeros", "a stop that changes nothing", "repeated"],
)  # fmt: skip
def test_half_steps_are_counted(net: nn.Module, half_steps: int, example: Any, other: Any) -> None:
    analysis = analysed(net.eval(), random(*example))
    assert [site.convention.half_steps for site in analysis.sites] == [half_steps]
    replays(net, analysis, random(*other, seed=1))


def test_scalings_of_masses_of_1_may_end_early() -> None:
    net = nets.StoppingScalings().eval()
    analysis = analysed(net, random(4, 9, 9))
    assert [site.convention.ending.ones for site in analysis.sites] == [True]
    for spread in (0.01, 0.3, 1.0):
        replays(net, analysis, spread * random(6, 11, 11, seed=1))


def test_softmaxes_side_by_side_are_no_loop() -> None:
    net = build("SideBySide")
    assert find_loops(capture(net, nets.inputs_for(net), {}).programs[0].graph) == []


def test_a_model_with_nothing_in_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 2)\n")
    np.savez(tmp_path / "x.npz", input=np.ones((6, 4), dtype="float32"))
    code = main(["inspect", f"{tmp_path}/net.py:build", "--data", str(tmp_path / "x.npz"), "--trust"])
    said = capsys.readouterr().err
    assert code == 3 and "the model must contain attention, or a loop" in said


def test_a_matcher_is_compiled_from_end_to_end(tmp_path: Path) -> None:
    """Written, loaded without trust, run on other sizes; its report says nothing that has no meaning."""
    torch.manual_seed(0)
    net = nets.Matcher(half_steps=6).eval()
    batches = [nets.inputs_for(net, batch=20, seed=seed) for seed in range(5)]
    data = [{"x": x, "y": y} for x, y in batches]
    recipe = {"operator": "lossless", "batch_size": 16, "max_examples": 48, "selection_examples": 16}
    _, report = asapc.compile(net, data, recipe=recipe, out=tmp_path / "out", examples=16)
    (site,) = report.facts["sites"]
    assert site["operator"] == "plan" and site["metrics"]["attention_rel_l2"] < 1e-5
    expected = PlanConvention(6, "row", 1.0, OutputFactor(), True, "constant", "constant")
    alike(convention_from_json(site["convention"]), expected)
    assert not {"row_err", "col_err"} & site["metrics"].keys()
    assert site["metrics"]["output_rel_l2"] is None
    loaded, inputs = asapc.load(tmp_path / "out"), nets.inputs_for(net, batch=3, tokens=12, seed=9)
    with torch.no_grad():
        (theirs, matches), (ours, ours_matches) = net(*inputs), loaded(*inputs)
    assert torch.allclose(ours, theirs, atol=1e-4) and torch.equal(ours_matches, matches)


# Published packages, as they are


class Matching(nn.Module):
    """The transport of SuperGlue, on scores."""

    def __init__(self) -> None:
        super().__init__()
        self.bin = nn.Parameter(torch.tensor(1.0))

    def forward(self, scores: Tensor) -> Tensor:
        from transformers.models.superglue.modeling_superglue import log_optimal_transport

        found: Tensor = log_optimal_transport(scores, self.bin, iterations=4)
        return found


def test_superglues_transport() -> None:
    pytest.importorskip("transformers.models.superglue")
    net = Matching().eval()
    analysis = analysed(net, 3 * random(3, 7, 9))
    (site,) = analysis.sites
    assert isinstance(site.convention, PlanConvention)
    alike(site.convention, PlanConvention(8, "row", 1.0, OutputFactor(), True, "constant", "constant"))
    replays(net, analysis, random(2, 12, 9, seed=1))


class Streams(nn.Module):
    """A residual stream in four copies, mixed by the package's own module."""

    def __init__(self) -> None:
        super().__init__()
        from hyper_connections.manifold_constrained_hyper_connections import (
            ManifoldConstrainedHyperConnections,
        )

        self.mix = ManifoldConstrainedHyperConnections(
            4, dim=8, branch=nn.Linear(8, 8), layer_index=0, log_domain_sinkhorn=False, sinkhorn_iters=6,
        )  # fmt: skip
        for parameter in self.parameters():
            parameter.data += 0.5 * torch.randn_like(parameter)

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.arange(1.0, 5.0).repeat(x.shape[0])[:, None, None]
        found: Tensor = self.mix(x.repeat_interleave(4, 0) * scales)
        return found


def test_hyper_connections() -> None:
    pytest.importorskip("hyper_connections")
    torch.manual_seed(0)
    net = Streams().eval()
    analysis = analysed(net, random(3, 10, 8))
    (site,) = analysis.sites
    assert isinstance(site.convention, PlanConvention) and not analysis.left_alone
    expected = PlanConvention(12, "column", 1.0, OutputFactor(queries=1),
                              stabiliser=Stabiliser("plan", "clamp", 1e-12))  # fmt: skip
    alike(site.convention, expected)
    replays(net, analysis, random(5, 13, 8, seed=1))


class Matched(nn.Module):
    """A matcher by pygmtools, which reads the sizes of every example from tensors, beside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pairing(), OneMap()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class OneMap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def plan(self, scores: Tensor) -> Tensor:
        for step in range(6):
            scores = scores.log_softmax(-1 - step % 2)
        return scores.exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.plan(self.lin(x) @ x.transpose(1, 2)) @ x


class Pairing(OneMap):
    def plan(self, scores: Tensor) -> Tensor:
        import pygmtools

        plan: Tensor = pygmtools.sinkhorn(scores, max_iter=6, backend="pytorch")
        return plan


def test_sizes_that_are_data_are_one_refused_row_and_not_the_end() -> None:
    pytest.importorskip("pygmtools")
    analysis = analysed(Matched().eval(), random(3, 10, 8))
    assert [site.name for site in analysis.sites] == ["second"]
    (left,) = analysis.left_alone
    assert left.name == "first" and "`row_mask[b, :nrows[b], 0] = 1`" in left.reason
    assert "pytorch_backend.py, line" in left.reason


class Cached(nn.Module):
    """A model that is called with a cache, whose mixers are the package's own modules."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as released

        config = released.DeepseekV4Config(hidden_size=8, hc_sinkhorn_iters=6)
        self.mixers = nn.ModuleList(released.DeepseekV4HyperConnection(config) for _ in range(2))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        from transformers import DynamicCache

        for mixer in self.mixers:
            post, comb, one = mixer(x)
            x = post[..., None] * one[..., None, :] + comb.transpose(-1, -2) @ x
        return x, DynamicCache()


def test_a_mixer_in_a_model_that_cannot_be_captured_as_a_whole() -> None:
    """DeepSeek-V4's hyper-connections, in a model that returns its cache."""
    pytest.importorskip("transformers.models.deepseek_v4")
    torch.manual_seed(0)
    analysis = analysed(Cached().eval(), random(2, 5, 4, 8))
    assert analysis.capture.kind == "module" and not analysis.left_alone
    assert "returns a DynamicCache" in (analysis.capture.reason or "")
    expected = PlanConvention(11, "column", 1.0, OutputFactor(queries=1),
                              stabiliser=Stabiliser("plan", "add", 1e-6))  # fmt: skip
    assert analysis.names == ["mixers.0", "mixers.1"]
    for site in analysis.sites:
        assert isinstance(site.convention, PlanConvention) and site.replay_error < 1e-5
        alike(site.convention, expected)


@pytest.mark.parametrize("rows_first", (True, False))
def test_huge_scores_keep_the_digits_of_a_running_plan(rows_first: bool) -> None:
    """A dual as large as the scores would be off by 1e-2 at 1e6."""
    scores = 1e6 * torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    settings = {"score_multiplier": 1.0, "half_steps": 9, "rows_first": rows_first,
                "output_factor": [1.0, 1.0, 0.0, 0.0]}  # fmt: skip
    for log in (False, True):
        exact = reference.plan(scores.double(), None, None, **settings, log=log).clamp(min=-10)
        single = reference.plan(scores, None, None, **settings, log=log).clamp(min=-10)
        assert float((single - exact).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("log_mu", "settings"),
    [
        (torch.randn(4, 2, 3).log_softmax(0).permute(1, 2, 0), {"damping": [0.9, 0.8]}),  # not row by row
        (torch.zeros(2, 3, 1), {}),  # every token's
        (None, {"damping": [0.9, 0.8], "form": "summed", "shares": False}),  # masses of 1, which damp
    ],
)
def test_masses_in_any_layout(log_mu: Tensor | None, settings: dict[str, Any]) -> None:
    given = (torch.randn(2, 3, 4, 5), log_mu, None, 1.0, 3, True, [1.0, 1.0, 0.0, 0.0])
    meant = reference.plan(given[0].double(), *given[1:], **settings)
    found = torch.ops.asapc.plan(*given, **settings)
    assert float((found - meant).abs().max()) < 1e-5


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_an_example_of_which_no_token_has_mass(side: int, rows_first: bool, log: bool) -> None:
    """Nor any score a number, or every one; in the third example some tokens have mass."""
    scores, masses = torch.randn(3, 2, 5, 7), [None, None]
    hidden = torch.tensor([[0] * 7, [1] * 7, [0, 0, 0, 1, 1, 1, 1]]).bool()[:, None, : (5, 7)[side]]
    masses[side] = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)  # type: ignore[call-overload]
    lost = scores.masked_fill(hidden[..., None] if side == 0 else hidden[:, :, None], -math.inf)
    for given, steps in itertools.product((scores, lost), (1, 2, 3, 4)):
        rule = (1.0, steps, rows_first, [1.0, 0.0, 0.0, 0.0], log)
        meant = reference.plan(given.double(), *masses, *rule)
        found = torch.ops.asapc.plan(given, *masses, *rule).double()
        torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-6)


ZEROS = {
    "none": lambda i, j: i < 0,
    "some": lambda i, j: (3 * i + j) % 4 == 0,
    "a row": lambda i, j: (i == 1) & (j >= 0),
    "a column": lambda i, j: (j == 0) & (i >= 0),
    "all": lambda i, j: i + j >= 0,
}  # fmt: skip
KERNEL_RULES: list[dict[str, Any]] = [
    {}, {"damping": [0.9, 0.7]}, {"constant": 1e-6, "form": "scaling", "kind": "add"},
    {"constant": 1e-6, "form": "plan", "kind": "add"},
    {"constant": 1e-8, "form": "plan", "kind": "clamp", "start": "row"}, {"form": "duals"},
    {"by_head": [1.0, 0.5]}, {"masses": True},
]  # fmt: skip


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("spread", [0.5, 5.0, 30.0])
@pytest.mark.parametrize("shape", [(3, 2, 7, 5), (2, 2, 40, 33), (20, 2, 4, 4), (1, 2, 130, 3)])
def test_a_kernel_is_the_exp_of_scores(shape: tuple[int, ...], spread: float, zeros: str) -> None:
    i, j = (torch.arange(size) for size in shape[-2:])
    kernel = (spread * random(*shape)).exp().masked_fill(ZEROS[zeros](i[:, None], j), 0.0)
    log_mu, log_nu = (random(*shape[:2], size, seed=size).log_softmax(-1) for size in shape[-2:])
    for rule, rows_first, log, half_steps in itertools.product(
        KERNEL_RULES, (True, False), (False, True), (1, 6)
    ):
        rule, masses = dict(rule), (None, None)
        if rule.pop("masses", False):
            masses = (log_mu, log_nu)
        rest = (*masses, 1.0, half_steps, rows_first, PLAIN, log)
        doubled = [x.double() if isinstance(x, Tensor) else x for x in rest]
        exact = reference.plan(kernel.double(), *doubled, **rule, is_kernel=True)
        found = op(kernel, *rest, **rule, is_kernel=True)
        alone = reference.plan(kernel, *rest, **rule, is_kernel=True)
        rough = [alone, op(reference.logs_of(kernel), *rest, **rule)]
        assert torch.equal(found.isnan(), exact.isnan())
        low = -200.0 if log else 0.0  # of logarithms of nothing
        exact, found, *rough = (
            x.double().nan_to_num(0.0).clamp(low, 1e30) for x in (exact, found, *rough)
        )
        honest = max(float((x - exact).abs().max()) for x in rough)
        assert float((found - exact).abs().max()) <= 2 * honest + 1e-5 * float(exact.abs().max())


@pytest.mark.parametrize("shape", [(1, 1, 7, 5), (1, 1, 40, 33)])
def test_a_kernel_of_the_smallest_numbers(shape: tuple[int, ...]) -> None:
    """One over them leaves the format."""
    for least, half_steps, log in itertools.product((1e-39, 1e-42), (1, 2), (False, True)):
        kernel = (random(*shape).abs() + 1) * least
        rest = (None, None, 1.0, half_steps, True, PLAIN, log)
        exact = reference.plan(kernel.double(), *rest, is_kernel=True)
        found = op(kernel, *rest, is_kernel=True).double()
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("low", [-1e9, -1e4, -3e3])
@pytest.mark.parametrize("rule", [
    {"damping": [0.2, 0.2]}, {"constant": 1e-6, "form": "scaling"}, {"constant": 1e-6, "start": "row"},
], ids=str)  # fmt: skip
def test_logarithms_of_what_is_masked(rule: dict[str, Any], low: float) -> None:
    """Damped, a masked row or column has a dual of its own; beside a constant it has log 0."""
    for where in ((1, slice(None)), (slice(None), 1), (slice(2), slice(3))):
        s = random(1, 1, 7, 5)
        s[(..., *where)] = low
        rest = (None, None, 1.0, 6, True, PLAIN, True)
        exact = reference.plan(s.double(), *rest, **rule)
        torch.testing.assert_close(op(s, *rest, **rule).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_constant_beside_parts_that_drift_apart(kernel: bool) -> None:
    i, j = torch.arange(40)[:, None], torch.arange(33)
    s = random(1, 1, 40, 33).masked_fill((i < 30) != (j < 5), -torch.inf)
    s = s.exp() if kernel else s
    for half_steps in range(80, 140):
        rest = (None, None, 1.0, half_steps, True, PLAIN, False, None, 1e-8, "plan", "add")
        exact = reference.plan(s.double(), *rest, is_kernel=kernel)
        torch.testing.assert_close(op(s, *rest, is_kernel=kernel).double(), exact, rtol=1e-4, atol=1e-6)


def test_scores_of_minus_infinity_alone_and_no_half_step() -> None:
    nothing = torch.full((2, 1, 3, 3), -torch.inf)
    infinite = torch.stack([random(1, 3, 3), nothing[0] * -1])  # beside its largest all others are -inf
    stabiliser = {"constant": 1e-6, "form": "plan", "kind": "add", "start": "tensor"}
    factor = [1.0, 0.0, 0.0, 0.0]
    for scores in (nothing, infinite):
        for sign in (1.0, -1.0):
            found = torch.ops.asapc.plan(sign * scores, None, None, sign, 4, True, factor, **stabiliser)
            assert not found[0].any()
    turned = torch.randn(2, 3, 5, 4).mT
    assert torch.ops.asapc.plan(turned, None, None, 1.0, 0, True, factor).is_contiguous()


def test_negative_masses_are_told(tmp_path: Path) -> None:
    net = nets.MassesByScalings().eval()
    data = dict(zip(("scores", "mu", "nu"), nets.inputs_for(net, batch=8), strict=True))
    recipe = {"operator": "lossless", "batch_size": 8}
    live = asapc.compile(net, data, recipe=recipe, examples=8, out=tmp_path / "out").model
    alone = asapc.load(tmp_path / "out")
    data["nu"][1, 4] = -0.1
    with pytest.warns(OwnCodeWarning, match="masses of a plan >= 0"):
        assert torch.equal(live(**data), net(**data))
    with pytest.raises(BranchError, match="masses of a plan >= 0"):
        alone(**data)
