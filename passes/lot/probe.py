"""Identification by experiment of plans against pivots: which finite loop, pivots and masses are these?

    log G = m x z' + u 1' + 1 w'    double centring leaves the multiplier m of the right pivots z
    G = Gamma diag(c) for the right masses, first side and half-steps; c may be anything, and is measured

Nothing here looks at code; pivots and masses are looked for among the layer's parameters. Code repeats
those for every example before it multiplies by them, so that their first axis is examples and heads in
one: such a tensor is made at the sizes of an experiment and folded again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.ir import HalfPlan, Side
from asapc.operators.lot import by_example, pivot_plan
from asapc.passes.cut import constants_entering, line_of
from asapc.passes.experiment import EXACT, STABILISED, Experiment, Lengths, NoFit, outcome, snapped
from asapc.passes.products import Canonical, merged_heads
from asapc.passes.sinkhorn.probe import (
    BOTH,
    Drawn,
    Plans,
    Sample,
    Trials,
    groups_of,
    longest_in,
    loop_plans,
    overflown,
    score_multiplier,
    search_budget,
)

# Standard deviations of the scores, in units of epsilon: at mild ones every long loop has converged.
SPREADS = (1.0, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0)


class Half(Experiment, Trials):
    """points [B, H, N, D] -> plan [B, H, N, R], its heads apart also where code merges them.

    is_scores: whether the points are the scores themselves, so that D = R.
    between: what lies between points and plan; masks: that enter there.
    pivots: [H, R, D], which are tried: what is drawn are points, and their products are the scores.
    """

    pivots: Tensor

    def __init__(
        self, graph: GraphModule, points: Canonical, plan: Canonical, between: set[Node],
        masks: Sequence[Node], is_scores: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(graph, [points], plan, between, masks)
        self.graph, self.points, self.between, self.is_scores = graph, points, between, is_scores
        shape = points.shape
        merged, line = merged_heads(points.node), line_of(shape[0])
        # H: the second of four axes, what a view merged, or how often the batch goes into the first.
        if merged == 1 and line is not None and not line.more:
            merged = line.factor
        self.heads = int(shape[1]) if len(shape) == 4 else merged

    def size(self, at: Lengths | None = None) -> tuple[int, int, int, int]:
        """[B, H, N, D] of the points."""
        *batch, n, d = self.dims(self.points, self.few if at is None else at)
        return (batch[0] // (self.heads if len(batch) == 1 else 1), self.heads, n, d)

    def plan(self, points: Tensor, at: Lengths | None = None) -> Tensor:
        """With nothing masked."""
        return self.observe([points], self.few if at is None else at).reshape(*points.shape[:3], -1)

    def on(self, scores: Tensor, at: Lengths | None = None, mild: bool = False) -> Sample | None:
        """scores: the points that they are made of."""
        plan = self.plan(scores, at)
        made = scores @ self.pivots.transpose(-1, -2)
        return None if overflown(plan) else Sample(made, plan, mild=mild)


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


def candidates(half: Half) -> tuple[list[Tensor], list[Masses]]:
    """Pivots [H, R, D] and masses of them that could be a plan's; of scores, the unit vectors."""
    batch, heads, _, dim = half.size()
    pivots = [torch.eye(dim, dtype=torch.float64).expand(heads, -1, -1)] if half.is_scores else []
    masses: list[Masses] = []
    for value in constants_entering(half.graph, half.between, half.few):
        flat = value.reshape([n for n in value.shape if n != 1] or [1])
        if not half.is_scores:
            for turned in (flat, flat.transpose(-1, -2)) if flat.dim() > 1 else ():
                folded = None if turned.shape[-1] != dim else per_head(turned, 2, batch, heads)
                if folded is not None and not folded[1]:
                    pivots.append(folded[0].contiguous())
        for measure in (flat, flat.exp()):
            if bool((measure >= 0).all()) and bool(measure.isfinite().all()) and bool(measure.any()):
                folded = per_head(measure, 1, batch, heads)
                if folded is not None:
                    table, by_row = folded
                    masses.append(Masses(table / table.sum(-1, keepdim=True), by_row))
    counts = {z.shape[1] for z in pivots}
    masses += [Masses(torch.full((heads, r), 1.0 / r, dtype=torch.float64)) for r in sorted(counts)]
    distinct: list[Masses] = []
    for mass in masses:
        if mass.table.shape[1] in counts and not any(mass.is_like(other) for other in distinct):
            distinct.append(mass)
    return pivots, distinct


def per_head(
    value: Tensor, trailing: int, batch: int, heads: int, tolerance: float = 0.0
) -> tuple[Tensor, bool] | None:
    """A tensor whose leading axes are heads, examples, both or none as [H, ..], and whether its rows are
    interleaved (operators.lot); None where it is neither.

    trailing: how many last axes are one head's.  tolerance: relative, up to which rows are alike.
    """

    def alike(x: Tensor, y: Tensor) -> bool:
        return bool(((x - y).abs() <= tolerance * y.abs()).all())

    lead = max(value.dim() - trailing, 0)
    if value.dim() < trailing:
        return None
    rows = value.reshape(-1, *value.shape[lead:])
    if len(rows) == 1:
        return rows.expand(heads, *rows.shape[1:]), False
    if len(rows) == heads:
        return rows, False
    if len(rows) == batch and alike(rows, rows[:1]):
        return rows[:1].expand(heads, *rows.shape[1:]), False
    if len(rows) != batch * heads:
        return None
    folded = rows.unflatten(0, (batch, heads))
    if alike(folded, folded[:1].expand_as(folded)):
        return folded[0], False
    table = rows[::batch]
    return (table, True) if alike(by_example(table, batch), folded) else None


def identify_half(code: Half, pivots: Sequence[Tensor], masses: Sequence[Masses]) -> HalfFit:
    """The finite loop between tokens and pivots that reproduces the code to 1e-6.  Raises NoFit.

    pivots: candidates [H, R, D].  masses: candidates.
    """
    first = code.noise()
    trial = code.plan(first)
    if not bool(((trial > 0) & trial.isfinite()).all()):
        raise NoFit("the region gives NaN or infinity on random tokens")
    best: HalfFit | None = None
    unsure = NoFit("no parameter of the layer gives its scores as inner products")
    for z in pivots:
        if trial.shape[1:] != (first.shape[1], trial.shape[2], z.shape[1]):
            continue
        with contextlib.suppress(NoFit):
            rough = score_multiplier([Sample(first @ z.transpose(-1, -2), trial)])
            code.pivots, code.rough = z, rough * float(z.square().sum(-1).mean().sqrt())
            drawn = (code.drawn(Drawn(spread), at) for spread in SPREADS for at in code.sizes)
            samples = [sample for sample in drawn if sample is not None]
            multiplier = score_multiplier([sample for sample in samples if sample.mild])
            for sigma in (mass for mass in masses if mass.table.shape[1] == z.shape[1]):
                fit = outcome(partial(_best_loop, samples, multiplier, code, sigma))
                if isinstance(fit, NoFit):
                    unsure = fit
                elif best is None or fit.error < best.error:
                    best = fit
                if best is not None and best.error <= EXACT:
                    return best
    if best is None:
        raise unsure
    if not best.error <= STABILISED:
        raise NoFit("not a finite loop between tokens and pivots", best.error)
    return best


def _best_loop(samples: Sequence[Sample], multiplier: float, code: Half, masses: Masses) -> HalfFit:
    """The shortest loop that is as good as the best, with these masses, by its first head."""
    plans_of = partial(_scaled_plans, log_nu=masses.table[:1].log())
    budget = search_budget(groups_of(samples, multiplier), plans_of, BOTH, longest_in(code.between))
    if not budget.error < math.inf:
        raise NoFit("not a finite loop between tokens and pivots")
    if budget.rival is not None and budget.error <= STABILISED:
        rival = budget.rival[1]
        raise NoFit(f"{budget.half_steps} and {rival} half-steps give the same plan in every test")
    half = HalfPlan(budget.half_steps, budget.first_side == "row", snapped(multiplier))
    first = next(sample for sample in samples if sample.mild)
    mass = masses.of(len(first.scores))
    scores = (multiplier * first.scores).transpose(-1, -2)
    plan = pivot_plan(scores, None, mass, half.half_steps, half.tokens_first, False).transpose(-1, -2)
    return HalfFit(half, code.pivots, masses, _ratio(first.attention, plan), budget.error)


def _scaled_plans(group: Sample, log_nu: Tensor) -> Plans:
    """Plans [G, 1, N, R] with their columns scaled as those observed are, alike in every sample."""
    loop, target = loop_plans(replace(group, log_nu=log_nu)), group.attention

    def run(first: Side) -> Iterator[Tensor]:
        return (plan * _ratio(target, plan, (0, 1, 2))[..., None, :] for plan in loop(first))

    return run


def _ratio(observed: Tensor, plan: Tensor, over: tuple[int, ...] = (-2,)) -> Tensor:
    """The factor of every column by which a plan becomes what was observed, in least squares."""
    square = plan.square().sum(over)
    return torch.where(square > 0, (observed * plan).sum(over) / square, 0.0)
