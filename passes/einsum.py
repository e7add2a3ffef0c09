"""Einsum: a product of several operands becomes a chain of products of two.

before: einsum("nr,rm,me->ne", a, b, v), einsum("i,ij,j,jd->id", a, k, b, v)
after:  einsum("nr,re->ne", a, einsum("rm,me->re", b, v)), einsum("ij,jd->id", a * k * b, v)

Matching looks for products of two. The chain starts at the right, where values stand; before that, what
scales the rows or columns of an operand is multiplied into it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import GraphModule, Node

from asapc.passes.verify import check_graph
from asapc.passes.written import written

aten = torch.ops.aten


def split_einsums(graph: GraphModule) -> bool:
    """Split every einsum of three operands or more, in place; whether there was one.

    An equation with an ellipsis or an index that is repeated within one operand stays as it is.
    """
    changed = False
    for node in graph.graph.find_nodes(op="call_function", target=aten.einsum.default):
        changed |= _split(graph, node)
    if changed:
        graph.graph.eliminate_dead_code()
        graph.recompile()
        check_graph(graph, "split_einsums")
    return changed


def _split(graph: GraphModule, node: Node) -> bool:
    equation, operands = str(node.args[0]).replace(" ", ""), list(node.args[1])  # type: ignore[arg-type]
    if len(operands) < 3 or "->" not in equation or "." in equation:
        return False
    terms, out = equation.split("->")
    labels = terms.split(",")
    if any(len(set(letters)) != len(letters) for letters in labels):
        return False
    sizes = {
        letter: size
        for letters, operand in zip(labels, operands, strict=True)
        for letter, size in zip(letters, operand.meta["val"].shape, strict=True)
    }
    label, result = labels.pop(), operands.pop()
    with graph.graph.inserting_before(node):
        _join_scalings(graph, node, labels, operands)
        while labels:
            left, operand = labels.pop(), operands.pop()
            wanted = {*out, *"".join(labels)}
            kept = "".join(x for x in dict.fromkeys(left + label) if x in wanted)
            if not labels:
                kept = out
            step = graph.graph.call_function(
                aten.einsum.default, (f"{left},{label}->{kept}", [operand, result])
            )
            step.meta = dict(node.meta)
            step.meta["val"] = node.meta["val"].new_empty([sizes[x] for x in kept])
            label, result = kept, step
    node.replace_all_uses_with(result)
    return True


def _join_scalings(graph: GraphModule, root: Node, labels: list[str], operands: list[Any]) -> None:
    """Multiply an operand into another that has all of its indices, in the same order, and more."""
    while True:
        pairs = itertools.permutations(range(len(labels)), 2)
        pair = next((
            (one, other) for one, other in pairs if labels[one] != labels[other]
            and "".join(x for x in labels[other] if x in labels[one]) == labels[one]
        ), None)  # fmt: skip
        if pair is None:
            return
        narrower, wider = pair
        scaling = operands[narrower]
        for axis, letter in enumerate(labels[wider]):
            if letter not in labels[narrower]:
                scaling = written(graph, root, aten.unsqueeze.default, scaling, axis)
        operands[wider] = written(graph, root, aten.mul.Tensor, operands[wider], scaling)
        del labels[narrower], operands[narrower]
