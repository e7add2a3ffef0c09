"""Divisions that give 0 where there is nothing to divide, in the one spelling that matchers know.

before: where(t > 0, P / t, 0), P / where(t == 0, 1, t), nan_to_num(P / t)
after:  P / clamp_min(t, the smallest number above 0)

Of t = P.sum(axis) and P >= 0. Where t is 0, so is every entry of P that it divides: all of these give 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from asapc.passes.cut import is_tensor
from asapc.passes.positive import is_positive

aten = torch.ops.aten

SOME = {aten.gt.Scalar, aten.ne.Scalar}  # t > 0
NONE = {aten.eq.Scalar, aten.le.Scalar}  # t == 0
NOT = {aten.logical_not.default, aten.bitwise_not.default}
CHOICES = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf}
FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


def guarded_divisions(graph: GraphModule) -> bool:
    """Respell divisions that are kept from being one by 0, in place; whether there were any."""
    known: dict[Node, float] = {}
    changed = False
    for node in list(graph.graph.nodes):
        if node.target is aten.div.Tensor and _divides_its_sums(node, node.args[1]):
            is_positive(node.args[0], known)  # asked in order, as a loop is deeper than one question goes
        guarded = _guarded(node)
        if guarded is None:
            continue
        divisions = [guarded] if guarded.target is aten.div.Tensor else list(node.users)
        total = guarded.args[1] if guarded.target is aten.div.Tensor else guarded
        if not divisions or not all(
            division.target is aten.div.Tensor
            and division.args[1] in (total, node)
            and _divides_its_sums(division, total)
            and is_positive(division.args[0], known)
            for division in divisions
        ):
            continue
        with graph.graph.inserting_before(node):
            numbers = torch.finfo(total.meta["val"].dtype)
            made = _call(graph, aten.clamp_min.default, total, numbers.tiny * numbers.eps)
            if guarded.target is aten.div.Tensor:
                made = _call(graph, aten.div.Tensor, guarded.args[0], made)
        node.replace_all_uses_with(made)
        changed = True
    return changed


def _call(graph: GraphModule, target: Any, *args: Any) -> Node:
    node = graph.graph.call_function(target, args)
    node.meta = {**args[0].meta, "val": target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))}
    return node


def _divides_its_sums(division: Node, total: Any) -> bool:
    """Whether a division is one of a matrix by its own sums over an axis."""
    return (
        isinstance(total, Node)
        and total.target is aten.sum.dim_IntList
        and total.args[0] is division.args[0]
        and total.args[2:] == (True,)
        and is_tensor(total)
        and total.meta["val"].is_floating_point()
    )


def _guarded(node: Node) -> Node | None:
    """P / t of what gives 0 where t is 0, or t of what gives more than 0 there; None of anything else."""
    if node.target is aten.nan_to_num.default and len(node.args) == 1 and not node.kwargs:
        division = node.args[0]
        return division if isinstance(division, Node) and division.target is aten.div.Tensor else None
    if node.target in CHOICES:
        asked, some, none = node.args
    elif node.target in FILLS:
        some, asked, none = node.args
        asked = ("not", asked)
    else:
        return None
    question = _question(asked)
    if question is None:
        return None
    total, positive = question
    if not positive:
        some, none = none, some
    if some is total:
        return total if isinstance(none, (int, float)) and none > 0 else None
    divided = isinstance(some, Node) and some.target is aten.div.Tensor and some.args[1] is total
    empty = none == 0 if isinstance(none, (int, float)) else getattr(none, "target", None) in ZEROS
    return some if divided and empty else None


def _question(asked: Any) -> tuple[Node, bool] | None:
    """(t, whether it asks for t > 0 rather than t == 0)"""
    positive = True
    while isinstance(asked, tuple) or (isinstance(asked, Node) and asked.target in NOT):
        asked = asked[1] if isinstance(asked, tuple) else asked.args[0]
        positive = not positive
    if not isinstance(asked, Node) or asked.target not in SOME | NONE or asked.args[1] != 0:
        return None
    return asked.args[0], positive == (asked.target in SOME)
