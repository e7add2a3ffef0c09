"""Transposes that an exporter has fused, taken apart again where one is the other of another.

before: q = Transpose(x, [0, 2, 1, 3]), t = Transpose(x, [0, 2, 3, 1])
after:  q = Transpose(x, [0, 2, 1, 3]), t = Transpose(q, [0, 1, 3, 2])

The model had t = q^T. Where t alone enters a sort, and q alone a distance, nothing but x, which is not
yet in heads, would be what both are computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asapc.inputs.onnx.nodes import Node


def take_apart(nodes: Sequence[Node]) -> list[Node]:
    """The nodes in an order in which they can still run; every value keeps its name and meaning."""
    first: dict[tuple[str, tuple[int, ...]], Node] = {}
    for node in nodes:
        order = _order(node)
        if order is not None and node.inputs[0] is not None:
            first.setdefault((node.inputs[0], order), node)
    straight: dict[str, Node] = {}  # by the output of the one that is its transpose
    for (source, order), node in first.items():
        partner = first.get((source, (*order[:-2], order[-1], order[-2])))
        if partner is not None and order[-1] != len(order) - 1 == order[-2]:
            straight[node.outputs[0]] = partner
    result: list[Node] = []
    there: set[str] = set()

    def append(node: Node) -> None:
        if not (node.outputs and node.outputs[0] in there):
            there.update(node.outputs)
            result.append(node)

    for node in nodes:
        partner = straight.get(node.outputs[0]) if node.outputs else None
        if partner is not None:
            append(partner)
            rank = len(node.attributes["perm"])
            swap = [*range(rank - 2), rank - 1, rank - 2]
            node = replace(node, inputs=(partner.outputs[0],), attributes={"perm": swap})
        append(node)
    return result


def _order(node: Node) -> tuple[int, ...] | None:
    """The permutation of a Transpose of three axes or more."""
    order = node.attributes.get("perm") if node.kind == "Transpose" else None
    return tuple(order) if order is not None and len(order) >= 3 else None
