"""A captured graph as code that runs on a module: what it reads, it reads from the module when it runs.

An fx.GraphModule holds copies of what its graph names. GraphCode holds the graph alone, and the function
made from it takes the module: a weight that was moved, or a layer that was quantised, pruned or wrapped,
is what the next call sees. It pickles and deep-copies.

The trace has constants of its own: dtypes and devices of what forward makes, and numbers that one
dtype holds and another does not. They follow the module to the dtype and device that it is moved to.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_aggregate, map_arg

import asapc.kernels.library as _library  # registers torch.ops.asapc, which graphs call
from asapc.errors import BranchError
from asapc.operators.catalogue import by_name

assert _library is not None
aten = torch.ops.aten

_PLAN = torch.ops.asapc.plan.default
# Nodes that only check the dtype, layout and device of the trace.
_CHECKS = (aten._assert_tensor_metadata.default,)
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default}
_RANGES = {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default}
WIDE = "wide"  # in the meta of a node: in half precision it stays in float32
_KEPT_META = ("site", WIDE)  # what a node keeps of its meta when it is pickled
_numbers = itertools.count()


class GraphCode:
    """graph: takes the call's tensors in order, gives a tuple; get_attr and call_module of the module.

    dtype: of the module's weights when the graph was traced.
    """

    def __init__(self, graph: Graph, dtype: torch.dtype) -> None:
        self.graph = graph
        self.dtype = dtype
        # (place, function) in one value: threads may run on several devices.
        self._current: Any = ((dtype, torch.device("cpu"), None), None)
        self.recompile()

    def recompile(self) -> None:
        """After the graph was edited."""
        self._functions: dict[_Place, Callable[..., Any]] = {}
        self._current = (self._current[0], self._made(self._current[0]))

    def __call__(self, module: nn.Module, flat: Sequence[Any]) -> tuple[Any, ...]:
        """The graph on the tensors of a call, with the module's weights as they are now."""
        now = _place(module, flat)
        place, function = self._current
        if now is not None and now != place:
            function = self._made(now)
            self._current = (now, function)
        return function(module, *flat)

    def _made(self, place: _Place) -> Callable[..., Any]:
        if place not in self._functions:
            self._functions[place] = self.runnable(_moved(self.graph, self.dtype, *place))
        return self._functions[place]

    def runnable(self, graph: Graph) -> Callable[..., Any]:
        """A function of the module and the tensors of a call."""
        return _function(graph)

    def __getstate__(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "place": self._current[0], "nodes": _encoded(self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.dtype, self._current = state["dtype"], (state["place"], None)
        self.graph = _decoded(state["nodes"])
        self.recompile()


def flat_graph(module: GraphModule, rename: Callable[[str], str] = str) -> Graph:
    """The graph of an exported program, without the checks of its trace: tensors in, a tuple out.

    rename: gives the new names of the attributes that it reads.
    """
    graph = Graph()
    nodes: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            (outputs,) = node.args
            outputs = outputs if isinstance(outputs, list | tuple) else (outputs,)
            graph.output(tuple(nodes[value] for value in outputs if isinstance(value, Node)))
        elif node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor):
            if node.users:
                raise ValueError(f"the program reads {node.name}, which is not a tensor")
        elif node.op == "call_module" or node.target in _CHECKS:
            if node.users:
                raise ValueError(f"the program uses {node.name}, which is not an operator")
        else:
            nodes[node] = graph.node_copy(node, lambda n: nodes[n])
            if node.op == "placeholder":  # a name of the user's could be one that Python has
                nodes[node].target = nodes[node].name
            elif node.op == "get_attr":
                nodes[node].target = rename(str(node.target))
            elif node.op == "call_function":
                nodes[node].kwargs = {**node.kwargs, **_unsaid(node)}
    _keep_counts(module, graph, nodes)
    sweep(graph)
    return graph


def _keep_counts(module: GraphModule, graph: Graph, nodes: Mapping[Node, Node]) -> None:
    """arange(n).float() -> f(positions, buffers) + x: f in float32, for bfloat16 has no 257.

    What is computed of sizes, integers and buffers alone is wide from where it is made a float to where
    it meets other data.  nodes: those of the graph by those of the module's.
    """
    known, wide = set[Node](), set[Node]()
    for node in nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            is_known = not isinstance(operator.attrgetter(str(node.target))(module), nn.Parameter)
        elif isinstance(value, Tensor):
            of_known = node.op == "call_function" and known >= {*node.all_input_nodes}
            is_known = of_known or not value.is_floating_point()
        else:
            is_known = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        if not is_known:
            continue
        known.add(node)
        inputs = {x.meta["val"].dtype for x in _tensors(node)}
        counted = inputs <= {torch.int32, torch.int64} if node.target in _CASTS else (
            node.target in _RANGES and node.kwargs.get("dtype") is None)  # fmt: skip
        if _is_single(node) and (counted or wide & {*node.all_input_nodes}):
            wide.add(node)
    users = {user for node in wide for user in node.users if user in nodes}
    if any(user.target is not operator.getitem and _has_an_effect(user) for user in users):
        return  # written in place, where a cast would be another tensor
    narrow = {x for node in wide for x in _tensors(node) if _is_single(x) and x not in wide}
    for one in sorted(wide | narrow):
        inside = {nodes[user] for user in one.users if user in wide}
        outside = {nodes[user] for user in one.users if user not in known and user in nodes}
        with graph.inserting_after(nodes[one]):
            cast = graph.call_function(aten.to.dtype, (nodes[one], torch.float32))
        for user in outside if one in wide else inside:
            user.replace_input_with(nodes[one], cast)
        (nodes[one] if one in wide else cast).meta[WIDE] = True


def _tensors(node: Node) -> list[Node]:
    return [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]


def _is_single(node: Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) is torch.float32


def _unsaid(node: Node) -> dict[str, Any]:
    """The dtype and device of a tensor made from nothing, where the trace left them at their defaults."""
    value, made_by = node.meta.get("val"), node.target
    if not isinstance(made_by, torch._ops.OpOverload) or not isinstance(value, Tensor):
        return {}
    if any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes):
        return {}
    keyword_only = {argument.name for argument in made_by._schema.arguments if argument.kwarg_only}
    named = {name for name, given in node.kwargs.items() if given is not None}
    values = {"dtype": value.dtype, "device": value.device}
    return {name: given for name, given in values.items() if name in keyword_only - named}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All tensors that a graph can read from a module: parameters and buffers, under all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with the prefix, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def traced_inputs(module: GraphModule) -> list[Tensor]:
    """The tensors that an exported program takes, as they are in its trace."""
    return [node.meta["val"] for node in traced_places(module)]


def traced_places(module: GraphModule) -> list[Node]:
    """The placeholders of the tensors that an exported program takes."""
    places = (node for node in module.graph.nodes if node.op == "placeholder")
    return [node for node in places if isinstance(node.meta.get("val"), Tensor)]


def sweep(graph: Graph) -> None:
    """Remove all nodes that nothing uses, except inputs."""
    graph.eliminate_dead_code(_has_an_effect)


def _has_an_effect(node: Node) -> bool:
    target: Any = node.target
    if node.op != "call_function":
        return node.op != "get_attr"
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or not target._schema.returns
    return target is not operator.getitem and getattr(target, "__module__", "") not in (
        "_operator", "math", "torch",
    )  # fmt: skip


def _weights(module: nn.Module) -> Iterable[Any]:
    """The parameters, or what torch.nn.parallel.replicate puts in their place in a replica."""
    if not module.__dict__.get("_is_replica", False):
        return module.parameters()
    formers = (submodule.__dict__.get("_former_parameters", {}) for submodule in module.modules())
    return itertools.chain.from_iterable(former.values() for former in formers)


_Place = tuple[torch.dtype, torch.device, torch.dtype | None]


def _place(module: nn.Module, flat: Sequence[Any]) -> _Place | None:
    """The dtype and device of the module's weights, or of its inputs where it has none, and the dtype of
    autocast where that is on."""
    tensors: Iterable[Any] = itertools.chain(_weights(module), flat)
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            kind = tensor.device.type
            cast = kind != "meta" and torch.is_autocast_enabled(kind)
            return tensor.dtype, tensor.device, torch.get_autocast_dtype(kind) if cast else None
    return None


def _moved(
    graph: Graph, traced: torch.dtype, dtype: torch.dtype, device: torch.device,
    cast: torch.dtype | None = None,
) -> Graph:  # fmt: skip
    """The graph for weights of another dtype, on another device.

    cast: the dtype of autocast, None where that is off. The traced dtype's largest number overflows it.
    Raises BranchError where rounding would decide at which half-step a loop ends early.
    """
    graph = copy.deepcopy(graph)
    narrows = dtype != traced and dtype.itemsize < torch.float32.itemsize
    largest = torch.finfo(traced).max if traced.is_floating_point else math.inf
    limit = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    in_place_of_largest = torch.finfo(cast).max if cast is not None else limit

    def moved(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return dtype if value == traced and not (narrows and WIDE in node.meta) else value
        if isinstance(value, torch.device):
            return device
        if type(value) is float and math.isfinite(value):
            most = in_place_of_largest if abs(value) == largest else limit
            return min(max(value, -most), most)
        return value

    for node in graph.nodes:
        if node.op == "call_function":
            ends = node.target is _PLAN and by_name(_PLAN, node.args)["threshold"] is not None
            if ends and (narrows or cast is not None):
                raise BranchError("a loop that ends early computes in single or double precision", True)
            node.args = map_aggregate(node.args, moved)
            node.kwargs = map_aggregate(node.kwargs, moved)
        if node.target is torch.ops.aten.index_put.default:  # whose values may be a constant that stays
            into, places, values, *rest = node.args
            with graph.inserting_before(node):
                alike = graph.call_function(torch.ops.aten.type_as.default, (values, into))
            node.args = (into, places, alike, *rest)
    return graph


def _function(graph: Graph) -> Callable[..., Any]:
    graph.set_codegen(CodeGen())
    source = graph.python_code("self")
    names: dict[str, Any] = dict(source.globals)
    exec(compile(source.src, f"<asapc graph {next(_numbers)}>", "exec", dont_inherit=True), names)
    return names["forward"]


class _Ref:
    """Stands for a node among the arguments of another."""

    def __init__(self, node: Node) -> None:
        self.name = node.name


def _encoded(graph: Graph) -> list[tuple[Any, ...]]:
    """The nodes of a graph for pickling: operators, which do not pickle, by name."""
    rows = []
    for node in graph.nodes:
        target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target
        meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        args, kwargs = map_arg((node.args, node.kwargs), _Ref)  # type: ignore[arg-type]
        rows.append((node.op, node.name, target, args, kwargs, meta))
    return rows


def _decoded(rows: Sequence[tuple[Any, ...]]) -> Graph:
    """Inverse of _encoded."""
    graph = Graph()
    nodes: dict[str, Node] = {}
    for op, name, target, args, kwargs, meta in rows:
        if op == "call_function" and isinstance(target, str):
            target = operator.attrgetter(target)(torch.ops)
        args, kwargs = map_aggregate(
            (args, kwargs), lambda x: nodes[x.name] if isinstance(x, _Ref) else x
        )
        nodes[name] = graph.create_node(op, target, args, kwargs, name)
        nodes[name].meta.update(meta)
    return graph


Code = GraphModule | GraphCode
"""A graph that runs in a module and can be edited."""
