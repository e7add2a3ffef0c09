"""Lift: matched regions become operator calls that compute the same.

before: q k^T -> [masks, bias, the loop] -> A v
after:  torch.ops.asapc.sinkhorn(q, k, v, keep, bias, ...), esp_soft(...), lot(...)

If the model also returns the attention map, the map is computed densely by the operator's
`_attention` twin and the value product stays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from asapc.ir import LotConvention, Program
from asapc.operators.catalogue import OPERATORS, Operator, loop_of
from asapc.operators.masks import MASKED_BELOW
from asapc.passes.match import AnySite
from asapc.passes.match_esp import EspSite
from asapc.passes.match_lot import LotSite, Points
from asapc.passes.match_sinkhorn import AttentionSite, ScoreBias
from asapc.passes.products import KeyMask, Product, same
from asapc.passes.verify import check_graph
from asapc.program.calls import SITE, copied, put_call

aten = torch.ops.aten
# Dead where nothing reads them, though torch keeps them: the loop of a plan with dropout, or with a cast,
# would stay beside the operator that replaces it.
_INERT = (aten.dropout.default, aten._assert_tensor_metadata.default)


def lift(program: Program, sites: Sequence[AnySite], drop_maps: bool = False) -> Program:
    """Every matched region becomes one lossless operator call; what it replaces is removed."""
    graph, nodes = copied(program.graph)
    for index, site in enumerate(sites):
        for old, new, users in _called(graph, index, site, nodes, drop_maps):
            old.replace_all_uses_with(new, delete_user_cb=users)
    graph.graph.eliminate_dead_code(lambda node: node.target not in _INERT and bool(node.is_impure()))
    graph.recompile()
    check_graph(graph, "lift", [site.name for site in sites])
    return replace(program, graph=graph)


def beside(program: Program, sites: Sequence[AnySite]) -> Program:
    """The same calls beside the teacher's own code, which still gives the outputs: what the sites see is
    then exactly what the teacher's code sees."""
    graph, nodes = copied(program.graph)
    for index, site in enumerate(sites):
        _called(graph, index, site, nodes, drop_maps=False)
    graph.recompile()
    return replace(program, graph=graph)


Swap = tuple[Node, Node, Callable[[Node], bool]]
"""A node, what is put in its place, and for which of its users."""


def _called(
    graph: GraphModule, index: int, site: AnySite, nodes: dict[Node, Node], drop_maps: bool
) -> list[Swap]:
    """The site's operator call, put into the graph; what it is to replace."""
    if isinstance(site, EspSite):
        return _lift_esp(graph, index, site, nodes, drop_maps)
    if isinstance(site, LotSite):
        return _lift_lot(graph, index, site, nodes)
    return _lift_loop(graph.graph, site, nodes, drop_maps)


def _lift_loop(
    graph: Graph, site: AttentionSite, nodes: dict[Node, Node], drop_maps: bool
) -> list[Swap]:
    attention, value = nodes[site.attention], nodes[site.value.node]
    score = _moved(site.score, nodes)
    product = _moved(site.value, nodes)
    convention = site.convention
    dense = any(user is not value for user in attention.users) and not drop_maps
    anchor = attention.next if dense else value
    with graph.inserting_before(anchor):
        q = _canonical(graph, score.left, score.left_order, site.heads)
        k_node = score.right
        if score.right_transposed:
            k_node = graph.call_function(aten.transpose.int, (k_node, -1, -2))
        k = _canonical(graph, k_node, score.right_order, site.heads)
        batch = _batch(graph, nodes, site) if site.mask else None
        keep = _keep(graph, site.mask, nodes, site.heads, batch) if site.mask and batch else None
        bias = _bias(graph, site.bias, nodes, site) if site.bias else None
        shown = _shown(graph, site.mask, keep) if keep is not None else None
    operator, settings = loop_of(convention)
    rest = {"keep": keep, "bias": bias, **settings}
    return _place(graph, operator, (q, k), rest, site, product, attention, value, anchor, dense, shown)


def _shown(graph: Graph, mask: KeyMask | None, keep: Node) -> Node | None:
    """[B, 1, 1, 1], True for examples with keys, where the teacher gives 0 for the others."""
    if mask is None or not mask.zero_if_empty:
        return None
    any_key = graph.call_function(aten.any.dim, (keep, 1))
    return graph.call_function(aten.view.default, (any_key, [-1, 1, 1, 1]))


def _lift_esp(
    graph: GraphModule, index: int, site: EspSite, nodes: dict[Node, Node], drop_maps: bool
) -> list[Swap]:
    attention, value = nodes[site.attention], nodes[site.value.node]
    product, convention, own = _moved(site.value, nodes), site.convention, graph.graph
    dense = any(user is not value for user in attention.users) and not drop_maps
    anchor = attention.next if dense else value
    with own.inserting_before(anchor):
        q, k = (_canonical(own, nodes[x], None, site.heads, _rank(x)) for x in (site.q, site.k))
        keep = query_keep = None
        if site.mask is not None:
            keep = _keep(own, site.mask, nodes, site.heads, _batch_of(own, q))
            if same(*(x.meta["val"].shape[-2] for x in (site.q, site.k))):
                query_keep = keep  # one mask enters: tokens attend to each other
        theta = None if site.slices is None else _buffer(graph, index, "slices", site.slices)
        tau = torch.tensor([convention.inverse_temperature], dtype=torch.float64)
        weights = _buffer(graph, index, "inverse_temperature", tau)
    name, sorts = "esp_hard", dict[str, Any](ties=convention.order)
    if convention.softsort_temperature is not None:
        name, sorts = "esp_soft", {"softsort_temperature": convention.softsort_temperature}
    rest = {
        "keep": keep, "query_keep": query_keep, "slices": theta, "inverse_temperature": weights,
        "squared_cost": convention.squared_cost, "mean_cost": convention.mean_cost,
        "output_factor": convention.output_factor, "coupling": convention.coupling or "interpolated",
        **sorts,
    }  # fmt: skip
    return _place(own, OPERATORS[name], (q, k), rest, site, product, attention, value, anchor, dense)


def _place(
    graph: Graph,
    operator: Operator,
    clouds: tuple[Node, Node],
    rest: Mapping[str, Any],
    site: AttentionSite | EspSite,
    product: Product,
    attention: Node,
    value: Node,
    anchor: Node,
    dense: bool,
    shown: Node | None = None,
) -> list[Swap]:
    """The operator call instead of A v, or of A where the map is used otherwise too.

    anchor: what the call's other operands stand before; a user of the map may stand before A v.
    shown: what the result is multiplied by.
    """

    def times(call: Node) -> Node:
        return call if shown is None else graph.call_function(aten.mul.Tensor, (call, shown))

    others = [user for user in attention.users if user is not value]
    if dense:
        with graph.inserting_before(anchor):
            call = put_call(graph, operator, *clouds, None, rest)
            call.meta[SITE] = site.name
            result = _original_layout(graph, times(call), attention, product.left_order, site.heads)
        return [(attention, result, lambda user: user is not call)]
    with graph.inserting_before(value):
        v = _values(graph, product, site.value, site.heads)
        call = put_call(graph, operator, *clouds, v, rest)
        call.meta[SITE] = site.name
        result = _original_layout(graph, times(call), value, product.out_order, site.heads)
    swaps: list[Swap] = [(value, result, lambda user: True)]
    if others:  # maps are dropped: an empty one keeps the structure of the output
        with graph.inserting_before(value):
            empty = graph.call_function(aten.slice.Tensor, (call, 0, 0, 0))
        swaps.append((attention, empty, lambda user: user in others))
    return swaps


def _lift_lot(
    graph: GraphModule, index: int, site: LotSite, nodes: dict[Node, Node]
) -> list[Swap]:
    own, outer, c = graph.graph, nodes[site.outer.node], site.convention
    inner, product = _moved(site.inner, nodes), _moved(site.outer, nodes)
    with own.inserting_before(outer):
        q, k = (_points(own, x, nodes, site.heads) for x in (site.q, site.k))
        keep, query_keep = (
            None if mask is None else _keep(own, mask, nodes, site.heads, _batch_of(own, q))
            for mask in (site.mask, site.query_mask)
        )
        v = _values(own, inner, site.inner, site.heads)
        pivots = _buffer(graph, index, "pivots", site.pivots.float())
        mass = _buffer(graph, index, "pivot_mass", site.mass.float())
        rest = {
            "keep": keep, "query_keep": query_keep, "key_bias": None, "pivots": pivots,
            "pivot_mass": mass, "query_multiplier": c.queries.score_multiplier,
            "key_multiplier": c.keys.score_multiplier, "query_half_steps": c.queries.half_steps,
            "queries_first": c.queries.tokens_first, "key_half_steps": c.keys.half_steps,
            "keys_first": c.keys.tokens_first, "output_factor": _lot_factor(c),
        }  # fmt: skip
        call = put_call(own, OPERATORS["lot"], q, k, v, rest)
        call.meta[SITE] = site.name
        result = _original_layout(own, call, outer, product.out_order, site.heads)
    return [(outer, result, lambda user: True)]


def _lot_factor(c: LotConvention) -> list[float]:
    """N^a M^b n^c as the operator's n_q^a n_k^b N^c; where a mask enters, tokens attend to each other."""
    own = c.output_factor
    if c.mask == "none":
        return [own.coefficient, float(own.queries), float(own.keys + own.active), 0.0]
    return [own.coefficient, float(own.active), 0.0, float(own.queries + own.keys)]


def _points(graph: Graph, points: Points, nodes: dict[Node, Node], heads: int) -> Node:
    return _canonical(graph, nodes[points.node], points.order, heads, len(points.order))


def _values(graph: Graph, moved: Product, original: Product, heads: int) -> Node:
    """The right operand of a value product as [B, H, M, E]."""
    node = moved.right
    if not moved.right_transposed and moved.right_order is not None:
        node = graph.call_function(aten.permute.default, (node, list(moved.right_order)))
        node = graph.call_function(aten.transpose.int, (node, -1, -2))
    return _canonical(graph, node, None, heads, _rank(original.right))


def _buffer(graph: GraphModule, index: int, what: str, value: Tensor) -> Node:
    name = f"asapc_site_{index}_{what}"
    graph.register_buffer(name, value)
    return graph.graph.get_attr(name)


def _batch_of(graph: Graph, q: Node) -> Node:
    return graph.call_function(aten.sym_size.int, (q, 0))


def _moved(product: Product, nodes: dict[Node, Node]) -> Product:
    return Product(
        nodes[product.node], nodes[product.left], nodes[product.right], product.right_transposed,
        product.left_order, product.right_order, product.out_order,
    )  # fmt: skip


def _rank(node: Node) -> int:
    return int(node.meta["val"].dim())


def _canonical(
    graph: Graph, node: Node, order: tuple[int, ...] | None, heads: int, rank: int | None = None
) -> Node:
    """An operand as [B, H, X, C]: permuted, and heads split off or added where there are three axes."""
    if order is not None and list(order) != sorted(order):
        node = graph.call_function(aten.permute.default, (node, list(order)))
    if (rank if rank is not None else (len(order) if order is not None else _known_rank(node))) == 4:
        return node
    if heads == 1:
        return graph.call_function(aten.unsqueeze.default, (node, 1))
    return graph.call_function(aten.unflatten.int, (node, 0, [-1, heads]))


def _known_rank(node: Node) -> int:
    """Rank of a node, through the views that this pass inserts."""
    while "val" not in node.meta:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return _rank(node)


def _original_layout(
    graph: Graph, call: Node, replaced: Node, order: tuple[int, ...] | None, heads: int
) -> Node:
    """The operator's [B, H, X, Y] in the layout of the node it replaces."""
    result = call
    if _rank(replaced) == 3:
        if heads == 1:
            result = graph.call_function(aten.squeeze.dim, (result, 1))
        else:
            result = graph.call_function(aten.flatten.using_ints, (result, 0, 1))
    if order is not None and list(order) != sorted(order):
        inverse = [order.index(axis) for axis in range(len(order))]
        result = graph.call_function(aten.permute.default, (result, inverse))
    return result


def _keep(
    graph: Graph, mask: KeyMask, nodes: dict[Node, Node], heads: int, batch: Node
) -> Node:
    """[B, M] bool, True on active keys, from the mask node wherever it entered."""
    node, value = _narrowest(mask.node), None
    value = node.meta["val"]
    keep = nodes[node]
    if mask.merged and value.dim() == 3:
        if heads > 1:
            keep = graph.call_function(aten.unflatten.int, (keep, 0, [-1, heads]))
        else:
            keep = graph.call_function(aten.unsqueeze.default, (keep, 1))
        rank = 4
    else:
        rank = value.dim()
    while rank > 2:
        keep = graph.call_function(aten.select.int, (keep, 1, 0))
        rank -= 1
    if rank == 1:
        keep = graph.call_function(aten.unsqueeze.default, (keep, 0))
    if mask.true_means_masked is None:
        if mask.is_bias:
            keep = graph.call_function(aten.gt.Scalar, (keep, MASKED_BELOW))
        else:
            keep = graph.call_function(torch.ops.asapc.kept_keys.default, (keep, mask.hides))
    elif mask.true_means_masked:
        keep = graph.call_function(aten.logical_not.default, (keep,))
    return graph.call_function(aten.expand.default, (keep, [batch, -1]))


def _narrowest(node: Node) -> Node:
    """The [B, M] tensor a repeated key mask was spread from, so that [B, H, N, M] is never built."""
    current = node
    while True:
        source = current.args[0] if current.args else None
        spreads = (aten.repeat.default, aten.expand.default, aten.unsqueeze.default)
        if current.target not in spreads or not isinstance(source, Node):
            break
        current = source
    reached = current.meta["val"]
    if reached.dim() != 2 or node.meta["val"].dim() < 3:
        return node
    keys = node.meta["val"].shape[-1]
    batch = node.meta["val"].shape[0]
    same = all(
        str(a) == str(b) for a, b in zip(reached.shape, (batch, keys), strict=True)
    )
    return current if same else node


def _batch(graph: Graph, nodes: dict[Node, Node], site: AttentionSite) -> Node:
    order = site.score.left_order
    left = nodes[site.score.left]
    axis = 0 if order is None else order[0]
    size = graph.call_function(aten.sym_size.int, (left, axis))
    if _rank(site.score.left) == 3 and site.heads > 1:
        size = graph.call_function(operator.floordiv, (size, site.heads))
    return size


def _bias(graph: Graph, bias: ScoreBias, nodes: dict[Node, Node], site: AttentionSite) -> Node:
    """Broadcastable to [B, H, N, M], in units of epsilon."""
    node, rank = nodes[bias.node], _rank(bias.node)
    if bias.merged and rank == 3:
        node = _canonical(graph, node, None, site.heads, rank)
    if abs(bias.coefficient - 1.0) > 1e-9:
        node = graph.call_function(aten.mul.Tensor, (node, bias.coefficient))
    return node
