"""Indices: a place that is a size, as in `log_mu[:, n]` of a dustbin, leaves the size free.

Python's indexing makes a number of a symbolic size, and a program with it holds for that size alone.
One entry of a slice is the same place: torch.export keeps the symbol in that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FreeIndices(TorchFunctionMode):
    """Reads and writes at symbolic places as slices of one entry."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and _is_at_a_size(args[1]):
            part = _view(args[0], args[1])
            if func is Tensor.__getitem__:
                return part
            value = args[2]
            if not isinstance(value, Tensor):
                return part.fill_(value)
            while value.dim() > part.dim() and value.shape[0] == 1:
                value = value[0]  # as indexing does, and copy_ does not
            return part.copy_(value)
        return func(*args, **(kwargs or {}))


def _is_at_a_size(index: Any) -> bool:
    """Whether an index of numbers, slices, new axes and `...` has a symbolic number that is a size."""
    entries = _entries(index)
    if not all(x is None or x is Ellipsis or type(x) in (int, slice, torch.SymInt) for x in entries):
        return False
    hints = [x.node.hint for x in entries if isinstance(x, torch.SymInt)]
    # A size is at least 0; a number below would count from the end.
    return bool(hints) and all(hint is not None and hint >= 0 for hint in hints)


def _view(tensor: Tensor, index: Any) -> Tensor:
    """The same part of the tensor, without an axis for every number."""
    entries = _entries(index)
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        rest = tensor.dim() - sum(x is not None and x is not Ellipsis for x in entries)
        entries = (*entries[:place], *(slice(None),) * rest, *entries[place + 1 :])
    part = tensor[tuple(slice(x, x + 1) if isinstance(x, torch.SymInt) else x for x in entries)]
    axes = [x for x in entries if type(x) is not int]
    return part.squeeze(tuple(axis for axis, x in enumerate(axes) if isinstance(x, torch.SymInt)))


def _entries(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)
