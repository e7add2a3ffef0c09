"""Calls: the operator calls of a rewritten graph, one for each attention site, read back.

A graph is the one place that says what its sites compute. What calibration, reports and benchmarks
need of a site, they get from here, by the site's name: `lift` notes it in the call's meta["site"], and
a manifest lists the names of each program's calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import asapc.operators as _operators  # registers torch.ops.asapc
from asapc.ir import Program, SiteTensors
from asapc.operators import asap as asap_meaning
from asapc.operators import esp as esp_meaning
from asapc.operators import lot as lot_meaning
from asapc.operators import sinkhorn as sinkhorn_meaning
from asapc.operators import stabilised as stabilised_meaning
from asapc.passes.lift import SITE, copied

assert _operators is not None
aten = torch.ops.aten

SiteFunction = Callable[[SiteTensors, Tensor | None], Tensor]


@dataclass(frozen=True)
class Form:
    """How an operator is called: (q, k, [v unless dense], *operands, *settings).

    operands: names of what a site sees besides q and k, as in SiteTensors.
    """

    operator: str
    operands: tuple[str, str]
    apply: Callable[..., Tensor] | None
    dense: Callable[..., Tensor]
    plain_dense: Callable[..., Tensor]
    plain_apply: Callable[..., Tensor] | None
    is_dense: bool


def _forms() -> dict[Any, Form]:
    ops, bias, masks = torch.ops.asapc, ("keep", "bias"), ("keep", "query_keep")
    forms = {}
    for name, operands, meaning in (
        ("sinkhorn", bias, sinkhorn_meaning), ("asap", bias, asap_meaning),
        ("stabilised_sinkhorn", bias, stabilised_meaning),
        ("esp_soft", masks, esp_meaning), ("esp_hard", masks, esp_meaning),
        ("esp_released_hard", masks, esp_meaning), ("lot", masks, lot_meaning),
    ):  # fmt: skip
        has_apply = name != "esp_released_hard"
        apply = getattr(ops, name).default if has_apply else None
        dense = getattr(ops, f"{name}_attention").default
        plain = getattr(meaning, f"{name}_attention"), getattr(meaning, name) if has_apply else None
        forms[dense] = Form(name, operands, apply, dense, *plain, True)
        if apply is not None:
            forms[apply] = Form(name, operands, apply, dense, *plain, False)
    return forms


FORMS = _forms()


@dataclass(frozen=True)
class Operands:
    """The operator call of one site, with its operands as graph nodes (None if absent)."""

    site: str
    call: Node
    q: Node
    k: Node
    values: Node | None
    keep: Node | None
    bias: Node | None
    query_keep: Node | None
    settings: tuple[Any, ...]


def operator_calls(graph: GraphModule) -> list[Operands]:
    """The operator calls of a rewritten graph in graph order, one for each site in it."""
    found = []
    for node in graph.graph.nodes:
        form = FORMS.get(node.target) if node.op == "call_function" else None
        if form is None:
            continue
        start = 2 if form.is_dense else 3
        own = dict(zip(form.operands, node.args[start : start + 2], strict=True))
        nodes = {name: x if isinstance(x, Node) else None for name, x in own.items()}
        found.append(
            Operands(
                str(node.meta.get(SITE, "")), node, node.args[0], node.args[1],
                None if form.is_dense else node.args[2],
                nodes["keep"], nodes.get("bias"), nodes.get("query_keep"),
                tuple(node.args[start + 2 :]),
            )
        )  # fmt: skip
    return found


def call_of(programs: Sequence[Program], site: str) -> tuple[GraphModule, Operands]:
    """The graph that holds the call of a site, and the call.

    Raises KeyError where no program has one: a site that was left to the teacher's code has no call.
    """
    for program in programs:
        for operands in operator_calls(program.graph):
            if operands.site == site:
                return program.graph, operands
    raise KeyError(site)


def sites_of(program: Program) -> list[str]:
    """The names of the sites that a program calls operators for, in graph order."""
    return [operands.site for operands in operator_calls(program.graph)]


def name_calls(graph: GraphModule, sites: Sequence[str]) -> bool:
    """Note the names of a graph's calls, in graph order; False where there are more or fewer calls."""
    calls = operator_calls(graph)
    if len(calls) != len(sites):
        return False
    for operands, site in zip(calls, sites, strict=True):
        operands.call.meta[SITE] = site
    return True


def argument_place(operator: Any, name: str) -> int:
    """Where an operator's argument of this name stands."""
    return [argument.name for argument in operator._schema.arguments].index(name)


def tapped(lifted: Program, record: Callable[..., None]) -> GraphModule:
    """The lifted graph that also calls record(site, *fields of SiteTensors) at each of its sites."""
    graph, _ = copied(lifted.graph)
    for o in operator_calls(graph):
        with graph.graph.inserting_before(o.call):
            seen = (o.site, o.q, o.k, o.keep, o.bias, o.query_keep, o.values)
            graph.graph.call_function(record, seen)
    graph.recompile()
    return graph


def site_function(
    programs: Sequence[Program], site: str, unit: bool = False, plain: bool = False
) -> SiteFunction:
    """A site by itself: (what it sees, values or None for the map) -> output.

    unit: with an output factor that makes rows sum to 1.  plain: the operator's plain PyTorch meaning
    instead of its kernels.
    """
    graph, o = call_of(programs, site)
    form = FORMS[o.call.target]
    settings = [attribute(graph, x) if isinstance(x, Node) and form.operator != "asap" else x
                for x in o.settings]  # fmt: skip
    if unit:
        factor = argument_place(o.call.target, "output_factor") - len(o.call.args)
        settings[factor] = 1.0 if isinstance(settings[factor], float) else [1.0, 1.0, 0.0, 0.0]
    if form.operator == "asap":
        return _amortised(graph, o, settings)
    dense, apply = (form.plain_dense, form.plain_apply) if plain else (form.dense, form.apply)
    shared = _has_share(o)

    def direct(t: SiteTensors, v: Tensor | None) -> Tensor:
        own = [getattr(t, name) for name in form.operands]
        if v is None or apply is None:
            result = dense(t.q, t.k, *own, *settings)
            result = result if v is None else result @ v
        else:
            result = apply(t.q, t.k, v, *own, *settings)
        return times_share(result, t.keep) if shared else result

    return direct


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


def _amortised(graph: GraphModule, o: Operands, settings: Sequence[Any]) -> SiteFunction:
    source, key = (_predicted(graph, node) for node in o.settings[:2])
    rescaled = _is_rescaled(o)

    def amortised(t: SiteTensors, v: Tensor | None) -> Tensor:
        f, g = source(t) if source else None, key(t) if key else None
        duals = (None if f is None else f[0], None if g is None else g[0])
        if v is None:
            out = torch.ops.asapc.asap_attention(t.q, t.k, t.keep, t.bias, *duals, *settings[2:])
        else:
            out = torch.ops.asapc.asap(t.q, t.k, v, t.keep, t.bias, *duals, *settings[2:])
        result: Tensor = out
        if rescaled and g is not None and g[1] is not None:
            result = (out * g[1][..., None]).to(out.dtype)
        return result

    return amortised


def predicted_duals(
    programs: Sequence[Program], site: str
) -> tuple[Callable[[SiteTensors], Tensor] | None, Callable[[SiteTensors], Tensor] | None]:
    """(source, key) duals a site's call starts from, in score coordinates; None where not predicted."""
    graph, o = call_of(programs, site)
    if FORMS[o.call.target].operator != "asap":
        return None, None
    source, key = (_predicted(graph, node) for node in o.settings[:2])
    return (
        None if source is None else (lambda t: source(t)[0]),
        None if key is None else (lambda t: key(t)[0]),
    )


def _predicted(
    graph: GraphModule, node: Any
) -> Callable[[SiteTensors], tuple[Tensor, Tensor | None]] | None:
    """What a dual operand of an ASAP call computes: the dual, and row masses where they come along."""
    if node is None:
        return None
    shift: Tensor | None = None
    if node.target is aten.add.Tensor:
        node, shift = node.args[0], attribute(graph, node.args[1])
    with_mass = node.target is operator.getitem
    call = node.args[0] if with_mass else node
    parameters = [attribute(graph, item) for item in call.args[4]]
    coefficients, settings = attribute(graph, call.args[5]), call.args[6:]

    def predict(t: SiteTensors) -> tuple[Tensor, Tensor | None]:
        arguments = (t.q, t.k, t.keep, t.bias, parameters, coefficients, *settings)
        if with_mass:
            dual, mass = torch.ops.asapc.dual_and_row_mass(*arguments)
            return dual, mass
        dual = torch.ops.asapc.dual(*arguments)
        return (dual if shift is None else dual + shift), None

    return predict


def _is_rescaled(o: Operands) -> bool:
    """Whether the key dual of an ASAP call comes with row masses that multiply its result."""
    key = o.settings[1]
    return isinstance(key, Node) and key.target is operator.getitem


def attribute(graph: GraphModule, node: object) -> Tensor:
    """The tensor of a get_attr node."""
    assert isinstance(node, Node) and node.op == "get_attr"
    value = operator.attrgetter(str(node.target))(graph)
    assert isinstance(value, Tensor)
    return value
