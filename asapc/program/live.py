"""Patch a live model: it keeps its class, its hooks and its layers, and its attention is compiled.

before: the teacher's own nn.Module
after:  the same object; for every site the smallest module around it, such as `encoder.3.attention`,
        has a compiled `forward`, and a submodule `asapc` with what its operators were fitted with

The compiled forward calls the layers inside that module (nn.Linear and whatever else is called there) as
they are at that moment: their hooks run, and quantised, pruned or wrapped layers take effect. If the
module is called differently from the captured one, or has changed since, its own code runs, with a
warning. It has changed if a plain attribute (a number, text, None) was set, or a module inside it was
replaced whose code is part of the compiled forward. Dropout between the scores and the values is that of
evaluation mode: a compiled layer has no map to drop entries of.

A forward that the user has set on an instance is never removed. If it was there when the model was
captured, it is what was compiled, and is restored when the patch is removed; another one is refused.

Moved to another dtype, the compiled forward computes in that dtype throughout, even where the teacher has
`.float()`: a float32 trace cannot tell a cast from what it casts. The layers that it calls, and all that
is outside of it, are the model's own code and keep their casts; the operators accumulate in float32.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from asapc.errors import BranchError, InputError
from asapc.program.call import Call, Child, Group, Leaf, Tree, leaves, rebuilt
from asapc.program.calls import operator_calls
from asapc.program.code import GraphCode, flat_graph, sweep, tensors_of
from asapc.program.compiled import REPLICATE, Forward, Inside, Operators, site_line
from asapc.program.constants import Constants
from asapc.program.state import OPERATORS
from asapc.program.summary import shown_by


@dataclass(frozen=True)
class Patch:
    """A module, and what its forward becomes.

    name:        of the module in the model, "" for the model itself.
    program:     what it computes, without its weights; the layers that it calls are marked.
    tensors:     the tensors that the graph reads and the module does not have, by the graph's names.
    sites:       the names of its sites.
    inside:      the modules whose code is in the program, as they were.
    own_forward: a forward was set on its instance when it was captured, and is what was compiled.
    """

    name: str
    program: GraphModule
    call: Call
    children: tuple[Child, ...]
    tensors: Mapping[str, Tensor]
    sites: tuple[str, ...]
    dtype: torch.dtype
    inside: tuple[Inside, ...] = ()
    own_forward: bool = False


@dataclass(frozen=True)
class Prepared:
    """A checked patch, ready for its module.  constants: called once the weights are loaded."""

    module: nn.Module
    operators: Operators
    forward: Forward
    constants: Callable[[], Constants]

    def put(self) -> None:
        self.forward.constants = self.constants()
        _put(self.module, self.forward, self.operators)


def prepared(
    model: nn.Module, patches: Sequence[Patch], sites: Sequence[Mapping[str, Any]]
) -> list[Prepared]:
    """The patches for this model, checked; the model is left as it is.

    sites: of the manifest.  Raises InputError where the model is not the one that was compiled.
    """
    by_name = {str(site["name"]): site for site in sites}
    return [_made(model, patch, [by_name[name] for name in patch.sites]) for patch in patches]


def install(model: nn.Module, patches: Sequence[Prepared]) -> None:
    """Patch the model in place; earlier patches are taken out."""
    remove(model)
    for patch in patches:
        patch.put()


def remove(model: nn.Module) -> None:
    """Remove the patches again, except one that has another forward on top, which may call it.
    """
    shown_by(model, None)
    for module in list(model.modules()):
        forward = module.__dict__.get("forward")
        if isinstance(forward, Forward) and forward.live:
            _put(module, forward.before, None)


@contextlib.contextmanager
def installed_patches(
    model: nn.Module, patches: Sequence[Patch], sites: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Patch the model for a while, and then restore it with its earlier patches."""
    patched = prepared(model, patches, sites)
    before = [
        (patch.module, patch.module.__dict__.get("forward"), patch.module._modules.get(OPERATORS))
        for patch in patched
    ]
    try:
        for patch in patched:
            patch.put()
        yield
    finally:
        for module, forward, operators in before:
            _put(module, forward, operators)


def _put(module: nn.Module, forward: Any, operators: nn.Module | None) -> None:
    """Give the instance this forward, or its class's, and these operators, or none."""
    for name in ("forward", REPLICATE):
        module.__dict__.pop(name, None)
    module._modules.pop(OPERATORS, None)
    if operators is not None:
        module.add_module(OPERATORS, operators)
    if forward is not None:
        module.__dict__["forward"] = forward
    if isinstance(forward, Forward):
        module.__dict__[REPLICATE] = forward.replica


def _made(model: nn.Module, patch: Patch, sites: Sequence[Mapping[str, Any]]) -> Prepared:
    what = patch.name or "the model"
    try:
        module = model.get_submodule(patch.name)
    except AttributeError:
        raise another_model(f"it has no module {patch.name}") from None
    before = module.__dict__.get("forward")
    if isinstance(before, Forward):
        before = before.before
    elif before is not None and not patch.own_forward:
        raise InputError(
            f"{what}: a module is patched in place of the forward that was captured",
            got="another forward, which was put on the instance",
            help="remove it (del module.forward), load, then set it again",
        )
    if hasattr(module, OPERATORS) and not isinstance(getattr(module, OPERATORS), Operators):
        raise InputError(
            f"{what}: a patched module gets a submodule named {OPERATORS}",
            got="one that has an attribute of this name", help="rename it, or load without model=",
        )  # fmt: skip
    try:
        count = len(operator_calls(patch.program))
        if len(sites) != count:
            raise ValueError(f"{len(sites)} sites for {count} operator calls")
        graph, operators = with_operators(patch.program, patch.tensors, [*map(site_line, sites)])
        _call_children(graph, patch.children)
        sweep(graph)
    except (ValueError, RuntimeError, LookupError, TypeError) as error:
        raise InputError(
            f"{what}: the artefact must hold a program of it that can be run", got=str(error)[:200],
            help="compile again",
        ) from error  # fmt: skip
    _check(module, graph, what, dict(operators.named_buffers()))
    inputs = sum(node.op == "placeholder" for node in graph.nodes)
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, tuple)
    if inputs != len(patch.call.tensors) or not patch.call.gives(len(outputs)):
        raise InputError(
            f"{what}: the manifest must describe the call that its program takes",
            got=f"{len(patch.call.tensors)} tensors for {inputs}, and an output for {len(outputs)}",
            help="compile again",
        )  # fmt: skip
    code = GraphCode(graph, patch.dtype)
    forward = Forward(module, code, patch.call, what, live=True, before=before, inside=patch.inside)
    return Prepared(module, operators, forward, constants_of(model, sites))


def constants_of(model: nn.Module, sites: Sequence[Mapping[str, Any]]) -> Callable[[], Constants]:
    """The sites' constants among the model's weights, with the values at the time of the call."""
    names = [str(name) for site in sites for name in site["constants"]]
    tensors = tensors_of(model)
    gone = next((name for name in names if name not in tensors), None)
    if gone is not None:
        raise another_model(f"it has no weight {gone}")
    reasons = [site["no_gradient"] for site in sites if site["no_gradient"] is not None]
    return partial(Constants, model, names, reasons[0] if reasons else None)


def with_operators(
    program: GraphModule, tensors: Mapping[str, Tensor], lines: Sequence[str]
) -> tuple[Graph, Operators]:
    """The flat graph of a program, and the submodule that holds these tensors for it.

    tensors: by their names in the program.  lines: one for each of its sites.
    """
    names = {name: name.removeprefix("asapc_").replace(".", "_") for name in tensors}
    graph = flat_graph(program, lambda name: f"{OPERATORS}.{names[name]}" if name in names else name)
    return graph, Operators({names[name]: tensor for name, tensor in tensors.items()}, lines)


def _call_children(graph: Graph, children: Sequence[Child]) -> None:
    """asapc::child([x], [W x], "i") -> the live layer's call on x"""
    for node in list(graph.nodes):
        if node.target is not torch.ops.asapc.child.default:
            continue
        inputs, _, number = node.args
        child = children[int(number)]
        args = tuple(rebuilt(tree, inputs) for tree in child.args)
        kwargs = {name: rebuilt(tree, inputs) for name, tree in child.kwargs.items()}
        with graph.inserting_before(node):
            # A layer that returns a structure: its parts are taken out of it.
            parts = dict(_parts(graph, child.output, graph.call_module(child.name, args, kwargs)))
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise ValueError("a marked layer gives a list")
            index = int(user.args[1])
            if child.gives:
                sizes = [(a, n) for a, n in enumerate(child.gives[index].sizes) if isinstance(n, int)]
                with graph.inserting_before(node):
                    parts[index] = graph.call_function(as_traced, (parts[index], child.name, sizes))
            user.replace_all_uses_with(parts[index])
            graph.erase_node(user)
        graph.erase_node(node)


def as_traced(value: Tensor, name: str, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """The output of a layer, if its axes have these sizes, with which code may compute.

    Raises BranchError.
    """
    for axis, size in sizes:
        if value.shape[axis] != size:
            raise BranchError(f"size {axis} of what its {name} gives == {size}", True)
    return value


def _parts(graph: Graph, tree: Tree, value: Node) -> Iterator[tuple[int, Node]]:
    if isinstance(tree, Leaf):
        yield tree.index, value
    elif isinstance(tree, Group):
        for index, item in enumerate(tree.items):
            key = tree.keys[index] if tree.kind == "dict" else index
            if any(True for _ in leaves(item)):
                yield from _parts(graph, item, graph.call_function(operator.getitem, (value, key)))


def _check(module: nn.Module, graph: Graph, what: str, operators: Mapping[str, Tensor]) -> None:
    """Check that every name in the graph is a weight or a layer of the module or of its operators."""
    fitted = {f"{OPERATORS}.{name}": tensor for name, tensor in operators.items()}
    tensors = {**tensors_of(module), **fitted}
    modules = {name for name, _ in module.named_modules(remove_duplicate=False)}
    for node in graph.nodes:
        if node.op == "call_module" and node.target not in modules:
            raise another_model(f"{what} has no layer {node.target}")
        if node.op != "get_attr":
            continue
        weight, expected = tensors.get(node.target), node.meta.get("val")
        if weight is None or (node.target.startswith(f"{OPERATORS}.") and node.target not in fitted):
            raise another_model(f"{what} has no weight {node.target}")
        if isinstance(expected, Tensor) and weight.shape != expected.shape:
            raise another_model(f"{what}: {node.target} is {[*weight.shape]}, not {[*expected.shape]}")
        if isinstance(expected, Tensor) and node.target in fitted and weight.dtype != expected.dtype:
            raise another_model(f"{what}: {node.target} is {weight.dtype}, not {expected.dtype}")


def another_model(got: str, place: str = "load") -> InputError:
    return InputError(
        f"{place}: the model must be the one that was compiled", got=got,
        help="pass the model, or the factory and arguments, the teacher was built with",
    )  # fmt: skip


def warn_left(left: Mapping[str, str], compiled: Sequence[str]) -> None:
    """Warn of sites that cannot be patched; raise InputError if none can.

    left: the reason by site.  compiled: the sites that are patched.
    """
    if not left:
        return
    text = "; ".join(f"{name}: {reason}" for name, reason in left.items())
    if not compiled:
        raise InputError(
            "load: a live model can be patched where its attention is called as a module", got=text,
            help="load the artefact without model=",
        )  # fmt: skip
    warnings.warn(f"asapc.load: left to the model's own code: {text}", stacklevel=3)
