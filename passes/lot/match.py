"""Match LOT: two plans against a learnt pivot measure, glued, found by what they compute.

before: q -> plan [N, R], k -> plan [R, M], the product of both with the values, in whatever code
after:  LotSite with queries, keys, values and everything the operator needs, or a reason

A plan is a function of its tokens, where its scores are inner products with pivots, or of its scores,
whatever they are made of: they are then inner products with the R unit vectors.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.ir import LotConvention, OutputFactor, PlanConvention, Program, Side
from asapc.operators.lot import lot as lot_reference
from asapc.operators.sinkhorn import factor_terms, factor_value
from asapc.passes.branches import spoken
from asapc.passes.cut import ancestors, data_dependent, descendants, is_tensor, reached, separate
from asapc.passes.early_stop import Crowd, Stopping, check_stops, of_many
from asapc.passes.experiment import (
    STABILISED,
    Experiment,
    Lengths,
    NoFit,
    first_fit,
    outcome,
    relative_error,
    snapped,
)
from asapc.passes.lot.probe import Half, HalfFit, Masses, candidates, identify_half, per_head
from asapc.passes.lot.site import LotSite, ends_in_one
from asapc.passes.plan.loops import TURNS
from asapc.passes.products import (
    BARRIERS,
    NORMALISERS,
    Canonical,
    KeyMask,
    Product,
    product_of,
    same,
    site_name,
)
from asapc.passes.sinkhorn.probe import Sample, factor_of
from asapc.passes.site import Found, Place, Unidentified

aten = torch.ops.aten

CONTRACTIONS = {
    aten.matmul.default, aten.bmm.default, aten.mm.default, aten.einsum.default, aten.linear.default,
    aten.cdist.default, aten._cdist_forward.default,
}  # fmt: skip
SIDES = ("query", "key")


@dataclass(frozen=True)
class _Candidate:
    """inner: the key plan times the values; outer: the query plan times what inner gives.

    sides: each plan as a function of its tokens and, where they are found, of its scores.
    """

    inner: Product
    outer: Product
    sides: tuple[tuple[Half, ...], tuple[Half, ...]]

    @property
    def inside(self) -> frozenset[Node]:
        """Of both plans, and of the products."""
        plans = (half.between for side in self.sides for half in side[:1])
        return frozenset().union(*plans, {self.inner.node, self.outer.node})


def find_lot(program: Program, places: Sequence[Place]) -> Iterator[Found]:
    """Every pair of chained products with a plan against pivots on each side, wherever it is."""
    within: set[Node] = set()
    for candidate in _candidates(program.graph):
        if candidate.outer.node in within:  # the row sums of one before
            continue
        site = outcome(partial(_examine, program, candidate))
        if isinstance(site, NoFit):
            yield candidate.outer.node, Unidentified(str(site), candidate.inside)
        else:
            within |= site.covers
            yield candidate.outer.node, site


def _candidates(graph: GraphModule) -> Iterator[_Candidate]:
    data = data_dependent(graph)
    for node in graph.graph.nodes:
        outer = product_of(node)
        inner = None if outer is None else _inner(outer, data)
        if outer is None or inner is None:
            continue
        plans = (outer.map, inner.map.turned())
        queries, keys = (_halves(graph, plan, data) for plan in plans)
        if queries and keys:
            yield _Candidate(inner, outer, (queries, keys))


def _inner(outer: Product, data: set[Node]) -> Product | None:
    """The product that the outer one's right operand is, up to numbers and layout."""
    def onward(node: Node) -> list[Node]:
        goes_on = node in data and is_tensor(node) and node.target not in BARRIERS
        return node.all_input_nodes if goes_on and product_of(node) is None else []

    products = [product for x in reached([outer.right], onward) if (product := product_of(x)) is not None]
    return products[0] if len(products) == 1 else None


def _halves(graph: GraphModule, plan: Canonical, data: set[Node]) -> tuple[Half, ...]:
    """A plan [.., N, R] as a function of its tokens, then of its scores."""
    start = _tokens(graph, plan, data)
    if start is None:
        return ()
    tokens, product = start
    scores = _scores(graph, plan, product, data)
    return (tokens,) if scores is None else (tokens, scores)


def _tokens(graph: GraphModule, plan: Canonical, data: set[Node]) -> tuple[Half, Node] | None:
    """The latest tensor [.., N, D] that meets parameters in a product and separates the plan, and that
    product."""
    for node in sorted(ancestors(plan.node), reverse=True):
        if node.target not in CONTRACTIONS:
            continue
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        moving = [n for n in operands if n in data]
        if len(moving) != 1 or len(operands) < 2:
            continue
        for source in (moving[0], *(moving[0].all_input_nodes[:1] if moving[0].target in TURNS else ())):
            points = _as_points(source, plan.shape[-2])
            separated = None if points is None else separate(plan.node, (source,))
            if points is not None and separated is not None:
                return Half(graph, points, plan, *separated), node
    return None


def _as_points(node: Node, length: Any) -> Canonical | None:
    shape = node.meta["val"].shape
    if not isinstance(shape[-1], int):
        return None
    if len(shape) in (3, 4) and same(shape[-2], length):
        return Canonical(node)
    if len(shape) == 4 and same(shape[1], length):
        return Canonical(node, (0, 2, 1, 3))
    return None


def _scores(graph: GraphModule, plan: Canonical, product: Node, data: set[Node]) -> Half | None:
    """What the loop starts from: the latest tensor [.., N, R], or turned, before anything is
    normalised, that separates the plan."""
    *_, length, pivots = plan.shape
    half: Half | None = None
    after = {product, *descendants([product])} & ancestors(plan.node)
    for node in sorted(after):
        if node in data and (node.target in NORMALISERS or node is plan.node):
            break
        shape: tuple[Any, ...] = tuple(node.meta["val"].shape) if is_tensor(node) else ()
        if len(shape) not in (3, 4) or not isinstance(pivots, int):
            continue
        rows_first = same(shape[-2], length) and same(shape[-1], pivots)
        if not rows_first and not (same(shape[-1], length) and same(shape[-2], pivots)):
            continue
        separated = separate(plan.node, (node,))
        if separated is not None:
            scores = Canonical(node)
            scores = scores if rows_first else scores.turned()
            half = Half(graph, scores, plan, *separated, is_scores=True)
    return half


class _Whole(Experiment):
    """The output as a function of both tokens and the values.

    halves: of queries and of keys; queries, keys: their plans, on the same pivots.
    apart: whether nothing else enters.
    """

    def __init__(
        self, graph: GraphModule, candidate: _Candidate, plans: Sequence[tuple[Half, HalfFit]]
    ) -> None:
        self.candidate = candidate
        (query_half, self.queries), (key_half, self.keys) = plans
        self.halves = (query_half, key_half)
        points, values = [half.points for half in self.halves], candidate.inner.values
        separated = separate(candidate.outer.node, [*(x.node for x in points), candidate.inner.right])
        self.apart = separated is not None
        self.between, masks = separated or (set(), [])
        super().__init__(graph, [*points, values], candidate.outer.result, self.between, masks)
        self.leads, self.tokens, self.sizes = query_half.leads, query_half.tokens, query_half.sizes
        self.hidden = query_half.hidden

    def drawn(self, lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
        """Random q [B, H, N, D], k [B, H, M, D] and v [B, H, M, E]."""
        q, k = (half.noise(lengths) for half in self.halves)
        return q, k, self.normal((*k.shape[:3], int(self.candidate.inner.values.shape[-1])))

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, padded: Tensor | None
    ) -> Tensor:
        """A v [B, H, N, E]; v: [B, H, M, E]."""
        output = self.run([q, k, v], lengths, self.masks(lengths, padded))
        return output.reshape(*q.shape[:3], v.shape[-1])

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, glue: Masses | None = None, padded: Tensor | None = None
    ) -> Tensor:
        """The glued plan times values; its entries sum to 1 without a weight."""
        query_keep, keep = (
            None if padded is None or not half.cut.masks else (~padded).expand(len(q), -1)
            for half in self.halves
        )
        a, b, masses = self.queries.half, self.keys.half, self.queries.masses
        return lot_reference(
            q, k, v, keep, query_keep, None, self.queries.pivots, masses.table, a.score_multiplier,
            b.score_multiplier, a.half_steps, a.tokens_first, b.half_steps, b.tokens_first,
            factor_terms(OutputFactor(1.0)), (glue or masses).interleaved,
            None if glue is None else glue.table,
        )  # fmt: skip

    def observed(self, sizes: Sequence[Lengths], glue: Masses | None = None) -> list[_Row]:
        masked = any(half.cut.masks for half in self.halves)
        rows: list[_Row] = []
        for lengths in sizes:
            q, k, v = self.drawn(lengths)
            for padded in (None, torch.arange(k.shape[2]) % 3 == 1) if masked else (None,):
                unit = self.reference(q, k, v, glue, padded)
                output = self.attended(q, k, v, lengths, padded)
                active = k.shape[2] if padded is None else int((~padded).sum())
                rows.append((unit, output, q.shape[2], k.shape[2], float(active), padded))
        return rows


_Row = tuple[Tensor, Tensor, int, int, float, Tensor | None]
"""The glued plan times values, the output, N, M, the active keys, and what is padded."""


def _examine(program: Program, candidate: _Candidate) -> LotSite:
    points = [half.points.shape for half, *_ in candidate.sides]
    for half in itertools.chain(*candidate.sides):
        half.leads, half.tokens = ([shape[axis] for shape in points] for axis in (0, -2))
        half.sizes = half.small(examples=1)
    for name, (half, *_) in zip(SIDES, candidate.sides, strict=True):
        if len(half.cut.masks) > 1:
            one, other = map(spoken, half.cut.masks[:2])
            raise NoFit(f"two masks enter the {name} plan ({one} and {other})")
    masked = any(half.cut.masks for half, *_ in candidate.sides)
    plans = first_fit(partial(_both, candidate, x) for x in ((True, False) if masked else (True,)))
    for half, fit in plans:
        _check_stops(program, half, fit)
    return _glued(program, candidate, plans)


_Plan = tuple[Half, HalfFit]


def _both(candidate: _Candidate, hidden: bool) -> list[_Plan]:
    """Both plans where the masks say this of a padded token.  Raises NoFit."""
    plans = []
    for name, side in zip(SIDES, candidate.sides, strict=True):
        for half in side:
            half.hidden = hidden
        try:
            plans.append(_fitted(side))
        except NoFit as no_fit:
            raise NoFit(f"{name} plan: {no_fit}") from None
    return plans


def _check_stops(program: Program, half: Half, fit: HalfFit) -> None:
    """That no stop changes the plan."""
    stops = [stop for stop in program.stops if ancestors(stop.residual, until=BARRIERS) & half.between]
    if not stops:
        return
    # The product of the scores is no sum of a half-step.
    inside = sorted(node for node in half.between if half.points.node not in node.all_input_nodes)
    unit = abs(fit.half.score_multiplier) * float(fit.pivots.square().sum(-1).mean().sqrt())

    def feed(units: Tensor, at: Lengths, _: Tensor | None) -> tuple[list[Tensor], Sample]:
        points = units / unit
        scores = fit.half.score_multiplier * (points @ fit.pivots.transpose(-1, -2))
        log_nu = fit.masses.of(len(scores)).log()
        scores = scores.masked_fill(log_nu.isinf()[..., None, :], -math.inf)
        return [half.raw(half.points, points, at), *half.masks(at)], Sample(scores, scores, log_nu=log_nu)

    entering = [half.points.node, *half.cut.masks]
    first: Side = "row" if fit.half.tokens_first else "column"
    convention = PlanConvention(fit.half.half_steps, first, 1.0, target_marginal="input")
    loop = Stopping(program, stops, entering, inside, convention, half.size, feed)
    check_stops(loop, [Crowd(half.few), *of_many(half.few, half.examples)])


def _fitted(side: Sequence[Half], known: HalfFit | None = None) -> _Plan:
    """A plan by its tokens and pivots or, where that fails, by its scores.  known: of the same masses."""
    def fitted(half: Half) -> _Plan:
        pivots, masses = candidates(half)
        return half, identify_half(half, pivots, masses if known is None else [known.masses])

    return first_fit(partial(fitted, half) for half in side)


def _alike(candidate: _Candidate, plans: Sequence[_Plan]) -> list[_Plan]:
    """Both plans from the same pivots, with the same masses.  Raises NoFit."""
    plans = [*plans]
    if plans[0][0].is_scores != plans[1][0].is_scores:  # one operator takes either tokens or scores
        both = [[half for half in side if half.is_scores] for side in candidate.sides]
        plans = []
        with contextlib.suppress(NoFit):
            plans = [_fitted(side) for side in both if side]
        if len(plans) < 2:
            raise NoFit("one plan is of inner products with pivots and the other is not")
    for known, other in ((1, 0), (0, 1)):  # few half-steps do not show the masses
        if not plans[0][1].masses.is_like(plans[1][1].masses):
            with contextlib.suppress(NoFit):
                plans[other] = _fitted([plans[other][0]], plans[known][1])
    (_, queries), (half, keys) = plans
    shared = _on_pivots(keys, queries.pivots)
    if shared is None or not queries.masses.is_like(keys.masses):
        raise NoFit("the query and the key plan have different pivots or masses")
    return [plans[0], (half, shared)]


def _glued(program: Program, candidate: _Candidate, plans: Sequence[_Plan]) -> LotSite:
    """Both plans are known: the factor in front, and whether the whole is what they make."""
    plans = (query_half, queries), (key_half, keys) = _alike(candidate, plans)
    whole = _Whole(program.graph, candidate, plans)
    if not whole.apart:
        raise NoFit("another value enters between the two plans and the values")
    glue: Masses | None = None
    sizes = query_half.sizes
    rows = whole.observed(sizes)
    factor, error = _factor(rows)
    for weigh in (_read_weight, _solved_weight):
        weight = None if error <= STABILISED else weigh(whole)
        if weight is not None:
            weighed = _factor(whole.observed(sizes, weight))
            if weighed[1] <= STABILISED:
                glue, (factor, error) = weight, weighed
    if not error <= STABILISED:
        raise _why_not_glued(whole, rows, error)
    def error_at(at: Lengths) -> float:
        return max(_error(row, factor) for row in whole.observed([at], glue))

    whole.check_larger(query_half.heads, error_at, STABILISED, "plan")
    query_mask, mask = (
        KeyMask(half.cut.masks[0], whole.hidden, False) if half.cut.masks else None
        for half in whole.halves
    )
    convention = LotConvention(
        queries.half, keys.half, queries.pivots.shape[1], factor,
        "none" if mask is None and query_mask is None else "key",
    )  # fmt: skip
    inside = frozenset(query_half.between | key_half.between | whole.between)
    site = LotSite(
        site_name(program, candidate.outer.node), convention, query_half.heads,
        int(query_half.points.shape[-1]), max(error, queries.error, keys.error), query_half.points,
        key_half.points, candidate.inner, candidate.outer, inside, mask, query_mask, queries.pivots,
        queries.masses.table, interleaved=(glue or queries.masses).interleaved,
        weight=None if glue is None else glue.table, covers=inside | candidate.inside,
    )  # fmt: skip
    return _with_row_sums(site, whole, glue)


def _why_not_glued(whole: _Whole, rows: Sequence[_Row], error: float) -> NoFit:
    """Why the whole is not what its plans make.  error: the largest, of these rows."""
    masks = whole.halves[1].cut.masks
    if masks and _factor([row for row in rows if row[-1] is None])[1] <= STABILISED:
        weight = _padding_weight(whole)
        if weight:
            return NoFit(
                f"the layer's own code gives keys that {spoken(masks[0])} masks {weight:.0%} of the "
                "weight they have without it: the loop moves mass back to what is only a low or a high "
                "score"
            )
    return NoFit("not the glued plan of its two halves", error)


def _read_weight(whole: _Whole) -> Masses | None:
    """omega, where all that glues the plans is in them: the product of both readouts over 1 / sigma."""
    queries, keys = whole.queries, whole.keys
    mass = queries.masses.of(len(queries.readout))
    return _folded(queries.readout * keys.readout * mass, queries)


def _solved_weight(whole: _Whole) -> Masses | None:
    """omega by least squares: the output is linear in it."""
    q, k, v = whole.drawn(whole.sizes[0])
    output = whole.attended(q, k, v, whole.sizes[0], None)
    masses = whole.queries.masses
    heads, count = masses.table.shape
    if output[0, 0].numel() < 2 * count:
        return None
    ones = torch.eye(count, dtype=masses.table.dtype)
    parts = [  # of every pivot [B, H, N E]
        whole.reference(q, k, v, replace(masses, table=one.expand(heads, -1))).flatten(2) for one in ones
    ]
    solution = torch.linalg.lstsq(torch.stack(parts, -1), output.flatten(2)[..., None]).solution
    return _folded(solution[..., 0], whole.queries)


def _folded(weight: Tensor, queries: HalfFit) -> Masses | None:
    """omega [B, H, R] by heads, its mean 1; None where examples have weights of their own."""
    batch, heads, _ = weight.shape
    weight = weight / weight.mean()
    folded = per_head(weight.flatten(0, 1), 1, batch, heads, STABILISED)
    if folded is None:
        return None
    table, by_row = folded
    alike = bool((queries.masses.table == queries.masses.table[:1]).all())  # of all heads
    return Masses(table, by_row) if alike or by_row == queries.masses.interleaved else None


def _on_pivots(fit: HalfFit, pivots: Tensor) -> HalfFit | None:
    """The same plan from other pivots, which the fit's are a multiple of; None if they are not."""
    if fit.pivots.shape != pivots.shape:
        return None
    ratio = float((fit.pivots * pivots).sum() / pivots.square().sum())
    if not torch.allclose(fit.pivots, ratio * pivots):
        return None
    half = replace(fit.half, score_multiplier=snapped(fit.half.score_multiplier * ratio))
    return replace(fit, half=half, pivots=pivots)


def _padding_weight(whole: _Whole) -> float:
    """How much of a padded key's value the layer passes on, of what it would without a mask."""
    q, k, v = map(torch.zeros_like, whole.drawn(whole.sizes[0]))
    padded = torch.arange(k.shape[2]) % 3 == 1
    v[:, :, padded] = 1.0
    with_mask, without = (whole.attended(q, k, v, whole.sizes[0], mask) for mask in (padded, None))
    passed = with_mask[:, :, ~padded] if whole.halves[0].cut.masks else with_mask
    return float(passed.mean() / without.mean())


def _error(row: _Row, factor: OutputFactor) -> float:
    unit, output, n, m, active, _ = row
    return relative_error(unit * factor.value(n, m, active), output)


def _factor(rows: Sequence[_Row]) -> tuple[OutputFactor, float]:
    """The monomial in N, M, n that leads from the glued plan to the output, and its error."""
    observed = [
        (n, m, active, float((output * unit).sum() / unit.square().sum()))
        for unit, output, n, m, active, _ in rows
    ]
    monomial = outcome(lambda: factor_of(observed))
    factor = OutputFactor(observed[0][-1]) if isinstance(monomial, NoFit) else monomial
    factor = replace(factor, coefficient=snapped(factor.coefficient))
    return factor, max(_error(row, factor) for row in rows)


def _with_row_sums(site: LotSite, whole: _Whole, glue: Masses | None) -> LotSite:
    """The site with what is A 1 in the code, by which a trailing normalisation divides: it is made of the
    same two plans, which would otherwise have to be computed for it again."""
    candidate, (q, k) = whole.candidate, whole.halves
    *batch, length, _ = candidate.outer.result.shape
    entries = length
    for size in batch:
        entries = entries * size
    plans = descendants([candidate.outer.left]) & descendants([candidate.inner.left])
    for node in sorted(plans):
        shape = node.meta["val"].shape if is_tensor(node) else ()
        if not shape or node is candidate.outer.node or not same(node.meta["val"].numel(), entries):
            continue
        rows = shape[:-1] if ends_in_one(node) else shape
        if len(rows) not in (2, 3) or not same(rows[-1], length):
            continue
        separated = separate(node, (q.points.node, k.points.node))
        if separated is None or separated[1]:
            continue
        sums = Experiment(q.graph, [q.points, k.points], Canonical(node), *separated)
        x, y, v = whole.drawn(whole.sizes[-1])
        factor = factor_terms(site.convention.output_factor)
        unit = whole.reference(x, y, torch.ones_like(v[..., :1]), glue)
        exact = unit * factor_value(factor, x.shape[2], y.shape[2], None)
        computed = sums.run([x, y], whole.sizes[-1]).reshape(exact.shape)
        late = candidate.inner.right > min(node, candidate.outer.node)
        if not late and relative_error(computed, exact) <= STABILISED:
            return replace(
                site, row_sums=node, inside=site.inside | separated[0], covers=site.covers | separated[0]
            )
    return site
