"""Plan: is what a graph makes of the scores or costs of a loop a finite Sinkhorn loop, and which?

before: a loop of sums over rows and columns that no family before has explained
after:  PlanSite with its convention, from where its scores are complete to where its plan is, or the
        reason why it is none

What lies between is cut out, promoted to float64 and run on synthetic scores, biases and marginals.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.ir import Ending, OutputFactor, PlanConvention, Program, Side, Stabiliser
from asapc.passes.branches import spoken
from asapc.passes.cut import (
    SHAPE_ONLY,
    Cut,
    ancestors,
    constant_at,
    constants_at,
    data_dependent,
    depends_on_data,
    holds_tensors,
    is_bool,
    is_tensor,
    may_change,
    reached,
    recorded,
)
from asapc.passes.early_stop import FAR, Crowd, Stopping, check_stops, ending_of, of_many
from asapc.passes.experiment import STABILISED, Lengths, NoFit, Sized, outcome, relative_error
from asapc.passes.masks import FILLED
from asapc.passes.plan.hidden import hidden_in, may_hide, may_raise, with_hidden
from asapc.passes.plan.loops import Borders, Loop, before_last, behind_softmax, borders
from asapc.passes.plan.positive import is_positive
from asapc.passes.plan.probe import identify_plan
from asapc.passes.plan.site import Layout, MarginalInput, PlanSite, sizes_of
from asapc.passes.products import BARRIERS, SQUEEZES, VIEWS, rank_of, same, site_name
from asapc.passes.sinkhorn.match import MOST_SLACK, check_choice, guesses_of
from asapc.passes.sinkhorn.probe import (
    HELD,
    MAX_HALF_STEPS,
    Drawn,
    Fit,
    Guesses,
    Pair,
    Sample,
    Trials,
    convention_error,
    double_centre,
    map_of,
    nearest,
    overflown,
    score_multiplier,
)
from asapc.passes.site import Found, Unexplained, Unidentified

aten = torch.ops.aten

# What a marginal may go through on its way into every half-step, with one tensor that varies.
STEPS = {
    aten.expand.default, aten.neg.default, aten.mul.Tensor, aten.div.Tensor,
    aten.log.default, aten.exp.default, aten.logical_not.default, aten.bitwise_not.default, *SQUEEZES,
    *VIEWS,
}  # fmt: skip
MOST_CONSTANTS = 4  # vectors of parameters or sizes alone that are tried as marginals
MOST_DAMPED = 4  # of the likeliest ends of a loop, those at which it is tried as an unbalanced one
MOST_KERNELS = 2  # tensors that are tried as exp(scores), where no scores explain a loop
MASKED = (1.0, 1.0, 1.0, 6.0, 25.0)  # standard deviations of scores of which some tokens are hidden
LEVELS = (-2.0, 0.7, 3.0)  # scores of a slack at which a loop is tried
FITTED = 6  # experiments that are passed where a loop is known, but not what hides its scores
KNOWN = 9  # where another end of it would change nothing
FEW = 8  # half-steps that are tried beyond twice as many as a loop has sums


def find_plan(program: Program, free: Unexplained) -> Iterator[Found]:
    """Every loop that is left, or why it is none."""
    failed: dict[object, NoFit] = {}
    for loop in free.loops:
        yield loop.at, _examine(program, loop, failed)


def _examine(program: Program, loop: Loop, failed: dict[object, NoFit]) -> PlanSite | Unidentified:
    """failed: why regions of earlier loops are no plans, by what they compute."""
    def refused(reason: str, at: Node | None = loop.at) -> Unidentified:
        return Unidentified(f"a loop of rows and columns: {reason}", frozenset(loop.sums), at)

    if loop.axes is None:
        return refused(loop.why)
    edges = borders(program.graph, loop)
    if not edges.ends and len(loop.sums) > 2:  # what is made of the plan may be divided by its sums
        shorter = replace(loop, sums=loop.sums[:-1])
        before = borders(program.graph, shorter)
        loop, edges = (shorter, before) if before.ends else (loop, edges)
    if not edges.ends:
        return refused(edges.why, edges.at)
    failures, fitted = [], set[tuple[Node, bool, bool]]()
    for number, (part, start, end, kernel) in enumerate(_tried(program, loop, edges)):
        like = (start, kernel, is_positive(end))  # plans, or their logarithms
        if like in fitted:
            continue
        sums = len(part.sums) if number < MOST_DAMPED or kernel else 0
        result = outcome(partial(_site, program, part, start, end, kernel, sums, failed))
        if isinstance(result, PlanSite):
            later = _exp_of(result)
            if later is None:
                return result
            past = outcome(partial(_site, program, part, start, later, kernel, sums, failed))
            return past if isinstance(past, PlanSite) else result
        failures.append(result)
        if result.reached >= FITTED:
            fitted.add(like)
        if result.reached >= KNOWN:
            break
    return refused(str(max(failures, key=lambda failure: failure.reached)))


def _tried(program: Program, loop: Loop, edges: Borders) -> Iterator[tuple[Loop, Node, Node, bool]]:
    """What may be scores and plan, the likeliest first; then what may be exp(scores) and plan, and a plan
    before its last sum."""
    yield from ((loop, start, end, False) for start, end in _by_likeliness(edges))
    yield from ((loop, start, end, True) for start, end in _kernels(edges))
    rest = behind_softmax(loop)
    if rest is not None:
        kernels = _kernels(borders(program.graph, rest))
        yield from ((rest, start, end, True) for start, end in kernels)
    before = before_last(loop)
    if before is not None:
        shorter, plan = before
        pairs = _by_likeliness(borders(program.graph, shorter))
        yield from ((shorter, start, end, False) for start, end in pairs if end is plan)


def _kernels(edges: Borders) -> list[tuple[Node, Node]]:
    """Those that can be kernels: nowhere negative, and near the loop."""
    near = [start for start in edges.starts[:MOST_KERNELS] if is_positive(start)]
    return [(start, end) for start, end in _by_likeliness(edges) if start in near]


def _exp_of(site: PlanSite) -> Node | None:
    """What is read of a log plan, up to what is added to it, if that is exp alone: a site that ends there
    takes no logarithm, and no exp is computed anew by every kernel that Inductor fuses it into."""
    node, reads = site.at, site.convention.log
    while reads:
        users = [user for user in node.users if user.users or user.op == "output"]
        if len(users) != 1:
            return None
        (node,) = users
        if node.target is aten.exp.default:
            return node
        reads = node.target in {aten.add.Tensor, aten.sub.Tensor}
    return None


def _by_likeliness(edges: Borders) -> list[tuple[Node, Node]]:
    """Starts and ends; near the loop first, on either side."""
    starts, ends = edges.starts, edges.ends
    return sorted(
        itertools.product(starts, ends),
        key=lambda pair: (starts.index(pair[0]) + ends.index(pair[1]), starts.index(pair[0])),
    )


class _Region(Sized):
    """Everything between a start and an end, as a function of the scores and of what else enters.

    kernel: whether the start holds exp(scores), as where a constant is added to a softmax.
    """

    def __init__(
        self, program: Program, loop: Loop, start: Node, end: Node, kernel: bool = False
    ) -> None:
        graph = program.graph
        assert loop.axes is not None
        self.kernel = kernel
        self.most = min(MAX_HALF_STEPS, 2 * len(loop.sums) + FEW)
        turned = rank_of(end) == rank_of(start)
        self.start = Layout.of(start, *loop.axes)
        self.end = Layout.of(end, *(loop.axes if turned else (-2, -1)))
        self.leads, self.tokens = self.start.shape[:-2], self.start.shape[-2:]
        inside = _made_of(start) & (ancestors(end) | {end})
        self.inside = frozenset(inside | {end})
        self.ordered = [node for node in graph.graph.nodes if node in self.inside]
        self.guesses = guesses_of(self.ordered)
        self.slack = _slack(graph, self.inside) if loop.slack else None
        self.level = 0.0
        if self.slack is not None:
            value = constant_at(graph, self.slack)
            assert value is not None
            self.level = float(value)
            self.guesses = Guesses((math.exp(min(self.level, MOST_SLACK)),), ("add",), ("plain",))
        self.entering, self.counted = _entering(graph, self.start, self.inside)
        self.data = [node for node, is_data in self.entering.items() if is_data]
        self.constants = [node for node in self.entering if node not in self.data]
        self.graph = graph
        self.cut = self._cut(torch.float64)
        self.sizes = self.small()
        self.sums = loop.sums
        of_it = {start, *inside}
        self.stops = [stop for stop in program.stops if ancestors(stop.residual, until=BARRIERS) & of_it]

    def _cut(self, precision: torch.dtype | None) -> Cut:
        inputs = [self.start.node, *self.data, *([] if self.slack is None else [self.slack])]
        made = (self.end.node, *self.constants)
        return Cut(self.graph, inputs, made, self.inside, precision=precision)

    def fingerprint(self) -> object:
        """All that decides what is found: the same of two regions where one says it of both."""
        hide = [(may_hide(node), may_raise(node)) for node in (self.start.node, *self.entering)]
        layouts = [(one.order, one.heads) for one in (self.start, self.end)]
        inputs = [(spoken(node), is_data) for node, is_data in self.entering.items()]
        return self.cut.fingerprint(), self.kernel, self.level, *hide, *layouts, *inputs

    @cached_property
    def as_it_is(self) -> Cut:
        """In the dtypes of the program."""
        return self._cut(None)

    def observe(
        self, scores: Tensor, values: Mapping[Node, Tensor], lengths: Lengths
    ) -> tuple[Tensor, dict[Node, Tensor]]:
        """What leaves [B, H, N, M] for scores [B, H, N, M], and what every input held; in float64, or as
        it is where scores are in another dtype."""
        cut = self.cut if scores.dtype == torch.float64 else self.as_it_is
        if cut is not self.cut:
            values = {node: value.to(node.meta["val"].dtype) for node, value in values.items()}
        tensors = [self.raw(scores, lengths), *(values[node] for node in self.data)]
        if self.slack is not None:
            shape = self.cut.shape_of(self.slack, lengths)
            tensors.append(torch.full(shape, self.level, dtype=scores.dtype))
        made, *constants = cut.run(tensors, lengths)
        out = self.end.matrices(made.to(scores.dtype)).reshape(scores.shape)
        return out, {**values, **dict(zip(self.constants, constants, strict=True))}

    def raw(self, scores: Tensor, lengths: Lengths) -> Tensor:
        """What the start holds for scores [B, H, N, M]."""
        value = scores.exp() if self.kernel else scores
        return self.start.raw(value, self.cut.shape_of(self.start.node, lengths))


def _made_of(start: Node) -> set[Node]:
    """Every tensor that is computed from the values of another, not from its sizes alone."""
    def onward(node: Node) -> list[Node]:
        return [x for x in node.users if holds_tensors(x) and x.target not in SHAPE_ONLY]

    return reached(onward(start), onward)


def _entering(
    graph: GraphModule, scores: Layout, inside: frozenset[Node]
) -> tuple[dict[Node, bool], set[Node]]:
    """What enters beside the scores, by the tensor that it is made of: whether it is data, and not a
    constant, which is not one number then; and what enters as a number for every example, too."""
    data, start = data_dependent(graph), scores.node
    inputs: dict[Node, bool] = {}
    counted: set[Node] = set()
    for node in graph.graph.nodes:
        if node not in inside:
            continue
        for source in node.all_input_nodes:
            if source in inside or source is start or not is_tensor(source):
                continue
            number = source in data and not _fits(source, scores)
            root = _root(source, scores, number)
            if root in data or not _is_one_number(root):
                inputs.setdefault(root, root in data)
            if number:
                counted.add(root)
    return inputs, counted


def _root(node: Node, scores: Layout, number: bool) -> Node:
    """The tensor that a node repeats or scales; the last one on the way to it that can still be added to
    scores or be a marginal of theirs, where there is one.  number: whether it is one number for every
    example, such as how many tokens a mask keeps: then it is made of that tensor in whatever way."""
    path = [node]
    while node.target in STEPS or number:
        varying = [n for n in node.all_input_nodes if is_tensor(n) and not _is_one_number(n)]
        if len(varying) != 1 or varying[0] is scores.node or node.target in BARRIERS:
            break
        node = varying[0]
        path.append(node)
        number = number and not _fits(node, scores)
    return next((n for n in reversed(path) if _fits(n, scores)), path[0])


def _fits(node: Node, scores: Layout) -> bool:
    return _is_matrix(node, scores) or bool(_sides(node, scores))


def _slack(graph: GraphModule, inside: frozenset[Node]) -> Node | None:
    """The only weight of one entry that enters a region, if its value can be told."""
    slacks = set()
    for source in {x for node in inside for x in node.all_input_nodes} - inside:
        if not (is_tensor(source) and _is_one_number(source) and may_change(source)):
            continue
        while any(not isinstance(size, int) or size != 1 for size in source.meta["val"].shape):
            source = next(x for x in source.all_input_nodes if is_tensor(x) and may_change(x))
        slacks.add(source)
    if len(slacks) != 1:
        return None
    (slack,) = slacks
    return None if depends_on_data(slack) or constant_at(graph, slack) is None else slack


def _is_one_number(node: Node) -> bool:
    """One entry, or one number everywhere by how it is made."""
    sizes = node.meta["val"].shape
    if node.target in FILLED or all(isinstance(size, int) and size == 1 for size in sizes):
        return True
    sources = [n for n in node.all_input_nodes if is_tensor(n)]
    return node.target in STEPS and bool(sources) and all(_is_one_number(n) for n in sources)


# What enters beside the scores


@dataclass(frozen=True)
class _Roles:
    """What every input is taken for, by side; biases are what remains."""

    log_mu: MarginalInput | None = None
    log_nu: MarginalInput | None = None

    @property
    def marginals(self) -> list[MarginalInput]:
        return [x for x in (self.log_mu, self.log_nu) if x is not None]

    @property
    def nodes(self) -> set[Node]:
        return {x.node for x in self.marginals}

    def powered(self, powers: Pair) -> _Roles:
        """The same, taken to these powers."""
        both = zip((self.log_mu, self.log_nu), powers, strict=True)
        return _Roles(*(None if x is None else replace(x, power=power) for x, power in both))


def _roles(region: _Region) -> list[_Roles]:
    """What the vectors among the inputs may be, data alone first.  Raises NoFit where one is nothing.

    One input can be a marginal of the rows, and one of the columns, or one of both: data must be,
    constants may. Constants that are equal, as where a loop makes them anew, are one.
    """
    options: list[tuple[Side, MarginalInput]] = []
    for node, is_data in _distinct(region).items():
        if _is_matrix(node, region.start):
            if not node.meta["val"].is_floating_point():
                raise _enters(node, "a mask in every half-step: hide scores before the loop")
            continue
        sides = _sides(node, region.start, is_data, node in region.counted)
        if is_data and not sides:
            raise _enters(node, "neither a marginal nor a bias")
        options += sides
    nodes = {marginal.node for _, marginal in options}
    data = nodes & {*region.data}
    if len(data) > 2 or len(nodes - data) > MOST_CONSTANTS:
        raise NoFit("more vectors enter its half-steps than it has marginals", reached=1)
    rows, columns = ([None, *(x for side, x in options if side == one)] for one in ("row", "column"))
    roles = [_Roles(mu, nu) for mu, nu in itertools.product(rows, columns)]
    possible = [
        role for role in roles
        if role.nodes >= data and (
            len(role.nodes) == len(role.marginals)  # or one vector is both sides', and the same to both
            or len({(x.logarithm, x.hidden, x.shared) for x in role.marginals}) == 1
        )
    ]  # fmt: skip
    if not possible:
        raise NoFit("two inputs could be the same marginal", reached=1)
    return sorted(possible, key=lambda role: len(role.nodes - data))


def _distinct(region: _Region) -> dict[Node, bool]:
    """The inputs of a region, and whether they are data; of constants that are equal, the first."""
    constants = constants_at(region.graph, region.constants, region.few)
    known = dict(zip(region.constants, constants, strict=True))
    inputs: dict[Node, bool] = {}
    values: list[Tensor] = []
    for node, is_data in region.entering.items():
        value = known.get(node)
        if value is not None:
            if any(torch.equal(value, other) for other in values):
                continue
            values.append(value)
        inputs[node] = is_data
    return inputs


def _enters(node: Node, what: str) -> NoFit:
    return NoFit(f"its plan depends on {spoken(node)}, which is {what}", reached=1)


def _is_matrix(node: Node, start: Layout) -> bool:
    """Whether it has rows and columns, and broadcasts to the scores."""
    shape, scores = node.meta["val"].shape, start.node.meta["val"].shape
    if len(shape) < 2 or len(shape) > len(scores):
        return False
    return all(
        same(one, other) or (isinstance(one, int) and one == 1 and back > 2)
        for back, (one, other) in enumerate(zip(reversed(shape), reversed(scores), strict=False), 1)
    )


def _sides(
    node: Node, start: Layout, data: bool = True, counted: bool = False
) -> list[tuple[Side, MarginalInput]]:
    """The marginals that a tensor may be.  counted: whether its sum enters the loop, too."""
    shape, is_mask = [*node.meta["val"].shape], is_bool(node)
    if not (is_mask or node.meta["val"].is_floating_point()):
        return []
    rank, leads = len(shape), rank_of(start.node) - 2
    options: list[tuple[Side, MarginalInput]] = []
    sides: tuple[tuple[Side, Any], ...] = (("row", start.queries), ("column", start.keys))
    for side, tokens in sides:
        drop: int | None = None
        if rank and same(shape[-1], tokens):
            one = rank == leads + 2 and isinstance(shape[-2], int) and shape[-2] == 1
            drop = -2 if one else None
        elif rank > 1 and isinstance(shape[-1], int) and shape[-1] == 1 and same(shape[-2], tokens):
            drop = -1
        else:
            continue
        before = rank - 1 - (drop is not None)
        if before > leads or (before and not (leads == 1 or start.kept)):
            continue
        per_head = leads == 2 and before == 1 and same(shape[0], start.heads)
        by_example = before == 1 and (same(shape[0], 1) or same(shape[0], start.shape[0]))
        if before == 1 and leads == 1 and not by_example:
            continue
        if is_mask or counted:  # every example has tokens of its own
            options += [
                (side, MarginalInput(node, False, drop, True, False, hidden=hidden, shared=shared))
                for shared in (counted, not counted) for hidden in ((False, True) if is_mask else (None,))
                if by_example and data
            ]  # fmt: skip
            continue
        options += [
            (side, MarginalInput(node, logarithm, drop, heads, not data))
            for heads in [*([True] if by_example else []), *([False] if per_head or before != 1 else [])]
            for logarithm in (True, False)
        ]
    return options


# Experiments


class _Trials(Trials):
    """Observations of a region, with its inputs in their roles.

    log: whether its plan is a logarithm.  reached: the experiments that were passed.
    """

    reached = 2

    def __init__(self, region: _Region, roles: _Roles) -> None:
        self.region, self.roles, self.log = region, roles, False
        self.cut, self.sizes = region.cut, region.sizes
        self.leads, self.tokens = region.leads, region.tokens
        self.biases = [node for node in region.entering if _is_matrix(node, region.start)]
        self.coefficients: list[float] = [0.0] * len(self.biases)
        self.by_head: Tensor | None = None
        self.masks = 0  # that were drawn

    def size(self, at: Lengths | None = None) -> tuple[int, ...]:
        start = self.region.start
        shape = self.cut.shape_of(start.node, self.few if at is None else at)
        return tuple(start.matrices(torch.empty(shape, device="meta")).shape)

    def draw(self, lengths: Lengths | None = None, whole: bool = False) -> dict[Node, Tensor]:
        """Values of what is data.  whole: masks hide nothing."""
        drawn: dict[Node, Tensor] = {}
        for node in self.region.data:
            shape = self.cut.shape_of(node, self.few if lengths is None else lengths)
            value = self.normal(shape)
            marginal = next((x for x in self.roles.marginals if x.node is node), None)
            if marginal is not None:
                axis = -2 if marginal.drop == -1 else -1
                if marginal.is_mask:
                    shown = self._shown(value, axis, whole)
                    value = shown * value.exp() if marginal.hidden is None else shown != marginal.hidden
                else:
                    value = torch.log_softmax(value, axis)
                    value = value if marginal.logarithm else value.exp()
            drawn[node] = value
        return drawn

    def _shown(self, value: Tensor, axis: int, whole: bool) -> Tensor:
        """Which tokens have mass, by random numbers: about half, never none; of many examples the last
        has one, and the first has all, as has a single example every other time."""
        self.masks += 1
        shown = value > 0.0
        shown[-1] = False
        shown.select(axis, self.masks % shown.shape[axis]).fill_(True)
        every = len(shown) if whole else 1 if len(shown) > 1 or self.masks % 2 else 0
        shown[:every] = True
        return shown

    def observe(
        self, scores: Tensor, lengths: Lengths | None = None, mild: bool = True,
        values: dict[Node, Tensor] | None = None,
    ) -> tuple[Sample, list[Tensor]]:  # fmt: skip
        """What was observed, with everything that is added to the scores in them; and what is added.
        values: values of what is data, drawn where there are none."""
        lengths = self.few if lengths is None else lengths
        values = self.draw(lengths) if values is None else values
        out, held = self.region.observe(scores, values, lengths)
        shape = self.cut.shape_of(self.region.start.node, lengths)
        added = [
            self.region.start.matrices(held[node].to(scores.dtype).broadcast_to(shape)).reshape(scores.shape)
            for node in self.biases
        ]
        for coefficient, bias in zip(self.coefficients, added, strict=True):
            scores = scores + coefficient * bias
        if self.by_head is not None:
            scores = scores * self.by_head[:, None, None].to(scores.dtype)
        log_mu, log_nu = (
            None if x is None else x.read(held[x.node].to(scores.dtype))
            for x in (self.roles.log_mu, self.roles.log_nu)
        )
        return Sample(scores, out.exp() if self.log else out, None, mild, log_mu, log_nu), added

    def measure(self) -> None:
        """Find how much the scores, every bias and every head count.  Raises NoFit."""
        size = self.size()
        for scale in (1.0, 0.1, 0.01):
            values = self.draw(whole=True)
            o, added = self.observe(scale * self.noise(), values=values)
            if not bool(((o.attention > 0) & o.attention.isfinite()).all()):
                continue
            logs = double_centre(o.attention.log())
            terms = [double_centre(x) for x in (o.scores, *added)]
            table = torch.stack([x.flatten() for x in terms], -1)
            # Beside columns of zeros, torch's gelsy now and then takes the rank to be 0.
            weights = torch.linalg.lstsq(table, logs.flatten(), driver="gelsd").solution
            per_head = [
                (logs[:, h] * terms[0][:, h]).sum() / terms[0][:, h].square().sum()
                for h in range(size[1])
            ]  # fmt: skip
            if not added and size[1] > 1 and self.region.start.kept:
                heads = torch.stack(per_head)
                if float((heads / heads[0] - 1).abs().max()) > 1e-9 and bool((heads != 0).all()):
                    self.by_head = heads / heads[0]
                    weights = heads[:1]
            self.rough = float(weights[0])
            self.coefficients = [float(x) / self.rough for x in weights[1:]]
            # Anew, with what was found in the scores.
            o, _ = self.observe(scale * self.noise(), values=values)
            score_multiplier([o])
            return
        raise NoFit("its end is 0 or not finite for some scores: neither a plan nor its logarithm")

    def on(self, scores: Tensor, at: Lengths | None = None, mild: bool = False) -> Sample | None:
        o, _ = self.observe(scores, at, mild)
        return None if overflown(o.attention) else o

    def fed(
        self, scores: Tensor, lengths: Lengths, _active: Tensor | None
    ) -> tuple[list[Tensor], Sample]:
        """What is fed to the region's inputs for scores in units of epsilon, and what was observed."""
        scores, values = scores / abs(self.rough), self.draw(lengths)
        sample, _ = self.observe(scores, lengths, values=values)
        return [self.region.raw(scores, lengths), *(values[node] for node in self.region.data)], sample


def _site(
    program: Program, loop: Loop, start: Node, end: Node, kernel: bool, sums: int,
    failed: dict[object, NoFit],
) -> PlanSite:  # fmt: skip
    """The site between a start and an end; what failed in one layer of a model is not tried again in the
    others.  Raises NoFit."""
    region = _Region(program, loop, start, end, kernel)
    if sizes_of(region.end, region.start) is None:
        raise NoFit("its plan has sizes that its scores do not show")
    roles = _roles(region)
    alike = None if region.stops else (region.fingerprint(), sums)
    if alike in failed:
        raise failed[alike]
    failures = []
    for role in roles:
        trials = _Trials(region, role)
        try:
            fit = _identified(trials, sums)
            trials.reached = KNOWN
            ending, ends = _ending(program, trials, fit) if region.stops else (None, ())
            fit = replace(fit, convention=replace(fit.convention, ending=ending))
            _check_empty(program, trials.roles)
            return replace(_made(program, fit, trials), ends=ends)
        except NoFit as no_fit:
            failures.append(NoFit(str(no_fit), reached=trials.reached))
            if trials.reached >= FITTED:
                break
    nearest = max(failures, key=lambda failure: failure.reached)
    if alike is not None:
        failed[alike] = nearest
    raise nearest


def _check_empty(program: Program, roles: _Roles) -> None:
    """That no mask hides every token of an example in the example call."""
    masks = {x.node: x for x in roles.marginals if x.is_mask and x.guarded}
    held = recorded(program.graph, masks, (program.args, program.kwargs)) if masks else {}
    for node, value in held.items():
        axis = -2 if masks[node].drop == -1 else -1
        if not bool((value != bool(masks[node].hidden)).any(axis).all()):
            raise NoFit(f"what an example gives in which {spoken(node)} hides every token is not known")


def _identified(trials: _Trials, sums: int) -> Fit[PlanConvention]:
    """Raises NoFit."""
    region, roles = trials.region, trials.roles
    first, _ = trials.observe(trials.noise())
    trials.log = bool((first.attention < 0).any())
    if not roles.nodes and 1 in first.scores.shape[-2:]:
        trials.reached = KNOWN
        check_choice(*(trials.observe(trials.noise())[0].attention for _ in range(2)))
    trials.reached = 2
    trials.measure()
    trials.reached = 3
    if roles.nodes:  # which role is right is seen on a few mild scores
        few = [o for spread in (1.0, 3.0) if (o := trials.drawn(Drawn(spread))) is not None]
        identify_plan(few, region.guesses, region.most, sums)
    trials.reached = 4
    try:
        fit = trials.fitted(partial(identify_plan, guesses=region.guesses, most=region.most, sums=sums))
    except NoFit as no_fit:
        raise _described(no_fit, trials.samples) from None
    trials.reached = 5
    trials.roles = roles.powered(fit.powers)
    trials.check_larger_loops(fit.convention, first.scores.shape[1])
    trials.reached = FITTED
    added = [] if region.kernel else [region.start.node, *trials.biases]
    fit = with_hidden(trials.scores, lambda s: trials.observe(s)[0], fit, added)
    if any(x.is_mask for x in roles.marginals):
        _check_masks(trials, fit.convention)
    return fit if region.slack is None else _with_slack(trials, fit)


def _with_slack(trials: _Trials, fit: Fit[PlanConvention]) -> Fit[PlanConvention]:
    """The fit as a function of the score of its slack.

    a = 1 / (K b + exp(t)) and b = 1 / (K' a + exp(t)) are the scalings of exp(-t) K with masses exp(-t)
    and a constant of 1.
    """
    convention = replace(
        fit.convention, stabiliser=Stabiliser("scaling", "add", 1.0), output_factor=OutputFactor(),
        source_marginal="constant", target_marginal="constant",
    )  # fmt: skip
    before = trials.region.level
    for level, spread in itertools.product((before, *LEVELS), (1.0, 6.0, 25.0)):
        trials.region.level = level
        sample = trials.drawn(Drawn(spread))
        trials.region.level = before
        if sample is None:
            continue
        masses = torch.full((1, 1, 1), -level, dtype=torch.float64)
        scores = sample.scores - level / convention.score_multiplier
        ours = map_of(convention, replace(sample, scores=scores, log_mu=masses, log_nu=masses))
        if not relative_error(ours * math.exp(level), sample.attention) <= STABILISED:
            raise NoFit("its slack is no row and column of one score that are never normalised")
    return replace(fit, convention=convention)


def _check_masks(trials: _Trials, convention: PlanConvention) -> None:
    """Where tokens are hidden in the loop's own precision."""
    if trials.log:
        raise NoFit("tokens that a mask hides in it have no logarithm of a plan: read its plan")
    dtype = trials.region.start.node.meta["val"].dtype
    for spread in MASKED:
        observed = trials.on(trials.scores(spread).to(dtype))
        error = convention_error(convention, [] if observed is None else [observed])
        if not error <= max(HELD, 4 * torch.finfo(dtype).eps):
            raise NoFit(f"with hidden tokens in {dtype} another plan", error)
    if convention.stabiliser is not None and not convention_error(
        convention, [_below_hidden(trials, convention)]
    ) <= STABILISED:
        raise NoFit("beside hidden tokens of far higher scores it is another plan")
    values = trials.draw()
    for x in trials.roles.marginals:
        if x.hidden is not None:
            values[x.node][-1] = x.hidden
    empty, _ = trials.observe(trials.noise().to(dtype), values=values)
    if convention_error(convention, [empty]) <= HELD:  # as where a constant is in the divisions
        both = (trials.roles.log_mu, trials.roles.log_nu)
        trials.roles = _Roles(*(x and replace(x, guarded=x.hidden is None) for x in both))


def _below_hidden(trials: _Trials, convention: PlanConvention) -> Sample:
    """Where hidden tokens have far higher scores, every other sum of those shown is as small as the
    constant: only then it counts whether masses are 1 or shares."""
    assert convention.stabiliser is not None
    higher = -math.log(convention.stabiliser.constant) / convention.score_multiplier
    values, scores = trials.draw(), trials.scores()
    for x, axis in ((trials.roles.log_mu, -1), (trials.roles.log_nu, -2)):
        along = -2 if x is not None and x.drop == -1 else -1
        if x is None or not x.is_mask or values[x.node].shape[along] < 2:
            continue
        shown = torch.ones_like(values[x.node], dtype=torch.bool)
        shown.narrow(along, 0, 1).fill_(False)
        values[x.node] = shown.double() if x.hidden is None else shown != x.hidden
        hidden = x.read(values[x.node]).isinf().unsqueeze(axis)
        every_other = torch.arange(scores.shape[axis]) % 2
        scores = scores + higher * hidden * (every_other if axis == -1 else every_other[:, None])
    return trials.observe(scores, values=values)[0]


def _ending(
    program: Program, trials: _Trials, fit: Fit[PlanConvention]
) -> tuple[Ending | None, tuple[tuple[int, int], ...]]:
    """Where a loop ends early, None where that changes nothing; the rest as of ending_of."""
    region, few = trials.region, trials.few
    entering = [region.start.node, *region.data]
    loop = Stopping(
        program, region.stops, entering, region.ordered, fit.convention, trials.size, trials.fed, "plan"
    )
    # In a far larger batch one sharp example does less to a mean, or to its square.
    many = of_many(few, region.examples, FAR**2) if region.examples else []
    try:
        check_stops(loop, [Crowd(few), *many])
    except NoFit as changes:
        counts = ({**few, **dict.fromkeys(region.examples, count)} for count in (1, 5))
        sizes, hidden = [*trials.sizes, *counts], partial(hidden_in, region.start.node, fit.convention)
        ending = outcome(lambda: ending_of(loop, region.sums, sizes, hidden))
        if isinstance(ending, NoFit):
            raise changes from None
        return ending
    return None, ()


def _described(failure: NoFit, observed: Sequence[Sample]) -> NoFit:
    """Why it is none, what comes nearest, and what would make it match."""
    text = str(failure).replace("attention", "plan")
    if failure.error is None:
        with contextlib.suppress(NoFit):
            near = nearest(observed)
            text += (
                f"; nearest are {near.half_steps} half-steps, {near.first_side}s first, relative error "
                f"{near.error:.2g}"
            )
    advice = next((advice for part, advice in _ADVICE.items() if part in text), None)
    return NoFit(text if advice is None else f"{text}; {advice}")


_ADVICE = {
    "neither rows nor columns": "a loop matches that divides by whole sums, or by one power of them all: "
    "what scales the plan afterwards does not",
    "not a row and column scaling": "a loop matches that only scales the rows and columns of exp(scores)",
    "not strictly positive": "hide scores before the loop, not in it",
}


def _made(program: Program, fit: Fit[PlanConvention], trials: _Trials) -> PlanSite:
    def kind(marginal: MarginalInput | None) -> Any:
        return "uniform" if marginal is None else "constant" if marginal.constant else "input"

    region, roles = trials.region, trials.roles
    convention = replace(
        fit.convention, log=trials.log,
        source_marginal=kind(roles.log_mu) if region.slack is None else "constant",
        target_marginal=kind(roles.log_nu) if region.slack is None else "constant",
        by_head=None if trials.by_head is None else tuple(trials.by_head.tolist()),
    )  # fmt: skip
    if region.kernel and math.isclose(convention.score_multiplier, 1.0):  # K to the power 1 is K
        convention = replace(convention, score_multiplier=1.0)
    end = region.end.node
    return PlanSite(
        site_name(program, end), convention, region.start.heads or 1, None, fit.error, region.start,
        region.end, region.inside, roles.log_mu, roles.log_nu,
        tuple(zip(trials.biases, trials.coefficients, strict=True)), region.kernel, region.slack,
    )  # fmt: skip
