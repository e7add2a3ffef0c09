"""ONNX operators as torch functions, for opsets 11 to 23 of the default domain.

`OPERATORS[name](*inputs, **attributes)` gives the output, or a tuple of them. Inputs are tensors, host
values (see host.py) or None where they are left out; attributes have ONNX's names and defaults. Some
functions also want `opset` (the model's) or `outputs` (how many the node has); a
subgraph arrives as a function of its inputs that returns a list, a tensor as (first number, type).
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

from asapc.onnx.host import (
    MOST_HOST,
    Real,
    checked_size,
    elementwise,
    ints,
    is_host,
    numbers,
    on_host,
    on_tensor,
    on_tensors,
    operand_of,
    tensor_of,
    truncated_division,
)

Body = Callable[..., list[Any]]

MAX_TRIPS = 1000  # of a Loop: it is unrolled
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
INTEGERS = (torch.int64, torch.int32)
REFUSED = {
    **dict.fromkeys(("NonZero", "Compress", "Unique", "NonMaxSuppression"),
                    "the shape of its result depends on values"),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
                     "Bernoulli", "Multinomial"), "its result is random"),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger",
                     "QLinearMatMul", "QLinearConv", "ConvInteger"), "quantised models are not compiled"),
}  # fmt: skip


def dtype_of(number: int) -> torch.dtype:
    """The torch type of an ONNX element type.  Raises ValueError for one that is not supported."""
    if number not in DTYPES:
        raise ValueError(f"element type {number} is not supported")
    return DTYPES[number]


# Elementwise


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any) -> Any:
        return function(tensor_of(x))

    return apply


def _unary_on_host(host: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return on_host(elementwise(host))(_unary(function))


def _binary(function: Callable[..., Any], host: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        return function(tensor_of(a), operand_of(b))

    return apply if host is None else on_host(elementwise(host))(apply)


def _variadic(function: Callable[..., Any], host: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def apply(*values: Any) -> Any:
        return functools.reduce(function, map(tensor_of, values))

    if host is None:
        return apply
    pairwise = elementwise(host)
    return on_host(lambda *values: functools.reduce(pairwise, values))(apply)


def _divide(a: Tensor, b: Any) -> Tensor:
    return torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")


@on_host(lambda a, b, fmod=0: NotImplemented if fmod else elementwise(operator.mod)(a, b))
@on_tensors
def _mod(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@on_tensor
def _pow(a: Tensor, b: Any) -> Tensor:
    power: Tensor = torch.pow(a, operand_of(b))
    return power if power.dtype == a.dtype else power.to(a.dtype)


def _mean_of(*values: Any) -> Any:
    return _variadic(torch.add)(*values) / len(values)


@on_tensor
def _clip(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    if low is None and high is None:
        return x
    limits = [operand_of(low), operand_of(high)]
    if any(isinstance(limit, Tensor) for limit in limits):
        limits = [tensor_of(low), tensor_of(high)]
    return torch.clamp(x, *limits)


@on_tensors
def _is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    return (x == math.inf) & bool(detect_positive) | (x == -math.inf) & bool(detect_negative)


def _cast_host(value: Any, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    dtype = dtype_of(to)
    if dtype == torch.float32 and not isinstance(value, list):
        return Real(int(value) if isinstance(value, bool) else value)
    if dtype == torch.bool:
        return elementwise(lambda x: bool(x != 0))(value)
    if dtype in INTEGERS:
        return elementwise(lambda x: int(x) if isinstance(x, bool) else x)(value)
    return NotImplemented


@on_host(_cast_host)
def _cast(x: Any, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    dtype = dtype_of(to)
    if isinstance(x, Real) and dtype in INTEGERS:
        return int(x.number) if isinstance(x.number, float) else x.number
    x = tensor_of(x)
    return x if x.dtype == dtype else x.to(dtype)


@on_tensors
def _cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(like.dtype)


def _where_host(condition: Any, a: Any, b: Any) -> Any:
    return elementwise(lambda flag, x, y: x if flag else y)(condition, a, b)


@on_host(_where_host)
@on_tensor
def _where(condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, operand_of(a), operand_of(b))


@on_tensors
def _p_relu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype))


def _hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(alpha * x + beta, 0, 1)


def _leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


def _elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


def _celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.celu(x, alpha)


SELU = (1.67326319217681884765625, 1.05070102214813232421875)


def _selu(x: Tensor, *, alpha: float = SELU[0], gamma: float = SELU[1]) -> Tensor:
    return gamma * F.elu(x, alpha)


def _thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, torch.zeros_like(x))


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


@on_tensors
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() > 1 and b.dim() == 2:
        return F.linear(a, b.t())  # a layer, where the usual product would be one of two batches
    return torch.matmul(a, b)


@on_tensors
def _gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *,
    alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0,
) -> Tensor:  # fmt: skip
    product = F.linear(a.t() if transA else a, b if transB else b.t())
    product = product if alpha == 1.0 else product * alpha
    if c is None or beta == 0.0:
        return product
    return product + (c if beta == 1.0 else c * beta)


def _einsum(*operands: Any, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), [tensor_of(x) for x in operands])


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *,
    is_causal: int = 0, kv_num_heads: int = 0, q_num_heads: int = 0, scale: float | None = None,
    softcap: float = 0.0, softmax_precision: int = 0, qk_matmul_output_mode: int = 0, outputs: int,
) -> Tensor:  # fmt: skip
    """Rows only, so never compiled: enough of it to carry the layers around it."""
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
        x = tensor_of(x)
        x = x if before is None else before(x)
        if dims or not noop_with_empty_axes:
            x = reduce(x, [d % max(x.dim(), 1) for d in dims] or [*range(x.dim())], bool(keepdims))
        return x if after is None else after(x)

    return apply if host is None else on_host(numbers(host))(apply)


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
    """amax or amin; over no entries at all, the least or greatest number there is."""

    def reduce(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        if not dims:
            return x
        if x.is_floating_point() and any(x.shape[d] == 0 for d in dims):
            return torch.sum(x, dims, keep) + empty
        return function(x, dims, keep)

    return reduce


def _logsumexp(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.logsumexp(x, dims, keep) if dims else x


def _arg(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def apply(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        x = tensor_of(x)
        if select_last_index:
            return x.shape[axis] - 1 - function(x.flip(axis), axis, bool(keepdims))
        return function(x, axis, bool(keepdims))

    return apply


# Layout


@on_tensor
def _transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    order = [*reversed(range(x.dim()))] if perm is None else [*perm]
    moved = [axis for axis, source in enumerate(order) if axis != source]
    if not moved:
        return x
    return x.transpose(*moved) if len(moved) == 2 else x.permute(order)


def _reshape(x: Any, shape: Any, *, allowzero: int = 0) -> Any:
    sizes = ints(shape, "the shape of Reshape")
    if is_host(x):
        if len(sizes) == 1 and sizes[0] in (-1, len(x) if isinstance(x, list) else 1):
            return x if isinstance(x, list) else [x]
        if not sizes:
            return x[0] if isinstance(x, list) else x
        x = tensor_of(x)
    if not allowzero:
        sizes = [
            x.shape[axis] if isinstance(size, int) and size == 0 else size
            for axis, size in enumerate(sizes)
        ]
    return x.reshape(sizes)


@on_tensor
def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _unsqueeze_host(x: Any, axes: Any) -> Any:
    return [x] if not isinstance(x, list) and len(ints(axes, "axes")) == 1 else NotImplemented


@on_host(_unsqueeze_host)
@on_tensor
def _unsqueeze(x: Tensor, axes: Any) -> Tensor:
    own = ints(axes, "the axes of Unsqueeze")
    for axis in sorted(axis % (x.dim() + len(own)) for axis in own):
        x = x.unsqueeze(axis)
    return x


def _squeeze_host(x: Any, axes: Any = None) -> Any:
    return x[0] if isinstance(x, list) and len(x) == 1 else NotImplemented


@on_host(_squeeze_host)
@on_tensor
def _squeeze(x: Tensor, axes: Any = None) -> Tensor:
    if axes is None:
        return x.squeeze()
    for axis in sorted((axis % x.dim() for axis in ints(axes, "the axes of Squeeze")), reverse=True):
        x = x.squeeze(axis)
    return x


def _concat(*parts: Any, axis: int) -> Any:
    if all(isinstance(part, list) for part in parts):
        return [size for part in parts for size in part]
    return torch.cat([tensor_of(part) for part in parts], axis)


def _split(
    x: Any, split: Any = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> tuple[Any, ...]:
    length = len(x) if isinstance(x, list) else x.shape[axis]
    if split is not None:
        sizes = ints(split, "the sizes of Split")
    else:
        count = num_outputs or outputs
        each = -(-length // count)
        sizes = [each] * (count - 1) + [length - each * (count - 1)]
    if isinstance(x, list):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(x[start : start + size] for start, size in zip(starts, sizes, strict=True))
    if all(isinstance(size, int) and size == sizes[0] for size in sizes):
        return torch.split(x, sizes[0], axis)
    return torch.split(x, sizes, axis)


def _slice(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    first, last = ints(starts, "the starts of Slice"), ints(ends, "the ends of Slice")
    dims = [*range(len(first))] if axes is None else ints(axes, "the axes of Slice")
    strides = [1] * len(first) if steps is None else ints(steps, "the steps of Slice")
    if isinstance(x, list):
        return x[first[0] : last[0] : strides[0]] if first else x
    x = tensor_of(x)
    for dim, start, end, step in zip(dims, first, last, strides, strict=True):
        axis = dim % x.dim()
        if step > 0:
            x = x[(*[slice(None)] * axis, slice(start, end, step))]
            continue
        length = x.shape[axis]
        if step == -1 and isinstance(start, int) and start in (-1, 2**63 - 1) and end < -(2**31):
            x = x.flip(axis)
        else:
            wanted = range(int(length))[slice(int(start), int(end), int(step))]
            x = x.index_select(axis, torch.tensor([*wanted], dtype=torch.int64))
    return x


def _tile(x: Any, repeats: Any) -> Any:
    counts = ints(repeats, "the repeats of Tile")
    if isinstance(x, list) and isinstance(counts[0], int) and counts[0] * len(x) <= MOST_HOST:
        return x * counts[0]
    x = tensor_of(x)
    checked_size([size * count for size, count in zip(x.shape, counts, strict=True)])
    return x.repeat(counts)


def _expand(x: Any, shape: Any) -> Any:
    sizes = ints(shape, "the shape of Expand")
    if isinstance(x, list) and len(sizes) == 1 and sizes[0] in (1, len(x)):
        return x
    x = tensor_of(x)
    sizes = [1] * (x.dim() - len(sizes)) + sizes
    own = [1] * (len(sizes) - x.dim()) + [*x.shape]
    checked_size(sizes)
    return x.expand([mine if size == 1 else size for mine, size in zip(own, sizes, strict=True)])


@on_tensor
def _pad(
    x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant"
) -> Tensor:
    amounts = ints(pads, "the pads of Pad")
    dims = [*range(x.dim())] if axes is None else [d % x.dim() for d in ints(axes, "the axes of Pad")]
    pairs = dict(zip(dims, zip(amounts[: len(dims)], amounts[len(dims) :], strict=True), strict=True))
    checked_size([x.shape[d] + sum(pair) for d, pair in pairs.items()])
    if mode != "constant":
        for axis, (before, after) in pairs.items():
            if before or after:
                x = x.index_select(axis, _reflected(x.shape[axis], before, after, mode))
        return x
    flat = [amount for axis in reversed(range(x.dim())) for amount in pairs.get(axis, (0, 0))]
    number = 0 if value is None else operand_of(value)
    if not isinstance(number, Tensor):
        return F.pad(x, flat, value=number)
    inside = F.pad(torch.ones_like(x, dtype=torch.bool), flat)
    return torch.where(inside, F.pad(x, flat), number.reshape(()))


def _reflected(length: Any, before: int, after: int, mode: str) -> Tensor:
    """Where the entries of an axis come from that is continued at both ends."""
    index = torch.arange(-before, length + after)
    if mode == "edge":
        return index.clamp(0, length - 1)
    if mode == "wrap":
        return index % length
    index = index % max(2 * length - 2, 1)
    return torch.minimum(index, 2 * length - 2 - index)


# Indices


def _wrapped(index: Tensor, length: Any) -> Tensor:
    """Indices that count from the end where they are negative."""
    return torch.where(index < 0, index + length, index)


def _gather(x: Any, indices: Any, *, axis: int = 0) -> Any:
    if isinstance(x, list) and is_host(indices):
        return elementwise(lambda i: x[i])(indices)
    x = tensor_of(x)
    if is_host(indices) and not isinstance(indices, list):
        return x.select(axis, indices)
    index = tensor_of(indices)
    if x.dim() == 2 and axis % 2 == 0 and x.is_floating_point():
        return F.embedding(_wrapped(index, x.shape[0]).long(), x)
    return x[(*[slice(None)] * (axis % x.dim()), index.long())]


@on_tensors
def _gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, _wrapped(indices.long(), x.shape[axis]))


@on_tensors
def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    batches = [
        torch.arange(x.shape[d]).view(-1, *[1] * (indices.dim() - 2 - d)) for d in range(batch_dims)
    ]
    return x[(*batches, *indices.long().unbind(-1))]


SCATTER = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@on_tensors
def _scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    index = _wrapped(indices.long(), x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, SCATTER[reduction])


@on_tensors
def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    if reduction in ("none", "add"):
        return x.index_put([*indices.long().unbind(-1)], updates, accumulate=reduction == "add")
    depth = indices.shape[-1]
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64)
    for i, size in zip(indices.long().unbind(-1), x.shape, strict=False):
        flat = flat * size + _wrapped(i, size)
    rows = x.reshape(math.prod(x.shape[:depth]), -1)
    index = flat.reshape(-1, 1).expand(-1, rows.shape[1])
    rows = rows.scatter_reduce(0, index, updates.reshape(-1, rows.shape[1]), SCATTER[reduction])
    return rows.reshape(x.shape)


@on_tensor
def _top_k(
    x: Tensor, count: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, ...]:
    k = ints(count, "the k of TopK")[0]
    if k == x.shape[axis]:
        return tuple(torch.sort(x, dim=axis, descending=bool(largest)))
    return tuple(torch.topk(x, k, axis, bool(largest), bool(sorted)))


def _one_hot(indices: Any, depth: Any, values: Tensor, *, axis: int = -1) -> Tensor:
    count = ints(depth, "the depth of OneHot")[0]
    index = tensor_of(indices)
    axis = axis % (index.dim() + 1)
    checked_size([*index.shape, count])
    classes = torch.arange(count).view(-1, *[1] * (index.dim() - axis))
    off, on = tensor_of(values).unbind(0)
    return torch.where(_wrapped(index.long(), count).unsqueeze(axis) == classes, on, off)


# Constants and shapes


def _shape(x: Any, *, start: int = 0, end: int | None = None) -> Any:
    shape = [*x.shape] if isinstance(x, Tensor) else [len(x)] if isinstance(x, list) else []
    return shape[start:end]


def _size(x: Any) -> Any:
    return math.prod(_shape(x))


def _constant_of_shape(shape: Any, *, value: tuple[Any, torch.dtype] = (0.0, torch.float32)) -> Any:
    sizes = ints(shape, "the shape of ConstantOfShape")
    number, dtype = value
    if dtype == torch.int64 and len(sizes) <= 1:
        if not sizes:
            return number
        if isinstance(sizes[0], int) and sizes[0] <= MOST_HOST:
            return [number] * sizes[0]
    return torch.full([*checked_size(sizes)], number, dtype=dtype)


def _range(start: Any, limit: Any, delta: Any) -> Any:
    first, last, step = (ints(x, "an end of Range")[0] for x in (start, limit, delta))
    if all(map(is_host, (start, limit, delta))) and all(isinstance(x, int) for x in (first, last, step)):
        values = range(first, last, step)
        if len(values) <= MOST_HOST:
            return [*values]
    dtype = torch.int64 if is_host(start) else tensor_of(start).dtype
    if all(isinstance(x, (int, torch.SymInt)) or float(x).is_integer() for x in (first, last, step)):
        first, last, step = (int(x) if isinstance(x, float) else x for x in (first, last, step))
        checked_size([(last - first) // step])
        return torch.arange(first, last, step).to(dtype)
    count = max(math.ceil((last - first) / step), 0)
    checked_size([count])
    return first + torch.arange(count, dtype=dtype) * step


def _eye_like(x: Any, *, dtype: int | None = None, k: int = 0) -> Tensor:
    x = tensor_of(x)
    rows, columns = x.shape
    place = torch.arange(columns) - torch.arange(rows).unsqueeze(1)
    return (place == k).to(x.dtype if dtype is None else dtype_of(dtype))


@on_tensor
def _trilu(x: Tensor, k: Any = None, *, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else ints(k, "the k of Trilu")[0]
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@on_tensor
def _cum_sum(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = ints(axis, "the axis of CumSum")[0]
    x = x.flip(dim) if reverse else x
    total = torch.cumsum(x, dim, dtype=x.dtype)
    total = total - x if exclusive else total
    return total.flip(dim) if reverse else total


# Layers


def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *,
    axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, outputs: int,
) -> Tensor:  # fmt: skip
    if outputs > 1:
        raise ValueError("LayerNormalization with its mean or deviation as output is not supported")
    shape = list(x.shape[axis % x.dim() :])
    return F.layer_norm(x, shape, scale, bias, epsilon)


def _rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.rms_norm(x, list(x.shape[axis % x.dim() :]), scale, epsilon)


def _instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def _group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *,
    num_groups: int, epsilon: float = 1e-5, stash_type: int = 1, opset: int,
) -> Tensor:  # fmt: skip
    if opset < 21:  # one scale a group
        scale, bias = (w.repeat_interleave(x.shape[1] // num_groups) for w in (scale, bias))
    return F.group_norm(x, num_groups, scale, bias, epsilon)


def _batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *,
    epsilon: float = 1e-5, momentum: float = 0.9, training_mode: int = 0,
) -> Tensor:  # fmt: skip
    if training_mode:
        raise ValueError("BatchNormalization in training mode is not supported")
    return F.batch_norm(x, mean, variance, scale, bias, eps=epsilon)


def _dropout(
    x: Any, ratio: Any = None, training: Any = None, *, seed: int = 0, outputs: int
) -> tuple[Any, ...]:
    return (x,) if outputs == 1 else (x, torch.ones_like(x, dtype=torch.bool))


def _window(
    x: Tensor, kernel: Sequence[int], strides: Sequence[int] | None, dilations: Sequence[int] | None,
    pads: Sequence[int] | None, auto_pad: str,
) -> tuple[list[int], list[int], list[tuple[int, int]]]:  # fmt: skip
    """(strides, dilations, padding before and after) of each spatial axis."""
    rank = len(kernel)
    steps, spread = list(strides or [1] * rank), list(dilations or [1] * rank)
    if auto_pad in ("NOTSET", "VALID"):
        own = list(pads or [0] * 2 * rank) if auto_pad == "NOTSET" else [0] * 2 * rank
        return steps, spread, [(own[i], own[i + rank]) for i in range(rank)]
    pairs = []
    for size, width, step, gap in zip(x.shape[2:], kernel, steps, spread, strict=True):
        total = max((-(-size // step) - 1) * step + (width - 1) * gap + 1 - size, 0)
        less, more = total // 2, total - total // 2
        pairs.append((less, more) if auto_pad == "SAME_UPPER" else (more, less))
    return steps, spread, pairs


def _padded(x: Tensor, pairs: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    flat = [amount for pair in reversed(pairs) for amount in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None, group: int = 1, kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None, strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    kernel = [*weight.shape[2:]]
    steps, spread, pairs = _window(x, kernel, strides, dilations, pads, auto_pad)
    convolve = CONV[len(kernel)]
    if all(before == after for before, after in pairs):
        return convolve(x, weight, bias, steps, [before for before, _ in pairs], spread, group)
    return convolve(_padded(x, pairs), weight, bias, steps, 0, spread, group)


def _max_pool(
    x: Tensor, *, kernel_shape: Sequence[int], auto_pad: str = "NOTSET", ceil_mode: int = 0,
    dilations: Sequence[int] | None = None, pads: Sequence[int] | None = None,
    storage_order: int = 0, strides: Sequence[int] | None = None, outputs: int,
) -> Tensor:  # fmt: skip
    if outputs > 1:
        raise ValueError("MaxPool with indices as output is not supported")
    steps, spread, pairs = _window(x, kernel_shape, strides, dilations, pads, auto_pad)
    x = _padded(x, pairs, -math.inf)
    pool = MAXIMUM[len(kernel_shape)]
    return pool(x, [*kernel_shape], steps, 0, spread, bool(ceil_mode))


def _average_pool(
    x: Tensor, *, kernel_shape: Sequence[int], auto_pad: str = "NOTSET", ceil_mode: int = 0,
    count_include_pad: int = 0, dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None, strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    if any(gap != 1 for gap in dilations or ()):
        raise ValueError("AveragePool with dilations is not supported")
    steps, _, pairs = _window(x, kernel_shape, strides, None, pads, auto_pad)
    pool = functools.partial(
        AVERAGE[len(kernel_shape)], kernel_size=[*kernel_shape], stride=steps, ceil_mode=bool(ceil_mode)
    )
    total = pool(_padded(x, pairs))
    if count_include_pad or not any(sum(pair) for pair in pairs):
        return total
    return total / pool(_padded(torch.ones_like(x), pairs))


def _global(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def apply(x: Tensor) -> Tensor:
        return function(x, [*range(2, x.dim())], True)

    return apply


def _lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    return F.normalize(x, p, axis, eps=0.0)


# Control flow


def _loop(trips: Any, condition: Any, *carried: Any, body: Body) -> tuple[Any, ...]:
    """Unrolled. A condition that depends on data stops a run early, and a trace not at all: under
    torch.export the comparison below is answered as every comparison with NaN (passes/capture.py)."""
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
    return (*values, *(torch.stack([tensor_of(x) for x in own]) for own in zip(*scanned, strict=True)))


def _is_true(condition: Any) -> bool:
    if not isinstance(condition, Tensor):
        return bool(ints(condition, "the condition of Loop")[0])
    return not bool(torch.lt(condition.reshape(()).to(torch.float32), 0.5))


def _if(condition: Any, *, then_branch: Body, else_branch: Body) -> tuple[Any, ...]:
    known = condition if isinstance(condition, Tensor) else ints(condition, "the condition of If")[0]
    return tuple(then_branch() if bool(known) else else_branch())


def _scan(
    *values: Any, body: Body, num_scan_inputs: int,
    scan_input_axes: Sequence[int] | None = None, scan_input_directions: Sequence[int] | None = None,
    scan_output_axes: Sequence[int] | None = None, scan_output_directions: Sequence[int] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    states = list(values[: len(values) - num_scan_inputs])
    axes = scan_input_axes or [0] * num_scan_inputs
    backward = scan_input_directions or [0] * num_scan_inputs
    steps = []
    for x, axis, turned in zip(values[len(states) :], axes, backward, strict=True):
        parts = tensor_of(x).unbind(axis)
        steps.append(parts[::-1] if turned else parts)
    if len(steps[0]) > MAX_TRIPS:
        raise ValueError(f"a Scan must have at most {MAX_TRIPS} steps, not {len(steps[0])}")
    scanned = []
    for own in zip(*steps, strict=True):
        results = body(*states, *own)
        scanned.append(results[len(states) :])
        states = results[: len(states)]
    outputs = []
    for i, found in enumerate(zip(*scanned, strict=True)):
        turned = bool(scan_output_directions and scan_output_directions[i])
        axis = scan_output_axes[i] if scan_output_axes else 0
        outputs.append(torch.stack([tensor_of(x) for x in (found[::-1] if turned else found)], axis))
    return (*states, *outputs)


# The table


UNARY: dict[str, Callable[..., Any]] = {
    "Sqrt": torch.sqrt, "Exp": torch.exp, "Log": torch.log, "Reciprocal": torch.reciprocal,
    "Sign": torch.sign, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round,
    "Erf": torch.erf, "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid,
    "Softplus": _softplus, "Softsign": F.softsign, "HardSwish": F.hardswish, "Mish": F.mish,
    "Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan, "Asin": torch.asin, "Acos": torch.acos,
    "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Asinh": torch.asinh,
    "Acosh": torch.acosh, "Atanh": torch.atanh, "IsNaN": torch.isnan,
}  # fmt: skip
COMPARISONS = {
    "Equal": (torch.eq, operator.eq), "Less": (torch.lt, operator.lt),
    "LessOrEqual": (torch.le, operator.le), "Greater": (torch.gt, operator.gt),
    "GreaterOrEqual": (torch.ge, operator.ge),
}  # fmt: skip


def _compared(host: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison of sizes as a plain bool: of symbols it becomes a condition of the trace."""
    return lambda a, b: bool(host(a, b))


OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: _unary(function) for name, function in UNARY.items()},
    **{name: _binary(f, _compared(host)) for name, (f, host) in COMPARISONS.items()},
    "Neg": _unary_on_host(operator.neg, torch.neg),
    "Abs": _unary_on_host(abs, torch.abs),
    "Not": _unary_on_host(operator.not_, torch.logical_not),
    "Add": _binary(torch.add, operator.add),
    "Sub": _binary(torch.sub, operator.sub),
    "Mul": _binary(torch.mul, operator.mul),
    "Div": _binary(_divide, truncated_division),
    "And": _binary(torch.logical_and, lambda a, b: a and b),
    "Or": _binary(torch.logical_or, lambda a, b: a or b),
    "Xor": _binary(torch.logical_xor, lambda a, b: a != b),
    "Min": _variadic(torch.minimum, min),
    "Max": _variadic(torch.maximum, max),
    "Sum": _variadic(torch.add),
    "Mean": _mean_of,
    "Mod": _mod, "Pow": _pow, "Clip": _clip, "IsInf": _is_inf, "Cast": _cast, "CastLike": _cast_like,
    "Where": _where, "PRelu": _p_relu, "Gelu": _gelu, "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": _leaky_relu, "Elu": _elu, "Celu": _celu, "Selu": _selu,
    "ThresholdedRelu": _thresholded_relu,
    "Softmax": _softmax(torch.softmax), "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": _matmul, "Gemm": _gemm, "Einsum": _einsum, "Attention": _attention,
    "ReduceSum": _reduction(_sum, host=sum), "ReduceMean": _reduction(_mean),
    "ReduceProd": _reduction(_prod, host=math.prod),
    "ReduceMax": _reduction(_extreme(torch.amax, -math.inf), host=max),
    "ReduceMin": _reduction(_extreme(torch.amin, math.inf), host=min),
    "ReduceL1": _reduction(_sum, before=torch.abs),
    "ReduceL2": _reduction(_sum, before=torch.square, after=torch.sqrt),
    "ReduceSumSquare": _reduction(_sum, before=torch.square),
    "ReduceLogSum": _reduction(_sum, after=torch.log),
    "ReduceLogSumExp": _reduction(_logsumexp),
    "ArgMax": _arg(torch.argmax), "ArgMin": _arg(torch.argmin),
    "Transpose": _transpose, "Reshape": _reshape, "Flatten": _flatten, "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze, "Concat": _concat, "Split": _split, "Slice": _slice, "Tile": _tile,
    "Expand": _expand, "Pad": _pad, "Gather": _gather, "GatherElements": _gather_elements,
    "GatherND": _gather_nd, "ScatterElements": _scatter_elements, "ScatterND": _scatter_nd,
    "TopK": _top_k, "OneHot": _one_hot, "Shape": _shape, "Size": _size,
    "ConstantOfShape": _constant_of_shape, "Range": _range, "EyeLike": _eye_like, "Trilu": _trilu,
    "CumSum": _cum_sum, "Identity": lambda x: x, "Dropout": _dropout,
    "LayerNormalization": _layer_norm, "RMSNormalization": _rms_norm,
    "InstanceNormalization": _instance_norm, "GroupNormalization": _group_norm,
    "BatchNormalization": _batch_norm, "LpNormalization": _lp_normalization,
    "Conv": _conv, "MaxPool": _max_pool, "AveragePool": _average_pool,
    "GlobalAveragePool": _global(torch.mean), "GlobalMaxPool": _global(torch.amax),
    "Loop": _loop, "If": _if, "Scan": _scan,
}  # fmt: skip
