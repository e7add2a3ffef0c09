"""Early stop: what a loop that ends on a small residual would leave out.

A program holds the full budget, and the residuals that the teacher's code compares with a threshold on
the way. Where the first of them is small enough, the teacher stops. That is harmless if the half-steps
that are left change nothing, which is tried on scores of every spread; otherwise the operator has to end
where the teacher does, by a rule that gives every residual, or the site is refused. A program is not the
model if any stop in it, wherever that is, is neither harmless nor an operator's.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from asapc.ir import MOVES, Convention, Ending, PlanConvention, Program, Stop
from asapc.measure.differences import number_outputs
from asapc.operators.catalogue import by_name, ordered
from asapc.operators.plan import row_duals, settings_of
from asapc.passes.branches import Trace, spoken
from asapc.passes.cut import (
    HALVES,
    SHAPE_ONLY,
    Cut,
    ancestors,
    descendants,
    is_tensor,
    may_change,
    walked,
)
from asapc.passes.experiment import STABILISED, Lengths, NoFit, normal, relative_error, snapped
from asapc.passes.products import BARRIERS, NORMALISERS, SOFTMAXES
from asapc.passes.sinkhorn.probe import HELD, Sample, map_of
from asapc.program.calls import copied, operator_calls

aten = torch.ops.aten
# Of the scores, in units of epsilon: close to each other, since a stop changes most where it has just
# become due; every second of more scores of a head than MANY, every fourth of more than MOST.
SPREADS = (0.0, *(3e-3 * 1.26**step for step in range(51)))
MANY, MOST = 1 << 13, 1 << 16
MANY_EXAMPLES = 32
FAR = 16.0  # times as many examples, or as many tokens, of which all but a few are flat
UNEVEN = (0.1, 1.0, 4.0)  # of scores, likewise, at which a rule is held against residuals
HIDDEN = 1e-3  # error of a rule, of each residual, beside hidden tokens in the loop's own dtype
SUMS = {  # a half-step has one of them, or as many as every other
    aten.logsumexp.default, aten.sum.dim_IntList, aten.matmul.default, aten.bmm.default, aten.mv.default,
    aten.einsum.default, *SOFTMAXES,
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


def stop_left(stops: Mapping[Node | None, Sequence[Stop]], tried: Collection[Node]) -> str | None:
    """Why a program is not the model: a stop that belongs to no loop in which it changes nothing.

    stops: by the scores of their loops; tried: the scores of the sites whose stops were tried.
    """
    for scores, loop_stops in stops.items():
        for stop in loop_stops:
            if scores not in tried and may_change(stop.residual):
                return f"a loop that may end early on {spoken(stop.residual)} stays as it is"
    return None


@dataclass(frozen=True)
class Stopping:
    """A loop, and the stops in it.

    inputs: of its region, the scores first.  inside: the region, in order.  convention: of the full
    budget.  size: of what stands for the scores, at some lengths.  feed: of these in units of epsilon, at
    lengths, with the keys that are active (None: all), what is fed to the inputs, and what goes in with
    that.  gives: what the loop gives, in words.
    """

    program: Program
    stops: Sequence[Stop]
    inputs: Sequence[Node]
    inside: Sequence[Node]
    convention: Convention | PlanConvention
    size: Callable[[Lengths], Sequence[int]]
    feed: Callable[[Tensor, Lengths, Tensor | None], tuple[Sequence[Tensor], Sample]]
    gives: str = "attention"

    @cached_property
    def _residuals(self) -> Cut:
        return residuals_cut(self.program, self.stops, self.inputs)

    def plan(self, given: Sample, half_steps: int) -> Tensor:
        """After so many half-steps."""
        return map_of(replace(self.convention, half_steps=half_steps), given)

    def due(self, tensors: Sequence[Tensor], lengths: Lengths, smaller: float) -> Stop | None:
        """The first stop that is due.  smaller: how many times smaller the residuals are elsewhere."""
        values = self._residuals.run(tensors, lengths)
        ended = (
            stop for stop, value in zip(self.stops, values, strict=True)
            if stop.threshold is not None and float(value) / smaller <= stop.threshold
        )  # fmt: skip
        return next(ended, None)

    def dilution(self, noise: Tensor, lengths: Lengths, twice: Lengths) -> float:
        """How many times smaller the first residual is among FAR times as many, most of them flat, by
        what it is among twice as many."""
        padded = torch.zeros(tuple(self.size(twice)), dtype=torch.float64)
        padded[tuple(slice(0, size) for size in noise.shape)] = noise
        here, there = (
            float(self._residuals.run(self.feed(x, at, None)[0], at)[0])
            for x, at in ((noise, lengths), (padded, twice))
        )
        doublings = math.log2(here / there) if here > 0 and there > 0 else 0.0
        return float(FAR ** min(max(doublings, 0.0), 2.0))


@dataclass(frozen=True)
class Crowd:
    """Where stops are tried.

    few: lengths; grown: those that are larger here.  only: where scores are not 0.  active: the keys that
    are not masked.  smaller: by how much residuals are diluted where most of a crowd is flat, measured
    unless told: one sharp example of many, or a few tokens of many, hardly move a mean.
    """

    few: Lengths
    grown: Lengths = field(default_factory=dict)
    only: tuple[Any, ...] = ()
    active: Tensor | None = None
    smaller: float | None = None

    @property
    def lengths(self) -> Lengths:
        return {**self.few, **self.grown}

    def diluted(self, loop: Stopping, noise: Tensor) -> float:
        if not self.only:
            return 1.0
        twice = {symbol: 2 * size for symbol, size in self.grown.items()}
        return self.smaller or loop.dilution(noise, self.lengths, {**self.lengths, **twice})


def of_many(few: Lengths, examples: Iterable[Any], smaller: float | None = None) -> list[Crowd]:
    """Many examples, where their number is free, of which the first alone, or the last, is not flat."""
    grown = dict.fromkeys(examples, MANY_EXAMPLES)
    return [Crowd(few, grown, (one,), smaller=smaller) for one in (slice(0, 1), slice(-1, None))]


def check_stops(loop: Stopping, crowds: Iterable[Crowd]) -> None:
    """Hold the full budget against what the teacher computes where it stops.  Raises NoFit."""
    if any(stop.threshold is None for stop in loop.stops):
        raise NoFit(
            "its loop ends early on a residual that is compared with an unknown number: compare "
            "`residual.item()` or the tensor itself with the threshold"
        )
    if any(not _sums_before(stop.residual, loop.inside) for stop in loop.stops):
        raise NoFit("it branches on its scores before its loop begins")
    _check_entering(loop)
    generator = torch.Generator().manual_seed(4)
    for crowd in crowds:
        lengths = crowd.lengths
        noise = normal(loop.size(lengths), generator)
        only = torch.zeros_like(noise)
        only[crowd.only] = noise[crowd.only]
        smaller = crowd.diluted(loop, only)
        scores = only[:, 0].numel()
        for spread in SPREADS[:: 1 + (scores > MANY) + 2 * (scores > MOST)]:
            tensors, given = loop.feed(only * spread, lengths, crowd.active)
            first = loop.due(tensors, lengths, smaller)
            if first is None:
                continue
            full = loop.plan(given, loop.convention.half_steps)
            for done in _half_steps_before(first.residual, loop.inside, loop.convention.half_steps):
                error = relative_error(loop.plan(given, done), full)
                if error > HELD:
                    raise NoFit(
                        f"its loop ends early where a residual is at most {first.threshold:g}, which "
                        f"changes the {loop.gives} by {error:.2g} of its largest entry: use a fixed "
                        "number of steps, or stop where the rows' duals or scalings, of marginals that "
                        "sum to 1 or are 1, change little in the mean, looked at in every iteration"
                    )


def _check_entering(loop: Stopping) -> None:
    """That no data or weight enters a residual alone.  Raises NoFit."""
    ends = {*loop.inputs}

    def onward(node: Node) -> Iterable[Node]:
        last = node in ends or node.target in SHAPE_ONLY
        return () if last else filter(is_tensor, node.all_input_nodes)

    known = ends.union(walked(loop.inside, onward))
    for node in walked([stop.residual for stop in loop.stops], onward):  # a weight may be trained
        if not node.all_input_nodes and may_change(node) and node not in known:
            raise NoFit(
                f"its loop ends early on a residual that {spoken(node)} enters, but not its plan: "
                "compare the mean change of all rows"
            )


def ending_of(
    loop: Stopping, sums: Sequence[Node], lengths: Iterable[Lengths],
    hidden: Callable[[Tensor], Iterable[Tensor]],
) -> tuple[Ending, tuple[tuple[int, int], ...]]:  # fmt: skip
    """The rule that gives every residual of a loop, whatever the scores, and the numbers of some stops,
    with the half-steps done there.  sums: of its half-steps.  hidden: the same scores with what may be
    hidden in them, in the loop's own dtype.

    What follows a residual is counted in the graph, and tried in check_endings.  Raises NoFit.
    """
    _check_entering(loop)
    convention, stops = loop.convention, {stop.residual: stop for stop in reversed(loop.stops)}
    assert isinstance(convention, PlanConvention)
    residuals = sorted(stops)
    half_steps, rows_first = convention.half_steps, convention.first_side == "row"
    on_rows = range(1 if rows_first else 2, half_steps + 1, 2)
    done = [sum(node < residual for node in sums) for residual in residuals]
    follow = {count - step for count, step in zip(done, on_rows, strict=False)}
    thresholds = {stop.threshold for stop in stops.values()}
    plain = convention.stabiliser is None and len(sums) == half_steps
    rounded = any(residual.meta["val"].dtype in HALVES for residual in residuals)
    if rounded or not plain or len(done) != len(on_rows) or len(follow) != 1 or len(thresholds) != 1:
        raise NoFit("it does not look after every iteration, or at more than rounding")
    (threshold,), (after,) = thresholds, follow
    assert threshold is not None
    ours: dict[Ending, list[Tensor]] = {
        Ending(moves, threshold, summed, after, ones): []
        for ones, moves, summed in itertools.product((False, True), MOVES, (False, True))
    }
    theirs, generator = [], torch.Generator().manual_seed(5)
    in_order, settings = [stops[x] for x in residuals], settings_of(convention)
    cuts = [residuals_cut(loop.program, in_order, loop.inputs, x) for x in (torch.float64, None)]
    for at, spread in itertools.product(lengths, UNEVEN):
        noise = spread * normal(loop.size(at), generator)
        noise[:1] *= 2.0  # a mean over examples is no largest one
        for number, drawn in enumerate((noise, *hidden(noise))):
            tensors, given = loop.feed(drawn, at, None)
            pairs = zip(tensors, loop.inputs, strict=True)
            tensors = [x.to(node.meta["val"].dtype) if number else x for x, node in pairs]
            scores = convention.score_multiplier * given.scores
            made = torch.stack(cuts[number > 0].run(tensors, at)).flatten().double()
            theirs.append((made, HIDDEN if number else STABILISED))
            for _, alike in itertools.groupby(ours, lambda rule: rule.ones):
                rules = [*alike]
                masses = rules[0].masses(*given.marginals, scores)
                form = settings.get("form", "plan") if number else "plan"
                f = [*row_duals(scores, *masses, half_steps, rows_first, convention.damping, form)]
                for rule in rules:
                    changed = [rule.change(*pair) for pair in itertools.pairwise(f)]
                    ours[rule].append(torch.stack(changed).double())
    for rule, changes in ours.items():
        unit = float(theirs[0][0][0] / changes[0][0])
        if not all(_tells(unit * x, *known, threshold) for x, known in zip(changes, theirs, strict=True)):
            continue
        some = sorted({0, min(1, len(residuals) - 1), len(residuals) - 1})
        ends = ((stops[residuals[i]].number, min(on_rows[i] + after, half_steps)) for i in some)
        return replace(rule, threshold=snapped(threshold / unit)), tuple(ends)
    raise NoFit("no known rule gives its residuals")


def _tells(ours: Tensor, theirs: Tensor, limit: float, threshold: float) -> bool:
    """Whether a rule gives what a loop compares with its threshold; no promise holds beyond a NaN."""
    largest = theirs if limit == HIDDEN else theirs.max()  # else, masses may be rounded
    error = (ours - theirs).abs() / largest.clamp(min=threshold)
    return bool((error <= limit)[theirs.isfinite().cumprod(0).bool()].all())


def check_endings(
    module: nn.Module, program: Program, lifted: Program, ends: Mapping[str, Sequence[tuple[int, int]]]
) -> str | None:
    """Why a rewritten program ends its loops otherwise than the code does, None if it does not.

    Both are made to end early, here and there, whatever the residuals are.  module: what the program was
    captured of.  ends: by site, as of ending_of.
    """
    def outputs(of: nn.Module) -> list[Tensor]:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return number_outputs(of(*copy.deepcopy(program.args), **copy.deepcopy(program.kwargs)))

    for site, number, done in ((site, *end) for site, its in ends.items() for end in its):
        graph, _ = copied(lifted.graph)
        for found in operator_calls(graph):
            if found.settings.get("threshold") is not None:
                changed = {"threshold": None} | ({"half_steps": done} if found.site == site else {})
                known = by_name(found.call.target, found.call.args)
                found.call.args = ordered(found.call.target, known | changed)
        graph.recompile()
        with Trace(number):
            theirs = outputs(module)
        ours = outputs(graph)
        if len(ours) != len(theirs) or not all(map(_alike, ours, theirs)):
            return f"its loop ends early, and after {done} half-steps its code does something else"
    return None


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """Infinities too: a logarithm of a plan has them where entries are hidden."""
    if ours.shape != theirs.shape:
        return False
    infinite = theirs.isinf() & (ours == theirs)
    return relative_error(*(x.masked_fill(infinite, 0) for x in (ours, theirs))) <= HELD


def residuals_cut(
    program: Program, stops: Sequence[Stop], inputs: Sequence[Node],
    precision: torch.dtype | None = torch.float64,
) -> Cut:  # fmt: skip
    """What the code compares with each threshold, of the scores and what else enters the region."""
    residuals = tuple(stop.residual for stop in stops)
    inside = descendants(inputs[:1]) & ancestors(*residuals)
    return Cut(program.graph, inputs, residuals, inside, precision=precision)


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
