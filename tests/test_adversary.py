"""Random conventions, as user code: each is identified exactly or refused; see adversary.py."""

from __future__ import annotations

import pytest
from adversary import Law, judge, random_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**31)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS)
def test_no_convention_is_taken_for_another(seed: int) -> None:
    case = random_case(seed, longest=12)  # long ones cost minutes, and are below
    found = judge(**case, seed=seed)
    if len(case["laws"]) > 1 and any(law.threshold for law in case["laws"]):
        return  # they share a module: what ends one early leaves the other as it is, too
    plain = [law for law in case["laws"] if law.identifiable and not law.threshold and not law.constant]
    assert found.count("identified") >= len(plain), (found, plain)


# What was once taken for another loop, or could be.
KNOWN = {
    "20 half-steps, columns first": (Law(half_steps=20, rows_first=False, form="potentials"),),
    "two layers, used in the other order": (Law(half_steps=5), Law(half_steps=6, rows_first=False)),
    "clamped sums": (Law(half_steps=8, form="plan", constant=1e-6, clamp=True, offset="softmax"),),
    "a constant added to sums, low scores": (
        Law(half_steps=6, form="scaling", constant=1e-9, shares=True, mask="low"),
    ),
    "a stop that changes nothing": (Law(half_steps=8, form="potentials", threshold=1e-12),),
}
REFUSED = {
    "a stop that does": (Law(half_steps=9, form="potentials", threshold=1e-2), "ends early"),
    "damped": (Law(half_steps=9, form="potentials", damping=0.9), "Sinkhorn"),
    "a temperature for each head, low scores left out": (Law(by_head=True), "neither a mask nor a bias"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_loops_that_are_known(name: str) -> None:
    laws = KNOWN[name]
    assert judge(laws, len(laws) == 2, True, False, 3) == ["identified"] * len(laws)


def test_a_temperature_for_each_head_is_part_of_the_scores() -> None:
    law = Law(half_steps=6, by_head=True, form="scaling", constant=1e-9)
    assert judge((law,), False, False, True, 3) == ["identified on its scores"]


@pytest.mark.parametrize("name", REFUSED)
def test_loops_that_are_not(name: str) -> None:
    law, why = REFUSED[name]
    (found,) = judge((law,), False, False, True, 3)
    assert found.startswith("refused") and why in found
