"""Masks: whether a tensor says the same of every query, or of every head, whatever the data holds.

That a mask's rows are alike in an example proves nothing: padding may differ, and windows are wider than
short sequences. It is read from how the tensor was made: a size of 1, or entries that were repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from asapc.passes.cut import depends_on_data, is_tensor
from asapc.passes.products import rank_of, same

aten = torch.ops.aten
_SPREAD = {  # entries are those of their first argument, as they were or repeated
    aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default,
    aten.to.dtype, aten._to_copy.default, aten.type_as.default, aten.lift_fresh_copy.default,
    aten.expand.default, aten.repeat.default,
}  # fmt: skip


def varies(node: Node, axis: int) -> bool:
    """Whether entries may differ along an axis, counted from the last: -1, -2, ..."""
    value = node.meta["val"]
    if -axis > value.dim() or _is_one(value.shape[axis]):
        return False
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if node.target in _SPREAD and source is not None:
        return varies(source, axis)
    if node.target is aten.unsqueeze.default and source is not None:
        return _inserted(node, source, axis)
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return any(varies(operand, axis) for operand in node.all_input_nodes if is_tensor(operand))
    if not depends_on_data(node) and not node.all_input_nodes:
        example = node.meta.get("example")  # a constant: what it holds is what it will hold
        if isinstance(example, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
            return bool((example != example.select(axis, 0).unsqueeze(axis)).any())
    return True


def heads_vary(node: Node, heads: int) -> bool:
    """Whether a mask may differ between heads, which have an axis or are merged with the batch."""
    value = node.meta["val"]
    if heads == 1 or value.dim() < 3:
        return False
    if value.dim() == 4:
        return varies(node, -3)
    merged = value.shape[0]
    sources = [operand for operand in node.all_input_nodes if is_tensor(operand)]
    if not sources:
        return not _is_one(merged)
    return any(
        heads_vary(source, heads)
        for source in sources
        if source.meta["val"].dim() == 4 or same(source.meta["val"].shape[0], merged)
    )


def _inserted(node: Node, source: Node, axis: int) -> bool:
    """Through an unsqueeze, whose new axis has a size of 1."""
    place = node.args[1]
    assert isinstance(place, int)
    from_end = place - rank_of(node) if place >= 0 else place
    return varies(source, axis if axis > from_end else axis + 1)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
