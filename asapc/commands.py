"""The commands that the demo shares with the command line: files are read, the pipeline runs.

torch takes seconds to import, so what needs it is imported after what can be refused without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asapc.errors import InputError
from asapc.inputs.paths import (
    check_artifact,
    check_calibration,
    check_data,
    check_file,
    check_model,
    is_array_file,
)
from asapc.inputs.reading import NO_OPTIONS, Reading
from asapc.metrics import MEASURED_EXAMPLES
from asapc.processes import joined
from asapc.session import Session
from asapc.terminal.progress import SILENT, Progress

if TYPE_CHECKING:
    from asapc.calibration.stored import Calibration
    from asapc.inputs.onnx.settings import OnnxSettings
    from asapc.inputs.teacher import Teacher
    from asapc.report import Report
    from asapc.report.evaluate import Measuring
    from asapc.report.gates import Gate


@dataclass(frozen=True)
class Measured:
    """How much is measured: evaluate.Measuring as options.  metric: the user's function, which runs."""

    examples: int = MEASURED_EXAMPLES
    fast: bool = False
    torch_compile: bool = False
    max_memory: str | None = None
    metric: str | None = None
    lower_is_better: bool = False

    def settings(self) -> Measuring:
        from asapc.measure.own_metric import OwnMetric
        from asapc.report.evaluate import Measuring

        own = None if self.metric is None else OwnMetric(self.metric, self.lower_is_better)
        return Measuring(self.examples, self.fast, _size(self.max_memory), self.torch_compile, own)


@dataclass(frozen=True)
class Judged:
    """What a report is held against.  junit: where the checks are written, too."""

    gate: str | None = None
    baseline: str | None = None
    max_regression: list[str] | None = None
    junit: str | None = None


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
    teacher = _teacher(run, model, reading)
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
    """Compile and return the manifest, with margins of speed.  Without a recipe, the calibration's is
    used.

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
    teacher = _teacher(run, model, reading)
    from asapc import pipeline

    written = pipeline.compile(
        teacher, calibration, out, resolved, data, run.progress, onnx, max_memory=limit, device=place
    )
    return _with_margins(written.manifest, written.selection)


def _with_margins(manifest: dict[str, Any], selection: Mapping[str, Any]) -> dict[str, Any]:
    """The reasons of a manifest, which are the same in every run, with what was timed in this one."""
    from asapc.passes.select import GAINS_TOO_LITTLE

    sites = {site["name"]: dict(site) for site in manifest["sites"]}
    for trail in selection.get("sites", ()):
        site = sites[trail["name"]]
        for tried in trail["candidates"]:
            lost = f"{tried['label']}: {GAINS_TOO_LITTLE}"
            site["reason"] = site["reason"].replace(lost, f"{lost}: {tried['verdict']}")
    return {**manifest, "sites": [*sites.values()]}


def report_artifact(
    run: Session,
    artifact: str,
    data: str | None,
    judged: Judged = Judged(),
    measured: Measured = Measured(),
    model: str | None = None,
    reading: Reading = NO_OPTIONS,
) -> Report:
    """Measure, check the gates, compare with the baseline and write the report into the artefact."""
    check_artifact(artifact)
    check_data(data)
    from asapc.formats.atomic import make_parent, replace_file
    from asapc.report import baseline as regression
    from asapc.report import junit_text, write_report

    limits = _limits(judged.gate, measured)
    allowance = regression.parse_allowance(judged.max_regression or ())
    if judged.baseline is None and judged.max_regression:
        raise InputError("--max-regression needs a --baseline to compare with")
    earlier = None
    if judged.baseline is not None:
        earlier = regression.load_baseline(judged.baseline, allowance)
    measuring = measured.settings()
    if judged.junit is not None:
        make_parent(judged.junit)  # before minutes of measuring, not after
    from asapc import pipeline

    with joined() as processes:
        result = pipeline.report(
            artifact, data, limits, earlier, model=model, reading=reading, measuring=measuring,
            progress=run.progress, processes=processes,
        )  # fmt: skip
        if processes.first:
            with run.progress.phase("drawing the page"):
                write_report(artifact, result, run.note)
            if judged.junit is not None:
                replace_file(judged.junit, junit_text(result))
    return result


def run_all(
    run: Session,
    model: str,
    data: str,
    out: str,
    recipe: str | None = None,
    gate: str | None = None,
    measured: Measured = Measured(),
    reading: Reading = NO_OPTIONS,
) -> Report:
    """Calibrate into OUT.calibration, compile into OUT and report; the model is analysed once."""
    check_model(model, reading.weights)
    check_data(data)
    check_file(recipe, "recipe")
    check_file(gate, "gates")
    from asapc.formats.atomic import check_replaceable
    from asapc.report import write_report

    limits = _limits(gate, measured)
    calibration = f"{Path(out)}.calibration"
    for folder in (calibration, out):
        check_replaceable(folder, [model, data])
    from asapc.inputs.recipe import load_recipe

    resolved, measuring = load_recipe(recipe), measured.settings()
    place = reading.place()
    teacher = _teacher(run, model, reading)
    from asapc import pipeline
    from asapc.stages.analyse import analysed_once

    analyse = analysed_once()
    _tell_shortage(run, limits, resolved.budget, data, teacher, measuring.examples)
    run.note(f"1 of 3: calibrating into {calibration}")
    pipeline.calibrate(
        teacher, data, calibration, resolved, run.progress, max_memory=measuring.max_memory,
        analyse=analyse, device=place,
    )  # fmt: skip
    run.note(f"2 of 3: compiling into {out}")
    written = pipeline.compile(
        teacher, calibration, out, resolved, data, run.progress, analyse=analyse,
        max_memory=measuring.max_memory, device=place,
    )  # fmt: skip
    run.note("3 of 3: measuring")
    result = pipeline.report(
        written, data, limits, model=model if written.manifest["capture"] == "module" else None,
        reading=replace(reading, trust=True), measuring=measuring, progress=run.progress,
    )  # fmt: skip
    with run.progress.phase("drawing the page"):
        write_report(out, result, run.note)
    return result


def _teacher(run: Session, model: str, reading: Reading) -> Teacher:
    if ":" in model and reading.weights is None:
        run.note(f"no --weights: using what {model} returns, untrained unless it loads weights itself")
    return reading.teacher(model)


def _limits(gate: str | None, measured: Measured) -> list[Gate]:
    """Of a gates file.  Raises InputError before the work where a limit needs what is not asked for."""
    from asapc.report.gates import load_gates

    limits = [] if gate is None else load_gates(gate)
    own = next((limit.metric for limit in limits if limit.metric.startswith("metric_")), None)
    if own is not None and measured.metric is None:
        raise InputError(
            f"gates {gate}: {own} needs your own metric", got="no --metric",
            help="pass --metric FILE.py:FUNCTION (a gates file cannot run code)",
        )  # fmt: skip
    return limits


def _tell_shortage(
    run: Session, limits: Sequence[Gate], budget: Mapping[str, float], data: str, teacher: Teacher,
    most: int,
) -> None:  # fmt: skip
    """Warn before the work where the report will have too few examples for its limits, or, where there
    are none, to prove the budget's share of equal predictions."""
    from asapc.inputs.data import GATE_SHARE, open_data, split_of
    from asapc.report.gates import Gate, examples_asked
    from asapc.stages.analyse import forward_signature

    asking = "the limits need"
    share = None if limits else budget.get("prediction_agreement")
    if share is not None:
        asking = f"to prove {100 * share:.4g} % equal predictions takes"
        limits = [Gate("prediction_agreement", "min", share, confidence=True)]
    needed = examples_asked(limits)
    if not needed or not is_array_file(data):
        return
    if most < needed:
        run.note(f"warning: {asking} {needed} examples: pass --examples {needed}")
    source = open_data(data, forward_signature(teacher))
    if (source.examples or 0) > 20 * needed:
        return  # enough, and long to count
    hashes = [content for batch in source.batches(1024) for content in batch.hashes]
    held_out = sum(split_of(content) == "gate" for content in hashes)
    if held_out < needed:
        run.note(
            f"warning: {asking} {needed} examples, and the report will have {held_out}, the gate "
            f"split of {data}: add about {math.ceil((needed - held_out) / GATE_SHARE)}"
        )


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
