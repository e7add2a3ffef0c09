"""What is proven of a site, and a numerical check of every proof on the site's own activations.

A certificate is a bound from a paper, evaluated in float64 for each example and head of the gate
split, next to the quantity it bounds, measured there. Bounds need the teacher's duals, which are
known offline only; one that does not hold would be a defect of asapc or of a proof.

Scores S and duals are in units of epsilon, absolute: P = exp(S + f + g). Only strictly positive blocks
are checked: all queries against the n active of M keys, no pair forbidden by a score bias. Every query
has mass 1/N and every active key 1/M, so a plan has mass 1 after a row c-transform and n/M after a column
c-transform; the papers' proofs need no more than that it is at most 1.

The papers predict the source dual and close columns first. A predicted target dual is the same with the
sides exchanged: what they say of columns then holds of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asapc.calibration.collect import pieces
from asapc.calibration.teacher import TeacherDuals
from asapc.features.predictor import TransformPlan
from asapc.ir import Convention, Side, SiteTensors
from asapc.operators.c_transforms import close_columns, close_rows

PAPER = "ASAP"
BLOCKWISE = "Block-wise differentiable Sinkhorn attention"

# What a check allows float64 sums over a block to be off: of a bound, relative above 1; of an identity,
# relative and absolute; and of a divergence, per unit of the largest score.
TOLERANCE = 1e-9
IDENTITY_TOLERANCE = (1e-6, 1e-12)
ROUNDING = 1e-15

# Score entries of a site that are checked, so that a report stays quick; every bound that is a metric
# covers all examples, and `cases` says how many were checked.
PLAN_ENTRIES = 2**24
CONTRACTION_ENTRIES = 2**22
QUADRATURE_ENTRIES = 2**24  # times nodes
NODES = 12  # of Gauss and Legendre, in each panel
PANEL = 4.0  # of the tilt's range: beyond, a pole of the integrand comes near
POWER_STEPS = 4
NEAR, FAR = 1e-3, 4.0  # how far duals are moved to measure a contraction

Predict = Callable[[SiteTensors], Tensor]


def row_error_bound(g_plus: Tensor, g_0: Tensor) -> Tensor:
    """exp(max_j |g+_j - g0_j|) - 1 >= row_err of the plan closed on g+, per example and head.

    g_0, g_plus: [B, H, M], the target duals before and after the row c-transform between them; masked
    keys are -inf in both. Returns [B, H] float64. Holds with masks too: after the row c-transform every
    row has mass 1/N, and only active keys are rescaled.  Source: ASAP, Proposition B.7.
    """
    active = ~(g_plus.isneginf() & g_0.isneginf())
    change = (g_plus.double() - g_0.double()).abs()
    return torch.expm1(torch.where(active, change, 0.0).amax(-1))


def dual_stability_factor(f_hat: Tensor, f: Tensor, keep: Tensor | None = None) -> Tensor:
    """exp(2 alpha) with alpha = min_c max_i |f^_i - f_i - c|: bounds the ratio of plan entries.

    f_hat, f: [B, H, N] predicted and teacher dual of one side, in the same coordinates; keep: [B, N],
    the points that carry mass, or None for all. Every entry of
    the plan closed from f_hat is within this factor of the one closed from f, after any number of
    c-transforms. Returns [B, H] float64.  Source: ASAP, Propositions B.8 and B.9 (gauge-free form).
    """
    error = f_hat.double() - f.double()
    if keep is None:
        return torch.exp(_spread(error))
    massless = ~keep[:, None, :]
    high = error.masked_fill(massless, -math.inf).amax(-1)
    low = error.masked_fill(massless, math.inf).amin(-1)
    return torch.exp((high - low).clamp(min=0.0))  # no point at all: nothing to bound


def contraction_bound(scores: Tensor, keep: Tensor | None = None) -> Tensor:
    """tanh^2(range(S) / 2) >= Hilbert contraction of one iteration (two half-steps), [B, H].

    scores: [B, H, N, M] divided by epsilon; only active keys count. Row and column offsets of S do
    not change the iteration, so the smaller of the ranges of S and of S centred over rows and
    columns is taken. By Birkhoff the contraction is tanh^2(Delta / 4) with Delta, the largest
    |S_ij + S_kl - S_il - S_kj|, at most 2 range(S); tanh^2(range / 4) would not be a bound.
    1 where nothing is proven (range above about 38, or a bias that forbids a pair), 0 without an
    active key.  Source: Block-wise differentiable Sinkhorn attention, Proposition 4.
    """
    wide = scores.detach().double()
    if keep is None:
        active = torch.ones_like(wide, dtype=torch.bool)
    else:
        active = keep[:, None, None, :].expand(wide.shape)
    forbidden = (wide.isneginf() & active).flatten(-2).any(-1)
    filled = wide.masked_fill(~active | wide.isneginf(), 0.0)
    count = active.sum(-1, keepdim=True).clamp(min=1)
    centred = filled - filled.sum(-1, keepdim=True) / count
    centred = centred - centred.mean(-2, keepdim=True)
    spread = torch.minimum(_range(filled, active), _range(centred, active))
    return torch.tanh(spread / 2).square().masked_fill(forbidden, 1.0)


def pinsker(divergence: Tensor) -> Tensor:
    """sqrt(2 KL) >= |P^ - P|_1, for two plans of one mass of at most 1.  Source: ASAP, Eq. B.92."""
    return torch.sqrt(2 * divergence)


@dataclass(frozen=True)
class Duals:
    """f [B, H, N] and g [B, H, n]; one of them may not be known before the first c-transform."""

    f: Tensor | None
    g: Tensor | None


@dataclass(frozen=True)
class Block:
    """Scores [B, H, N, n] of all queries against active keys only, and the mass of each point."""

    scores: Tensor
    log_mu: float
    log_nu: float

    def closed(self, start: Tensor, side: Side, c_transforms: int) -> list[Duals]:
        """The duals after 0, 1, ... c-transforms, the first on `side`, from the other side's dual."""
        num_queries, num_keys = self.scores.shape[-2:]
        log_mu, log_nu = (
            self.scores.new_full((count,), mass)
            for count, mass in ((num_queries, self.log_mu), (num_keys, self.log_nu))
        )
        f, g = (start, None) if side == "column" else (None, start)
        found = [Duals(f, g)]
        for _ in range(c_transforms):
            if side == "column":
                assert f is not None
                g = close_columns(self.scores, f, log_nu)
            else:
                assert g is not None
                f = close_rows(self.scores, g, log_mu)
            side = "row" if side == "column" else "column"
            found.append(Duals(f, g))
        return found

    def log_plan(self, duals: Duals) -> Tensor:
        assert duals.f is not None and duals.g is not None
        return self.scores + duals.f[..., :, None] + duals.g[..., None, :]

    def positive(self) -> bool:
        """No pair is forbidden."""
        return bool(self.scores.isfinite().all())


def measured_contraction(block: Block, g: Tensor, seed: int = 0) -> Tensor:
    """The largest osc(Phi(g + d) - Phi(g)) / osc(d) found, Phi one iteration on the keys' dual: [B, H].

    A power iteration from a small random d finds the slowest mode around g; one large d looks further
    away. So this is at most the contraction that Proposition 4 bounds from above.
    """

    def iterate(start: Tensor) -> Tensor:
        found = block.closed(start, "row", 2)[-1].g
        assert found is not None
        return found

    generator = torch.Generator().manual_seed(seed)
    change = torch.randn(g.shape, generator=generator, dtype=torch.float64).to(g.device)
    image = iterate(g)
    worst = g.new_zeros(g.shape[:2])
    for size in (*[NEAR] * POWER_STEPS, FAR):
        spread = _spread(change)
        scaled = change * torch.where(spread > 0, size / spread, 0.0)[..., None]
        change = iterate(g + scaled) - image
        worst = torch.maximum(worst, torch.where(spread > 0, _spread(change) / size, 0.0))
    return worst


class Tilt:
    """Two plans closed from the duals f and f^ of one side: every column of one is the other, tilted.

    pi_j and pi^_j are the conditionals of a closed column j over the points i of the predicted side,
    and Delta = f^ - f.  Rows of the transposed scores where the keys are predicted.
    Source: ASAP, Proposition B.10.
    """

    def __init__(self, scores: Tensor, f: Tensor, f_hat: Tensor, log_weight: float) -> None:
        """scores: [B, H, X, Y]; f, f_hat: [B, H, X]; log_weight: of each of the Y closed marginals."""
        self.log_pi = (scores + f[..., :, None]).log_softmax(-2)
        self.log_pi_hat = (scores + f_hat[..., :, None]).log_softmax(-2)
        change = f_hat - f
        self.delta = change - change.mean(-1, keepdim=True)  # the gauge does not matter
        self.weight = math.exp(log_weight)

    def divergences(self) -> tuple[Tensor, Tensor]:
        """KL(P^ || P) and KL(P || P^), [B, H]."""
        ratio = self.log_pi_hat - self.log_pi
        reverse = (self.log_pi_hat.exp() * ratio).sum((-2, -1))
        return self.weight * reverse, -self.weight * (self.log_pi.exp() * ratio).sum((-2, -1))

    def panels(self) -> int:
        """Of the quadrature, so that 12 nodes in each leave nothing but rounding."""
        spread = _largest(_spread(self.delta))
        return max(1, math.ceil(spread / PANEL)) if math.isfinite(spread) else 1

    def integrals(self) -> tuple[Tensor, Tensor]:
        """sum_j nu_j int_0^1 t Var_{pi_j,t}(Delta) dt, and with 1 - t for t: [B, H] each (B.51, B.52)."""
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        reverse, forward = (torch.zeros_like(self.delta[..., 0]) for _ in range(2))
        panels = self.panels()
        powers = torch.stack([self.delta, self.delta.square()], -1)  # [B, H, X, 2]
        for panel in range(panels):
            for node, weight in zip(nodes, weights, strict=True):
                t = (panel + (float(node) + 1) / 2) / panels
                tilted = (self.log_pi + t * self.delta[..., :, None]).softmax(-2)
                mean, square = (tilted.transpose(-1, -2) @ powers).unbind(-1)
                variance = self.weight * (square - mean.square()).sum(-1)
                reverse += t * variance * float(weight) / (2 * panels)
                forward += (1 - t) * variance * float(weight) / (2 * panels)
        return reverse, forward

    def variance_bound(self) -> Tensor:
        """sum_j nu_j sigma_j^2 / 2 with sigma_j = range(Delta) / 2, Popoviciu's for every t (B.53)."""
        total = self.weight * self.log_pi.shape[-1]
        return total * _spread(self.delta).square() / 8

    def density_bound(self) -> Tensor:
        """beta / (2 X) |Delta|^2 times the mass, with pi_j,t(i) <= beta / X for all t (B.54).

        log pi_t = log pi + t Delta - A(t) with A convex: A lies above its tangents at 0 and at 1, which
        makes it at most linear in t, and so largest at one end.
        """
        delta = self.delta[..., :, None]
        mean, mean_hat = ((x.exp() * delta).sum(-2, keepdim=True) for x in (self.log_pi, self.log_pi_hat))
        from_0 = torch.maximum(self.log_pi, self.log_pi + delta - mean)
        from_1 = torch.maximum(self.log_pi_hat, self.log_pi_hat - delta + mean_hat)
        beta_over_x = torch.minimum(from_0, from_1).amax((-2, -1)).exp()
        total = self.weight * self.log_pi.shape[-1]
        return total * beta_over_x / 2 * self.delta.square().sum(-1)

    def trivial(self) -> Tensor:
        """No divergence of other column conditionals from these exceeds it: -sum_j nu_j log min pi_j."""
        least = torch.minimum(self.log_pi.amin(-2), self.log_pi_hat.amin(-2))
        return -self.weight * least.sum(-1)


@dataclass
class _Check:
    """One certificate, over cases: the examples and heads of a site."""

    name: str
    source: str
    bound: float = 0.0
    measured: float = 0.0
    holds: bool = True
    cases: int = 0
    vacuous_cases: int = 0
    residual: float | None = None

    def add(
        self, bound: Tensor, measured: Tensor, trivial: Tensor | float, middle: Tensor | None = None
    ) -> None:
        """measured <= middle <= bound in every case; trivial: what measured can never exceed."""
        steps = (measured, bound) if middle is None else (measured, middle, bound)
        for less, more in itertools.pairwise(steps):
            # Not the opposite comparison: NaN holds nothing.
            within = less <= more + TOLERANCE * more.clamp(min=1.0)
            self.holds = self.holds and bool(within.all())
        self.vacuous_cases += int((~(bound < trivial)).sum())
        self._extend(bound, measured)

    def add_identity(self, one: Tensor, other: Tensor, rounding: float) -> None:
        """one == other in every case, up to float64's rounding."""
        relative, absolute = IDENTITY_TOLERANCE
        residual = (one - other).abs()
        limit = relative * torch.maximum(one.abs(), other.abs()) + absolute + rounding
        self.holds = self.holds and bool((residual <= limit).all())
        self.residual = max(self.residual or 0.0, _largest(residual))
        self._extend(one, other)

    def _extend(self, bound: Tensor, measured: Tensor) -> None:
        self.bound = max(self.bound, _largest(bound))
        self.measured = max(self.measured, _largest(measured))
        self.cases += bound.numel()

    def result(self) -> dict[str, Any]:
        """bound and measured are the largest of all cases; holds was checked case by case.

        vacuous: in some case the bound says no more than what is always so; vacuous_cases counts them.
        residual: the largest difference of the two sides, of an identity.
        """
        entry = {
            "name": self.name, "source": self.source, "bound": self.bound, "measured": self.measured,
            "holds": self.holds, "cases": self.cases, "vacuous": self.vacuous_cases > 0,
            "vacuous_cases": self.vacuous_cases,
        }  # fmt: skip
        return entry if self.residual is None else {**entry, "residual": self.residual}


class SiteCertificates:
    """Streams a Sinkhorn site's activations through every bound that is proven for it.

    plan: of its c-transforms, None where the loop was kept or replaced by another operator.
    source, key: predict its duals in score coordinates, see program.calls.predicted_duals.
    """

    def __init__(
        self,
        convention: Convention,
        plan: TransformPlan | None = None,
        source: Predict | None = None,
        key: Predict | None = None,
    ) -> None:
        self.convention = convention
        self.plan = plan
        self.source, self.key = source, key
        self.contraction = self.stability = self.row_bound = 0.0
        self._checks: dict[str, _Check] = {}
        self._left = {
            "plans": PLAN_ENTRIES,
            "contraction": CONTRACTION_ENTRIES,
            "quadrature": QUADRATURE_ENTRIES,
        }

    def update(self, tensors: SiteTensors) -> None:
        """Add one batch. Examples without an active key are passed over."""
        with torch.no_grad():
            for piece in pieces(tensors):
                self.add(TeacherDuals(piece, self.convention))

    def metrics(self) -> dict[str, float]:
        """The largest bounds of the site over all its examples, see asapc.metrics."""
        found = {"contraction_bound": self.contraction}
        if self.plan is not None:
            found["dual_stability"] = self.stability
            if self._has_row_bound():
                found["row_bound"] = self.row_bound
        return found

    def result(self) -> list[dict[str, Any]]:
        return [check.result() for check in self._checks.values()]

    def _has_row_bound(self) -> bool:
        """The metric is the paper's: a source dual and three c-transforms."""
        return self.plan is not None and self.plan.side == "source" and self.plan.c_transforms == 3

    def add(self, teacher: TeacherDuals) -> None:
        """Add a few examples, all of which have an active key, with the teacher's duals on them."""
        t = teacher.tensors
        predicted = [None if p is None else p(t).double() for p in (self.source, self.key)]
        bound = contraction_bound(teacher.scores, t.keep)
        self.contraction = max(self.contraction, _largest(bound))
        if self.plan is not None:
            start = teacher.after(self.plan.half_steps)
            for dual, true, keep in zip(predicted, start, (None, t.keep), strict=True):
                if dual is not None:
                    factor = dual_stability_factor(dual, true, keep)
                    self.stability = max(self.stability, _largest(factor))
        num_queries, num_keys = teacher.scores.shape[-2:]
        masses = -math.log(num_queries), -math.log(num_keys)
        for rows, keys in _active_blocks(t.keep):
            block = Block(teacher.scores[rows][..., keys], *masses)
            if block.positive() and self._take("contraction", block.scores.numel()):
                g = teacher.after(self.convention.half_steps)[1][rows][..., keys]
                check = self._check("contraction_bound", BLOCKWISE, "Proposition 4")
                check.add(bound[rows], measured_contraction(block, g), 1 - TOLERANCE)
            if self.plan is None or self.plan.c_transforms == 0:
                continue  # without a c-transform nothing more is proven
            index = 0 if self.plan.side == "source" else 1
            dual, true = predicted[index], teacher.after(self.plan.half_steps)[index]
            assert dual is not None
            dual, true = dual[rows], true[rows]
            if index == 1:
                dual, true = dual[..., keys], true[..., keys]
            self._certify(block, dual, true)

    def _certify(self, block: Block, dual: Tensor, true: Tensor) -> None:
        """dual, true: the predicted dual of a block and the teacher's."""
        assert self.plan is not None
        side: Side = "column" if self.plan.side == "source" else "row"
        compared = block.positive() and self._take("plans", block.scores.numel())
        if not compared and not self._has_row_bound():
            return
        closed = block.closed(dual, side, self.plan.c_transforms)
        if self._has_row_bound():
            g_plus, g_0 = closed[-1].g, closed[-2].g
            assert g_plus is not None and g_0 is not None
            self.row_bound = max(self.row_bound, _largest(row_error_bound(g_plus, g_0)))
        if not compared:
            return
        exact = block.closed(true, side, self.plan.c_transforms)
        self._row_error(block, closed, side)
        self._stability(block, closed, exact, side)
        self._marginal_error(block, closed[-1], exact[-1], _last_side(side, closed))
        self._divergence(block, dual, true, side)

    def _row_error(self, block: Block, closed: list[Duals], side: Side) -> None:
        """Proposition B.7: a row c-transform, then a column c-transform, whatever came before."""
        if len(closed) < 3 or _last_side(side, closed) != "column":
            return
        g_plus, g_0 = closed[-1].g, closed[-2].g
        assert g_plus is not None and g_0 is not None
        plan, rows_exact = (block.log_plan(duals).exp() for duals in (closed[-1], closed[-2]))
        error = (plan.sum(-1) - math.exp(block.log_mu)).abs().sum(-1)
        gap = (plan - rows_exact).abs().sum((-2, -1))
        # Rows of two plans of mass at most 1 are never further apart than 2.
        check = self._check("row_bound", PAPER, "Proposition B.7")
        check.add(row_error_bound(g_plus, g_0), error, 2.0, middle=gap)

    def _stability(self, block: Block, closed: list[Duals], exact: list[Duals], side: Side) -> None:
        """Propositions B.8 (one c-transform) and B.9 (more), for the best shift of the predicted dual."""
        number = "B.8" if len(closed) == 2 else "B.9"
        moves = [_moved(mine, its) for mine, its in zip(closed, exact, strict=True)]
        start = moves[0][0 if side == "column" else 1]
        low, high = start.amin(-1), start.amax(-1)
        alpha, centre = (high - low) / 2, (high + low) / 2
        if side == "row":
            centre = -centre
        moved = torch.zeros_like(alpha)
        closes_f = side == "row"
        for f, g in moves[1:]:  # the one that was just closed; the gauge is f - c, g + c
            shifted = f - centre[..., None] if closes_f else g + centre[..., None]
            moved = torch.maximum(moved, shifted.abs().amax(-1))
            closes_f = not closes_f
        check = self._check("dual_shift", PAPER, f"Proposition {number}")
        check.add(alpha, moved, math.inf)
        # log P^_ij - log P_ij = (f^ - f)_i + (g^ - g)_j: the scores cancel.
        f, g = moves[-1]
        largest, smallest = f.amax(-1) + g.amax(-1), f.amin(-1) + g.amin(-1)
        # No entry of P^ exceeds the mass of its closed column, nor its ratio to P that mass over P's.
        mass = block.log_nu if _last_side(side, closed) == "column" else block.log_mu
        trivial = torch.exp(mass - block.log_plan(exact[-1]).amin((-2, -1)))
        check = self._check("dual_stability", PAPER, f"Proposition {number}")
        check.add(torch.exp(2 * alpha), torch.exp(torch.maximum(largest, -smallest)), trivial)

    def _marginal_error(self, block: Block, duals: Duals, exact: Duals, last: Side) -> None:
        """Proposition B.15 on the final plans, which share the marginal that was closed last."""
        free, name, log_mass = (-1, "row", block.log_mu) if last == "column" else (
            -2, "column", block.log_nu)  # fmt: skip
        mass = math.exp(log_mass)
        log_plan, log_exact = block.log_plan(duals), block.log_plan(exact)
        plan, teacher = log_plan.exp(), log_exact.exp()
        error, others = ((p.sum(free) - mass).abs().sum(-1) for p in (plan, teacher))
        gap = (plan - teacher).abs().sum((-2, -1))
        divergence = (plan * (log_plan - log_exact)).sum((-2, -1)).clamp(min=0.0)
        check = self._check(f"{name}_error_kl_bound", PAPER, "Proposition B.15, Eq. B.92")
        check.add(others + pinsker(divergence + _rounding(block)), error, 2.0, middle=others + gap)
        deviation = ((plan / mass).sum(free) - 1).abs()  # in attention units
        check = self._check(f"{name}_error_identity", PAPER, "Proposition B.15, Eq. B.93")
        check.add_identity(deviation.mean(-1) * deviation.shape[-1] * mass, error, 0.0)

    def _divergence(self, block: Block, dual: Tensor, true: Tensor, side: Side) -> None:
        """Proposition B.10 on the plans of one c-transform."""
        scores, mass = block.scores, block.log_nu
        if side == "row":
            scores, mass = scores.transpose(-1, -2), block.log_mu
        tilt = Tilt(scores, true, dual, mass)
        reverse, forward = tilt.divergences()
        worse, trivial = torch.maximum(reverse, forward), tilt.trivial()
        for name, bound, equation in (
            ("kl_variance_bound", tilt.variance_bound(), "B.53"),
            ("kl_density_bound", tilt.density_bound(), "B.54"),
        ):
            check = self._check(name, PAPER, f"Proposition B.10, Eq. {equation}")
            check.add(bound, worse, trivial)
        cost = scores.shape[-2] * scores.shape[-1] * tilt.panels() * NODES
        count = min(reverse.numel(), self._left["quadrature"] // cost)
        if count <= 0:
            return
        self._left["quadrature"] -= count * cost
        scores, true, dual = (x.flatten(0, 1)[None, :count] for x in (scores, true, dual))
        integrals = Tilt(scores, true, dual, mass).integrals()
        for name, one, other, equation in (
            ("kl_identity_reverse", integrals[0], reverse, "B.51"),
            ("kl_identity_forward", integrals[1], forward, "B.52"),
        ):
            other = other.flatten()[None, :count]
            check = self._check(name, PAPER, f"Proposition B.10, Eq. {equation}")
            check.add_identity(one, other, _rounding(block))

    def _check(self, name: str, paper: str, place: str) -> _Check:
        return self._checks.setdefault(name, _Check(name, f"{paper}, {place}"))

    def _take(self, budget: str, entries: int) -> bool:
        """Whether there is some of a budget left, which may then be overdrawn once."""
        left = self._left[budget]
        self._left[budget] = left - entries
        return left > 0


def _active_blocks(keep: Tensor | None) -> Iterator[tuple[slice, Tensor | slice]]:
    """(examples, keys) of blocks without padding: the whole batch, or each example by itself."""
    if keep is None or bool(keep.all()):
        yield slice(None), slice(None)
        return
    for index in range(len(keep)):
        yield slice(index, index + 1), keep[index]


def _last_side(first: Side, closed: list[Duals]) -> Side:
    """The side of the last c-transform."""
    if len(closed) % 2 == 0:
        return first
    return "row" if first == "column" else "column"


def _moved(duals: Duals, exact: Duals) -> tuple[Tensor, Tensor]:
    """f^ - f and g^ - g; 0 for the one that is not known."""
    none = torch.zeros((), dtype=torch.float64)
    f = none if duals.f is None or exact.f is None else duals.f - exact.f
    g = none if duals.g is None or exact.g is None else duals.g - exact.g
    return f, g


def _rounding(block: Block) -> float:
    return ROUNDING * (1 + _largest(block.scores.abs()))


def _spread(values: Tensor) -> Tensor:
    """osc: largest minus smallest along the last axis."""
    return values.amax(-1) - values.amin(-1)


def _range(values: Tensor, active: Tensor) -> Tensor:
    """Largest minus smallest active entry of each [N, M] matrix; 0 where none is active."""
    largest = values.masked_fill(~active, -math.inf).flatten(-2).amax(-1)
    smallest = values.masked_fill(~active, math.inf).flatten(-2).amin(-1)
    return torch.where(active.flatten(-2).any(-1), largest - smallest, 0.0)


def _largest(values: Tensor) -> float:
    """0 for no values; a NaN is infinite."""
    found = float(values.max()) if values.numel() else 0.0
    return math.inf if math.isnan(found) else found
