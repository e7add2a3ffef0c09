"""Factors: a parameter that multiplies scores multiplies the queries instead.

before: (q k^T + b) * t
after:  (q * t) k^T + b * t

t is one number, or one a head, computed from parameters alone: a learnt temperature, a gain. A site takes
the product of what it is given for its scores, so the parameter is read where the program runs, is
trained, and may be loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from asapc.ir import Program
from asapc.passes.cut import depends_on_data, is_tensor, reaches
from asapc.passes.lift import INERT
from asapc.passes.products import VIEWS, product_of, rank_of, same
from asapc.passes.written import moved, written
from asapc.program.calls import copied

aten = torch.ops.aten

SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
SUMS = (aten.add.Tensor, aten.sub.Tensor)
ALONG = (*SCALINGS, aten.mul.Scalar, aten.div.Scalar, aten.neg.default)  # linear in their first operand


def moved_factors(program: Program) -> Program | None:
    """The program with factors of scores moved to the queries; None where there are none."""
    parameters = {name for name, _ in program.graph.named_parameters(remove_duplicate=False)}
    graph, nodes = copied(program.graph)
    became: dict[Node, Node] = {}
    for node in list(graph.graph.nodes):
        factor = _factor(node, parameters)
        scores = node.args[0] if factor is not None else None
        if factor is None or not isinstance(scores, Node) or not _is_linear(scores, factor, node):
            continue
        with graph.graph.inserting_before(node):
            result = _pushed(graph, scores, node.target, factor)
        node.replace_all_uses_with(result)
        became[node] = result
    return moved(program, graph, nodes, became, "factors") if became else None


def _factor(node: Node, parameters: set[str]) -> Node | None:
    """What a node multiplies a tensor by, or divides it by: one number of parameters, or one a head."""
    if node.target not in SCALINGS or not is_tensor(node):
        return None
    scores, factor = node.args[:2]
    if not isinstance(scores, Node) or not isinstance(factor, Node):
        return None
    if not is_tensor(scores) or not is_tensor(factor):
        return None
    shape = factor.meta["val"].shape
    is_number = all(isinstance(n, int) and n == 1 for n in shape)
    by_head = len(shape) >= 3 and all(isinstance(n, int) for n in shape) and shape[-2:] == (1, 1)
    if not (is_number or by_head) or len(shape) > rank_of(scores) or depends_on_data(factor):
        return None
    values = [x.meta["val"] for x in (scores, factor)]
    kept = torch.result_type(*values) == node.meta["val"].dtype == values[0].dtype
    read = reaches(factor, lambda x: x.op == "get_attr" and str(x.target) in parameters)
    return factor if kept and read else None


def _is_linear(node: Any, factor: Node, user: Node) -> bool:
    """Whether a node is made of products of scores, and nothing else uses what lies between."""
    if not isinstance(node, Node) or not is_tensor(node):
        return False
    users = [other for other in node.users if other.users or other.target not in INERT]
    if users != [user]:
        return False
    product = product_of(node)
    if product is not None:
        return not same(node.meta["val"].shape[-1], 1) and torch.result_type(
            *(x.meta["val"] for x in (product.left, factor))
        ) == product.left.meta["val"].dtype
    is_number = factor.meta["val"].numel() == 1
    if node.target in SUMS and not node.kwargs:
        operands = [x for x in node.args[:2] if isinstance(x, Node)]
        full = all(rank_of(x) == rank_of(node) for x in operands) or is_number
        return len(operands) == 2 and full and any(_is_linear(x, factor, node) for x in operands)
    passes = node.target in ALONG or (node.target in VIEWS and is_number)
    return passes and rank_of(node) >= rank_of(factor) and _is_linear(node.args[0], factor, node)


def _pushed(graph: GraphModule, node: Node, scaling: Any, factor: Node) -> Node:
    """The node with its products scaled; all of it is written anew."""
    product = product_of(node)
    if product is not None:
        aligned = _aligned(graph, node, factor)
        queries = written(graph, node, scaling, product.left, aligned)
        if node.target is aten.einsum.default:
            return written(graph, node, node.target, node.args[0], [queries, product.right])
        return written(graph, node, node.target, queries, product.right)
    if node.target in SUMS:
        terms = [
            _pushed(graph, x, scaling, factor) if _is_linear(x, factor, node)
            else written(graph, node, scaling, x, factor)
            for x in node.args[:2] if isinstance(x, Node)
        ]  # fmt: skip
        return written(graph, node, node.target, *terms)
    first, *others = node.args
    assert isinstance(first, Node)
    pushed = _pushed(graph, first, scaling, factor)
    return written(graph, node, node.target, pushed, *others, **node.kwargs)


def _aligned(graph: GraphModule, node: Node, factor: Node) -> Node:
    """The factor with its axis of heads where the queries of a product have theirs."""
    product = product_of(node)
    assert product is not None
    if factor.meta["val"].numel() == 1:
        return factor if not rank_of(factor) else written(graph, node, aten.reshape.default, factor, [])
    ranks = rank_of(node)
    if product.result.order is None and product.map.order is None:
        return factor
    out, queries = (operand.order or (*range(ranks),) for operand in (product.result, product.map))
    sizes = [1] * (ranks - rank_of(factor)) + [*factor.meta["val"].shape]
    full = written(graph, node, aten.reshape.default, factor, sizes)
    canonical = written(graph, node, aten.permute.default, full, [*out])
    return written(graph, node, aten.permute.default, canonical, [*map(queries.index, range(ranks))])
