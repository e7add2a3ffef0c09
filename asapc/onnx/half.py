"""A compiled program in float16: weights and activations halved, attention operators as they are.

The operators widen half precision to float32 inside and round what they return: their loops lose
nothing (operators.sinkhorn.widen).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from asapc.data import Batch
from asapc.errors import InputError
from asapc.onnx.functions import traced
from asapc.onnx.verify import difference_of, joined, run_program


@dataclass(frozen=True)
class Half:
    """module: its tensor inputs one by one, outputs flat; exported: the same, traced."""

    module: GraphModule
    exported: ExportedProgram


def in_half(exported: ExportedProgram, names: Sequence[str]) -> Half:
    """The program with every floating weight, input and output in float16.

    Raises InputError where the program itself fixes another dtype that does not go with it.
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
    graph.graph.set_codegen(CodeGen())
    graph.recompile()
    try:
        own = traced(graph, [v.half() if v.is_floating_point() else v for v in values])
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            "export: the program can be traced in float16", got=str(error).splitlines()[0][:300],
            help="the model converts to float32 on its own; leave out --float16",
        ) from error  # fmt: skip
    return Half(graph, own)


def rounding(
    program: GraphModule, half: Half, names: Sequence[str], batches: Sequence[Batch]
) -> float:
    """What float16 costs in PyTorch: the largest difference of an output, as verify measures it."""
    feeds = joined(batches, names)
    halved = {n: t.half() if t.is_floating_point() else t for n, t in feeds.items()}
    exact, rounded = run_program(program, feeds), run_program(half.module, halved)
    if exact is None or rounded is None:
        raise InputError(
            "export: PyTorch must be able to run the program in float16", got="an operator it lacks",
            help="give the tolerance yourself: --tolerance 1e-2",
        )  # fmt: skip
    return difference_of(exact, rounded)
