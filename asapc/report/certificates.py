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

import torch
from torch import Tensor

from asapc.calibration.collect import pieces
from asapc.calibration.teacher import TeacherDuals
from asapc.features.predictor import TransformPlan
from asapc.ir import Convention, Side, SiteTensors
from asapc.report.bounds import (
    NODES,
    Block,
    Duals,
    Tilt,
    contraction_bound,
    contraction_of,
    dual_stability_factor,
    largest,
    measured_contraction,
    output_bound,
    pinsker,
    projective_diameter,
    row_error_bound,
    spread_of,
    truncation_bound,
)

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
DIAMETER_ENTRIES = 2**28  # times the smaller of N and n, which is what a diameter takes
LATER = 20  # iterations that are run on, to see how far the loop still was from where it goes
QUADRATURE_ENTRIES = 2**24  # times nodes

Predict = Callable[[SiteTensors], Tensor]


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
        self.residual = max(self.residual or 0.0, largest(residual))
        self._extend(one, other)

    def _extend(self, bound: Tensor, measured: Tensor) -> None:
        self.bound = max(self.bound, largest(bound))
        self.measured = max(self.measured, largest(measured))
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


@dataclass
class _Mean:
    """Proposition B.12: the mean divergence KL(P^ || P) of one c-transform, by the mean residual of the
    fit and the sharpest column of all cases."""

    sharpness: float = 0.0
    residual: float = 0.0
    divergence: float = 0.0
    trivial: float = 0.0
    cases: int = 0

    def add(self, tilt: Tilt, reverse: Tensor, trivial: Tensor) -> None:
        self.sharpness = max(self.sharpness, largest(tilt.sharpness()))
        self.residual += float(tilt.residual().sum())
        self.divergence += float(reverse.sum())
        self.trivial += float(trivial.sum())
        self.cases += reverse.numel()

    @property
    def bound(self) -> float:
        """Eq. B.70.  Propositions B.13 and B.14 put an expectation over slices in place of the residual,
        with constants of the teacher that nobody knows: the residual itself is smaller."""
        found = self.sharpness / 2 * self.residual / self.cases
        return math.inf if math.isnan(found) else found

    def result(self) -> dict[str, Any]:
        check = _Check("divergence_bound", f"{PAPER}, Proposition B.12, Eq. B.70")
        bound, measured, trivial = (
            torch.tensor([x], dtype=torch.float64)
            for x in (self.bound, self.divergence / self.cases, self.trivial / self.cases)
        )
        check.add(bound, measured, trivial)
        check.cases = self.cases
        return check.result()


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
        self.contraction = self.stability = self.row_bound = self.truncation = self.output = 0.0
        self.divergence = _Mean()
        self._checks: dict[str, _Check] = {}
        self._left = {
            "plans": PLAN_ENTRIES,
            "contraction": CONTRACTION_ENTRIES,
            "diameter": DIAMETER_ENTRIES,
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
        if self._converges():
            found["truncation_bound"] = self.truncation
        if self.plan is not None:
            found["dual_stability"] = self.stability
            if self._has_row_bound():
                found["row_bound"] = self.row_bound
            if "output_bound" in self._checks:
                found["output_bound"] = self.output
            if self.divergence.cases:
                found["divergence_bound"] = self.divergence.bound
        return found

    def result(self) -> list[dict[str, Any]]:
        checks = [check.result() for check in self._checks.values()]
        return [*checks, self.divergence.result()] if self.divergence.cases else checks

    def _converges(self) -> bool:
        """The loop's last iteration started from a dual of the keys that an iteration may start from."""
        return self.convention.half_steps >= (2 if self.convention.first_side == "row" else 3)

    def _has_row_bound(self) -> bool:
        """The metric is the paper's: a source dual and three c-transforms."""
        return self.plan is not None and self.plan.side == "source" and self.plan.c_transforms == 3

    def add(self, teacher: TeacherDuals) -> None:
        """Add a few examples, all of which have an active key, with the teacher's duals on them."""
        t = teacher.tensors
        predicted = [None if p is None else p(t).double() for p in (self.source, self.key)]
        bound = contraction_bound(teacher.scores, t.keep)
        if self.plan is not None:
            start = teacher.after(self.plan.half_steps)
            for dual, true, keep in zip(predicted, start, (None, t.keep), strict=True):
                if dual is not None:
                    factor = dual_stability_factor(dual, true, keep)
                    self.stability = max(self.stability, largest(factor))
        num_queries, num_keys = teacher.scores.shape[-2:]
        masses = -math.log(num_queries), -math.log(num_keys)
        for rows, keys in _active_blocks(t.keep):
            block = Block(teacher.scores[rows][..., keys], *masses)
            contraction = self._contraction(block, bound[rows])
            self.contraction = max(self.contraction, largest(contraction))
            g, before = (
                teacher.after(max(0, half_steps))[1][rows][..., keys]
                for half_steps in (self.convention.half_steps, self.convention.half_steps - 2)
            )
            truncated = truncation_bound(contraction, spread_of(g - before))
            if self._converges():
                self.truncation = max(self.truncation, largest(truncated))
            if block.positive() and self._take("contraction", block.scores.numel()):
                check = self._check("contraction_bound", BLOCKWISE, "Proposition 4")
                check.add(contraction, measured_contraction(block, g), 1 - TOLERANCE)
                if self._converges():
                    check = self._check("truncation_bound", BLOCKWISE, "Proposition 4 and Theorem 1")
                    check.add(truncated, _later_move(block, g), math.inf)
            if self.plan is None or self.plan.c_transforms == 0:
                continue  # without a c-transform nothing more is proven
            index = 0 if self.plan.side == "source" else 1
            dual, true = predicted[index], teacher.after(self.plan.half_steps)[index]
            assert dual is not None
            dual, true = dual[rows], true[rows]
            if index == 1:
                dual, true = dual[..., keys], true[..., keys]
            v = None if t.v is None else t.v.double()[rows][..., keys, :]
            self._certify(block, dual, true, v)

    def _contraction(self, block: Block, bound: Tensor) -> Tensor:
        """The exact one where it may be the site's largest and can be afforded, the bound elsewhere."""
        queries, keys = block.scores.shape[-2:]
        entries = block.scores.numel() * min(queries, keys)
        if not block.positive() or largest(bound) <= self.contraction:
            return bound
        if not self._take("diameter", entries):
            return bound
        return torch.minimum(bound, contraction_of(projective_diameter(block.scores)))

    def _certify(self, block: Block, dual: Tensor, true: Tensor, v: Tensor | None) -> None:
        """dual, true: the predicted dual of a block and the teacher's; v: [B, H, n, E], if known."""
        assert self.plan is not None
        side: Side = "column" if self.plan.side == "source" else "row"
        compared = block.positive() and self._take("plans", block.scores.numel())
        if not compared and not self._has_row_bound():
            return
        closed = block.closed(dual, side, self.plan.c_transforms)
        if self._has_row_bound():
            g_plus, g_0 = closed[-1].g, closed[-2].g
            assert g_plus is not None and g_0 is not None
            self.row_bound = max(self.row_bound, largest(row_error_bound(g_plus, g_0)))
        if not compared:
            return
        exact = block.closed(true, side, self.plan.c_transforms)
        self._row_error(block, closed, side)
        alpha = self._stability(block, closed, exact, side)
        self._output(block, closed[-1], exact[-1], alpha, v)
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

    def _stability(
        self, block: Block, closed: list[Duals], exact: list[Duals], side: Side
    ) -> Tensor:
        """Propositions B.8 (one c-transform) and B.9 (more), for the best shift of the predicted dual,
        whose distance it returns: [B, H]."""
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
        highest, lowest = f.amax(-1) + g.amax(-1), f.amin(-1) + g.amin(-1)
        # No entry of P^ exceeds the mass of its closed column, nor its ratio to P that mass over P's.
        mass = block.log_nu if _last_side(side, closed) == "column" else block.log_mu
        trivial = torch.exp(mass - block.log_plan(exact[-1]).amin((-2, -1)))
        check = self._check("dual_stability", PAPER, f"Proposition {number}")
        check.add(torch.exp(2 * alpha), torch.exp(torch.maximum(highest, -lowest)), trivial)
        return alpha

    def _output(
        self, block: Block, duals: Duals, exact: Duals, alpha: Tensor, v: Tensor | None
    ) -> None:
        """Proposition B.16, over the longest value; the rows' gaps in L1 where values are not known."""
        queries = block.scores.shape[-2]
        plan, teacher = (block.log_plan(d).exp() * queries for d in (duals, exact))
        bound = output_bound(alpha, teacher.sum(-1))
        gap = (plan - teacher).abs().sum(-1).amax(-1)
        measured = gap
        if v is not None and v.shape[-1]:
            longest = v.norm(dim=-1).amax(-1)
            error = ((plan - teacher) @ v).norm(dim=-1).amax(-1)
            measured = torch.where(longest > 0, error / longest, 0.0)
        trivial = (plan.sum(-1) + teacher.sum(-1)).amax(-1)
        check = self._check("output_bound", PAPER, "Proposition B.16, Eq. B.97")
        check.add(bound, measured, trivial, gap)
        self.output = max(self.output, largest(bound))

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
        self.divergence.add(tilt, reverse, trivial)
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


def _later_move(block: Block, g: Tensor) -> Tensor:
    """The largest osc(g_t - g) over the iterations after the loop's last one: [B, H]."""
    later = block.closed(g, "row", 2 * LATER)[2::2]
    found = g.new_zeros(g.shape[:2])
    for duals in later:
        assert duals.g is not None
        found = torch.maximum(found, spread_of(duals.g - g))
    return found


def _rounding(block: Block) -> float:
    return ROUNDING * (1 + largest(block.scores.abs()))


