"""Which finite loop turns these scores into this plan, with marginals that may be given?

Uniform marginals are sinkhorn.probe's: the plan of 1/N and 1/M is that of any other constants, up to a
factor. Others have the loop run with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asapc.ir import Marginal, OutputFactor, PlanConvention
from asapc.operators.plan import plan, settings_of
from asapc.passes.experiment import EXACT, STABILISED, NoFit, relative_error
from asapc.passes.plan.damped import Given, Pair, converged, damped_factor, identify_damping
from asapc.passes.sinkhorn.probe import (
    BEYOND,
    HELD,
    MAX_HALF_STEPS,
    NO_GUESS,
    Budget,
    Guesses,
    Sample,
    factor_of,
    identify,
    loop_plans,
    score_multiplier,
    search_budget,
)

SHORT = 64  # half-steps of a loop that is named where none fits


@dataclass(frozen=True)
class Observed:
    """One observation: scores and plan [B, H, N, M], marginals broadcastable to [B, H, N] and [B, H, M],
    None where they are uniform.

    mild: the scores spread so little that a stabilising constant is not seen.
    """

    scores: Tensor
    plan: Tensor
    log_mu: Tensor | None = None
    log_nu: Tensor | None = None
    mild: bool = True

    @property
    def sample(self) -> Sample:
        return Sample(self.scores, self.plan, None, self.mild)

    def powered(self, powers: Pair) -> Observed:
        """With powers of the marginals that are given."""
        log_mu, log_nu = (
            None if x is None else x * power
            for x, power in zip((self.log_mu, self.log_nu), powers, strict=True)
        )
        return replace(self, log_mu=log_mu, log_nu=log_nu)

    def head(self) -> Observed:
        """The first head of the first example."""
        log_mu, log_nu = (
            None if x is None else x.reshape(-1, x.shape[-1])[:1, None]
            for x in (self.log_mu, self.log_nu)
        )
        return Observed(self.scores[:1, :1], self.plan[:1, :1], log_mu, log_nu, self.mild)


@dataclass(frozen=True)
class PlanFit:
    """The convention, the largest relative error with which it reproduces what was observed, and another
    budget that does so as well, if there is one.

    powers: of the marginals that are given, as the operator takes them.
    """

    convention: PlanConvention
    error: float
    rival: PlanConvention | None = None
    powers: Pair = (1.0, 1.0)


def identify_plan(
    observed: Sequence[Observed], guesses: Guesses = NO_GUESS, most: int = MAX_HALF_STEPS,
    sums: int = 0,
) -> PlanFit | NoFit:  # fmt: skip
    """The convention that reproduces everything, or why none does; the mildest scores come first.

    sums: of the loop where an unbalanced one is looked for if no balanced one is found, 0 where not.
    """
    if any(x is not None for o in observed for x in (o.log_mu, o.log_nu)):
        return _with_marginals(observed, most, sums)
    found = identify([o.sample for o in observed], guesses=guesses)
    if isinstance(found, NoFit):
        return (_damped(observed, sums) if sums else None) or found
    conventions = [
        None if loop is None else PlanConvention(
            loop.half_steps, loop.first_side, loop.score_multiplier, loop.output_factor,
            stabiliser=loop.stabiliser,
        )
        for loop in (found.convention, found.rival)
    ]  # fmt: skip
    assert conventions[0] is not None
    return PlanFit(conventions[0], found.error, conventions[1])


def _with_marginals(observed: Sequence[Observed], most: int, sums: int) -> PlanFit | NoFit:
    mild = [o for o in observed if o.mild] or list(observed)
    multiplier = score_multiplier([o.sample for o in mild])
    if isinstance(multiplier, NoFit):
        return multiplier
    mildest = mild[: max(1, len(mild) // 2)]
    at_mild = _budget(mildest, multiplier, most)
    if not at_mild.error <= STABILISED:
        return (_damped(observed, sums) if sums else None) or NoFit(
            f"not a finite Sinkhorn loop of at most {most} half-steps with these marginals (best: "
            f"{at_mild.half_steps} half-steps, {at_mild.first_side}s first)", at_mild.error,
        )  # fmt: skip
    longest = most if at_mild.rival is not None else at_mild.half_steps + BEYOND
    budget = _budget(observed, multiplier, longest)
    if not budget.error <= HELD:
        return NoFit(
            f"a loop of {at_mild.half_steps} half-steps at mild scores, and another at sharp ones: "
            "a constant in its divisions, a clamp or a damping that is not known", budget.error,
        )  # fmt: skip
    convention = PlanConvention(
        budget.half_steps, budget.first_side, multiplier,
        source_marginal=_kind(o.log_mu for o in observed),
        target_marginal=_kind(o.log_nu for o in observed),
    )  # fmt: skip
    masses = []
    for o in mildest:
        ours = plan_of(convention, o)
        queries, keys = o.scores.shape[-2:]
        # factor_of takes N times a row's mass of a uniform plan: 1 is N there, and the plan itself here.
        masses.append((queries, keys, float(keys), float(o.plan.sum() / ours.sum())))
    factor = factor_of(masses)
    if isinstance(factor, NoFit):
        return factor
    convention = replace(convention, output_factor=factor)
    error = plan_error(convention, observed)
    if not error <= HELD:
        return NoFit("one head or example runs this loop and another does not", error)
    if budget.rival is None:
        return PlanFit(convention, error)
    first, half_steps = budget.rival
    return PlanFit(convention, error, replace(convention, first_side=first, half_steps=half_steps))


def _damped(observed: Sequence[Observed], sums: int) -> PlanFit | None:
    """The unbalanced loop that reproduces everything, None if none does."""
    mild = [o for o in observed if o.mild]
    multiplier = score_multiplier([o.sample for o in mild])
    if isinstance(multiplier, NoFit):
        return None
    heads = [o.head() for o in mild[: max(1, len(mild) // 2)]]
    given = [Given(multiplier * o.scores, o.plan, o.log_mu, o.log_nu) for o in heads]
    found = identify_damping(given, sums)
    if found is None or not found.budget.error <= EXACT:
        return None
    budget = found.budget
    convention = PlanConvention(
        budget.half_steps, budget.first_side, multiplier,
        source_marginal=_kind(o.log_mu for o in observed),
        target_marginal=_kind(o.log_nu for o in observed), damping=found.damping,
    )  # fmt: skip
    observed = [o.powered(found.powers) for o in observed]
    longer = [convention]
    if budget.rival is not None:
        if not converged(found.damping, budget.half_steps):
            return None
        later = range(budget.half_steps + 2, budget.half_steps + BEYOND, 2)
        longer += [replace(convention, half_steps=half_steps) for half_steps in later]
    fits = []
    for one in longer:
        factor = _damped_factor(one, [o.powered(found.powers) for o in heads])
        if factor is not None:
            one = replace(one, output_factor=factor)
            fits.append(PlanFit(one, plan_error(one, observed), powers=found.powers))
    best = min(fits, key=lambda fit: fit.error, default=None)
    return best if best is not None and best.error <= HELD else None


def _damped_factor(convention: PlanConvention, observed: Sequence[Observed]) -> OutputFactor | None:
    masses = [
        (*o.scores.shape[-2:], float(o.plan.sum() / plan_of(convention, o).sum())) for o in observed
    ]
    c = convention
    assert c.damping is not None
    uniform = (c.source_marginal == "uniform", c.target_marginal == "uniform")
    return damped_factor(masses, c.damping, c.first_side, c.half_steps, uniform)


def _kind(logs: Iterator[Tensor | None]) -> Marginal:
    return "uniform" if all(x is None for x in logs) else "input"


def _budget(observed: Sequence[Observed], multiplier: float, most: int) -> Budget:
    by_shape: dict[tuple[int, ...], list[Observed]] = {}
    for o in observed:
        by_shape.setdefault(tuple(o.scores.shape[-2:]), []).append(o.head())
    targets, plans = [], []
    for (queries, keys), alike in by_shape.items():
        scores = multiplier * torch.cat([o.scores for o in alike])
        log_mu = torch.cat([_or_uniform(o.log_mu, queries, scores) for o in alike])
        log_nu = torch.cat([_or_uniform(o.log_nu, keys, scores) for o in alike])
        plans.append(loop_plans(scores, None, log_mu, log_nu))
        targets.append(torch.cat([o.plan for o in alike]))
    return search_budget(targets, plans, most=most)


def _or_uniform(logs: Tensor | None, tokens: int, like: Tensor) -> Tensor:
    """[1, 1, X]."""
    return like.new_full((1, 1, tokens), -math.log(tokens)) if logs is None else logs


def nearest(observed: Sequence[Observed]) -> Budget | None:
    """The short loop that comes nearest at mild scores; None where a multiplier cannot be measured."""
    mild = [o for o in observed if o.mild]
    multiplier = score_multiplier([o.sample for o in mild])
    return None if isinstance(multiplier, NoFit) or not mild else _budget(mild[:2], multiplier, SHORT)


def plan_of(convention: PlanConvention, observed: Observed) -> Tensor:
    """The plan that the convention computes from what was observed to go in, [B, H, N, M]."""
    settings = settings_of(convention) | {"log": False}
    return plan(observed.scores, observed.log_mu, observed.log_nu, **settings)


def plan_error(convention: PlanConvention, observed: Sequence[Observed]) -> float:
    """Largest error over everything, relative to each plan's largest entry; infinite where it is NaN."""
    return max((relative_error(plan_of(convention, o), o.plan) for o in observed), default=0.0)
