"""What is proven of a site, and a numerical check of every proof on the site's own activations.

A certificate is a bound from a paper, evaluated in float64 for each example and head of the gate
split, next to the quantity it bounds, measured there. Bounds need the teacher's duals, which are
known offline only; one that does not hold would be a defect of asapc or of a proof.

Scores S and duals are in units of epsilon, absolute: P = exp(S + f + g). Only strictly positive blocks
are checked: all queries against the n active of M keys, no pair forbidden by a score bias. Every query
has mass 1/N and every active key 1/M, so a plan has mass 1 after a row c-transform and n/M after a column
c-transform; the papers' proofs need no more than that it is at most 1.

The plan closed from the predicted dual is compared with the one closed from the dual that it is fitted
to: the teacher's plan or, with `aim: last` and more than one c-transform, one that goes on beyond it, as
in ASAP. The bound on outputs is one on the distance from the teacher's all the same.

The papers predict the source dual and close columns first. Where the target dual is predicted, queries
and keys of a block are exchanged: what the papers say of columns then holds of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asapc.calibration.collect import pieces
from asapc.calibration.teacher import TeacherDuals
from asapc.features.clouds import shown_queries
from asapc.features.predictor import TransformPlan
from asapc.ir import Convention, SiteTensors
from asapc.operators.c_transforms import close_columns, close_rows

PAPER = "ASAP"
BLOCKWISE = "Block-wise differentiable Sinkhorn attention"

# What a check allows float64 sums over a block to be off: of a bound, relative above 1; of a divergence,
# per unit of the largest score.
TOLERANCE = 1e-9
ROUNDING = 1e-15

# Score entries of a site that are checked, so that a report stays quick; every bound that is a metric
# covers all examples, and `cases` says how many were checked.
PLAN_ENTRIES = 2**24
CONTRACTION_ENTRIES = 2**22
DIAMETER_ENTRIES = 2**28  # times the smaller of N and n, which is what a diameter takes
LATER = 20  # iterations that are run on, to see how far the loop still was from where it goes
POWER_STEPS = 4
NEAR, FAR = 1e-3, 4.0  # how far duals are moved to measure a contraction
DIAMETER_PIECE = 2**22  # entries of a block of differences between rows

Predict = Callable[[SiteTensors], Tensor]


def row_error_bound(g_plus: Tensor, g_0: Tensor) -> Tensor:
    """exp(max_j |g+_j - g0_j|) - 1 >= row_err of the plan closed on g+, per example and head: [B, H].

    g_0, g_plus: [B, H, M], the target duals before and after the row c-transform between them: after it
    every row has mass 1/N, and then the columns are rescaled.  Source: ASAP, Proposition B.7.
    """
    return torch.expm1((g_plus - g_0).abs().amax(-1))


def contraction_bound(scores: Tensor) -> Tensor:
    """tanh^2(range(S) / 2) >= Hilbert contraction of one iteration (two half-steps), [B, H].

    scores: [B, H, N, n] divided by epsilon, of active keys. Row and column offsets of S do not change the
    iteration, so the smaller of the ranges of S and of S centred over rows and columns is taken. By
    Birkhoff the contraction is tanh^2(Delta / 4) with Delta, the largest |S_ij + S_kl - S_il - S_kj|, at
    most 2 range(S); tanh^2(range / 4) would not be a bound.  1 where nothing is proven (range above
    about 38, or a bias that forbids a pair).  Source: Block-wise differentiable Sinkhorn attention,
    Proposition 4.
    """
    centred = scores - scores.mean(-1, keepdim=True)
    centred = centred - centred.mean(-2, keepdim=True)
    spread = torch.minimum(spread_of(scores.flatten(-2)), spread_of(centred.flatten(-2)))
    forbidden = scores.isneginf().flatten(-2).any(-1)
    return torch.tanh(spread / 2).square().masked_fill(forbidden, 1.0)


def exact_contraction(scores: Tensor) -> Tensor:
    """tanh^2(Delta / 4), the Hilbert contraction of an iteration of two half-steps: [B, H].

    scores: [B, H, N, M], finite; O(N^2 M) work.  Delta = max |S_ij + S_kl - S_il - S_kj|, the diameter of
    exp(S), is the largest osc_j(S_ij - S_kj) over pairs of rows.  1 where float64 cannot tell it from 1.
    Source: Block-wise differentiable Sinkhorn attention, Proposition 4 (Birkhoff and Hopf).
    """
    if scores.shape[-1] < scores.shape[-2]:
        scores = scores.transpose(-1, -2)
    diameter = scores.new_zeros(scores.shape[:2])
    rows, columns = scores.shape[-2:]
    step = max(1, DIAMETER_PIECE // max(1, diameter.numel() * rows * columns))
    for start in range(0, rows, step):
        part = scores[:, :, start : start + step, None] - scores[:, :, None, start:]
        diameter = torch.maximum(diameter, spread_of(part).flatten(2).amax(-1))
    return torch.tanh(diameter / 4).square()


def truncation_bound(contraction: Tensor, last_move: Tensor) -> Tensor:
    """rho / (1 - rho) osc(g_T - g_(T-1)) >= osc(g_t - g_T) for every later iteration t, [B, H].

    contraction: rho of one iteration; last_move: of the loop's last one. Every further iteration moves
    the dual by at most rho times the one before it; the sum over all of them is geometric.  Source:
    Block-wise differentiable Sinkhorn attention, Proposition 4, summed as in the proof of Theorem 1.
    """
    return torch.where(last_move > 0, contraction / (1 - contraction) * last_move, 0.0)


class Duals(NamedTuple):
    """f [B, H, N] and g [B, H, n]; before the first c-transform g is 0."""

    f: Tensor
    g: Tensor


@dataclass(frozen=True)
class Block:
    """Scores [B, H, N, n] without padding, and the mass of each point of a row and of a column."""

    scores: Tensor
    log_mu: float
    log_nu: float

    def flipped(self) -> Block:
        """Queries and keys exchanged."""
        return Block(self.scores.transpose(-1, -2), self.log_nu, self.log_mu)

    def closed(self, f: Tensor, c_transforms: int) -> list[Duals]:
        """The duals after 0, 1, ... c-transforms, the first one on columns, from a dual of the rows."""
        log_mu = self.scores.new_full(self.scores.shape[-2:-1], self.log_mu)
        log_nu = self.scores.new_full(self.scores.shape[-1:], self.log_nu)
        duals = [Duals(f, torch.zeros_like(self.scores.select(-2, 0)))]
        for step in range(c_transforms):
            f, g = duals[-1]
            if step % 2 == 0:
                g = close_columns(self.scores, f, log_nu)
            else:
                f = close_rows(self.scores, g, log_mu)
            duals.append(Duals(f, g))
        return duals

    def log_plan(self, duals: Duals) -> Tensor:
        return self.scores + duals.f[..., :, None] + duals.g[..., None, :]

    def positive(self) -> bool:
        """No pair is forbidden."""
        return bool(self.scores.isfinite().all())


def measured_contraction(block: Block, g: Tensor) -> Tensor:
    """The largest osc(Phi(g + d) - Phi(g)) / osc(d) found, Phi one iteration on the keys' dual: [B, H].

    A power iteration from a small random d finds the slowest mode around g; one large d looks further
    away. So this is at most the contraction that Proposition 4 bounds from above.
    """
    by_keys = block.flipped()
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(g.shape, generator=generator, dtype=torch.float64).to(g.device)
    image = by_keys.closed(g, 2)[-1].f
    worst = g.new_zeros(g.shape[:2])
    for size in (*[NEAR] * POWER_STEPS, FAR):
        spread, change = spread_of(change), change - change.mean(-1, keepdim=True)  # the gauge may be all
        scaled = change * torch.where(spread > 0, size / spread, 0.0)[..., None]
        change = by_keys.closed(g + scaled, 2)[-1].f - image
        worst = torch.maximum(worst, torch.where(spread > 0, spread_of(change) / size, 0.0))
    return worst


class Tilt(NamedTuple):
    """Two plans, each closed from a dual of one side: every column of one is the other's, tilted; [B, H].

    pi_j and pi^_j are the conditionals of a closed column j over the points i of the predicted side,
    Delta = f^ - f, and all that is summed is over the plans' mass.  Source: ASAP, Proposition B.10.
    """

    reverse: Tensor  # KL(P^ || P)
    forward: Tensor  # KL(P || P^)
    sharpness: Tensor  # beta, with pi_j,t(i) <= beta / X for all j, i and t
    residual: Tensor  # |Delta|^2 / X
    variance_bound: Tensor  # sum_j nu_j sigma_j^2 / 2, sigma_j = range(Delta) / 2 (Popoviciu; B.53)
    trivial: Tensor  # -sum_j nu_j log min pi_j, which no divergence of such columns exceeds

    @property
    def density_bound(self) -> Tensor:
        """beta / 2 |Delta|^2 / X (B.54)."""
        return self.sharpness / 2 * self.residual


def tilt(scores: Tensor, f: Tensor, f_hat: Tensor, log_weight: float) -> Tilt:
    """scores: [B, H, X, Y]; f, f_hat: [B, H, X]; log_weight: of each of the Y closed marginals."""
    log_pi, log_pi_hat = ((scores + dual[..., :, None]).log_softmax(-2) for dual in (f, f_hat))
    pi, pi_hat, ratio = log_pi.exp(), log_pi_hat.exp(), log_pi_hat - log_pi
    change = f_hat - f
    delta = change - change.mean(-1, keepdim=True)  # the gauge does not matter
    # log pi_t = log pi + t Delta - A(t) with A convex: A lies above its tangents at 0 and at 1, which
    # makes it at most linear in t, and so largest at one end.
    step = delta[..., :, None]
    mean, mean_hat = ((x * step).sum(-2, keepdim=True) for x in (pi, pi_hat))
    from_0 = torch.maximum(log_pi, log_pi + step - mean)
    from_1 = torch.maximum(log_pi_hat, log_pi_hat - step + mean_hat)
    weight, (count, columns) = math.exp(log_weight), scores.shape[-2:]
    return Tilt(
        reverse=weight * (pi_hat * ratio).sum((-2, -1)),
        forward=-weight * (pi * ratio).sum((-2, -1)),
        sharpness=torch.minimum(from_0, from_1).amax((-2, -1)).exp() * count,
        residual=weight * columns * delta.square().mean(-1),
        variance_bound=weight * columns * spread_of(delta).square() / 8,
        trivial=-weight * torch.minimum(log_pi.amin(-2), log_pi_hat.amin(-2)).sum(-1),
    )


def spread_of(values: Tensor, active: Tensor | None = None) -> Tensor:
    """osc: largest minus smallest active entry along the last axis; 0 where none is active."""
    if active is None:
        return values.amax(-1) - values.amin(-1)
    high = values.masked_fill(~active, -math.inf).amax(-1)
    low = values.masked_fill(~active, math.inf).amin(-1)
    return torch.where(active.any(-1), high - low, 0.0)


def largest(values: Tensor) -> float:
    """0 for no values; a NaN is infinite."""
    most = float(values.max()) if values.numel() else 0.0
    return math.inf if math.isnan(most) else most


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

    def add(self, bound: Tensor, measured: Tensor, trivial: Tensor | float = math.inf) -> None:
        """measured <= bound in every case; trivial: what measured can never exceed."""
        # Not the opposite comparison: NaN holds nothing.
        within = measured <= bound + TOLERANCE * bound.clamp(min=1.0)
        self.holds = self.holds and bool(within.all())
        self.vacuous_cases += int((~(bound < trivial)).sum())
        self.bound = max(self.bound, largest(bound))
        self.measured = max(self.measured, largest(measured))
        self.cases += bound.numel()

    def result(self) -> dict[str, Any]:
        """bound and measured are the largest of all cases; holds was checked case by case.

        vacuous: in some case the bound says no more than what is always so; vacuous_cases counts them.
        """
        return {**asdict(self), "vacuous": self.vacuous_cases > 0}


@dataclass(eq=False)
class SiteCertificates:
    """Streams a Sinkhorn site's activations through every bound that is proven for it.

    plan: of its c-transforms, None if the loop was kept or replaced by another operator.
    source, key: predict its duals in score coordinates, see program.calls.predicted_duals.
    """

    convention: Convention
    plan: TransformPlan | None = None
    source: Predict | None = None
    key: Predict | None = None

    def __post_init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._checks: dict[str, _Check] = {}
        self._tilts: list[tuple[Tensor, ...]] = []  # sharpness, residual, divergence, its trivial bound
        self._left = {"plans": PLAN_ENTRIES, "contraction": CONTRACTION_ENTRIES,
                      "diameter": DIAMETER_ENTRIES}  # fmt: skip

    def update(self, tensors: SiteTensors) -> None:
        """Add one batch. Examples without an active key are left out."""
        with torch.no_grad():
            for piece in pieces(tensors):
                self.add(TeacherDuals(piece, self.convention))

    def metrics(self) -> dict[str, float]:
        """The largest bounds of the site over all its examples, see asapc.metrics."""
        mean = {"divergence_bound": largest(self._mean_divergence()[0])} if self._tilts else {}
        return {**self._largest, **mean}

    def result(self) -> list[dict[str, Any]]:
        checks = [check.result() for check in self._checks.values()]
        if self._tilts:
            mean = _Check("divergence_bound", f"{PAPER}, Proposition B.12, Eq. B.70")
            mean.add(*self._mean_divergence())
            checks.append({**mean.result(), "cases": sum(len(tilt[0]) for tilt in self._tilts)})
        return checks

    def _mean_divergence(self) -> tuple[Tensor, Tensor, Tensor]:
        """Proposition B.12: the mean divergence KL(P^ || P) of one c-transform, by the mean residual of
        the fit and the sharpest column of all cases; and what it never exceeds.

        B.13 and B.14 put an expectation over slices in place of the residual, with constants of the
        teacher that nobody knows: the residual itself is smaller.
        """
        sharpness, *cases = (torch.cat(parts) for parts in zip(*self._tilts, strict=True))
        residual, divergence, trivial = (x.mean(0, keepdim=True) for x in cases)
        return (sharpness.amax() / 2 * residual).nan_to_num(math.inf, math.inf), divergence, trivial

    def add(self, teacher: TeacherDuals) -> None:
        """Add a few examples, with the teacher's duals on them."""
        t, half_steps = teacher.tensors, self.convention.half_steps
        log_mu, log_nu = (-math.log(count) for count in teacher.scores.shape[-2:])
        (f, g), (_, before) = (teacher.after(max(0, steps)) for steps in (half_steps, half_steps - 2))
        duals = self._duals(teacher)
        every, keeps = slice(None), (shown_queries(t.bias), t.keep)
        blocks: list[tuple[slice, Any, Any]] = [(every, every, every)]
        if not all(x is None or x.all() for x in keeps):  # without padding there is one, else by example
            both = [repeat(every) if x is None else x.expand(len(t.q), -1) for x in keeps]
            one = (slice(example, example + 1) for example in range(len(t.q)))
            blocks = [*zip(one, *both, strict=False)]
        for rows, queries, keys in blocks:
            block = Block(teacher.scores[rows][..., queries, :][..., keys], log_mu, log_nu)
            if block.scores.numel() == 0:
                continue  # no active query, or no active key
            end = Duals(f[rows][..., queries], g[rows][..., keys])
            self._loop(block, end.g, before[rows][..., keys])
            if duals is None:
                continue
            points = keys if self._flipped else queries
            dual, true = (dual[rows][..., points] for dual in duals)
            v = None if t.v is None else t.v.double()[rows][..., keys, :]
            if self._flipped:
                block, end = block.flipped(), Duals(end.g, end.f)
            self._closed(block, dual, true, v, end)

    @property
    def _flipped(self) -> bool:
        """Whether the keys' dual is predicted: then blocks have the keys in their rows."""
        return self.plan is not None and self.plan.side != "source"

    def _duals(self, teacher: TeacherDuals) -> tuple[Tensor, Tensor] | None:
        """The dual from which c-transforms start, predicted and the teacher's; None if there is none, and
        then nothing more is proven.

        dual_stability: exp(2 alpha) with alpha = min_c max_i |f^_i - f_i - c| over the points that carry
        mass. Every entry of the plan closed from f^ is within this factor of the one closed from f, after
        any number of c-transforms (ASAP, B.8 and B.9, whatever the gauge).
        """
        if self.plan is None:
            return None
        t, true = teacher.tensors, teacher.after(self.plan.half_steps)
        predicted = [None if p is None else p(t).double() for p in (self.source, self.key)]
        for dual, its, keep in zip(predicted, true, (shown_queries(t.bias), t.keep), strict=True):
            if dual is not None:
                active = None if keep is None else keep[:, None, :]
                self._extend("dual_stability", torch.exp(spread_of(dual - its, active)))
        start, its = predicted[self._flipped], true[self._flipped]
        return None if start is None or self.plan.c_transforms == 0 else (start, its)

    def _loop(self, block: Block, g: Tensor, before: Tensor) -> None:
        """Proposition 4 on the loop that ends in g, an iteration after `before`."""
        contraction = self._contraction(block, contraction_bound(block.scores))
        self._extend("contraction_bound", contraction)
        # Whether the last iteration started from a dual of the keys that an iteration may start from.
        converges = self.convention.half_steps >= (2 if self.convention.first_side == "row" else 3)
        truncated = truncation_bound(contraction, spread_of(g - before))
        if converges:
            self._extend("truncation_bound", truncated)
        if not block.positive() or not self._take("contraction", block.scores.numel()):
            return
        measured = measured_contraction(block, g)
        self._check("contraction_bound", BLOCKWISE, "4").add(contraction, measured, 1 - TOLERANCE)
        if converges:
            later = block.flipped().closed(g, 2 * LATER)[2::2]
            moved = torch.stack([spread_of(duals.f - g) for duals in later]).amax(0)
            self._check("truncation_bound", BLOCKWISE, "4 and Theorem 1").add(truncated, moved)

    def _contraction(self, block: Block, bound: Tensor) -> Tensor:
        """The exact contraction if it may be the site's largest and is affordable, else its bound."""
        entries = block.scores.numel() * min(block.scores.shape[-2:])
        settled = largest(bound) <= self._largest.get("contraction_bound", 0.0)
        if not block.positive() or settled or not self._take("diameter", entries):
            return bound
        return torch.minimum(bound, exact_contraction(block.scores))

    def _closed(self, block: Block, dual: Tensor, true: Tensor, v: Tensor | None, end: Duals) -> None:
        """Compare the plans closed from the predicted dual of a block's rows and from the true one.

        v: [B, H, n, E], if the values are known.  end: the teacher's, beyond which closing `true` may go.
        """
        assert self.plan is not None
        # The metric is the paper's: a source dual and three c-transforms.
        of_paper = not self._flipped and self.plan.c_transforms == 3
        compared = block.positive() and self._take("plans", block.scores.numel())
        if not compared and not of_paper:
            return
        closed = block.closed(dual, self.plan.c_transforms)
        if of_paper:
            self._extend("row_bound", row_error_bound(closed[-1].g, closed[-2].g))
        if not compared:
            return
        exact = block.closed(true, self.plan.c_transforms)
        alpha = self._stability(block, closed, exact)
        self._divergence(block, dual, true)
        columns_last = len(closed) % 2 == 0  # of the block; the other marginal is free
        axis, mass = (-1, block.log_mu) if columns_last else (-2, block.log_nu)
        free = "row" if columns_last != self._flipped else "column"
        plan, its = (block.log_plan(duals[-1]) for duals in (closed, exact))
        error, others = ((x.exp().sum(axis) - math.exp(mass)).abs().sum(-1) for x in (plan, its))
        if free == "row" and len(closed) > 2:
            # B.7: a row c-transform, then a column c-transform, whatever came before. Rows of two plans
            # of mass at most 1 are never further apart than 2.
            after, before = (duals.g if columns_last else duals.f for duals in closed[:-3:-1])
            self._check("row_bound", PAPER, "B.7").add(row_error_bound(after, before), error, 2.0)
        plans = [plan, its, block.log_plan(end) if self.plan.aim == "last" else its]
        self._output([x.mT for x in plans] if self._flipped else plans, alpha, v)
        # B.15: two plans of one mass of at most 1 are at most sqrt(2 KL) apart in L1 (Pinsker).
        divergence = (plan.exp() * (plan - its)).sum((-2, -1)).clamp(min=0.0)
        rounding = ROUNDING * (1 + largest(block.scores.abs()))
        bound = others + torch.sqrt(2 * (divergence + rounding))
        self._check(f"{free}_error_kl_bound", PAPER, "B.15, Eq. B.92").add(bound, error, 2.0)

    def _stability(self, block: Block, closed: list[Duals], exact: list[Duals]) -> Tensor:
        """Propositions B.8 (one c-transform) and B.9 (more), for the best shift of the predicted dual,
        whose distance it returns: [B, H]."""
        number = "B.8" if len(closed) == 2 else "B.9"
        moves = [Duals(mine.f - its.f, mine.g - its.g) for mine, its in zip(closed, exact, strict=True)]
        low, high = moves[0].f.amin(-1), moves[0].f.amax(-1)
        alpha, centre = (high - low) / 2, (high + low)[..., None] / 2
        moved = torch.zeros_like(alpha)
        for step, (f, g) in enumerate(moves[1:]):  # the one just closed; the gauge is f - c, g + c
            shifted = g + centre if step % 2 == 0 else f - centre
            moved = torch.maximum(moved, shifted.abs().amax(-1))
        self._check("dual_shift", PAPER, number).add(alpha, moved)
        # log P^_ij - log P_ij = (f^ - f)_i + (g^ - g)_j: the scores cancel.
        f, g = moves[-1]
        highest, lowest = f.amax(-1) + g.amax(-1), f.amin(-1) + g.amin(-1)
        # No entry of P^ exceeds the mass of its closed column, nor its ratio to P that mass over P's.
        mass = block.log_nu if len(closed) % 2 == 0 else block.log_mu
        trivial = torch.exp(mass - block.log_plan(exact[-1]).amin((-2, -1)))
        ratio = torch.exp(torch.maximum(highest, -lowest))
        self._check("dual_stability", PAPER, number).add(torch.exp(2 * alpha), ratio, trivial)
        return alpha

    def _output(self, log_plans: list[Tensor], alpha: Tensor, v: Tensor | None) -> None:
        """Proposition B.16, Eq. B.97: (exp(2 alpha) - 1) r_i >= |y^_i - y_i| / max_j |v_j|, with r_i the
        rows of the plan closed from the teacher's dual; the rows' gaps in L1 where values are not known.

        log_plans: from the predicted dual, from the teacher's and of the teacher itself, whose distance
        from the second one is added.
        """
        plan, closed, teacher = (x.exp() * x.shape[-2] for x in log_plans)
        bound = torch.expm1(2 * alpha) * closed.sum(-1).amax(-1)
        bound = bound + (closed - teacher).abs().sum(-1).amax(-1)
        measured = (plan - teacher).abs().sum(-1).amax(-1)
        if v is not None and v.shape[-1]:
            longest = v.norm(dim=-1).amax(-1)
            error = ((plan - teacher) @ v).norm(dim=-1).amax(-1)
            measured = torch.where(longest > 0, error / longest, 0.0)
        trivial = (plan.sum(-1) + teacher.sum(-1)).amax(-1)
        self._check("output_bound", PAPER, "B.16, Eq. B.97").add(bound, measured, trivial)
        self._extend("output_bound", bound)

    def _divergence(self, block: Block, dual: Tensor, true: Tensor) -> None:
        """Proposition B.10 on the plans of one c-transform."""
        of = tilt(block.scores, true, dual, block.log_nu)
        kl = torch.maximum(of.reverse, of.forward)
        cases = (of.sharpness, of.residual, of.reverse, of.trivial)
        self._tilts.append(tuple(x.flatten() for x in cases))
        self._check("kl_variance_bound", PAPER, "B.10, Eq. B.53").add(of.variance_bound, kl, of.trivial)
        self._check("kl_density_bound", PAPER, "B.10, Eq. B.54").add(of.density_bound, kl, of.trivial)

    def _extend(self, metric: str, bound: Tensor) -> None:
        self._largest[metric] = max(self._largest.get(metric, 0.0), largest(bound))

    def _check(self, name: str, paper: str, number: str) -> _Check:
        return self._checks.setdefault(name, _Check(name, f"{paper}, Proposition {number}"))

    def _take(self, budget: str, entries: int) -> bool:
        """Whether any of a budget is left; the last one to take may overdraw it."""
        left = self._left[budget]
        self._left[budget] = left - entries
        return left > 0
