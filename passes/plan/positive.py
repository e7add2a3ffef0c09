"""Positive: what is a tensor of a graph nowhere less than, by how it is made? Is it nowhere negative?

A loop of sums may work on any kernel K >= 0 as on exp(S), S = log K. What the data shows is not enough
for that: `x + 1` is positive on small data, and its logarithm is NaN on larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from asapc.passes.cut import is_tensor
from asapc.passes.products import SQUEEZES, VIEWS

aten = torch.ops.aten

# The least value of functions of anything.
_LEAST: Mapping[Any, float] = {
    aten.exp.default: 0.0, aten.softmax.int: 0.0, aten._softmax.default: 0.0, aten.sigmoid.default: 0.0,
    aten.relu.default: 0.0, aten.softplus.default: 0.0, aten.abs.default: 0.0, aten.sqrt.default: 0.0,
    aten.square.default: 0.0, aten.tanh.default: -1.0, aten.cos.default: -1.0,
    aten.sin.default: -1.0, aten.cosh.default: 1.0, aten.relu6.default: 0.0,
    aten.hardsigmoid.default: 0.0, aten._cdist_forward.default: 0.0, aten.cdist.default: 0.0,
    aten._safe_softmax.default: 0.0, aten.linalg_vector_norm.default: 0.0, aten.ones.default: 1.0,
    aten.zeros.default: 0.0, aten.ones_like.default: 1.0, aten.zeros_like.default: 0.0,
    aten.new_ones.default: 1.0, aten.new_zeros.default: 0.0, aten.erf.default: -1.0,
    aten.arange.default: 0.0,
}  # fmt: skip
# What keeps the entries of its first argument, or takes some of them.
_KEEPS = {
    aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.select.int, aten.slice.Tensor, aten.amax.default, aten.amin.default, aten.repeat.default,
    aten.index_select.default, aten.to.device, aten.to.dtype_layout, aten.type_as.default,
    aten.lift_fresh_copy.default, aten.diagonal.default, *SQUEEZES, *VIEWS,
}  # fmt: skip
# Of entries that are not negative, nothing that is.
_CLOSED = {
    aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.matmul.default,
    aten.bmm.default, aten.div.Tensor, aten.reciprocal.default, aten.rsqrt.default,
    aten.pow.Tensor_Tensor, aten.cumsum.default, aten.einsum.default, aten.mv.default,
}  # fmt: skip
DEEPEST = 60  # nodes on the way to what a tensor is made of


def is_positive(node: Node) -> bool:
    """Whether no entry can be below 0."""
    return least_of(node) >= 0.0


def least_of(value: Any) -> float:
    """A number that no entry is below; -inf where nothing is known."""
    return _least(value, {})


def _least(value: Any, known: dict[Node, float], depth: int = 0) -> float:
    """The same.  known: of nodes asked for before."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Node) or not is_tensor(value) or depth > DEEPEST:
        return -math.inf
    if value not in known:
        known[value] = _bound(value, lambda other: _least(other, known, depth + 1))
    return known[value]


def _bound(node: Node, of: Callable[[Any], float]) -> float:
    """From those of what it is made of."""
    target, args = node.target, node.args
    if node.meta["val"].dtype == torch.bool:
        return 0.0
    if node.kwargs.get("alpha", 1) != 1:
        return -math.inf
    if target in _LEAST:
        return _LEAST[target]
    if target in _KEEPS:
        least = of(args[0])
        is_whole = not node.meta["val"].is_floating_point() and math.isfinite(least)
        return math.floor(least) if is_whole else least
    if target in _CLOSED:
        operands = node.all_input_nodes
        numbers = [x for x in args if isinstance(x, (int, float))] if target is aten.div.Tensor else []
        return 0.0 if min(map(of, [*operands, *numbers])) >= 0.0 else -math.inf
    rule = _RULES.get(target)
    return -math.inf if rule is None else rule(of, args)


def _product(of: Callable[[Any], float], args: Any) -> float:
    one, other = args[:2]
    if one is other and isinstance(one, Node):
        return 0.0
    if isinstance(one, (int, float)):
        one, other = other, one
    low, factor = of(one), of(other)
    if isinstance(other, (int, float)) and factor == 0.0:
        return 0.0
    if isinstance(other, (int, float)) and factor > 0.0:
        return low * factor
    return low * factor if low >= 0.0 and factor >= 0.0 else -math.inf


def _power(of: Callable[[Any], float], args: Any) -> float:
    base, exponent = args[:2]
    even = isinstance(exponent, (int, float)) and float(exponent) % 2 == 0
    return 0.0 if even or of(base) >= 0.0 else -math.inf


def _sum(of: Callable[[Any], float], args: Any) -> float:
    return of(args[0]) + of(args[1])


def _clamp(of: Callable[[Any], float], args: Any) -> float:
    low, high = (*args[1:3], None, None)[:2]
    bound = of(args[0]) if low is None else max(of(args[0]), of(low))
    return bound if high is None else min(bound, of(high))


def _arange(of: Callable[[Any], float], args: Any) -> float:
    step = args[2] if len(args) > 2 else 1
    return of(args[0]) if isinstance(step, (int, float)) and step > 0 else -math.inf


_RULES: Mapping[Any, Callable[[Callable[[Any], float], Any], float]] = {
    aten.arange.start: _arange, aten.arange.start_step: _arange,
    aten.add.Tensor: _sum, aten.add.Scalar: _sum,
    aten.sub.Tensor: lambda of, args: of(args[0]) - args[1]
    if isinstance(args[1], (int, float)) else -math.inf,
    aten.mul.Tensor: _product, aten.mul.Scalar: _product,
    aten.pow.Tensor_Scalar: _power,
    aten.clamp.default: _clamp, aten.clamp_min.default: _clamp,
    aten.maximum.default: lambda of, args: max(of(args[0]), of(args[1])),
    aten.minimum.default: lambda of, args: min(of(args[0]), of(args[1])),
    aten.where.self: lambda of, args: min(of(args[1]), of(args[2])),
    aten.where.ScalarOther: lambda of, args: min(of(args[1]), of(args[2])),
    aten.masked_fill.Scalar: lambda of, args: min(of(args[0]), of(args[2])),
    aten.masked_fill.Tensor: lambda of, args: min(of(args[0]), of(args[2])),
    aten.copy.default: lambda of, args: of(args[1]),
    aten.slice_scatter.default: lambda of, args: min(of(args[0]), of(args[1])),
    aten.select_scatter.default: lambda of, args: min(of(args[0]), of(args[1])),
    aten.cat.default: lambda of, args: min(map(of, args[0])),
    aten.stack.default: lambda of, args: min(map(of, args[0])),
    aten.elu.default: lambda of, args: -1.0 if len(args) == 1 else -math.inf,
    aten.full.default: lambda of, args: of(args[1]),
    aten.full_like.default: lambda of, args: of(args[1]),
    aten.new_full.default: lambda of, args: of(args[2]),
}  # fmt: skip
