"""Sinkhorn sites distilled into lot and esp_hard: the fits, what they keep, and the whole way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collected import site_tensors, take
from safetensors.torch import load_file, save_file
from small_text import write_data, write_teacher
from steps import calibrated, compiled, run_json
from torch import Tensor

import asapc
from asapc.calibration import distill
from asapc.calibration.collect import finish
from asapc.calibration.distill import Distiller, fit_lot
from asapc.calibration.stored import (
    Calibration,
    SiteDistillation,
    fit_facts,
    load_calibration,
    save_calibration,
)
from asapc.calibration.students import maker_of
from asapc.errors import InputError
from asapc.inputs.data import Batch
from asapc.inputs.load import load_teacher
from asapc.inputs.recipe import Recipe
from asapc.ir import Convention, OutputFactor, SiteTensors
from asapc.operators.lot import lot
from asapc.passes.analyse import Site, analyse
from asapc.passes.candidates import candidates_of
from asapc.passes.rewrite import rewritten_programs
from asapc.program.apply import apply_distilled, apply_lossless
from asapc.program.runner import Runner, Tap
from asapc.stages.calibrate import site_collector

RELEASED = Convention(8, "row", 0.5, OutputFactor(queries=1), mask="key")
UNMASKED = Convention(8, "row", 0.5, OutputFactor(queries=1))


site = partial(site_tensors, batch=4, masked=True, values=True)


def distilled(convention: Convention = RELEASED, batches: int = 4, **fields: Any) -> SiteDistillation:
    masked = convention.mask == "key"
    own = Distiller("layer", convention, Recipe(**fields))
    for seed in range(batches):
        take(own, site(seed, masked=masked))
    own.hold_out(site(99, masked=masked))
    return own.calibration()


def pieces(targets: Callable[[SiteTensors], Tensor], count: int, **shape: Any) -> list[distill._Piece]:
    """`count` batches and one more to stop by."""
    batches = (site(seed, **shape) for seed in range(count + 1))
    return [distill._Piece(t, targets(t)) for t in batches]


# The fits, against cases with a known answer


def test_a_lot_layer_is_found_again() -> None:
    truth = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(5)) * 2
    mass = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2]])
    settings = (0.5, 0.5, 5, True, 5, True, [1.0, 0.0, 0.0, 1.0])

    def teacher(t: SiteTensors) -> Tensor:
        return lot(t.q, t.k, t.v, t.keep, None, None, truth, mass, *settings)

    own = pieces(teacher, 8, batch=8)
    make = maker_of("layer", UNMASKED, {"operator": "lot"}, True)
    # Two pivots more than it has: no head is caught in a minimum of its own.
    start = fit_lot(own[:-1], own[-1:], make, 5, 0, steps=0)
    fit = fit_lot(own[:-1], own[-1:], make, 5, 0)
    assert float(start.errors.sqrt().min()) > 0.2 and float(fit.errors.sqrt().max()) < 0.05


# Mass


KINDS = [
    Convention(7, "row", 0.5, OutputFactor(queries=1), "key"),
    Convention(8, "row", 0.5, OutputFactor(keys=1), "none"),
    Convention(8, "row", 0.5, OutputFactor(2.0, queries=-1, keys=2), "key"),
]


def test_more_pivots_than_points() -> None:
    """Tokens at a few points only: k-means finds them, surplus pivots repeat one, nothing breaks."""
    random = torch.Generator().manual_seed(1)
    points = torch.eye(4)[:2] * 3
    own = Distiller("layer", UNMASKED, Recipe(operator="lot", pivots=5))
    for _ in range(4):
        chosen = torch.stack([torch.randperm(8, generator=random) % 2 for _ in range(12)])
        q = points[chosen.view(3, 2, 2, 8)].flatten(1, 2)[:, :2]
        v = torch.randn(3, 2, 8, 4, generator=random)
        take(own, SiteTensors(q, q.flip(2), v=v))
    assert max(own.calibration().errors) < 0.01


@pytest.mark.parametrize("operator", ["lot", "esp_hard"])
@pytest.mark.parametrize("convention", KINDS, ids=lambda c: f"{c.last_side}-{c.output_factor}-{c.mask}")
def test_the_map_has_the_teachers_mass(operator: str, convention: Convention) -> None:
    make = maker_of("layer", convention, {"operator": operator}, True)
    t = site(masked=convention.mask == "key")
    points = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    own = make(points, torch.full((2, 3), 1 / 3) if operator == "lot" else torch.ones(2))
    found, exact = apply_distilled(own, t, None), apply_lossless(convention, t, None)
    # After finitely many half-steps that end on the tokens, pivots have about their masses.
    tolerance = 0.02 if operator == "lot" else 1e-5
    torch.testing.assert_close(found.sum((-2, -1)), exact.sum((-2, -1)), rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize("operator", ["lot", "esp_hard"])
def test_a_mass_it_cannot_have_is_refused(operator: str) -> None:
    for factor in (OutputFactor(keys=1), OutputFactor(active=1)):
        convention = Convention(8, "row", 0.5, factor, "key")
        if operator == "lot" and factor.active:
            continue  # lot counts active keys itself
        with pytest.raises(InputError, match=f"layer: {operator} must be able to give its rows"):
            maker_of("layer", convention, {"operator": operator}, False)


# What is kept


@pytest.mark.parametrize("operator", ["lot", "esp_hard"])
def test_padding_does_not_enter(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in padded keys and values, and examples without a key, change no bit."""
    monkeypatch.setattr(distill, "STEPS", 20)
    fits = []
    for dirty in (False, True):
        own = Distiller("layer", RELEASED, Recipe(operator=operator, pivots=3, slices=3))
        for seed in range(3):
            t = site(seed)
            assert t.keep is not None and t.v is not None
            if dirty:
                padded = ~t.keep[:, None, :, None]
                t = dataclasses.replace(
                    t, k=t.k.masked_fill(padded, torch.nan), v=t.v.masked_fill(padded, torch.inf)
                )
                empty = dataclasses.replace(t, keep=torch.zeros_like(t.keep))
                take(own, empty)
            take(own, t)
        fits.append(own.calibration())
    assert fits[0].errors == fits[1].errors and fits[0].examples == fits[1].examples
    assert all(map(_equal, *(fit.distilled.settings.values() for fit in fits)))


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@pytest.mark.parametrize("operator", ["lot", "esp_hard"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 1)])
def test_shapes(operator: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "STEPS", 2)
    n, m, dim = shape
    own = Distiller("layer", UNMASKED, Recipe(operator=operator, pivots=3, slices=3))
    t = site(n=n, m=m, dim=dim, masked=False)
    take(own, SiteTensors(t.q.half(), t.k.half(), v=t.v.half()))
    take(own, site(1, batch=2, n=n + 2, m=m + 2, dim=dim, masked=False))  # another length
    take(own, SiteTensors(t.q[:0], t.k[:0], v=t.v[:0]))
    fit = own.calibration()
    assert np.isfinite(fit.errors).all()
    fitted = fit.distilled.settings["pivots" if operator == "lot" else "slices"]
    assert fitted.dtype == torch.float32


@pytest.mark.parametrize("operator", ["lot", "esp_hard"])
def test_errors_name_the_site(operator: str) -> None:
    own = Distiller("layer", RELEASED, Recipe(operator=operator))
    with pytest.raises(InputError, match="layer: calibration saw no examples"):
        own.calibration()
    t = site()
    with pytest.raises(InputError, match="layer: queries must be finite"):
        take(own, dataclasses.replace(t, q=t.q * torch.nan))
    with pytest.raises(InputError, match="layer: the teacher's outputs must be finite"):
        take(own, dataclasses.replace(t, v=t.v * torch.inf))


@pytest.mark.parametrize("operator", ["lot", "esp_hard"])
def test_huge_scores_stay_finite(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "STEPS", 30)
    sharp = dataclasses.replace(RELEASED, score_multiplier=3e3)
    own = distilled(sharp, operator=operator, pivots=4, slices=4)
    assert np.isfinite(own.errors).all()


# The folder and the recipe


def test_a_calibration_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "STEPS", 2)
    sites = {name: (distilled(operator=name, pivots=2, slices=3),) for name in ("lot", "esp_hard")}
    save_calibration(tmp_path / "c", Calibration("teacher", {}, "whole", sites, "data"))
    read = load_calibration(tmp_path / "c")
    for name, (own,) in sites.items():
        (site_read,) = read.sites[name]
        stored, given = site_read.distilled.settings, own.distilled.settings
        assert stored.keys() == given.keys() and all(_equal(stored[key], given[key]) for key in given)
        rest = {"distilled": dataclasses.replace(own.distilled, settings={})}
        mine = {"distilled": dataclasses.replace(site_read.distilled, settings={})}
        assert dataclasses.replace(site_read, **mine) == dataclasses.replace(own, **rest)
    assert fit_facts(read.sites["lot"][0])["pivots"] == 2
    facts = fit_facts(read.sites["esp_hard"][0])
    assert (facts["slices"], facts["coupling"], facts["ties"]) == (3, "monotone", "shared")
    tensors = load_file(tmp_path / "c" / "calibration.safetensors")
    for broken in (torch.full((2, 2, 4), torch.nan), torch.ones(2, 2)):
        save_file({**tensors, "lot.0.lot.pivots": broken}, tmp_path / "c" / "calibration.safetensors")
        with pytest.raises(InputError, match=r"damaged calibration folder[\s\S]*lot\.0\.lot\.pivots"):
            load_calibration(tmp_path / "c")


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            {"operator": "lot", "pivots": 2}, {"operator": "lot", "pivots": 3},
            "distilled with `pivots: 2`",
        ),
        ({"operator": "lot"}, {"operator": "esp_hard"}, "not fitted as `esp_hard 32`"),
        ({"operator": "lot"}, {"operator": "auto"}, "not fitted as `asap target 1 coarse:32`"),
        ({"operator": "esp_hard", "slices": 2}, {"operator": "esp_hard", "slices": 2, "seed": 1},
         "distilled with `seed: 0`"),
        ({"operator": "asap", "features": ["norm"]}, {"operator": "lot"}, "not fitted as `lot 32`"),
        ({"operator": "lossless"}, {"operator": "lot"}, "was not fitted"),
        ({"operator": "lot", "pivots": 2}, {"operator": "lot", "pivots": 2, "ridge": 1, "slices": 3}, ""),
        ({"operator": "lot"}, {"operator": "lossless"}, ""),
    ],
)  # fmt: skip
def test_another_recipe_needs_another_fit(
    then: dict[str, Any], now: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "STEPS", 1)
    monkeypatch.setattr(distill, "CANDIDATES", 4)
    recipe, convention = Recipe.from_dict(then), dataclasses.replace(RELEASED, half_steps=9)
    fitted: dict[str, Any] = {}
    if recipe.operator in ("lot", "esp_hard"):
        own = Distiller("layer", convention, recipe)
        take(own, site())
        fitted["layer"] = (own.calibration(),)
    elif recipe.operator == "asap":
        statistics = site_collector("layer", convention, recipe)
        take(statistics, site())
        fitted = {"layer": (finish({"layer": statistics})["layer"],)}
    calibration = Calibration("teacher", recipe.to_dict(), "whole", fitted, "data")
    _, heads, _, head_dim = site().q.shape
    named = Site("layer", convention, heads, head_dim, 0.0)
    with pytest.raises(InputError, match=message) if message else nullcontext():
        candidates_of(named, Recipe.from_dict(now), calibration)


# The whole way


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, data, and an artefact with a layer of each operator."""
    folder = tmp_path_factory.mktemp("distil")
    teacher = write_teacher(folder / "teacher", n_layers=2, max_iter=4, sharpness=3.0)
    data = write_data(folder / "data.npz", 160)
    recipe = {
        "operator": "lot", "pivots": 6, "slices": 5, "drop_attention_maps": True,
        "sites": {"layers.1.*": {"operator": "esp_hard"}},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "STEPS", 30)
        patch.setattr(distill, "CANDIDATES", 32)
        compiled(folder, teacher, data, recipe)
        calibrated(folder, teacher, data, recipe, "--sequential", name="sequential")
    return folder


def test_manifest_and_report_say_what_each_layer_became(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = entries = json.loads((work / "out" / "manifest.json").read_text())["sites"]
    assert (first["operator"], first["pivots"], first["slices"]) == ("lot", 6, None)
    assert (second["operator"], second["pivots"], second["slices"]) == ("esp_hard", None, 5)
    report = run_json(capsys, "report", work / "out", "--data", work / "data.npz", "--fast")
    for reported, entry in zip(report["sites"], entries, strict=True):
        assert entry["fit"] == "distilled" and entry["reason"] == "the recipe asks for it"
        metrics = reported["metrics"]
        # Measured through the graph that was written, and before through the fitted parameters.
        ratio = metrics["attention_rel_l2"] / entry["selection_attention_rel_l2"]
        assert 0.7 < ratio < 1.4
        assert 0.5 * entry["fit_rel_l2"] < metrics["output_rel_l2"] < 1.5 * entry["fit_rel_l2"]
        # The mass of padded rows and the active ones differs in the teacher: only the total is kept.
        assert metrics["row_err"] < metrics["row_err_teacher"] + 0.1
    text = (work / "out" / "report.md").read_text()
    assert "6 pivots" in text and "5 slices" in text


def test_the_compiled_model_runs_on_any_padding(work: Path) -> None:
    model = asapc.load(work / "out")
    tokens = torch.randint(1, 40, (5, 12), generator=torch.Generator().manual_seed(0))
    tokens[1:, 4:] = 0
    tokens[2] = 0  # nothing but padding
    with torch.no_grad():
        out = model(tokens)[0]
    assert out.shape == (5, 3) and bool(out.isfinite().all())


def test_maps_that_are_returned_are_distilled_ones(work: Path) -> None:
    """The map itself is returned: no values are seen, and the graph keeps its product."""
    teacher = load_teacher(str(work / "teacher"))
    tokens = torch.randint(1, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    tokens[1:, 6:] = 0
    batch = Batch((tokens,), {}, None, [0, 1, 2])
    analysis = analyse(teacher, batch)
    assert all(t.v is None for t in Tap(analysis.model, analysis.lifted, analysis.names)(batch)[1])
    fitted = load_calibration(work / "out-calib").sites
    own = rewritten_programs(
        analysis.lifted, {s.name: fitted[s.name][0].replacement for s in analysis.sites}
    )
    _, maps = Runner(analysis.model, own)(batch)
    for found in maps:
        assert found.shape == (3, 2, 12, 12) and not bool(found[1:, :, :, 6:].any())
        mass = torch.tensor([[12.0], [6.0], [6.0]]).expand(3, 2)
        torch.testing.assert_close(found.sum((-2, -1)), mass, rtol=0.05, atol=0)


def test_sequential_fits_behind_what_is_distilled(work: Path) -> None:
    both = [load_calibration(work / name).sites.values() for name in ("out-calib", "sequential")]
    equal = []
    for (parallel,), (sequential,) in zip(*both, strict=True):
        assert isinstance(parallel, SiteDistillation) and isinstance(sequential, SiteDistillation)
        equal.append(all(map(
            _equal, parallel.distilled.settings.values(), sequential.distilled.settings.values()
        )))
    assert equal == [True, False]


def test_examples_the_fit_stopped_by_are_seen(work: Path) -> None:
    calibration = load_calibration(work / "out-calib")
    for (own,) in calibration.sites.values():
        assert isinstance(own, SiteDistillation) and own.held_out > 0
        assert len(calibration.seen_hashes) == own.examples + own.held_out
