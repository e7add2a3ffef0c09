"""An .onnx file as a teacher. Files are not trusted: nothing in them runs, and all sizes are checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner

from asapc.errors import InputError
from asapc.formats.user_code import describe
from asapc.inputs.onnx.graph import DEFAULT_DOMAIN, Reader, read_inputs
from asapc.inputs.onnx.module import onnx_module
from asapc.inputs.onnx.settings import DOMAIN
from asapc.inputs.onnx.tensors import check_external
from asapc.inputs.teacher import Teacher
from asapc.inputs.weights import check_finite, fingerprint

READ_OPSETS = range(11, 24)
MAX_BYTES = 2**31 - 1  # of a protobuf
MAX_NODES = 200_000  # after functions are inlined
MOST_INLINED = 1 << 26  # bytes that any model's functions may add
MAX_COPIES = 8  # times its own size, which a larger model's functions may add
MAX_CALLS = 64  # of functions in functions
EXPORT = "export it again, such as with torch.onnx.export(model, args, 'model.onnx', opset_version=18)"


def onnx_teacher(path: str | Path, trust: bool = False) -> Teacher:
    """The model in an ONNX file, as a module that torch.export can trace.

    trust: its values may take any memory, see asapc.inputs.onnx.growth.
    Raises InputError for anything that is not one, not whole, or not supported.
    """
    path = Path(path)
    model = _parsed(path)
    opset = _opset(model, path)
    if any(function.domain == DOMAIN for function in model.functions):
        raise InputError(
            f"{path}: the model must be a teacher", got="one that asapc has written already",
            help="compile the teacher that it was made from",
        )  # fmt: skip
    if model.functions:
        model = _inlined(model, path)
    count = sum(1 for _ in _nodes(model.graph))
    if count > MAX_NODES:
        raise InputError(f"{path}: a model may have {MAX_NODES} nodes", got=f"{count}")
    check_external(_tensors(model.graph), path)
    reader = Reader(path, opset)
    graph = reader.graph(model.graph)
    inputs = read_inputs(model.graph, path)
    if not inputs:
        raise InputError(f"{path}: the model must have inputs", got="none")
    module = onnx_module(graph, inputs, reader.tensors).eval()
    module.trusted = trust
    state = {module.weights[key]: tensor for key, tensor in module.state_dict().items()}
    check_finite(state, {module.weights[key] for key, _ in module.named_parameters()}, str(path))
    # a digest of what the model computes, not of where the file or its tensors are
    tensors = {str(key): tensor for key, (_, tensor, _) in enumerate(reader.tensors)}
    digest = hashlib.sha256(repr((reader.opset, inputs, graph, fingerprint(tensors))).encode())
    return Teacher(module, None, str(path), digest.hexdigest(), onnx=path)


def read_model(path: Path) -> onnx.ModelProto:
    """The file of an onnx_teacher with functions inlined and external weights loaded."""
    model = _parsed(path)
    onnx.load_external_data_for_model(model, str(path.parent))
    return _inlined(model, path) if model.functions else model


def _parsed(path: Path) -> onnx.ModelProto:
    if not path.exists():
        raise InputError(f"{path}: no such model", help="check the path")
    if not path.is_file():
        raise InputError(f"{path} must be a file", got="something else")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(
                f"{path}: an ONNX file must be smaller than 2 GiB",
                got=f"{path.stat().st_size} bytes", help="save it with external data",
            )  # fmt: skip
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} could not be read", got=describe(error)) from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf's errors have no public type
        raise InputError(
            f"{path}: not an ONNX model, or a truncated one", got=f"{len(content)} bytes ({error})",
            help=f"copy it again and compare sizes, or {EXPORT}",
        ) from error  # fmt: skip
    if not model.graph.output or not model.ir_version:
        raise InputError(
            f"{path}: not an ONNX model, or a truncated one",
            got=f"{len(content)} bytes without a graph that has outputs",
            help=f"copy it again and compare sizes, or {EXPORT}",
        )
    return model


def _opset(model: onnx.ModelProto, path: Path) -> int:
    versions = [entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAIN]
    if len({*versions}) != 1 or versions[0] not in READ_OPSETS:
        got = ", ".join(f"opset {version}" for version in versions) or "no opset"
        raise InputError(
            f"{path}: the model must be of opset {READ_OPSETS[0]} to {READ_OPSETS[-1]}", got=got,
            help=f"{EXPORT}, or convert it with onnx.version_converter",
        )  # fmt: skip
    return versions[0]


def _nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Every node, including those of subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every stored tensor, including those of subgraphs."""
    yield from graph.initializer
    for node in _nodes(graph):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from inner.initializer


def _inlined(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The model without local functions.  Raises InputError where they call each other in circles or too
    deeply, or would make too many nodes or bytes."""
    def key(item: Any, name: str) -> tuple[str, str, str]:
        return item.domain, name, item.overload

    bodies = {key(function, function.name): function for function in model.functions}
    sizes: dict[Any, tuple[int, int]] = {}  # nodes and bytes of a function, with those that it calls

    def size(nodes: list[onnx.NodeProto]) -> tuple[int, int]:
        called = [sizes.get(key(node, node.op_type), (0, 0)) for node in nodes]
        return len(nodes) + sum(count for count, _ in called), sum(added for _, added in called)

    waiting = {name: list(_nodes(function)) for name, function in bodies.items()}
    for _ in range(MAX_CALLS):  # each time those that call only functions of known size
        ready = [name for name, nodes in waiting.items()
                 if not any(key(node, node.op_type) in waiting for node in nodes)]  # fmt: skip
        for name in ready:
            count, added = size(waiting.pop(name))
            sizes[name] = count, added + bodies[name].ByteSize()
    if waiting:
        raise InputError(
            f"{path}: functions may be nested {MAX_CALLS} deep, and must not call themselves",
            got=f"more, in {next(iter(waiting))[1]}", help="export the model without functions",
        )  # fmt: skip
    count, added = size(list(_nodes(model.graph)))
    if count > MAX_NODES:
        raise InputError(
            f"{path}: a model may have {MAX_NODES} nodes", got=f"{count}, functions written out"
        )
    if added > max(MOST_INLINED, MAX_COPIES * model.ByteSize()):
        raise InputError(
            f"{path}: functions must not make a model much larger",
            got=f"{added} bytes more of {model.ByteSize()}", help="export the model without functions",
        )  # fmt: skip
    try:
        return onnx.inliner.inline_local_functions(model, convert_version=True)
    except Exception as error:  # of the C++ inliner
        raise InputError(
            f"{path}: the model's functions must be valid", got=describe(error), help=EXPORT
        ) from error
