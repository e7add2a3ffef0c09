"""The names of a file's inputs and outputs, on which whoever runs it relies.

Inputs have the names of forward's arguments; outputs those of a returned mapping, else `output`, or
`output_0`, `output_1` ... An ONNX teacher's names stay (manifest.json, `onnx`).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils import _pytree as pytree

from asapc.errors import InputError


def input_names(exported: ExportedProgram) -> list[str]:
    """Names of the tensors that the program takes, in order."""
    specs = exported.graph_signature.input_specs
    return [spec.arg.name for spec in specs
            if spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)]  # fmt: skip


def output_names(exported: ExportedProgram) -> list[str]:
    """Raises InputError for an output that is no tensor, which ONNX has no place for."""
    spec = exported.call_spec.out_spec
    assert spec is not None
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))[0]
    names: list[str] = []
    taken = input_names(exported)
    for path, _ in paths:
        keys = [str(getattr(key, a)) for key in path for a in ("key", "name", "idx") if hasattr(key, a)]
        named = path and isinstance(path[0], pytree.MappingKey | pytree.GetAttrKey)
        name = "_".join(keys if named else ["output", *keys])
        while name in names or name in taken:
            name += "_"
        names.append(name)
    for name, output in zip(names, exported.graph_signature.output_specs, strict=True):
        if not isinstance(output.arg, TensorArgument):
            value = getattr(output.arg, "value", None)
            kind = "a size" if value is None else f"{type(value).__name__} {value}"
            raise InputError(
                "export: the outputs of the model are tensors", got=f"{name}: {kind}",
                help="wrap the model in one that returns its tensors only",
            )  # fmt: skip
    return names


def rename(model: onnx_ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give the graph's inputs and outputs these names; other values that have one give way."""
    graph = model.graph
    _separate(graph)
    taken = {*inputs, *outputs}
    ends = [*graph.inputs, *graph.outputs]
    inner = [value for node in graph.all_nodes() for value in node.outputs]
    names = {value.name for value in [*inner, *graph.initializers.values()]} | taken
    for value in inner:
        if value.name in taken and not any(value is end for end in ends):
            number = next(n for n in range(len(names) + 1) if f"{value.name}_{n}" not in names)
            value.name = f"{value.name}_{number}"
            names.add(value.name)
    for number, value in enumerate(ends):  # a swap of two names goes over names that nothing has
        value.name = f"asapc_end_{number}"
    for value, name in zip(ends, (*inputs, *outputs), strict=True):
        value.name = name


def _separate(graph: onnx_ir.Graph) -> None:
    """Make every output a separate value: no input, no weight, no other output."""
    seen = {id(value) for value in [*graph.inputs, *graph.initializers.values()]}
    for place, value in enumerate(graph.outputs):
        if id(value) in seen:
            node = onnx_ir.Node("", "Identity", [value])
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            node.outputs[0].name = f"asapc_output_{place}"
            graph.append(node)
            graph.outputs[place] = node.outputs[0]
        seen.add(id(graph.outputs[place]))
