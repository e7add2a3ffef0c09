"""Repeated: of modules that are alike, the first is traced, and every other is a copy of its nodes.

before: twelve encoder layers of one class, with the same settings and weights of the same shapes
after:  the first was run; the nodes of the eleven others are the same, with their own inputs and weights

torch.export takes about 2 ms for a node, and a half-step has several: so what a trace takes grows with
the half-steps of one layer alone.

Alike: of the same class all the way down, with equal settings, called with tensors of the same sizes and
types. Not copied: what asks for values of the data, what keeps something for later, what writes to its
inputs or weights, and what reads a tensor that is neither. capture holds the graph against the module.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node, Proxy
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from asapc.passes.branches import Trace
from asapc.passes.observe import Observer
from asapc.passes.state import Observed
from asapc.program.code import tensors_of

_OWN = ("_parameters", "_buffers", "_modules", "forward")  # told apart, or put there by a trace
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


class _Same:
    """An object that equals itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass
class _Sample:
    """A call that was traced: its nodes, and where those come from that they read from outside."""

    name: str
    stack: list[str]  # of modules around it, as the trace calls them, and itself
    nodes: list[Node]
    given: list[Any]  # leaves of its arguments
    own: dict[str, Tensor]  # weights, by their names in the module
    sources: dict[Node, tuple[str, Any]]  # outside of it: ("given", place) or ("own", name)
    returned: list[Any]
    spec: pytree.TreeSpec
    first_call: int
    calls: int


@dataclass
class Repeated:
    """The copies of one trace.  copied: how many modules were not run."""

    trace: Trace
    observer: Observer
    observed: Observed = field(default_factory=Observed)
    copied: int = 0
    _samples: dict[Any, _Sample | None] = field(default_factory=dict)

    @contextlib.contextmanager
    def tracing(self, root: nn.Module) -> Iterator[None]:
        """While torch.export traces the model, whose hooks are those of its user."""
        chosen = _alike(root)
        for name, module in chosen:
            vars(module)["forward"] = self._forward(name, module)
        try:
            yield
        finally:
            for _, module in chosen:
                del vars(module)["forward"]

    def _forward(self, name: str, module: nn.Module) -> Callable[..., Any]:
        own = module.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            mode = proxy_tensor.get_proxy_mode()
            if mode is None:  # the model runs, and is not traced
                return own(*args, **kwargs)
            given, spec = pytree.tree_flatten((args, kwargs))
            key = (self._state(name, module), spec, _described(given))
            if key in self._samples:
                sample = self._samples[key]
                if sample is None:
                    return own(*args, **kwargs)
                self.copied += 1
                return _Copy(mode.tracer, self.observer, sample, name, module, given).made()
            return self._traced(mode.tracer, key, name, module, own, args, kwargs)

        vars(forward)["before"] = None  # see program.state.attribute
        return forward

    def _state(self, name: str, module: nn.Module) -> Any:
        """With what its code can read besides, at this moment: a model may set it for each layer."""
        parts = module.named_modules(prefix=name)
        reads = [self.observed.reads(part, inner).items() for part, inner in parts]
        return _state(module), tuple(map(tuple, reads))

    def _traced(
        self, tracer: Any, key: Any, name: str, module: nn.Module, own: Callable[..., Any],
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Run the module; keep what was traced, if another could be a copy of it."""
        given = pytree.tree_leaves((args, kwargs))
        weights = tensors_of(module)
        written = [_node_of(x, tracer) for x in (*given, *weights.values())]
        before = set(tracer.graph.nodes)
        asked, first_call = self.trace.asked, self.observer.count
        self._samples[key] = None
        output = own(*args, **kwargs)
        returned, spec = pytree.tree_flatten(output)
        nodes = [node for node in tracer.graph.nodes if node not in before]
        after = pytree.tree_leaves((args, kwargs))
        unchanged = (
            self.trace.asked == asked
            and len(after) == len(given) and all(map(operator.is_, given, after))
            and written == [_node_of(x, tracer) for x in (*given, *weights.values())]
            and key[0] == self._state(name, module)
        )  # fmt: skip
        sources = _sources(tracer, nodes, given, weights)
        known = {*nodes, *(sources or ())}
        if unchanged and sources is not None and all(_is_copied(x, tracer, known) for x in returned):
            # sizes that the module found to be equal are one from now on
            now = (key[0], key[1], _described(given))
            self._samples[key] = self._samples[now] = _Sample(
                name, _paths(tracer), nodes, given, weights, sources, returned, spec,
                first_call, self.observer.count - first_call,
            )  # fmt: skip
        return output


@dataclass
class _Copy:
    tracer: Any
    observer: Observer
    sample: _Sample
    name: str
    module: nn.Module
    given: Sequence[Any]

    def made(self) -> Any:
        """What the module would return, in fake tensors that the trace knows."""
        nodes = self._nodes()
        sample, tensors = self.sample, {}
        for mine, theirs in zip(self.given, sample.given, strict=True):
            if isinstance(theirs, Tensor):
                tensors[id(theirs)] = mine
        weights = tensors_of(self.module)
        tensors |= {id(theirs): weights[name] for name, theirs in sample.own.items()}

        def returned(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in tensors:
                with proxy_tensor.disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
                    made = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=value.device
                    )
                proxy = Proxy(nodes[_node_of(value, self.tracer)], self.tracer)
                proxy_tensor.track_tensor_tree(made, proxy, constant=None, tracer=self.tracer)
                tensors[id(value)] = made
            return tensors[id(value)]

        return pytree.tree_unflatten([returned(value) for value in sample.returned], sample.spec)

    def _nodes(self) -> dict[Node, Node]:
        """The new nodes, by those they are copies of."""
        sample, tracer = self.sample, self.tracer
        weights = tensors_of(self.module)
        origin: dict[str, dict[Any, Any]] = {"given": dict(enumerate(self.given)), "own": weights}
        nodes = {
            node: _node_of(origin[kind][place], tracer)
            for node, (kind, place) in sample.sources.items()
        }
        numbers = self.observer.repeat(sample.first_call, sample.calls, sample.name, self.name)
        stack = {
            key: (path, made if isinstance(made, str) else f"{made.__module__}.{made.__qualname__}")
            for key, (path, made) in tracer.module_stack.items()
        }
        for node in sample.nodes:
            new = tracer.graph.node_copy(node, lambda source: nodes.get(source, source))
            new.meta = dict(node.meta)
            inner = list(node.meta["nn_module_stack"].items())[len(sample.stack) :]
            new.meta["nn_module_stack"] = stack | {
                self._renamed(key): (self._renamed(path), made) for key, (path, made) in inner
            }
            numbers(new)
            nodes[node] = new
        return nodes

    def _renamed(self, path: str) -> str:
        before, after = self.sample.stack[-1], _paths(self.tracer)[-1]
        return f"{after}{path[len(before) :]}" if path.startswith(f"{before}.") else path


def _alike(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules with parts, of which another is alike, none around the other."""
    everywhere = list(root.named_modules(remove_duplicate=False))
    if len({module for _, module in everywhere}) < len(everywhere):
        return []  # torch.export names modules that are in two places by the way it came
    untouched = {module: _is_untouched(module) for _, module in everywhere}
    groups: dict[Any, list[tuple[str, nn.Module]]] = {}
    for name, module in everywhere:
        if name and module._modules and all(untouched[inner] for inner in module.modules()):
            groups.setdefault(_state(module), []).append((name, module))
    return [one for group in groups.values() if len(group) > 1 for one in group]


def _is_untouched(module: nn.Module) -> bool:
    """Neither compiled nor hooked, with the forward of its class."""
    hooked = any(vars(module).get(name) for name in _HOOKS)
    return not (hooked or "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule))


def _state(module: nn.Module) -> Any:
    """Equal for modules that compute the same of the same inputs, but for the values of their weights."""
    settings = tuple(
        (name, _setting(value)) for name, value in sorted(vars(module).items())
        if name not in _OWN and not name.endswith("_hooks") and not name.startswith("_forward_hooks")
        and not name.startswith("_forward_pre_hooks")
    )  # fmt: skip
    weights = tuple(
        (name, None if x is None else (*_described([x]), x.requires_grad))
        for name, x in (*module._parameters.items(), *module._buffers.items())
    )
    inner = tuple((name, None if x is None else _state(x)) for name, x in module._modules.items())
    return type(module), settings, weights, inner


def _setting(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), repr(value) if isinstance(value, float) else value
    if type(value) in (tuple, list):
        return type(value), tuple(_setting(x) for x in value)
    if type(value) is dict:
        return dict, tuple((_setting(key), _setting(x)) for key, x in value.items())
    if type(value) is set or type(value) is frozenset:
        return type(value), frozenset(_setting(x) for x in value)
    return _Same(value)


def _described(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Equal for leaves of the same kinds, sizes and layouts, the same of which are one tensor."""
    first: dict[int, int] = {}
    found: list[Any] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            sizes = (*leaf.shape, *leaf.stride(), leaf.storage_offset())
            told = (leaf.dtype, leaf.device, leaf.layout, *map(_size, sizes))
            found.append((*told, first.setdefault(id(leaf), place)))
        else:
            found.append(_size(leaf) if isinstance(leaf, torch.SymInt) else _setting(leaf))
    return tuple(found)


def _size(size: Any) -> Any:
    return str(size.node.expr) if isinstance(size, torch.SymInt) else size


def _paths(tracer: Any) -> list[str]:
    """Of the modules that the trace is in, outermost first."""
    return [path for path, _ in tracer.module_stack.values()]


def _node_of(value: Any, tracer: Any) -> Any:
    """Of a tensor, as the trace has it now; None for what is none of its tensors."""
    if not isinstance(value, Tensor):
        return None
    slot = proxy_tensor.get_proxy_slot(value, tracer, None)
    return None if slot is None else slot.proxy.node


def _sources(
    tracer: Any, nodes: Sequence[Node], given: Sequence[Any], weights: dict[str, Tensor]
) -> dict[Node, tuple[str, Any]] | None:
    """Where the nodes' inputs come from; None where one has another source, or sizes are of the data.

    Sizes are the same wherever they come from.
    """
    known: dict[Node, tuple[str, Any]] = {}
    for kind, values in (("own", weights.items()), ("given", enumerate(given))):
        for place, value in values:
            node = _node_of(value, tracer)
            if node is not None:
                known.setdefault(node, (kind, place))
    inside = set(nodes)
    found: dict[Node, tuple[str, Any]] = {}
    for node in nodes:
        value = node.meta.get("val")
        if value is not None and free_unbacked_symbols(pytree.tree_leaves(value)):
            return None
        for source in node.all_input_nodes:
            if source in inside or isinstance(source.meta.get("val"), torch.SymInt):
                continue
            if source not in known:
                return None
            found[source] = known[source]
    return found


def _is_copied(value: Any, tracer: Any, known: set[Node]) -> bool:
    """Whether a returned leaf can be made for a copy: a tensor of the nodes, or no tensor."""
    if isinstance(value, Tensor):
        return _node_of(value, tracer) in known
    return isinstance(value, (*_PLAIN, torch.SymInt))
