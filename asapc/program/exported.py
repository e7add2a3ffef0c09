"""A program as torch.export has it, for a file: assembled from the graph, not traced again.

before: a graph whose parameters are attributes, some of whose nodes were put in by a rewrite
after:  an ExportedProgram whose parameters are inputs

A trace costs milliseconds per node, and a teacher's loop has thousands. All that the graph lacks is what
the nodes of a rewrite, and those that follow, return: their operators run on the fake tensors of the
capture.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch._export.verifier import TrainingIRVerifier
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
    _make_argument_spec,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from asapc.ir import Program

PREFIX = {InputKind.PARAMETER: "p", InputKind.BUFFER: "b", InputKind.CONSTANT_TENSOR: "c"}


def exported_program(program: Program) -> ExportedProgram:
    """The program as an ExportedProgram, with the sizes that it holds for."""
    module = program.graph
    mode = next(
        node.meta["val"].fake_mode for node in module.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
    )  # fmt: skip
    lifted = _Lifted(module, mode)
    with torch.no_grad(), mode.shape_env.suppress_guards():
        for node in module.graph.nodes:
            lifted.take(node)
    ranges = mode.shape_env.var_to_range
    # By name: the order of a set differs from process to process, and files must not.
    symbols = sorted(free_symbols([node.meta.get("val") for node in lifted.graph.nodes]), key=str)
    in_spec, out_spec, names = _layout(program)
    signature = ModuleCallSignature(
        inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec, forward_arg_names=names
    )
    return ExportedProgram(
        root=module,
        graph=lifted.graph,
        graph_signature=ExportGraphSignature(
            [spec for _, spec in lifted.held] + lifted.inputs, lifted.outputs
        ),
        state_dict={str(spec.target): tensor for tensor, spec in lifted.held if _is_state(spec)},
        range_constraints={symbol: ranges[symbol] for symbol in symbols if symbol in ranges},
        module_call_graph=[ModuleCallEntry(fqn="", signature=signature)],
        example_inputs=(program.args, program.kwargs),
        constants={str(spec.target): tensor for tensor, spec in lifted.held if not _is_state(spec)},
        verifiers=[TrainingIRVerifier],
    )


def _layout(program: Program) -> tuple[pytree.TreeSpec, pytree.TreeSpec, list[str]]:
    """The containers of inputs and outputs, and the names of the arguments."""
    graph = program.graph.graph
    layout = getattr(graph._codegen, "pytree_info", None)
    if layout is not None:
        return layout.in_spec, layout.out_spec, [name for name in layout.orig_args if name != "self"]
    (returned,) = graph.output_node().args
    return (
        pytree.tree_structure((program.args, program.kwargs)), pytree.tree_structure(returned),
        [str(node.target) for node in graph.find_nodes(op="placeholder")],
    )  # fmt: skip


class _Lifted:
    """The new graph, node by node.

    held: parameters, buffers and constants with their specs in the signature.
    inputs, outputs: the specs of the model's inputs and outputs.
    """

    def __init__(self, module: GraphModule, mode: FakeTensorMode) -> None:
        self.module, self.mode = module, mode
        self.graph = Graph()
        self.held: list[tuple[Tensor, InputSpec]] = []
        self.inputs: list[InputSpec] = []
        self.outputs: list[OutputSpec] = []
        self._nodes: dict[Node, Node] = {}
        self._made: set[Node] = set()
        self._attributes: dict[str, Node] = {}
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._buffers = dict(module.named_buffers(remove_duplicate=False))
        for node in module.graph.nodes:  # inputs of the graph come first, those of the model last
            if node.op == "get_attr":
                self._hold(node)

    def take(self, node: Node) -> None:
        if node.op == "get_attr" and str(node.target) in self._attributes:
            self._nodes[node] = self._attributes[str(node.target)]
            return
        new = self.graph.node_copy(node, self._nodes.__getitem__)
        new.meta = dict(node.meta)
        self._nodes[node] = new
        if node.op == "placeholder":
            self.inputs.append(InputSpec(InputKind.USER_INPUT, _make_argument_spec(new, {}), None))
        elif node.op == "output":
            new.args = (tuple(pytree.tree_leaves(new.args[0])),)
            specs = (_make_argument_spec(value, {}) for value in new.args[0])
            self.outputs = [OutputSpec(OutputKind.USER_OUTPUT, spec, None) for spec in specs]
        elif node.op == "call_function" and self._is_new(new):
            args, kwargs = map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
            try:
                with self.mode:
                    new.meta["val"] = new.target(*args, **kwargs)  # type: ignore[operator]
            except RuntimeError:  # torch.baddbmm cannot expand to a free size: what was captured stays
                if "val" not in node.meta:
                    raise
            self._made.add(new)

    def _is_new(self, node: Node) -> bool:
        """Whether a node may return something else than in the capture, strides included."""
        if "val" not in node.meta:
            return True
        if node.meta.get("unbacked_bindings"):  # its sizes have names, which the nodes that follow know
            return False
        plain = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        return plain and any(source in self._made for source in node.all_input_nodes)

    def _hold(self, node: Node) -> None:
        target = str(node.target)
        value = operator.attrgetter(target)(self.module)
        if target in self._attributes or not isinstance(value, Tensor):
            return
        kind = self._kind(target)
        new = self.graph.placeholder(f"{PREFIX[kind]}_{target.replace('.', '_')}")
        held = value.detach() if kind is InputKind.CONSTANT_TENSOR else value
        if "val" in node.meta:
            new.meta["val"] = node.meta["val"]
        else:  # of a rewrite's coefficients, whose sizes are numbers
            new.meta["val"] = self.mode.from_tensor(held, static_shapes=True)
        self._attributes[target] = new
        path, _, leaf = target.rpartition(".")
        hidden = self.module.get_submodule(path)._non_persistent_buffers_set
        persistent = leaf not in hidden if kind is InputKind.BUFFER else None
        self.held.append((value, InputSpec(kind, TensorArgument(new.name), target, persistent)))

    def _kind(self, target: str) -> InputKind:
        if target in self._parameters:
            return InputKind.PARAMETER
        return InputKind.BUFFER if target in self._buffers else InputKind.CONSTANT_TENSOR


def _is_state(spec: InputSpec) -> bool:
    return spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and bool(spec.persistent))
