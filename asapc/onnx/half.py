"""A compiled program in float16: weights and activations halved, attention operators as they are.

The operators compute in float32 inside and round only what they return, so their loops lose nothing
(operators.sinkhorn.widen).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from asapc.errors import InputError
from asapc.formats.limits import allow, demand, free_sizes, limits
from asapc.inputs.data import Batch
from asapc.inputs.onnx.verify import difference_of, joined, run_program
from asapc.onnx.functions import traced

MARGIN = 4  # times what PyTorch loses in float16: the most that a file may lose


@dataclass(frozen=True)
class Half:
    """module: its tensor inputs one by one, outputs flat; exported: the same, traced."""

    module: GraphModule
    exported: ExportedProgram


def in_half(exported: ExportedProgram, names: Sequence[str]) -> Half:
    """The program with every float32 weight, input, cast and output in float16, see _halved.

    Raises InputError if the result cannot be traced.
    """
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"
              and node.name in names]  # fmt: skip
    graph = exported.module(check_guards=False)
    assert isinstance(graph, GraphModule)
    halved = _halved(graph)
    for module in graph.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_floating_point():
                module._parameters[name] = nn.Parameter(weight.detach().half(), requires_grad=False)
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
        elif node.op == "output" or not halved.isdisjoint(node.all_input_nodes):
            with graph.graph.inserting_before(node):
                rounded = {
                    source: graph.graph.call_function(torch.ops.aten.to.dtype, (source, torch.float16))
                    for source in node.all_input_nodes if source not in halved and _is_float(source)
                }  # fmt: skip
            for source, half in rounded.items():
                node.replace_input_with(source, half)
            if node.op == "call_function":
                node.args, node.kwargs = pytree.tree_map(
                    lambda x: torch.float16 if x is torch.float32 else x, (node.args, node.kwargs)
                )
    graph.graph.set_codegen(CodeGen())
    graph.recompile()
    try:
        retraced = traced(graph, [v.half() if v.is_floating_point() else v for v in values])
    except InputError as error:
        raise InputError(
            "export: the program can be traced in float16", got=error.got, help="leave out --float16"
        ) from error
    sizes = (free_sizes(program.graph).values() for program in (exported, retraced))
    for own, new in zip(*sizes, strict=True):  # which another trace does not limit
        low, high = limits(own)
        demand(new.node.shape_env, new.node.expr, low)
        allow(new.node.shape_env, new.node.expr, high)
    return Half(graph, retraced)


def _halved(graph: GraphModule) -> set[Node]:
    """The floats that depend on a parameter or on an input of floats. Others, positions, counts and
    tables, stay in float32: float16 has no odd number above 2048."""
    parameters, halved = dict(graph.named_parameters(remove_duplicate=False)), set[Node]()
    for node in filter(_is_float, graph.graph.nodes):
        given = node.op == "placeholder" or node.target in parameters
        if given or not halved.isdisjoint(node.all_input_nodes):
            halved.add(node)
    return halved


def _is_float(node: Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)


def rounding(program: GraphModule, half: Half, names: Sequence[str], batches: Sequence[Batch]) -> float:
    """What float16 costs in PyTorch: the largest difference of an output, as verify measures it.

    Raises InputError if PyTorch cannot run it, or if values exceed float16's range.
    """
    feeds = joined(batches, names)
    halved = {n: t.half() if t.is_floating_point() else t for n, t in feeds.items()}
    exact = run_program(program, feeds)
    try:
        lost = difference_of(exact, run_program(half.module, halved))
    except InputError as error:
        raise InputError(
            "export: PyTorch must be able to run the program in float16", got=error.got,
            help="leave out --float16",
        ) from error  # fmt: skip
    if not MARGIN * lost < 1:
        raise InputError(
            "export: float16 keeps the outputs", got=f"PyTorch loses {lost:.2g}",
            help="leave out --float16: values pass 65504, or rounding changes what is chosen",
        )  # fmt: skip
    return lost
