"""ONNX operators as torch functions, for opsets 11 to 23 of the default domain.

`OPERATORS[name](*inputs, **attributes)` gives the output, or a tuple of them. Inputs are tensors, host
values (see host.py) or None where they are left out; attributes have ONNX's names and defaults. Some
functions also want `opset` (the model's) or `outputs` (how many the node has). A subgraph arrives as a
function of its inputs that returns a list, a tensor among the attributes as (its one number, its type).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asapc.inputs.onnx import shapes
from asapc.inputs.onnx.host import (
    Real,
    chosen,
    decided,
    dtype_of,
    elementwise,
    ints,
    known,
    numbers,
    on_host,
    operand_of,
    tensor_of,
    truncated_division,
)

Body = Callable[..., list[Any]]

MAX_TRIPS = 1000  # of a Loop: it is unrolled
INTEGERS = (torch.int64, torch.int32)
REFUSED = {
    **dict.fromkeys(("NonZero", "Compress", "Unique", "NonMaxSuppression"),
                    "the shape of its result depends on values"),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
                     "Bernoulli", "Multinomial"), "its result is random"),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger",
                     "QLinearMatMul", "QLinearConv", "ConvInteger"), "quantised models are not compiled"),
}  # fmt: skip


# Elementwise


def _unary(function: Callable[..., Any], host: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def apply(x: Tensor) -> Any:
        return function(x)

    return on_host(None if host is None else elementwise(host))(apply)


def _binary(function: Callable[..., Any], host: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Tensor, b: Any) -> Any:
        return function(a, operand_of(b))

    return on_host(elementwise(host))(apply)


def _comparison(name: str) -> Callable[..., Any]:
    """A comparison; of sizes it is a plain bool if the result is the same for all of them."""
    compare = getattr(operator, name)
    return _binary(getattr(torch, name), lambda a, b: decided(compare(a, b)))


def _variadic(function: Callable[..., Any], host: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*values: Any) -> Any:
        return functools.reduce(function, map(tensor_of, values))

    pairwise = elementwise(host)
    return on_host(lambda *values: functools.reduce(pairwise, values))(apply)


def _divide(a: Tensor, b: Any) -> Tensor:
    """Integers round to zero: torch's truncating division of the least one by -1 ends the process."""
    if a.is_floating_point():
        return torch.div(a, b)
    return torch.floor_divide(a - torch.fmod(a, b), b)


@on_host(lambda a, b, fmod=0: NotImplemented if fmod else elementwise(operator.mod)(a, b))
def _mod(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def _pow(a: Tensor, b: Any) -> Tensor:
    power: Tensor = torch.pow(a, operand_of(b))
    return power if power.dtype == a.dtype else power.to(a.dtype)


def _clip(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    if low is None and high is None:
        return x
    limits = [operand_of(low), operand_of(high)]
    if any(isinstance(limit, Tensor) for limit in limits):
        limits = [tensor_of(low), tensor_of(high)]
    return torch.clamp(x, *limits)


def _cast_host(value: Any, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    dtype = dtype_of(to)
    if dtype == torch.float32 and not isinstance(value, list):
        return Real(_integer(value))
    if dtype == torch.bool:
        return elementwise(lambda x: x if isinstance(x, torch.SymBool) else decided(x != 0))(value)
    if dtype in INTEGERS:
        return elementwise(_integer)(value)
    return NotImplemented


def _integer(x: Any) -> Any:
    if isinstance(x, torch.SymBool):
        return torch.sym_ite(x, 1, 0)
    return int(x) if isinstance(x, (int, float)) else x


@on_host(_cast_host)
def _cast(x: Any, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    dtype = dtype_of(to)
    if isinstance(x, Real) and dtype in INTEGERS:
        return _integer(x.number)
    x = tensor_of(x)
    return x if x.dtype == dtype else x.to(dtype)


@on_host(elementwise(chosen))
def _where(condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, operand_of(a), operand_of(b))


def _softmax(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def apply(x: Tensor, *, axis: int | None = None, opset: int) -> Tensor:
        if opset >= 13:
            return function(x, -1 if axis is None else axis)
        axis = (1 if axis is None else axis) % max(x.dim(), 1)
        if axis >= x.dim() - 1:
            return function(x, -1)
        return function(x.flatten(axis), -1).reshape(x.shape)  # one distribution over all that follows

    return apply


# Products


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() > 1 and b.dim() == 2:
        return F.linear(a, b.t())  # a layer, not a product of two batches
    return torch.matmul(a, b)


def _gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *,
    alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0,
) -> Tensor:  # fmt: skip
    product = F.linear(a.t() if transA else a, b if transB else b.t())
    product = product if alpha == 1.0 else product * alpha
    if c is None or beta == 0.0:
        return product
    return product + (c if beta == 1.0 else c * beta)


# Reductions


def _reduction(
    reduce: Callable[[Tensor, list[int], bool], Tensor],
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Tensor], Tensor] | None = None,
    host: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """after(reduce(before(x))) over `axes`, which is an attribute or an input."""

    def apply(x: Tensor, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        dims = [] if axes is None else ints(axes, "the axes of a reduction")
        x = x if before is None else before(x)
        if dims or not noop_with_empty_axes:
            x = reduce(x, [d % max(x.dim(), 1) for d in dims] or [*range(x.dim())], bool(keepdims))
        return x if after is None else after(x)

    return on_host(None if host is None else numbers(host))(apply)


def _sum(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.sum(x, dims, keep, dtype=x.dtype) if dims else x


def _mean(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    if not dims:
        return x
    if x.is_floating_point():
        return torch.mean(x, dims, keep)
    return _divide(_sum(x, dims, keep), tensor_of(math.prod(x.shape[d] for d in dims))).to(x.dtype)


def _prod(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = torch.prod(x, dim, keep, dtype=x.dtype)
    return x


def _extreme(function: Callable[..., Tensor], empty: float) -> Callable[..., Tensor]:
    """amax or amin; `empty` where there are no entries."""

    def reduce(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        if not dims:
            return x
        if x.is_floating_point() and any(x.shape[d] == 0 for d in dims):
            return torch.sum(x, dims, keep) + empty
        return function(x, dims, keep)

    return reduce


# Layers


def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *,
    axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, outputs: int,
) -> Tensor:  # fmt: skip
    if outputs > 1:
        raise ValueError("LayerNormalization with its mean or deviation as output is not supported")
    shape = list(x.shape[axis % x.dim() :])
    return F.layer_norm(x, shape, scale, bias, epsilon)


def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.rms_norm(x, list(x.shape[axis % x.dim() :]), scale, epsilon)


def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *,
    epsilon: float = 1e-5, momentum: float = 0.9, training_mode: int = 0,
) -> Tensor:  # fmt: skip
    if training_mode:
        raise ValueError("BatchNormalization in training mode is not supported")
    return F.batch_norm(x, mean, variance, scale, bias, eps=epsilon)


def dropout(
    x: Any, ratio: Any = None, training: Any = None, *, seed: int = 0, outputs: int
) -> tuple[Any, ...]:
    if training is not None and known(training, "the mode of Dropout"):
        raise ValueError("Dropout in training mode is not supported")
    return (x,) if outputs == 1 else (x, torch.ones_like(x, dtype=torch.bool))


CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None, group: int = 1, kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None, strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    if auto_pad not in ("NOTSET", "VALID"):
        raise ValueError(f"Conv with auto_pad {auto_pad!r} is not supported")
    axes = weight.dim() - 2
    pads = pads or [0] * 2 * axes
    before, after = pads[:axes], pads[axes:]
    if before != after:
        x = F.pad(x, [amount for axis in reversed(range(axes)) for amount in (before[axis], after[axis])])
        before = [0] * axes
    return CONV[axes](x, weight, bias, strides or 1, before, dilations or 1, group)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *,
    is_causal: int = 0, kv_num_heads: int = 0, q_num_heads: int = 0, scale: float | None = None,
    softcap: float = 0.0, softmax_precision: int = 0, qk_matmul_output_mode: int = 0, outputs: int,
) -> Tensor:  # fmt: skip
    """Softmax attention is never compiled: this covers enough for the layers around it."""
    if softcap or outputs > 1:
        raise ValueError("Attention with a soft cap, a cache or its scores as output is not supported")
    flat = q.dim() == 3
    if flat:
        q, k, v = (
            x.unflatten(-1, (heads, -1)).transpose(1, 2)
            for x, heads in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
        )
    if is_causal and mask is not None:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        mask = mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -math.inf)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(is_causal) and mask is None, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).flatten(2) if flat else out


# Control flow


def loop(trips: Any, condition: Any, *carried: Any, body: Body) -> tuple[Any, ...]:
    """Unrolled. A condition that depends on data ends a run early but never a trace: under torch.export,
    the comparison below is answered like any comparison with NaN (passes/capture.py)."""
    count = MAX_TRIPS + 1 if trips is None else ints(trips, "the trip count of Loop")[0]
    values, scanned, trip = list(carried), [], 0
    go_on = True if condition is None else condition
    while trip < count and _is_true(go_on):
        if trip == MAX_TRIPS or (count > MAX_TRIPS and isinstance(go_on, Tensor)):
            raise ValueError(f"a Loop must have a trip count of at most {MAX_TRIPS}")
        go_on, *results = body(trip, go_on, *values)
        values = results[: len(carried)]
        scanned.append(results[len(carried) :])
        trip += 1
    stacked = (torch.stack([tensor_of(x) for x in found]) for found in zip(*scanned, strict=True))
    return (*values, *stacked)


def _is_true(condition: Any) -> bool:
    if not isinstance(condition, Tensor):
        return known(condition, "the condition of Loop")
    return not bool(torch.lt(condition.reshape(()).to(torch.float32), 0.5))


def branch(condition: Any, *, then_branch: Body, else_branch: Body) -> tuple[Any, ...]:
    return tuple(then_branch() if known(condition, "the condition of If") else else_branch())


# The table


UNARY: dict[str, Callable[..., Any]] = {
    "Sqrt": torch.sqrt, "Exp": torch.exp, "Log": torch.log, "Reciprocal": torch.reciprocal,
    "Sign": torch.sign, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round,
    "Erf": torch.erf, "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid,
    "Softplus": lambda x: torch.logaddexp(x, torch.zeros((), dtype=x.dtype)),
    "Sin": torch.sin, "Cos": torch.cos, "IsNaN": torch.isnan,
}  # fmt: skip
COMPARISONS = {"Equal": "eq", "Less": "lt", "LessOrEqual": "le", "Greater": "gt", "GreaterOrEqual": "ge"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _unary(function) for name, function in UNARY.items()},
    **{name: _comparison(function) for name, function in COMPARISONS.items()},
    "Neg": _unary(torch.neg, operator.neg),
    "Abs": _unary(torch.abs, abs),
    "Not": _unary(torch.logical_not, torch.sym_not),
    "Add": _binary(torch.add, operator.add),
    "Sub": _binary(torch.sub, operator.sub),
    "Mul": _binary(torch.mul, operator.mul),
    "Div": _binary(_divide, truncated_division),
    "And": _binary(torch.logical_and, operator.and_),
    "Or": _binary(torch.logical_or, operator.or_),
    "Min": _variadic(torch.minimum, torch.sym_min),
    "Max": _variadic(torch.maximum, torch.sym_max),
    "Mod": _mod, "Pow": _pow, "Clip": _clip, "Cast": _cast, "Where": _where,
    "IsInf": lambda x, *, detect_negative=1, detect_positive=1:
        (x == math.inf) & bool(detect_positive) | (x == -math.inf) & bool(detect_negative),
    "CastLike": lambda x, like, *, saturate=1, round_mode="up": tensor_of(x).to(tensor_of(like).dtype),
    "Gelu": lambda x, *, approximate="none": F.gelu(x, approximate=approximate),
    "Softmax": _softmax(torch.softmax), "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": _matmul, "Gemm": _gemm, "Attention": attention,
    "Einsum": lambda *operands, equation: torch.einsum(
        equation.replace(" ", ""), [tensor_of(x) for x in operands]
    ),
    "ReduceSum": _reduction(_sum, host=operator.add), "ReduceMean": _reduction(_mean),
    "ReduceProd": _reduction(_prod, host=operator.mul),
    "ReduceMax": _reduction(_extreme(torch.amax, -math.inf), host=torch.sym_max),
    "ReduceMin": _reduction(_extreme(torch.amin, math.inf), host=torch.sym_min),
    "ReduceL2": _reduction(_sum, before=torch.square, after=torch.sqrt),
    "ReduceLogSumExp": _reduction(lambda x, dims, keep: torch.logsumexp(x, dims, keep) if dims else x),
    "ArgMax": lambda x, *, axis=0, keepdims=1: torch.argmax(tensor_of(x), axis, bool(keepdims)),
    "Transpose": shapes.transpose, "Reshape": shapes.reshape, "Flatten": shapes.flatten,
    "Unsqueeze": shapes.unsqueeze, "Squeeze": shapes.squeeze, "Concat": shapes.concat,
    "Split": shapes.split, "Slice": shapes.sliced, "Tile": shapes.tile, "Expand": shapes.expand,
    "Pad": shapes.pad, "Gather": shapes.gather, "GatherElements": shapes.gather_elements,
    "GatherND": shapes.gather_nd, "ScatterElements": shapes.scatter_elements,
    "ScatterND": shapes.scatter_nd, "TopK": shapes.top_k,
    "Shape": shapes.shape_of, "Size": lambda x: math.prod(shapes.shape_of(x)),
    "ConstantOfShape": shapes.constant_of_shape,
    "Range": shapes.range_of, "Trilu": shapes.trilu,
    "CumSum": shapes.cum_sum, "Identity": lambda x: x, "Dropout": dropout,
    "LayerNormalization": layer_norm, "RMSNormalization": rms_norm,
    "BatchNormalization": batch_norm,
    "Conv": conv,
    "GlobalAveragePool": lambda x: torch.mean(x, [*range(2, x.dim())], True),
    "Loop": loop, "If": branch,
}  # fmt: skip
OPERATORS = {
    name: function if hasattr(function, "__wrapped__") else on_host(None)(function)
    for name, function in _FUNCTIONS.items()
}
