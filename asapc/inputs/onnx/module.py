"""An ONNX model as a torch module that evaluates its nodes, so that torch.export can trace it.

Nodes run inside modules named after the scopes they were exported from. A captured graph then knows the
scope of every operator, as for a model written in PyTorch, and the ONNX value it computes.
"""

from __future__ import annotations

import inspect
import itertools
import keyword
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from asapc.errors import InputError
from asapc.inputs.onnx.graph import Filled, Graph, Held, Input, Node
from asapc.inputs.onnx.growth import Guard, allowed_bytes
from asapc.inputs.onnx.host import tensor_of
from asapc.inputs.paths import identifier
from asapc.terminal.printed import first_line

MAX_NESTING = 64  # of modules in modules
MAX_STEPS = 200_000  # nodes of loops and branches that one call runs
VALUES = "onnx_values"  # in node.meta["custom"]: names of the ONNX values that a node computes

Values = MutableMapping[str, Any]


class Scope(nn.Module):
    """A module of the exported model; the caller decides what runs in it."""

    def forward(self, work: Callable[[], None]) -> None:
        work()


class OnnxModule(nn.Module):
    """forward(*inputs) takes the graph's inputs by name and returns its outputs; a single one as it is.

    inputs: as the file declares them.  names: of forward's arguments, in the same order.
    weights: the ONNX name of every parameter and buffer.  tensors: see Reader.  Made by onnx_module.
    trusted: the values may take any memory, see asapc.inputs.onnx.growth.
    """

    names: tuple[str, ...] = ()
    trusted = False

    def __init__(
        self, graph: Graph, inputs: Sequence[Input], tensors: Iterable[tuple[str, Tensor, bool]]
    ) -> None:
        super().__init__()
        self.graph, self.inputs = graph, tuple(inputs)
        self.weights: dict[str, str] = {}
        self._keys: list[str] = []
        self._steps = 0
        self._guarded: set[Any] = set()  # shapes of inputs that were run under guard
        for name, tensor, initializer in tensors:
            self._hold(name, tensor, initializer)
        self._blocks: list[tuple[Callable[[Callable[[], None]], None], tuple[Node, ...]]] = []
        for scope, nodes in groupby(graph.nodes, key=lambda node: node.scope):
            self._blocks.append((self._scope(scope), tuple(nodes)))

    def evaluate(self, *inputs: Any) -> Any:
        """The outputs for inputs in the graph's order."""
        outputs = self.values(inputs, self.graph.outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def values(self, inputs: Sequence[Any], wanted: Sequence[str]) -> list[Tensor]:
        """The tensors of the named values, of outputs or of nodes in between.

        Raises ValueError for inputs of another shape than the file declares, InputError where values
        would take too much memory.
        """
        if self.trusted or not all(type(value) is Tensor for value in inputs):  # a trace takes no memory
            return self._values(inputs, wanted)
        shapes = tuple(value.shape for value in inputs)
        if shapes in self._guarded:
            return self._values(inputs, wanted)
        with Guard(allowed_bytes([*self.parameters(), *self.buffers(), *inputs])):
            results = self._values(inputs, wanted)
        self._guarded.add(shapes)
        return results

    def _values(self, inputs: Sequence[Any], wanted: Sequence[str]) -> list[Tensor]:
        self._steps = 0
        env: Values = {}
        kept: dict[str, Any] = dict.fromkeys(wanted)
        for value, tensor in zip(self.inputs, inputs, strict=True):
            _check_shape(value, tensor)
            env[value.name] = tensor if tensor.dtype == value.dtype else tensor.to(value.dtype)
            _tag(value.name, env[value.name])
        self._enter(self.graph, env)
        kept.update({name: env[name] for name in wanted if name in env})
        for scope, nodes in self._blocks:
            scope(partial(self._run, nodes, env, kept))
        return [tensor_of(kept[name]) for name in wanted]

    def _run(self, nodes: Sequence[Node], env: Values, kept: dict[str, Any] | None = None) -> None:
        for node in nodes:
            for name, value in zip(node.outputs, self._results(node, env), strict=True):
                if not name:
                    continue
                env[name] = value
                if kept is not None:
                    _tag(name, value)
                    if name in kept:
                        kept[name] = value
            for name in node.drops:
                env.pop(name, None)

    def _results(self, node: Node, env: Values) -> tuple[Any, ...]:
        values = [None if name is None else env[name] for name in node.inputs]
        bodies = {name: self._body(graph, env) for name, graph in node.subgraphs.items()}
        try:
            result = node.function(*values, **node.attributes, **bodies)
        except InputError:
            raise
        except Exception as error:  # torch raises many types, and the node says more than any of them
            raise RuntimeError(f"{node}: {first_line(error)}") from error
        results = result if isinstance(result, tuple) else (result,)
        if len(results) < len(node.outputs):
            raise RuntimeError(f"{node}: its outputs after the first {len(results)} are not supported")
        return results[: len(node.outputs)]

    def _body(self, graph: Graph, env: Values) -> Callable[..., list[Any]]:
        def body(*inputs: Any) -> list[Any]:
            local: Values = ChainMap(dict(zip(graph.inputs, inputs, strict=True)), env)
            self._enter(graph, local)
            self._steps += len(graph.nodes)
            if self._steps > MAX_STEPS:
                raise ValueError(f"loops of more than {MAX_STEPS} nodes in all are not run")
            self._run(graph.nodes, local)
            return [local[name] for name in graph.outputs]

        return body

    def _enter(self, graph: Graph, env: Values) -> None:
        for name, value in graph.constants.items():
            if isinstance(value, Held):
                value = getattr(self, self._keys[value.key])
            elif isinstance(value, Filled):
                value = torch.full(value.shape, value.number, dtype=value.dtype)
            env[name] = value

    def _hold(self, name: str, tensor: Tensor, initializer: bool) -> None:
        """Register a parameter if it may be a trained weight, and a buffer otherwise, as for a mask: -inf
        where something is hidden, and one value elsewhere."""
        key = f"w_{identifier(name)}"
        if key in self.weights:
            key = next(k for k in (f"{key}_{n}" for n in itertools.count(2)) if k not in self.weights)
        hidden = tensor == -torch.inf
        is_mask = bool(hidden.any()) and tensor[~hidden].unique().numel() <= 1
        if initializer and tensor.is_floating_point() and tensor.numel() > 1 and not is_mask:
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(key, tensor)
        self.weights[key] = name
        self._keys.append(key)

    def _scope(self, path: str) -> Callable[[Callable[[], None]], None]:
        """The module of that path; parts that are attributes of every module get a trailing _."""
        if not path:
            return lambda work: work()
        parent: nn.Module = self
        for part in path.split(".")[:MAX_NESTING]:
            name = re.sub(r"[^A-Za-z0-9_:@+ /-]", "_", part) or "_"
            while name not in parent._modules and hasattr(parent, name):
                name += "_"
            parent = parent._modules.setdefault(name, Scope())  # type: ignore[assignment]
        return parent


def onnx_module(
    graph: Graph, inputs: Sequence[Input], tensors: Iterable[tuple[str, Tensor, bool]]
) -> OnnxModule:
    """An OnnxModule of a new class, whose forward has this graph's arguments in its signature."""
    names: list[str] = []
    for value in inputs:
        name = identifier(value.name)
        while keyword.iskeyword(name) or name in ("self", *names):
            name += "_"
        names.append(name)
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, plain) for name in ("self", *names)])

    def forward(self: OnnxModule, *args: Any, **kwargs: Any) -> Any:
        return self.evaluate(*signature.bind(self, *args, **kwargs).args[1:])

    forward.__signature__ = signature  # type: ignore[attr-defined]
    kind = type("OnnxModule", (OnnxModule,), {"forward": forward, "names": tuple(names)})
    return kind(graph, inputs, tensors)


def value_nodes(graph: GraphModule, module: OnnxModule) -> dict[str, FxNode]:
    """The node of a captured graph that computes each ONNX value: inputs, weights, outputs of nodes.

    Shapes, values inside loops and branches, and values that nothing uses have none. A value that equals
    another one has that one's node.
    """
    nodes: dict[str, FxNode] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr" and str(node.target) in module.weights:
            nodes.setdefault(module.weights[str(node.target)], node)
        for name in (node.meta.get("custom") or {}).get(VALUES, ()):
            nodes[name] = node
    return nodes


def _tag(name: str, value: Any) -> None:
    """While tracing, note in the new graph which ONNX value this is."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(value, Tensor):
        return
    slot = get_proxy_slot(value, mode.tracer, None)
    if slot is not None:
        meta = slot.proxy.node.meta
        custom = dict(meta.get("custom") or {})
        meta["custom"] = {**custom, VALUES: (*custom.get(VALUES, ()), name)}


def _check_shape(value: Input, tensor: Tensor) -> None:
    if value.shape is None:
        return
    sizes = zip(value.shape, tensor.shape, strict=True)
    fits = tensor.dim() == len(value.shape) and all(n is None or int(given) == n for n, given in sizes)
    if not fits:
        declared = ["any" if size is None else size for size in value.shape]
        raise ValueError(
            f"{value.name} must be of shape {declared}, as the file says, not {[*tensor.shape]}; "
            "export the model with a dynamic batch to run it on several examples"
        )
