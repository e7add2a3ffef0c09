"""Stops: what an early stop in one of a LOT layer's two loops would change, see passes.early_stop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from asapc.ir import Program
from asapc.operators.lot import by_example, pivot_plan
from asapc.passes.cut import ancestors
from asapc.passes.early_stop import SPREADS, Trial, dilution, residuals_of, what_a_stop_changes
from asapc.passes.experiment import assigned
from asapc.passes.lot.half import Half
from asapc.passes.lot.probe import HalfFit
from asapc.passes.products import BARRIERS

MANY_EXAMPLES = 32


def changed_by_stops(
    program: Program, half: Half, fit: HalfFit, lengths: dict[Any, int], hidden: bool
) -> str | None:
    """Why the plan may be another than that of the full budget; None where no stop changes it."""
    stops = [
        stop for stop in program.stops
        if ancestors(stop.residual, until=BARRIERS) & half.between
    ]  # fmt: skip
    if not stops:
        return None
    # The product of the scores is no sum of a half-step.
    inside = sorted(node for node in half.between if half.points.node not in node.all_input_nodes)
    residuals = residuals_of(program, stops, [half.points.node, *half.masks])
    generator = torch.Generator().manual_seed(4)
    many = {**lengths, **assigned([(half.points.shape[0], MANY_EXAMPLES)])}
    unit = abs(fit.half.score_multiplier) * float(fit.pivots.square().sum(-1).mean().sqrt())

    def tensors(points: Tensor, at: dict[Any, int]) -> list[Tensor]:
        raw = half.experiment.raw(half.points, points, at)
        return [raw, *half.experiment.masks(at, hidden)]

    def trials(at: dict[Any, int], only: slice) -> Iterator[Trial]:
        noise = torch.randn(half.shape(at), generator=generator, dtype=torch.float64) / unit
        points = torch.zeros_like(noise)
        points[only] = noise[only]
        smaller = 1.0
        if at is many:  # how much less one example does in a batch that is twice as large
            twice = {**at, **assigned([(half.points.shape[0], 2 * MANY_EXAMPLES)])}
            larger = torch.cat([points, torch.zeros_like(points)])
            if half.shape(twice)[0] == len(larger):
                pairs = ((points, at), (larger, twice))
                smaller = dilution(*(residuals(tensors(p, sizes), sizes)[0] for p, sizes in pairs))
        for spread in SPREADS:
            x = points * spread
            scores = fit.half.score_multiplier * (x @ fit.pivots.transpose(-1, -2))
            yield Trial(tensors(x, at), at, scores, None, smaller)

    def plan(trial: Trial, half_steps: int) -> Tensor:
        mass = by_example(fit.mass, len(trial.scores)) if fit.interleaved else fit.mass
        scores = trial.scores.transpose(-1, -2)
        return pivot_plan(scores, None, mass, half_steps, fit.half.tokens_first, False)

    some = [trials(lengths, slice(None))]
    if many != lengths:
        some += [trials(many, one) for one in (slice(0, 1), slice(-1, None))]
    return what_a_stop_changes(
        stops, residuals, inside, fit.half.half_steps, plan, itertools.chain(*some)
    )
