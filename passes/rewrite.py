"""Rewrite: matched regions become operator calls.

before: q k^T -> [masks, bias, the loop] -> A v
after:  torch.ops.asapc.sinkhorn(q, k, v, keep, bias, ...)               lift
        torch.ops.asapc.asap(q, k, v, keep, bias, dual, ...)             amortise

If the model also returns the attention map, the map is computed densely by the operator's
`_attention` twin and the value product stays.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from asapc.ir import OutputFactor, Program, SiteTensors
from asapc.operators.sinkhorn import factor_terms
from asapc.passes.match import AttentionSite, KeyMask, Product, ScoreBias
from asapc.passes.verify import check_graph

aten = torch.ops.aten
LOSSLESS = {torch.ops.asapc.sinkhorn.default, torch.ops.asapc.sinkhorn_attention.default}
AMORTISED = {torch.ops.asapc.asap.default, torch.ops.asapc.asap_attention.default}


@dataclass(frozen=True)
class Amortised:
    """What an ASAP site needs beyond its convention: theta [L, D], coefficients [1 | H, L]."""

    closures: int
    theta: Tensor
    coefficients: Tensor


@dataclass(frozen=True)
class Operands:
    """The operator call of one lifted site, with its operands as graph nodes (None if absent)."""

    call: Node
    q: Node
    k: Node
    keep: Node | None
    bias: Node | None


def lift(program: Program, sites: list[AttentionSite], drop_maps: bool = False) -> Program:
    """Every matched region becomes one lossless operator call; the loop is removed."""
    graph, nodes = _copied(program.graph)
    for site in sites:
        _lift_site(graph.graph, site, nodes, drop_maps)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    check_graph(graph, "lift", [site.name for site in sites])
    return Program(
        program.name, graph, program.args, program.kwargs, program.dynamic_shapes,
        program.early_stop,
    )  # fmt: skip


def amortise(lifted: Program, choices: dict[int, Amortised]) -> Program:
    """The i-th lifted site predicts its source dual instead of running the loop, for i in choices."""
    graph, _ = _copied(lifted.graph)
    for index, operands in enumerate(operator_calls(graph)):
        choice = choices.get(index)
        if choice is None:
            continue
        call = operands.call
        dense = call.target is torch.ops.asapc.sinkhorn_attention.default
        arguments = list(call.args)
        score_multiplier, factor = arguments[-4], arguments[-1]
        stem = f"asapc_site_{index}"
        graph.register_buffer(f"{stem}_theta", choice.theta)
        graph.register_buffer(f"{stem}_coefficients", choice.coefficients)
        with graph.graph.inserting_before(call):
            theta = graph.graph.get_attr(f"{stem}_theta")
            coefficients = graph.graph.get_attr(f"{stem}_coefficients")
            dual = graph.graph.call_function(
                torch.ops.asapc.sliced_dual.default,
                (operands.q, operands.k, operands.keep, theta, coefficients, score_multiplier),
            )
            values = () if dense else (arguments[2],)
            target = torch.ops.asapc.asap_attention if dense else torch.ops.asapc.asap
            replacement = graph.graph.call_function(
                target.default,
                (operands.q, operands.k, *values, operands.keep, operands.bias, dual,
                 score_multiplier, choice.closures, factor),
            )  # fmt: skip
        call.replace_all_uses_with(replacement)
        graph.graph.erase_node(call)
    graph.recompile()
    check_graph(graph, "amortise", [str(index) for index in choices])
    return Program(
        lifted.name, graph, lifted.args, lifted.kwargs, lifted.dynamic_shapes, lifted.early_stop
    )


def operator_calls(graph: GraphModule) -> list[Operands]:
    """The operator calls of a rewritten graph in graph order, one for each site."""
    found = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target not in LOSSLESS | AMORTISED:
            continue
        dense = node.target in (
            torch.ops.asapc.sinkhorn_attention.default,
            torch.ops.asapc.asap_attention.default,
        )
        keep, bias = node.args[2:4] if dense else node.args[3:5]
        q, k = node.args[:2]
        assert isinstance(q, Node) and isinstance(k, Node)
        found.append(
            Operands(
                node, q, k,
                keep if isinstance(keep, Node) else None,
                bias if isinstance(bias, Node) else None,
            )
        )  # fmt: skip
    return found


def tapped(lifted: Program, record: Callable[..., None]) -> GraphModule:
    """The lifted graph that also calls record(i, q, k, keep, bias) at its i-th site."""
    graph, _ = _copied(lifted.graph)
    for index, o in enumerate(operator_calls(graph)):
        with graph.graph.inserting_before(o.call):
            graph.graph.call_function(record, (index, o.q, o.k, o.keep, o.bias))
    graph.recompile()
    return graph


def attention_of(
    graph: GraphModule, index: int, attention_units: bool = False
) -> Callable[[SiteTensors], Tensor]:
    """The dense map of the graph's i-th operator call, as a function of what the site sees.

    attention_units: N * P whatever the teacher's own output factor, so that rows sum to about 1.
    """
    call = operator_calls(graph)[index].call
    factor = factor_terms(OutputFactor(queries=1)) if attention_units else call.args[-1]
    if call.target in LOSSLESS:
        settings = (*call.args[-4:-1], factor)
        return lambda t: torch.ops.asapc.sinkhorn_attention(t.q, t.k, t.keep, t.bias, *settings)
    score_multiplier, closures = call.args[-3:-1]
    predict = predicted_dual(graph, index)
    assert predict is not None

    def amortised(t: SiteTensors) -> Tensor:
        return torch.ops.asapc.asap_attention(
            t.q, t.k, t.keep, t.bias, predict(t), score_multiplier, closures, factor
        )

    return amortised


def predicted_dual(graph: GraphModule, index: int) -> Callable[[SiteTensors], Tensor] | None:
    """The source dual the i-th call starts from, in score coordinates; None if it is lossless."""
    call = operator_calls(graph)[index].call
    if call.target in LOSSLESS:
        return None
    predict, score_multiplier = call.args[-4], call.args[-3]
    assert isinstance(predict, Node)
    theta, coefficients = (_attribute(graph, predict.args[i]) for i in (3, 4))
    return lambda t: torch.ops.asapc.sliced_dual(
        t.q, t.k, t.keep, theta, coefficients, score_multiplier
    )


def _attribute(graph: GraphModule, node: object) -> Tensor:
    assert isinstance(node, Node) and node.op == "get_attr"
    value = operator.attrgetter(str(node.target))(graph)
    assert isinstance(value, Tensor)
    return value


def _copied(graph: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A copy that shares parameters but no nodes, and the map from old nodes to new ones."""
    fresh = Graph(tracer_cls=graph.graph._tracer_cls)
    nodes: dict[Node, Node] = {}
    output = fresh.graph_copy(graph.graph, nodes)
    fresh.output(output)
    old_output = graph.graph.output_node()
    fresh.output_node().meta = copy.copy(old_output.meta)
    fresh.set_codegen(copy.copy(graph.graph._codegen))
    return GraphModule(graph, fresh), nodes


def _lift_site(graph: Graph, site: AttentionSite, nodes: dict[Node, Node], drop_maps: bool) -> None:
    attention, value = nodes[site.attention], nodes[site.value.node]
    score = _moved(site.score, nodes)
    product = _moved(site.value, nodes)
    others = [user for user in attention.users if user is not value]
    dense = bool(others) and not drop_maps
    convention = site.convention
    with graph.inserting_before(value if not dense else attention.next):
        q = _canonical(graph, score.left, score.left_order, site.heads)
        k_node = score.right
        if score.right_transposed:
            k_node = graph.call_function(aten.transpose.int, (k_node, -1, -2))
        k = _canonical(graph, k_node, score.right_order, site.heads)
        keep = _keep(graph, site.mask, nodes, site) if site.mask else None
        bias = _bias(graph, site.bias, nodes, site) if site.bias else None
        settings = (
            convention.score_multiplier,
            convention.half_steps,
            convention.first_side == "row",
            factor_terms(convention.output_factor),
        )
        if dense:
            call = graph.call_function(
                torch.ops.asapc.sinkhorn_attention.default, (q, k, keep, bias, *settings)
            )
            result = _original_layout(graph, call, attention, product.left_order, site)
            attention.replace_all_uses_with(result, delete_user_cb=lambda u: u is not call)
            return
        v_node = product.right
        if not product.right_transposed and product.right_order is not None:
            v_node = graph.call_function(aten.permute.default, (v_node, list(product.right_order)))
            v_node = graph.call_function(aten.transpose.int, (v_node, -1, -2))
        v = _canonical(graph, v_node, None, site.heads, _rank(site.value.right))
        call = graph.call_function(torch.ops.asapc.sinkhorn.default, (q, k, v, keep, bias, *settings))
        result = _original_layout(graph, call, value, product.out_order, site)
        value.replace_all_uses_with(result)
        if others:  # maps are dropped: an empty one keeps the structure of the output
            empty = graph.call_function(aten.slice.Tensor, (call, 0, 0, 0))
            attention.replace_all_uses_with(empty, delete_user_cb=lambda u: u in others)


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
    graph: Graph, call: Node, replaced: Node, order: tuple[int, ...] | None, site: AttentionSite
) -> Node:
    """The operator's [B, H, X, Y] in the layout of the node it replaces."""
    result = call
    if _rank(replaced) == 3:
        if site.heads == 1:
            result = graph.call_function(aten.squeeze.dim, (result, 1))
        else:
            result = graph.call_function(aten.flatten.using_ints, (result, 0, 1))
    if order is not None and list(order) != sorted(order):
        inverse = [order.index(axis) for axis in range(len(order))]
        result = graph.call_function(aten.permute.default, (result, inverse))
    return result


def _keep(graph: Graph, mask: KeyMask, nodes: dict[Node, Node], site: AttentionSite) -> Node:
    """[B, M] bool, True on active keys, from the mask node wherever it entered."""
    from asapc.passes.match import MASKED_BELOW

    node, value = _narrowest(mask.node), None
    value = node.meta["val"]
    keep = nodes[node]
    if mask.merged and value.dim() == 3:
        if site.heads > 1:
            keep = graph.call_function(aten.unflatten.int, (keep, 0, [-1, site.heads]))
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
        keep = graph.call_function(aten.gt.Scalar, (keep, MASKED_BELOW))
    elif mask.true_means_masked:
        keep = graph.call_function(aten.logical_not.default, (keep,))
    return graph.call_function(aten.expand.default, (keep, [_batch(graph, nodes, site), -1]))


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
