"""Solve: one option per site, the cheapest set whose damages add up to no more than the limits.

A knapsack with one weight per limited metric, exact: a table over the sites keeps every sum of damages
that can be reached, with the cheapest way there, and drops what another way beats at every metric. Only
where a table outgrows MOST_WAYS is it thinned, to the cheapest way in each cell of a grid; sums stay
true, so that what is found keeps the limits even then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_WAYS = 2000
ROUNDING = 1e-9  # of a limit: sums that should be equal to it are


@dataclass(frozen=True)
class Option:
    """cost: what is made small, >= 0.  damages: one a limit, >= 0.  inf of either: never chosen."""

    cost: float
    damages: tuple[float, ...]


@dataclass(frozen=True)
class _Way:
    cost: float
    damages: tuple[float, ...]
    chosen: tuple[int, ...]


def cheapest(sites: Sequence[Sequence[Option]], limits: Sequence[float]) -> list[int] | None:
    """The option of each site; None where no set keeps the limits. Of equals the least damage wins.

    limits: >= 0; a limit of 0 allows no damage at all, inf any.
    """
    most = tuple(limit * (1 + ROUNDING) for limit in limits)
    ways = [_Way(0.0, (0.0,) * len(limits), ())]
    for options in sites:
        reached = []
        for way in ways:
            for index, own in enumerate(options):
                sums = tuple(a + b for a, b in zip(way.damages, own.damages, strict=True))
                inside = all(total <= limit for total, limit in zip(sums, most, strict=True))
                if inside and not math.isinf(own.cost):
                    reached.append(_Way(way.cost + own.cost, sums, (*way.chosen, index)))
        ways = _undominated(reached)
        if len(ways) > MOST_WAYS:
            ways = _thinned(ways, limits)
    return list(ways[0].chosen) if ways else None


def _undominated(ways: Sequence[_Way]) -> list[_Way]:
    """By cost, without those that another way beats or equals at cost and every damage."""
    kept: list[_Way] = []
    least = math.inf
    for way in sorted(ways, key=lambda way: (way.cost, way.damages, way.chosen)):
        if len(way.damages) == 1:  # the least damage so far tells
            if way.damages[0] >= least:
                continue
            least = way.damages[0]
        elif any(all(a <= b for a, b in zip(x.damages, way.damages, strict=True)) for x in kept):
            continue
        kept.append(way)
    return kept


def _thinned(ways: Sequence[_Way], limits: Sequence[float]) -> list[_Way]:
    """The cheapest way in each cell; cells are as fine as MOST_WAYS allows."""
    parts = max(2, round(MOST_WAYS ** (1 / len(limits))))
    cells: dict[tuple[int, ...], _Way] = {}
    for way in ways:
        shares = zip(way.damages, limits, strict=True)
        cell = tuple(0 if math.isinf(x) or x == 0 else min(parts, int(d / x * parts)) for d, x in shares)
        cells.setdefault(cell, way)
    return list(cells.values())
