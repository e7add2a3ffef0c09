"""An ONNX teacher's file with its attention replaced; everything else in the file stays as it is.

before: the file's nodes, and a compiled program that was captured from them
after:  what is new in the program, translated (asapc.onnx.functions), between the values it reads and
        the values it replaces; unused nodes are removed

A node of the program is new if a pass has inserted it; captured ones carry the value they had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
import onnx_ir
from onnx import version_converter
from onnx_ir.passes import common
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from asapc.errors import InputError
from asapc.inputs.onnx.load import read_model
from asapc.inputs.onnx.module import OnnxModule, value_nodes
from asapc.inputs.onnx.settings import OPSETS
from asapc.onnx.functions import Functions, take_out_calls, traced
from asapc.onnx.translate import translate
from asapc.passes.cut import reached
from asapc.program.calls import WRITTEN
from asapc.terminal.printed import reason


@dataclass(frozen=True)
class Part:
    """Neighbouring new nodes. inputs: captured nodes that they read; outputs: those that others read."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def edited_model(
    path: Path, module: OnnxModule, captured: GraphModule, compiled: GraphModule, opset: int | None
) -> tuple[onnx_ir.Model, dict[str, list[str]]]:
    """The file at `path` with the new nodes of `compiled` in place of what they replace, and the
    values of that file by the names of captured nodes.

    module: the import of the file that `captured` was traced from; `compiled` is what passes made of it.
    opset: None for that of the file.
    Raises InputError if the file has no value where it would have to be cut, or cannot be converted to
    the opset.
    """
    names: dict[str, list[str]] = {}
    for name, node in value_nodes(captured, module).items():
        names.setdefault(node.name, []).append(name)
    model = onnx_ir.from_proto(of_opset(read_model(path), opset))
    opset = model.graph.opset_imports[""]
    _tell_shapes(model.graph, value_nodes(captured, module))
    values = {
        value.name: value
        for value in [*model.graph.inputs, *model.graph.initializers.values(),
                      *(output for node in model.graph for output in node.outputs)]
    }  # fmt: skip

    def there(node: Node) -> list[onnx_ir.Value]:
        return [values[name] for name in names.get(node.name, ()) if name in values]

    functions = Functions(opset)
    replaced = _replaced(captured, compiled)
    for number, part in enumerate(_parts(compiled, lambda node: bool(there(node)))):
        inner = _exported(compiled, part)
        take_out_calls(inner, functions)
        piece = translate(inner, opset).graph
        for value, node in zip(list(piece.inputs), part.inputs, strict=True):
            value.replace_all_uses_with(there(node)[0])
        outputs = list(piece.outputs)
        _move(piece, model.graph, f"asapc_{number}_")
        for value, node in zip(outputs, part.outputs, strict=True):
            olds = [found for old in replaced[node] for found in there(old)]
            if not olds:
                raise InputError(
                    f"{path}: the file has a value where attention is replaced",
                    got=f"none for {', '.join(old.name for old in replaced[node])}",
                )
            for old in olds:
                _redirect(model.graph, old, value)
    functions.put_into(model)
    common.RemoveUnusedNodesPass()(model)
    model.graph.sort()
    return model, names


def _tell_shapes(graph: onnx_ir.Graph, nodes: Mapping[str, Node]) -> None:
    """Give shapes to outputs declared without one: the checker needs them in the edited file."""
    for value in graph.outputs:
        node = nodes.get(value.name or "")
        if value.shape is None and node is not None:
            sizes = node.meta["val"].shape
            value.shape = onnx_ir.Shape([size if isinstance(size, int) else None for size in sizes])


def of_opset(proto: onnx.ModelProto, wanted: int | None) -> onnx.ModelProto:
    """The model in the wanted opset, or in one that functions can be written in."""
    version = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    target = wanted or max(version, OPSETS[0])
    if version == target:
        return proto
    try:
        return version_converter.convert_version(proto, target)
    except Exception as error:  # of the C++ converter
        raise InputError(
            f"the file can be converted from opset {version} to {target}",
            got=reason(error),
        ) from error


def _is_new(node: Node) -> bool:
    if node.op not in ("call_function", "get_attr"):
        return False
    return "val" not in node.meta or WRITTEN in node.meta


def _parts(compiled: GraphModule, has_value: Callable[[Node], bool]) -> list[Part]:
    """In graph order. A captured node without a value in the file is computed again inside the part."""
    members: list[set[Node]] = []
    for node in filter(_is_new, compiled.graph.nodes):
        joined = [part for part in members if not part.isdisjoint(node.all_input_nodes)]
        members = [part for part in members if part not in joined] + [{node}.union(*joined)]
    parts = []
    order = {node: place for place, node in enumerate(compiled.graph.nodes)}
    for new in members:
        nodes = reached(new, partial(_missing, has_value))
        inputs = {read for node in nodes for read in node.all_input_nodes if read not in nodes}
        outputs = [node for node in new if any(not _is_new(user) for user in node.users)]
        ordered = [tuple(sorted(some, key=order.__getitem__)) for some in (nodes, inputs, outputs)]
        parts.append(Part(*ordered))
    return sorted(parts, key=lambda part: order[part.nodes[-1]])


def _missing(has_value: Callable[[Node], bool], node: Node) -> list[Node]:
    """What it reads that is not a tensor of the file: sizes, and steps inside one ONNX operator."""
    missing = [read for read in node.all_input_nodes if not has_value(read)]
    for read in missing:
        if read.op == "placeholder":
            raise InputError("the model's inputs are values of the file", got=read.name)
    return missing


def _exported(compiled: GraphModule, part: Part) -> ExportedProgram:
    """The part as a separate program, with the dynamic sizes of what it reads."""
    graph = Graph()
    copies: dict[Node, Node] = {node: graph.placeholder(node.name) for node in part.inputs}
    for node in part.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in part.outputs))
    return traced(GraphModule(compiled, graph), [node.meta["val"] for node in part.inputs])


def _replaced(captured: GraphModule, compiled: GraphModule) -> dict[Node, list[Node]]:
    """For each new node, what its users read in its place when the graph was captured."""
    before = {node.name: node for node in captured.graph.nodes}
    replaced: dict[Node, list[Node]] = {}
    for node in compiled.graph.nodes:
        if _is_new(node) or node.op in ("placeholder", "get_attr"):
            continue
        arguments, old = (pytree.tree_leaves((n.args, n.kwargs)) for n in (node, before[node.name]))
        for now, then in zip(arguments, old, strict=True):
            if isinstance(now, Node) and _is_new(now) and then not in replaced.setdefault(now, []):
                replaced[now].append(then)
    return replaced


def _move(piece: onnx_ir.Graph, graph: onnx_ir.Graph, prefix: str) -> None:
    """Move nodes and weights of `piece` into `graph`, under names that are free there."""
    nodes: Sequence[onnx_ir.Node] = list(piece)
    for name, value in list(piece.initializers.items()):
        del piece.initializers[name]
        value.name = prefix + name
        graph.initializers[value.name] = value
    piece.outputs.clear()
    piece.remove(nodes)
    for node in nodes:
        node.name = prefix + (node.name or node.op_type)
        for value in node.outputs:
            value.name = prefix + (value.name or "")
    graph.extend(nodes)


def _redirect(graph: onnx_ir.Graph, old: onnx_ir.Value, new: onnx_ir.Value) -> None:
    """Make whatever reads `old` read `new`, which also takes its name if the graph returns it."""
    put_out = any(output is old for output in graph.outputs)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if put_out:
        name = old.name
        old.name = f"{name}_replaced"
        new.name, new.shape, new.type = name, old.shape, old.type
