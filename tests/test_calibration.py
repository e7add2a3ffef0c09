"""Targets that close to the teacher, site statistics, and the calibration folder."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
import torch

from asapc.calibration.collect import SiteStatistics
from asapc.calibration.teacher import legal_closures, source_dual, target_dual
from asapc.errors import InputError
from asapc.features.sliced import cost_offset, predict_dual, sliced_potentials
from asapc.formats.calibration import Calibration, load_calibration, save_calibration
from asapc.ir import Convention, SiteTensors
from asapc.operators.asap import asap_attention
from asapc.operators.sinkhorn import (
    factor_terms,
    finite_duals,
    score_matrix,
    sinkhorn_attention,
)


def convention(half_steps=10, first_side="row", **rest):
    return Convention(half_steps, first_side, score_multiplier=0.5, **rest)


def site_tensors(seed=0, batch=3, heads=2, n=9, m=9, dim=4, masked=False, bias=False):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, n, dim, generator=generator)
    k = torch.randn(batch, heads, m, dim, generator=generator)
    keep = None
    if masked:
        keep = torch.rand(batch, m, generator=generator) < 0.7
        keep[:, 0] = True
    extra = torch.randn(1, heads, n, m, generator=generator) if bias else None
    return SiteTensors(q, k, keep, extra)


@pytest.mark.parametrize(
    ("half_steps", "first_side", "wanted", "expected"),
    [
        (20, "row", 3, 3),  # ends on columns
        (20, "row", 2, 1),
        (20, "row", 1, 1),
        (5, "row", 3, 2),  # ends on rows
        (5, "row", 1, None),
        (4, "column", 3, 2),  # ends on rows
        (5, "column", 3, 3),  # ends on columns
        (3, "column", 3, 1),  # a row step must come before the closures
        (2, "row", 3, 1),
        (1, "row", 3, None),
        (1, "column", 3, None),
        (2, "column", 3, None),
        (20, "row", 0, None),
    ],
)
def test_legal_closures(half_steps, first_side, wanted, expected):
    assert legal_closures(convention(half_steps, first_side), wanted) == expected


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize(("n", "m"), [(9, 9), (7, 10), (1, 1)], ids=["square", "cross", "one"])
@pytest.mark.parametrize(
    ("half_steps", "first_side", "closures"),
    [(10, "row", 1), (10, "row", 3), (5, "row", 2), (5, "column", 3), (6, "column", 4)],
)
def test_exact_target_reproduces_the_finite_teacher(
    half_steps, first_side, closures, n, m, masked, bias
):
    """The rule of DESIGN section 4: c half-steps before the end, so c closures are exact."""
    tensors = site_tensors(n=n, m=m, masked=masked, bias=bias)
    rule = convention(half_steps, first_side)
    target = target_dual(tensors, rule, closures)
    assert target.dtype == torch.float64 and target.mean(-1).abs().max() < 1e-12
    q, k = tensors.q.double(), tensors.k.double()
    extra = None if tensors.bias is None else tensors.bias.double()
    dual = target - cost_offset(q, 0.5)
    factor = factor_terms(rule.output_factor)
    found = asap_attention(q, k, tensors.keep, extra, dual, 0.5, closures, factor)
    exact = sinkhorn_attention(
        q, k, tensors.keep, extra, 0.5, half_steps, first_side == "row", factor
    )
    torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 15.0, 60.0, 1e3], ids=lambda s: f"scale_{s:g}")
@pytest.mark.parametrize("first_side", ["row", "column"])
def test_fast_loop_equals_the_log_domain(scale, masked, first_side):
    tensors = site_tensors(masked=masked, n=8, m=6)
    scores = score_matrix(tensors.q.double() * scale, tensors.k.double(), tensors.keep, None, 0.5)
    for half_steps in (1, 2, 7, 50):
        fast = source_dual(scores, half_steps, first_side, tensors.keep)
        slow = finite_duals(scores, half_steps, first_side, tensors.keep)[0]
        torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-10)


def test_fully_masked_example_has_a_finite_target():
    tensors = dataclasses.replace(
        site_tensors(), keep=torch.tensor([[True] * 9] * 2 + [[False] * 9])
    )
    assert target_dual(tensors, convention(), 3).isfinite().all()


@pytest.mark.parametrize(
    ("half_steps", "closures"), [(10, 2), (5, 3), (2, 3), (1, 1), (10, 10), (10, 0)]
)
def test_impossible_closures_are_refused(half_steps, closures):
    with pytest.raises(InputError, match="closures"):
        target_dual(site_tensors(), convention(half_steps), closures)
    with pytest.raises(InputError, match="closures"):
        SiteStatistics("layer", convention(half_steps), closures=closures)


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("coefficients", ["pooled", "per_head"])
def test_statistics_equal_a_direct_fit(coefficients, masked):
    batches = [site_tensors(seed, masked=masked, batch=4) for seed in range(3)]
    statistics = SiteStatistics(
        "layer",
        convention(),
        closures=3,
        features=("sliced:6",),
        coefficients=coefficients,
        ridge=0,
    )
    for batch in batches:
        statistics.update(batch)
    site = statistics.finish()
    x = torch.cat([sliced_potentials(b.q, b.k, b.keep, site.theta, 0.5) for b in batches]).double()
    y = torch.cat([target_dual(b, convention(), 3) for b in batches])
    x, y = x.transpose(0, 1), y.transpose(0, 1)
    groups = 1 if coefficients == "pooled" else 2
    omega = torch.linalg.lstsq(x.reshape(groups, -1, 6), y.reshape(groups, -1, 1)).solution
    torch.testing.assert_close(site.coefficients.double(), omega[..., 0], atol=1e-5, rtol=1e-5)
    assert site.coefficients.shape == (groups, 6) and site.theta.shape == (6, 4)
    assert (site.examples, site.tokens) == (12, 12 * 9 * 2 // groups)
    assert len(site.r2) == groups and all(0 < r <= 1 for r in site.r2)
    assert site.fit_seconds > 0


def test_fit_improves_on_a_zero_dual():
    """Keys on a wider cloud than queries: where both clouds agree, sliced potentials vanish."""

    def cloud(seed):
        tensors = site_tensors(seed, n=24, m=24)
        return dataclasses.replace(tensors, k=2 * tensors.k + 0.5)

    statistics = SiteStatistics("layer", convention(), closures=1, features=("sliced:16",))
    for seed in range(6):
        statistics.update(cloud(seed))
    site = statistics.finish()
    q, k = cloud(99).q, cloud(99).k
    factor = [1.0, 1.0, 0.0, 0.0]
    exact = sinkhorn_attention(q, k, None, None, 0.5, 10, True, factor)
    dual = predict_dual(q, k, None, site.theta, site.coefficients, 0.5)
    fitted = asap_attention(q, k, None, None, dual, 0.5, 1, factor)
    zero = asap_attention(q, k, None, None, torch.zeros_like(dual), 0.5, 1, factor)
    assert (fitted - exact).norm() < 0.6 * (zero - exact).norm()


def test_pieces_and_resumption_change_nothing(monkeypatch):
    options = {"closures": 3, "features": ("sliced:4",), "seed": 5}
    whole = SiteStatistics("layer", convention(), **options)
    first, second = site_tensors(0, masked=True), site_tensors(1, masked=True)
    whole.update(first)
    whole.update(second)
    monkeypatch.setattr("asapc.calibration.collect._PIECE", 1)
    killed = SiteStatistics("layer", convention(), **options)
    killed.update(first)
    resumed = SiteStatistics("layer", convention(), **options)
    resumed.load_tensors(killed.to_tensors())
    resumed.update(second)
    torch.testing.assert_close(resumed.finish().coefficients, whole.finish().coefficients)
    assert resumed.finish().examples == whole.finish().examples == 6
    fresh = SiteStatistics("layer", convention(), **options)
    fresh.load_tensors(SiteStatistics("layer", convention(), **options).to_tensors())
    assert fresh.theta is None and fresh.examples == 0


def test_examples_without_active_keys_are_passed_over():
    tensors = site_tensors(masked=True)
    assert tensors.keep is not None
    padded = SiteTensors(
        torch.cat([tensors.q, tensors.q[:1] * 7]),
        torch.cat([tensors.k, tensors.k[:1]]),
        torch.cat([tensors.keep, torch.zeros(1, 9, dtype=torch.bool)]),
    )
    options = {"closures": 3, "features": ("sliced:4",)}
    plain, with_empty = (SiteStatistics("layer", convention(), **options) for _ in range(2))
    plain.update(tensors)
    with_empty.update(padded)
    torch.testing.assert_close(plain.finish().coefficients, with_empty.finish().coefficients)
    assert with_empty.examples == 3


@pytest.mark.parametrize("kind", ["constant_q", "constant_k", "zero", "one_token", "one_key"])
def test_degenerate_layers_fit_without_nan(kind):
    tensors = site_tensors(batch=20)
    q, k, keep = tensors.q, tensors.k, None
    if kind == "constant_q":
        q = q[:, :, :1].expand_as(q)
    elif kind == "constant_k":
        k = k[:, :, :1].expand_as(k)
    elif kind == "zero":
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    elif kind == "one_token":
        q, k = q[:, :, :1], k[:, :, :1]
    else:
        keep = torch.zeros(20, 9, dtype=torch.bool)
        keep[:, 4] = True
    statistics = SiteStatistics("layer", convention(), closures=3, features=("sliced:4",), ridge=0)
    statistics.update(SiteTensors(q, k, keep))
    site = statistics.finish()
    assert site.coefficients.isfinite().all()
    assert all(math.isfinite(r) for r in site.r2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k", "bias"])
def test_non_finite_activations_name_the_site(where, value):
    tensors = site_tensors(bias=True)
    getattr(tensors, where)[0, 1, 2, 3] = value
    statistics = SiteStatistics("encoder.layer3", convention(), closures=3)
    with pytest.raises(InputError, match=r"encoder\.layer3: .* must be finite.*example 0"):
        statistics.update(tensors)


def test_nan_behind_the_mask_is_harmless():
    tensors = site_tensors(masked=True, batch=8)
    assert tensors.keep is not None
    poisoned = torch.where(tensors.keep[:, None, :, None], tensors.k, math.nan)
    statistics = SiteStatistics("layer", convention(), closures=3, features=("sliced:4",))
    statistics.update(dataclasses.replace(tensors, k=poisoned))
    assert statistics.finish().coefficients.isfinite().all()


def test_too_few_tokens_and_no_data_name_the_site():
    statistics = SiteStatistics("layer.0", convention(), closures=3, features=("sliced:64",))
    with pytest.raises(InputError, match=r"layer\.0: calibration saw no examples"):
        statistics.finish()
    statistics.update(site_tensors(batch=1))
    with pytest.raises(InputError, match=r"layer\.0: .*64 coefficients.*got 18"):
        statistics.finish()


def calibration(**changes):
    sites = {}
    for name, kind in [("layers.0.attn", "pooled"), ("layers.1.attn", "per_head")]:
        statistics = SiteStatistics(
            name, convention(), closures=3, features=("sliced:4",), coefficients=kind
        )
        statistics.update(site_tensors())
        sites[name] = statistics.finish()
    base = Calibration("f" * 64, {"closures": 3}, "whole", sites, "d.npz", (0, 2**63, 2**64 - 1))
    return dataclasses.replace(base, **changes)


def assert_same(found, expected):
    for name in ("teacher", "recipe", "capture", "data", "seen_hashes"):
        assert getattr(found, name) == getattr(expected, name)
    assert list(found.sites) == list(expected.sites)
    for name, site in expected.sites.items():
        for entry in dataclasses.fields(site):
            left, right = getattr(found.sites[name], entry.name), getattr(site, entry.name)
            same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
            assert same, entry.name


def test_folder_round_trip(tmp_path):
    saved = calibration()
    save_calibration(tmp_path / "calib", saved)
    assert sorted(p.name for p in (tmp_path / "calib").iterdir()) == [
        "calibration.json",
        "calibration.safetensors",
    ]
    shutil.move(tmp_path / "calib", tmp_path / "moved")
    assert_same(load_calibration(tmp_path / "moved"), saved)


def test_folder_round_trip_without_hashes_and_with_infinite_condition(tmp_path):
    saved = calibration(seen_hashes=())
    site = dataclasses.replace(saved.sites["layers.0.attn"], condition_number=(math.inf,))
    saved = dataclasses.replace(saved, sites={"layers.0.attn": site})
    save_calibration(tmp_path / "calib", saved)
    json.loads((tmp_path / "calib" / "calibration.json").read_text(), parse_constant=pytest.fail)
    assert_same(load_calibration(tmp_path / "calib"), saved)


def test_same_calibration_same_bytes(tmp_path):
    saved = calibration()
    for name in ("a", "b"):
        save_calibration(tmp_path / name, saved)
    for name in ("calibration.json", "calibration.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_damaged_folders_are_one_clear_message(tmp_path):
    with pytest.raises(InputError, match="not a calibration folder"):
        load_calibration(tmp_path / "absent")
    saved = calibration()
    folder = tmp_path / "calib"

    def damage(rule, action):
        save_calibration(folder, saved)
        action()
        with pytest.raises(InputError, match=rule):
            load_calibration(folder)

    text, tensors = folder / "calibration.json", folder / "calibration.safetensors"

    def edit(change):
        document = json.loads(text.read_text())
        change(document)
        text.write_text(json.dumps(document))

    damage("missing", tensors.unlink)
    damage("damaged", lambda: tensors.write_bytes(tensors.read_bytes()[:-5]))
    damage("damaged", lambda: text.write_text(text.read_text()[:40]))
    damage("damaged", lambda: text.write_bytes(b"\xff\xfe\x00"))
    damage("format_version must be 1", lambda: text.write_text("[]"))
    damage("format_version must be 1", lambda: edit(lambda d: d.update(format_version=2)))
    damage("damaged", lambda: edit(lambda d: d.pop("teacher")))
    damage("damaged", lambda: edit(lambda d: d["sites"].update(other=d["sites"]["layers.0.attn"])))
    damage("damaged", lambda: edit(lambda d: d.update(sites=[])))
