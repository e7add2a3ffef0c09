"""What commands take: arguments, options, and bundles of options, each described where it is defined.

A dataclass with fields made by `hints.option` is a bundle: a command that has a parameter of it takes
each of its fields as an option; Annotated[Bundle, "a", "b"] stands for these two alone. A function in an
annotation checks the value before the command begins.
"""

from __future__ import annotations

import inspect as introspection
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from asapc import session
from asapc.inputs.paths import check_artifact, check_calibration, check_data, check_file
from asapc.memory import parse_size
from asapc.metrics import MEASURED_EXAMPLES
from asapc.terminal.hints import option

if TYPE_CHECKING:
    from asapc.report.evaluate import Measuring

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

_DATA = typer.Option(metavar="DATA", help="Examples to run the model on.")
Data = Annotated[str, _DATA, check_data]
OptionalData = Annotated[str | None, _DATA, check_data]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="The teacher: folder, factory, .pt2 or .onnx file.")
]
OptionalModel = Annotated[
    str | None, typer.Option(metavar="MODEL", help="The teacher, if OUT cannot rebuild it."),
]
ArtifactFolder = Annotated[
    str, typer.Argument(metavar="OUT", help="Folder written by `asapc compile`."), check_artifact
]
CalibrationFolder = Annotated[
    str, typer.Option(metavar="CALIB", help="Folder written by `asapc calibrate`."), check_calibration
]
NewFolder = Annotated[str, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")]
RecipeFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="YAML: what to try, and error limits."),
    partial(check_file, what="recipe"),
]
OUTPUT: dict[str, Any] = {  # what every command takes last
    "json": Annotated[bool, typer.Option(help="Print the result as JSON on stdout.")],
    "quiet": Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing on success, except the output of --json.")
    ],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="Print all tables of the result.")],
    "debug": Annotated[bool, typer.Option(help="Show the traceback on failure.")],
}


@dataclass(frozen=True)
class Measured:
    """How much is measured: evaluate.Measuring as options."""

    examples: int = option(MEASURED_EXAMPLES, "Most examples to measure.", min=1)
    fast: bool = option(False, "Skip certificates and pictures of attention.")
    max_memory: int | None = option(
        None, "Memory limit of the process, such as 2GiB.", metavar="SIZE", parser=parse_size
    )
    torch_compile: bool = option(False, "Also time teacher and compiled model under torch.compile.")
    metric: str | None = option(
        None, "Your own validation function, called on the outputs of both models.", metavar="FUNCTION"
    )
    lower_is_better: bool = option(False, "Smaller values of --metric are better.")

    def settings(self) -> Measuring:
        from asapc.measure.own_metric import OwnMetric
        from asapc.report.evaluate import Measuring

        metric = None if self.metric is None else OwnMetric(self.metric, self.lower_is_better)
        return Measuring(self.examples, self.fast, self.max_memory, self.torch_compile, metric)


@dataclass(frozen=True)
class Judged:
    """What a report is held against."""

    gate: str | None = option(None, "YAML limits; exit code 1 if exceeded.", metavar="FILE")
    baseline: str | None = option(
        None, "An earlier report.json; exit code 1 if the new report is worse.", metavar="FILE"
    )
    max_regression: list[str] | None = option(
        None, "Allowed regression from the baseline, such as 2% (default) or speedup=10%; repeatable.",
        metavar="[METRIC=]SHARE",
    )  # fmt: skip
    junit: str | None = option(None, "Also write the checks to this file, as JUnit XML.", metavar="FILE")


def command(name: str | None = None, processes: bool = False, timed: bool = False) -> Callable[..., Any]:
    """Make a command of body(run, ...) -> exit code, None for 0: its parameters are the options, of which
    those that are False by default are switches.

    processes, timed: as session.run has them.
    """

    def register(body: Callable[..., int | None]) -> Callable[..., int]:
        signature = list(introspection.signature(body, eval_str=True).parameters.values())[1:]
        bundles = {x.name: (x.default, _bundled(x.annotation)) for x in signature}

        def call(**values: Any) -> int:
            output = {key: values.pop(key) for key in OUTPUT}

            def run_body(run: session.Session) -> int | None:
                for parameter in signature:
                    for check in filter(callable, getattr(parameter.annotation, "__metadata__", ())):
                        check(values[parameter.name])
                for name, (default, kinds) in bundles.items():
                    if kinds:
                        values[name] = replace(default, **{key: values.pop(key) for key in kinds})
                return body(run, **values)

            return session.run(run_body, processes=processes, timed=timed, **output)

        parameters = []
        for parameter in signature:
            default, kinds = bundles[parameter.name]
            parameters += [_option(key, getattr(default, key), kind) for key, kind in kinds.items()]
            parameters += [] if kinds else [parameter]
        parameters += [_option(key, False, kind) for key, kind in OUTPUT.items()]
        for parameter in parameters:
            kind, *options = get_args(parameter.annotation)
            if kind is bool:
                options[0].metavar = ""  # a switch takes no value, whatever typer's help shows
            if parameter.default is False:  # what is on by default has --no-..., too
                switch = f"--{parameter.name.replace('_', '-')}"
                options[0].param_decls = options[0].param_decls or (switch,)
        call.__name__, call.__doc__ = body.__name__, body.__doc__
        call.__annotations__ = {x.name: x.annotation for x in parameters}
        call.__signature__ = introspection.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name=name)(call)
        return call

    return register


def _bundled(annotation: Any) -> dict[str, Any]:
    """The types of the options that a parameter stands for; none if it is one itself."""
    kind, *names = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if not is_dataclass(kind):
        return {}
    hints = get_type_hints(kind)
    return {
        each.name: Annotated[hints[each.name], typer.Option(**each.metadata)]
        for each in fields(kind) if not names or each.name in names
    }  # fmt: skip


def _option(name: str, default: Any, kind: Any) -> introspection.Parameter:
    positional = introspection.Parameter.POSITIONAL_OR_KEYWORD
    return introspection.Parameter(name, positional, default=default, annotation=kind)
