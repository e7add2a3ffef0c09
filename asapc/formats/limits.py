"""How small and how large torch.export lets a dynamic size be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 2**31 - 1  # of a size that has no limit


def limits_of(ranges: Mapping[Any, Any], symbol: Any) -> tuple[int, int]:
    """Least and most of a symbol, by the ranges of a program or of its shape environment.

    Every size is traced as 2 or more and may be less: 0 stands for no limit.
    """
    limits = ranges.get(symbol)
    if limits is None:
        return 0, MOST
    if limits.lower == limits.upper:
        return int(limits.lower), int(limits.upper)
    low = int(limits.lower) if limits.lower > 2 else 0
    return low, int(limits.upper) if limits.upper < MOST else MOST


def fixed_size(size: Any) -> int | None:
    """The number that a traced size is, also one that the trace has become specialised to."""
    number = size if isinstance(size, int) else size.node.maybe_as_int()
    return None if number is None else int(number)
