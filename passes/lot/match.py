"""Match LOT: two plans against a learnt pivot measure, glued, found by what they compute.

before: q -> plan [N, R], k -> plan [R, M], the product of both with the values, in whatever code
after:  LotSite with queries, keys, values and everything the operator needs, or a reason
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.ir import LotConvention, OutputFactor, Program
from asapc.operators.lot import lot as lot_reference
from asapc.operators.sinkhorn import factor_terms
from asapc.passes.cut import (
    ancestors,
    constant_value,
    data_dependent,
    depends_on_data,
    is_tensor,
    separate,
)
from asapc.passes.experiment import EXACT, STABILISED, Experiment, NoFit, outcome, snapped
from asapc.passes.lot.probe import HalfFit, identify_half
from asapc.passes.lot.site import LotSite
from asapc.passes.products import (
    BARRIERS,
    Canonical,
    KeyMask,
    Product,
    merged_heads,
    product_of,
    rank_of,
    same,
    site_name,
)
from asapc.passes.site import Found, Place, Unidentified

aten = torch.ops.aten

CONTRACTIONS = {
    aten.matmul.default, aten.bmm.default, aten.mm.default, aten.einsum.default, aten.linear.default,
    aten.cdist.default, aten._cdist_forward.default,
}  # fmt: skip
TURNS = {aten.transpose.int, aten.permute.default, aten.mT.default, aten.adjoint.default}


@dataclass(frozen=True)
class _Candidate:
    inner: Product
    outer: Product
    q: Canonical
    k: Canonical
    between: tuple[set[Node], set[Node], set[Node]]  # of the query plan, the key plan and the whole
    masks: tuple[list[Node], list[Node], list[Node]]


def find_lot(program: Program, places: Sequence[Place]) -> Iterator[Found]:
    """Every pair of chained products with a plan against pivots on each side, wherever it is."""
    for candidate in _candidates(program.graph):
        site = outcome(partial(_examine, program, candidate))
        if isinstance(site, str):
            inside = frozenset().union(*candidate.between)
            yield candidate.outer.node, Unidentified(site, inside)
        else:
            yield candidate.outer.node, site


def _candidates(graph: GraphModule) -> list[_Candidate]:
    found = []
    data = data_dependent(graph)
    for node in graph.graph.nodes:
        outer = product_of(node)
        inner = None if outer is None else _inner(outer, data)
        if outer is None or inner is None:
            continue
        queries, keys = outer.map.shape[-2], inner.map.shape[-1]
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


def _tokens(plan: Node, length: Any, data: set[Node]) -> Canonical | None:
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


def _as_points(node: Node, length: Any) -> Canonical | None:
    shape = node.meta["val"].shape
    if not isinstance(shape[-1], int):
        return None
    if len(shape) in (3, 4) and same(shape[-2], length):
        return Canonical(node, tuple(range(len(shape))))
    if len(shape) == 4 and same(shape[1], length):
        return Canonical(node, (0, 2, 1, 3))
    return None


class _Experiments:
    """A candidate as functions of tensors of our choosing, under one polarity of its masks.

    hidden: what a mask says of a padded token.  halves: the plans [N, R] and [M, R].
    """

    def __init__(self, graph: GraphModule, candidate: _Candidate, hidden: bool) -> None:
        self.candidate, self.hidden = candidate, hidden
        first, second, whole = candidate.between
        self.halves = (
            Experiment(graph, [candidate.q], candidate.outer.map, first, candidate.masks[0]),
            Experiment(graph, [candidate.k], candidate.inner.map.turned(), second, candidate.masks[1]),
        )
        inputs = [candidate.q, candidate.k, candidate.inner.values]
        self.whole = Experiment(graph, inputs, candidate.outer.result, whole, candidate.masks[2])

    def lengths(self, shift: int) -> dict[Any, int]:
        return self.whole.lengths((self.candidate.q, self.candidate.k), shift)

    def plan(
        self, side: int, sizes: Sequence[dict[Any, int]]
    ) -> Callable[[Tensor], Tensor | None]:
        """tokens [B, H, N, D] -> plan [B, H, N, R] with nothing masked."""
        half = self.halves[side]
        by_shape = {half.shape(half.inputs[0], lengths): lengths for lengths in sizes}

        def observe(tokens: Tensor) -> Tensor | None:
            lengths = by_shape[tuple(tokens.shape)]
            result = half.run([tokens], lengths, half.masks(lengths, self.hidden))
            finite = bool(result.isfinite().all())
            return result.reshape(*tokens.shape[:3], -1) if finite else None

        return observe

    def output(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: dict[Any, int], padded: Tensor | None
    ) -> Tensor:
        """A v [B, H, N, E]; v: [B, H, M, E]."""
        masks = self.whole.masks(lengths, self.hidden, padded)
        return self.whole.run([q, k, v], lengths, masks).reshape(*q.shape[:3], v.shape[-1])


def _examine(program: Program, candidate: _Candidate) -> LotSite | str:
    graph = program.graph
    masked = bool(candidate.masks[2])
    for name, masks in zip(("query", "key"), candidate.masks[:2], strict=True):
        if len(masks) > 1:
            return f"two masks enter the {name} plan ({masks[0].name} and {masks[1].name})"
    reason = ""
    for hidden in (True, False) if masked else (True,):
        experiments = _Experiments(graph, candidate, hidden)
        sizes = [experiments.lengths(0), experiments.lengths(5)]
        sizes = sizes[:1] if sizes[0] == sizes[1] else sizes
        fits: list[HalfFit] = []
        for side, points in enumerate((candidate.q, candidate.k)):
            shapes = [experiments.whole.shape(points, lengths) for lengths in sizes]
            pivots, masses = _parameters(graph, candidate.between[side], points, shapes[0])
            fit = identify_half(experiments.plan(side, sizes), shapes, pivots, masses)
            if isinstance(fit, NoFit):
                reason = reason or f"{('query', 'key')[side]} plan: {fit}"
                break
            fits.append(fit)
        if len(fits) == 2:
            return _glued(program, candidate, experiments, sizes, fits[0], fits[1])
    return reason


def _glued(
    program: Program,
    candidate: _Candidate,
    experiments: _Experiments,
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
    masks = candidate.masks[0] or candidate.masks[1]
    rows: list[tuple[Tensor, Tensor, int, int, float]] = []
    for lengths in sizes:
        q, k = (
            torch.randn(experiments.whole.shape(p, lengths), generator=generator, dtype=torch.float64)
            for p in (candidate.q, candidate.k)
        )
        width = int(candidate.inner.values.shape[-1])
        v = torch.randn(*k.shape[:3], width, generator=generator, dtype=torch.float64)
        for padded in (None, torch.arange(k.shape[2]) % 3 == 1) if masks else (None,):
            keeps = [
                None if padded is None or not candidate.masks[i] else (~padded).expand(len(q), -1)
                for i in (0, 1)
            ]
            unit = _reference(q, k, v, keeps[1], keeps[0], queries, keys, OutputFactor(1.0))
            observed = experiments.output(q, k, v, lengths, padded)
            active = k.shape[2] if padded is None else int((~padded).sum())
            rows.append((unit, observed, q.shape[2], k.shape[2], float(active)))
    factor, error = _factor(rows)
    if not error <= STABILISED:
        return f"not the glued plan of its two halves; relative error {error:.2g}"
    mask, query_mask = (
        KeyMask(candidate.masks[i][0], experiments.hidden, False) if candidate.masks[i] else None
        for i in (1, 0)
    )
    node = candidate.q.node
    heads = merged_heads(node) if rank_of(node) == 3 else int(candidate.q.shape[1])
    convention = LotConvention(
        queries.half, keys.half, queries.pivots.shape[1], factor, "key" if masks else "none"
    )
    inside = frozenset(candidate.between[0] | candidate.between[1] | candidate.between[2])
    return LotSite(
        site_name(program, candidate.outer.node), convention, heads, int(node.meta["val"].shape[-1]),
        max(error, queries.error, keys.error), candidate.q, candidate.k, candidate.inner,
        candidate.outer, inside, mask, query_mask, queries.pivots, queries.mass,
    )  # fmt: skip


def _on_pivots(fit: HalfFit, pivots: Tensor) -> HalfFit | None:
    """The same plan from other pivots, which the fit's are a multiple of; None if they are not."""
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
    return lot_reference(
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
                float((predicted * coefficient - seen).abs().max() / seen.abs().max().clamp(min=1e-300))
                for predicted, seen in scaled
            )
            tried.append((OutputFactor(coefficient, a, b, c), error))
    enough = max(EXACT, 4 * min(error for _, error in tried))
    return next(entry for entry in tried if entry[1] <= enough)  # the simplest of those that are as good


def _parameters(
    graph: GraphModule, between: set[Node], points: Canonical, shape: tuple[int, ...]
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
                    per_head = turned if turned.dim() == 3 else turned[None]
                    if per_head.shape[0] in (1, heads):
                        pivots.append(per_head.expand(heads, -1, -1).contiguous())
            for measure in (flat, flat.exp()):
                if bool((measure > 0).all()) and bool(measure.isfinite().all()) and measure.dim() <= 2:
                    row = measure if measure.dim() == 2 else measure[None]
                    if row.shape[0] in (1, heads):
                        masses.append((row / row.sum(-1, keepdim=True)).expand(heads, -1))
    counts = {z.shape[1] for z in pivots}
    uniform = [torch.full((heads, r), 1.0 / r, dtype=torch.float64) for r in sorted(counts)]
    distinct: list[Tensor] = []
    for mass in [*masses, *uniform]:
        if mass.shape[1] in counts and not any(
            mass.shape == other.shape and torch.allclose(mass, other) for other in distinct
        ):
            distinct.append(mass)
    return pivots, distinct
