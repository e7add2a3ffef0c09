"""Early stop: what a loop that ends on a small residual would leave out.

A program holds the full budget, and the residuals that the teacher's code compares with a threshold on
the way. Where the first of them is small enough, the teacher stops. That is harmless if the half-steps
that are left change nothing, which is tried on scores of every spread; otherwise the site is refused.
A program is not the model if any stop in it, wherever that is, is not known to be harmless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import Program, Stop
from asapc.passes.branches import spoken
from asapc.passes.cut import Cut, ancestors, depends_on_data, descendants
from asapc.passes.experiment import relative_error
from asapc.passes.products import BARRIERS, NORMALISERS
from asapc.passes.sinkhorn.probe import HELD

aten = torch.ops.aten
SPREADS = (0.0, *(3e-3 * 1.6**step for step in range(25)))  # of the scores, in units of epsilon
FAR = 16.0  # times as many examples, or as many tokens, of which all but a few are flat
SUMS = {  # a half-step has one of them, or as many as every other
    aten.logsumexp.default, aten.softmax.int, aten._softmax.default, aten.log_softmax.int,
    aten._log_softmax.default, aten.sum.dim_IntList, aten.matmul.default, aten.bmm.default,
    aten.mv.default, aten.einsum.default,
}  # fmt: skip


def firsts_and_lasts(residuals: Sequence[Node]) -> list[int]:
    """The places of the first and the last residual of every loop.

    One is of the same loop as the next where all that it is computed from is also part of the next.
    """
    above = [ancestors(node, until=BARRIERS) for node in residuals]
    sums = [{node for node in nodes if node.target in NORMALISERS} for nodes in above]
    after = [*sums, set()][1:]
    lasts = [
        place for place, (current, others) in enumerate(zip(sums, after, strict=True))
        if not current or not current <= others
    ]  # fmt: skip
    return sorted({0, *lasts, *(place + 1 for place in lasts)} & {*range(len(sums))})


def stops_by_scores(program: Program, scores: Iterable[Node]) -> dict[Node | None, list[Stop]]:
    """The stops of the loop on each of these, the scores of every site; None for those of no loop."""
    known = set(scores)
    found: dict[Node | None, list[Stop]] = {}
    for stop in program.stops:
        above = ancestors(stop.residual, until=BARRIERS) & known
        found.setdefault(max(above, default=None), []).append(stop)
    return found


@dataclass(frozen=True)
class Trial:
    """Scores on which a stop is tried.

    tensors: what is fed to the region's inputs; lengths: the sizes; scores: raw products [B, H, N, M];
    keep: [B, M]; smaller: how many times smaller the residual is where far more of the batch is flat.
    """

    tensors: Sequence[Tensor]
    lengths: dict[Any, int]
    scores: Tensor
    keep: Tensor | None = None
    smaller: float = 1.0


def stop_left(stops: Mapping[Node | None, Sequence[Stop]], tried: Collection[Node]) -> str | None:
    """Why a program is not the model: a stop that belongs to no loop in which it changes nothing.

    stops: by the scores of their loops; tried: the scores of the sites whose stops were tried.
    """
    for scores, loop_stops in stops.items():
        for stop in loop_stops:
            if scores not in tried and depends_on_data(stop.residual):
                return f"a loop that may end early on {spoken(stop.residual)} stays as it is"
    return None


Residuals = Callable[[Sequence[Tensor], dict[Any, int]], list[float]]
"""Of a region's inputs and its sizes, what the code compares with each threshold."""


def residuals_of(program: Program, stops: Sequence[Stop], inputs: Sequence[Node]) -> Residuals:
    """inputs: the scores and what else enters the region."""
    cut = residuals_cut(program, stops, inputs)
    return lambda tensors, lengths: [float(value) for value in cut.run_all(tensors, lengths)]


def residuals_cut(program: Program, stops: Sequence[Stop], inputs: Sequence[Node]) -> Cut:
    residuals = tuple(stop.residual for stop in stops)
    return Cut(program.graph, inputs, residuals, descendants(inputs[:1]) & ancestors(*residuals))


def dilution(here: float, among_twice: float) -> float:
    """How many times smaller a residual is among FAR times as many, most of them flat.

    among_twice: what it is among twice as many.
    """
    doublings = math.log2(here / among_twice) if here > 0 and among_twice > 0 else 0.0
    return float(FAR ** min(max(doublings, 0.0), 2.0))


def what_a_stop_changes(
    stops: Sequence[Stop],
    residuals: Residuals,
    inside: Sequence[Node],
    half_steps: int,
    attention: Callable[[Trial, int], Tensor],
    trials: Iterable[Trial],
) -> str | None:
    """Why the full budget is not what the teacher computes, at the first scores that show it; None where
    stopping changes nothing.

    inside: the region, in order.  half_steps: the full budget.  attention: after so many half-steps.
    trials: spreads close to each other, for a stop changes most where it has just become due.
    """
    if any(stop.threshold is None for stop in stops):
        return (
            "its loop ends early on a residual that is compared with an unknown number: compare "
            "`residual.item()` or the tensor itself with the threshold"
        )
    if any(not _sums_before(stop.residual, inside) for stop in stops):
        return "it branches on its scores before its loop begins"
    for trial in trials:
        values = residuals(trial.tensors, trial.lengths)
        ended = (stop for stop, value in zip(stops, values, strict=True)
                 if stop.threshold is not None and value / trial.smaller <= stop.threshold)  # fmt: skip
        first = next(ended, None)
        if first is None:
            continue
        full = attention(trial, half_steps)
        for done in _half_steps_before(first.residual, inside, half_steps):
            error = relative_error(attention(trial, done), full)
            if error > HELD:
                return (
                    f"its loop ends early where a residual is at most {first.threshold:g}, which changes "
                    f"the attention by {error:.2g} of its largest entry"
                )
    return None


def _half_steps_before(residual: Node, inside: Sequence[Node], half_steps: int) -> list[int]:
    """How many half-steps are done where a residual is looked at: each has its sums, in the order of the
    graph. Where they do not divide evenly, the neighbours are possible too."""
    sums = sum(node.target in SUMS for node in inside)
    done = _sums_before(residual, inside) * half_steps / max(sums, 1)
    spare = 0 if sums and sums % half_steps == 0 else 1
    low, high = math.floor(done) - spare, math.ceil(done) + spare
    return list(range(max(low, 1), min(high, half_steps) + 1))


def _sums_before(residual: Node, inside: Sequence[Node]) -> int:
    return sum(node < residual for node in inside if node.target in SUMS)
