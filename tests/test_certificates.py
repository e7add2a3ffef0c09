"""Certificates against closed forms, tight cases, and activations on which a wrong bound shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asapc.calibration.teacher import TeacherDuals
from asapc.features.predictor import RecipeSide, TransformPlan, transform_plan
from asapc.ir import Convention, SiteTensors
from asapc.operators.masks import hidden_queries
from asapc.operators.sinkhorn import finite_duals
from asapc.report import certificates
from asapc.report.certificates import (
    Block,
    SiteCertificates,
    Tilt,
    contraction_bound,
    exact_contraction,
    spread_of,
    tilt,
    truncation_bound,
)

UNIT = [1.0, 1.0, 0.0, 0.0]  # attention units, A = N P


def random_scores(seed: int, n: int, m: int, spread: float) -> tuple[Block, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(2, 2, n, m, generator=generator, dtype=torch.float64)
    return Block(scores, -math.log(n), -math.log(m)), generator


cases = {
    "seed": st.integers(0, 10_000), "n": st.integers(1, 6), "m": st.integers(1, 6),
    "spread": st.sampled_from([0.1, 1.0, 4.0]),
}


@settings(max_examples=25, deadline=None)
@given(**cases)
def test_contraction_bounds_hold_and_the_exact_one_says_no_less(seed, n, m, spread):
    block, generator = random_scores(seed, n, m, spread)
    one, other = (torch.randn(2, 2, m, generator=generator).double() for _ in range(2))
    ends = [block.flipped().closed(g, 2)[-1].f for g in (one, other)]
    before, after = spread_of(one - other), spread_of(ends[0] - ends[1])
    bound, exact = contraction_bound(block.scores), exact_contraction(block.scores)
    assert ((bound >= 0) & (bound <= 1)).all() and (exact <= bound + 1e-12).all()
    assert (after <= exact * before + 1e-12).all()
    assert (certificates.measured_contraction(block, one) <= exact + 1e-6).all()  # one query: rounding


@pytest.mark.parametrize("shape", [(1, 4), (3, 5), (6, 4)])
def test_the_exact_contraction_by_brute_force(shape, monkeypatch):
    n, m = shape
    scores = random_scores(n, n, m, 2.0)[0].scores
    crossed = scores[..., :, None, :, None] + scores[..., None, :, None, :]
    crossed = crossed - scores[..., :, None, None, :] - scores[..., None, :, :, None]
    expected = torch.tanh(crossed.abs().flatten(2).amax(-1) / 4).square()
    for entries in (1, 2**22):  # one row at a time, and all together
        monkeypatch.setattr(certificates, "DIAMETER_PIECE", entries)
        torch.testing.assert_close(exact_contraction(scores), expected, rtol=0, atol=1e-12)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10_000), n=st.integers(1, 6), m=st.integers(1, 6),
    half_steps=st.integers(2, 9), spread=st.sampled_from([0.3, 1.0, 3.0]),
)  # fmt: skip
def test_what_a_loop_still_has_to_go_is_bounded(seed, n, m, half_steps, spread):
    scores = random_scores(seed, n, m, spread)[0].scores
    (_, before), (_, after), (_, far) = (
        finite_duals(scores, steps, "row", None) for steps in (half_steps - 2, half_steps, 500)
    )
    bound = truncation_bound(exact_contraction(scores), spread_of(after - before))
    assert (spread_of(far - after) <= bound * (1 + 1e-9) + 1e-12).all()


def test_the_diameter_is_taken_while_its_budget_lasts(monkeypatch):
    convention = Convention(8, "row", 5**-0.5)
    exact = site(activations(True, scale=0.8), convention, None, normal(0.1)).metrics()
    monkeypatch.setattr(certificates, "DIAMETER_ENTRIES", 0)
    rough = site(activations(True, scale=0.8), convention, None, normal(0.1)).metrics()
    assert exact["contraction_bound"] < rough["contraction_bound"] - 0.01
    assert exact["truncation_bound"] < rough["truncation_bound"] / 2


def test_contraction_bound_ignores_offsets():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 1, 4, 5, generator=generator).double()
    rows, columns = (30 * torch.randn(size, generator=generator).double() for size in (4, 5))
    assert contraction_bound(scores) <= math.tanh(float(scores.max() - scores.min()) / 2) ** 2
    shifted = contraction_bound(scores + rows[:, None] + columns)
    assert shifted < 1 and shifted >= contraction_bound(scores) - 1e-12
    assert contraction_bound(scores[..., :1]).item() == pytest.approx(0.0, abs=1e-30)


# One dual of two plans, tilted into each other (B.10)


def two_points(p: float, d: float) -> Tilt:
    """One column over two points with conditional (1 - p, p), tilted by (0, d)."""
    scores = torch.tensor([math.log1p(-p), math.log(p)], dtype=torch.float64)[None, None, :, None]
    f = torch.zeros(1, 1, 2, dtype=torch.float64)
    return tilt(scores, f, f + torch.tensor([7.0, 7.0 + d], dtype=torch.float64), 0.0)


@pytest.mark.parametrize(("p", "d"), [(0.5, 1e-3), (1e-3, -3.0), (1e-12, 60.0), (0.5, 12.0)])
def test_divergences_of_two_points(p, d):
    found = two_points(p, d)
    a = math.log1p(p * math.expm1(d))  # the log-partition of the tilt
    q = p * math.exp(d - a)
    reverse, forward = float(found.reverse), float(found.forward)
    assert reverse == pytest.approx(q * d - a, rel=1e-6, abs=1e-13)
    assert forward == pytest.approx(a - p * d, rel=1e-6, abs=1e-13)
    for bound in (found.variance_bound, found.density_bound):
        assert float(bound) >= max(reverse, forward) * (1 - 1e-6)
    assert float(found.trivial) >= max(reverse, forward)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), n=st.integers(1, 6), m=st.integers(1, 6),
    spread=st.sampled_from([0.0, 1.0, 30.0]), error=st.sampled_from([1e-4, 1.0, 20.0]),
)  # fmt: skip
def test_divergence_bounds_hold(seed, n, m, spread, error):
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(1, 2, n, m, generator=generator, dtype=torch.float64)
    f, noise = (torch.randn(1, 2, n, generator=generator, dtype=torch.float64) for _ in range(2))
    found = tilt(scores, f, f + error * noise, -math.log(m + 1))
    for bound in (found.variance_bound, found.density_bound, found.trivial):
        assert (torch.maximum(found.reverse, found.forward) <= bound * (1 + 1e-9) + 1e-12).all()
    # the tilted columns themselves, over t, under beta / X
    for t in torch.linspace(0, 1, 9).tolist():
        tilted = (scores + (f + t * error * noise)[..., :, None]).softmax(-2)
        assert (tilted.amax((-2, -1)) <= found.sharpness / n * (1 + 1e-9)).all()


# A site, from its activations to its certificates

PLANS: dict[str, tuple[int, int, RecipeSide]] = {  # half-steps, c-transforms, side
    "source, one c-transform": (8, 1, "source"), "source, three c-transforms": (8, 3, "source"),
    "source, two c-transforms, rows last": (9, 2, "source"), "keys, two c-transforms": (8, 2, "target"),
    "keys, one c-transform, rows last": (9, 1, "target"), "keys, rescaled": (8, 1, "target"),
}


def activations(masked: bool, seed: int = 0, scale: float = 2.0, hidden: bool = False) -> SiteTensors:
    generator = torch.Generator().manual_seed(seed)
    q, k = (scale * torch.randn(4, 2, n, 5, generator=generator) for n in (7, 6))
    keep = torch.rand(4, 6, generator=generator) < 0.6
    keep[:, 0], keep[3] = True, False
    shown = torch.rand(4, 7, generator=generator) < 0.6
    shown[:, 0], shown[2] = True, False
    return SiteTensors(q, k, keep if masked else None, hidden_queries(shown) if hidden else None)


def site(
    t: SiteTensors, convention: Convention, plan: TransformPlan | None, noise: Callable[..., Any]
) -> SiteCertificates:
    """Certificates of a site whose prediction is the teacher's dual plus noise(shape of the dual)."""

    def predict(index: int) -> Callable[[SiteTensors], torch.Tensor]:
        def own(piece: SiteTensors) -> torch.Tensor:
            dual = TeacherDuals(piece, convention).after(plan.half_steps)[index]
            return dual + noise(dual)

        return own

    source = predict(0) if plan is not None and plan.side in ("source", "both") else None
    key = predict(1) if plan is not None and plan.side in ("target", "both") else None
    found = SiteCertificates(convention, plan, source, key)
    found.update(t)
    return found


def of_source(
    t: SiteTensors, noise: Callable[..., Any], c_transforms: int = 3, multiplier: float = 5**-0.5
) -> SiteCertificates:
    """`site` of a loop of 8 half-steps whose source dual is predicted."""
    convention = Convention(8, "row", multiplier)
    return site(t, convention, transform_plan(convention, c_transforms, "source"), noise)


def by_name(found: SiteCertificates) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in found.result()}


def normal(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def noise(dual: torch.Tensor) -> torch.Tensor:
        return size * torch.randn(dual.shape, generator=torch.Generator().manual_seed(1)).double()

    return noise


@pytest.mark.parametrize(("name", "masked"), [(name, i % 2 == 1) for i, name in enumerate(PLANS)])
@pytest.mark.parametrize(("aim", "hidden"), [("aligned", False), ("last", False), ("aligned", True)])
def test_every_certificate_of_every_plan_holds(name, masked, aim, hidden):
    half_steps, c_transforms, side = PLANS[name]
    convention = Convention(half_steps, "row", 5**-0.5)
    plan = transform_plan(convention, c_transforms, side, aim)
    assert plan is not None and plan.c_transforms == c_transforms
    for size in (1e-6, 0.3, 5.0):
        found = site(activations(masked, hidden=hidden), convention, plan, normal(size))
        entries = by_name(found)
        last = "row" if "rows last" in name or "rescaled" in name else "column"
        free = "column" if last == "row" else "row"
        expected = {
            "contraction_bound", "truncation_bound", "dual_shift", "dual_stability", "output_bound",
            "kl_variance_bound", "kl_density_bound", "divergence_bound", f"{free}_error_kl_bound",
        }  # fmt: skip
        if c_transforms > 1 and last == "column":
            expected.add("row_bound")
        assert set(entries) == expected
        for entry in entries.values():
            assert entry["holds"] is True, entry
            assert entry["cases"] == 8 - 2 * masked - 2 * hidden  # padded examples are passed over
            assert 0 <= entry["measured"] <= entry["bound"] * (1 + 1e-6) + 1e-9
        number = "B.8" if c_transforms == 1 else "B.9"
        assert entries["dual_stability"]["source"] == f"ASAP, Proposition {number}"
        if size == 0.3:  # nothing of it is as good as equal to zero
            assert min(entry["measured"] for entry in entries.values()) > 1e-6


@pytest.mark.parametrize("c_transforms", [1, 3])
def test_the_papers_last_dual_is_certified_against_the_teacher(c_transforms):
    """With an exact dual, one c-transform is the teacher; three are off by what the loop still moves, and
    the bound on outputs says so."""
    t, convention = activations(False), Convention(4, "row", 5**-0.5)
    plan = transform_plan(convention, c_transforms, "source", "last")
    assert plan is not None and plan.half_steps == 3
    entry = by_name(site(t, convention, plan, torch.zeros_like))["output_bound"]
    plans = [TeacherDuals(t, replace(convention, half_steps=steps)).attention() for steps in (4, 6)]
    apart = float((plans[1] - plans[0]).abs().sum(-1).amax()) if c_transforms == 3 else 0.0
    assert entry["holds"] and entry["measured"] == pytest.approx(apart, abs=1e-6)
    assert entry["bound"] == pytest.approx(apart, abs=1e-6)


def test_measured_values_are_those_of_the_attention_maps():
    """Row error and entry ratios again, from dense maps of the operator's plain meaning."""
    from asapc.operators.asap import asap_attention

    t, convention = activations(False), Convention(8, "row", 5**-0.5)
    plan = transform_plan(convention, 3, "source")
    found = site(t, convention, plan, normal(0.2))
    f = TeacherDuals(t, convention).after(plan.half_steps)[0]
    maps = [
        asap_attention(t.q.double(), t.k.double(), None, None, dual, None, 5**-0.5, 3, UNIT)
        for dual in (f + normal(0.2)(f), f)
    ]
    entries = by_name(found)
    row_err = (maps[0].sum(-1) - 1).abs().mean(-1).amax()
    assert entries["row_bound"]["measured"] == pytest.approx(float(row_err))
    assert entries["row_error_kl_bound"]["measured"] == pytest.approx(float(row_err))
    ratio = (maps[0] / maps[1]).log().abs().amax().exp()
    assert entries["dual_stability"]["measured"] == pytest.approx(float(ratio))
    assert found.metrics()["row_bound"] == pytest.approx(entries["row_bound"]["bound"])
    assert found.metrics()["dual_stability"] == pytest.approx(entries["dual_stability"]["bound"])


def diagonal(sharp: float, n: int) -> SiteTensors:
    """Each query attends to its own key alone, but for exp(-sharp)."""
    return SiteTensors(sharp * torch.eye(n)[None, None], torch.eye(n)[None, None])


def test_entries_can_move_by_the_whole_of_the_stability_bound():
    """A column follows the query it attends to: off the diagonal an entry moves by exp(f_i - f_j)."""
    alpha = 0.4
    found = by_name(of_source(diagonal(14.0, 2), lambda dual: torch.tensor([alpha, -alpha]), 1, 1.0))
    entry, shift = found["dual_stability"], found["dual_shift"]
    assert entry["bound"] == pytest.approx(math.exp(2 * alpha))
    assert entry["measured"] == pytest.approx(entry["bound"], rel=1e-4)
    assert entry["holds"] and not entry["vacuous"]
    assert shift["bound"] == pytest.approx(alpha)
    assert shift["measured"] == pytest.approx(alpha, rel=1e-4)


def unbalanced(first: int, second: int) -> SiteTensors:
    """`first` queries attend to one key, `second` to the other."""
    side = torch.cat([torch.ones(first), -torch.ones(second)])
    return SiteTensors(20 * side[None, None, :, None], torch.tensor([[[[1.0], [-1.0]]]]))


def test_row_bound_by_hand():
    """Rows 51 and 50 of 101 on two keys of mass 1/2: columns are scaled by 101/102 and 101/100."""
    entry = by_name(of_source(unbalanced(51, 50), lambda dual: torch.zeros(101), 3, 1.0))["row_bound"]
    assert entry["bound"] == pytest.approx(0.01)
    assert entry["measured"] == pytest.approx(51 / 101 / 102 + 50 / 101 / 100, rel=1e-6)
    assert entry["holds"] and not entry["vacuous"] and entry["cases"] == 1


def lopsided() -> SiteTensors:
    """Scores [[4, 0], [1, 4]], whose loop of 8 half-steps is still on its way."""
    return SiteTensors(torch.tensor([[[[4.0, 0.0], [1.0, 4.0]]]]), torch.eye(2)[None, None], None)


# Its name, by how much the bound is too small, tensors, the dual's error, and c-transforms.
# Flat scores and f^ = (-t, t): rows of mass 1 -+ tanh t in attention units; Pinsker is tight there.
WRONG: dict[str, tuple[float, SiteTensors, float, int]] = {
    "output_bound": (0.45, diagonal(0.0, 2), 1e-1, 1),
    "row_error_kl_bound": (0.95, diagonal(0.0, 2), 1e-1, 1),
    "row_bound": (0.98, unbalanced(51, 50), 0, 3),
    "contraction_bound": (math.tanh(0.5) ** 2 / math.tanh(1) ** 2, diagonal(2.0, 2), 0, 3),
    "truncation_bound": (0.8, lopsided(), 0, 3),
    "divergence_bound": (0.9, diagonal(0.0, 2), 1e-1, 3),
    "kl_variance_bound": (0.9, diagonal(0.0, 2), 1e-1, 3),
    "kl_density_bound": (0.9, diagonal(0.0, 2), 1e-1, 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_bound_does_not_hold(name, monkeypatch):
    factor, t, size, c_transforms = WRONG[name]
    right = certificates._Check.add

    def noise(dual: torch.Tensor) -> torch.Tensor:
        return size * torch.linspace(-1, 1, dual.shape[-1]).double()

    def wrong(self: Any, bound: torch.Tensor, *others: Any) -> None:
        right(self, bound * factor if self.name == name else bound, *others)

    assert by_name(of_source(t, noise, c_transforms, 1.0))[name]["holds"] is True
    monkeypatch.setattr(certificates._Check, "add", wrong)
    assert by_name(of_source(t, noise, c_transforms, 1.0))[name]["holds"] is False


def test_vacuous_bounds_say_so():
    entries = by_name(of_source(activations(False, scale=0.5), normal(30.0), 3, 1.0))
    for name in ("dual_stability", "kl_variance_bound"):
        assert entries[name]["vacuous"] and entries[name]["holds"], name
        assert 0 < entries[name]["vacuous_cases"] <= entries[name]["cases"]
    assert not entries["contraction_bound"]["vacuous"]
    entries = by_name(of_source(activations(False, scale=5.0), normal(30.0), 3, 1.0))
    assert entries["row_bound"]["vacuous"] and entries["row_bound"]["holds"]
    found = entries["contraction_bound"]
    assert found["vacuous"] and found["bound"] == pytest.approx(1.0) and found["measured"] < 1


def test_kept_loops_and_both_predicted_duals_have_what_is_proven_of_them():
    convention = Convention(8, "row", 5**-0.5)
    kept = site(activations(True), convention, None, normal(0.1))
    of_loops = {"contraction_bound", "truncation_bound"}
    assert {entry["name"] for entry in kept.result()} == of_loops == set(kept.metrics())
    both = site(activations(True), convention, transform_plan(convention, 0, "both"), normal(0.1))
    assert {entry["name"] for entry in both.result()} == of_loops
    assert set(both.metrics()) == of_loops | {"dual_stability"}
    assert both.metrics()["dual_stability"] > 1.1


def test_forbidden_pairs_are_bounded_but_not_compared():
    t = activations(False)
    bias = torch.zeros(1, 1, 7, 6)
    bias[..., 0, 1] = -math.inf
    convention = Convention(8, "row", 5**-0.5, bias=True)
    plan = transform_plan(convention, 3, "source")
    found = site(SiteTensors(t.q, t.k, None, bias), convention, plan, normal(0.1))
    assert found.result() == []
    assert found.metrics()["contraction_bound"] == 1.0
    assert 0 < found.metrics()["row_bound"] < 1 < found.metrics()["dual_stability"]


def test_a_broken_prediction_holds_nothing():
    found = of_source(activations(False), lambda dual: dual * math.nan)
    held = {entry["name"]: entry["holds"] for entry in found.result()}
    assert held.pop("contraction_bound") is True and held.pop("truncation_bound") is True
    assert len(held) == 8 and not any(held.values())
    assert found.metrics()["dual_stability"] == math.inf


def test_budgets_limit_what_is_compared_but_not_the_metrics(monkeypatch):
    monkeypatch.setattr(certificates, "PLAN_ENTRIES", 1)
    monkeypatch.setattr(certificates, "CONTRACTION_ENTRIES", 0)
    found = of_source(activations(True), normal(0.1))
    monkeypatch.setattr(certificates, "PLAN_ENTRIES", 2**24)
    whole = of_source(activations(True), normal(0.1))
    assert {entry["cases"] for entry in found.result()} == {2}  # the heads of one example
    every_example = found.metrics().keys() - {"output_bound", "divergence_bound"}
    assert len(every_example) == 4
    assert all(found.metrics()[key] == whole.metrics()[key] for key in every_example)
    assert found.metrics()["divergence_bound"] != whole.metrics()["divergence_bound"]
