"""Which finite loop turns these scores into this plan, with marginals that may be given?

Uniform marginals are sinkhorn.probe's: the plan of 1/N and 1/M is that of any other constants, up to a
factor. Others have the loop run with them. Of an unbalanced loop

    f = d_r (log mu - logsumexp_j(S + g)),    g = d_c (log nu - logsumexp_i(S + f))

the dampings d are found. After a half-step on rows, r_i = logsumexp_j(log P_ij), which is
f_i + logsumexp_j(S_ij + g_j), so that

    f = d_r (log mu - r + f),    or f = log mu - d_r (r - f) where mu stands outside,

up to a number. The duals are known from log P - S up to numbers, so the damping of the side that comes
last is the slope of a line. That of the other side is the same, or none, or is searched for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import scipy  # its packages load where they are used first, not with every command
import torch
from torch import Tensor

from asapc.ir import Marginal, OutputFactor, PlanConvention, Side, Stabiliser
from asapc.operators.plan import plan, settings_of
from asapc.passes.experiment import EXACT, STABILISED, NoFit, relative_error
from asapc.passes.sinkhorn.probe import (
    BEYOND,
    HELD,
    MAX_HALF_STEPS,
    NO_GUESS,
    Budget,
    Fit,
    Guesses,
    Pair,
    Plans,
    Sample,
    budget_of,
    factor_of,
    identify,
    loop_plans,
    mild_ones,
    score_multiplier,
    search_budget,
    with_rival,
)

SEARCHED = 24  # half-steps of the longest loop in which the damping of the other side is searched for
LEAST, STRAIGHT = 1e-3, 1e-6  # the smallest damping; how far from a line the duals may be
CONVERGED = 1e-7  # what is left of the start after a loop that no scores tell from a longer one


def identify_plan(
    samples: Sequence[Sample], guesses: Guesses = NO_GUESS, most: int = MAX_HALF_STEPS,
    sums: int = 0,
) -> Fit[PlanConvention] | NoFit:  # fmt: skip
    """The convention that reproduces everything, or why none does; the mildest scores come first.

    sums: of the loop where an unbalanced one is looked for if no balanced one is found, 0 where not.
    """
    if _has_marginals(samples):
        return _with_marginals(samples, guesses, most, sums)
    found = identify(samples, guesses=guesses)
    if isinstance(found, NoFit):
        return (_damped(samples, sums, guesses) if sums else None) or found
    first, rival = (
        None if loop is None else PlanConvention(
            loop.half_steps, loop.first_side, loop.score_multiplier, loop.output_factor,
            stabiliser=loop.stabiliser,
        )
        for loop in (found.convention, found.rival)
    )  # fmt: skip
    assert first is not None
    return Fit(first, found.error, rival)


def _with_marginals(
    samples: Sequence[Sample], guesses: Guesses, most: int, sums: int
) -> Fit[PlanConvention] | NoFit:
    mild, mildest = mild_ones(samples)
    multiplier = score_multiplier(mild)
    if isinstance(multiplier, NoFit):
        return multiplier
    found = budget_of(samples, multiplier, guesses=guesses, most=most)
    if isinstance(found, NoFit):
        return (_damped(samples, sums, guesses) if sums else None) or found
    budget, stabiliser = found
    convention = _of_budget(budget, multiplier, samples, stabiliser=stabiliser)
    # factor_of takes N times a row's mass of a uniform plan: 1 is N there, and the plan itself here.
    factor = factor_of([(n, m, float(m), mass) for n, m, mass in _masses(convention, mildest)])
    if isinstance(factor, NoFit):
        return factor
    convention = replace(convention, output_factor=factor)
    error = plan_error(convention, samples)
    if not error <= HELD:
        return NoFit("one head or example runs this loop and another does not", error)
    return with_rival(Fit(convention, error), budget)


def _damped(samples: Sequence[Sample], sums: int, guesses: Guesses) -> Fit[PlanConvention] | None:
    """The unbalanced loop that reproduces everything, None if there is none."""
    mild, mildest = mild_ones(samples)
    multiplier = score_multiplier(mild)
    given = [x for sample in samples for x in sample.marginals if x is not None]
    if isinstance(multiplier, NoFit) or not all(bool(x.isfinite().all()) for x in given):
        return None
    heads = [sample.head() for sample in mildest]
    found = identify_damping([replace(head, scores=multiplier * head.scores) for head in heads], sums)
    if found is None or not found.budget.error <= (STABILISED if guesses.constants else EXACT):
        return None
    budget = found.budget
    convention = _of_budget(budget, multiplier, samples, damping=found.damping)
    samples, heads = ([x.powered(found.powers) for x in of] for of in (samples, heads))
    longer = [convention]
    if budget.rival is not None:
        if not converged(found.damping, budget.half_steps):
            return None
        later = range(budget.half_steps + 2, budget.half_steps + BEYOND, 2)
        longer += [replace(convention, half_steps=half_steps) for half_steps in later]
    stabilisers: list[Stabiliser | None] = [None] if found.budget.error <= EXACT else []
    stabilisers += [x for x in guesses.stabilisers() if (x.form, x.start) == ("scaling", "plain")]
    fits = []
    for one, stabiliser in itertools.product(longer, stabilisers):
        one = replace(one, stabiliser=stabiliser)
        uniform = (one.source_marginal == "uniform", one.target_marginal == "uniform")
        masses = _masses(one, heads)
        factor: OutputFactor | NoFit | None = factor_of([(n, m, float(m), mass) for n, m, mass in masses])
        if stabiliser is None:
            factor = damped_factor(masses, found.damping, one.first_side, one.half_steps, uniform)
        if isinstance(factor, OutputFactor):
            one = replace(one, output_factor=factor)
            fits.append(Fit(one, plan_error(one, samples), powers=found.powers))
    best = min(fits, key=lambda fit: fit.error, default=None)
    return best if best is not None and best.error <= HELD else None


def _masses(convention: PlanConvention, samples: Sequence[Sample]) -> list[tuple[int, int, float]]:
    """(N, M, the mass of the map over that of the convention's plan)."""
    pairs = ((sample, plan_of(convention, sample)) for sample in samples)
    return [(*x.scores.shape[-2:], float(x.attention.sum() / ours.sum())) for x, ours in pairs]


def _of_budget(
    budget: Budget, multiplier: float, samples: Sequence[Sample], **settings: Any
) -> PlanConvention:
    kinds: list[Marginal] = [
        "uniform" if all(x is None for x in logs) else "input"
        for logs in zip(*(sample.marginals for sample in samples), strict=True)
    ]
    return PlanConvention(
        budget.half_steps, budget.first_side, multiplier, source_marginal=kinds[0],
        target_marginal=kinds[1], **settings,
    )  # fmt: skip


def plan_of(convention: PlanConvention, sample: Sample) -> Tensor:
    """The plan that the convention computes from what was observed to go in, [B, H, N, M]."""
    settings = settings_of(convention) | {"log": False}
    return plan(sample.scores, *sample.marginals, **settings)


def plan_error(convention: PlanConvention, samples: Sequence[Sample]) -> float:
    """Largest error over everything, relative to each plan's largest entry; infinite where it is NaN."""
    pairs = ((plan_of(convention, sample), sample.attention) for sample in samples)
    return max((relative_error(*pair) for pair in pairs), default=0.0)


# Unbalanced loops


@dataclass(frozen=True)
class Damped:
    """powers: of marginals that are given, for the operator; 1 / damping where they stand outside."""

    damping: Pair
    powers: Pair
    budget: Budget


def identify_damping(samples: Sequence[Sample], sums: int) -> Damped | None:
    """The unbalanced loop that comes nearest, None if no damping explains the side that comes last.

    samples: of one head, [1, 1, N, M], with scores in units of epsilon.
    sums: how many over rows and columns the loop has, which is about how many half-steps.
    """
    best: Damped | None = None
    sides: tuple[Side, ...] = ("row", "column")
    for last, outside in itertools.product(sides, (False, True) if _has_marginals(samples) else (False,)):
        points = [_line(sample, last, outside) for sample in samples]
        damping = _slope(torch.cat([x for x, _ in points]), torch.cat([y for _, y in points]))
        for found in () if damping is None else _tried(samples, last, damping, outside, sums):
            if best is None or found.budget.error < best.budget.error:
                best = found
            if best.budget.error <= EXACT:
                return best
    return best


def _has_marginals(samples: Sequence[Sample]) -> bool:
    return any(x is not None for sample in samples for x in sample.marginals)


def _line(sample: Sample, last: Side, outside: bool) -> tuple[Tensor, Tensor]:
    """Points on a line through 0 whose slope is the damping of the side that comes last."""
    logs = sample.attention.log()
    duals = logs - sample.scores
    axis, given = (-1, sample.log_mu) if last == "row" else (-2, sample.log_nu)
    other = torch.logsumexp(logs, -3 - axis, keepdim=True).isfinite()
    dual = duals.masked_fill(~other, 0.0).sum(axis) / other.sum(axis)
    through = dual - torch.logsumexp(logs, axis)
    if given is not None and outside:
        dual = dual - given
    elif given is not None:
        through = through + given
    shown = through.isfinite() & dual.isfinite()
    x, y = through[shown], dual[shown]
    return x - x.mean(), y - y.mean()


def _slope(x: Tensor, y: Tensor) -> float | None:
    """None where the points lie on no line, or on one that is no damping's."""
    if not len(x):
        return None
    slope = float((x * y).sum() / x.square().sum())
    straight = float((y - slope * x).abs().max()) <= STRAIGHT * float(y.abs().max())
    return slope if straight and LEAST <= slope <= 1 + STRAIGHT else None


def _tried(
    samples: Sequence[Sample], last: Side, damping: float, outside: bool, sums: int
) -> Iterator[Damped]:
    """Loops whose last side is damped so, with each damping that the other may have."""
    given = _has_marginals(samples)
    plans = [sample.attention for sample in samples]

    def with_other(other: float) -> tuple[Pair, Pair]:
        both = (damping, other) if last == "row" else (other, damping)
        return both, (1 / both[0], 1 / both[1]) if outside and given else (1.0, 1.0)

    def loop(sample: Sample, other: float) -> Plans:
        both, powers = with_other(other)
        return loop_plans(sample.powered(powers), both)

    for other in dict.fromkeys((damping, 1.0)):
        loops = [loop(sample, other) for sample in samples]
        yield Damped(*with_other(other), search_budget(plans, loops, (last,), sums + BEYOND))
    for half_steps in range(max(sums - 1, 2), min(sums + 1, SEARCHED) + 1):
        first = _from(last)[(half_steps - 1) % 2]

        def missed(
            x: Any, given: Sequence[Sample] = samples[:1], first: Side = first, at: int = half_steps - 1
        ) -> Any:
            ours = [next(itertools.islice(loop(one, float(x[0]))(first), at, None)) for one in given]
            return torch.cat([
                (plan / plan.sum() - one.attention / one.attention.sum()).flatten()
                for plan, one in zip(ours, given, strict=True)
            ]).numpy()  # fmt: skip

        # Searched for on one observation, and held against the others where it explains that.
        found = scipy.optimize.least_squares(
            missed, [0.5], bounds=([LEAST], [1.0]), xtol=1e-15, ftol=1e-15, gtol=1e-15
        )
        left = found.fun if abs(found.fun).max() > STRAIGHT else missed(found.x, samples)
        error = float(abs(left).max() / max(float((plan / plan.sum()).max()) for plan in plans))
        yield Damped(*with_other(float(found.x[0])), Budget(first, half_steps, error))


def _from(first: Side) -> tuple[Side, Side]:
    """Both sides in the order of a loop."""
    return ("row", "column") if first == "row" else ("column", "row")


def converged(damping: Pair, half_steps: int) -> bool:
    """Whether longer loops give the same: two half-steps bring any two duals nearer by both dampings."""
    return (damping[0] * damping[1]) ** (half_steps // 2) <= CONVERGED


def damped_factor(
    observed: Sequence[tuple[int, int, float]], damping: Pair, first: Side, half_steps: int,
    uniform: tuple[bool, bool],
) -> OutputFactor | None:  # fmt: skip
    """The factor of an unbalanced loop.  observed: (N, M, the teacher's mass over ours).

    Our uniform marginals are 1/N and 1/M inside the damped logarithms, and our loop starts from scalings
    of 1. The teacher's marginals may be 1, or stand outside, and its scalings start at 1/N and 1/M: each
    changes every dual by a number, and so the plan by powers of N and M.  None where its mass depends on
    the batch in another way.
    """
    choices = [
        (0.0, damped, damped - 1) if alike else (0.0,)
        for damped, alike in zip(damping, uniform, strict=True)
    ]
    for start, row, column in itertools.product((0.0, -1.0), *choices):
        shifts = {"row": (start, 0.0), "column": (0.0, start)}  # of a dual, in units of (log N, log M)
        for side in itertools.islice(itertools.cycle(_from(first)), half_steps):
            index = 0 if side == "row" else 1
            other = shifts["column" if side == "row" else "row"]
            shift = [-damping[index] * x for x in other]
            shift[index] += (row, column)[index]
            shifts[side] = (shift[0], shift[1])
        a, b = (shifts["row"][i] + shifts["column"][i] for i in range(2))
        found = factor_of([(n, m, float(m), mass / (n**a * m**b)) for n, m, mass in observed])
        if isinstance(found, OutputFactor):
            return OutputFactor(found.coefficient, found.queries + a, found.keys + b, found.active)
    return None
