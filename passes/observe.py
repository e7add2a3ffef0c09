"""Observe: which module was called with what, while a model is traced.

before: an nn.Module that torch.export is about to trace
after:  ModuleCall(name, args, kwargs, output, the graph's nodes of their tensors) for every call of a
        module inside

Every module's inputs and outputs are named in the trace by an operator without a result, and taken out
of the graph again: what is computed stays as it was. Inputs are named before the module runs, so that
what it changes in place is another node.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

import asapc.kernels.library as _library  # registers torch.ops.asapc.seen
from asapc.ir import ModuleCall

assert _library is not None
aten = torch.ops.aten

EagerCall = tuple[tuple[Any, ...], dict[str, Any]]
Leave = Callable[[], object]
STOP = "stop"  # the label of a mark, before its number


def folders(*files: str) -> tuple[str, ...]:
    """What the paths of all files beside each of these begin with."""
    return tuple(f"{Path(file).parent}{os.sep}" for file in files)


class Observer:
    """The calls of one trace.  Calls of calls come before the calls that they are made in."""

    def __init__(self) -> None:
        self._calls: list[ModuleCall] = []  # without nodes
        self._open: list[int] = []
        self.residuals: list[tuple[int, Node]] = []  # (number, node) of what early stops look at

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for name, inner in module.named_modules():
                if isinstance(inner, torch.jit.ScriptModule):
                    continue
                hooked = bool(inner._forward_hooks or inner._forward_pre_hooks)
                # The forward alone, inside all hooks; and together with the module's hooks, outside them.
                for out in (False, True) if hooked else (False,):
                    enter, leave = self._pair(name, out)
                    handle = inner.register_forward_pre_hook(enter, prepend=out, with_kwargs=True)
                    hooks.callback(handle.remove)
                    hooks.callback(inner.register_forward_hook(leave, prepend=not out).remove)
            yield

    def _pair(self, name: str, outside: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._open.append(len(self._calls))
            kept_args, kept_kwargs = _kept((args, kwargs))
            self._calls.append(ModuleCall(name, kept_args, kept_kwargs, None, (), (), 0, 0, outside))
            _see((args, kwargs), f"enter {self._open[-1]}")

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            number = self._open.pop()
            self._calls[number] = replace(self._calls[number], output=_kept(output))
            _see(output, f"leave {number}")

        return enter, leave

    def calls(self, graph: GraphModule) -> tuple[ModuleCall, ...]:
        """The calls that are in the graph; takes all marks out of it, and notes those of early stops."""
        marks: dict[str, tuple[tuple[Node, ...], int]] = {}
        order: list[int] = []
        place = 0
        for node in list(graph.graph.nodes):
            if node.target is torch.ops.asapc.seen.default:
                nodes, label = node.args
                marks[label] = (tuple(nodes), place)
                kind, _, number = label.partition(" ")
                if kind == "leave":
                    order.append(int(number))
                elif kind == STOP:
                    self.residuals.append((int(number), nodes[0]))
                graph.graph.erase_node(node)
            else:
                place += 1
        calls = []
        for number in order:
            entered = marks.get(f"enter {number}")
            if entered is not None:
                (inputs, start), (outputs, end) = entered, marks[f"leave {number}"]
                call = self._calls[number]
                calls.append(replace(call, inputs=inputs, outputs=outputs, start=start, end=end))
        _part_aliases(list(graph.graph.nodes), calls)
        graph.recompile()
        return tuple(calls)


def _part_aliases(nodes: list[Node], calls: list[ModuleCall]) -> None:
    """y = x.float() of a float32 x, within a module: x outside of it is x again, not y.

    Such an operator gives the very tensor that it is given, which the trace calls y from then on,
    wherever it is read. Outside of the module only what it returns can be y. In place.
    """
    order = {node: place for place, node in enumerate(nodes)}
    for number in range(len(calls)):  # inner calls come first
        call = calls[number]
        for node in reversed(nodes[call.start : call.end]):
            if node in call.outputs or not gives_its_input(node):
                continue
            source = node.args[0]
            assert isinstance(source, Node)
            for user in list(node.users):
                if not call.start <= order[user] < call.end:
                    user.replace_input_with(node, source)
            for index, other in enumerate(calls):
                if call.start <= other.start and other.end <= call.end:
                    continue
                inputs, outputs = (
                    tuple(source if end is node else end for end in ends)
                    for ends in (other.inputs, other.outputs)
                )
                calls[index] = replace(other, inputs=inputs, outputs=outputs)


_DROPOUTS = (
    aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)  # fmt: skip
_OFTEN_NOTHING = (
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default,
    aten.contiguous.default, *_DROPOUTS,
)  # fmt: skip


def gives_its_input(node: Node) -> bool:
    """An operator that does nothing to what it is given, as traced."""
    if node.target not in _OFTEN_NOTHING or not isinstance(node.args[0], Node):
        return False
    made, source = node.meta.get("val"), node.args[0].meta.get("val")
    same = isinstance(made, Tensor) and isinstance(source, Tensor) and made.dtype == source.dtype
    return same and (node.target not in _DROPOUTS or node.args[2] is False)


def written(arguments: Any) -> Any:
    """Of a call's arguments, what is another where something has been written into them."""
    leaves, spec = pytree.tree_flatten(arguments)
    tensors = [x for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
    return spec, [*map(id, leaves)], [x._version for x in tensors]


def is_within(name: str, outer: str) -> bool:
    """Whether a module is the outer one or a part of it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def eager_calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, list[EagerCall | None]]:
    """What every module is called with when the model runs, by name; None where it writes into that.

    Some code asks whether it is being traced, and then calls its modules differently. torch's own encoder
    asks whether they have hooks, so forwards are replaced meanwhile, which is also what a patch does.
    """
    calls: dict[str, list[EagerCall | None]] = {}

    def note(name: str, args: Any, kwargs: Any) -> Leave:
        its = calls.setdefault(name, [])
        its.append(_kept((args, kwargs)))
        place, before = len(its) - 1, written((args, kwargs))

        def leave() -> None:
            if before != written((args, kwargs)):
                its[place] = None

        return leave

    with entering(model, note), torch.no_grad():
        model(*args, **kwargs)
    return calls


@contextlib.contextmanager
def entering(model: nn.Module, enter: Callable[[str, Any, Any], Leave | None]) -> Iterator[None]:
    """Call enter(name, args, kwargs) before the forward of each module, and what it gives afterwards."""

    def around(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leave = enter(name, args, kwargs)
        try:
            return forward(*args, **kwargs)
        finally:
            if leave is not None:
                leave()

    with replaced_forwards(model, around):
        yield


@contextlib.contextmanager
def replaced_forwards(model: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """The forward of each module is around(name, forward, ...) for a while; scripts have none."""
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.enter_context(replaced_forward(module, functools.partial(around, name)))
        yield


@contextlib.contextmanager
def replaced_forward(module: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """The module's forward is around(forward, ...) for a while.

    torch's own encoder asks whether its modules have hooks, so that a forward is what is replaced.
    """
    forward, instance_forward = module.forward, vars(module).get("forward")

    @functools.wraps(forward)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    vars(replaced)["before"] = instance_forward  # see program.state.attribute
    vars(module)["forward"] = replaced  # past a __setattr__ that hands it on, or refuses it
    try:
        yield
    finally:
        if vars(module).get("forward") is replaced:  # the module may have set its own meanwhile
            if instance_forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = instance_forward


@contextlib.contextmanager
def builtin_replaced(spaces: Sequence[dict[str, Any]], name: str, value: Any) -> Iterator[None]:
    """A builtin is this value for a while, to the code of these globals that has no name like it."""
    changed = [space for space in spaces if name not in space]
    for space in changed:
        space[name] = value
    try:
        yield
    finally:
        for space in changed:
            space.pop(name, None)


def _see(values: Any, label: str) -> None:
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    if torch._C._functorch.maybe_current_level() is None:  # what a vmap maps is no call
        torch.ops.asapc.seen(tensors, label)


def _kept(values: Any) -> Any:
    """The same in new containers, for a module may change those that it is given."""
    return pytree.tree_map(lambda leaf: leaf, values)
