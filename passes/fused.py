"""Fused: fused attention is spelt out, where softmax layers are to become something else.

before: scaled_dot_product_attention(q, k, v, mask)
after:  softmax(q k^T / sqrt(D) + mask) v

A softmax layer is a finite loop of one half-step, on rows. It is a site only where that is asked for, and
a fused call is spelt out only where that shows one: elsewhere it is the faster way to say the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import Program
from asapc.passes.lift import INERT
from asapc.passes.products import rank_of
from asapc.passes.verify import check_graph
from asapc.passes.written import erased, moved, written
from asapc.program.calls import copied

aten = torch.ops.aten
FUSED = aten.scaled_dot_product_attention.default


def fused_calls(program: Program) -> list[Node]:
    """Calls of fused attention between all queries and keys, without dropout."""
    return [
        node for node in program.graph.graph.nodes
        if node.op == "call_function" and node.target is FUSED and _is_plain(node)
    ]  # fmt: skip


def _is_plain(node: Node) -> bool:
    given = _arguments(node)
    if given["dropout_p"] or given["is_causal"] or given["enable_gqa"]:
        return False
    return rank_of(given["query"]) >= 3 and isinstance(given["query"].meta["val"].shape[-1], int)


def _arguments(node: Node) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    default = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    return {**default, "enable_gqa": False, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def spelt_out(program: Program, calls: Collection[Node]) -> tuple[Program, dict[Node, Node]]:
    """The program with these calls spelt out, and each call's product with the values in it."""
    graph, nodes = copied(program.graph)
    gone: set[Node] = set()
    became: dict[Node, Node] = {}
    for call in calls:
        copy = nodes[call]

        def write(target: Any, *args: Any, root: Node = copy) -> Node:
            return written(graph, root, target, *args)

        with graph.graph.inserting_before(copy):
            became[copy] = _write(write, copy)
        copy.replace_all_uses_with(became[copy])
        assert all(user.target in INERT for user in copy.users)
        gone |= erased(graph, copy)
    graph.recompile()
    check_graph(graph, "fused", [call.name for call in calls])
    return moved(program, graph, nodes, gone, became), {call: became[nodes[call]] for call in calls}


def _write(write: Callable[..., Node], call: Node) -> Node:
    given = _arguments(call)
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    scale = given["scale"]
    scale = 1 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else scale
    turned = write(aten.transpose.int, k, -2, -1)
    scores = write(aten.mul.Scalar, write(aten.matmul.default, q, turned), scale)
    if mask is not None:
        of: Tensor = mask.meta["val"]
        if of.dtype == torch.bool:
            hidden = write(aten.logical_not.default, mask)
            scores = write(aten.masked_fill.Scalar, scores, hidden, -math.inf)
        else:
            scores = write(aten.add.Tensor, scores, mask)
    # As the fused call has it, a row that sees no key gives 0.
    return write(aten.matmul.default, write(aten._safe_softmax.default, scores, -1), v)
