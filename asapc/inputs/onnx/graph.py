"""An ONNX graph as nodes that are ready to run: read once, and checked as far as possible.

before: onnx.GraphProto without model-local functions
after:  Graph(inputs, constants, nodes, outputs), subgraphs inside; tensors in a separate list
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.inputs.onnx.host import DTYPES, constant_of, shortest
from asapc.inputs.onnx.ops import OPERATORS, REFUSED
from asapc.inputs.onnx.tensors import read_tensor, type_name

MAX_DEPTH = 8  # of subgraphs in subgraphs
DEFAULT_DOMAIN = ("", "ai.onnx")
NO_MODULE = "_empty_nn_module_stack"  # what torch's exporter writes for a node of no module


@dataclass(frozen=True)
class Node:
    """One node.  function(*values of inputs, **attributes, **subgraphs) gives its outputs.

    scope: dotted name of the module that it was exported from, or its own name.
    drops: values that nothing after it needs.  The repr says what it computes, not what it is called.
    """

    name: str = field(repr=False)
    kind: str
    scope: str = field(repr=False)
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    function: Callable[..., Any] = field(repr=False)
    attributes: dict[str, Any]
    subgraphs: dict[str, Graph]
    drops: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.kind} node {self.name}"


@dataclass(frozen=True)
class Graph:
    """constants: host values, Held or Filled, by value name.

    outer: values of the graphs around it that it uses.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Any]
    nodes: tuple[Node, ...]
    outer: frozenset[str] = field(repr=False)


@dataclass(frozen=True)
class Held:
    """A constant that is a tensor: its key."""

    key: int


@dataclass(frozen=True)
class Filled:
    """A constant of one repeated number: not a weight, but something an exporter has folded."""

    shape: tuple[int, ...]
    number: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class Input:
    """What the model is given.  shape: sizes, None where any will do, or None for any rank."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...] | None


@dataclass
class Reader:
    """What all graphs of a model share.  tensors: (name, value, whether an initializer) by key."""

    path: Path
    opset: int
    tensors: list[tuple[str, Tensor, bool]] = field(default_factory=list)

    def graph(self, proto: onnx.GraphProto, around: Collection[str] = (), depth: int = 0) -> Graph:
        """Raises InputError for whatever could not be run."""
        if depth > MAX_DEPTH:
            raise InputError(f"{self.path}: subgraphs may be nested {MAX_DEPTH} deep", got="more")
        if proto.sparse_initializer or proto.quantization_annotation:
            raise InputError(f"{self.path}: sparse or quantised tensors are not supported")
        known = {*around}
        constants: dict[str, Any] = {}

        def define(name: str, what: str) -> None:
            if not name or name in known:
                raise InputError(
                    f"{self.path}: every value must have its own name",
                    got=f"{name!r} twice, the second time as {what}" if name else f"{what} without one",
                )
            known.add(name)

        initial = {tensor.name for tensor in proto.initializer}
        inputs = tuple(value.name for value in proto.input if value.name not in initial)
        for name in inputs:
            define(name, "an input")
        for tensor in proto.initializer:
            define(tensor.name, "an initializer")
            constants[tensor.name] = self._held(tensor.name, read_tensor(tensor, self.path), True)
        later = {name for node in proto.node for name in node.output}
        nodes: list[Node] = []
        for node in proto.node:
            for name in filter(None, node.input):
                self._check_known(name, known, later, _label(node))
            if node.op_type == "Constant" and node.domain in DEFAULT_DOMAIN:
                define(node.output[0] if node.output else "", _label(node))
                constants[node.output[0]] = self._constant_node(node)
                continue
            read = self._node(node, known, depth)
            for name in filter(None, read.outputs):
                define(name, _label(node))
            nodes.append(read)
        outputs = tuple(value.name for value in proto.output)
        for name in outputs:
            self._check_known(name, known, later, "an output of the graph")
        defined = known - {*around}
        outer = frozenset(outputs).union(*map(_uses, nodes)) - defined
        ordered = _with_drops(take_apart(nodes), defined - {*outputs})
        return Graph(inputs, outputs, constants, ordered, outer)

    def _check_known(self, name: str, known: set[str], later: set[str], user: str) -> None:
        if name in known:
            return
        raise InputError(
            f"{self.path}: nodes must come after what they use",
            got=f"{user} uses {name!r}, which "
            + ("comes later, or from itself" if name in later else "nothing computes"),
            help="onnx.checker.check_model says what is wrong with a file",
        )

    def _node(self, proto: onnx.NodeProto, known: set[str], depth: int) -> Node:
        where = f"{self.path}: {_label(proto)}"
        if proto.domain not in DEFAULT_DOMAIN:
            fused = proto.domain.startswith("com.microsoft")
            raise InputError(
                f"{where} must be a standard ONNX operator", got=f"{proto.domain}.{proto.op_type}",
                help="fused operators belong to one runtime: export without optimisation, and give "
                "the file from before any optimiser" if fused else
                "write it with standard operators, or as a function inside the file",
            )  # fmt: skip
        if proto.op_type not in OPERATORS:
            reason = REFUSED.get(proto.op_type, f"not among the {len(OPERATORS)} that are supported")
            raise InputError(
                f"{where} cannot be read", got=f"{proto.op_type}: {reason}",
                help="export the model without it, or give the PyTorch model",
            )  # fmt: skip
        attributes: dict[str, Any] = {}
        subgraphs: dict[str, Graph] = {}
        for attribute in proto.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                subgraphs[attribute.name] = self.graph(attribute.g, known, depth + 1)
            else:
                attributes[attribute.name] = self._attribute(attribute, where)
        function = OPERATORS[proto.op_type]
        parameters = inspect.signature(function).parameters
        extra = {"opset": self.opset, "outputs": len(proto.output)}
        attributes.update({name: value for name, value in extra.items() if name in parameters})
        inputs = tuple(name or None for name in proto.input)
        try:
            inspect.signature(function).bind(*inputs, **attributes, **subgraphs)
        except TypeError as error:
            raise InputError(
                f"{where} must have the inputs and attributes of opset {self.opset}", got=error,
                help="export the model with another opset, or without this variant",
            ) from error  # fmt: skip
        return Node(
            _name(proto), proto.op_type, scope_of(proto), inputs, tuple(proto.output), function,
            attributes, subgraphs,
        )  # fmt: skip

    def _attribute(self, attribute: onnx.AttributeProto, where: str) -> Any:
        kinds = onnx.AttributeProto
        plain = {kinds.FLOAT: "f", kinds.INT: "i", kinds.FLOATS: "floats", kinds.INTS: "ints"}
        if attribute.type in plain and not attribute.ref_attr_name:
            value = getattr(attribute, plain[attribute.type])
            if isinstance(value, float):
                return shortest(value)
            return value if isinstance(value, int) else [*value]
        if attribute.type == kinds.STRING and not attribute.ref_attr_name:
            return attribute.s.decode("utf-8", "replace")
        if attribute.type == kinds.TENSOR and len(attribute.t.dims) <= 1:
            tensor = read_tensor(attribute.t, self.path)
            if tensor.numel() == 1:
                number = tensor.reshape(()).item()
                return shortest(number) if tensor.dtype == torch.float32 else number, tensor.dtype
        raise InputError(f"{where} must have plain attributes", got=repr(attribute.name))

    def _constant_node(self, proto: onnx.NodeProto) -> Any:
        where = f"{self.path}: {_label(proto)}"
        if len(proto.attribute) != 1 or proto.input:
            raise InputError(f"{where} must have one value", got=f"{len(proto.attribute)}")
        attribute = proto.attribute[0]
        if attribute.name == "value" and attribute.type == onnx.AttributeProto.TENSOR:
            return self._held(proto.output[0], read_tensor(attribute.t, self.path), False)
        value = self._attribute(attribute, where)
        if isinstance(value, (str, tuple)):
            raise InputError(f"{where} must hold numbers", got=attribute.name)
        floats = attribute.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS)
        tensor = torch.tensor(value, dtype=torch.float32 if floats else torch.int64)
        return self._held(proto.output[0], tensor, False)

    def _held(self, name: str, tensor: Tensor, initializer: bool) -> Any:
        value = constant_of(tensor)
        if isinstance(value, Tensor):
            folded = tensor.numel() > 1 and (tensor.dim() > 1 or not initializer)
            if folded and bool((tensor == tensor.flatten()[0]).all()):
                number = tensor.flatten()[0].item()
                if tensor.dtype == torch.float32:
                    number = shortest(number)
                return Filled((*tensor.shape,), number, tensor.dtype)
            self.tensors.append((name, value, initializer))
            return Held(len(self.tensors) - 1)
        return value


def read_inputs(proto: onnx.GraphProto, path: Path) -> list[Input]:
    """What the model is given.  Raises InputError for sequences, strings and the like."""
    initial = {tensor.name for tensor in proto.initializer}
    inputs = []
    for value in proto.input:
        if value.name in initial:
            continue
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or kind.elem_type not in DTYPES:
            got = value.type.WhichOneof("value") or "nothing"
            raise InputError(
                f"{path}: the input {value.name} must be a tensor of numbers",
                got=type_name(kind.elem_type) if value.type.HasField("tensor_type") else got,
            )
        shape = None
        if kind.HasField("shape"):
            shape = tuple(dim.dim_value if dim.dim_value > 0 else None for dim in kind.shape.dim)
        inputs.append(Input(value.name, DTYPES[kind.elem_type], shape))
    return inputs


def scope_of(node: onnx.NodeProto) -> str:
    """The dotted name of the module that a node comes from, "" for the model itself.

    torch's exporters write it into metadata ("pkg.torch.onnx.name_scopes") or the node's name
    ("/encoder/layers.0/attn/MatMul"); any other node is its own scope.
    """
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    scopes = _string_list(metadata.get("pkg.torch.onnx.name_scopes", ""))
    if scopes:
        module = scopes[-2] if len(scopes) > 1 else ""
        return "" if module.startswith(NO_MODULE) else module
    if not node.name.startswith("/"):
        return _name(node)
    scope: list[str] = []
    for part in node.name.split("/")[1:-1]:
        if scope and part.startswith(f"{scope[-1]}."):  # "/layers/layers.0": a list's item says both
            scope.pop()
        scope.append(part)
    return ".".join(scope)


def _string_list(text: str) -> list[str]:
    try:
        value = ast.literal_eval(text) if text and len(text) < 10_000 else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(item) for item in value] if isinstance(value, list) else []


def _name(node: onnx.NodeProto) -> str:
    return node.name or next(filter(None, node.output), node.op_type)


def _label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} node {_name(node)}"


def _uses(node: Node) -> set[str]:
    inside = {name for graph in node.subgraphs.values() for name in graph.outer}
    return {name for name in node.inputs if name} | inside


def _with_drops(nodes: list[Node], droppable: set[str]) -> tuple[Node, ...]:
    """The nodes, each with the values whose last user it is."""
    needed: set[str] = set()
    result = []
    for node in reversed(nodes):
        names = {*_uses(node), *filter(None, node.outputs)}
        drops = tuple(sorted((names & droppable) - needed))
        needed |= names
        result.append(replace(node, drops=drops))
    return tuple(reversed(result))


def take_apart(nodes: Sequence[Node]) -> list[Node]:
    """Take fused transposes apart again where one is the transpose of another.

    before: q = Transpose(x, [0, 2, 1, 3]), t = Transpose(x, [0, 2, 3, 1])
    after:  q = Transpose(x, [0, 2, 1, 3]), t = Transpose(q, [0, 1, 3, 2])

    The model had t = q^T. Where only t is sorted and only q enters a distance, they would share nothing
    but x, which is not split into heads yet.  The nodes stay in an order in which they can run, and
    every value keeps its name and meaning.
    """
    first: dict[tuple[str, tuple[int, ...]], Node] = {}
    for node in nodes:
        order = node.attributes.get("perm") if node.kind == "Transpose" else None
        if order is not None and len(order) >= 3 and node.inputs[0] is not None:
            first.setdefault((node.inputs[0], tuple(order)), node)
    straight: dict[str, Node] = {}  # by the output of its transpose
    for (source, order), node in first.items():
        partner = first.get((source, (*order[:-2], order[-1], order[-2])))
        if partner is not None and order[-1] != len(order) - 1 == order[-2]:
            straight[node.outputs[0]] = partner
    result: list[Node] = []
    placed: set[str] = set()

    def append(node: Node) -> None:
        if not (node.outputs and node.outputs[0] in placed):
            placed.update(node.outputs)
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
