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
from asapc.passes.masks import varies
from asapc.passes.products import rank_of, same
from asapc.passes.written import moved, written
from asapc.program.calls import copied

aten = torch.ops.aten
FUSED = aten.scaled_dot_product_attention.default
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def fused_calls(program: Program) -> list[Node]:
    """Calls of fused attention."""
    return program.graph.graph.find_nodes(op="call_function", target=FUSED)


def why_it_stays(node: Node) -> str | None:
    """What a fused call has that no site has; None where it can be spelt out."""
    arguments = _arguments(node)
    query: Tensor = arguments["query"].meta["val"]
    if arguments["dropout_p"]:
        return "softmax attention with dropout, which is random"
    if arguments["is_causal"]:
        return "softmax attention with a causal mask"
    if arguments["enable_gqa"]:
        return "softmax attention whose keys are shared by several heads (enable_gqa)"
    if rank_of(arguments["query"]) < 3 or not isinstance(query.shape[-1], int):
        return f"softmax attention of queries with the sizes {tuple(query.shape)}"
    if same(arguments["value"].meta["val"].shape[-1], 1):
        return "softmax attention of values with one number per head"
    return None


def _arguments(node: Node) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    default = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    return {**default, "enable_gqa": False, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def spelt_out(program: Program, calls: Collection[Node]) -> tuple[Program, dict[Node, Node]]:
    """The program with these calls spelt out, and each call's product with the values in it."""
    graph, nodes = copied(program.graph)
    became: dict[Node, Node] = {}
    for call in calls:
        copy = nodes[call]

        def write(target: Any, *args: Any, root: Node = copy) -> Node:
            return written(graph, root, target, *args)

        with graph.graph.inserting_before(copy):
            became[copy] = _write(write, copy)
        copy.replace_all_uses_with(became[copy])
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        # A fused kernel's output has other strides than a product's: a view of it may be no view of what
        # replaces it.
        node.target = aten.reshape.default
    written_out = moved(program, graph, nodes, became, "fused")
    return written_out, {call: became[nodes[call]] for call in calls}


def _write(write: Callable[..., Node], call: Node) -> Node:
    arguments = _arguments(call)
    q, k, v, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    scale = arguments["scale"]
    scale = 1 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else scale
    turned = write(aten.transpose.int, k, -2, -1)
    scores = write(aten.mul.Scalar, write(aten.matmul.default, q, turned), scale)
    if mask is not None:
        of: Tensor = mask.meta["val"]
        if of.dtype == torch.bool:
            hidden = write(aten.logical_not.default, mask)
            scores = write(aten.masked_fill.Scalar, scores, hidden, -math.inf)
        elif (parts := _filled(mask, q.meta["val"].dtype)) is not None:
            added, where, hides, low = parts
            scores = scores if added is None else write(aten.add.Tensor, scores, added)
            where = where if hides else write(aten.logical_not.default, where)
            scores = write(aten.masked_fill.Scalar, scores, where, low)
        else:
            scores = write(aten.add.Tensor, scores, mask)
    # As the fused call has it, a row that sees no key gives 0.
    return write(aten.matmul.default, write(aten._safe_softmax.default, scores, -1), v)


def _filled(mask: Node, dtype: torch.dtype) -> tuple[Node | None, Node, bool, float] | None:
    """Of a bias with the lowest number where something is hidden: the bias, None where it is 0, a mask,
    whether that is True where something is hidden, and the number in the dtype of the scores.

    Apart they are a bias and a mask that sites know. A higher number stays in the bias: where all is
    hidden, the scores still count below it. So does that of keys alone, a mask that sites know as it is.
    """
    while mask.target in (aten.clone.default, aten.contiguous.default):
        (mask,) = mask.all_input_nodes
    if mask.target is aten.where.ScalarOther:
        where, added, low = mask.args
    elif mask.target is aten.masked_fill.Scalar:
        added, where, low = mask.args
    else:
        return None
    lowest = torch.finfo(dtype).min
    if not isinstance(low, int | float) or low > lowest:  # a number of a size is a node
        return None
    if not isinstance(where, Node) or not isinstance(added, Node):
        return None
    zero = added.target in ZEROS
    if not zero and not any(varies(mask, axis) for axis in (-2, -3)):
        return None
    hides = mask.target is aten.masked_fill.Scalar
    return None if zero else added, where, hides, -math.inf if low < lowest else float(low)
