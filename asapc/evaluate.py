"""Evaluate a compiled artefact: fidelity and speed against its teacher, on examples it has not seen.

report() measures both for the report and its gates; bench() times the models and their sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from asapc.artifact import Artifact, read_artifact, surrounding_model
from asapc.audit import SoftToHard, soft_sites
from asapc.data import Batch, open_data, recorded_data
from asapc.errors import InputError
from asapc.fidelity import OutputFidelity
from asapc.kernels.thresholds import key_of, without_cache
from asapc.measure import (
    SiteFidelity,
    environment,
    explain_site,
    time_model,
    time_site,
    tune_site,
)
from asapc.passes.verify import comparable
from asapc.progress import Progress
from asapc.recipe import Recipe
from asapc.runner import Runner, Tap
from asapc.yaml_file import read_yaml_mapping

REPORT_EXAMPLES = 512
REPORT_FORMAT = 2

def report(
    artifact_path: str | Path,
    data: str | None = None,
    *,
    model: str | None = None,
    weights: str | None = None,
    kwargs: str | None = None,
    examples: int = REPORT_EXAMPLES,
    progress: Progress,
) -> dict[str, Any]:
    """Fidelity and speed on up to `examples` examples that calibration and selection have not seen."""
    artifact = read_artifact(artifact_path)
    surrounding = surrounding_model(artifact, model, weights, kwargs)
    source = open_data(
        data or recorded_data(artifact.manifest["data"], "report"), artifact.signature()
    )
    recipe = Recipe.from_dict(_read_recipe(artifact), where=f"{artifact_path}/recipe.yaml")
    runners = {s: Runner(surrounding, p) for s, p in artifact.programs.items()}
    tap = Tap(surrounding, artifact.programs["lossless"])
    outputs, lossless = OutputFidelity(), OutputFidelity()
    sites = [SiteFidelity(artifact, i) for i in range(len(artifact.manifest["sites"]))]
    audit = _audit(artifact, surrounding)
    measured = 0
    first: Batch | None = None
    batches = source.batches(
        recipe.batch_size,
        select=lambda content: content not in artifact.seen_hashes,
        limit=examples,
    )
    for batch in progress.track(batches, "measuring fidelity", None):
        first = first or batch
        teacher_out = runners["teacher"](batch)
        lossless_out, tensors = tap(batch)
        outputs.update(comparable(teacher_out), comparable(runners["graph"](batch)), batch.labels)
        lossless.update(comparable(teacher_out), comparable(lossless_out), batch.labels)
        for site, seen in zip(sites, tensors, strict=True):
            site.update(seen)
        if audit is not None:
            audit.update(batch)
        measured += len(batch)
    if first is None:
        raise InputError(
            f"{source.source}: the report needs examples that calibration has not seen",
            got="none",
            help="pass other data with --data",
        )
    progress.note("measuring latency")
    timed = time_model(runners, first)
    fit_seconds = float(artifact.manifest["fit_seconds"])
    saved = (timed["latency_teacher_ms"] - timed["latency_compiled_ms"]) / 1e3
    fitted = any(entry["fit"] is not None for entry in artifact.manifest["sites"])
    exact = lossless.metrics()
    return {
        "format_version": REPORT_FORMAT,
        "fingerprints": {
            "teacher": artifact.manifest["teacher"]["fingerprint"], "data": source.fingerprint,
        },
        "model": {
            "source": artifact.manifest["teacher"]["source"],
            "capture": artifact.capture,
            "data": source.source,
            "examples": measured,
            "batch": len(first),
            **outputs.metrics(),
            "lossless_max_abs_error": exact["max_abs_error"],
            **timed,
            "fit_seconds": fit_seconds,
            "calibration_order": artifact.manifest["calibration_order"],
            "break_even_batches": fit_seconds / saved if fitted and saved > 0 else None,
        },
        "sites": [site.result() for site in sites],
        "refused": artifact.manifest["refused"],
        **({} if audit is None else {"soft_to_hard": audit.result(first)}),
        **{key: artifact.manifest[key] for key in ("refresh",) if key in artifact.manifest},
        "environment": environment(),
        "gate": {"verdict": None, "passed": True, "checks": [], "baseline": None},
    }


def bench(
    artifact_path: str | Path,
    data: str | None = None,
    *,
    model: str | None = None,
    weights: str | None = None,
    kwargs: str | None = None,
    repeats: int = 10,
    explain: bool = False,
    tune: bool | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """Median latencies of teacher, lossless and compiled: the whole model and every site.

    A site's teacher is the usual log-domain PyTorch loop on the site's own activations.
    explain: also which kernels each compiled site runs, and why. tune: True measures tile sizes for
    every site first and keeps the best in the tuning cache; False leaves that cache aside.
    """
    if tune is False:
        with without_cache():
            return bench(artifact_path, data, model=model, weights=weights, kwargs=kwargs,
                         repeats=repeats, explain=explain, progress=progress)  # fmt: skip
    artifact = read_artifact(artifact_path)
    surrounding = surrounding_model(artifact, model, weights, kwargs)
    source = open_data(data or recorded_data(artifact.manifest["data"], "bench"), artifact.signature())
    recipe = Recipe.from_dict(_read_recipe(artifact), where=f"{artifact_path}/recipe.yaml")
    batch = next(source.batches(recipe.batch_size))
    runners = {s: Runner(surrounding, p) for s, p in artifact.programs.items()}
    _, tensors = Tap(surrounding, artifact.programs["lossless"])(batch)
    tuned: dict[int, dict[str, Any]] = {}
    if tune:
        by_key: dict[str, dict[str, Any]] = {}  # sites of one shape share an entry of the cache
        indices = range(len(artifact.manifest["sites"]))
        for index in progress.track(indices, "tuning sites", len(indices)):
            key = key_of(tensors[index].q, tensors[index].k)
            if key not in by_key:
                by_key[key] = tune_site(artifact, index, tensors[index], repeats)
            tuned[index] = by_key[key]
    progress.note("timing the whole model")
    whole = time_model(runners, batch, repeats)
    sites = []
    for index, entry in enumerate(progress.track(artifact.manifest["sites"], "timing sites", None)):
        measured = time_site(artifact, index, tensors[index], repeats)
        sites.append({"name": entry["name"], "operator": entry["operator"], **measured})
        if explain:
            sites[-1]["kernels"] = explain_site(artifact, index, tensors[index])
        if tuned:
            sites[-1]["tuned"] = tuned[index]
    return {
        "model": {"source": artifact.manifest["teacher"]["source"], "batch": len(batch), **whole},
        "sites": sites,
        "environment": environment(),
    }


def _audit(artifact: Artifact, model: nn.Module | None) -> SoftToHard | None:
    """For an artefact whose teacher sorts softly."""
    lossless = artifact.programs["lossless"]
    if not soft_sites(lossless):
        return None
    refreshed = artifact.programs["graph"] if "refresh" in artifact.manifest else None
    return SoftToHard(model, lossless, refreshed)


def _read_recipe(artifact: Artifact) -> Mapping[str, Any]:
    return read_yaml_mapping(artifact.folder / "recipe.yaml", "recipe")
