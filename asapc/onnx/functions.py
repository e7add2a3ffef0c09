"""Operator calls of a program become calls of model-local functions, domain `ai.asapc`.

before: torch.ops.asapc.sinkhorn(q, k, v, keep, bias, settings ...)
after:  onnx_symbolic("ai.asapc::sinkhorn")(q, k, v, keep), and one ir.Function whose body is the
        traced twin (asapc.onnx.twins) in standard operators, with the settings in its doc string

Calls that differ in nothing but their tensors share a function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, Node

from asapc.onnx import twins
from asapc.onnx.translate import translate

DOMAIN = "ai.asapc"
SIZES = (37, 41, 43, 47, 53, 59)  # stand for dynamic sizes while a body is traced: no usual ones
TENSOR = object()  # in the settings of a call, the place of a tensor


def take_out_calls(exported: ExportedProgram, opset: int) -> list[onnx_ir.Function]:
    """Replace every asapc call, in place; the functions that are called now, in order of their calls."""
    graph = exported.graph
    functions: dict[Any, onnx_ir.Function] = {}
    names: dict[str, int] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "namespace", None) != "asapc":
            continue
        call = _Call.of(node)
        key = (call.name, call.settings, call.sizes)
        if key not in functions:
            names[call.name] = names.get(call.name, 0) + 1
            suffix = "" if names[call.name] == 1 else f"_{names[call.name]}"
            functions[key] = call.function(call.name + suffix, opset)
        call.replace(graph, functions[key].name)
    exported.graph_module.recompile()
    return list(functions.values())


@dataclass(frozen=True)
class _Call:
    """tensors: the nodes among its arguments; settings: the others, TENSOR in their place.

    sizes: of every tensor, dynamic ones as expressions, so that equal ones are seen to be equal.
    """

    node: Node
    name: str
    tensors: tuple[Node, ...]
    settings: tuple[Any, ...]
    sizes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, node: Node) -> _Call:
        tensors: list[Node] = []

        def setting(argument: Any) -> Any:
            if isinstance(argument, Node):
                tensors.append(argument)
                return TENSOR
            if isinstance(argument, list | tuple):
                return tuple(setting(own) for own in argument)
            return argument

        settings = tuple(setting(argument) for argument in node.args)
        assert isinstance(node.target, torch._ops.OpOverload) and not node.kwargs
        values = [own.meta["val"] for own in tensors]
        sizes = tuple((str(value.dtype), *map(str, value.shape)) for value in values)
        return cls(node, node.target._opname, tuple(tensors), settings, sizes)

    def function(self, name: str, opset: int) -> onnx_ir.Function:
        """The traced twin."""
        twin: Callable[..., Any] = getattr(twins, self.name)
        examples, dynamic = self._examples()
        body = _Body(twin, self.settings)
        with torch.no_grad():
            traced = torch.export.export(
                body, tuple(examples), dynamic_shapes=(tuple(dynamic),), strict=False
            )
        graph = translate(traced, opset).graph
        _constants_as_nodes(graph)
        _without_names(graph)
        parameters = list(inspect.signature(twin).parameters)
        told = ", ".join(
            f"{parameter}={value}"
            for parameter, value in zip(parameters, self.settings, strict=True)
            if value is not TENSOR and value is not None and TENSOR not in _items(value)
        )
        return onnx_ir.Function(
            DOMAIN, name, graph=_described(graph, f"{self.name}: {told}"), attributes=[]
        )

    def _examples(self) -> tuple[list[Tensor], list[dict[int, Any]]]:
        known: dict[Any, int] = {}

        def size(length: Any) -> int:
            if isinstance(length, int):
                return length
            expression = length.node.expr
            for symbol in sorted(expression.free_symbols, key=str):
                known.setdefault(symbol, SIZES[len(known)])
            return int(expression.subs(known))

        examples, dynamic = [], []
        generator = torch.Generator().manual_seed(0)
        for node in self.tensors:
            value = node.meta["val"]
            shape = [size(length) for length in value.shape]
            example = torch.rand(shape, generator=generator)
            examples.append(example > 0 if value.dtype == torch.bool else example.to(value.dtype))
            dynamic.append({
                axis: Dim.STATIC if isinstance(length, int) else Dim.AUTO
                for axis, length in enumerate(value.shape)
            })  # fmt: skip
        return examples, dynamic

    def replace(self, graph: Graph, name: str) -> None:
        """The call by one that torch's exporter writes as a node of our domain."""
        value = self.node.meta["val"]
        several = isinstance(value, list | tuple)
        values = list(value) if several else [value]
        types = [int(_onnx_type(own.dtype)) for own in values]
        with graph.inserting_before(self.node):
            shapes = [[self._size(graph, length) for length in own.shape] for own in values]
            settings: dict[str, Any] = {key: [] for key in _SYMBOLIC_LISTS}
            ops = torch.ops.onnx_symbolic
            new = graph.call_function(
                ops._symbolic_multi_out.default if several else ops._symbolic.default,
                (list(self.tensors), name, types if several else types[0]),
                {"shapes" if several else "shape": shapes if several else shapes[0],
                 **settings, "domain": DOMAIN, "version": 1},
            )  # fmt: skip
        new.meta = dict(self.node.meta)
        self.node.replace_all_uses_with(new)
        graph.erase_node(self.node)

    def _size(self, graph: Graph, length: Any) -> int | Node:
        if isinstance(length, int):
            return length
        for node in self.tensors:
            for axis, own in enumerate(node.meta["val"].shape):
                if not isinstance(own, int) and own.node.expr == length.node.expr:
                    size = graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
                    size.meta["val"] = own
                    return size
        raise AssertionError(f"{self.node}: no argument has the size {length}")


class _Body(nn.Module):
    """The twin as a function of its tensors."""

    def __init__(self, twin: Callable[..., Any], settings: Sequence[Any]) -> None:
        super().__init__()
        self.twin = twin
        self.settings = settings

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)

        def fill(setting: Any) -> Any:
            if setting is TENSOR:
                return next(given)
            return [fill(own) for own in setting] if isinstance(setting, tuple) else setting

        return self.twin(*(fill(setting) for setting in self.settings))


_SYMBOLIC_LISTS = (
    "attr_keys", "attr_types", "attr_pos", "attr_ints", "attr_floats", "attr_strs",
    "metadata_props_keys", "metadata_props_values",
)  # fmt: skip


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def _onnx_type(dtype: torch.dtype) -> onnx_ir.DataType:
    return onnx_ir.DataType.from_numpy(torch.empty(0, dtype=dtype).numpy().dtype)


def _constants_as_nodes(graph: onnx_ir.Graph) -> None:
    """A function has no initializers of its own."""
    nodes = []
    for name, value in list(graph.initializers.items()):
        node = onnx_ir.Node("", "Constant", [], [onnx_ir.AttrTensor("value", value.const_value)])
        node.outputs[0].name, node.outputs[0].dtype = name, value.dtype
        node.outputs[0].shape = value.shape
        value.replace_all_uses_with(node.outputs[0])
        del graph.initializers[name]
        nodes.append(node)
    if nodes:
        graph.insert_before(graph[0], nodes)


def _without_names(graph: onnx_ir.Graph) -> None:
    """Names of nodes and types within a body are a third of its size and follow from the rest."""
    ends = {id(value) for value in [*graph.inputs, *graph.outputs]}
    for node in graph.all_nodes():
        node.name = None
        for value in node.outputs:
            if id(value) not in ends:
                value.type = value.shape = None


def _described(graph: onnx_ir.Graph, text: str) -> onnx_ir.Graph:
    graph.doc_string = text
    return graph
