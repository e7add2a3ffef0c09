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
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from asapc.errors import InputError
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
    """The program with every float32 weight, input, cast and output in float16.

    Raises InputError if the result cannot be traced.
    """
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"
              and node.name in names]  # fmt: skip
    graph = exported.module(check_guards=False)
    assert isinstance(graph, GraphModule)
    for module in graph.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_floating_point():
                module._parameters[name] = nn.Parameter(weight.detach().half(), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.half()
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
        else:
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
    return Half(graph, retraced)


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
