"""Scalings: a plan whose scalings are applied apart is one matrix again.

before: a * (K @ (b * V)), or (K @ (b * V)) / (K @ b)
after:  (a * K * b) @ V

Code that scales K = exp(S) as optimal transport is taught never forms the plan, so that nothing in its
graph is one. Scalings are joined where a loop of sums has made them, and only if that shows a site.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from asapc.ir import Program
from asapc.passes.cut import ancestors, is_tensor
from asapc.passes.lift import INERT
from asapc.passes.plan.loops import find_loops
from asapc.passes.products import BARRIERS, product_of, rank_of, same
from asapc.passes.written import moved, written
from asapc.program.calls import copied

aten = torch.ops.aten

SCALINGS = (aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True)
class _Apart:
    """scaled: a * (K @ (b * V)).  product: K @ (b * V).  inner: b * V.  rows, columns: a and b.
    kernel: K, or where `turned` what it is the transpose of."""

    scaled: Node
    product: Node
    inner: Node
    rows: Node
    columns: Node
    kernel: Node
    turned: bool
    values: Node


def joined_program(program: Program) -> Program | None:
    """The program with scalings put into the maps that they are of; None where there are none."""
    sums = frozenset(total for loop in find_loops(program.graph) for total in loop.sums)
    places = [apart for node in program.graph.graph.nodes if (apart := _apart(node, sums)) is not None]
    if not places:
        return None
    graph, nodes = copied(program.graph)
    became: dict[Node, Node] = {}

    def now(node: Node) -> Node:
        return became.get(nodes[node], nodes[node])

    for apart in places:
        scaled, product, inner = nodes[apart.scaled], nodes[apart.product], nodes[apart.inner]

        def write(target: Any, *args: Any, root: Node = product) -> Node:
            return written(graph, root, target, *args)

        with graph.graph.inserting_before(scaled):
            # What was a row of numbers for the keys lies along them now.
            along, across = (apart.rows, apart.columns) if apart.turned else (apart.columns, apart.rows)
            first, second = (scaled, inner) if apart.turned else (inner, scaled)
            plan = write(first.target, now(apart.kernel), write(aten.transpose.int, now(along), -2, -1))
            plan = write(second.target, plan, now(across))
            plan = write(aten.transpose.int, plan, -2, -1) if apart.turned else plan
            result = write(aten.matmul.default, plan, now(apart.values))
        scaled.replace_all_uses_with(result)
        became[scaled] = result
    return moved(program, graph, nodes, became, "scalings")


def _apart(node: Node, sums: frozenset[Node]) -> _Apart | None:
    """Where a matrix multiplies rows that are scaled, and the product's rows are scaled again, by what a
    loop has made."""
    product = product_of(node)
    if product is None or same(node.meta["val"].shape[-1], 1):
        return None
    if any(operand.order is not None for operand in (product.map, product.values, product.result)):
        return None
    users = [user for user in node.users if user.users or user.target not in INERT]
    inner = _scaled(product.right, sums)
    outer = _scaled(users[0], sums) if len(users) == 1 else None
    if inner is None or outer is None or outer[0] is not node:
        return None
    kernel, rank = product.left, rank_of(product.left)
    turned = kernel.target is aten.transpose.int and (
        {axis % rank for axis in kernel.args[1:] if isinstance(axis, int)} == {rank - 2, rank - 1}
    )
    if turned:
        (kernel,) = kernel.all_input_nodes
    # The products with scalings must be of the kernel's own sizes and numbers.
    leads = kernel.meta["val"].shape[:-2]
    for scaling in (inner[1], outer[1]):
        if len(scaling.meta["val"].shape) != len(leads) + 2 or not all(
            same(one, other) or same(one, 1)
            for one, other in zip(scaling.meta["val"].shape[:-2], leads, strict=True)
        ):
            return None
    if len({x.meta["val"].dtype for x in (kernel, node, inner[0], inner[1], outer[1])}) > 1:
        return None
    return _Apart(users[0], node, product.right, outer[1], inner[1], kernel, turned, inner[0])


def _scaled(node: Node, sums: frozenset[Node]) -> tuple[Node, Node] | None:
    """(what is scaled, the scaling) where every row has a number that a loop has made."""
    if node.target not in SCALINGS:
        return None
    one, other = node.args[:2]
    for what, by in [(one, other)] if node.target is aten.div.Tensor else [(one, other), (other, one)]:
        if not isinstance(what, Node) or not isinstance(by, Node) or not is_tensor(by):
            continue
        if not is_tensor(what) or rank_of(what) < 2 or rank_of(node) < 2:
            continue
        if not same(what.meta["val"].shape[-2], node.meta["val"].shape[-2]):
            continue  # values that are repeated along the tokens
        if rank_of(by) != rank_of(node) or not same(by.meta["val"].shape[-1], 1):
            continue
        if not sums.isdisjoint({by, *ancestors(by, until=BARRIERS)}):
            return what, by
    return None
