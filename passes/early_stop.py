"""Early stop: what a loop that ends on a small residual would leave out.

A program holds the full budget, and the residuals that the teacher's code compares with a threshold on
the way. Where the first of them is small enough, the teacher stops. That is harmless if the half-steps
that are left change nothing, which is tried on scores of every spread; otherwise the site is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import Convention, Program, Stop
from asapc.passes.cut import Cut, ancestors, depends_on_data, descendants
from asapc.passes.probe import HELD, Sample, attention_of, convention_error
from asapc.passes.products import BARRIERS, NORMALISERS

aten = torch.ops.aten
SUMS = {  # a half-step has one of them, or as many as every other
    aten.logsumexp.default, aten.softmax.int, aten._softmax.default, aten.log_softmax.int,
    aten._log_softmax.default, aten.sum.dim_IntList, aten.matmul.default, aten.bmm.default,
    aten.mv.default, aten.einsum.default,
}  # fmt: skip


def branches_elsewhere(program: Program) -> str | None:
    """Why a program that was traced one way is not the model: a branch that is no loop's early stop."""
    for stop in program.stops:
        above = ancestors(stop.residual, until=BARRIERS)
        if depends_on_data(stop.residual) and not any(node.target in NORMALISERS for node in above):
            return f"branches on {stop.residual.name}, a number of the data that is no loop's residual"
    return None


def stops_of(program: Program, scores: Node, others: Sequence[Node]) -> list[Stop]:
    """The stops of the loop on these scores.  others: the scores of every site."""
    order = {node: index for index, node in enumerate(program.graph.graph.nodes)}
    found = []
    for stop in program.stops:
        above = ancestors(stop.residual, until=BARRIERS)
        latest = max((node for node in others if node in above), key=order.__getitem__, default=None)
        if latest is scores:
            found.append(stop)
    return found


def what_a_stop_changes(
    program: Program,
    stops: Sequence[Stop],
    inputs: Sequence[Node],
    inside: Sequence[Node],
    convention: Convention,
    observations: Sequence[tuple[Sequence[Tensor], dict[Any, int], Sample]],
) -> str | None:
    """Why the full budget is not what the teacher computes; None where stopping changes nothing.

    inputs: the scores and what else enters the region; inside: the region, in order.
    observations: what was fed to the inputs, the sizes, and what came of it.
    """
    if any(stop.threshold is None for stop in stops):
        return (
            "its loop ends early on a residual that is compared with an unknown number: compare "
            "`residual.item()` or the tensor itself with the threshold"
        )
    below = descendants(inputs[:1])
    run: list[Callable[[Sequence[Tensor], dict[Any, int]], Tensor]] = []
    for stop in stops:
        around = below & ancestors(stop.residual)
        run.append(Cut(program.graph, inputs, stop.residual, around).run)
    worst, at = 0.0, stops[0].threshold
    for tensors, lengths, sample in observations:
        for stop, residual in zip(stops, run, strict=True):
            assert stop.threshold is not None
            if float(residual(tensors, lengths)) > stop.threshold:
                continue
            for done in _half_steps_before(stop.residual, inside, convention.half_steps):
                short = replace(convention, half_steps=done)
                own = attention_of(short, sample.scores, sample.keep)
                error = convention_error(convention, [replace(sample, attention=own)])
                if error > worst:
                    worst, at = error, stop.threshold
            break
    if worst <= HELD:
        return None
    return (
        f"its loop ends early where a residual is at most {at:g}, which changes the attention by up to "
        f"{worst:.2g} of its largest entry"
    )


def _half_steps_before(residual: Node, inside: Sequence[Node], half_steps: int) -> list[int]:
    """How many half-steps are done where a residual is looked at: each has its sums, in the order of the
    graph. Where they do not divide evenly, the neighbours are possible too."""
    order = {node: index for index, node in enumerate(residual.graph.nodes)}
    sums = [node for node in inside if node.target in SUMS]
    before = sum(order[node] < order[residual] for node in sums)
    done = before * half_steps / max(len(sums), 1)
    spare = 0 if sums and len(sums) % half_steps == 0 else 1
    low, high = math.floor(done) - spare, math.ceil(done) + spare
    return list(range(max(low, 1), min(high, half_steps) + 1))
