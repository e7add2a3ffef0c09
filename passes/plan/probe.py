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

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import scipy  # its packages load where they are used first, not with every command
import torch
from torch import Tensor

from asapc.ir import Marginal, OutputFactor, PlanConvention, Side, Stabiliser
from asapc.passes.experiment import EXACT, STABILISED, NoFit, first_fit
from asapc.passes.sinkhorn.probe import (
    BEYOND,
    BOTH,
    HELD,
    Budget,
    Fit,
    Guesses,
    Mass,
    Pair,
    Plans,
    Sample,
    convention_error,
    factor_of,
    groups_of,
    identify,
    loop_plans,
    masses_of,
    mild_ones,
    score_multiplier,
    search_budget,
)

SEARCHED = 24  # half-steps of the longest loop in which the damping of the other side is searched for
LEAST, STRAIGHT = 1e-3, 1e-6  # the smallest damping; how far from a line the duals may be
CONVERGED = 1e-7  # what is left of the start after a loop that no scores tell from a longer one


def identify_plan(
    samples: Sequence[Sample], guesses: Guesses, most: int, sums: int
) -> Fit[PlanConvention]:
    """The convention that reproduces everything; the mildest scores come first.  Raises NoFit.

    sums: of the loop where an unbalanced one is looked for if no balanced one is found, 0 where not.
    """
    kinds: list[Marginal] = [
        "uniform" if all(x is None for x in logs) else "input"
        for logs in zip(*(sample.marginals for sample in samples), strict=True)
    ]
    made = partial(PlanConvention, source_marginal=kinds[0], target_marginal=kinds[1])
    balanced = partial(identify, samples, made, guesses=guesses, most=most)
    damped = partial(_damped, samples, sums, guesses, made)
    return first_fit([balanced, damped] if sums else [balanced])


def _damped(
    samples: Sequence[Sample], sums: int, guesses: Guesses, made: Callable[..., PlanConvention]
) -> Fit[PlanConvention]:
    """The unbalanced loop that reproduces everything.  made: as of identify.  Raises NoFit."""
    mild, mildest = mild_ones(samples)
    multiplier = score_multiplier(mild)
    if not all(bool(x.isfinite().all()) for one in samples for x in one.marginals if x is not None):
        raise NoFit("marginals of 0 are known of balanced loops alone")
    heads = [sample.head() for sample in mildest]
    nearest = identify_damping([replace(head, scores=multiplier * head.scores) for head in heads], sums)
    if nearest is None or not nearest.budget.error <= (STABILISED if guesses.constants else EXACT):
        raise NoFit("no unbalanced loop")
    budget = nearest.budget
    unbalanced = partial(made, score_multiplier=multiplier, damping=nearest.damping)
    samples, heads = ([x.powered(nearest.powers) for x in of] for of in (samples, heads))
    every, settled = groups_of(samples, multiplier), converged(nearest.damping, budget.half_steps)
    if budget.rival is not None and not settled:  # sharper scores tell them apart
        budget = search_budget(every, partial(loop_plans, damping=nearest.damping), BOTH, sums + BEYOND)
    convention = unbalanced(budget.half_steps, budget.first_side)
    longer = [convention]
    if budget.rival is not None and settled:
        later = range(budget.half_steps + 2, budget.half_steps + BEYOND, 2)
        longer += [replace(convention, half_steps=half_steps) for half_steps in later]
    stabilisers: list[Stabiliser | None] = [None] if nearest.budget.error <= EXACT else []
    stabilisers += [x for x in guesses.stabilisers() if (x.form, x.start) == ("scaling", "plain")]
    fits = []
    for one, stabiliser in itertools.product(longer, stabilisers):
        one = replace(one, stabiliser=stabiliser)
        masses = masses_of(one, heads)
        with contextlib.suppress(NoFit):
            factor = damped_factor(masses, one) if stabiliser is None else factor_of(masses)
            one = replace(one, output_factor=factor)
            fits.append(Fit(one, convention_error(one, samples), powers=nearest.powers))
    best = min(fits, key=lambda fit: fit.error, default=None)
    if best is None or not best.error <= HELD:
        raise NoFit("no factor of an unbalanced loop")
    if budget.rival is None or settled:
        return best
    first, half_steps = budget.rival
    return replace(best, rival=replace(best.convention, first_side=first, half_steps=half_steps))


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
    for last, outside in itertools.product(BOTH, (False, True) if _has_marginals(samples) else (False,)):
        points = [_line(sample, last, outside) for sample in samples]
        damping = _slope(torch.cat([x for x, _ in points]), torch.cat([y for _, y in points]))
        for loop in () if damping is None else _tried(samples, last, damping, outside, sums):
            if best is None or loop.budget.error < best.budget.error:
                best = loop
            if best.budget.error <= EXACT:
                return best
    return best


def _has_marginals(samples: Sequence[Sample]) -> bool:
    return any(sample.is_given for sample in samples)


def _line(sample: Sample, last: Side, outside: bool) -> tuple[Tensor, Tensor]:
    """Points on a line through 0 whose slope is the damping of the side that comes last."""
    logs = sample.attention.log()
    duals = logs - sample.scores
    axis, log_marginal = (-1, sample.log_mu) if last == "row" else (-2, sample.log_nu)
    other = torch.logsumexp(logs, -3 - axis, keepdim=True).isfinite()
    dual = duals.masked_fill(~other, 0.0).sum(axis) / other.sum(axis)
    through = dual - torch.logsumexp(logs, axis)
    if log_marginal is not None and outside:
        dual = dual - log_marginal
    elif log_marginal is not None:
        through = through + log_marginal
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
    has_marginals = _has_marginals(samples)
    plans = [sample.attention for sample in samples]

    def with_other(other: float) -> tuple[Pair, Pair]:
        both = (damping, other) if last == "row" else (other, damping)
        return both, (1 / both[0], 1 / both[1]) if outside and has_marginals else (1.0, 1.0)

    def loop(sample: Sample, other: float) -> Plans:
        both, powers = with_other(other)
        return loop_plans(sample.powered(powers), both)

    for other in dict.fromkeys((damping, 1.0)):
        budget = search_budget(samples, partial(loop, other=other), (last,), sums + BEYOND)
        yield Damped(*with_other(other), budget)
    for half_steps in range(max(sums - 1, 2), min(sums + 1, SEARCHED) + 1):
        first = _from(last)[(half_steps - 1) % 2]

        def missed(
            x: Any, some: Sequence[Sample] = samples[:1], first: Side = first, at: int = half_steps - 1
        ) -> Any:
            ours = [next(itertools.islice(loop(one, float(x[0]))(first), at, None)) for one in some]
            return torch.cat([
                (plan / plan.sum() - one.attention / one.attention.sum()).flatten()
                for plan, one in zip(ours, some, strict=True)
            ]).numpy()  # fmt: skip

        # Searched for on one observation, and held against the others where it explains that.
        solution = scipy.optimize.least_squares(
            missed, [0.5], bounds=([LEAST], [1.0]), xtol=1e-15, ftol=1e-15, gtol=1e-15
        )
        left = solution.fun if abs(solution.fun).max() > STRAIGHT else missed(solution.x, samples)
        error = float(abs(left).max() / max(float((plan / plan.sum()).max()) for plan in plans))
        yield Damped(*with_other(float(solution.x[0])), Budget(first, half_steps, error))


def _from(first: Side) -> tuple[Side, Side]:
    """Both sides in the order of a loop."""
    return ("row", "column") if first == "row" else ("column", "row")


def converged(damping: Pair, half_steps: int) -> bool:
    """Whether longer loops give the same: two half-steps bring any two duals nearer by both dampings."""
    return (damping[0] * damping[1]) ** (half_steps // 2) <= CONVERGED


def damped_factor(observed: Sequence[Mass], convention: PlanConvention) -> OutputFactor:
    """The factor of an unbalanced loop.  Raises NoFit where its mass depends on the batch in another way.

    Our uniform marginals are 1/N and 1/M inside the damped logarithms, and our loop starts from scalings
    of 1. The teacher's marginals may be 1, or stand outside, and its scalings start at 1/N and 1/M: each
    changes every dual by a number, and so the plan by powers of N and M.
    """
    assert convention.damping is not None
    damping, marginals = convention.damping, (convention.source_marginal, convention.target_marginal)
    sides = _from(convention.first_side)
    choices = [
        (0.0, damped, damped - 1) if kind == "uniform" else (0.0,)
        for damped, kind in zip(damping, marginals, strict=True)
    ]
    for start, row, column in itertools.product((0.0, -1.0), *choices):
        shifts = {"row": (start, 0.0), "column": (0.0, start)}  # of a dual, in units of (log N, log M)
        for side in itertools.islice(itertools.cycle(sides), convention.half_steps):
            index = 0 if side == "row" else 1
            other = shifts["column" if side == "row" else "row"]
            shift = [-damping[index] * x for x in other]
            shift[index] += (row, column)[index]
            shifts[side] = (shift[0], shift[1])
        a, b = (shifts["row"][i] + shifts["column"][i] for i in range(2))
        with contextlib.suppress(NoFit):
            factor = factor_of([(n, m, active, mass / (n**a * m**b)) for n, m, active, mass in observed])
            return replace(factor, queries=factor.queries + a, keys=factor.keys + b)
    raise NoFit("the mass of the plan depends on the batch in no known way")
