"""ONNX operators that move, pick and make entries (see ops.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from asapc.inputs.onnx.host import (
    MOST_HOST,
    checked_numbers,
    elementwise,
    ints,
    is_host,
    on_host,
    operand_of,
    tensor_of,
)

# Layout


def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    order = [*reversed(range(x.dim()))] if perm is None else [*perm]
    moved = [axis for axis, source in enumerate(order) if axis != source]
    if not moved:
        return x
    return x.transpose(*moved) if len(moved) == 2 else x.permute(order)


def reshape(x: Any, shape: Any, *, allowzero: int = 0) -> Any:
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


def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@on_host(lambda x, axes: (
    [x] if not isinstance(x, list) and len(ints(axes, "axes")) == 1 else NotImplemented
))  # fmt: skip
def unsqueeze(x: Tensor, axes: Any) -> Tensor:
    places = ints(axes, "the axes of Unsqueeze")
    for axis in sorted(axis % (x.dim() + len(places)) for axis in places):
        x = x.unsqueeze(axis)
    return x


@on_host(lambda x, axes=None: x[0] if isinstance(x, list) and len(x) == 1 else NotImplemented)
def squeeze(x: Tensor, axes: Any = None) -> Tensor:
    if axes is None:
        return x.squeeze()
    for axis in sorted((axis % x.dim() for axis in ints(axes, "the axes of Squeeze")), reverse=True):
        x = x.squeeze(axis)
    return x


def concat(*parts: Any, axis: int) -> Any:
    if all(isinstance(part, list) for part in parts):
        checked_numbers(sum(map(len, parts)))
        return [size for part in parts for size in part]
    return torch.cat([tensor_of(part) for part in parts], axis)


def split(
    x: Any, split: Any = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> tuple[Any, ...]:
    length = len(x) if isinstance(x, list) else x.shape[axis]
    if split is not None:
        sizes = ints(split, "the sizes of Split")
    else:
        count = num_outputs or outputs
        if count != outputs:
            raise ValueError(f"num_outputs is {count}, and the node has {outputs} outputs")
        each = -(-length // count)
        sizes = [each] * (count - 1) + [length - each * (count - 1)]
    if isinstance(x, list):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(x[start : start + size] for start, size in zip(starts, sizes, strict=True))
    if all(isinstance(size, int) and size == sizes[0] > 0 for size in sizes):
        return torch.split(x, sizes[0], axis)
    return torch.split(x, sizes, axis)


def sliced(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
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
            x = x.index_select(axis, torch.arange(wanted.start, wanted.stop, wanted.step))
    return x


def tile(x: Any, repeats: Any) -> Any:
    counts = ints(repeats, "the repeats of Tile")
    if isinstance(x, list) and isinstance(counts[0], int) and counts[0] * len(x) <= MOST_HOST:
        return x * counts[0]
    return tensor_of(x).repeat(counts)


def expand(x: Any, shape: Any) -> Any:
    sizes = ints(shape, "the shape of Expand")
    if isinstance(x, list) and len(sizes) == 1 and sizes[0] in (1, len(x)):
        return x
    x = tensor_of(x)
    sizes = [1] * (x.dim() - len(sizes)) + sizes
    current = [1] * (len(sizes) - x.dim()) + [*x.shape]
    return x.expand([length if size == 1 else size for length, size in zip(current, sizes, strict=True)])


def pad(x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    if mode != "constant":
        raise ValueError(f"Pad with mode {mode!r} is not supported")
    amounts = ints(pads, "the pads of Pad")
    dims = [*range(x.dim())] if axes is None else [d % x.dim() for d in ints(axes, "the axes of Pad")]
    pairs = dict(zip(dims, zip(amounts[: len(dims)], amounts[len(dims) :], strict=True), strict=True))
    flat = [amount for axis in reversed(range(x.dim())) for amount in pairs.get(axis, (0, 0))]
    number = 0 if value is None else operand_of(value)
    if not isinstance(number, Tensor):
        return F.pad(x, flat, value=number)
    inside = F.pad(torch.ones_like(x, dtype=torch.bool), flat)
    return torch.where(inside, F.pad(x, flat), number.reshape(()))


# Indices


def _wrapped(index: Tensor, length: Any) -> Tensor:
    """Indices that count from the end where they are negative."""
    return torch.where(index < 0, index + length, index)


def gather(x: Any, indices: Any, *, axis: int = 0) -> Any:
    if isinstance(x, list) and is_host(indices):
        return elementwise(lambda i: x[i])(indices)
    x = tensor_of(x)
    if is_host(indices) and not isinstance(indices, list):
        return x.select(axis, indices)
    index = tensor_of(indices)
    if x.dim() == 2 and axis % 2 == 0 and x.is_floating_point():
        return F.embedding(_wrapped(index, x.shape[0]).long(), x)
    return x[(*[slice(None)] * (axis % x.dim()), index.long())]


def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, _wrapped(indices.long(), x.shape[axis]))


def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    batches = [
        torch.arange(x.shape[d]).view(-1, *[1] * (indices.dim() - 2 - d)) for d in range(batch_dims)
    ]
    return x[(*batches, *indices.long().unbind(-1))]


def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    index = _wrapped(indices.long(), x.shape[axis])
    add = _adds(reduction, "ScatterElements")
    return x.scatter_add(axis, index, updates) if add else x.scatter(axis, index, updates)


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    add = _adds(reduction, "ScatterND")
    return x.index_put([*indices.long().unbind(-1)], updates, accumulate=add)


def _adds(reduction: str, operator: str) -> bool:
    if reduction not in ("none", "add"):
        raise ValueError(f"{operator} with reduction {reduction!r} is not supported")
    return reduction == "add"


def top_k(
    x: Tensor, count: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, ...]:
    """Of equal entries the first, which torch.topk does not promise."""
    k = ints(count, "the k of TopK")[0]
    results = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    if statically_known_true(k == x.shape[axis]):
        return tuple(results)
    return tuple(result.narrow(axis, 0, k) for result in results)


# Constants and shapes


def shape_of(x: Any, *, start: int = 0, end: int | None = None) -> Any:
    shape = [*x.shape] if isinstance(x, Tensor) else [len(x)] if isinstance(x, list) else []
    return shape[start:end]


def constant_of_shape(shape: Any, *, value: tuple[Any, torch.dtype] = (0.0, torch.float32)) -> Any:
    sizes = ints(shape, "the shape of ConstantOfShape")
    number, dtype = value
    if dtype == torch.int64 and len(sizes) <= 1:
        if not sizes:
            return number
        if isinstance(sizes[0], int) and sizes[0] <= MOST_HOST:
            return [number] * sizes[0]
    return torch.full(sizes, number, dtype=dtype)


def range_of(start: Any, limit: Any, delta: Any) -> Any:
    first, last, step = (ints(x, "an end of Range")[0] for x in (start, limit, delta))
    if all(map(is_host, (start, limit, delta))) and all(isinstance(x, int) for x in (first, last, step)):
        values = range(first, last, step)
        if len(values) <= MOST_HOST:
            return [*values]
    dtype = tensor_of(start).dtype
    if all(isinstance(x, (int, torch.SymInt)) or float(x).is_integer() for x in (first, last, step)):
        first, last, step = (int(x) if isinstance(x, float) else x for x in (first, last, step))
        return torch.arange(first, last, step).to(dtype)
    count = max(math.ceil((last - first) / step), 0)
    return first + torch.arange(count, dtype=dtype) * step


def trilu(x: Tensor, k: Any = None, *, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else ints(k, "the k of Trilu")[0]
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


def cum_sum(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = ints(axis, "the axis of CumSum")[0]
    x = x.flip(dim) if reverse else x
    total = torch.cumsum(x, dim, dtype=x.dtype)
    total = total - x if exclusive else total
    return total.flip(dim) if reverse else total
