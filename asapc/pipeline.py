"""The pipeline, one function for each command and one line for each stage:

    load -> analyse -> calibrate -> select -> rewrite -> emit -> report

load is asapc.inputs.load, which gives a Teacher.  analyse is capture, match, lift and replay
(asapc.passes).  The others are modules of asapc.stages, and asapc.report.  Data travels by value, and
nothing is kept between calls.  The command line, the Python API and the demo call these; a study is made
of the same stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asapc.artifact import Artifact, places_moved, read_artifact, surrounding_model, write_refreshed
from asapc.calibration.stored import Calibration, save_calibration
from asapc.device import CPU
from asapc.formats import places
from asapc.formats.atomic import check_replaceable, replace_folder
from asapc.inputs.data import DataSource, open_data, recorded_data
from asapc.inputs.onnx.settings import OnnxSettings, require_extra
from asapc.inputs.reading import ON_CPU, Reading
from asapc.inputs.recipe import Recipe
from asapc.inputs.teacher import Teacher
from asapc.kernels import native
from asapc.memory import MemoryLimit
from asapc.processes import ALONE, Processes
from asapc.report import Report, evaluate
from asapc.report.baseline import Baseline, compare
from asapc.report.evaluate import bench as bench
from asapc.report.gates import Gate, gate_result
from asapc.stages.analyse import (
    Analyse,
    analyse_example,
    analyse_teacher,
    forward_signature,
    inspection,
    require_sites,
)
from asapc.stages.calibrate import fit, plan_fits, tell_shortages, unfinished
from asapc.stages.emit import emit, verify_written
from asapc.stages.export import write_verified
from asapc.stages.rewrite import Compilation, rewrite
from asapc.stages.select import calibration_of, choose
from asapc.terminal.progress import SILENT, Progress
from asapc.training.refresh import Refreshed, put_weights, train
from asapc.training.settings import RefreshSettings


def inspect(
    teacher: Teacher, data: str | None = None, progress: Progress = SILENT, device: torch.device = CPU
) -> dict[str, Any]:
    """Every attention region with its convention, or the reason it is left alone."""
    return inspection(teacher, analyse_example(teacher, data, progress, device))


def calibrate(
    teacher: Teacher,
    data: str | DataSource,
    out: str | Path,
    recipe: Recipe,
    progress: Progress,
    sequential: bool = False,
    restart: bool = False,
    max_memory: int | None = None,
    analyse: Analyse = analyse_teacher,
    processes: Processes = ALONE,
    device: torch.device = CPU,
) -> Calibration:
    """Fit every candidate of every site: of those that predict a dual from statistics alone, of those
    that are distilled from a sample of the site's activations.

    What is unfinished is kept beside `out`: after a crash the same call goes on where it was, and one
    with another model, recipe or other data is refused. After a faulty example, data in which it
    is mended is accepted: calibration goes on from what was done before it, as far as the data still
    begins with that. restart: begin anew. sequential, max_memory: see stages.calibrate.plan_fits.
    analyse: of a call that compiles too, and need not analyse twice.  processes: share the batches, come
    to the same fits, and the first one writes them.  device: see asapc.device.
    """
    check_replaceable(out, [teacher.source, *_paths(data)])
    source = open_data(data, forward_signature(teacher))
    with teacher.running():
        analysis, _ = analyse(
            teacher, source, progress, recipe.drop_attention_maps, device=device,
            softmax=recipe.from_ == "softmax",
        )  # fmt: skip
        require_sites(analysis, progress)
        source = source.on(device)
        with analysis.running_on(device):
            plan = plan_fits(analysis, source, recipe, sequential, max_memory, processes)
        fingerprints = plan.fingerprints(teacher, analysis, source, processes)
        with unfinished(out, fingerprints, restart, processes) as aside:
            with analysis.running_on(device):
                sites, seen = fit(analysis, source, plan, aside, progress, processes)
            calibration = Calibration(
                teacher=teacher.fingerprint,
                recipe=recipe.to_dict(),
                capture=analysis.capture.kind,
                sites=sites,
                data=places.recorded(source.source, out),
                order=plan.order,
                seen_hashes=tuple(seen),
                warnings=tuple(tell_shortages(sites, None, progress)),
                replayed=analysis.replayed.to_json(),
            )
            if processes.first:
                save_calibration(out, calibration)
    if plan.limit is not None:
        progress.note(plan.limit.told(plan.size))
    return calibration


def compile(
    teacher: Teacher,
    calibration_path: str | Path,
    out: str | Path,
    recipe: Recipe | None,
    data: str | DataSource | None,
    progress: Progress,
    onnx: OnnxSettings | None = None,
    analyse: Analyse = analyse_teacher,
    max_memory: int | None = None,
    device: torch.device = CPU,
) -> Artifact:
    """Select an operator per site, rewrite, verify, write the artefact; returns it as it was read back.

    onnx: write OUT/model.onnx too, verified on examples that calibration and selection have not seen;
    where that fails nothing is written at all. analyse: see calibrate.  max_memory: bytes that the
    process may hold while it selects; batches get smaller until that holds.  device: to select on, at the
    speeds there; what is written runs on any.
    """
    check_replaceable(out, [calibration_path, teacher.source, *_paths(data)])
    if onnx is not None:
        require_extra()
    if device.type == "cpu" and (why := native.missing()) is not None:
        progress.note(f"warning: exact loops run in plain PyTorch, several times slower: {why}")
    calibration = calibration_of(teacher, calibration_path)
    recipe = recipe or Recipe.from_dict(calibration.recipe, where=f"{calibration_path}: recipe")
    data = data or recorded_data(calibration.data, calibration_path, "compile")
    check_replaceable(out, _paths(data))
    source = open_data(data, forward_signature(teacher))
    with teacher.running():
        analysis, example = analyse(
            teacher, source, progress, recipe.drop_attention_maps, calibration.replayed, device,
            recipe.from_ == "softmax",
        )  # fmt: skip
        require_sites(analysis, progress)
        limit = None if max_memory is None else MemoryLimit(max_memory)
        with analysis.running_on(device):
            chosen = choose(analysis, recipe, calibration, source.on(device), progress, limit)
    compilation = Compilation(teacher, source, recipe, calibration, analysis, chosen, example)
    return emit(rewrite(compilation), out, onnx, progress)


def export(
    artifact_path: str | Path,
    data: str | None,
    settings: OnnxSettings,
    progress: Progress,
    *,
    trust: bool = False,
) -> dict[str, Any]:
    """Write OUT/model.onnx, verified on unseen examples; returns what OUT/onnx.json holds."""
    artifact = read_artifact(artifact_path, ("graph",), trust=trust)
    data = data or recorded_data(artifact.manifest["data"], artifact_path, "export")
    return write_verified(artifact, open_data(data, artifact.signature()), settings, progress)


def report(
    artifact: str | Path | Artifact,
    data: str | DataSource | None,
    limits: Sequence[Gate] = (),
    baseline: Baseline | None = None,
    **options: Any,
) -> Report:
    """Measure on unseen examples, compare with the baseline, check the limits.

    artifact: its folder, or what `compile` returned.  options: of evaluate.report, which measures.
    """
    measured = evaluate.report(artifact, data, limits=limits, **options)
    comparison = None if baseline is None else compare(measured, baseline)
    return replace(measured, gate=gate_result(measured, limits, comparison))


def refresh(
    artifact_path: str | Path,
    data: str,
    settings: RefreshSettings,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    reading: Reading = ON_CPU,
    progress: Progress,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Train a compiled artefact for a few epochs and write it again; returns its refresh entry.

    model, reading: see evaluate.report.  processes: share every batch; the first one writes.
    """
    device = reading.place()
    target = artifact_path if out is None else out
    check_replaceable(target, _paths(data))
    artifact = read_artifact(artifact_path, trust=reading.trust)
    surrounding = surrounding_model(artifact, model, reading)
    source = open_data(data, artifact.signature()).on(device)

    def there() -> Refreshed:
        with artifact.running_on(device, surrounding):
            trained = train(artifact, surrounding, source, settings, progress, processes)
        put_weights(artifact.programs["graph"], trained.weights)
        return trained

    if not processes.first:
        return dict(there().manifest["refresh"])
    with replace_folder(target) as folder:
        trained = there()
        manifest = places_moved(trained.manifest, artifact.folder, target)
        write_refreshed(folder, artifact, manifest, trained.weights, trained.seen_hashes, trained.edit)
        verify_written(folder, surrounding, {"graph": artifact.programs["graph"]}, trained.example)
    return manifest["refresh"]


def _paths(data: str | DataSource | None) -> list[str]:
    return [data] if isinstance(data, str) else []
