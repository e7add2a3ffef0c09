"""Match LOT: two plans against a learnt pivot measure, glued, found by what they compute.

before: q -> plan [N, R], k -> plan [R, M], the product of both with the values, in whatever code
after:  LotSite with queries, keys, values and everything the operator needs, or a reason
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.ir import LotConvention, OutputFactor, Program
from asapc.operators.lot import lot as lot_meaning
from asapc.operators.sinkhorn import factor_terms
from asapc.passes.cut import (
    PROBE_BATCH,
    PROBE_LENGTHS,
    Cut,
    Part,
    ancestors,
    constant_value,
    data_dependent,
    depends_on_data,
    is_tensor,
    separate,
)
from asapc.passes.probe import EXACT, STABILISED, NoFit, snapped
from asapc.passes.probe_lot import HalfFit, identify_half
from asapc.passes.products import (
    BARRIERS,
    KeyMask,
    Product,
    Unidentified,
    canonical_shape,
    merged_heads,
    product_of,
    rank_of,
    same,
    site_name,
)

aten = torch.ops.aten

CONTRACTIONS = {
    aten.matmul.default, aten.bmm.default, aten.mm.default, aten.einsum.default, aten.linear.default,
    aten.cdist.default, aten._cdist_forward.default,
}  # fmt: skip
TURNS = {aten.transpose.int, aten.permute.default, aten.mT.default, aten.adjoint.default}


@dataclass(frozen=True)
class Points:
    """A tensor of tokens and the permutation that makes it [B, H, N, D] (or [B*H, N, D])."""

    node: Node
    order: tuple[int, ...]


@dataclass(frozen=True)
class LotSite:
    """A glued plan against pivots, with everything a rewrite needs.

    inner: plan [R, M] times the values; outer: plan [N, R] times what inner gives.
    pivots: float64 [H, R, D]; mass: float64 [H, R].
    """

    name: str
    convention: LotConvention
    q: Points
    k: Points
    inner: Product
    outer: Product
    inside: frozenset[Node]
    heads: int
    head_dim: int
    mask: KeyMask | None
    query_mask: KeyMask | None
    pivots: Tensor
    mass: Tensor
    probe_error: float

    def part(self) -> Part:
        """From the queries, keys and values to the output."""
        q, k = ([x.node.meta["val"].shape[i] for i in x.order] for x in (self.q, self.k))
        both = [mask for mask in (self.mask, self.query_mask) if mask is not None]
        own = tuple({mask.node: mask.true_means_masked for mask in both}.items())
        return Part(
            (self.q.node, self.k.node, self.inner.right, *(node for node, _ in own)), self.outer.node,
            self.inside | {self.outer.node}, self.outer.out_order, q[0], q[-2], k[-2], own,
        )  # fmt: skip


@dataclass(frozen=True)
class _Candidate:
    inner: Product
    outer: Product
    q: Points
    k: Points
    between: tuple[set[Node], set[Node], set[Node]]  # of the query plan, the key plan and the whole
    masks: tuple[list[Node], list[Node], list[Node]]


def match_lot(program: Program) -> list[tuple[Node, LotSite | Unidentified]]:
    """Every pair of chained products with a plan against pivots on each side: (outer node, outcome)."""
    results: list[tuple[Node, LotSite | Unidentified]] = []
    for candidate in _candidates(program.graph):
        try:
            outcome = _examine(program, candidate)
        except Exception as error:  # the region is the user's code: whatever it raises is a reason
            line = str(error).splitlines()[0][:200] if str(error) else ""
            outcome = f"the region cannot be run on its own: {type(error).__name__}: {line}"
        if isinstance(outcome, str):
            inside = frozenset().union(*candidate.between)
            results.append((candidate.outer.node, Unidentified(outcome, inside)))
        else:
            results.append((candidate.outer.node, outcome))
    return results


def _candidates(graph: GraphModule) -> list[_Candidate]:
    found = []
    data = data_dependent(graph)
    for node in graph.graph.nodes:
        outer = product_of(node)
        inner = None if outer is None else _inner(outer, data)
        if outer is None or inner is None:
            continue
        queries = canonical_shape(outer.left, outer.left_order)[-2]
        keys = canonical_shape(inner.left, inner.left_order)[-1]
        q, k = _tokens(outer.left, queries, data), _tokens(inner.left, keys, data)
        if q is None or k is None:
            continue
        parts = [
            separate(outer.left, (q.node,)), separate(inner.left, (k.node,)),
            separate(outer.node, (q.node, k.node, inner.right)),
        ]  # fmt: skip
        known = [part for part in parts if part is not None]
        if len(known) == 3:
            first, second, whole = known
            found.append(
                _Candidate(inner, outer, q, k, (first[0], second[0], whole[0]),
                           (first[1], second[1], whole[1]))
            )  # fmt: skip
    return found


def _inner(outer: Product, data: set[Node]) -> Product | None:
    """The product that the outer one's right operand is, up to numbers and layout."""
    stack, seen, found = [outer.right], set(), []
    while stack:
        node = stack.pop()
        if node in seen or not is_tensor(node) or node.target in BARRIERS:
            continue
        seen.add(node)
        product = product_of(node)
        if product is not None:
            found.append(product)
        elif node in data:
            stack.extend(node.all_input_nodes)
    return found[0] if len(found) == 1 else None


def _tokens(plan: Node, length: Any, data: set[Node]) -> Points | None:
    """The latest tensor [.., N, D] that meets parameters in a product and separates the plan."""
    order = {node: index for index, node in enumerate(plan.graph.nodes)}
    for node in sorted(ancestors(plan), key=order.__getitem__, reverse=True):
        if node.target not in CONTRACTIONS:
            continue
        operands = [n for n in node.all_input_nodes if is_tensor(n)]
        given = [n for n in operands if n in data]
        if len(given) != 1 or len(operands) < 2:
            continue
        for source in (given[0], *(given[0].all_input_nodes[:1] if given[0].target in TURNS else ())):
            points = _as_points(source, length)
            if points is not None and separate(plan, (source,)) is not None:
                return points
    return None


def _as_points(node: Node, length: Any) -> Points | None:
    shape = node.meta["val"].shape
    if not isinstance(shape[-1], int):
        return None
    if len(shape) in (3, 4) and same(shape[-2], length):
        return Points(node, tuple(range(len(shape))))
    if len(shape) == 4 and same(shape[1], length):
        return Points(node, (0, 2, 1, 3))
    return None


class _Experiment:
    """A candidate as functions of tensors of our choosing, under one polarity of its masks.

    hidden: what a mask says of a padded token.
    """

    def __init__(self, graph: GraphModule, own: _Candidate, hidden: bool) -> None:
        self.own, self.hidden = own, hidden
        first, second, whole = own.between
        self.queries = Cut(graph, [own.q.node], own.outer.left, first, own.masks[0])
        self.keys = Cut(graph, [own.k.node], own.inner.left, second, own.masks[1])
        inputs = [own.q.node, own.k.node, own.inner.right]
        self.whole = Cut(graph, inputs, own.outer.node, whole, own.masks[2])

    def lengths(self, shift: int) -> dict[Any, int]:
        assigned: dict[Any, int] = {}
        for index, points in enumerate((self.own.q, self.own.k)):
            shape = [points.node.meta["val"].shape[i] for i in points.order]
            for axis, size in enumerate(shape):
                if isinstance(size, torch.SymInt):
                    value = PROBE_LENGTHS[index] + shift if axis == len(shape) - 2 else PROBE_BATCH
                    for symbol in sorted(size.node.expr.free_symbols, key=str):
                        assigned.setdefault(symbol, value)
        return self.whole.lengths(assigned)

    def shape(self, points: Points, lengths: dict[Any, int]) -> tuple[int, ...]:
        own = self.whole.shape_of(points.node, lengths)
        shape = tuple(own[i] for i in points.order)
        return shape if len(shape) == 4 else (shape[0], 1, *shape[1:])

    def plan(
        self, side: int, sizes: Sequence[dict[Any, int]]
    ) -> Callable[[Tensor], Tensor | None]:
        """tokens [B, H, N, D] -> plan [B, H, N, R] with nothing masked."""
        cut, points = (self.queries, self.own.q) if side == 0 else (self.keys, self.own.k)
        product = self.own.outer if side == 0 else self.own.inner
        by_shape = {self.shape(points, own): own for own in sizes}

        def observe(tokens: Tensor) -> Tensor | None:
            lengths = by_shape[tuple(tokens.shape)]
            tensors = [_raw(tokens, points, cut, lengths), *self.masks(cut, lengths, None)]
            result = cut.run(tensors, lengths)
            if product.left_order is not None:
                result = result.permute(product.left_order)
            if side == 1:
                result = result.transpose(-1, -2)
            finite = bool(result.isfinite().all())
            return result.reshape(*tokens.shape[:3], -1).double() if finite else None

        return observe

    def masks(self, cut: Cut, lengths: dict[Any, int], padded: Tensor | None) -> list[Tensor]:
        made = []
        for node in cut.masks:
            mask = torch.full(cut.shape_of(node, lengths), not self.hidden)
            if padded is not None:
                mask[..., padded] = self.hidden
            made.append(mask)
        return made

    def output(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: dict[Any, int], padded: Tensor | None
    ) -> Tensor:
        """A v [B, H, N, E]; v: [B, H, M, E]."""
        own = self.own.inner
        values = v if rank_of(own.right) == 4 else v.flatten(0, 1)
        if own.right_order is not None:  # canonical [.., E, M]
            values = values.transpose(-1, -2) if not own.right_transposed else values
            values = values.permute([own.right_order.index(i) for i in range(len(own.right_order))])
        tensors = [
            _raw(q, self.own.q, self.whole, lengths), _raw(k, self.own.k, self.whole, lengths),
            values.contiguous(), *self.masks(self.whole, lengths, padded),
        ]  # fmt: skip
        result = self.whole.run(tensors, lengths)
        if self.own.outer.out_order is not None:
            result = result.permute(self.own.outer.out_order)
        return result.reshape(*q.shape[:3], v.shape[-1]).double()


def _raw(tokens: Tensor, points: Points, cut: Cut, lengths: dict[Any, int]) -> Tensor:
    """[B, H, N, D] in the node's own layout."""
    shape = cut.shape_of(points.node, lengths)
    ordered = tokens.reshape(tuple(shape[i] for i in points.order))
    return ordered.permute([points.order.index(i) for i in range(len(shape))]).contiguous()


def _examine(program: Program, own: _Candidate) -> LotSite | str:
    graph = program.graph
    masked = bool(own.masks[2])
    for name, masks in zip(("query", "key"), own.masks[:2], strict=True):
        if len(masks) > 1:
            return f"two masks enter the {name} plan ({masks[0].name} and {masks[1].name})"
    reason = ""
    for hidden in (True, False) if masked else (True,):
        experiment = _Experiment(graph, own, hidden)
        sizes = [experiment.lengths(0), experiment.lengths(5)]
        sizes = sizes[:1] if sizes[0] == sizes[1] else sizes
        fits: list[HalfFit] = []
        for side, points in enumerate((own.q, own.k)):
            shapes = [experiment.shape(points, lengths) for lengths in sizes]
            pivots, masses = _parameters(graph, own.between[side], points, shapes[0])
            fit = identify_half(experiment.plan(side, sizes), shapes, pivots, masses)
            if isinstance(fit, NoFit):
                error = "" if fit.error is None else f"; relative error {fit.error:.2g}"
                reason = reason or f"{('query', 'key')[side]} plan: {fit.reason}{error}"
                break
            fits.append(fit)
        if len(fits) == 2:
            return _glued(program, own, experiment, sizes, fits[0], fits[1])
    return reason


def _glued(
    program: Program,
    own: _Candidate,
    experiment: _Experiment,
    sizes: Sequence[dict[Any, int]],
    queries: HalfFit,
    keys: HalfFit,
) -> LotSite | str:
    """Both plans are known: the factor in front, and whether the whole is what they make."""
    shared = _on_pivots(keys, queries.pivots)
    if shared is None or not torch.allclose(queries.mass, keys.mass):
        return "the query and the key plan have different pivots or masses"
    keys = shared
    generator = torch.Generator().manual_seed(2)
    masks = own.masks[0] or own.masks[1]
    rows: list[tuple[Tensor, Tensor, int, int, float]] = []
    for lengths in sizes:
        q, k = (
            torch.randn(experiment.shape(p, lengths), generator=generator, dtype=torch.float64)
            for p in (own.q, own.k)
        )
        width = canonical_shape(own.inner.right, own.inner.right_order)
        size = width[-1] if own.inner.right_transposed or own.inner.right_order is None else width[-2]
        v = torch.randn(*k.shape[:3], int(size), generator=generator, dtype=torch.float64)
        for padded in (None, torch.arange(k.shape[2]) % 3 == 1) if masks else (None,):
            keeps = [
                None if padded is None or not own.masks[i] else (~padded).expand(len(q), -1)
                for i in (0, 1)
            ]
            unit = _reference(q, k, v, keeps[1], keeps[0], queries, keys, OutputFactor(1.0))
            observed = experiment.output(q, k, v, lengths, padded)
            active = k.shape[2] if padded is None else int((~padded).sum())
            rows.append((unit, observed, q.shape[2], k.shape[2], float(active)))
    factor, error = _factor(rows)
    if not error <= STABILISED:
        return f"not the glued plan of its two halves; relative error {error:.2g}"
    mask, query_mask = (
        KeyMask(own.masks[i][0], experiment.hidden, False) if own.masks[i] else None for i in (1, 0)
    )
    node = own.q.node
    heads = merged_heads(node) if rank_of(node) == 3 else int(node.meta["val"].shape[own.q.order[1]])
    convention = LotConvention(
        queries.half, keys.half, queries.pivots.shape[1], factor, "key" if masks else "none"
    )
    inside = frozenset(own.between[0] | own.between[1] | own.between[2])
    return LotSite(
        site_name(program, own.outer.node), convention, own.q, own.k, own.inner, own.outer, inside,
        heads, int(node.meta["val"].shape[-1]), mask, query_mask, queries.pivots, queries.mass,
        max(error, queries.error, keys.error),
    )  # fmt: skip


def _on_pivots(fit: HalfFit, pivots: Tensor) -> HalfFit | None:
    """The same plan from other pivots, a multiple of its own; None if they are not."""
    if fit.pivots.shape != pivots.shape:
        return None
    ratio = float((fit.pivots * pivots).sum() / pivots.square().sum())
    if not torch.allclose(fit.pivots, ratio * pivots):
        return None
    half = replace(fit.half, score_multiplier=snapped(fit.half.score_multiplier * ratio))
    return replace(fit, half=half, pivots=pivots)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, query_keep: Tensor | None,
    queries: HalfFit, keys: HalfFit, factor: OutputFactor,
) -> Tensor:  # fmt: skip
    a, b = queries.half, keys.half
    return lot_meaning(
        q, k, v, keep, query_keep, None, queries.pivots, queries.mass, a.score_multiplier,
        b.score_multiplier, a.half_steps, a.tokens_first, b.half_steps, b.tokens_first,
        factor_terms(factor),
    )  # fmt: skip


def _factor(
    rows: Sequence[tuple[Tensor, Tensor, int, int, float]]
) -> tuple[OutputFactor, float]:
    """The monomial in N, M, n that leads from the glued plan to the output, and its error."""
    powers = ((1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1), (1, 1, -1), (0, 2, -1), (1, 1, 0))
    tried: list[tuple[OutputFactor, float]] = []
    for unit_coefficient in (True, False):  # where N never changes, a factor of one wins over c N
        for a, b, c in powers:
            scaled = [
                (unit * n**a * m**b * active**c, seen) for unit, seen, n, m, active in rows
            ]
            first, seen = scaled[0]
            ratio = float((seen * first).sum() / first.square().sum())
            coefficient = 1.0 if unit_coefficient else ratio
            error = max(
                float((own * coefficient - seen).abs().max() / seen.abs().max().clamp(min=1e-300))
                for own, seen in scaled
            )
            tried.append((OutputFactor(coefficient, a, b, c), error))
    enough = max(EXACT, 4 * min(error for _, error in tried))
    return next(own for own in tried if own[1] <= enough)  # the simplest of those that are as good


def _parameters(
    graph: GraphModule, between: set[Node], points: Points, shape: tuple[int, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """Candidates among the constants that enter a plan: pivots [H, R, D] and masses [H, R]."""
    heads, dim = shape[1], shape[3]
    pivots: list[Tensor] = []
    masses: list[Tensor] = []
    for node in sorted(between, key=lambda n: n.name):
        for source in node.all_input_nodes:
            if source in between or source is points.node or not is_tensor(source):
                continue
            value = source.meta["val"]
            if not value.is_floating_point() or depends_on_data(source):
                continue
            constant = constant_value(graph, source)
            if constant is None or constant.numel() == 0:
                continue
            flat = constant.reshape([n for n in constant.shape if n != 1] or [1])
            for turned in (flat, flat.transpose(-1, -2)) if flat.dim() > 1 else ():
                if turned.shape[-1] == dim and turned.dim() in (2, 3):
                    own = turned if turned.dim() == 3 else turned[None]
                    if own.shape[0] in (1, heads):
                        pivots.append(own.expand(heads, -1, -1).contiguous())
            for own in (flat, flat.exp()):
                if bool((own > 0).all()) and bool(own.isfinite().all()) and own.dim() <= 2:
                    row = own if own.dim() == 2 else own[None]
                    if row.shape[0] in (1, heads):
                        masses.append((row / row.sum(-1, keepdim=True)).expand(heads, -1))
    counts = {z.shape[1] for z in pivots}
    uniform = [torch.full((heads, r), 1.0 / r, dtype=torch.float64) for r in sorted(counts)]
    distinct: list[Tensor] = []
    for own in [*masses, *uniform]:
        if own.shape[1] in counts and not any(
            own.shape == other.shape and torch.allclose(own, other) for other in distinct
        ):
            distinct.append(own)
    return pivots, distinct
