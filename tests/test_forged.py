"""Calibrations that others forged: whatever tensor or fact is another one, the answer is a message."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import take
from junk import JUNK, places, survives, with_junk
from safetensors.torch import load_file, save_file
from small_text import write_data, write_teacher
from torch import Tensor

from asapc import pipeline
from asapc.calibration.collect import finish
from asapc.calibration.enough import shortages
from asapc.calibration.stored import fit_document, fit_facts, fit_tensors, load_calibration
from asapc.calibration.stream import Pending, _finished
from asapc.errors import InputError
from asapc.inputs.load import load_teacher
from asapc.inputs.recipe import Recipe
from asapc.ir import Convention, SiteTensors
from asapc.passes.analyse import Site
from asapc.passes.candidates import candidates_of
from asapc.program.apply import apply_replacement
from asapc.stages.calibrate import site_collector
from asapc.terminal.progress import make_progress

QUIET = make_progress(quiet=True)
FITS = [
    {"features": ["coarse:4", "gaussian"]}, {"side": "source", "features": ["sliced:3", "raw"]},
    {"side": "both", "c_transforms": 0, "features": ["norm"], "coefficients": "pooled"},
    {"operator": "lot", "pivots": 4}, {"operator": "esp_hard", "slices": 3},
]  # fmt: skip
RECIPE: dict[str, Any] = {
    "candidates": FITS, "max_examples": 24, "batch_size": 8, "budget": {"attention_rel_l2": 10.0}
}  # fmt: skip
TENSORS, FACTS = "calibration.safetensors", "calibration.json"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forged")
    write_teacher(folder / "teacher", max_iter=6, n_layers=1)
    write_data(folder / "data.npz", examples=60)
    calibrate(folder, "calibration")
    shutil.copytree(folder / "calibration", folder / "forged")
    return folder


def calibrate(work: Path, out: str) -> None:
    teacher = load_teacher(str(work / "teacher"))
    recipe = Recipe.from_dict(RECIPE)
    pipeline.calibrate(teacher, str(work / "data.npz"), work / out, recipe, QUIET)


def used(folder: Path) -> None:
    """What compile does with a calibration: choose among the fits, and write what they were."""
    calibration = load_calibration(folder)
    recipe = Recipe.from_dict(calibration.recipe)
    document = json.loads((folder.parent / "calibration" / FACTS).read_text())
    ((name, fits),) = document["sites"].items()
    site = Site(name, Convention.from_json(fits[0]["convention"], "convention"), 2, 8, 0.0)
    found = candidates_of(site, recipe.for_site(site.name), calibration)
    told = [fit_facts(own.fit) for own in found]
    short = [own.to_dict() for own in shortages(calibration.sites)]
    json.dumps([told, short, calibration.fit_seconds, calibration.order], allow_nan=False)


def other_tensors(x: Tensor) -> dict[str, Tensor | None]:
    """Another shape, type or number in place of one tensor; None: no tensor."""
    found: dict[str, Tensor | None] = {
        "missing": None, "no axes": x.flatten()[0].clone(), "one axis more": x[None].clone(),
        "empty": x.flatten()[:0], "longer": torch.cat([torch.atleast_1d(x)] * 3),
        "double": x.double(), "half": x.half(), "bytes": x.to(torch.uint8), "truth": x.bool(),
        "complex": x.to(torch.complex64),
    }  # fmt: skip
    if x.dim() > 1:
        found["turned"] = torch.cat([x.transpose(0, -1)] * 3).contiguous()
        found["wider"] = torch.cat([x, x[..., :1]], -1)
    if x.is_floating_point():
        found["nan"] = torch.full_like(x, math.nan)
        found["inf"] = torch.full_like(x, math.inf)
    return {
        name: other for name, other in found.items()
        if other is None or other.dtype != x.dtype or other.shape != x.shape or not other.equal(x)
    }  # fmt: skip


def test_every_tensor_is_looked_at(work: Path) -> None:
    """In a calibration with every kind of fit; each forgery names what must be there."""
    true = load_file(work / "calibration" / TENSORS)
    assert {name.split(".")[-1] for name in true} >= {
        "seen_hashes", "coefficients", "intercept", "0", "pivots", "pivot_mass", "slices",
        "inverse_temperature",
    }  # fmt: skip
    tried = 0
    for name, tensor in true.items():
        for what, other in other_tensors(tensor).items():
            rest = {key: x for key, x in true.items() if key != name}
            save_file(rest if other is None else {**rest, name: other}, work / "forged" / TENSORS)
            try:
                used(work / "forged")
            except InputError as error:
                assert error.help and "asapc calibrate" in error.help
                alone = what not in ("longer", "wider", "turned")  # else what it must fit may be named
                assert not alone or name in error.rule, (name, what, str(error))
            else:  # other hashes are as good
                assert name == "seen_hashes" and what in ("empty", "longer"), (name, what)
            tried += 1
    assert tried > 100
    shutil.copy(work / "calibration" / TENSORS, work / "forged")


def test_a_fit_of_another_model_is_refused_at_the_site(work: Path) -> None:
    """Tensors that fit each other, and are of one head or of smaller heads."""
    for size, cut in {"heads": lambda x: x[:1], "dimensions": lambda x: x[..., :3]}.items():
        forged = {}
        for name, x in load_file(work / "calibration" / TENSORS).items():
            last = name.split(".")[-1]
            of_points = last in ("0", "pivots", "slices")
            forged[name] = x
            if size == "dimensions" and x.shape == (2, 11):  # 3 slices and 8 dimensions, raw
                forged[name] = x[:, :6].contiguous()
            elif last != "seen_hashes" and (of_points if size == "dimensions" else x.shape[0] == 2):
                forged[name] = cut(x).contiguous()
        save_file(forged, work / "forged" / TENSORS)
        load_calibration(work / "forged")
        with pytest.raises(InputError, match="must be float32"):
            used(work / "forged")
    shutil.copy(work / "calibration" / TENSORS, work / "forged")


ALIKE = {"convention", "settings"}  # of every fit of a site: junk in those of the first alone


def test_every_fact_is_looked_at(work: Path) -> None:
    """One kind of junk after the other in all places: a message, or what compile can go on with."""
    document = json.loads((work / "calibration" / FACTS).read_text())
    ways = [way for way in places(document) if not (way[2:3] != (0,) and {*way[3:4]} & ALIKE)]
    refused = 0
    for index, way in enumerate(ways):
        junk = JUNK[index % len(JUNK)]
        (work / "forged" / FACTS).write_text(json.dumps(with_junk(document, way, junk)))
        refused += not survives(lambda: used(work / "forged"), (way, junk))
    assert refused > len(ways) / 2
    shutil.copy(work / "calibration" / FACTS, work / "forged")


def test_statistics_of_an_unfinished_run_are_looked_at() -> None:
    convention = Convention(8, "row", 0.5)
    recipe = Recipe.from_dict({"side": "both", "c_transforms": 0, "features": ["sliced:3", "norm"]})
    full, empty = (site_collector("s", convention, recipe) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    take(full, SiteTensors(*torch.randn(2, 2, 2, 9, 4, generator=generator)))
    tensors, facts = full.state()
    for name, tensor in tensors.items():
        for what, other in other_tensors(tensor).items():
            rest = {key: x for key, x in tensors.items() if key != name}
            with pytest.raises(InputError, match=name.split(".")[-1]):
                empty.restore(rest if other is None else {**rest, name: other}, facts, 2, 4)
                raise AssertionError((name, what))
    for heads, head_dim in ((3, 4), (2, 5)):
        with pytest.raises(InputError, match="must be float"):
            empty.restore(tensors, facts, heads, head_dim)
    with pytest.raises(KeyError):
        empty.restore(tensors, {"examples": 2}, 2, 4)
    for wrong in ({"examples": -1}, {"seconds": math.nan}, {"examples": 7}):
        with pytest.raises(InputError):
            empty.restore(tensors, {**facts, **wrong}, 2, 4)
    assert empty.examples == 0 and all(dual.equations is None for dual in empty.duals)
    empty.restore(tensors, facts, 2, 4)
    assert empty.examples == 2


def test_a_finished_fit_of_an_unfinished_run_is_of_this_site(work: Path) -> None:
    """Made again where it is of another shape, plan, convention or recipe."""
    ((name, fits),) = load_calibration(work / "calibration").sites.items()
    fit = fits[0]
    recipe = next(iter(Recipe.from_dict(RECIPE).alternatives()))
    collector = site_collector(name, fit.convention, recipe)
    facts = {**fit_document(fit), "seconds": 1.0}

    def finished(heads: int = 2, head_dim: int = 8, own: Any = collector, **other: Any) -> bool:
        pending = Pending(0, name, 0, own, heads=heads, head_dim=head_dim)
        return _finished(pending, fit_tensors(pending.key, fit), facts | other) is not None

    assert finished()
    others = [{"seconds": math.inf}, {"settings": {}}, {"settings": None}, {"plan": {"side": "target"}}]
    assert not any(finished(**other) for other in others)
    assert not finished(heads=3) and not finished(head_dim=4)
    loop = replace(fit.convention, score_multiplier=2.0)
    assert not finished(own=site_collector(name, loop, recipe))


def test_columns_for_each_position_are_of_these_positions() -> None:
    convention = Convention(8, "row", 0.5)
    recipe = Recipe.from_dict({"features": ["token_bias"], "side": "source"})
    statistics = site_collector("s", convention, recipe)
    generator = torch.Generator().manual_seed(0)
    seen = SiteTensors(*torch.randn(2, 2, 2, 9, 4, generator=generator))
    for _ in range(9):
        take(statistics, seen)
    own = finish({"s": statistics})["s"].amortised
    apply_replacement(convention, own, seen, None)
    with pytest.raises(InputError, match=r"9 columns, as it was fitted, got 7 columns of 7 tokens"):
        apply_replacement(convention, own, SiteTensors(seen.q[:, :, :7], seen.k[:, :, :7]), None)
