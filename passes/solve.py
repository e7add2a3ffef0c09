"""Solve: one option per site, the cheapest set whose damages add up to no more than the limits.

A knapsack with one weight per limited metric. Damages are rounded up to a grid of a limit's parts, so
that what is found keeps the limits, and is the cheapest among what the grid can tell apart; a table over
the sites keeps, for every reachable sum of damages, the cheapest way there, and drops what another way
beats at every metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PARTS = 1000  # of a limit, where one metric is limited
PARTS_OF_SEVERAL = 100


@dataclass(frozen=True)
class Option:
    """cost: what is made small, >= 0.  damages: one for each limit, >= 0; inf is never chosen."""

    cost: float
    damages: tuple[float, ...]


def cheapest(sites: Sequence[Sequence[Option]], limits: Sequence[float]) -> list[int] | None:
    """The option of each site; None where no set keeps the limits. The first of equals wins.

    limits: >= 0; a limit of 0 allows no damage at all, inf any.
    """
    parts = PARTS if len(limits) == 1 else PARTS_OF_SEVERAL
    ways: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {(0,) * len(limits): (0.0, ())}
    for options in sites:
        reached: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
        rounded = [_rounded(own.damages, limits, parts) for own in options]
        for damages, (cost, chosen) in ways.items():
            for index, own in enumerate(options):
                steps = rounded[index]
                if steps is None:
                    continue
                total = tuple(a + b for a, b in zip(damages, steps, strict=True))
                if any(step > parts for step in total):
                    continue
                way = (cost + own.cost, (*chosen, index))
                if total not in reached or way[0] < reached[total][0]:
                    reached[total] = way
        ways = _undominated(reached)
    if not ways:
        return None
    return list(min(ways.values(), key=lambda way: way[0])[1])


def _rounded(
    damages: Sequence[float], limits: Sequence[float], parts: int
) -> tuple[int, ...] | None:
    """Damages in parts of their limits, rounded up; None where one is beyond its limit."""
    steps = []
    for damage, limit in zip(damages, limits, strict=True):
        if not damage <= limit:
            return None
        share = 0.0 if damage <= 0 or math.isinf(limit) else damage / limit
        # A sum of rounded shares that is exactly the limit must not exceed it by rounding.
        steps.append(math.ceil(share * parts - 1e-9))
    return tuple(steps)


def _undominated(
    ways: dict[tuple[int, ...], tuple[float, tuple[int, ...]]],
) -> dict[tuple[int, ...], tuple[float, tuple[int, ...]]]:
    """Without those that cost no less than another with no more damage anywhere."""
    kept: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
    for damages, way in sorted(ways.items(), key=lambda item: (item[1][0], item[0])):
        if not any(all(a <= b for a, b in zip(own, damages, strict=True)) for own in kept):
            kept[damages] = way
    return kept
