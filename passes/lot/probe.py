"""Identification by experiment of plans against pivots: which finite loop, pivots and masses are these?

    log G = m x z' + u 1' + 1 w'    double centring leaves the multiplier m of the right pivots z
    G = Gamma diag(c) for the right masses, first side and half-steps; c may be anything, and is measured

Nothing here looks at code; pivots and masses are looked for among the layer's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from asapc.ir import HalfPlan, Side
from asapc.operators.lot import by_example, pivot_plan
from asapc.passes.experiment import EXACT, STABILISED, NoFit, snapped
from asapc.passes.lot.half import Half
from asapc.passes.sinkhorn.probe import (
    MILD,
    Plans,
    Sample,
    groups_of,
    loop_plans,
    score_multiplier,
    search_budget,
)

# Standard deviations of the scores, in units of epsilon: at mild ones every long loop has converged.
SPREADS = (1.0, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0)


@dataclass(frozen=True)
class Masses:
    """Of the pivots of each head [H, R], rows sum to 1.

    interleaved: over examples and heads in one axis, see operators.lot.
    """

    table: Tensor
    interleaved: bool = False

    def of(self, batch: int) -> Tensor:
        """As of so many examples: [H, R] or [B, H, R]."""
        return by_example(self.table, batch) if self.interleaved else self.table

    def is_like(self, other: Masses) -> bool:
        """Whether both are the same."""
        alike = self.interleaved == other.interleaved and self.table.shape == other.table.shape
        return alike and torch.allclose(self.table, other.table)


@dataclass(frozen=True)
class HalfFit:
    """One plan between tokens and pivots, and its largest relative error.

    pivots: [H, R, D].  readout: c, the columns of what was observed over those of the plan of mass 1,
    [B, H, R] of the first size.
    """

    half: HalfPlan
    pivots: Tensor
    masses: Masses
    readout: Tensor
    error: float


def identify_half(
    code: Half, hidden: bool, sizes: Sequence[dict[Any, int]], pivots: Sequence[Tensor],
    masses: Sequence[Masses],
) -> HalfFit | NoFit:  # fmt: skip
    """The finite loop between tokens and pivots that reproduces the code to 1e-6, or why none does.

    hidden: what its masks say of a padded token.  pivots: candidates [H, R, D].  masses: candidates.
    """
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(code.shape(sizes[0]), generator=generator, dtype=torch.float64)
    trial = code.observe(first, sizes[0], hidden)
    if trial is None or not bool((trial > 0).all()):
        return NoFit("the region gives NaN or infinity on random tokens")
    best: HalfFit | None = None
    unsure: NoFit | None = None
    for z in pivots:
        if trial.shape[1:] != (first.shape[1], trial.shape[2], z.shape[1]):
            continue
        rough = score_multiplier([Sample(first @ z.transpose(-1, -2), trial)])
        if isinstance(rough, NoFit):
            continue
        samples = []
        for spread in SPREADS:
            for at in sizes:
                x = torch.randn(code.shape(at), generator=generator, dtype=torch.float64)
                x = x * spread / (abs(rough) * z.square().sum(-1).mean().sqrt())
                plan = code.observe(x, at, hidden)
                if plan is not None:
                    samples.append(Sample(x @ z.transpose(-1, -2), plan, mild=spread <= MILD))
        multiplier = score_multiplier([sample for sample in samples if sample.mild])
        if isinstance(multiplier, NoFit):
            continue
        for sigma in (mass for mass in masses if mass.table.shape[1] == z.shape[1]):
            fit = _best_loop(samples, multiplier, z, sigma)
            if isinstance(fit, NoFit):
                unsure = fit
            elif best is None or fit.error < best.error:
                best = fit
            if best is not None and best.error <= EXACT:
                return best
    if best is None:
        return unsure or NoFit("no parameter of the layer gives its scores as inner products")
    if not best.error <= STABILISED:
        return NoFit("not a finite loop between tokens and pivots", best.error)
    return best


def _best_loop(
    samples: Sequence[Sample], multiplier: float, z: Tensor, masses: Masses
) -> HalfFit | NoFit:
    """The shortest loop that is as good as the best, with these masses, by its first head."""
    targets, plans = [], []
    for group in groups_of(samples, multiplier):
        loop = loop_plans(replace(group, log_nu=masses.table[:1].log()))
        plans.append(_scaled(loop, group.attention))
        targets.append(group.attention)
    budget = search_budget(targets, plans)
    if not budget.error < math.inf:
        return NoFit("not a finite loop between tokens and pivots")
    if budget.rival is not None and budget.error <= STABILISED:
        rival = budget.rival[1]
        return NoFit(
            f"{budget.half_steps} and {rival} half-steps give the same plan in every test"
        )
    half = HalfPlan(budget.half_steps, budget.first_side == "row", snapped(multiplier))
    first = next(sample for sample in samples if sample.mild)
    mass = masses.of(len(first.scores))
    scores = (multiplier * first.scores).transpose(-1, -2)
    plan = pivot_plan(scores, None, mass, half.half_steps, half.tokens_first, False).transpose(-1, -2)
    return HalfFit(half, z, masses, _ratio(first.attention, plan), budget.error)


def _scaled(loop: Plans, target: Tensor) -> Plans:
    """A plan [G, 1, N, R] with its columns scaled as the target's are, alike in every sample."""

    def run(first: Side) -> Iterator[Tensor]:
        return (plan * _ratio(target, plan, (0, 1, 2))[..., None, :] for plan in loop(first))

    return run


def _ratio(observed: Tensor, plan: Tensor, over: tuple[int, ...] = (-2,)) -> Tensor:
    """The factor of every column by which a plan becomes what was observed, in least squares."""
    square = plan.square().sum(over)
    return torch.where(square > 0, (observed * plan).sum(over) / square, 0.0)
