"""Put back: operators that were lifted in a lowered graph, in the graph of torch functions behind it.

before: a graph of torch functions; what it was lowered to, with operator calls at its sites
after:  the graph, with those calls and what they need in place of the nodes that the calls compute;
        everything else as it was
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from asapc.passes.cut import ancestors, reached
from asapc.passes.dynamo import Left, autocast_to, example_of, storage_of
from asapc.program.calls import CALLS, attribute, copied


def put_back(
    graph: GraphModule, lifted: GraphModule, stands: Mapping[Node, Node], changed: Collection[Node]
) -> tuple[GraphModule, set[Node]]:
    """A copy of the graph with the operators, and what the nodes were computed from that they compute.

    stands: the nodes of the graph, by those of the lifted one that stand for them.  changed: nodes of the
    graph whose tensors are changed in place.  Raises Left where such a tensor is needed.
    """
    copying = _Copying(graph, lifted, stands)
    behind: set[Node] = set()  # operators, and what is made of them for which nothing stands
    for node in lifted.graph.nodes:
        if node.target in CALLS or behind & ({*node.all_input_nodes} - stands.keys()):
            behind.add(node)
    replaced = [copying.replace(node) for node in stands if node in behind]
    output = copying.graph.graph.output_node()
    theirs, ours = _outputs(lifted.graph.output_node()), _outputs(output)
    if len(ours) != len(theirs):
        raise Left("its outputs are not those of the lowered graph")
    for place, node in enumerate(theirs):
        if isinstance(node, Node) and node in behind and node not in stands:
            replaced.append(ours[place])
            with copying.graph.graph.inserting_before(output):
                ours[place] = copying.put(node, ours[place])
    output.args = (tuple(ours),)
    operands = copying.operands
    computed = reached(replaced, lambda node: () if node in operands else node.all_input_nodes)
    sources = {source for node in computed - operands for source in node.all_input_nodes}
    _remove_dead(copying.graph, {*replaced}, {copying.nodes[node] for node in changed})
    copying.graph.graph.lint()
    copying.graph.recompile()
    return copying.graph, sources


def _outputs(output: Node) -> list[Any]:
    """What a graph gives: nodes, and constants."""
    outputs: Any = output.args[0]
    return list(outputs)


class _Copying:
    """A copy of a graph, into which nodes of the lifted one are put.

    nodes: those of the copy by those of the graph, or by those of the lifted one that were put in.
    operands: nodes of the copy that what was put in is computed from.
    """

    def __init__(self, graph: GraphModule, lifted: GraphModule, stands: Mapping[Node, Node]) -> None:
        self.graph, self.nodes = copied(graph)
        self.lifted, self.stands = lifted, stands
        self.operands: set[Node] = set()

    def replace(self, node: Node) -> Node:
        """Puts a node in place of the one that it stands for, and returns that."""
        old = self.nodes[self.stands[node]]
        with self.graph.graph.inserting_before(old):
            new = self.put(node, old)
        old.replace_all_uses_with(new)
        self.nodes[self.stands[node]] = new
        return old

    def put(self, node: Node, old: Node) -> Node:
        """The node in the copy, in the dtype of what it is put in place of."""
        new, traced, wanted = self._copy(node), node.meta.get("val"), example_of(old)
        if isinstance(wanted, Tensor) and isinstance(traced, Tensor) and wanted.dtype != traced.dtype:
            new = self.graph.graph.call_function(autocast_to, (new, wanted.dtype))
        return new

    def _operand(self, node: Node) -> Node:
        if node not in self.stands:
            return self._copy(node)
        operand = self.nodes[self.stands[node]]
        self.operands.add(operand)
        return operand

    def _copy(self, node: Node) -> Node:
        if node not in self.nodes:
            self.nodes[node] = self._copied(node)
        return self.nodes[node]

    def _copied(self, node: Node) -> Node:
        graph = self.graph.graph
        if node.op == "placeholder":
            raise Left("an input that it needs is changed in place")
        if node.op == "get_attr":
            name = f"asapc_{node.name}"
            self.graph.register_buffer(name, attribute(self.lifted, node))
            return graph.get_attr(name)
        args, kwargs = map_arg((node.args, node.kwargs), self._operand)
        if node.target is torch.ops.aten.copy.default:  # it has no gradient
            spread = graph.call_method("expand_as", (args[1], args[0]))
            return graph.call_method("type_as", (spread, args[0]))
        return graph.create_node(node.op, node.target, args, kwargs)


def _remove_dead(graph: GraphModule, replaced: set[Node], changed: set[Node]) -> None:
    """Takes out what only the replaced nodes needed.  What changes a tensor in place goes if nothing else
    sees the tensor."""
    changing = [node for node in graph.graph.nodes if changed & {*node.all_input_nodes}]
    sharing: dict[Any, set[Node]] = {}
    for node in graph.graph.nodes:
        sharing.setdefault(storage_of(node), set()).add(node)
    dead = {node for node in (*replaced, *ancestors(*replaced), *changing) if node.op != "placeholder"}

    def stays(node: Node) -> bool:
        written = {storage_of(x) for x in node.all_input_nodes if x in changed and node in changing}
        return bool({*node.users} - dead) or any(sharing[storage] - dead for storage in written)

    while alive := {node for node in dead if stays(node)}:
        dead -= alive
    for node in [node for node in reversed(graph.graph.nodes) if node in dead]:
        graph.graph.erase_node(node)
