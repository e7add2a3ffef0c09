"""Calls: reads back the operator calls of a rewritten graph, one for each attention site.

Only a graph says what its sites compute. Calibration, reports and benchmarks get what they need of a site
from here, by its name: `lift` notes it in the call's meta["site"], and a manifest lists the names of each
program's calls.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

import asapc.kernels.library as _library  # registers torch.ops.asapc
from asapc.ir import Program, SiteTensors
from asapc.operators.catalogue import OPERATORS, Operator, by_name, ordered

assert _library is not None
aten = torch.ops.aten

OWN = "asapc_site_"  # before the number of a site, in the names of its tensors
SITE = "site"  # in the meta of an operator call: the name of its site
WRITTEN = "written"  # in the meta of a node that was not captured, but added before matching
SiteFunction = Callable[[SiteTensors, Tensor | None], Tensor]

CALLS: Mapping[Any, tuple[Operator, bool]] = {
    entry.overload(dense): (entry, dense)
    for entry in OPERATORS.values() for dense in entry.forms
}  # fmt: skip


@dataclass(frozen=True)
class Operands:
    """The operator call of one site: its settings by name, its operands as nodes (None if absent).

    q: the scores, where it is given those.
    """

    site: str
    call: Node
    operator: Operator
    settings: Mapping[str, Any]
    q: Node
    k: Node | None = None
    v: Node | None = None
    keep: Node | None = None
    bias: Node | None = None
    query_keep: Node | None = None
    log_mu: Node | None = None
    log_nu: Node | None = None

    @property
    def nodes(self) -> dict[str, Any]:
        """The operands by their names in SiteTensors."""
        return {each.name: getattr(self, each.name) for each in fields(self)[4:]}

    def again(self, graph: Graph, operator: Operator, settings: Mapping[str, Any]) -> Node:
        """Another operator's call on the same operands."""
        operands = {name: getattr(self, name) for name in operator.operands}
        return put_call(graph, operator, self.q, self.k, self.v, {**operands, **settings})


def put_call(
    graph: Graph, operator: Operator, q: Node, k: Node | None, values: Node | None,
    rest: Mapping[str, Any],
) -> Node:  # fmt: skip
    """Add a call to a graph: A v, or the map A if there are no values.  rest: other arguments by name.

    q: the scores, for an operator that takes scores.
    """
    dense = values is None or not operator.applies
    points = dict(zip(operator.points, (q, k), strict=False))
    arguments = {**points, **({} if dense else {"v": values}), **rest}
    target = operator.overload(dense)
    call = graph.call_function(target, ordered(target, arguments))
    if values is None or not dense:
        return call
    return graph.call_function(aten.matmul.default, (call, values))


def put_tensor(graph: GraphModule, index: int, what: str, value: Tensor) -> Node:
    """Add a constant of the index-th site to the graph, as a buffer."""
    name = f"{OWN}{index}_{what}"
    graph.register_buffer(name, value)
    return graph.graph.get_attr(name)


def copied(graph: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A copy that shares parameters but no nodes, and the map from old nodes to new ones."""
    fresh = Graph(tracer_cls=graph.graph._tracer_cls)
    nodes: dict[Node, Node] = {}
    output = fresh.graph_copy(graph.graph, nodes)
    fresh.output(output)
    old_output = graph.graph.output_node()
    fresh.output_node().meta = copy.copy(old_output.meta)
    fresh.set_codegen(copy.copy(graph.graph._codegen))
    return GraphModule(graph, fresh), nodes


def operator_calls(graph: GraphModule) -> list[Operands]:
    """The operator calls of a rewritten graph in graph order, one for each site in it."""
    return [
        _read(node) for node in graph.graph.nodes if node.op == "call_function" and node.target in CALLS
    ]


def _read(node: Node) -> Operands:
    operator, dense = CALLS[node.target]
    settings = by_name(node.target, node.args)
    points = dict(zip("qk", (settings.pop(name) for name in operator.points), strict=False))
    v = None if dense else settings.pop("v")
    operands = {name: settings.pop(name) for name in operator.operands}
    return Operands(str(node.meta.get(SITE, "")), node, operator, settings, **points, v=v, **operands)


def call_of(programs: Sequence[Program], site: str) -> tuple[GraphModule, Operands]:
    """The graph that holds the call of a site, and the call.

    Raises KeyError if no program has one: a site that was left to the teacher's code has no call.
    """
    for program in programs:
        for operands in operator_calls(program.graph):
            if operands.site == site:
                return program.graph, operands
    raise KeyError(site)


def sites_of(program: Program) -> list[str]:
    """The names of the sites with an operator call in a program, in graph order."""
    return [operands.site for operands in operator_calls(program.graph)]


def name_calls(graph: GraphModule, sites: Sequence[str]) -> bool:
    """Name a graph's calls, in graph order; False if there are more or fewer calls than names."""
    calls = operator_calls(graph)
    if len(calls) != len(sites):
        return False
    for operands, site in zip(calls, sites, strict=True):
        operands.call.meta[SITE] = site
    return True


def tapped(lifted: Program, record: Callable[..., None]) -> GraphModule:
    """The lifted graph that also calls record(site, **fields of SiteTensors) at each of its sites.

    None stands for the keys of a site that is given its scores.
    """
    graph, _ = copied(lifted.graph)
    for o in operator_calls(graph):
        with graph.graph.inserting_before(o.call):
            graph.graph.call_function(record, (o.site,), o.nodes)
    graph.recompile()
    return graph


def site_function(
    programs: Sequence[Program], site: str, unit: bool = False, plain: bool = False
) -> SiteFunction:
    """A site by itself, as a function (its tensors, values or None for the map) -> output.

    unit: with an output factor that makes rows sum to 1, and without a logarithm.  plain: runs the plain
    PyTorch reference instead of kernels.
    """
    graph, o = call_of(programs, site)
    settings = dict(o.settings)
    if unit:
        factor = settings["output_factor"]
        settings["output_factor"] = 1.0 if isinstance(factor, float) else [1.0, 1.0, 0.0, 0.0]
        settings |= {"log": False} if "log" in settings else {}
    mass = _row_masses(o)
    shared = mass is None and _has_share(o)

    def run(t: SiteTensors, v: Tensor | None) -> Tensor:
        value = _evaluation(graph, o, t)
        result = apply_operator(o.operator, t, v, map_arg(settings, value), plain)
        if mass is not None:
            result = (result * value(mass)[..., None]).to(result.dtype)
        return times_share(result, t.keep) if shared else result

    return run


def apply_operator(
    operator: Operator, t: SiteTensors, v: Tensor | None, settings: Mapping[str, Any], plain: bool = False
) -> Tensor:
    """An operator on a site's tensors: A v, or the map A if v is None.  plain: its reference.

    An operator that takes scores always returns its plan.
    """
    dense = v is None or not operator.applies
    call = operator.reference_of(dense) if plain else operator.overload(dense)
    operands = {name: getattr(t, name) for name in operator.operands}
    values = {} if dense else {"v": v}
    points = dict(zip(operator.points, (t.q, t.k), strict=False))
    result: Tensor = call(**points, **values, **operands, **settings)
    return result @ v if dense and v is not None and not operator.scored else result


def times_share(result: Tensor, keep: Tensor | None) -> Tensor:
    """result [B, ...] times each example's share of active keys; keep: [B, M] or None for all."""
    if keep is None:
        return result
    share = keep.mean(1, dtype=torch.float32).view(-1, *[1] * (result.dim() - 1))
    return (result * share).to(result.dtype)


def _has_share(o: Operands) -> bool:
    """Whether the call's result is multiplied by the mean of its mask, see ir.Distilled."""
    for user in o.call.users:
        share, averaged = user.args[1] if user.target is aten.mul.Tensor else None, False
        while isinstance(share, Node) and share is not o.keep:
            averaged = averaged or share.target is aten.mean.dim
            share = share.args[0] if share.args else None
        if averaged and share is o.keep:
            return True
    return False


def _row_masses(o: Operands) -> Node | None:
    """The masses that multiply the rows of the call's result, if they come with its key dual."""
    dual = o.settings.get("target_dual")
    if not isinstance(dual, Node) or dual.target is not operator.getitem:
        return None
    return next(node for node in dual.all_input_nodes[0].users if node.args[1] == 1)


DUAL_SETTINGS = ("source_dual", "target_dual")


def predicted_duals(
    programs: Sequence[Program], site: str
) -> tuple[Callable[[SiteTensors], Tensor] | None, Callable[[SiteTensors], Tensor] | None]:
    """(source, key) duals that a site's call starts from, in score coordinates; None if not predicted."""
    graph, o = call_of(programs, site)

    def predicted(dual: Node | None) -> Callable[[SiteTensors], Tensor] | None:
        return None if dual is None else lambda t: _evaluation(graph, o, t)(dual)

    source, key = map(o.settings.get, DUAL_SETTINGS)
    return predicted(source), predicted(key)


def _evaluation(graph: GraphModule, o: Operands, t: SiteTensors) -> Callable[[Node], Any]:
    """The value of a node that depends only on a call's operands and the graph's tensors."""
    operands = {name: node for name, node in o.nodes.items() if name != "v" and node is not None}
    values: dict[Node, Any] = {node: getattr(t, name) for name, node in operands.items()}

    def value(node: Node) -> Any:
        if node not in values and node.op == "get_attr":
            values[node] = attribute(graph, node)
        elif node not in values:
            args, kwargs = map_arg((node.args, node.kwargs), value)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values[node]

    return value


def attribute(graph: GraphModule, node: object) -> Tensor:
    """The tensor of a get_attr node."""
    assert isinstance(node, Node) and node.op == "get_attr"
    value = operator.attrgetter(str(node.target))(graph)
    assert isinstance(value, Tensor)
    return value
