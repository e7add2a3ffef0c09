"""The choice over sites against trying every set."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asapc.passes import solve
from asapc.passes.solve import Option, cheapest


def brute(sites: list[list[Option]], limits: tuple[float, ...]) -> float | None:
    """Cost of the best set."""
    found = [
        sum(own.cost for own in chosen)
        for chosen in itertools.product(*sites)
        if all(sum(own.damages[m] for own in chosen) <= limit + 1e-12 for m, limit in enumerate(limits))
    ]
    return min(found, default=None)


options = st.builds(
    lambda cost, a, b: Option(cost / 7, (a / 100, b / 50)),
    st.integers(0, 30), st.integers(0, 60), st.integers(0, 60),
)  # fmt: skip


@given(st.lists(st.lists(options, min_size=1, max_size=4), min_size=0, max_size=5))
def test_the_cheapest_set_is_found(sites: list[list[Option]]) -> None:
    limits = (1.0, 2.0)
    chosen, best = cheapest(sites, limits), brute(sites, limits)
    if best is None:
        assert chosen is None
        return
    own = [site[index] for site, index in zip(sites, chosen, strict=True)]
    for metric, limit in enumerate(limits):
        assert sum(option.damages[metric] for option in own) <= limit * (1 + 1e-8)
    assert sum(option.cost for option in own) == pytest.approx(best)


def test_limits_of_nothing_and_of_everything() -> None:
    sites = [[Option(1.0, (0.2,)), Option(5.0, (0.0,))]] * 3
    assert cheapest(sites, [0.0]) == [1, 1, 1]
    assert cheapest(sites, [math.inf]) == [0, 0, 0]
    assert cheapest(sites, [0.2]) in ([0, 1, 1], [1, 0, 1], [1, 1, 0])
    assert cheapest([[Option(1.0, (math.inf,))]], [1.0]) is None
    assert cheapest([[Option(1.0, (math.nan,)), Option(2.0, (0.0,))]], [1.0]) == [1]
    assert cheapest([[Option(math.inf, (0.0,)), Option(9.0, (0.0,))]], [1.0]) == [1]
    assert cheapest([], [1.0]) == []
    assert cheapest([[]], [1.0]) is None
    assert cheapest([[Option(2.0, ()), Option(1.0, ())]], []) == [1]


def test_many_sites_are_solved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three options at each of 48 sites: 3 ** 48 sets; a thinner table is hardly worse."""
    sites = [
        [Option(1.0, (0.011 + i / 5000,)), Option(2.0, (0.004,)), Option(3.0, (0.0,))] for i in range(48)
    ]
    chosen = cheapest(sites, [0.4])
    assert chosen is not None and {0, 1} <= set(chosen)
    assert sum(site[i].damages[0] for site, i in zip(sites, chosen, strict=True)) <= 0.4 * (1 + 1e-8)
    cost = sum(site[i].cost for site, i in zip(sites, chosen, strict=True))
    monkeypatch.setattr(solve, "MOST_WAYS", 60)
    thin = cheapest(sites, [0.4])
    assert sum(site[i].damages[0] for site, i in zip(sites, thin, strict=True)) <= 0.4 * (1 + 1e-8)
    assert cost <= sum(site[i].cost for site, i in zip(sites, thin, strict=True)) <= 1.05 * cost
