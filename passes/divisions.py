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
        args: Any = node.args
        if node.target is aten.div.Tensor and _are_sums(args[1], args[0]):
            is_positive(args[0], known)  # asked in order: a loop is deeper than one question goes
        guarded = _guarded(node)
        if guarded is None:
            continue
        args = guarded.args
        divided = guarded.target is aten.div.Tensor
        total = args[1] if divided else guarded
        matrices: list[Any] = [args[0]] if divided else [
            user.args[0] for user in node.users if user.target is aten.div.Tensor and user.args[1] is node
        ]  # fmt: skip
        everywhere = divided or len(matrices) == len(node.users) > 0
        if not everywhere or not all(_are_sums(total, m) and is_positive(m, known) for m in matrices):
            continue
        with graph.graph.inserting_before(node):
            numbers = torch.finfo(total.meta["val"].dtype)
            made = _call(graph, aten.clamp_min.default, total, numbers.tiny * numbers.eps)
            if divided:
                made = _call(graph, aten.div.Tensor, args[0], made)
        node.replace_all_uses_with(made)
        changed = True
    return changed


def _call(graph: GraphModule, target: Any, *args: Any) -> Node:
    node = graph.graph.call_function(target, args)
    node.meta = {**args[0].meta, "val": target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))}
    return node


def _are_sums(total: Any, matrix: Any) -> bool:
    """Whether these are the matrix's sums over an axis."""
    return (
        isinstance(total, Node)
        and total.target is aten.sum.dim_IntList
        and total.args[0] is matrix
        and total.args[2:] == (True,)
        and is_tensor(total)
        and bool(total.meta["val"].is_floating_point())
    )


def _guarded(node: Node) -> Node | None:
    """P / t of what gives 0 where t is 0, or t of what gives more than 0 there; None of anything else."""
    args: Any = node.args
    if node.target is aten.nan_to_num.default and len(args) == 1 and not node.kwargs:
        return args[0] if args[0].target is aten.div.Tensor else None
    choice = _choice(node)
    if choice is None:
        return None
    total, some, none = choice
    number = isinstance(none, (int, float))
    if some is total:
        return total if number and none > 0 else None
    divided = isinstance(some, Node) and some.target is aten.div.Tensor and some.args[1] is total
    empty = none == 0 if number else getattr(none, "target", None) in ZEROS
    return some if divided and empty else None


def _choice(node: Node) -> tuple[Any, Any, Any] | None:
    """(t, what is chosen where t > 0, and where t == 0)"""
    args: Any = node.args
    if node.target in CHOICES and len(args) == 3:
        asked, yes, no = args
    elif node.target in FILLS:
        no, asked, yes = args
    else:
        return None
    while asked.target in NOT:
        asked, yes, no = asked.args[0], no, yes
    if asked.target not in SOME | NONE or asked.args[1] != 0:
        return None
    return (asked.args[0], yes, no) if asked.target in SOME else (asked.args[0], no, yes)
