"""Rewrite: operator calls become cheaper ones.

before: torch.ops.asapc.sinkhorn(q, k, v, keep, bias, ...)
after:  torch.ops.asapc.asap(q, k, v, keep, bias, dual, ...)      a predicted dual
        torch.ops.asapc.lot(...), torch.ops.asapc.esp_hard(...)   distilled
        torch.ops.asapc.hybrid_lot(...)                           distilled, beside softmax rows
before: torch.ops.asapc.esp_soft(...)
after:  torch.ops.asapc.esp_hard(...)                             exact sorting
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.features.predictor import Amortised, DualPredictor
from asapc.ir import Distilled, Program
from asapc.operators.catalogue import OPERATORS, by_name, ordered
from asapc.passes.verify import check_graph
from asapc.program.calls import CALLS, SITE, Operands, copied, operator_calls, put_tensor, sites_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Hardened:
    """A soft sliced plan with its sorts made exact, or as its released code hardens it."""

    kind: Literal["exact", "released"] = "exact"


Replacement = Amortised | Hardened | Distilled


def rewritten_programs(lifted: Sequence[Program], choices: Mapping[str, Replacement]) -> list[Program]:
    """The lifted programs with the call of every named site replaced by what is chosen for it."""
    programs = []
    for program in lifted:
        if choices.keys() & set(sites_of(program)):
            graph, _ = copied(program.graph)
            for index, operands in enumerate(operator_calls(graph)):
                if operands.site in choices:
                    _replace(graph, index, operands, choices[operands.site])
            graph.recompile()
            check_graph(graph, "rewrite", list(choices))
            program = replace(program, graph=graph)
        programs.append(program)
    return programs


def _replace(graph: GraphModule, index: int, operands: Operands, choice: Replacement) -> None:
    with graph.graph.inserting_before(operands.call):
        if isinstance(choice, Amortised):
            replacement = _amortised_call(graph, index, operands, choice)
        elif isinstance(choice, Hardened):
            exact = choice.kind == "exact"
            name = "esp_hard" if exact else "esp_released_hard"
            settings = _without_temperature(operands) if exact else operands.settings
            replacement = operands.again(graph.graph, OPERATORS[name], settings)
        else:
            replacement = _distilled_call(graph, index, operands, choice)
    operands.call.replace_all_uses_with(replacement)
    graph.graph.erase_node(operands.call)
    for node in graph.graph.nodes:
        if node.target in CALLS:
            node.meta.setdefault(SITE, operands.site)  # the others have theirs


def shortened_programs(lifted: Sequence[Program], half_steps: int) -> list[Program]:
    """The lifted programs with every loop cut to `half_steps`, the baseline of every study."""
    shortened = []
    for program in lifted:
        graph, _ = copied(program.graph)
        for operands in operator_calls(graph):
            if operands.operator.name == "sinkhorn":
                set_argument(operands.call, "half_steps", half_steps)
        graph.recompile()
        shortened.append(replace(program, graph=graph))
    return shortened


def set_argument(call: Node, name: str, value: Any) -> None:
    """Give an operator call another value of one argument, in place."""
    call.args = ordered(call.target, by_name(call.target, call.args) | {name: value})


def _without_temperature(o: Operands) -> dict[str, Any]:
    return {name: x for name, x in o.settings.items() if name != "softsort_temperature"}


def soft_calls(graph: GraphModule) -> list[Operands]:
    """The calls that sort softly, in graph order."""
    return [o for o in operator_calls(graph) if o.operator.name == "esp_soft"]


def temperature_of(o: Operands) -> float:
    """t of a soft call."""
    value = o.settings["softsort_temperature"]
    assert isinstance(value, float)
    return value


def heat(graph: GraphModule, temperatures: Sequence[float]) -> None:
    """Set the temperature of every soft call, in place."""
    for o, t in zip(soft_calls(graph), temperatures, strict=True):
        set_argument(o.call, "softsort_temperature", float(t))
    graph.recompile()


def harden(graph: GraphModule) -> None:
    """Every soft sort becomes exact, in place: nodes keep their names, as a signature may need them."""
    for o in soft_calls(graph):
        exact = o.again(graph.graph, OPERATORS["esp_hard"], _without_temperature(o))
        o.call.target, o.call.args = exact.target, exact.args
        graph.graph.erase_node(exact)
    graph.recompile()


def _distilled_call(graph: GraphModule, index: int, o: Operands, choice: Distilled) -> Node:
    settings = {
        name: put_tensor(graph, index, f"{choice.operator}_{name}", x) if isinstance(x, Tensor) else x
        for name, x in choice.settings.items()
    }
    call = graph.graph.call_function
    result = o.again(graph.graph, OPERATORS[choice.operator], settings)
    if not choice.share:
        return result
    active = call(aten.to.dtype, (o.keep, torch.float32))  # a mean with a dtype is lost in ONNX
    share = call(aten.mean.dim, (active, [1], True))  # [B, 1]
    for _ in range(2):
        share = call(aten.unsqueeze.default, (share, -1))
    return call(aten.type_as.default, (call(aten.mul.Tensor, (result, share)), result))


def _amortised_call(graph: GraphModule, index: int, o: Operands, amortised: Amortised) -> Node:
    multiplier = float(o.settings["score_multiplier"])
    duals: dict[str, Node | None] = {"source": None, "target": None}
    mass: Node | None = None
    for predictor in amortised.predictors:
        call = _dual_call(graph, index, o, predictor, multiplier, amortised.plan.rescaled)
        if amortised.plan.rescaled:
            mass = graph.graph.call_function(operator.getitem, (call, 1))
            call = graph.graph.call_function(operator.getitem, (call, 0))
        duals[predictor.side] = call
    if amortised.intercept is not None:
        shift = put_tensor(graph, index, "intercept", amortised.intercept[:, None])
        duals["source"] = graph.graph.call_function(aten.add.Tensor, (duals["source"], shift))
    settings = amortised.settings(duals["source"], duals["target"], o.settings)
    result = o.again(graph.graph, OPERATORS["asap"], settings)
    if mass is None:
        return result
    column = graph.graph.call_function(aten.unsqueeze.default, (mass, -1))
    scaled = graph.graph.call_function(aten.mul.Tensor, (result, column))
    # Masses are float32 or float64; the site keeps its own dtype.
    return graph.graph.call_function(aten.type_as.default, (scaled, result))


def _dual_call(
    graph: GraphModule, index: int, o: Operands, predictor: DualPredictor, multiplier: float, mass: bool
) -> Node:
    def constant(what: str, value: Tensor) -> Node:
        return put_tensor(graph, index, f"{predictor.side}_{what}", value)

    arguments = predictor.arguments(multiplier, mass)
    parameters = [constant(f"parameter_{i}", tensor) for i, tensor in enumerate(arguments["parameters"])]
    coefficients = constant("coefficients", arguments["coefficients"])
    arguments |= {"parameters": parameters, "coefficients": coefficients}
    target = (torch.ops.asapc.dual_and_row_mass if mass else torch.ops.asapc.dual).default
    tensors = {"q": o.q, "k": o.k, "keep": o.keep, "bias": o.bias}
    return graph.graph.call_function(target, ordered(target, {**tensors, **arguments}))
