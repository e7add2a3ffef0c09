"""Which finite loop turns these scores into this plan, with marginals that may be given?

Uniform marginals are sinkhorn.probe's: the plan of 1/N and 1/M is that of any other constants, up to a
factor. Others have the loop run with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from asapc.ir import Marginal, PlanConvention
from asapc.operators.plan import plan, settings_of
from asapc.passes.experiment import EXACT, NoFit, relative_error
from asapc.passes.plan.damped import converged, damped_factor, identify_damping
from asapc.passes.sinkhorn.probe import (
    BEYOND,
    HELD,
    MAX_HALF_STEPS,
    NO_GUESS,
    Fit,
    Guesses,
    Sample,
    budget_of,
    factor_of,
    identify,
    mild_ones,
    score_multiplier,
    with_rival,
)


def identify_plan(
    samples: Sequence[Sample], guesses: Guesses = NO_GUESS, most: int = MAX_HALF_STEPS,
    sums: int = 0,
) -> Fit[PlanConvention] | NoFit:  # fmt: skip
    """The convention that reproduces everything, or why none does; the mildest scores come first.

    sums: of the loop where an unbalanced one is looked for if no balanced one is found, 0 where not.
    """
    if any(x is not None for sample in samples for x in sample.marginals):
        return _with_marginals(samples, most, sums)
    found = identify(samples, guesses=guesses)
    if isinstance(found, NoFit):
        return (_damped(samples, sums) if sums else None) or found
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
    samples: Sequence[Sample], most: int, sums: int
) -> Fit[PlanConvention] | NoFit:
    mild, mildest = mild_ones(samples)
    multiplier = score_multiplier(mild)
    if isinstance(multiplier, NoFit):
        return multiplier
    found = budget_of(samples, multiplier, most=most)
    if isinstance(found, NoFit):
        return (_damped(samples, sums) if sums else None) or found
    budget, _ = found
    convention = PlanConvention(
        budget.half_steps, budget.first_side, multiplier,
        source_marginal=_kind(sample.log_mu for sample in samples),
        target_marginal=_kind(sample.log_nu for sample in samples),
    )  # fmt: skip
    # factor_of takes N times a row's mass of a uniform plan: 1 is N there, and the plan itself here.
    factor = factor_of([(n, m, float(m), mass) for n, m, mass in _masses(convention, mildest)])
    if isinstance(factor, NoFit):
        return factor
    convention = replace(convention, output_factor=factor)
    error = plan_error(convention, samples)
    if not error <= HELD:
        return NoFit("one head or example runs this loop and another does not", error)
    return with_rival(Fit(convention, error), budget)


def _damped(samples: Sequence[Sample], sums: int) -> Fit[PlanConvention] | None:
    """The unbalanced loop that reproduces everything, None if there is none."""
    mild, mildest = mild_ones(samples)
    multiplier = score_multiplier(mild)
    given = [x for sample in samples for x in sample.marginals if x is not None]
    if isinstance(multiplier, NoFit) or not all(bool(x.isfinite().all()) for x in given):
        return None
    heads = [sample.head() for sample in mildest]
    found = identify_damping(
        [replace(head, scores=multiplier * head.scores) for head in heads], sums
    )
    if found is None or not found.budget.error <= EXACT:
        return None
    budget = found.budget
    convention = PlanConvention(
        budget.half_steps, budget.first_side, multiplier,
        source_marginal=_kind(sample.log_mu for sample in samples),
        target_marginal=_kind(sample.log_nu for sample in samples), damping=found.damping,
    )  # fmt: skip
    samples, heads = ([x.powered(found.powers) for x in of] for of in (samples, heads))
    longer = [convention]
    if budget.rival is not None:
        if not converged(found.damping, budget.half_steps):
            return None
        later = range(budget.half_steps + 2, budget.half_steps + BEYOND, 2)
        longer += [replace(convention, half_steps=half_steps) for half_steps in later]
    fits = []
    for one in longer:
        uniform = (one.source_marginal == "uniform", one.target_marginal == "uniform")
        masses = _masses(one, heads)
        factor = damped_factor(masses, found.damping, one.first_side, one.half_steps, uniform)
        if factor is not None:
            one = replace(one, output_factor=factor)
            fits.append(Fit(one, plan_error(one, samples), powers=found.powers))
    best = min(fits, key=lambda fit: fit.error, default=None)
    return best if best is not None and best.error <= HELD else None


def _masses(
    convention: PlanConvention, samples: Sequence[Sample]
) -> list[tuple[int, int, float]]:
    """(N, M, the mass of the map over that of the convention's plan)."""
    pairs = ((sample, plan_of(convention, sample)) for sample in samples)
    return [(*x.scores.shape[-2:], float(x.attention.sum() / ours.sum())) for x, ours in pairs]


def _kind(logs: Iterator[Tensor | None]) -> Marginal:
    return "uniform" if all(x is None for x in logs) else "input"


def plan_of(convention: PlanConvention, sample: Sample) -> Tensor:
    """The plan that the convention computes from what was observed to go in, [B, H, N, M]."""
    settings = settings_of(convention) | {"log": False}
    return plan(sample.scores, *sample.marginals, **settings)


def plan_error(convention: PlanConvention, samples: Sequence[Sample]) -> float:
    """Largest error over everything, relative to each plan's largest entry; infinite where it is NaN."""
    pairs = ((plan_of(convention, sample), sample.attention) for sample in samples)
    return max((relative_error(*pair) for pair in pairs), default=0.0)
