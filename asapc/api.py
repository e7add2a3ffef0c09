"""Plain use from Python: calibrate, compile and report in one call, with the code behind the commands."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from asapc import pipeline
from asapc.artifact import load
from asapc.device import CPU, chosen_device, running_on
from asapc.errors import FewExamplesWarning, InputError
from asapc.inputs.data import DataSource, data_of, require_splits
from asapc.inputs.load import load_teacher
from asapc.inputs.reading import Reading
from asapc.inputs.recipe import Recipe
from asapc.inputs.teacher import Teacher, uncompiled
from asapc.inputs.weights import fingerprint
from asapc.measure.own_metric import OwnMetric
from asapc.metrics import MEASURED_EXAMPLES
from asapc.passes.first_call import held_apart
from asapc.program.summary import Summary, shown_by
from asapc.report import document, markdown, write_report
from asapc.report.evaluate import Measuring
from asapc.report.gates import Gate, parse_gates
from asapc.report.tables import headline
from asapc.stages.analyse import analysed_once, forward_signature
from asapc.terminal.notebook import progress_here
from asapc.terminal.progress import Progress


@dataclass(frozen=True, repr=False)
class MeasuredReport:
    """A report.  measured: with types.  facts: the contents of OUT/report.json."""

    measured: document.Report

    @property
    def facts(self) -> dict[str, Any]:
        return self.measured.to_json()

    @property
    def passed(self) -> bool:
        """Whether all gates passed; True if there were none."""
        return self.measured.gate.passed

    def __repr__(self) -> str:  # the facts fill pages
        return f"MeasuredReport({headline(self.measured)})"

    def _repr_html_(self) -> str:
        return self.measured._repr_html_()

    def figure(self, what: str = "errors", site: str | None = None) -> Any:
        """Draw errors, times, heads, lengths, candidates or maps as a matplotlib Figure; see
        asapc.report.Report.figure."""
        return self.measured.figure(what, site)

    def markdown(self) -> str:
        return markdown(self.measured)

    def save(self, folder: str | Path) -> list[Path]:
        """Write report.json, report.md, junit.xml and, with the `report` extra, report.html."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        return write_report(folder, self.measured)


class Compiled(NamedTuple):
    model: nn.Module
    report: MeasuredReport

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def compile(
    model: nn.Module | str,
    data: str | DataSource | Mapping[str, Any] | Iterable[object],
    *,
    budget: Mapping[str, float] | None = None,
    recipe: Recipe | Mapping[str, Any] | None = None,
    gates: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    examples: int = MEASURED_EXAMPLES,
    metric: OwnMetric | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> Compiled:
    """Compile a trained model, and measure its error and speed on examples it was not fitted on.

    model:    a module, which is not changed, or MODEL as on the command line.
    data:     DATA as on the command line; or arrays [examples, ...] named after forward's arguments,
              with optional `labels` [examples]; one array for the first argument; or batches. Labels are
              not needed.
    budget:   replaces the recipe's, for example {"prediction_agreement": 0.998}; see asapc.inputs.recipe.
    recipe:   what to try, as in a recipe file.
    gates:    limits on the report, as in a gates file; see MeasuredReport.passed.
    out:      the folder to keep the artefact in, for asapc.load. OUT.calibration beside it lets an
              interrupted run resume. Without it, both are temporary.
    examples: the most examples to measure for the report.
    metric:   asapc.OwnMetric(function, lower_is_better=False), measured on both models for the report;
              function(output, batch) returns one number per example, see asapc.measure.own_metric.
    device:   where to calibrate, select and measure, as with --device. Default: where the module is. The
              compiled model is there too.
    quiet:    show no progress.
    The compiled model is a patched copy of `model`, with its class and layers, see asapc.program.live; or
    a CompiledModel if the model came without its code, or its attention is not called as a module. If
    nothing is faster than the teacher's own code, it is an unpatched copy, with a warning.
    Raises the errors of asapc.errors, as the commands do: NoSiteError if nothing can be compiled,
    VerificationError if the rewritten model computes something else, InputError otherwise. Warns with
    FewExamplesWarning if a chosen fit rests on too little data.

    >>> import torch, asapc
    >>> from asapc.models import SinkformerText
    >>> _ = torch.manual_seed(0)
    >>> teacher = SinkformerText(
    ...     vocab_size=40, seq_len=12, d_model=16, n_layers=1, n_heads=2, d_ff=16, num_classes=3,
    ...     max_iter=8,
    ... ).eval()
    >>> tokens = torch.randint(1, 40, (300, 12))
    >>> model, report = asapc.compile(teacher, {"inputs": tokens}, budget={"attention_rel_l2": 0.02})
    >>> [(site["name"], site["convention"]["half_steps"]) for site in report.facts["sites"]]
    [('layers.0.mha', 8)]
    >>> report.facts["sites"][0]["metrics"].get("attention_rel_l2", 0.0) <= 0.04
    True
    >>> logits, maps = model(tokens[:5])
    >>> logits.shape
    torch.Size([5, 3])
    """
    weights = model.state_dict().values() if isinstance(model, nn.Module) else ()
    home = next((tensor.device for tensor in weights), CPU)  # where the compiled model belongs, too
    there = home if isinstance(model, nn.Module) else chosen_device("auto")
    place = there if device is None else chosen_device(device)
    generators = [there] if there.type == "cuda" and torch.cuda.is_initialized() else []
    with (
        running_on(CPU, [model if isinstance(model, nn.Module) else None]),
        torch.random.fork_rng(devices=generators),
    ):
        parsed = recipe if isinstance(recipe, Recipe) else Recipe.from_dict(recipe or {})
        if budget is not None:
            parsed = Recipe.from_dict({**parsed.to_dict(), "budget": dict(budget)})
        limits = [] if gates is None else parse_gates(gates)
        measuring, progress = Measuring(examples, metric=metric), progress_here(quiet=quiet)
        compiled = _compiled(model, data, parsed, limits, out, measuring, place, progress)
    compiled.model.to(home)
    return compiled


def _compiled(
    model: nn.Module | str,
    data: str | DataSource | Mapping[str, Any] | Iterable[object],
    recipe: Recipe,
    limits: Sequence[Gate],
    out: str | Path | None,
    measuring: Measuring,
    device: torch.device,
    progress: Progress,
) -> Compiled:
    teacher = teacher_of(model)
    untouched = uncompiled(model) if isinstance(model, nn.Module) else teacher.model
    source = data_of(data, forward_signature(teacher))
    require_splits(source)  # before the work, not after it
    with ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asapc-")))
            calibration, artifact = folder / "calibration", folder / "compiled"
        else:
            artifact = Path(out)
            calibration = artifact.with_name(f"{artifact.name}.calibration")
        analyse = analysed_once()
        pipeline.calibrate(teacher, source, calibration, recipe, progress, analyse=analyse, device=device)
        written = pipeline.compile(
            teacher, calibration, artifact, recipe, source, progress, analyse=analyse, device=device
        )
        manifest = written.manifest
        for warning in manifest["warnings"]:
            warnings.warn(warning["text"], FewExamplesWarning, stacklevel=3)
        around = copy.deepcopy(untouched) if manifest["capture"] == "module" else None
        measured = pipeline.report(
            written, source, limits, model=around, reading=Reading(trust=True, device=str(device)),
            measuring=measuring, progress=progress,
        )  # fmt: skip
        report = MeasuredReport(measured)
        if out is not None:
            report.save(artifact)
        live, sites = manifest["live"], manifest["sites"]
        kept = teacher.onnx is None and all(site["operator"] == "teacher" for site in sites)
        patchable = around is not None or (not live["left"] and (live["programs"] or kept))
        copied = copy.deepcopy(untouched) if patchable else None  # a program has no module to patch
        compiled = load(artifact, model=copied, trust=True)  # which this call has written
        shown = Summary(str(measured.model.source), (), artifact, report._repr_html_())
        shown_by(compiled, shown)
    return Compiled(compiled, report)


def teacher_of(model: nn.Module | str) -> Teacher:
    if isinstance(model, str):
        return load_teacher(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            "compile: model must be a torch.nn.Module or MODEL as on the command line",
            got=type(model).__name__,
        )
    if model.training:
        raise InputError("compile: the model must be in eval mode", help="call model.eval() first")
    model = uncompiled(model)
    # It runs in its place: the same parameters, with buffers and attributes of its own.
    copies: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    try:
        copied = copy.deepcopy(model, copies)
    except Exception as error:
        raise InputError(
            "compile: the model must be copyable, so that yours stays unchanged",
            got=f"{type(error).__name__}: {error}",
            help="exclude what cannot be copied, such as locks and files, in its class's __getstate__",
        ) from error
    apart = held_apart(model, copies)
    if apart is not None:
        raise InputError(
            "compile: a copy of the model must run by itself, without the original",
            got=f"a function that it keeps, as a hook or an attribute: {apart}",
            help="register a method of the module instead, or use the arguments of the hook",
        )
    return Teacher(copied, None, type(model).__qualname__, fingerprint(model.state_dict()))
