"""Solve: one option per site, the cheapest set whose damages add up to no more than the limits.

A knapsack with one weight per limited metric, exact: a table over the sites keeps every sum of damages
that can be reached, with the cheapest way there, and drops what another way beats at every metric. Only
where a table outgrows MOST_WAYS, or MOST_REACHED before anything is dropped, is it thinned, to the
cheapest way in each cell of a grid; sums stay true, so that what is found keeps the limits even then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_WAYS = 2000
MOST_REACHED = 20_000
ROUNDING = 1e-9  # of a limit: sums that should be equal to it are

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Option:
    """cost: what is made small, >= 0.  damages: one a limit, >= 0.  inf of either: never chosen."""

    cost: float
    damages: tuple[float, ...]


def cheapest(sites: Sequence[Sequence[Option]], limits: Sequence[float]) -> list[int] | None:
    """The option of each site; None where no set keeps the limits. Of equals the least damage wins.

    limits: >= 0; a limit of 0 allows no damage at all, inf any.
    """
    most = np.array([limit * (1 + ROUNDING) for limit in limits])
    ways = _Ways(np.zeros(1), np.zeros((1, len(limits))), np.zeros((1, 0), dtype=np.int64))
    for options in sites:
        parts = [ways.extended(index, option, most) for index, option in enumerate(options)]
        if not parts:
            return None
        ways = _joined(parts).ordered()
        if len(ways.cost) > MOST_REACHED:
            ways = _thinned(ways, limits)
        ways = _undominated(ways)
        if len(ways.cost) > MOST_WAYS:
            ways = _thinned(ways, limits)
    return [int(index) for index in ways.chosen[0]] if len(ways.cost) else None


@dataclass(frozen=True)
class _Ways:
    """cost: [W]; damages: [W, limits]; chosen: [W, sites so far]."""

    cost: Floats
    damages: Floats
    chosen: NDArray[np.int64]

    def extended(self, index: int, option: Option, most: Floats) -> _Ways:
        """With the index-th option of one more site, those inside the limits; none where it costs inf."""
        damages = self.damages + np.array(option.damages).reshape(1, -1)
        inside = ((damages <= most) & np.isfinite(damages)).all(1) & math.isfinite(option.cost)
        chosen = np.pad(self.chosen[inside], ((0, 0), (0, 1)), constant_values=index)
        return _Ways(self.cost[inside] + option.cost, damages[inside], chosen)

    def at(self, places: Any) -> _Ways:
        return _Ways(self.cost[places], self.damages[places], self.chosen[places])

    def ordered(self) -> _Ways:
        """By cost, then damages, then what is chosen."""
        keys = [*self.chosen.T[::-1], *self.damages.T[::-1], self.cost]
        return self.at(np.lexsort(keys))


def _joined(parts: Sequence[_Ways]) -> _Ways:
    fields = zip(*((part.cost, part.damages, part.chosen) for part in parts), strict=True)
    return _Ways(*(np.concatenate(field) for field in fields))


def _undominated(ways: _Ways) -> _Ways:
    """Without those that a way before them beats or equals at cost and every damage."""
    left, kept = np.arange(len(ways.cost)), []
    while len(left):
        kept.append(left[0])
        left = left[(ways.damages[left] < ways.damages[left[0]]).any(1)]
    return ways.at(np.array(kept, dtype=np.int64))


def _thinned(ways: _Ways, limits: Sequence[float]) -> _Ways:
    """The cheapest way in each cell; cells are as fine as MOST_WAYS allows."""
    parts = max(2, round(MOST_WAYS ** (1 / len(limits))))
    scale = [0.0 if math.isinf(x) or x == 0 else parts / x for x in limits]
    cells = np.minimum(parts, ways.damages * np.array(scale)).astype(np.int64)
    _, first = np.unique(cells, axis=0, return_index=True)
    return ways.at(np.sort(first))
