"""An ONNX graph as nodes that are ready to run: read once, with everything checked that can be.

before: onnx.GraphProto without model-local functions
after:  Graph(inputs, constants, nodes, outputs), subgraphs inside; tensors in a separate list
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.inputs.onnx.host import DTYPES, constant_of, shortest
from asapc.inputs.onnx.nodes import Filled, Graph, Held, Input, Node
from asapc.inputs.onnx.ops import OPERATORS, REFUSED
from asapc.inputs.onnx.tensors import read_tensor, type_name
from asapc.inputs.onnx.transposes import take_apart

MAX_DEPTH = 8  # of subgraphs in subgraphs
DEFAULT_DOMAIN = ("", "ai.onnx")
NO_MODULE = "_empty_nn_module_stack"  # what torch's exporter writes for a node of no module


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
        defined: set[str] = set()
        constants: dict[str, Any] = {}

        def define(name: str, what: str) -> None:
            if not name or name in known:
                raise InputError(
                    f"{self.path}: every value must have its own name",
                    got=f"{name!r} twice, the second time as {what}" if name else f"{what} without one",
                )
            known.add(name)
            defined.add(name)

        initial = {tensor.name for tensor in proto.initializer}
        inputs = tuple(value.name for value in proto.input if value.name not in initial)
        for name in inputs:
            define(name, "an input")
        for tensor in proto.initializer:
            define(tensor.name, "an initializer")
            constants[tensor.name] = self._constant(tensor.name, tensor, True)
        later = {name for node in proto.node for name in node.output}
        nodes: list[Node] = []
        outer: set[str] = set()
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
            outer |= {name for name in _uses(read) if name not in defined}
        outputs = tuple(value.name for value in proto.output)
        for name in outputs:
            self._check_known(name, known, later, "an output of the graph")
        outer |= {name for name in outputs if name not in defined}
        ordered = _with_drops(take_apart(nodes), defined - {*outputs})
        return Graph(inputs, outputs, constants, ordered, frozenset(outer))

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
            return self._constant(proto.output[0], attribute.t, False)
        value = self._attribute(attribute, where)
        if isinstance(value, (str, tuple)):
            raise InputError(f"{where} must hold numbers", got=attribute.name)
        floats = attribute.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS)
        tensor = torch.tensor(value, dtype=torch.float32 if floats else torch.int64)
        return self._held(proto.output[0], tensor, False)

    def _constant(self, name: str, proto: onnx.TensorProto, initializer: bool) -> Any:
        return self._held(name, read_tensor(proto, self.path), initializer)

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

    torch's exporters say it in metadata ("pkg.torch.onnx.name_scopes") or in the node's name
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
