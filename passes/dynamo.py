"""Dynamo's graphs of torch functions: how they are run, and what their nodes hold."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import symbolic_convert
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from asapc.passes.cut import HALVES

SAME, SAME_HALF = 1e-3, 4e-2  # relative difference up to which numbers are the same; of halves
AUTOCAST = {torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast}
SWITCHES = {torch._C._set_grad_enabled, *AUTOCAST}


class Left(Exception):
    """Why a graph, or a site of it, stays the model's own code."""


def running_forwards() -> Iterator[dict[str, Any]]:
    """What the forwards of modules around here were called with, innermost first: the one that Dynamo
    traces, then those that run. None where no trace of Dynamo's goes on."""
    frame: Any = getattr(symbolic_convert.tls, "current_tx", None)
    running: Any = sys._getframe()
    while frame is not None:
        model, code = frame.f_locals.get("self"), frame.f_code
        own = getattr(model.forward, "__code__", None) if isinstance(model, nn.Module) else None
        same = own is not None and (own.co_filename, own.co_name) == (code.co_filename, code.co_name)
        if same and {*inspect.signature(model.forward).parameters} <= frame.f_locals.keys():
            yield frame.f_locals
        running = frame = running.f_back


def example_of(node: Node) -> Any:
    """What Dynamo traced at a node of its graph."""
    return node.meta.get("example_value")


def storage_of(node: Node) -> Any:
    """The memory of the tensor that was traced at a node; None where that is no tensor."""
    value = example_of(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def autocast_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype that autocast gives the model's own code there."""
    return value.to(dtype)


def number_of(value: Any) -> Any:
    """That of the example.  Raises Left where nobody knows it before the graph runs."""
    if isinstance(value, int | float):
        return value
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or not value.node.has_hint():
        raise Left("it computes with something that is not a tensor, or with a value from its data")
    return value.node.hint


class Exact(Interpreter):
    """Runs a graph without what rounds its numbers."""

    def run_node(self, n: Node) -> Any:
        if n.target is autocast_to:
            return self.env[n.all_input_nodes[0]]
        return None if n.target in AUTOCAST else super().run_node(n)


class Noting(Interpreter):
    """Runs a graph, and notes numbers that tell the tensors of some nodes apart, and the nodes whose
    tensors are changed in place."""

    def __init__(self, graph: GraphModule, wanted: Collection[Node] = ()) -> None:
        super().__init__(graph)
        self.wanted = wanted
        self.digests: dict[Node, tuple[Any, ...]] = {}
        self.changed: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        if not self.wanted:
            return super().run_node(n)
        given = {x: self.env[x]._version for x in n.all_input_nodes if isinstance(self.env[x], Tensor)}
        result = super().run_node(n)
        self.changed |= {x for x, version in given.items() if self.env[x]._version != version}
        if n in self.wanted and isinstance(result, Tensor):
            self.digests[n] = _digest(result)
        return result


class Plain(Noting):
    """Runs Dynamo's graph without switching gradients or autocast.  Numbers that are no sizes are those
    of the example.  sizes: what numbers of the graph are replaced by."""

    sizes: Mapping[int, Any] = MappingProxyType({})

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        given = super().fetch_args_kwargs_from_env(n)
        return map_aggregate(given, lambda x: self.sizes.get(x, x) if type(x) is int else x)

    def run_node(self, n: Node) -> Any:
        if n.target in SWITCHES:
            return None
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            raise Left(f"a part of it is a graph of its own ({n.target})")
        return number_of(example_of(n)) if n.target == "item" else super().run_node(n)


def _digest(value: Tensor) -> tuple[Any, ...]:
    flat = value.detach().flatten().double().nan_to_num(0.0, 0.0, 0.0).clamp(-1e6, 1e6)
    sums = (float(flat.norm()), float(flat.sum()), float(flat[::3].sum()), float(flat[::7].sum()))
    return (value.shape, value.dtype in HALVES, *sums)


def alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two tensors hold the same numbers, by what was noted of them."""
    if one[0] != other[0]:
        return False
    allowed = (SAME_HALF if one[1] or other[1] else SAME) * one[2] + 1e-12
    return all(abs(x - y) <= allowed for x, y in zip(one[2:], other[2:], strict=True))
