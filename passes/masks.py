"""Masks: whether a tensor says the same of every query, or of every head, whatever the data holds.

That a mask's rows are alike in an example proves nothing: padding may differ, and windows are wider than
short sequences. It is read from how the tensor was made: a size of 1, or entries that were repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from asapc.passes.cut import behind, depends_on_data, is_tensor
from asapc.passes.plan.positive import least_of
from asapc.passes.products import COPIES, RESHAPES, rank_of, same

aten = torch.ops.aten
_SPREAD = {  # entries are those of their first argument, as they were, repeated, or a part of them
    *COPIES, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default,
    aten.type_as.default, aten.lift_fresh_copy.default, aten.expand.default, aten.repeat.default,
    aten.slice.Tensor,
}  # fmt: skip
FILLED = {  # one value everywhere
    aten.zeros.default, aten.ones.default, aten.full.default, aten.scalar_tensor.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
}  # fmt: skip
_POINTWISE = {  # without torch's tag
    aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor, aten.__and__.Scalar, aten.__or__.Scalar,
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.masked_fill.Scalar,
}  # fmt: skip
# Entries are those of their first argument, elsewhere.
_PLACES = {*_SPREAD, *RESHAPES, aten.unsqueeze.default, aten.transpose.int}


def varies(node: Node, axis: int, heads: int | None = None) -> bool:
    """Whether entries may differ along an axis, counted from the last: -1, -2, ...

    heads: of an axis of b * heads + h, whether they may differ between the heads of an example.
    """
    value = node.meta["val"]
    if -axis > value.dim() or same(value.shape[axis], 1) or node.target in FILLED or _is_always(node):
        return False
    if _is_pointwise(node):
        return any(varies(operand, axis, heads) for operand in node.all_input_nodes if is_tensor(operand))
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if source is None:
        return heads is not None or _constant_varies(node, axis)
    if node.target is aten.unsqueeze.default:
        return varies(source, _before(node, axis), heads)
    if node.target in RESHAPES:
        source = behind(source, {*RESHAPES, *COPIES})
        return _reshaped(node, source, axis) if heads is None else _merged(node, source, axis, heads)
    if node.target is aten.index.Tensor and heads is None:
        return _indexed(node, source, axis)
    if node.target is aten.repeat_interleave.self_int and heads is not None:
        repeats, place = node.args[1], node.args[2] if len(node.args) > 2 else None
        return not (repeats == heads and place == axis + value.dim())
    if node.target in (aten.repeat.default, aten.slice.Tensor) and heads is not None:
        before = source.meta["val"].shape  # not all examples and heads, or more of them
        if -axis > len(before) or not same(value.shape[axis], before[axis]):
            return True
    return node.target not in _SPREAD or varies(source, axis, heads)


def _constant_varies(node: Node, axis: int) -> bool:
    """Of what no tensor is the first operand of: a constant holds what it will hold."""
    example, sizes = node.meta.get("example"), node.meta["val"].shape
    fixed = not (depends_on_data(node) or node.all_input_nodes) and all(type(x) is int for x in sizes)
    if not (fixed and isinstance(example, torch.Tensor)):
        return True
    return bool((example != example.select(axis, 0).unsqueeze(axis)).any())


def _is_pointwise(node: Node) -> bool:
    tagged = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return tagged or node.target in _POINTWISE


def spreads_entries(node: Node) -> bool:
    """Whether every entry is computed from entries at its own place, or from a number, alone."""
    return _is_pointwise(node) or node.target in _PLACES


def heads_vary(node: Node, heads: int, batch: Any | None) -> bool:
    """Whether a mask may differ between heads, which have an axis or are merged with the batch.

    batch: the number of examples where the heads have an axis.  A mask [B, 1, M] is then added to duals
    [B, H, M], and is the same for all heads.
    """
    value = node.meta["val"]
    if heads == 1 or value.dim() < 3:
        return False
    if value.dim() == 3 and batch is not None and same(value.shape[0], batch):
        return not same(value.shape[1], 1)
    return varies(node, -3, None if value.dim() == 4 else heads)


def _merged(node: Node, source: Node, axis: int, heads: int) -> bool:
    """Of a reshape: the axes of its source that became one, the last of which is that of the heads."""
    sizes, axes = source.meta["val"].shape, _long_axes(source)
    if axis != _long_axes(node)[0]:
        return True
    total: Any = 1
    for count, at in enumerate(axes, 1):
        total = total * sizes[at]
        if same(total, node.meta["val"].shape[axis]):
            if count == 1:
                return varies(source, at, heads)
            return not same(sizes[at], heads) or varies(source, at)
    # [B, N] repeated to [B, H N], which is [B H, N]
    if source.target is not aten.repeat.default:
        return True
    inner, repeats = source.args
    assert isinstance(inner, Node) and isinstance(repeats, list | tuple)
    tokens = inner.meta["val"].shape[-1]
    return [*repeats] != [1, heads] or not same(tokens, node.meta["val"].shape[-1])


def _before(node: Node, axis: int) -> int:
    """An axis that is not the new one, which has size 1, where it was before an unsqueeze."""
    place = node.args[1]
    assert isinstance(place, int)
    from_end = place - rank_of(node) if place >= 0 else place
    return axis if axis > from_end else axis + 1


def _reshaped(node: Node, source: Node, axis: int) -> bool:
    """Through a reshape, or several, such as [B, H, 1, M] to [B * H, 1, M] and back: along an axis of the
    same size, with the same sizes before it, or the same behind it."""
    now, then = _long_axes(node), _long_axes(source)
    if axis not in now:  # of a size that is always 1
        return False
    sizes, others = node.meta["val"].shape, source.meta["val"].shape
    place = now.index(axis)
    pairs = list(zip(now[: place + 1], then, strict=False))
    after = list(zip(now[place:][::-1], then[::-1], strict=False))
    for matched, count in ((pairs, place + 1), (after, len(now) - place)):
        if len(matched) == count and all(same(sizes[mine], others[theirs]) for mine, theirs in matched):
            return varies(source, matched[-1][1])
    return True


def _long_axes(node: Node) -> list[int]:
    """From the last, -1, -2, ..., without those of size 1; in the order of the tensor."""
    shape = node.meta["val"].shape
    return [axis for axis in range(-len(shape), 0) if not same(shape[axis], 1)]


def _indexed(node: Node, source: Node, axis: int) -> bool:
    """Of m[b, k], whose entries lie where its indices say: it varies where one of them does."""
    arguments: Any = node.args[1]
    indices = [index for index in arguments if isinstance(index, Node)]
    if len(indices) < rank_of(source) or any(i.meta["val"].dtype == torch.bool for i in indices):
        return True
    return any(varies(index, axis) for index in indices)


def _is_always(node: Node) -> bool:
    """Whether a comparison is true of every entry: positions from 0 on are at least 0."""
    if node.target not in (aten.ge.Scalar, aten.gt.Scalar):
        return False
    compared, threshold = node.args
    if not isinstance(threshold, int | float):
        return False
    least = least_of(compared)
    return least > threshold or (least == threshold and node.target is aten.ge.Scalar)
