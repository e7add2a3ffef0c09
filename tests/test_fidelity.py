"""Metrics against hand-computed values, whole and by head, length and example."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from scipy.stats import bootstrap as scipy_bootstrap

from asapc.measure import bootstrap
from asapc.measure.differences import tensor_outputs
from asapc.measure.fidelity import AttentionFidelity, OutputFidelity, TensorFidelity, length_bins
from asapc.metrics import METRIC


def random_map(seed, shape=(3, 2, 4, 5)):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Named(OrderedDict):
    """Which pytree does not know."""


@dataclass
class Result:
    logits: torch.Tensor
    kind: str = ""


def test_tensors_in_containers_that_pytree_does_not_know():
    one, two = torch.ones(2), torch.zeros(3)
    found = tensor_outputs([Named(y=one, none=None), Result(two), {"z": (one, 1)}])
    assert [x.shape for x in found] == [one.shape, two.shape, one.shape]


def test_attention_by_hand():
    teacher = torch.tensor([[[[0.75, 0.25], [0.25, 0.75]]]])
    compiled = torch.tensor([[[[0.75, 0.5], [0.25, 0.75]]]])
    fidelity = AttentionFidelity()
    assert fidelity.metrics() == {}
    fidelity.update(teacher, compiled)
    found = fidelity.metrics()
    assert found["attention_rel_l2"] == pytest.approx(0.25 / math.sqrt(1.25))
    assert found["attention_rel_l2_worst"] == found["attention_rel_l2"]
    assert found["row_err"] == pytest.approx(0.125) and found["row_err_teacher"] == 0.0
    assert found["col_err"] == pytest.approx(0.125) and found["col_err_teacher"] == 0.0
    # KL(P || P^) with P = A / 2: 1/8 log(1/2) - 1 + 9/8
    assert found["plan_kl"] == pytest.approx(math.log(0.5) / 8 + 1 / 8)


def test_attention_masks():
    """Padded keys leave column errors alone; an example without active keys counts nowhere."""
    keep = torch.tensor([[True, True, False, False, False], [False] * 5])
    teacher = torch.zeros(2, 1, 2, 5)
    teacher[0, 0, :, :2] = 1.25
    compiled = teacher.clone()
    compiled[1] = math.nan
    fidelity = AttentionFidelity()
    fidelity.update(teacher, compiled, keep)
    found = fidelity.metrics()
    assert found["attention_rel_l2"] == 0.0 and found["plan_kl"] == 0.0
    assert found["col_err"] == pytest.approx(2.5 * 5 / 2 - 1)
    assert found["row_err"] == pytest.approx(1.5)
    assert (fidelity.pairs, fidelity.rows, fidelity.columns) == (1, 2, 2)


def test_broken_maps_are_never_good():
    teacher, compiled = random_map(0), random_map(0)
    compiled[1, 1, 2, 2] = math.nan
    fidelity = AttentionFidelity()
    fidelity.update(teacher, compiled)
    fidelity.update(teacher, teacher)  # a good batch afterwards does not heal it
    found = fidelity.metrics()
    for name in ("attention_rel_l2", "attention_rel_l2_worst", "plan_kl", "row_err", "col_err"):
        assert found[name] == math.inf
    underflown = AttentionFidelity()
    underflown.update(teacher, torch.zeros_like(teacher))
    assert underflown.metrics()["attention_rel_l2"] == 1.0
    assert math.isfinite(underflown.metrics()["plan_kl"])
    with pytest.raises(ValueError, match="one shape"):
        fidelity.update(teacher, teacher[:, :, :1])


def test_float32_maps_are_summed_in_float64():
    """100 maps of a relative error that float32 sums would lose."""
    fidelity, teacher = AttentionFidelity(), torch.ones(1, 1, 64, 64)
    for _ in range(100):
        fidelity.update(teacher, teacher * (1 + 2**-22))
    assert fidelity.metrics()["attention_rel_l2"] == pytest.approx(2**-22, rel=1e-12)


def test_tensor_fidelity():
    fidelity = TensorFidelity()
    assert fidelity.metrics() == {}
    fidelity.update(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    fidelity.update(torch.zeros(2), torch.zeros(2))
    fidelity.update(torch.zeros(0), torch.zeros(0))
    assert fidelity.metrics() == {
        "output_rmse": 0.25, "output_rel_l2": pytest.approx(0.1), "max_abs_error": 0.5,
    }
    silent = TensorFidelity()
    silent.update(torch.zeros(2), torch.zeros(2))
    assert silent.metrics()["output_rel_l2"] == 0.0
    silent.update(torch.zeros(2), torch.ones(2))
    assert silent.metrics()["output_rel_l2"] == math.inf
    silent.update(torch.zeros(2), torch.full((2,), math.nan))
    assert set(silent.metrics().values()) == {math.inf}


def test_outputs_with_labels():
    teacher = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 3.0]])
    compiled = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 3.0]])
    fidelity = OutputFidelity()
    fidelity.update(teacher[:2], compiled[:2], torch.tensor([0, 0]))
    fidelity.update(teacher[2:], compiled[2:], torch.tensor([[0], [1]]))
    found = fidelity.metrics()
    assert found["prediction_agreement"] == 0.75
    assert (found["accuracy_teacher"], found["accuracy_compiled"]) == (0.75, 0.5)
    assert found["accuracy_drop"] == 0.25 and found["max_abs_error"] == 1.0
    p, q = teacher.double().softmax(-1), compiled.double().softmax(-1)
    assert found["logit_kl"] == pytest.approx(float((p * (p / q).log()).sum()) / 4)
    assert set(found) <= set(METRIC)


def test_rounded_probabilities_have_no_negative_divergence():
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(64, 4, generator=generator).softmax(-1)
    fidelity = OutputFidelity()
    fidelity.update(teacher, teacher * (1 + 1e-7))
    fidelity.update(teacher * (1 + 1e-7), teacher)
    assert 0 <= fidelity.metrics()["logit_kl"] < 1e-10
    assert min(fidelity.confidence()["logit_kl"]) >= 0


def test_logits_are_found_among_other_outputs():
    """[1, 0] reads as a distribution; the compiled row shows that it is a logit."""
    logits = torch.tensor([[1.0, 0.0]])
    maps = torch.rand(1, 2, 3, 3)
    fidelity = OutputFidelity()
    fidelity.update(
        {"attention": [maps.numpy()], "ids": torch.zeros(1, 2).long(), "logits": logits},
        {"attention": [maps.numpy() + 1], "ids": torch.zeros(1, 2).long(), "logits": logits + 1},
    )
    found = fidelity.metrics()
    assert found["max_abs_error"] == 1.0 and found["prediction_agreement"] == 1.0
    assert found["logit_kl"] == pytest.approx(0.0, abs=1e-15)
    assert "accuracy_teacher" not in found


def test_outputs_without_logits():
    fidelity = OutputFidelity()
    fidelity.update((torch.ones(2, 3, 4), None, "text"), (torch.ones(2, 3, 4), None, "text"))
    assert fidelity.metrics() == {"output_rmse": 0.0, "output_rel_l2": 0.0, "max_abs_error": 0.0}
    array = OutputFidelity()
    array.update(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32))
    assert array.metrics()["prediction_agreement"] == 1.0


@pytest.mark.parametrize("scale", [1.0, 1000.0], ids=["near", "far"])
def test_probabilities_and_log_probabilities_equal_logits(scale):
    generator = torch.Generator().manual_seed(0)
    teacher, compiled = (torch.randn(6, 4, generator=generator).double() for _ in range(2))
    teacher = teacher * scale
    values = []
    for form in (lambda x: x, lambda x: x.log_softmax(-1), lambda x: x.softmax(-1)):
        fidelity = OutputFidelity()
        fidelity.update(form(teacher), form(compiled))
        values.append(fidelity.metrics())
    for name in ("logit_kl", "prediction_agreement"):
        assert values[0][name] == pytest.approx(values[1][name])
        assert values[0][name] == pytest.approx(values[2][name])


def test_binary_single_column():
    logits, probabilities = OutputFidelity(), OutputFidelity()
    teacher = torch.tensor([[-2.0], [0.5], [3.0]]).double()
    compiled = torch.tensor([[-1.0], [-0.5], [3.0]]).double()
    labels = torch.tensor([0, 1, 1])
    logits.update(teacher, compiled, labels)
    probabilities.update(teacher.sigmoid(), compiled.sigmoid(), labels)
    assert logits.metrics()["prediction_agreement"] == pytest.approx(2 / 3)
    assert logits.metrics()["accuracy_teacher"] == 1.0
    for name in ("prediction_agreement", "accuracy_compiled", "logit_kl"):
        assert probabilities.metrics()[name] == pytest.approx(logits.metrics()[name])


def test_broken_outputs_are_never_good():
    fidelity = OutputFidelity()
    teacher = torch.tensor([[0.0, 1.0]])
    fidelity.update(teacher, torch.tensor([[math.nan, 1.0]]), torch.tensor([0]))
    found = fidelity.metrics()
    assert found["max_abs_error"] == found["logit_kl"] == found["output_rmse"] == math.inf
    assert found["prediction_agreement"] == 0.0 and found["accuracy_compiled"] == 0.0
    with pytest.raises(ValueError, match="same float tensors"):
        fidelity.update(teacher, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="same float tensors"):
        fidelity.update(None, None)


def test_padded_queries_without_mass_enter_no_row_error() -> None:
    keep = torch.tensor([[True, True, False]])
    balanced = torch.zeros(1, 2, 3, 3)
    balanced[..., :2, :2] = 0.5
    fidelity = AttentionFidelity()
    fidelity.update(balanced, balanced, keep, keep)
    metrics = fidelity.metrics()
    assert metrics["row_err"] == metrics["col_err"] == 0.0
    fidelity = AttentionFidelity()
    fidelity.update(balanced, balanced, keep)  # a Sinkhorn layer's padded queries keep their mass
    assert fidelity.metrics()["row_err"] == pytest.approx(1 / 3)


def test_attention_by_head_length_and_example():
    """Errors of 10 % in head 0 and 0 in head 1, but for one long example with 40 % in head 1."""
    keep = torch.arange(5)[None, :] < torch.tensor([2, 2, 5, 3, 0])[:, None]
    teacher = random_map(0, (5, 2, 4, 5)) * keep[:, None, None, :]
    compiled = teacher.clone()
    compiled[:, 0] *= 1.1
    compiled[2, 1] *= 1.4
    fidelity = AttentionFidelity()
    assert fidelity.by_head() == {} and fidelity.by_length() == [] and fidelity.confidence() == {}
    fidelity.update(teacher[:2], compiled[:2], keep[:2])
    fidelity.update(teacher[2:], compiled[2:], keep[2:])  # the last example has no active key
    assert fidelity.by_head() == {"attention_rel_l2": pytest.approx([0.1, 0.1])}
    assert fidelity.by_length() == [
        {"low": 2, "high": 2, "examples": 2, "attention_rel_l2": pytest.approx(0.05)},
        {"low": 3, "high": 3, "examples": 1, "attention_rel_l2": pytest.approx(0.05)},
        {"low": 5, "high": 5, "examples": 1, "attention_rel_l2": pytest.approx(0.25)},
    ]
    low, high = fidelity.confidence()["attention_rel_l2"]
    mean = fidelity.metrics()["attention_rel_l2"]
    # resampled are examples, whose errors are 0.05, 0.05, 0.05 and 0.25
    assert mean == pytest.approx(0.1) and 0.05 <= low < mean < high <= 0.25
    compiled[0, 0, 0, 0] = math.nan
    fidelity.update(teacher[:1], compiled[:1], keep[:1])
    assert fidelity.by_head()["attention_rel_l2"][0] == math.inf
    assert fidelity.by_length()[0]["attention_rel_l2"] == math.inf
    assert fidelity.confidence()["attention_rel_l2"] == (math.inf, math.inf)


def test_confidence_of_outputs():
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(40, 3, generator=generator)
    compiled = teacher.clone()
    compiled[30:] = compiled[30:].roll(1, -1)
    labels = teacher.argmax(-1)
    whole, parts = OutputFidelity(), OutputFidelity()
    whole.update(teacher, compiled, labels)
    for i in range(0, 40, 7):
        part = slice(i, i + 7)
        parts.update(teacher[part], compiled[part], labels[part])
    confidence = whole.confidence()
    assert parts.confidence() == confidence
    assert set(confidence) == set(whole.metrics()) - {"output_rmse", "max_abs_error"}
    for name, (low, high) in confidence.items():
        assert low <= whole.metrics()[name] <= high, name
    assert confidence["accuracy_teacher"][1] == 1.0 and 0.9 < confidence["accuracy_teacher"][0] < 1
    unnamed = OutputFidelity()
    unnamed.update(teacher, compiled)
    assert "accuracy_drop" not in unnamed.confidence()
    assert OutputFidelity().confidence() == {}


def test_confidence_of_the_relative_error_is_over_examples():
    fidelity = TensorFidelity()
    assert fidelity.confidence() == {}
    teacher = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    fidelity.update(teacher, 1.01 * teacher)
    low, high = fidelity.confidence()["output_rel_l2"]
    assert (low, high) == pytest.approx((0.01, 0.01), rel=1e-4)
    fidelity.update(teacher[:5], 2 * teacher[:5])
    low, high = fidelity.confidence()["output_rel_l2"]
    assert low < fidelity.metrics()["output_rel_l2"] < high
    single = TensorFidelity()
    single.update(torch.tensor(2.0), torch.tensor(3.0))
    assert single.metrics()["output_rel_l2"] == 0.5 and single.confidence() == {}


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([7] * 9, [(7, 7, 9)]),
        ([1, 2, 3], [(1, 1, 1), (2, 2, 1), (3, 3, 1)]),
        ([4] * 50 + [*range(10, 20)], [(4, 4, 50), (10, 11, 2), (12, 14, 3), (15, 16, 2), (17, 19, 3)]),
        ([], []),
    ],
)  # fmt: skip
def test_length_bins(lengths, expected):
    found = length_bins(torch.tensor(lengths, dtype=torch.long))
    assert [(b["low"], b["high"], b["examples"]) for b, _ in found] == expected
    assert [int(chosen.sum()) for _, chosen in found] == [count for _, _, count in expected]


# Intervals, on samples of known distributions and degenerate ones


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
    rng = np.random.default_rng(bootstrap.SEED)
    drawn = {"n_resamples": bootstrap.RESAMPLES, "method": "BCa", "rng": rng}
    exact = scipy_bootstrap((sample,), np.mean, **drawn).confidence_interval
    found = bootstrap.mean(torch.from_numpy(sample))
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


def test_the_same_values_give_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the global generators are at, in pieces of any size; by another seed another one."""
    values = torch.rand(100, generator=torch.Generator().manual_seed(3))
    np.random.seed(0)
    first = bootstrap.mean(values)
    np.random.seed(1)
    torch.manual_seed(5)
    monkeypatch.setattr(bootstrap, "_PIECE", 700)
    assert bootstrap.mean(values) == first
    monkeypatch.setattr(bootstrap, "SEED", 1)
    assert bootstrap.mean(values) not in (first, None)


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
