"""Too few examples, or regression rows for the coefficients, are told at both sides of each limit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collected import take
from small_text import KEYWORDS, write_data, write_teacher

import asapc
from asapc.calibration.collect import finish
from asapc.calibration.enough import EXAMPLES, ROWS, shortages
from asapc.calibration.stored import SiteCalibration, SiteDistillation
from asapc.cli import main
from asapc.errors import FewExamplesWarning
from asapc.inputs.recipe import Recipe
from asapc.ir import Convention, Distilled, SiteTensors
from asapc.models import SinkformerText
from asapc.stages.calibrate import site_collector

HEADS = 3


def fits(
    examples: int, tokens: int, names: tuple[str, ...] = ("layer",), **fields: Any
) -> dict[str, tuple[SiteCalibration, ...]]:
    """Fits of random sites, each on `examples` of `tokens` queries."""
    generator = torch.Generator().manual_seed(0)
    recipe = Recipe(**{"side": "source", "c_transforms": 1, "features": ("norm",), **fields})
    rule = Convention(6, "row", score_multiplier=0.5)
    sites = {}
    for name in names:
        sites[name] = site_collector(name, rule, recipe)
        q, k = (torch.randn(examples, HEADS, tokens, 4, generator=generator) for _ in range(2))
        take(sites[name], SiteTensors(q, k, None, None))
    return {name: (fit,) for name, fit in finish(sites).items()}


@pytest.mark.parametrize("examples", [1, EXAMPLES - 1, EXAMPLES])
def test_examples_are_counted(examples: int) -> None:
    found = shortages(fits(examples, 40))
    if examples == EXAMPLES:
        assert found == []
        return
    assert [(own.sites, own.of, own.given, own.needed) for own in found] == [
        (("layer",), "examples", examples, EXAMPLES)
    ]
    counted = f"layer: fitted on only {examples} example{'s' * (examples > 1)}; at least 32 are needed. "
    assert found[0].text.startswith(counted)


@pytest.mark.parametrize("enough", [False, True])
@pytest.mark.parametrize(
    ("sharing", "sites", "per_site"),
    [("per_head", 2, 1), ("pooled", 2, HEADS), ("shared", 4, HEADS * 4)],
)
def test_rows_are_counted_for_each_coefficient(
    sharing: str, sites: int, per_site: int, enough: bool
) -> None:
    """32 examples of n tokens are 32 n rows for each of the F = 40 slices that a head fits alone, and
    so many times more where coefficients are fitted over heads or sites."""
    count = 40 * per_site
    tokens = ROWS * count // EXAMPLES // per_site  # 25
    assert EXAMPLES * tokens * per_site == ROWS * count
    names = tuple(f"layer.{i}" for i in range(sites))
    features = (f"sliced:{count}",)
    fitted = fits(EXAMPLES, tokens - (not enough), names, features=features, coefficients=sharing)
    found = shortages(fitted)
    if enough:
        assert found == []
        return
    own = (tokens - 1) * EXAMPLES * per_site
    assert [(s.sites, s.of, s.given, s.needed) for s in found] == [(names, "rows", own, ROWS * count)]
    assert found[0].text.startswith(
        f"layer.0 and {sites - 1} other site{'s' * (sites > 2)}: fitted on only {own} regression rows "
        f"for {count} coefficients; at least {ROWS * count} are needed (20 per coefficient). "
    )


def test_a_kl_fit_counts_the_examples_it_has_kept() -> None:
    fitted = fits(EXAMPLES, 6, fit="kl")
    assert shortages(fitted) == []
    fit = fitted["layer"][0]
    fewer = dataclasses.replace(fit.quality[0], kl_examples=5)
    found = shortages({"layer": (dataclasses.replace(fit, quality=(fewer,)),)})
    assert [(own.of, own.given) for own in found] == [("examples", 5)]


@pytest.mark.parametrize("examples", [EXAMPLES - 1, EXAMPLES])
def test_a_distillation_is_held_to_its_examples_alone(examples: int) -> None:
    pivots = torch.randn(HEADS, 64, 8)
    fit = SiteDistillation(
        Convention(6, "row", score_multiplier=0.5),
        Distilled("lot", (None, pivots, torch.full((HEADS, 64), 1 / 64)), False),  # type: ignore[arg-type]
        errors=(0.1,), steps=(1,), examples=examples, held_out=2, tokens=examples, fit_seconds=0.0,
    )  # fmt: skip
    assert [own.of for own in shortages({"layer": (fit,)})] == ["examples"] * (examples < EXAMPLES)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("enough")
    write_teacher(folder / "teacher", n_layers=1)
    write_data(folder / "data.npz", examples=80)
    (folder / "few.yaml").write_text("operator: asap\nmax_examples: 3\n")
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_every_command_tells(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher, data, calibration, out = (work / name for name in ("teacher", "data.npz", "calib", "out"))
    text = "layers.0.mha: fitted on only 3 examples; at least 32 are needed. "
    given = (teacher, "--data", data, "-o", calibration, "--recipe", work / "few.yaml")
    summary, err = run(capsys, "calibrate", *given)
    assert f"warning: {text}" in err
    recorded = summary["warnings"]
    assert [(own["sites"], own["of"], own["given"], own["needed"]) for own in recorded] == [
        (["layers.0.mha"], "examples", 3, 32)
    ]
    assert json.loads((calibration / "calibration.json").read_text())["warnings"] == recorded

    given = (teacher, "--calibration", calibration, "-o", out)
    manifest, err = run(capsys, "compile", *given)
    assert f"warning: {text}" in err and manifest["warnings"] == recorded
    assert json.loads((out / "manifest.json").read_text())["warnings"] == recorded

    report, _ = run(capsys, "report", out, "--examples", 4)
    assert report["warnings"] == recorded
    assert report["gate"]["passed"]  # a warning judges nothing
    assert "| layers.0.mha | 0 | 3 examples | 32 |" in (out / "report.md").read_text()
    page = out / "report.html"
    assert not page.exists() or text in page.read_text()


def test_python_warns() -> None:
    torch.manual_seed(0)
    model = SinkformerText(**{**KEYWORDS, "n_layers": 1}).eval()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, 40, (80, 12)))
    recipe = {"operator": "asap", "max_examples": 3, "selection_examples": 8, "features": ["norm"]}
    with pytest.warns(FewExamplesWarning, match="on only 3 examples; at least 32 are needed") as told:
        _, report = asapc.compile(model, {"inputs": tokens}, recipe=recipe, examples=8)
    assert told[0].filename == __file__
    assert [own["given"] for own in report.facts["warnings"]] == [3]
