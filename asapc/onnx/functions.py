"""Operator calls of a program become calls of model-local functions, domain `ai.asapc`.

before: torch.ops.asapc.sinkhorn(q, k, v, keep, bias, settings ...)
after:  onnx_symbolic("ai.asapc::sinkhorn")(q, k, v, keep), and one ir.Function whose body is the
        traced twin (asapc.onnx.twins) in standard operators, with the settings in its doc string
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, Node

from asapc.errors import InputError, VerificationError
from asapc.formats.limits import limits_of
from asapc.inputs.onnx.settings import DOMAIN
from asapc.onnx import twins
from asapc.onnx.translate import cause, translate
from asapc.operators.catalogue import OF_GRADIENTS, by_name, reference_named

FUNCTIONS_IR = 8  # the first version of the format that knows model-local functions
SIZES = (37, 41, 43, 47, 53, 59)  # stand for dynamic sizes while a body is traced: unusual ones
TENSOR = object()  # marks the place of a tensor in the settings of a call


class Functions:
    """The functions of one file; calls that differ only in their tensors share one."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self._made: dict[Any, onnx_ir.Function] = {}
        self._count: dict[str, int] = {}

    def put_into(self, model: onnx_ir.Model) -> None:
        for function in self._made.values():
            model.functions[function.identifier()] = function
            model.graph.opset_imports[DOMAIN] = 1
            model.ir_version = max(model.ir_version, FUNCTIONS_IR)

    def of(self, call: _Call) -> onnx_ir.Function:
        key = (call.name, call.settings, call.layout)
        if key not in self._made:
            self._count[call.name] = number = self._count.get(call.name, 0) + 1
            name = call.name if number == 1 else f"{call.name}_{number}"
            self._made[key] = call.function(name, self.opset)
        return self._made[key]


def take_out_calls(exported: ExportedProgram, functions: Functions) -> None:
    """Replace every asapc call of the program, in place, by a call of one of the functions."""
    graph = exported.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and getattr(node.target, "namespace", None) == "asapc":
            call = _Call.of(node)
            call.replace(graph, functions.of(call).name)
    exported.graph_module.recompile()


@dataclass(frozen=True)
class _Call:
    """tensors: the nodes among its arguments; settings: all arguments, with TENSOR for each of those.

    layout: dtype, stand-in shape and fixed sizes of every tensor.
    """

    node: Node
    name: str
    tensors: tuple[Node, ...]
    settings: tuple[Any, ...]
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, node: Node) -> _Call:
        tensors: list[Node] = []

        def setting(argument: Any) -> Any:
            if isinstance(argument, Node):
                tensors.append(argument)
                return TENSOR
            if isinstance(argument, list | tuple):
                return tuple(setting(item) for item in argument)
            return argument

        settings = tuple(setting(argument) for argument in node.args)
        assert isinstance(node.target, torch._ops.OpOverload) and not node.kwargs
        values = [tensor.meta["val"] for tensor in tensors]
        layout = tuple(
            (value.dtype, shape, tuple(isinstance(length, int) for length in value.shape))
            for value, shape in zip(values, stand_ins(values), strict=True)
        )
        return cls(node, node.target._opname, tuple(tensors), settings, layout)

    def function(self, name: str, opset: int) -> onnx_ir.Function:
        """The traced twin."""
        twin: Callable[..., Any] = getattr(twins, self.name, None) or reference_named(self.name)
        body = traced(_Body(twin, self.settings), [node.meta["val"] for node in self.tensors])
        graph = translate(body, opset, plain_attention=True).graph
        _constants_as_nodes(graph)
        _without_names(graph)
        settings = ", ".join(
            f"{name}={value}" for name, value in by_name(self.node.target, self.settings).items()
            if value is not None and TENSOR not in (value if isinstance(value, tuple) else (value,))
            and name not in OF_GRADIENTS
        )  # fmt: skip
        graph.doc_string = f"{self.name}: {settings}"
        return onnx_ir.Function(DOMAIN, name, graph=graph, attributes=[])

    def replace(self, graph: Graph, name: str) -> None:
        """Replace the call by one that torch's exporter writes as a node of our domain."""
        value = self.node.meta["val"]
        several = isinstance(value, list | tuple)
        values = list(value) if several else [value]
        numpy_types = [torch.empty(0, dtype=tensor.dtype).numpy().dtype for tensor in values]
        types = [int(onnx_ir.DataType.from_numpy(each)) for each in numpy_types]
        with graph.inserting_before(self.node):
            shapes = [[self._size(graph, length) for length in tensor.shape] for tensor in values]
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
            for axis, extent in enumerate(node.meta["val"].shape):
                if not isinstance(extent, int) and extent.node.expr == length.node.expr:
                    size = graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
                    size.meta["val"] = extent
                    return size
        raise AssertionError(f"{self.node}: no argument has the size {length}")


def stand_ins(values: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Shapes of fake tensors with numbers for dynamic sizes: equal sizes get the same number."""
    symbols: dict[Any, int] = {}

    def size(length: Any) -> int:
        if isinstance(length, int):
            return length
        expression = length.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in symbols:
                symbols[symbol] = _stand_in(limits_of(length.node.shape_env, symbol), symbols.values())
        return int(expression.subs(symbols))

    return [tuple(size(length) for length in value.shape) for value in values]


def _stand_in(limits: tuple[int, int], taken: Collection[int]) -> int:
    """One of SIZES that lies in the limits, else another that does."""
    low, high = limits
    sizes = (*SIZES, *range(min(high, SIZES[0]), 1, -1), *range(low, low + len(SIZES)))
    return next(size for size in sizes if low <= size <= high and size not in taken)


def traced(module: nn.Module, values: Sequence[Tensor]) -> ExportedProgram:
    """module(*tensors) exported for tensors of the shapes of these fake ones.

    Dynamic sizes stay dynamic, and equal ones stay equal.  Raises VerificationError if one does not,
    InputError if torch.export does not trace the module.
    """
    first: dict[Any, tuple[int, int]] = {}
    equal: list[tuple[int, int, int, int]] = []
    examples, dynamic = [], []
    generator = torch.Generator().manual_seed(0)
    for number, (value, shape) in enumerate(zip(values, stand_ins(values), strict=True)):
        example = torch.rand(shape, generator=generator)
        examples.append(example > 0 if value.dtype == torch.bool else example.to(value.dtype))
        dynamic.append({
            axis: Dim.STATIC if isinstance(length, int) else Dim.AUTO
            for axis, length in enumerate(value.shape)
        })  # fmt: skip
        for axis, length in enumerate(value.shape):
            if not isinstance(length, int):
                one = first.setdefault(length.node.expr, (number, axis))
                if one != (number, axis):
                    equal.append((*one, number, axis))
    try:
        with torch.no_grad():
            exported = torch.export.export(
                _Alike(module, equal), tuple(examples), dynamic_shapes=(tuple(dynamic),), strict=False
            )
    except Exception as error:  # torch.export raises many types
        raise InputError("the compiled program can be traced for ONNX", got=cause(error)) from error
    captured = (node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"
             and node.name in exported.graph_signature.user_inputs)  # fmt: skip
    for value, found in zip(values, captured, strict=True):
        fixed = [int(b) for a, b in zip(value.shape, found.shape, strict=True)
                 if not isinstance(a, int) and (isinstance(b, int) or b.node.expr.is_number)]  # fmt: skip
        if fixed:
            raise VerificationError(
                "a function works at every size that the model works at",
                got=f"one traced at {fixed} only",
                help="keep the PyTorch artefact; this is a defect of asapc: please report the model",
            )
    return exported


class _Alike(nn.Module):
    """A module with checks of which sizes of its arguments are the same: each has a separate symbol."""

    def __init__(self, inner: nn.Module, equal: Sequence[tuple[int, int, int, int]]) -> None:
        super().__init__()
        self.inner, self.equal = inner, tuple(equal)

    def forward(self, *tensors: Tensor) -> Any:
        for one, axis, other, its_axis in self.equal:
            torch._check(tensors[one].shape[axis] == tensors[other].shape[its_axis])
        return self.inner(*tensors)


class _Body(nn.Module):
    """The twin as a function of its tensors."""

    def __init__(self, twin: Callable[..., Any], settings: Sequence[Any]) -> None:
        super().__init__()
        self.twin = twin
        self.settings = settings

    def forward(self, *tensors: Tensor) -> Any:
        remaining = iter(tensors)

        def fill(setting: Any) -> Any:
            if setting is TENSOR:
                return next(remaining)
            return [fill(item) for item in setting] if isinstance(setting, tuple) else setting

        return self.twin(*(fill(setting) for setting in self.settings))


_SYMBOLIC_LISTS = (
    "attr_keys", "attr_types", "attr_pos", "attr_ints", "attr_floats", "attr_strs",
    "metadata_props_keys", "metadata_props_values",
)  # fmt: skip


def _constants_as_nodes(graph: onnx_ir.Graph) -> None:
    """A function has no initializers of its own."""
    nodes = []
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        assert tensor is not None
        node = onnx_ir.Node("", "Constant", [], [onnx_ir.AttrTensor("value", tensor)])
        node.outputs[0].name = name
        value.replace_all_uses_with(node.outputs[0])
        del graph.initializers[name]
        nodes.append(node)
    if nodes:
        graph.insert_before(graph[0], nodes)


def _without_names(graph: onnx_ir.Graph) -> None:
    """Drop names of nodes and types, which are a third of a body's size and follow from the rest."""
    ends = {id(value) for value in [*graph.inputs, *graph.outputs]}
    for node in graph.all_nodes():
        node.name = None
        for value in node.outputs:
            if id(value) not in ends:
                value.type = value.shape = None

