"""The command line: arguments in, one pipeline call, result out.  Exit codes are asapc.errors'.

torch takes seconds to import, so everything that needs it is imported inside the commands.
"""

from __future__ import annotations

import contextlib
import inspect as introspection
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asapc import commands, session
from asapc.errors import EXIT_BAD_INPUT, EXIT_GATE_FAILED, EXIT_OK, InputError, check_text, nothing_found
from asapc.inputs.paths import check_artifact, check_data, check_file, check_model, is_array_file
from asapc.inputs.reading import AUTO, NO_OPTIONS, Reading
from asapc.metrics import MEASURED_EXAMPLES
from asapc.processes import joined
from asapc.session import EXIT_INTERRUPTED, Session
from asapc.terminal.hints import command_line
from asapc.training.settings import RefreshSettings

if TYPE_CHECKING:
    from asapc.report import Report

app = typer.Typer(
    name="asapc",
    help=(
        "Make trained Sinkhorn-attention models faster.\n\n"
        "MODEL is pkg.module:factory or file.py:factory with --weights (and --kwargs), a folder with "
        "config.json and model.safetensors (a built-in architecture or a Hugging Face model), a .pt2 "
        "program, or an .onnx file. "
        "DATA is an .npz or .safetensors file with one array per argument of forward, or "
        "module:callable, which yields batches.\n\n"
        "Exit codes: 0 done; 1 gate failed; 2 usage or bad input; 3 no site compiled; "
        "4 replay or verification failed; 70 internal error; 130 interrupted."
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="The teacher: folder, factory, .pt2 or .onnx file.")
]
ArtifactFolder = Annotated[str, typer.Argument(metavar="OUT", help="Folder written by `asapc compile`.")]
Weights = Annotated[
    str | None, typer.Option(metavar="FILE", help="Weights for a factory: .safetensors, .pt or .pth.")
]
Kwargs = Annotated[str | None, typer.Option(metavar="JSON", help="Keyword arguments for a factory.")]
MaxMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory limit of the process, such as 2GiB.")
]
OptionalModel = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The teacher, if OUT cannot rebuild it."),
]
Data = Annotated[str, typer.Option(metavar="DATA", help="Examples to run the model on.")]
OptionalData = Annotated[
    str | None, typer.Option("--data", metavar="DATA", help="Examples to run the model on.")
]
RecipeFile = Annotated[
    str | None, typer.Option("--recipe", metavar="FILE", help="YAML: what to try, and error limits."),
]
Opset = Annotated[
    int | None,
    typer.Option("--opset", help="ONNX opset, 18 to 23. Default: 18, or that of an .onnx teacher."),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        help="Largest allowed difference of each ONNX output, relative to its largest entry. Default: "
        "1e-4, or four times PyTorch's own error in float16.",
    ),
]
GateFile = Annotated[
    str | None, typer.Option("--gate", metavar="FILE", help="YAML limits; exit code 1 if exceeded.")
]
Examples = Annotated[int, typer.Option("--examples", min=1, help="Most examples to measure.")]
Fast = Annotated[bool, typer.Option("--fast", help="Skip certificates and pictures of attention.")]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Trust the file: allow any operator and any memory (see SECURITY.md)."),
]
RemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code from a transformers folder MODEL that you trust."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda, or cuda:1; auto uses a GPU if there is one."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, help="Number of CPU threads. Default: torch's."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing on success, except the output of --json.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print all tables of the result.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback on failure.")]


# What every command takes last, and the options that a parameter of some type stands for.
OUTPUT: dict[str, Any] = {"json": Json, "quiet": Quiet, "verbose": Verbose, "debug": Debug}


def _given(kind: Any, help: str, *names: str, **more: Any) -> Any:
    """The type of an option."""
    return Annotated[kind, typer.Option(*names, help=help, **more)]


BUNDLES: dict[Any, dict[str, Any]] = {
    Reading: {
        "weights": Weights, "kwargs": Kwargs, "trust": Trust, "trust_remote_code": RemoteCode,
        "device": Device, "threads": Threads,
    },
    commands.Measured: {
        "examples": Examples, "fast": Fast, "max_memory": MaxMemory,
        "torch_compile": _given(
            bool, "Also time teacher and compiled model under torch.compile.", "--torch-compile"
        ),
        "metric": _given(
            str | None, "Your own validation function, called on the outputs of both models.",
            metavar="FUNCTION",
        ),
        "lower_is_better": _given(bool, "Smaller values of --metric are better.", "--lower-is-better"),
    },
    commands.Judged: {
        "gate": GateFile,
        "baseline": _given(
            str | None, "An earlier report.json; exit code 1 if the new report is worse.", metavar="FILE"
        ),
        "max_regression": _given(
            list[str] | None,
            "Allowed regression from the baseline, such as 2% (default) or speedup=10%; repeatable.",
            metavar="[METRIC=]SHARE",
        ),
        "junit": _given(str | None, "Also write the checks to this file, as JUnit XML.", metavar="FILE"),
    },
    RefreshSettings: {
        "labels": _given(bool, "Train on the labels in DATA (cross entropy).", "--labels"),
        "distil": _given(bool, "Train on the teacher's predictions (KL, no labels).", "--distil"),
        "anneal": _given(bool, "Turn the soft sorts of ESP layers into exact ones.", "--anneal"),
        "tail": _given(
            str | None,
            "Pass gradients through only the last R half-steps of each exact loop, or through as few "
            "as --tolerance allows. Default: all.",
            metavar="R|certified",
        ),
        "tolerance": _given(
            float, "Fraction of a layer's score gradient that a certified tail may omit."
        ),
        "epochs": _given(int, "Number of passes over the calibration split.", min=1),
        "learning_rate": _given(float, "Adam's learning rate."),
        "batch_size": _given(int, "Examples per step.", min=1),
        "parameters": _given(
            list[str] | None, "Parameters to train instead of the default; repeatable.", metavar="PATTERN"
        ),
        "examples": _given(int | None, "Most examples to train on; held in memory.", min=1),
        "seed": _given(int, "Seed of the order of examples.", min=0, max=2**63 - 1),
    },
}  # fmt: skip
NO_TRAINING, NOT_JUDGED, AS_USUAL = RefreshSettings(), commands.Judged(), commands.Measured()


def command(name: str | None = None, processes: bool = False) -> Callable[..., Any]:
    """Make a command of body(run, ...) -> exit code, None for 0: its parameters are the options.

    A parameter of a type in BUNDLES becomes the options that it holds.  processes: several, started by
    torchrun, may run it.
    """

    def register(body: Callable[..., int | None]) -> Callable[..., int]:
        own = list(introspection.signature(body, eval_str=True).parameters.values())[1:]
        bundles = {x.name: x.annotation for x in own if x.annotation in BUNDLES}

        def call(**given: Any) -> int:
            output = {key: given.pop(key) for key in OUTPUT}
            for name, kind in bundles.items():
                given[name] = kind(**{key: given.pop(key) for key in BUNDLES[kind]})
            return session.run(lambda run: body(run, **given), processes=processes, **output)

        parameters = [x for parameter in own for x in _options(parameter)]
        parameters += [_option(key, False, kind) for key, kind in OUTPUT.items()]
        call.__name__, call.__doc__ = body.__name__, body.__doc__
        call.__annotations__ = {x.name: x.annotation for x in parameters}
        call.__signature__ = introspection.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name=name)(call)
        return call

    return register


def _options(parameter: introspection.Parameter) -> list[introspection.Parameter]:
    kinds = BUNDLES.get(parameter.annotation)
    if kinds is None:
        return [parameter]
    return [_option(x.name, x.default, kinds[x.name]) for x in fields(parameter.annotation)]


def _option(name: str, default: Any, kind: Any) -> introspection.Parameter:
    positional = introspection.Parameter.POSITIONAL_OR_KEYWORD
    return introspection.Parameter(name, positional, default=default, annotation=kind)


@command()
def inspect(run: Session, model: Model, data: OptionalData = None, reading: Reading = NO_OPTIONS) -> None:
    """List every attention layer and Sinkhorn loop with its convention, or why it is left alone.

    Exit code 3 if the model has neither.
    """
    result = commands.inspect_model(model, data, reading, run.progress)
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
        bool,
        typer.Option("--sequential", help="Fit each layer with the layers before it already amortised."),
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start over instead of resuming an interrupted run.")
    ] = False,
    max_memory: MaxMemory = None,
    reading: Reading = NO_OPTIONS,
) -> None:
    """Fit each site's dual on streamed data, or distil the operator that the recipe names."""
    summary = commands.calibrate_model(
        run, model, data, out, recipe, reading, sequential, restart, max_memory
    )
    run.present(summary, "calibration")
    if not summary["sites"]:
        run.note("nothing to fit: `asapc compile` says why each layer keeps its own loop")
    run.note(f"wrote {out}")
    run.next(  # compile reads the calibration's recipe, and its data where that is a file
        "compile", model, calibration=out, o=f"{Path(out)}.compiled",
        data=None if is_array_file(data) else data, **reading.options(),
    )  # fmt: skip


@command(processes=True)
def study(
    run: Session,
    model: Model,
    data: Data,
    grid: Annotated[str, typer.Option(metavar="GRID", help="YAML: blocks of recipe keys to try.")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")],
    test: Annotated[
        str | None, typer.Option(metavar="DATA", help="Data to measure on. Default: a part of --data.")
    ] = None,
    examples: Annotated[
        int, typer.Option(min=1, help="Most examples to measure on.")
    ] = MEASURED_EXAMPLES,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per batch.")] = 32,
    reading: Reading = NO_OPTIONS,
) -> None:
    """Fit and measure a grid of candidates on one model, side by side."""
    check_model(model, reading.weights)
    check_data(data)
    check_data(test)
    check_file(grid, "grid")
    from asapc.study import load_grid

    blocks = load_grid(grid)
    place = reading.place()
    teacher = reading.teacher(model)
    from asapc.study import study as run_study

    with joined() as processes:
        result = run_study(
            teacher, data, blocks, out, run.progress,
            test=test, max_test_examples=examples, batch_size=batch_size, processes=processes,
            device=place,
        )  # fmt: skip
    run.present(result, "study")
    run.note(f"wrote {out}: study.json, study.csv, study.md")


@command()
def compile(
    run: Session,
    model: Model,
    calibration: Annotated[
        str, typer.Option(metavar="CALIB", help="Folder written by `asapc calibrate`.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")],
    recipe: RecipeFile = None,
    data: OptionalData = None,
    emit: Annotated[
        str | None,
        typer.Option(metavar="onnx", help="Also write OUT/model.onnx (always done for an .onnx MODEL)."),
    ] = None,
    opset: Opset = None,
    tolerance: Tolerance = None,
    max_memory: MaxMemory = None,
    reading: Reading = NO_OPTIONS,
) -> None:
    """Choose an operator for each site, then rewrite, verify and save the model."""
    _only_onnx("--emit", emit)
    asked = opset is not None or tolerance is not None
    is_onnx = Path(model).suffix == ".onnx" and not Path(model).is_dir()
    if asked and emit is None and not is_onnx:
        raise InputError(
            "--opset and --tolerance apply only to ONNX files", got="no --emit onnx",
            help="add --emit onnx, or drop them",
        )  # fmt: skip
    from asapc.inputs.onnx.settings import MODEL, OnnxSettings, read_record

    onnx = OnnxSettings(opset, tolerance) if asked or emit is not None else None
    manifest = commands.compile_model(
        run, model, calibration, out, recipe, data, reading, onnx=onnx, max_memory=max_memory
    )
    record = read_record(Path(out))
    result = manifest if record is None else {**manifest, "onnx_file": record}
    run.present(result, "compile")
    if record is not None:
        run.note(f"wrote {Path(out) / MODEL}; ONNX Runtime gives the same outputs")
    around = manifest["capture"] == "module"
    run.note(f"wrote {out}; load it with asapc.load({out!r}{', model=...' if around else ''})")
    run.next(
        "report", out, data=data, model=model if around else None,
        kwargs=reading.kwargs if around else None, trust=reading.trust,
        trust_remote_code=reading.trust_remote_code and around,
    )  # fmt: skip


@command(name="run")
def whole(
    run: Session,
    model: Model,
    data: Data,
    out: Annotated[str, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")],
    recipe: RecipeFile = None,
    gate: GateFile = None,
    measured: commands.Measured = AS_USUAL,
    reading: Reading = NO_OPTIONS,
) -> int:
    """Calibrate, compile and report in one go; write OUT.calibration and OUT.

    An interrupted run resumes. Output and exit codes are those of `asapc report`.
    """
    result = commands.run_all(run, model, data, out, recipe, gate, measured, reading)
    return _reported(run, result, out, data)


@command()
def export(
    run: Session,
    artifact: ArtifactFolder,
    format: Annotated[str, typer.Option("--format", metavar="onnx", help="What to write.")] = "onnx",
    data: OptionalData = None,
    opset: Opset = None,
    float16: Annotated[
        bool, typer.Option("--float16", help="Store weights and activations in half precision.")
    ] = False,
    tolerance: Tolerance = None,
    trust: Trust = False,
    threads: Threads = None,
) -> None:
    """Write a compiled model as OUT/model.onnx, run it in ONNX Runtime and compare.

    If an output differs by more than the tolerance, the exit code is 4 and an earlier verified model.onnx
    is kept.
    """
    _only_onnx("--format", format)
    check_artifact(artifact)
    check_data(data)
    from asapc.inputs.onnx.settings import MODEL, OnnxSettings

    settings = OnnxSettings(opset, tolerance, float16)
    Reading(device="cpu", threads=threads).place()
    from asapc import pipeline

    record = pipeline.export(artifact, data, settings, run.progress, trust=trust)
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
    check_artifact(artifact)
    check_data(data)
    settings.check()
    from asapc import pipeline
    from asapc.inputs.onnx.settings import MODEL

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


@command(processes=True)
def report(
    run: Session,
    artifact: ArtifactFolder,
    data: OptionalData = None,
    judged: commands.Judged = NOT_JUDGED,
    measured: commands.Measured = AS_USUAL,
    model: OptionalModel = None,
    reading: Reading = NO_OPTIONS,
) -> int:
    """Measure fidelity and speed against the teacher; write report.json, .md, .html and junit.xml.

    With --gate or --baseline the verdict is ACCEPT (exit 0), REGRESSION (a limit or the baseline is not
    kept) or ANOMALOUS (a measurement is missing, NaN, on too few examples or too good); both exit 1.
    """
    result = commands.report_artifact(run, artifact, data, judged, measured, model, reading)
    return _reported(run, result, artifact, data)


@command()
def bench(
    run: Session,
    artifact: ArtifactFolder,
    data: OptionalData = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 10,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show which kernel each site runs, and why.")
    ] = False,
    torch_compile: Annotated[
        bool,
        typer.Option(
            "--torch-compile/--no-torch-compile",
            help="Also time teacher and compiled model under torch.compile, which may take minutes.",
        ),
    ] = True,
    model: OptionalModel = None,
    reading: Reading = NO_OPTIONS,
) -> None:
    """Time the teacher, the lossless and the compiled model, as a whole and per site."""
    check_artifact(artifact)
    check_data(data)
    from asapc import pipeline

    result = pipeline.bench(
        artifact, data, model=model, reading=reading, repeats=repeats, explain=explain,
        torch_compile=torch_compile, progress=run.progress,
    )  # fmt: skip
    run.present(result, "bench")
    _note_unverified(run, artifact, data)


@command()
def demo(
    run: Session,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FOLDER", help="Folder to work in.")
    ] = "asapc-demo",
    example: Annotated[
        str, typer.Option("--example", metavar="NAME", help="code (the default) or digits (smaller).")
    ] = "code",
    device: Device = AUTO,
    threads: Threads = None,
) -> None:
    """Compile a bundled checkpoint step by step, and say which result to ship.

    code: tell which package of Python's standard library a snippet comes from. digits: 8 x 8 images.
    """
    from asapc.demo import run_demo

    run_demo(run, out, example, Reading(device=device, threads=threads))


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
    from asapc.inputs.onnx.settings import MODEL, is_unverified

    if is_unverified(Path(artifact)):
        place = Path(artifact) / MODEL
        again = command_line("export", artifact, data=data)
        run.note(f"{place} is not the file that was verified, so it is left out: {again}")


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
