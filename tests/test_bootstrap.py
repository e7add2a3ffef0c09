"""Intervals against closed forms, coverage on samples of known distributions, degenerate samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from scipy.stats import bootstrap as scipy_bootstrap

from asapc.measure import bootstrap


def hits(count: int, total: int) -> torch.Tensor:
    return torch.arange(total) < count


@pytest.mark.parametrize("total", [1, 2, 10, 500])
def test_a_share_of_one_or_zero_has_clopper_pearsons_width(total: int) -> None:
    """All of n: the lower end p solves p^n = 2.5 %."""
    low, high = bootstrap.share(hits(total, total)) or (0, 0)
    assert high == 1.0 and low == pytest.approx(0.025 ** (1 / total))
    assert bootstrap.share(hits(0, total)) == pytest.approx((1 - high, 1 - low))


def test_a_share_covers_percentiles_and_never_gets_better_with_a_miss() -> None:
    found = [bootstrap.share(hits(count, 500)) or (0, 0) for count in (480, 499, 500)]
    assert found[0][0] < found[1][0] < found[2][0]
    low, high = found[0]
    assert low <= binom.ppf(0.025, 500, 0.96) / 500 + 1e-3
    assert high >= binom.ppf(0.975, 500, 0.96) / 500 - 1e-3
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.96 * 0.04 / 500), rel=0.2)


@pytest.mark.parametrize(
    "sample",
    [
        np.random.default_rng(2).lognormal(size=120),
        np.random.default_rng(3).integers(0, 3, 40).astype(float),
        -np.random.default_rng(4).exponential(size=20), np.array([0.0, 0.0, 0.0, 1.0, 50.0]),
    ],
    ids=["skewed", "ties", "few", "outlier"],
)
def test_a_mean_is_as_scipy_has_it(sample: NDArray[np.float64]) -> None:
    """To rounding: an example's influence on a mean is its jackknife value, and the draws are alike."""
    drawn = {"n_resamples": bootstrap.RESAMPLES, "method": "BCa", "rng": np.random.default_rng(5)}
    exact = scipy_bootstrap((sample,), np.mean, **drawn).confidence_interval
    found = bootstrap.mean(torch.from_numpy(sample), seed=5)
    assert found == pytest.approx((exact.low, exact.high), rel=1e-12)


def test_a_drop_is_paired() -> None:
    """Equal answers leave only what n examples cannot show; independent ones have a wide interval."""
    first = hits(350, 500)
    low, high = bootstrap.difference(first, first) or (9, 9)
    assert low == -high and high == pytest.approx(1 - 0.025 ** (1 / 500))
    shuffled = first[torch.randperm(500, generator=torch.Generator().manual_seed(0))]
    wide = bootstrap.difference(first, shuffled) or (9, 9)
    assert wide[0] < 0 < wide[1]
    sd = math.sqrt(2 * 0.7 * 0.3 / 500)
    assert wide[1] - wide[0] == pytest.approx(2 * 1.96 * sd, rel=0.15)
    all_lost = bootstrap.difference(hits(5, 5), hits(0, 5)) or (9, 9)
    assert 0 < all_lost[0] < 0.5 and all_lost[1] == 1
    assert bootstrap.difference(~first, ~shuffled) == pytest.approx((-wide[1], -wide[0]), abs=0.004)


def test_the_same_values_give_the_same_interval_and_other_seeds_another() -> None:
    values = torch.rand(100, generator=torch.Generator().manual_seed(3))
    np.random.seed(0)
    first = bootstrap.mean(values)
    np.random.seed(1)
    torch.manual_seed(5)
    assert bootstrap.mean(values) == first
    assert bootstrap.mean(values, seed=1) not in (first, None)
    narrow = bootstrap.mean(values, level=0.5) or (0, 0)
    assert first is not None and first[0] < narrow[0] < narrow[1] < first[1]


def test_pieces_of_resamples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(100, generator=torch.Generator().manual_seed(3))
    whole = bootstrap.mean(values)
    monkeypatch.setattr(bootstrap, "_PIECE", 700)
    assert bootstrap.mean(values) == whole


def test_nothing_is_said_without_examples_and_nothing_good_of_broken_ones() -> None:
    empty = torch.zeros(0)
    assert bootstrap.mean(empty) is None and bootstrap.mean(torch.ones(1)) is None
    assert bootstrap.share(empty.bool()) is None
    assert bootstrap.difference(empty.bool(), empty.bool()) is None
    assert bootstrap.mean(torch.zeros(9)) == (0, 0) and bootstrap.mean(torch.full((9,), 2.0)) == (2, 2)
    for broken in (math.nan, math.inf):
        assert bootstrap.mean(torch.tensor([1.0, broken])) == (math.inf, math.inf)
        assert bootstrap.root_ratio(torch.tensor([1.0, broken]), torch.ones(2)) == (math.inf, math.inf)
    assert bootstrap.root_ratio(torch.ones(3), torch.zeros(3)) == (math.inf, math.inf)
    assert bootstrap.root_ratio(torch.zeros(3), torch.zeros(3)) == (0, 0)
