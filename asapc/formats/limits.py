"""How small and how large torch.export lets a dynamic size be."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph
from torch.utils._sympy.value_ranges import ValueRanges

MOST = 2**31 - 1  # of a size that has no limit
_LEAST = "asapc_least"  # attribute of a shape environment: lower limits by symbol


def limits_of(environment: Any, symbol: Any) -> tuple[int, int]:
    """The least and most that a symbol of a shape environment may be.

    Every size is traced as 2 or more and may be less, unless `demand` forbids it: 0 means no limit.
    """
    limits = environment.var_to_range.get(symbol)
    if limits is None:
        return 0, MOST
    if limits.lower == limits.upper:
        return int(limits.lower), int(limits.upper)
    low = int(limits.lower) if limits.lower > 2 else getattr(environment, _LEAST, {}).get(symbol, 0)
    return low, int(limits.upper) if limits.upper < MOST else MOST


def allow(environment: Any, symbol: Any, most: int) -> None:
    """Let a symbol be `most` or less."""
    limits = environment.var_to_range[symbol]
    environment.var_to_range[symbol] = limits & ValueRanges(limits.lower, max(most, limits.lower))


def demand(environment: Any, symbol: Any, least: int) -> None:
    """Let a symbol be `least` (up to 3) or more."""
    noted = getattr(environment, _LEAST, {})
    setattr(environment, _LEAST, {**noted, symbol: max(least, noted.get(symbol, 0))})


def fixed_size(size: Any) -> int | None:
    """The number that a traced size is, or that the trace was specialised to; None if it is free."""
    number = size if isinstance(size, int) else size.node.maybe_as_int()
    return None if number is None else int(number)


def free_sizes(graph: Graph) -> dict[str, Any]:
    """The sizes of a program's inputs that are free, by symbol."""
    inputs = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    sizes: list[Any] = [size for value in inputs if isinstance(value, Tensor) for size in value.shape]
    return {str(size.node.expr): size for size in sizes if fixed_size(size) is None}


def limits(size: Any) -> tuple[int, int]:
    """The least and most that a traced size may be."""
    number = fixed_size(size)
    return limits_of(size.node.shape_env, size.node.expr) if number is None else (number, number)
