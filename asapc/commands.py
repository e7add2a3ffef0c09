"""The commands that the demo shares with the command line: files are read, the pipeline runs.

torch takes seconds to import, so what needs it is imported after what can be refused without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asapc.errors import InputError
from asapc.inputs.paths import check_artifact, check_calibration, check_data, check_file, check_model
from asapc.inputs.reading import NO_OPTIONS, Reading
from asapc.metrics import MEASURED_EXAMPLES
from asapc.processes import joined
from asapc.session import Session
from asapc.terminal.progress import SILENT, Progress

if TYPE_CHECKING:
    from asapc.calibration.stored import Calibration
    from asapc.inputs.onnx.settings import OnnxSettings
    from asapc.report import Report


def inspect_model(
    model: str, data: str | None, reading: Reading = NO_OPTIONS, progress: Progress = SILENT
) -> dict[str, Any]:
    """The dictionary of `asapc inspect --json`."""
    check_model(model, reading.weights)
    check_data(data)
    place = reading.place()
    teacher = reading.teacher(model)
    from asapc import pipeline

    return pipeline.inspect(teacher, data, progress, place).to_dict()


def calibrate_model(
    run: Session,
    model: str,
    data: str,
    out: str,
    recipe: str | None,
    reading: Reading = NO_OPTIONS,
    sequential: bool = False,
    restart: bool = False,
    max_memory: str | None = None,
) -> dict[str, Any]:
    """Calibrate and summarise: the dictionary of `asapc calibrate --json`."""
    check_model(model, reading.weights)
    check_data(data)
    check_file(recipe, "recipe")
    from asapc.inputs.recipe import load_recipe

    resolved = load_recipe(recipe)
    limit = _size(max_memory)
    place = reading.place()
    teacher = reading.teacher(model)
    from asapc import pipeline

    with joined() as processes:
        calibration = pipeline.calibrate(
            teacher, data, out, resolved, run.progress, sequential, restart, limit,
            processes=processes, device=place,
        )
    return _calibration_summary(calibration, model, out)


def compile_model(
    run: Session,
    model: str,
    calibration: str,
    out: str,
    recipe: str | None,
    data: str | None = None,
    reading: Reading = NO_OPTIONS,
    onnx: OnnxSettings | None = None,
    max_memory: str | None = None,
) -> dict[str, Any]:
    """Compile and return the manifest.  Without a recipe, the calibration's is used.

    onnx: settings of OUT/model.onnx; without them only an .onnx model writes one.
    """
    check_model(model, reading.weights)
    check_calibration(calibration)
    check_data(data)
    check_file(recipe, "recipe")
    from asapc.inputs.recipe import load_recipe

    resolved = None if recipe is None else load_recipe(recipe)
    limit = _size(max_memory)
    place = reading.place()
    teacher = reading.teacher(model)
    from asapc import pipeline

    return pipeline.compile(
        teacher, calibration, out, resolved, data, run.progress, onnx, max_memory=limit, device=place
    )


def report_artifact(
    run: Session,
    artifact: str,
    data: str | None,
    gate: str | None = None,
    model: str | None = None,
    reading: Reading = NO_OPTIONS,
    examples: int = MEASURED_EXAMPLES,
    *,
    baseline: str | None = None,
    max_regression: Sequence[str] = (),
    junit: str | None = None,
    fast: bool = False,
    max_memory: str | None = None,
    torch_compile: bool = False,
) -> Report:
    """Measure, check the gates, compare with the baseline and write the report into the artefact."""
    check_artifact(artifact)
    check_data(data)
    from asapc.formats.atomic import make_parent, replace_file
    from asapc.report import baseline as regression
    from asapc.report import gates, junit_text, write_report

    limits = [] if gate is None else gates.load_gates(gate)
    allowance = regression.parse_allowance(max_regression)
    if baseline is None and max_regression:
        raise InputError("--max-regression needs a --baseline to compare with")
    earlier = None if baseline is None else regression.load_baseline(baseline, allowance)
    limit = _size(max_memory)
    if junit is not None:
        make_parent(junit)  # before minutes of measuring, not after
    from asapc import pipeline
    from asapc.report.evaluate import Measuring

    measuring = Measuring(examples, fast, limit, torch_compile)
    with joined() as processes:
        result = pipeline.report(
            artifact, data, limits, earlier, model=model, reading=reading, measuring=measuring,
            progress=run.progress, processes=processes,
        )  # fmt: skip
        if processes.first:
            with run.progress.phase("drawing the page"):
                write_report(artifact, result, run.note)
            if junit is not None:
                replace_file(junit, junit_text(result))
    return result


def run_all(
    run: Session,
    model: str,
    data: str,
    out: str,
    recipe: str | None = None,
    gate: str | None = None,
    reading: Reading = NO_OPTIONS,
    examples: int = MEASURED_EXAMPLES,
    *,
    fast: bool = False,
    max_memory: str | None = None,
) -> Report:
    """Calibrate into OUT.calibration, compile into OUT and report; the model is analysed once."""
    check_model(model, reading.weights)
    check_data(data)
    check_file(recipe, "recipe")
    check_file(gate, "gates")
    from asapc.formats.atomic import check_replaceable
    from asapc.report import gates, write_report

    limits = [] if gate is None else gates.load_gates(gate)
    calibration = f"{Path(out)}.calibration"
    for folder in (calibration, out):
        check_replaceable(folder, [model, data])
    from asapc.inputs.recipe import load_recipe

    resolved, limit = load_recipe(recipe), _size(max_memory)
    place = reading.place()
    teacher = reading.teacher(model)
    from asapc import pipeline
    from asapc.report.evaluate import Measuring
    from asapc.stages.analyse import analysed_once

    analyse = analysed_once()
    run.note(f"1 of 3: calibrating into {calibration}")
    pipeline.calibrate(
        teacher, data, calibration, resolved, run.progress, max_memory=limit, analyse=analyse,
        device=place,
    )  # fmt: skip
    run.note(f"2 of 3: compiling into {out}")
    manifest = pipeline.compile(
        teacher, calibration, out, resolved, data, run.progress, analyse=analyse, max_memory=limit,
        device=place,
    )  # fmt: skip
    run.note("3 of 3: measuring")
    result = pipeline.report(
        out, data, limits, model=model if manifest["capture"] == "module" else None,
        reading=replace(reading, trust=True), measuring=Measuring(examples, fast, limit),
        progress=run.progress,
    )  # fmt: skip
    with run.progress.phase("drawing the page"):
        write_report(out, result, run.note)
    return result


def _size(max_memory: str | None) -> int | None:
    from asapc.memory import parse_size

    return None if max_memory is None else parse_size(max_memory)


def _calibration_summary(calibration: Calibration, model: str, out: str) -> dict[str, Any]:
    from asapc.calibration.stored import fit_facts

    sites = [
        {"name": name, **fit_facts(fit), "tokens": fit.tokens, "fit_seconds": fit.fit_seconds}
        for name, fits in calibration.sites.items()
        for fit in fits
    ]
    return {"model": model, "calibration": out, "order": calibration.order, "sites": sites,
            "warnings": [dict(warning) for warning in calibration.warnings]}  # fmt: skip
