"""The same input gives the same bytes, and batch sizes do not matter where sums are ours to order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import site_tensors, take
from safetensors.torch import load_file
from small_text import write_data, write_teacher
from steps import files

from asapc.calibration.collect import finish, select
from asapc.inputs.load import load_teacher
from asapc.inputs.recipe import Recipe
from asapc.ir import Convention, OutputFactor
from asapc.pipeline import calibrate
from asapc.stages.analyse import Analyse, analysed_once
from asapc.stages.calibrate import site_collector
from asapc.terminal.progress import Progress

RECIPE = {"operator": "asap", "side": "source", "c_transforms": 3, "features": ["coarse:4", "gaussian"],
          "max_examples": 60, "batch_size": 16}  # fmt: skip
# What is measured with a clock, and so cannot repeat, has files of its own.
MEASURED = {"timings.json", "selection.json"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproducible")
    write_teacher(folder / "teacher", n_layers=2, max_iter=2, sharpness=3.0)
    write_data(folder / "data.npz", 120, labels=False)
    return folder


def calibrated(work: Path, name: str, analyse: Analyse, **changes: Any) -> Path:
    teacher = load_teacher(str(work / "teacher"))
    recipe = Recipe.from_dict({**RECIPE, **changes})
    calibrate(teacher, str(work / "data.npz"), work / name, recipe, Progress(), analyse=analyse)
    return work / name


def test_two_runs_write_the_same_bytes(work: Path) -> None:
    (work / "recipe.json").write_text(json.dumps(RECIPE))
    runs = []
    for seed in ("1", "2"):  # in processes of their own, whose sets have other orders
        calibration, out = work / f"calib{seed}", work / f"out{seed}"
        for own in (
            ["calibrate", "-o", calibration, "--recipe", work / "recipe.json"],
            ["compile", "-o", out, "--calibration", calibration],
        ):
            command = [*own, work / "teacher", "--data", work / "data.npz", "--quiet"]
            subprocess.run(
                [sys.executable, "-m", "asapc", *map(str, command)], check=True,
                env={**os.environ, "PYTHONHASHSEED": seed},
            )
        runs.append((files(calibration, *MEASURED), files(out, *MEASURED)))
    assert len(runs[0][0]) >= 2 and len(runs[0][1]) >= 6
    fitted = load_file(work / "calib1" / "calibration.safetensors")
    assert {f"layers.{i}.mha.0.source.coefficients" for i in range(2)} <= set(fitted)
    assert runs[0] == runs[1]


# Features, coefficients, whether there is a mask.
FITS = [
    (("coarse:4", "norm", "lse"), "per_head", True), (("sliced:8", "gaussian"), "pooled", True),
    (("sliced:4:principal", "raw", "active"), "per_head", False),
    (("token_bias", "gaussian"), "pooled", False),
]  # fmt: skip


@pytest.mark.parametrize(("features", "coefficients", "masked"), FITS)
def test_the_batch_size_does_not_change_a_bit(
    features: tuple[str, ...], coefficients: str, masked: bool
) -> None:
    """Of statistics, and so of coefficients, where the activations are the same."""
    convention = Convention(
        half_steps=8, first_side="row", score_multiplier=8**-0.5, output_factor=OutputFactor(queries=1),
        mask="key" if masked else "none", bias=False, early_stop=False,
    )  # fmt: skip
    recipe = Recipe.from_dict({"operator": "asap", "features": list(features), "c_transforms": 3,
                               "side": "source", "coefficients": coefficients})  # fmt: skip
    tensors, places = site_tensors(0, 48, 3, 13, 13, 8, masked), torch.arange(48)
    results = []
    for size in (1, 7, 48):
        statistics = site_collector("site", convention, recipe)
        statistics.prepare(select(tensors, places[:32]))
        for part in places.split(size):
            take(statistics, select(tensors, part))
        fit = finish({"site": statistics})["site"]
        equations = statistics.duals[0].equations
        results.append([*equations.to_tensors().values(), fit.amortised.predictors[0].coefficients])
    for other in results[1:]:
        assert all(torch.equal(first, second) for first, second in zip(results[0], other, strict=True))


def test_batch_sizes_of_a_whole_calibration(work: Path) -> None:
    """Behind layers whose float32 products depend on the batch, only rounding is left to differ."""
    analyse = analysed_once()
    own, other = (
        load_file(calibrated(work, f"batch{size}", analyse, batch_size=size) / "calibration.safetensors")
        for size in (5, 32)
    )
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        if name.startswith("layers.0") or name == "seen_hashes":
            assert torch.equal(other[name], tensor), name
        else:
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)
