"""Metrics against hand-computed values; certificates against what they promise to bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asapc.fidelity import (
    METRICS,
    AttentionFidelity,
    OutputFidelity,
    TensorFidelity,
    contraction_bound,
    dual_stability_factor,
    row_error_bound,
)
from asapc.operators.closures import close_columns, close_rows, log_marginals
from asapc.operators.sinkhorn import attention_map, finite_duals

UNIT = [1.0, 1.0, 0.0, 0.0]  # attention units, A = N P


def random_map(seed, shape=(3, 2, 4, 5)):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def test_attention_metrics_stream_and_are_registered():
    teacher, compiled = random_map(0), random_map(1)
    whole, parts = AttentionFidelity(), AttentionFidelity()
    whole.update(teacher, compiled)
    for i in range(3):
        parts.update(teacher[i : i + 1], compiled[i : i + 1])
    assert parts.metrics() == pytest.approx(whole.metrics())
    assert set(whole.metrics()) <= set(METRICS)
    relative = (compiled - teacher).norm(dim=(-2, -1)) / teacher.norm(dim=(-2, -1))
    assert whole.metrics()["attention_rel_l2"] == pytest.approx(float(relative.mean()))
    assert whole.metrics()["attention_rel_l2_worst"] == pytest.approx(float(relative.max()))


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


@pytest.mark.parametrize("half_steps", [9, 10], ids=["row_ending", "column_ending"])
@pytest.mark.parametrize("n", [4, 7])
def test_closed_side_has_no_error(n, half_steps):
    scores = torch.randn(2, 3, n, 5, generator=torch.Generator().manual_seed(0)).double()
    keep = torch.tensor([[True] * 5, [True, True, False, True, False]])
    scores = scores.masked_fill(~keep[:, None, None, :], -math.inf)
    f, g = finite_duals(scores, half_steps, "row", keep)
    attention = attention_map(scores, f, g, UNIT, keep)
    fidelity = AttentionFidelity()
    fidelity.update(attention, attention, keep)
    exact = "row_err" if half_steps == 9 else "col_err"
    other = "col_err" if half_steps == 9 else "row_err"
    assert fidelity.metrics()[exact] < 1e-14 < fidelity.metrics()[other]


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
    teacher = torch.ones(1, 1, 64, 64)
    fidelity = AttentionFidelity()
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
        "output_rmse": 0.25,
        "output_rel_l2": pytest.approx(0.1),
        "max_abs_error": 0.5,
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
    assert set(found) <= set(METRICS)


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


def random_scores(seed, n, m, spread, masked):
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(2, 2, n, m, generator=generator, dtype=torch.float64)
    if not masked:
        return scores, None, generator
    keep = torch.rand(2, m, generator=generator) < 0.6
    keep[:, 0] = True
    return scores.masked_fill(~keep[:, None, None, :], -math.inf), keep, generator


cases = {
    "seed": st.integers(0, 10_000),
    "n": st.integers(1, 6),
    "m": st.integers(1, 6),
    "spread": st.sampled_from([0.1, 1.0, 4.0]),
    "masked": st.booleans(),
}


@settings(max_examples=50, deadline=None)
@given(**cases)
def test_row_error_bound_holds(seed, n, m, spread, masked):
    scores, keep, generator = random_scores(seed, n, m, spread, masked)
    log_mu, log_nu = log_marginals(n, m, keep, scores)
    g_0 = close_columns(scores, torch.randn(2, 2, n, generator=generator).double(), log_nu)
    f = close_rows(scores, g_0, log_mu)
    g_plus = close_columns(scores, f, log_nu)
    attention = attention_map(scores, f, g_plus, UNIT, keep)
    row_err = (attention.sum(-1) - 1).abs().mean(-1)
    bound = row_error_bound(g_plus, g_0)
    assert bound.shape == (2, 2) and bound.dtype == torch.float64
    assert (row_err <= bound + 1e-12).all()


@settings(max_examples=50, deadline=None)
@given(**cases, closures=st.integers(1, 4))
def test_dual_stability_holds_after_any_closures(seed, n, m, spread, masked, closures):
    scores, keep, generator = random_scores(seed, n, m, spread, masked)
    log_mu, log_nu = log_marginals(n, m, keep, scores)
    f = torch.randn(2, 2, n, generator=generator).double()
    f_hat = f + 0.3 * torch.randn(2, 2, n, generator=generator) + 5.0
    maps = []
    for dual in (f, f_hat):
        for step in range(closures):
            if step % 2 == 0:
                g = close_columns(scores, dual, log_nu)
            else:
                dual = close_rows(scores, g, log_mu)
        maps.append(attention_map(scores, dual, g, UNIT, keep))
    ratio = torch.where(maps[0] > 0, maps[1] / maps[0], 1.0)
    factor = dual_stability_factor(f_hat, f)[..., None, None] * (1 + 1e-9)
    assert (ratio <= factor).all() and (ratio >= 1 / factor).all()


def oscillation(values):
    finite = values.masked_fill(values.isinf(), math.nan)
    flat = finite.flatten(0, 1).numpy()
    return torch.from_numpy(np.nanmax(flat, -1) - np.nanmin(flat, -1)).view(values.shape[:2])


@settings(max_examples=50, deadline=None)
@given(**cases)
def test_contraction_bound_holds(seed, n, m, spread, masked):
    scores, keep, generator = random_scores(seed, n, m, spread, masked)
    log_mu, log_nu = log_marginals(n, m, keep, scores)
    ends, starts = [], []
    for _ in range(2):
        g = torch.randn(2, 2, m, generator=generator).double()
        if keep is not None:
            g = g.masked_fill(~keep[:, None, :], -math.inf)
        starts.append(g)
        ends.append(close_columns(scores, close_rows(scores, g, log_mu), log_nu))
    before = torch.where(starts[0].isinf(), -math.inf, starts[0] - starts[1])
    after = torch.where(ends[0].isinf(), -math.inf, ends[0] - ends[1])
    bound = contraction_bound(scores, keep)
    assert ((bound >= 0) & (bound <= 1)).all()
    assert (oscillation(after) <= bound * oscillation(before) + 1e-12).all()


def test_contraction_bound_is_tight_where_a_quarter_range_would_be_wrong():
    """S = [[t, 0], [0, t]]: near the fixed point one iteration contracts by tanh^2(t / 2)."""
    t, small = 2.0, 1e-6
    scores = torch.tensor([[[[t, 0.0], [0.0, t]]]], dtype=torch.float64)
    log_mu, log_nu = log_marginals(2, 2, None, scores)
    _, fixed = finite_duals(scores, 200, "row", None)
    g = fixed + torch.tensor([small, -small], dtype=torch.float64)
    after = close_columns(scores, close_rows(scores, g, log_mu), log_nu)
    rate = float(oscillation(after - fixed) / (2 * small))
    bound = float(contraction_bound(scores))
    assert bound == pytest.approx(math.tanh(t / 2) ** 2)
    assert rate == pytest.approx(bound, rel=1e-6) and rate > math.tanh(t / 4) ** 2


def test_contraction_bound_ignores_offsets_and_padding():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 1, 4, 5, generator=generator).double()
    rows, columns = (30 * torch.randn(size, generator=generator).double() for size in (4, 5))
    offsets = rows[:, None] + columns  # added in float64: rounding would be more than an offset
    assert contraction_bound(scores) <= math.tanh(float(scores.max() - scores.min()) / 2) ** 2
    shifted = contraction_bound(scores + offsets)
    assert shifted < 1 and shifted >= contraction_bound(scores) - 1e-12
    keep = torch.tensor([[True, True, True, True, False]])
    poisoned = scores.clone()
    poisoned[..., 4] = -math.inf
    torch.testing.assert_close(
        contraction_bound(poisoned, keep), contraction_bound(scores[..., :4])
    )
    assert contraction_bound(poisoned, torch.zeros(1, 5, dtype=torch.bool)).item() == 0.0
    assert contraction_bound(scores[..., :1]).item() == pytest.approx(0.0, abs=1e-30)


def test_every_metric_is_described():
    for name, info in METRICS.items():
        assert name.isidentifier() and info.doc
        assert info.direction in ("min", "max") and info.scope in ("site", "model", "both")


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
