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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from asapc.features.predictor import Amortised, DualPredictor
from asapc.ir import Program, SiteTensors
from asapc.operators.sinkhorn import factor_terms
from asapc.passes.match import AttentionSite, KeyMask, ScoreBias
from asapc.passes.products import Product
from asapc.passes.verify import check_graph

aten = torch.ops.aten
LOSSLESS = {torch.ops.asapc.sinkhorn.default, torch.ops.asapc.sinkhorn_attention.default}
AMORTISED = {torch.ops.asapc.asap.default, torch.ops.asapc.asap_attention.default}


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
    """The i-th lifted site predicts its duals instead of running the loop, for i in choices."""
    graph, _ = _copied(lifted.graph)
    for index, operands in enumerate(operator_calls(graph)):
        if index in choices:
            with graph.graph.inserting_before(operands.call):
                replacement = _amortised_call(graph, index, operands, choices[index])
            operands.call.replace_all_uses_with(replacement)
            graph.graph.erase_node(operands.call)
    graph.recompile()
    check_graph(graph, "amortise", [str(index) for index in choices])
    return Program(
        lifted.name, graph, lifted.args, lifted.kwargs, lifted.dynamic_shapes, lifted.early_stop
    )


def amortised_programs(
    lifted: Sequence[Program], choices: Sequence[Amortised | None]
) -> list[Program]:
    """The lifted programs with the i-th site, counted through all of them, amortised by choices[i]."""
    compiled, start = [], 0
    for program in lifted:
        count = len(operator_calls(program.graph))
        own = dict(enumerate(choices[start : start + count]))
        chosen = {index: choice for index, choice in own.items() if choice is not None}
        compiled.append(amortise(program, chosen) if chosen else program)
        start += count
    return compiled


def shortened_programs(lifted: Sequence[Program], half_steps: int) -> list[Program]:
    """The lifted programs with every loop cut to `half_steps`, the baseline of every study."""
    shortened = []
    for program in lifted:
        graph, _ = _copied(program.graph)
        for operands in operator_calls(graph):
            arguments = list(operands.call.args)
            arguments[-3] = half_steps
            operands.call.args = tuple(arguments)
        graph.recompile()
        shortened.append(replace(program, graph=graph))
    return shortened


def _amortised_call(graph: GraphModule, index: int, o: Operands, own: Amortised) -> Node:
    dense = o.call.target is torch.ops.asapc.sinkhorn_attention.default
    multiplier, factor = float(o.call.args[-4]), o.call.args[-1]  # type: ignore[arg-type]
    duals: dict[str, Node | None] = {"source": None, "key": None}
    mass: Node | None = None
    for predictor in own.predictors:
        call = _dual_call(graph, index, o, predictor, multiplier, own.plan.rescaled)
        if own.plan.rescaled:
            mass = graph.graph.call_function(operator.getitem, (call, 1))
            call = graph.graph.call_function(operator.getitem, (call, 0))
        duals[predictor.side] = call
    if own.intercept is not None:
        shift = _constant(graph, index, "intercept", own.intercept[:, None])
        duals["source"] = graph.graph.call_function(aten.add.Tensor, (duals["source"], shift))
    values = () if dense else (o.call.args[2],)
    target = torch.ops.asapc.asap_attention if dense else torch.ops.asapc.asap
    result = graph.graph.call_function(
        target.default,
        (o.q, o.k, *values, o.keep, o.bias, duals["source"], duals["key"], multiplier,
         own.plan.closures, factor),
    )  # fmt: skip
    if mass is None:
        return result
    column = graph.graph.call_function(aten.unsqueeze.default, (mass, -1))
    scaled = graph.graph.call_function(aten.mul.Tensor, (result, column))
    # Masses are float32 or float64; the site keeps its own dtype.
    return graph.graph.call_function(aten.type_as.default, (scaled, result))


def _dual_call(
    graph: GraphModule,
    index: int,
    o: Operands,
    predictor: DualPredictor,
    multiplier: float,
    mass: bool,
) -> Node:
    side = predictor.side
    parameters = [
        _constant(graph, index, f"{side}_parameter_{number}", tensor)
        for number, tensor in enumerate(predictor.tensors())
    ]
    coefficients = _constant(graph, index, f"{side}_coefficients", predictor.coefficients)
    target = torch.ops.asapc.dual_and_row_mass if mass else torch.ops.asapc.dual
    return graph.graph.call_function(
        target.default,
        (o.q, o.k, o.keep, o.bias, parameters, coefficients,
         *predictor.settings(multiplier, mass)),
    )  # fmt: skip


def _constant(graph: GraphModule, index: int, what: str, value: Tensor) -> Node:
    name = f"asapc_site_{index}_{what}"
    graph.register_buffer(name, value)
    return graph.graph.get_attr(name)


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


def site_function(
    graph: GraphModule, index: int, factor: Sequence[float] | None = None
) -> Callable[[SiteTensors, Tensor | None], Tensor]:
    """The graph's i-th site by itself: (what it sees, values or None for the map) -> output.

    factor: replaces the teacher's output factor.
    """
    call = operator_calls(graph)[index].call
    settings = list(call.args[-4:] if call.target in LOSSLESS else call.args[-3:])
    if factor is not None:
        settings[-1] = list(factor)
    if call.target in LOSSLESS:
        return lambda t, v: _lossless(t, v, settings)
    source, key = (_predicted(graph, node) for node in call.args[-5:-3])
    rescaled = _is_rescaled(call)

    def amortised(t: SiteTensors, v: Tensor | None) -> Tensor:
        f, g = source(t) if source else None, key(t) if key else None
        duals = (None if f is None else f[0], None if g is None else g[0])
        if v is None:
            out = torch.ops.asapc.asap_attention(t.q, t.k, t.keep, t.bias, *duals, *settings)
        else:
            out = torch.ops.asapc.asap(t.q, t.k, v, t.keep, t.bias, *duals, *settings)
        result: Tensor = out
        if rescaled and g is not None and g[1] is not None:
            result = (out * g[1][..., None]).to(out.dtype)
        return result

    return amortised


def predicted_duals(
    graph: GraphModule, index: int
) -> tuple[Callable[[SiteTensors], Tensor] | None, Callable[[SiteTensors], Tensor] | None]:
    """(source, key) duals the i-th call starts from, in score coordinates; None where not predicted."""
    call = operator_calls(graph)[index].call
    if call.target in LOSSLESS:
        return None, None
    source, key = (_predicted(graph, node) for node in call.args[-5:-3])
    return (
        None if source is None else (lambda t: source(t)[0]),
        None if key is None else (lambda t: key(t)[0]),
    )


def _lossless(t: SiteTensors, v: Tensor | None, settings: Sequence[Any]) -> Tensor:
    result: Tensor
    if v is None:
        result = torch.ops.asapc.sinkhorn_attention(t.q, t.k, t.keep, t.bias, *settings)
    else:
        result = torch.ops.asapc.sinkhorn(t.q, t.k, v, t.keep, t.bias, *settings)
    return result


def _predicted(
    graph: GraphModule, node: Any
) -> Callable[[SiteTensors], tuple[Tensor, Tensor | None]] | None:
    """What a dual operand of an ASAP call computes: the dual, and row masses where they come along."""
    if node is None:
        return None
    shift: Tensor | None = None
    if node.target is aten.add.Tensor:
        node, shift = node.args[0], _attribute(graph, node.args[1])
    with_mass = node.target is operator.getitem
    call = node.args[0] if with_mass else node
    parameters = [_attribute(graph, item) for item in call.args[4]]
    coefficients, settings = _attribute(graph, call.args[5]), call.args[6:]

    def predict(t: SiteTensors) -> tuple[Tensor, Tensor | None]:
        arguments = (t.q, t.k, t.keep, t.bias, parameters, coefficients, *settings)
        if with_mass:
            dual, mass = torch.ops.asapc.dual_and_row_mass(*arguments)
            return dual, mass
        dual = torch.ops.asapc.dual(*arguments)
        return (dual if shift is None else dual + shift), None

    return predict


def _is_rescaled(call: Node) -> bool:
    """Whether the key dual of an ASAP call comes with row masses that multiply its result."""
    key = call.args[-4]
    return isinstance(key, Node) and key.target is operator.getitem


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
