"""Drift of scores at inference: what is counted, and that counting changes nothing else."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from junk import resigned
from small_text import write_data, write_teacher
from steps import compiled
from torch import nn

import asapc
from asapc.artifact import read_manifest
from asapc.calibration.stored import load_calibration
from asapc.calibration.teacher import TeacherDuals
from asapc.errors import InputError
from asapc.ir import Convention, SiteTensors
from asapc.program.monitor import ScoreRange, attach, score_bound

RECIPE = {"operator": "asap", "side": "target", "c_transforms": 1, "features": ["coarse:4"],
          "batch_size": 16, "max_examples": 64}  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer amortised, one kept."""
    folder = tmp_path_factory.mktemp("work")
    teacher = write_teacher(folder / "teacher", n_layers=2, max_iter=3)
    recipe = {**RECIPE, "sites": {"layers.1.*": {"operator": "sinkhorn"}}}
    compiled(folder, teacher, write_data(folder / "data.npz", 160), recipe)
    return folder


def tokens(work: Path, count: int = 8) -> torch.Tensor:
    return torch.from_numpy(np.load(work / "data.npz")["inputs"][:count])


def code(model: nn.Module) -> str:
    return str(model.code)


# The bound and its range


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), n=st.integers(1, 6), m=st.integers(1, 6), d=st.integers(1, 4),
    multiplier=st.sampled_from([0.3, -2.0]), masked=st.booleans(),
)  # fmt: skip
def test_the_bound_is_above_every_active_score(
    seed: int, n: int, m: int, d: int, multiplier: float, masked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(3, 2, size, d, generator=generator, dtype=torch.float64) for size in (n, m))
    keep = torch.rand(3, m, generator=generator) < 0.5 if masked else None
    if keep is not None:
        k[~keep[:, None, :, None].expand(k.shape)] = 1e6  # padding is not looked at
    scores = multiplier * q @ k.transpose(-1, -2)
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None, :], 0.0)
    bound = score_bound(q, k, keep, multiplier)
    assert bound.shape == (3,)
    assert (scores.abs().amax((1, 2, 3)) <= bound * (1 + 1e-12)).all()


def test_the_bound_by_hand_and_in_half_precision() -> None:
    q = torch.tensor([[[[3.0, 4.0], [0.0, 1.0]]]])
    k = torch.tensor([[[[0.0, 2.0], [300.0, 0.0]]]])
    assert score_bound(q, k, None, 0.5).tolist() == [750.0]
    assert score_bound(q, k, torch.tensor([[True, False]]), 0.5).tolist() == [5.0]
    assert score_bound(q.half(), 100 * k.half(), None, 0.5).tolist() == [75000.0]  # beyond float16
    assert score_bound(q, k, torch.tensor([[False, False]]), 0.5).tolist() == [0.0]


def test_a_range_joins_rounds_and_reads_back() -> None:
    scores = torch.tensor([[[[1.0, -math.inf], [-2.5, 3.14159265]]]])
    found = ScoreRange.of(scores, torch.tensor([5.0, 7.0]))
    assert found == ScoreRange(-2.5, pytest.approx(3.14159265), 5.0, 7.0)
    joined = ScoreRange().joined(found).joined(ScoreRange(-9.0, 0.0, 6.0, 8.0))
    assert joined == ScoreRange(-9.0, pytest.approx(3.14159265), 5.0, 8.0)
    assert not ScoreRange().known
    assert ScoreRange.of(scores[:0], torch.zeros(0)) == ScoreRange()
    kept = found.rounded().to_json()
    assert kept == {"score_low": -2.5, "score_high": 3.142, "bound_low": 5.0, "bound_high": 7.0}
    assert ScoreRange.from_json(kept, "range").to_json() == kept
    wrong: list[Any] = [math.nan, "wide", None]
    for broken in ({}, *({**kept, "bound_low": value} for value in wrong)):
        with pytest.raises(InputError, match="range"):
            ScoreRange.from_json(broken, "range")


def test_calibration_stores_what_it_saw(work: Path) -> None:
    sites = read_manifest(work / "out")["sites"]
    seen = sites[0]["range"]
    assert set(seen) == {
        "score_low", "score_high", "bound_low", "bound_high", "r2", "condition_number"
    }  # fmt: skip
    assert seen["score_low"] < 0 < seen["score_high"] <= seen["bound_high"]
    assert 0 < seen["bound_low"] < seen["bound_high"]
    assert (seen["r2"], seen["condition_number"]) == (sites[0]["r2"], sites[0]["condition_number"])
    assert sites[1]["operator"] == "sinkhorn" and sites[1]["range"] is None
    fit = load_calibration(work / "out-calib").sites["layers.0.mha"][0]
    assert fit.range.to_json() == {name: seen[name] for name in fit.range.to_json()}


def test_a_teachers_range_is_that_of_its_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, n, 3, generator=generator) for n in (5, 4))
    keep = torch.tensor([[True] * 4, [True, False, True, False]])
    teacher = TeacherDuals(SiteTensors(q, k, keep), Convention(4, "row", 0.7))
    active = (0.7 * q.double() @ k.double().transpose(-1, -2))[keep[:, None, None, :].expand(2, 2, 5, 4)]
    found = teacher.range
    ends = float(active.min()), float(active.max())
    assert (found.score_low, found.score_high) == pytest.approx(ends)
    bounds = score_bound(q, k, keep, 0.7)
    assert (found.bound_low, found.bound_high) == (float(bounds.min()), float(bounds.max()))


def scaled_embedding(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "WQ" in name:
                parameter.mul_(factor)


def test_batches_like_the_calibrations_are_in_range_and_larger_scores_are_not(work: Path) -> None:
    model = asapc.load(work / "out")
    assert model.enable_monitor() is model
    assert list(model.monitor) == ["layers.0.mha"]  # the kept loop has nothing that could drift
    for start in range(0, 64, 16):
        model(tokens(work, 64)[start : start + 16])
    found = dict(model.monitor)["layers.0.mha"]
    seen = read_manifest(work / "out")["sites"][0]["range"]
    assert (found["batches"], found["out_of_range"]) == (4, 0)
    assert 0.9 * seen["bound_low"] <= found["low"] < found["high"] <= 1.1 * seen["bound_high"]
    for factor, wrong in ((3.0, 1), (1.0, 1), (0.01, 2), (math.nan, 3)):
        scaled_embedding(model, factor)
        model(tokens(work))
        if not math.isnan(factor):
            scaled_embedding(model, 1 / factor)
        assert model.monitor["layers.0.mha"]["out_of_range"] == wrong, factor
    assert model.monitor["layers.0.mha"]["batches"] == 8


def test_one_example_of_a_batch_is_enough_and_the_margin_is_the_callers(work: Path) -> None:
    model = asapc.load(work / "out")
    watch = model.enable_monitor(margin=1e-4) and model.monitor._watches[0]
    top, bottom = watch.range.bound_high, watch.range.bound_low
    q = torch.zeros(3, 1, 2, 4)
    q[..., 0] = 1 / watch.score_multiplier
    k = torch.zeros(3, 1, 2, 4)
    k[..., 0] = bottom
    watch.watch(q, k, None)
    assert watch.counts()["out_of_range"] == 0
    k[1, 0, 1, 0] = top * 1.05
    watch.watch(q, k, None)
    assert watch.counts() == {
        "batches": 2, "out_of_range": 1, "low": pytest.approx(bottom), "high": pytest.approx(top * 1.05)
    }  # fmt: skip
    keep = torch.tensor([[True, True], [True, False], [False, False]])
    k[2] = 1e9  # padding of an example without any active key
    watch.watch(q, k, keep)
    assert watch.counts()["out_of_range"] == 1
    watch.watch(q[:0], k[:0], None)
    assert watch.counts()["batches"] == 4
    model.enable_monitor(margin=0.1)
    watch = model.monitor._watches[0]
    watch.watch(q[:2], k[:2], None)
    assert watch.counts()["out_of_range"] == 0
    for _ in range(300):  # more than are kept on the device
        watch.watch(q[:2], 9 * k[:2], None)
    assert watch.counts()["out_of_range"] == 300
    with pytest.raises(InputError, match="margin"):
        model.enable_monitor(margin=-1)


def test_monitoring_changes_nothing_else(work: Path) -> None:
    model = asapc.load(work / "out")
    plain, state, kind = code(model), list(model.state_dict()), type(model)
    assert dict(model.monitor) == {} and repr(model.monitor) == "{}"
    with torch.no_grad():
        before = model(tokens(work))
        model.enable_monitor()
        watched = code(model)
        assert watched != plain and list(model.state_dict()) == state and type(model) is kind
        after = model(tokens(work))
        assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))
        assert torch.equal(before[0], after[0])
    with torch.inference_mode():
        model(tokens(work))
    inputs = tokens(work)
    model(inputs)[0].sum().backward()  # and gradients flow as before
    assert model.monitor["layers.0.mha"]["batches"] == 3
    model.enable_monitor()  # anew: one counter, from 0
    assert code(model).count("watch") == watched.count("watch")
    assert model.monitor["layers.0.mha"] == {"batches": 0, "out_of_range": 0, "low": None, "high": None}
    assert model.disable_monitor() is model
    assert code(model) == plain and len(model.monitor) == 0
    with pytest.raises(KeyError):
        model.monitor["layers.0.mha"]


def test_copies_are_models_of_their_own(work: Path) -> None:
    model = asapc.load(work / "out").enable_monitor()
    twin = copy.deepcopy(model.disable_monitor())
    model.enable_monitor()
    twin(tokens(work))
    assert model.monitor["layers.0.mha"]["batches"] == 0
    assert torch.equal(twin(tokens(work))[0], model(tokens(work))[0])


def test_other_stages_have_nothing_to_watch(work: Path) -> None:
    assert not hasattr(asapc.load(work / "out", stage="lossless"), "enable_monitor")


def tampered(work: Path, folder: Path, seen: Any) -> Path:
    shutil.copytree(work / "out", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sites"][0]["range"] = seen
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return resigned(folder)


def test_an_artefact_without_ranges_cannot_be_monitored(work: Path, tmp_path: Path) -> None:
    model = asapc.load(tampered(work, tmp_path / "old", None))
    model(tokens(work))
    with pytest.raises(InputError, match=r"layers\.0\.mha: calibration must have stored"):
        model.enable_monitor()
    names = ("score_low", "score_high", "bound_low", "bound_high")
    broken: list[Any] = [{}, "wide", [1, 2], dict.fromkeys(names, "x")]
    for number, seen in enumerate(broken):
        with pytest.raises(InputError, match="range"):
            asapc.load(tampered(work, tmp_path / str(number), seen))


def test_a_users_own_attribute_of_that_name_is_kept() -> None:
    class Own(nn.Module):
        monitor = "of the room's temperature"

    own = Own()
    attach(own, [], [])
    assert own.monitor == "of the room's temperature" and not hasattr(own, "enable_monitor")
