"""The command line: files are read, one pipeline call, results shown.  Exit codes are asapc.errors'.

torch takes seconds to import, so what needs it is imported after what can be refused without it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asapc import session
from asapc.errors import EXIT_BAD_INPUT, EXIT_GATE_FAILED, EXIT_OK, InputError, check_text, nothing_found
from asapc.inputs.onnx.settings import MODEL, OnnxSettings, is_unverified, read_record
from asapc.inputs.paths import check_data, check_file, check_model, is_array_file
from asapc.inputs.reading import NO_OPTIONS, ON_CPU, Reading
from asapc.metrics import MEASURED_EXAMPLES
from asapc.options import (
    ArtifactFolder,
    CalibrationFolder,
    Data,
    Judged,
    Measured,
    Model,
    NewFolder,
    OptionalData,
    OptionalModel,
    RecipeFile,
    app,
    command,
)
from asapc.processes import joined
from asapc.session import EXIT_INTERRUPTED, Session
from asapc.terminal.hints import command_line
from asapc.training.settings import RefreshSettings

if TYPE_CHECKING:
    from asapc.inputs.teacher import Teacher
    from asapc.report import Report
    from asapc.report.gates import Gate

NO_TRAINING, NOT_JUDGED, AS_USUAL, AS_IT_IS = RefreshSettings(), Judged(), Measured(), OnnxSettings()
Memory = Annotated[Measured, "max_memory"]


@command()
def inspect(run: Session, model: Model, data: OptionalData = None, reading: Reading = NO_OPTIONS) -> None:
    """List every attention layer and Sinkhorn loop with its convention, or why it is left alone.

    Exit code 3 if the model has neither.
    """
    check_model(model, reading.weights)
    place, teacher = reading.place(), reading.teacher(model)
    from asapc import pipeline

    result = pipeline.inspect(teacher, data, run.progress, place)
    run.present(result, "inspect")
    if not result["sites"]:
        raise nothing_found()
    if data is not None and any(site["status"] == "matched" for site in result["sites"]):
        run.next("calibrate", model, data=data, o="calibration", **reading.options())


@command(processes=True)
def calibrate(
    run: Session,
    model: Model,
    data: Data,
    out: Annotated[str, typer.Option("--out", "-o", metavar="CALIB", help="Folder to write.")],
    recipe: RecipeFile = None,
    sequential: Annotated[
        bool, typer.Option(help="Fit each layer with the layers before it already amortised.")
    ] = False,
    restart: Annotated[
        bool, typer.Option(help="Start over instead of resuming an interrupted run.")
    ] = False,
    measured: Memory = AS_USUAL,
    reading: Reading = NO_OPTIONS,
) -> None:
    """Fit each site's dual on streamed data, or distil the operator that the recipe names."""
    check_model(model, reading.weights)
    from asapc.inputs.recipe import load_recipe

    resolved, limit = load_recipe(recipe), measured.max_memory
    place, teacher = reading.place(), _teacher(run, model, reading)
    from asapc import pipeline
    from asapc.calibration.stored import fit_facts

    with joined() as processes:
        fitted = pipeline.calibrate(
            teacher, data, out, resolved, run.progress, sequential, restart, limit,
            processes=processes, device=place,
        )  # fmt: skip
    sites = [
        {"name": name, **fit_facts(fit), "tokens": fit.tokens, "fit_seconds": fit.fit_seconds}
        for name, fits in fitted.sites.items() for fit in fits
    ]  # fmt: skip
    summary = {"model": model, "calibration": out, "order": fitted.order, "sites": sites,
               "warnings": [dict(warning) for warning in fitted.warnings]}  # fmt: skip
    run.present(summary, "calibration")
    if not sites:
        run.note("nothing to fit: `asapc compile` says why each layer keeps its own loop")
    run.note(f"wrote {out}")
    run.next(  # compile reads the calibration's recipe, and its data where that is a file
        "compile", model, calibration=out, o=f"{Path(out)}.compiled",
        data=None if is_array_file(data) else data, **reading.options(),
    )  # fmt: skip


@command(processes=True, timed=True)
def study(
    run: Session,
    model: Model,
    data: Data,
    grid: Annotated[
        str, typer.Option(metavar="GRID", help="YAML: blocks of recipe keys to try."),
        partial(check_file, what="grid"),
    ],
    out: NewFolder,
    test: Annotated[
        str | None, typer.Option(metavar="DATA", help="Data to measure on. Default: a part of --data."),
        check_data,
    ] = None,
    examples: Annotated[
        int, typer.Option(min=1, help="Most examples to measure on.")
    ] = MEASURED_EXAMPLES,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per batch.")] = 32,
    reading: Reading = NO_OPTIONS,
) -> None:
    """Fit and measure a grid of candidates on one model, side by side."""
    check_model(model, reading.weights)
    from asapc.study import MeasuredOn, load_grid
    from asapc.study import study as run_study

    blocks = load_grid(grid)
    place, teacher = reading.place(), reading.teacher(model)
    with joined() as processes:
        result = run_study(
            teacher, data, blocks, out, run.progress, measured=MeasuredOn(test, examples, batch_size),
            processes=processes, device=place,
        )  # fmt: skip
    run.present(result, "study")
    run.note(f"wrote {out}: study.json, study.csv, study.md")


@command(timed=True)
def compile(
    run: Session,
    model: Model,
    calibration: CalibrationFolder,
    out: NewFolder,
    recipe: RecipeFile = None,
    data: OptionalData = None,
    emit: Annotated[
        str | None,
        typer.Option(metavar="onnx", help="Also write OUT/model.onnx (always done for an .onnx MODEL)."),
    ] = None,
    settings: Annotated[OnnxSettings, "opset", "tolerance"] = AS_IT_IS,
    measured: Memory = AS_USUAL,
    reading: Reading = NO_OPTIONS,
) -> None:
    """Choose an operator for each site, then rewrite, verify and save the model."""
    _only_onnx("--emit", emit)
    asked, is_onnx = settings != AS_IT_IS, Path(model).suffix == ".onnx" and not Path(model).is_dir()
    if asked and emit is None and not is_onnx:
        raise InputError(
            "--opset and --tolerance apply only to ONNX files", got="no --emit onnx",
            help="add --emit onnx, or drop them",
        )  # fmt: skip
    check_model(model, reading.weights)
    from asapc.inputs.recipe import load_recipe

    resolved, limit = None if recipe is None else load_recipe(recipe), measured.max_memory
    place, teacher = reading.place(), _teacher(run, model, reading)
    from asapc import pipeline

    written = pipeline.compile(
        teacher, calibration, out, resolved, data, run.progress,
        settings if asked or emit is not None else None, max_memory=limit, device=place,
    )  # fmt: skip
    record, manifest = read_record(Path(out)), _with_margins(written.manifest, written.selection)
    run.present(manifest if record is None else {**manifest, "onnx_file": record}, "compile")
    if record is not None:
        run.note(f"wrote {Path(out) / MODEL}; ONNX Runtime gives the same outputs")
    around = manifest["capture"] == "module"
    run.note(f"wrote {out}; load it with asapc.load({out!r}{', model=...' if around else ''})")
    run.next(
        "report", out, data=data, model=model if around else None,
        kwargs=reading.kwargs if around else None, trust=reading.trust,
        trust_remote_code=reading.trust_remote_code and around,
    )  # fmt: skip


@command(name="run", timed=True)
def whole(
    run: Session,
    model: Model,
    data: Data,
    out: NewFolder,
    recipe: RecipeFile = None,
    judged: Annotated[Judged, "gate"] = NOT_JUDGED,
    measured: Measured = AS_USUAL,
    reading: Reading = NO_OPTIONS,
) -> int:
    """Calibrate, compile and report in one go; write OUT.calibration and OUT.

    An interrupted run resumes. Output and exit codes are those of `asapc report`.
    """
    check_model(model, reading.weights)
    check_file(judged.gate, "gates")
    from asapc.formats.atomic import check_replaceable
    from asapc.inputs.recipe import load_recipe

    limits = _limits(judged.gate, measured)
    calibration = f"{Path(out)}.calibration"
    for folder in (calibration, out):
        check_replaceable(folder, [model, data])
    resolved, measuring = load_recipe(recipe), measured.settings()
    place, teacher = reading.place(), _teacher(run, model, reading)
    from asapc import pipeline
    from asapc.report import write_report
    from asapc.stages.analyse import analysed_once

    once: dict[str, Any] = {"analyse": analysed_once(), "device": place}
    once["max_memory"] = measuring.max_memory
    _tell_shortage(run, limits, resolved.budget, data, teacher, measuring.examples)
    run.note(f"1 of 3: calibrating into {calibration}")
    pipeline.calibrate(teacher, data, calibration, resolved, run.progress, **once)
    run.note(f"2 of 3: compiling into {out}")
    written = pipeline.compile(teacher, calibration, out, resolved, data, run.progress, **once)
    run.note("3 of 3: measuring")
    around = written.manifest["capture"] == "module"
    result = pipeline.report(
        written, data, limits, model=model if around else None, reading=replace(reading, trust=True),
        measuring=measuring, progress=run.progress,
    )  # fmt: skip
    with run.progress.phase("drawing the page"):
        write_report(out, result, run.note)
    code = _reported(run, result, out, data)
    run.note(f"load {out} with asapc.load({out!r}{', model=...' if around else ''})")
    return code


@command()
def export(
    run: Session,
    artifact: ArtifactFolder,
    format: Annotated[str, typer.Option("--format", metavar="onnx", help="What to write.")] = "onnx",
    data: OptionalData = None,
    settings: OnnxSettings = AS_IT_IS,
    reading: Annotated[Reading, "trust", "threads"] = ON_CPU,
) -> None:
    """Write a compiled model as OUT/model.onnx, run it in ONNX Runtime and compare.

    If an output differs by more than the tolerance, the exit code is 4 and an earlier verified model.onnx
    is kept.
    """
    _only_onnx("--format", format)
    reading.place()
    from asapc import pipeline

    record = pipeline.export(artifact, data, settings, run.progress, trust=reading.trust)
    run.present({"artifact": artifact, **record}, "onnx")
    run.note(f"wrote {Path(artifact) / MODEL}")


@command(processes=True)
def refresh(
    run: Session,
    artifact: ArtifactFolder,
    data: Data,
    settings: RefreshSettings = NO_TRAINING,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="OUT2", help="Folder to write. Default: OUT.")
    ] = None,
    model: OptionalModel = None,
    reading: Reading = NO_OPTIONS,
) -> None:
    """Fine-tune the coefficients, norms, projections and head of a compiled model for a few epochs.

    With --anneal, train everything while soft sorts become exact.
    """
    settings.check()
    from asapc import pipeline

    has_onnx = (Path(artifact) / MODEL).exists()
    with joined() as processes:
        entry = pipeline.refresh(
            artifact, data, settings, out, model=model, reading=reading, progress=run.progress,
            processes=processes,
        )  # fmt: skip
    written = out or artifact
    run.present({"artifact": written, **entry}, "refresh")
    if has_onnx:
        again = command_line("export", written, data=data, trust=reading.trust)
        run.note(f"{MODEL} holds the old weights and was left behind; export it again: {again}")
    run.note(f"wrote {written}")
    run.next(
        "report", written, data=data, model=model, kwargs=reading.kwargs, trust=reading.trust,
        trust_remote_code=reading.trust_remote_code,
    )  # fmt: skip


@command(processes=True, timed=True)
def report(
    run: Session,
    artifact: ArtifactFolder,
    data: OptionalData = None,
    judged: Judged = NOT_JUDGED,
    measured: Measured = AS_USUAL,
    model: OptionalModel = None,
    reading: Reading = NO_OPTIONS,
) -> int:
    """Measure fidelity and speed against the teacher; write report.json, .md, .html and junit.xml.

    With --gate or --baseline the verdict is ACCEPT (exit 0), REGRESSION (a limit is exceeded, or the
    baseline is better) or ANOMALOUS (a measurement is missing, NaN, on too few examples or too good to
    be true); both exit 1.
    """
    from asapc.formats.atomic import make_parent, replace_file
    from asapc.report import baseline, junit_text, write_report

    limits = _limits(judged.gate, measured)
    allowance = baseline.parse_allowance(judged.max_regression or ())
    if judged.baseline is None and judged.max_regression:
        raise InputError("--max-regression needs a --baseline to compare with")
    earlier = None if judged.baseline is None else baseline.load_baseline(judged.baseline, allowance)
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
    return _reported(run, result, artifact, data)


@command(timed=True)
def bench(
    run: Session,
    artifact: ArtifactFolder,
    data: OptionalData = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 10,
    explain: Annotated[bool, typer.Option(help="Show which kernel each site runs, and why.")] = False,
    torch_compile: Annotated[
        bool,
        typer.Option(
            help="Also time teacher and compiled model under torch.compile, which may take minutes."
        ),
    ] = True,
    model: OptionalModel = None,
    reading: Reading = NO_OPTIONS,
) -> None:
    """Time the teacher, the lossless and the compiled model, as a whole and per site."""
    from asapc import pipeline

    result = pipeline.bench(
        artifact, data, model=model, reading=reading, repeats=repeats, explain=explain,
        torch_compile=torch_compile, progress=run.progress,
    )  # fmt: skip
    run.present(result, "bench")
    _note_unverified(run, artifact, data)


@command(timed=True)
def demo(
    run: Session,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FOLDER", help="Folder to work in.")
    ] = "asapc-demo",
    example: Annotated[
        str, typer.Option("--example", metavar="NAME", help="code (the default) or digits (smaller).")
    ] = "code",
    reading: Annotated[Reading, "device", "threads"] = NO_OPTIONS,
) -> int:
    """Compile a bundled checkpoint step by step, and say which result to ship.

    code: tell which package of Python's standard library a snippet comes from. digits: 8 x 8 images.
    """
    from asapc.demo import run_demo

    return run_demo(run, main, out, example, reading)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        from asapc.kernels import native

        print(f"asapc {installed('asapc')} ({native.described()})")
        raise typer.Exit
    if context.invoked_subcommand is None:
        with contextlib.redirect_stdout(sys.stderr):  # typer prints the help it is asked for
            print(context.get_help())
        raise typer.Exit(EXIT_BAD_INPUT)


def _only_onnx(option: str, value: str | None) -> None:
    if value not in (None, "onnx"):
        raise InputError(f"{option} must be onnx", got=value)


def _reported(run: Session, result: Report, artifact: str, data: str | None) -> int:
    """Show what was measured and where it is written; the exit code."""
    from asapc.report.advice import decide
    from asapc.report.gates import failure_text

    run.present(result, "report")
    _note_unverified(run, artifact, data)
    if decide(result).lossless is not None:
        run.note(f'the lossless model: asapc.load({artifact!r}, stage="lossless")')
    page = Path(artifact) / "report.html"
    shown = f", and {page.name} to open in a browser" if page.exists() else ""
    run.note(f"wrote {Path(artifact) / 'report.json'}, report.md, junit.xml{shown}")
    if result.gate.passed:
        return EXIT_OK
    if run.speaks:
        session.complain(f"asapc: {failure_text(result.gate)}")
    return EXIT_GATE_FAILED


def _note_unverified(run: Session, artifact: str, data: str | None) -> None:
    if is_unverified(Path(artifact)):
        place = Path(artifact) / MODEL
        again = command_line("export", artifact, data=data)
        run.note(f"{place} is not the file that was verified, so it is left out: {again}")


def _teacher(run: Session, model: str, reading: Reading) -> Teacher:
    if ":" in model and reading.weights is None:
        run.note(f"no --weights: using what {model} returns, untrained unless it loads weights itself")
    return reading.teacher(model)


def _limits(gate: str | None, measured: Measured) -> list[Gate]:
    """The limits in a gates file.  Raises InputError, before the work, if one needs --metric."""
    from asapc.report.gates import load_gates

    limits = [] if gate is None else load_gates(gate)
    users = next((limit.metric for limit in limits if limit.metric.startswith("metric_")), None)
    if users is not None and measured.metric is None:
        raise InputError(
            f"gates {gate}: {users} needs your own metric", got="no --metric",
            help="pass --metric FILE.py:FUNCTION (a gates file cannot run code)",
        )  # fmt: skip
    return limits


def _tell_shortage(
    run: Session, limits: Sequence[Gate], budget: Mapping[str, float], data: str, teacher: Teacher,
    most: int,
) -> None:  # fmt: skip
    """Warn before the work if the report will have too few examples for its limits or, if there are none,
    to prove the budget's share of equal predictions."""
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
    held_out = source.count(1, select=lambda content: split_of(content) == "gate") or 0
    if held_out < needed:
        run.note(
            f"warning: {asking} {needed} examples, and the report will have {held_out}, the gate "
            f"split of {data}: add about {math.ceil((needed - held_out) / GATE_SHARE)}"
        )


def _with_margins(manifest: dict[str, Any], selection: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest, whose reasons are the same in every run, with what was timed in this one."""
    from asapc.passes.select import GAINS_TOO_LITTLE

    sites = {site["name"]: dict(site) for site in manifest["sites"]}
    for trail in selection.get("sites", ()):
        site = sites[trail["name"]]
        for tried in trail["candidates"]:
            lost = f"{tried['label']}: {GAINS_TOO_LITTLE}"
            site["reason"] = site["reason"].replace(lost, f"{lost}: {tried['verdict']}")
    return {**manifest, "sites": [*sites.values()]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; usage errors print like any other error."""
    command = typer.main.get_command(app)
    argv = sys.argv[1:] if arguments is None else list(arguments)
    try:
        for argument in argv:
            check_text(argument, "an argument")
        code = command.main(args=argv, prog_name="asapc", standalone_mode=False)
    except KeyboardInterrupt:
        session.complain("asapc: interrupted")
        return EXIT_INTERRUPTED
    except InputError as error:
        session.complain(f"asapc: {error}")
        return error.exit_code
    except Exception as error:
        # A usage error.  Its class has moved between typer releases; these two attributes have not.
        if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
            raise
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "asapc"
        session.complain(f"asapc: {error.format_message()}\n  help: {path} --help lists what is accepted")
        return EXIT_BAD_INPUT
    return code if isinstance(code, int) else 0
