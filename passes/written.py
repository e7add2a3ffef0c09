"""Written: what a pass puts into a copy of a program before matching, and the program that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from asapc.ir import Program
from asapc.passes.lift import INERT
from asapc.passes.verify import check_graph
from asapc.program.calls import WRITTEN


def written(graph: GraphModule, root: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call whose value is known, as a captured one's.  root: whose module and line it is of."""
    node = graph.graph.call_function(target, args, kwargs)
    given_args, given_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
    with torch.no_grad(), enable_python_dispatcher():
        value = target(*given_args, **given_kwargs)
    kept = ("nn_module_stack", "stack_trace")
    node.meta = {name: root.meta[name] for name in kept if name in root.meta}
    node.meta |= {"val": value, WRITTEN: True}
    return node


def _is_idle(node: Node) -> bool:
    """Whether nothing is made of it."""
    return all(not user.users and user.target in INERT for user in node.users)


def _swept(graph: GraphModule, nodes: Mapping[Node, Node]) -> set[Node]:
    """Takes out what was used before the graph was rewritten, or was written, and is not used now."""
    idle = {copy for node, copy in nodes.items() if _is_idle(node)}
    gone: set[Node] = set()
    for node in [*reversed(graph.graph.nodes)]:
        if node.op == "call_function" and node not in idle and _is_idle(node):
            for dead in (*node.users, node):
                graph.graph.erase_node(dead)
                gone.add(dead)
    return gone


def moved(
    program: Program, graph: GraphModule, nodes: Mapping[Node, Node], became: Mapping[Node, Node], by: str
) -> Program:
    """The program of a rewritten graph, without what nothing uses any more, and checked, with its stops,
    and the calls of modules whose tensors are left.

    by: the pass that wrote it; nodes: of the copy that was rewritten, by those of the original; became:
    what stands in the place of some of them. A call begins where the first of its nodes stands now, or
    the first after it.
    """
    gone = _swept(graph, nodes)
    became = {node: result for node, result in became.items() if result not in gone}
    graph.recompile()
    check_graph(graph, by, [node.name for node in became.values()])
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    new = {value: key for key, value in nodes.items() if value not in gone}
    originals = list(program.graph.graph.nodes)
    starts, place = [0] * (len(originals) + 1), len(order)
    starts[len(originals)] = place
    for index in range(len(originals) - 1, -1, -1):
        copy = nodes.get(originals[index])
        if copy is not None and copy in new:
            place = order[copy]
        elif copy is not None and copy in became:
            place = order[became[copy]]
        starts[index] = place

    def now(node: Node) -> Node | None:
        copy = nodes.get(node)
        return copy if copy is None or copy not in gone else became.get(copy)

    calls = []
    for call in program.calls:
        inputs, outputs = [now(x) for x in call.inputs], [now(x) for x in call.outputs]
        kept = tuple(x for x in inputs if x is not None), tuple(x for x in outputs if x is not None)
        if len(kept[0]) == len(inputs) and len(kept[1]) == len(outputs):
            calls.append(replace(
                call, inputs=kept[0], outputs=kept[1], start=starts[call.start], end=starts[call.end]
            ))  # fmt: skip
    stops = tuple(replace(stop, residual=nodes[stop.residual]) for stop in program.stops)
    return replace(program, graph=graph, stops=stops, calls=tuple(calls), captured=program)
