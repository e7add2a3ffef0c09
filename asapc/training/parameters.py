"""What a refresh trains, read off the compiled graphs.

These are the coefficients of every predicted dual (including a token bias), the layer norms, the
projection of each attention output, and the head.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from asapc.errors import InputError
from asapc.ir import Program
from asapc.operators.catalogue import by_name
from asapc.passes.cut import walked
from asapc.program.calls import CALLS, DUAL_SETTINGS, OWN, operator_calls

aten = torch.ops.aten
DUALS = {torch.ops.asapc.dual.default, torch.ops.asapc.dual_and_row_mass.default}
NORMS = {aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default}
AFFINE = {
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default,
    aten.matmul.default, aten.einsum.default, aten.conv1d.default, aten.conv2d.default,
    aten.convolution.default,
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A tensor that is trained.  program: the number of its compiled program.  label: for reports."""

    program: int
    name: str
    label: str
    tensor: nn.Parameter


def choose_parameters(
    programs: Sequence[Program], leaf: int, patterns: Sequence[str], with_constants: Collection[str]
) -> list[tuple[int, str]]:
    """(program, name) of what is trained, in the order of the state dicts.

    leaf: where the class scores are among the outputs of a whole-model program; a program of one module
    has no head. patterns: choose by name instead; each must match one.  with_constants: sites that hold
    numbers of the model's weights, which would no longer be theirs.
    """
    held = [_held(program.graph, with_constants) for program in programs]
    every = parameters_of(programs, buffers=True)
    available = [(index, name) for index, name in every if name not in held[index]]
    labels = {pair: label_of(programs[pair[0]], pair[1]) for pair in available}
    if patterns:
        for pattern in patterns:
            if not fnmatch.filter(labels.values(), pattern):
                raise InputError(
                    f"--parameters: the pattern {pattern!r} must match a parameter",
                    got="no match",
                    help=f"there are {', '.join(list(labels.values())[:12])}, ...",
                )
        chosen = {o for o in available if any(fnmatch.fnmatchcase(labels[o], p) for p in patterns)}
    else:
        chosen = {
            (index, name)
            for index, program in enumerate(programs)
            for name in trainable(program.graph, leaf if program.name == "" else None)
        }
    ordered = [pair for pair in available if pair in chosen]
    if not ordered:
        raise InputError(
            "refresh: the model must have something to train",
            got="no coefficients, layer norms, projections or head",
            help="name parameters with --parameters",
        )
    return ordered


def label_of(program: Program, name: str) -> str:
    """The name of a program's tensor in the whole model."""
    return f"{program.name}.{name}" if program.name else name


def trainable(graph: GraphModule, leaf: int | None) -> set[str]:
    """Names of coefficients, norms, projections of attention outputs, and the head of output `leaf`."""
    constants = constant_sources(graph.graph)
    names: set[str] = set().union(*coefficients(graph))
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in NORMS:
            names |= _weights_read(node, constants)
    for operands in operator_calls(graph):
        names |= projection(operands.call, constants)
    if leaf is not None:
        output = pytree.tree_leaves(graph.graph.output_node().args[0])[leaf]
        if isinstance(output, Node):
            names |= head(output, constants)
    return names


def coefficients(graph: GraphModule) -> list[set[str]]:
    """For each operator call in order, the names of the coefficients that predict its duals, and of the
    trained tensors of operators that were fitted otherwise."""
    names_of_calls = []
    for operands in operator_calls(graph):
        trained = map(operands.settings.get, operands.operator.trained)
        names = {str(node.target) for node in trained if isinstance(node, Node)}
        for dual in map(operands.settings.get, DUAL_SETTINGS):
            while isinstance(dual, Node) and dual.target not in DUALS:
                dual = dual.args[0]  # an intercept that is added, or one of two outputs
            if isinstance(dual, Node):
                fitted = by_name(dual.target, dual.args)["coefficients"]
                if isinstance(fitted, Node):
                    names.add(str(fitted.target))
        names_of_calls.append(names)
    return names_of_calls


def _held(graph: GraphModule, sites: Collection[str]) -> set[str]:
    """The tensors of these sites, except those that were fitted."""
    read = {n.target for x in operator_calls(graph) if x.site in sites for n in x.call.all_input_nodes}
    return {str(x) for x in read.difference(*coefficients(graph)) if str(x).startswith(OWN)}


Constants = dict[Node, frozenset[str] | None]


def constant_sources(graph: Graph) -> Constants:
    """The attributes that each node is computed from; None if it also depends on the model's inputs.

    A weight that is transposed, cast or normalised before it is used is still a weight.
    """
    attributes: Constants = {}
    for node in graph.nodes:
        sources = [attributes[source] for source in node.all_input_nodes]
        if node.op == "get_attr":
            attributes[node] = frozenset({str(node.target)})
        elif node.op == "placeholder" or None in sources:
            attributes[node] = None
        else:
            attributes[node] = frozenset().union(*(s for s in sources if s is not None))
    return attributes


def projection(call: Node, constants: Constants) -> set[str]:
    """The first affine map on each path from an attention output.

    A path ends at a residual sum or a norm: what follows is not a projection of this output.
    """

    def further(node: Node) -> list[Node]:
        return [user for user in node.users if user.op == "call_function"]

    def ends(node: Node) -> bool:
        sums = node.target is aten.add.Tensor and len(_data(node, constants)) > 1
        return sums or node.target in NORMS | DUALS | CALLS.keys()

    return _first_affine(further(call), further, ends, constants)


def head(output: Node, constants: Constants) -> set[str]:
    """The last affine map on each path to an output."""
    return _first_affine(
        [output],
        lambda node: _data(node, constants),
        lambda node: node.target in NORMS | CALLS.keys(),
        constants,
    )


def _first_affine(
    nodes: list[Node],
    further: Callable[[Node], list[Node]],
    ends: Callable[[Node], bool],
    constants: Constants,
) -> set[str]:
    """Weights of the first affine maps on the paths that begin at these nodes."""

    def onward(node: Node) -> list[Node]:
        return [] if ends(node) or _affine(node, constants) else further(node)

    return set().union(*(_affine(node, constants) for node in walked(nodes, onward)))


def _data(node: Node, constants: Constants) -> list[Node]:
    """Operands that depend on the model's inputs."""
    return [source for source in node.all_input_nodes if constants[source] is None]


def _weights_read(node: Node, constants: Constants) -> set[str]:
    return {name for source in node.all_input_nodes for name in constants[source] or ()}


def _affine(node: Node, constants: Constants) -> set[str]:
    """Weights and biases of x -> x W + b; empty for other nodes, including products of data."""
    if node.target not in AFFINE or not _data(node, constants):
        return set()
    names = _weights_read(node, constants)
    users = list(node.users)
    if names and len(users) == 1 and users[0].target is aten.add.Tensor:
        names |= _weights_read(users[0], constants)  # a bias that is added separately
    return names


def freed_parameters(
    programs: Sequence[Program], model: nn.Module | None, names: Sequence[tuple[int, str]]
) -> list[Trained]:
    """Make the named tensors separate parameters and freeze everything else.

    They shared memory with the teacher's and lossless programs, which must not be trained.
    """
    for module in (*(program.graph for program in programs), *([model] if model else [])):
        module.requires_grad_(False)
    trained = []
    for index, name in names:
        parent, _, leaf = name.rpartition(".")
        owner = programs[index].graph.get_submodule(parent)
        fresh = nn.Parameter(getattr(owner, leaf).detach().clone())
        delattr(owner, leaf)  # coefficients are buffers
        owner.register_parameter(leaf, fresh)
        trained.append(Trained(index, name, label_of(programs[index], name), fresh))
    return trained


def parameters_of(programs: Sequence[Program], buffers: bool = False) -> list[tuple[int, str]]:
    """(program, name) of every floating-point parameter; buffers and a site's constants are none."""
    return [
        (index, name)
        for index, program in enumerate(programs)
        for name, tensor in (
            program.graph.state_dict().items() if buffers else program.graph.named_parameters()
        )
        if tensor.is_floating_point()
    ]
