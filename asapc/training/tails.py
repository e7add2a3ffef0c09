"""Tails: gradients through only the last half-steps of the finite loops.

Back-propagation through a loop of T half-steps costs as much as the loop again, and little gradient
reaches the first half-steps, since a half-step's adjoint contracts. A tail of R half-steps leaves out the
T - R before it. A certified tail is as long as its tolerance requires, separately for every batch and
head, and is the whole loop if scores are too sharp for anything to fade.  See kernels.loop.Tail for what
is certified.
Source: block-wise paper, Propositions 1, 5 and 6, Corollary 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule

from asapc.errors import InputError
from asapc.operators.catalogue import OF_GRADIENTS, OPERATORS, by_name, ordered
from asapc.program import calls
from asapc.program.code import Code
from asapc.program.compiled import Forward
from asapc.training.settings import TOLERANCE, checked_tail

assert calls  # registers the operators
LOOPS = (OPERATORS["sinkhorn"], OPERATORS["banded_sinkhorn"])
TAILED = {operator.overload(dense) for operator in LOOPS for dense in operator.forms}


def tail_gradients(
    model: nn.Module, tail: int | str | None = None, tolerance: float = TOLERANCE
) -> nn.Module:
    """Pass gradients of a loaded model's Sinkhorn layers through only a tail of their loops, in place.

    model: from `asapc.load`, or any module around one.
    tail: a number of half-steps, counted from the end; "certified" for as few as the tolerance allows;
    None for all of them, which is the default of a loaded model.
    tolerance: for a certified tail: the largest part of the gradient of a layer's scores that may be
    omitted, in L1 and for every head, see `asapc.kernels.loop.Tail`.

    Outputs do not change. Layers whose loop is stabilised or runs on given scores keep their full
    gradient, as do amortised layers, which have no loop. On a GPU, a certified tail synchronises after
    every half-step. Returns the model.

    Raises InputError for an invalid tail or tolerance, and if no layer has such a loop.
    """
    most, allowed = checked_tail(tail, tolerance)
    if not set_tail(_codes(model), most, allowed):
        raise InputError(
            "tail_gradients: a model with Sinkhorn layers is needed",
            got=f"{type(model).__name__} without a call of a finite loop",
            help="load a compiled model with asapc.load; amortised layers have no loop to shorten",
        )
    return model


def _codes(model: nn.Module) -> Iterator[Code]:
    """The graphs that run in it."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Forward):
            yield forward.code
        elif isinstance(module, GraphModule):
            yield module


def set_tail(graphs: Iterable[Code], most: int | None, tolerance: float) -> int:
    """The number of calls whose tail was set, in place."""
    count = 0
    for graph in graphs:
        calls = [node for node in graph.graph.nodes if node.target in TAILED]
        for node in calls:
            arguments: dict[str, Any] = {**by_name(node.target, node.args), **node.kwargs}
            tail = dict(zip(OF_GRADIENTS, (most, tolerance), strict=True))
            node.args = ordered(node.target, arguments | tail)
            node.kwargs = {}
        if calls:
            graph.recompile()
        count += len(calls)
    return count
