"""Solve: one option per site, the cheapest set whose damages add up to no more than the limits.

An integer program with a weight for each limited metric, which HiGHS solves by way of scipy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its packages load where they are used first, not with every command

ROUNDING = 1e-6  # of a limit: sums that should be equal to it are
LARGEST = 1e3  # cost in the program: HiGHS takes costs to be equal within 1e-6
EQUAL = 1e-4  # the most that damage counts beside it


@dataclass(frozen=True)
class Option:
    """cost: what is made small, >= 0.  damages: one a limit, >= 0.  inf of either: never chosen."""

    cost: float
    damages: tuple[float, ...]


def cheapest(sites: Sequence[Sequence[Option]], limits: Sequence[float]) -> list[int] | None:
    """The option of each site; None where no set keeps the limits. Of equals the least damage wins.

    limits: >= 0; a limit of 0 allows no damage at all, inf any.
    """
    possible = [
        (site, place, option)
        for site, options in enumerate(sites) for place, option in enumerate(options)
        if math.isfinite(option.cost) and all(
            math.isfinite(damage) and damage <= limit * (1 + ROUNDING)
            for damage, limit in zip(option.damages, limits, strict=True)
        )
    ]  # fmt: skip
    site_of = np.array([site for site, _, _ in possible])
    if not {*range(len(sites))} <= {*site_of}:
        return None
    if not sites:
        return []
    costs = np.array([option.cost for _, _, option in possible])
    shares = np.array([  # of each limit
        [option.damages[metric] / limit for _, _, option in possible]
        for metric, limit in enumerate(limits) if 0 < limit < math.inf
    ])  # fmt: skip
    one_each = (site_of == np.arange(len(sites))[:, None], 1, 1)
    solution = scipy.optimize.milp(
        LARGEST * costs / (costs.max() or 1.0) + EQUAL * shares.sum(0),
        integrality=np.ones(len(costs), int), options={"mip_rel_gap": 0.0},
        constraints=[one_each, *([(shares, -math.inf, 1)] if len(shares) else [])],
    )  # fmt: skip
    if solution.x is None:
        return None
    return [place for (_, place, _), taken in zip(possible, solution.x, strict=True) if taken > 0.5]
