"""The compiler:  load -> analyse -> calibrate -> select -> rewrite -> emit -> report.

analyse is capture, match, lift and replay (asapc.passes.analyse). Each function below is one
command; data travels by value, and nothing is kept between calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect as inspection
import itertools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule

from asapc.artifact import (
    Artifact,
    Stage,
    call_of,
    places_moved,
    read_artifact,
    read_patches,
    returns_as,
    signature_of,
    surrounding_model,
    write_artifact,
    write_refreshed,
)
from asapc.calibration.collect import SiteStatistics
from asapc.calibration.distill import Distiller
from asapc.calibration.enough import Shortage, shortages
from asapc.calibration.reading import Examples
from asapc.calibration.shards import Shards, code_digest
from asapc.calibration.stored import (
    AnySiteCalibration,
    Calibration,
    fit_facts,
    load_calibration,
    save_calibration,
)
from asapc.calibration.stream import Collector, Pending, stream, take_in
from asapc.errors import InputError, NoSiteError, VerificationError
from asapc.features.predictor import closure_plan
from asapc.formats import places
from asapc.formats.atomic import check_replaceable, replace_folder
from asapc.inputs.data import Batch, DataSource, open_data, recorded_data, split_of
from asapc.inputs.load import example_inputs
from asapc.inputs.onnx.settings import OnnxSettings, require_extra
from asapc.inputs.program_operators import unlisted
from asapc.inputs.recipe import Recipe
from asapc.inputs.teacher import Teacher
from asapc.ir import Convention, Program, SiteTensors
from asapc.measure.differences import comparable, largest_difference, tensor_outputs
from asapc.memory import MemoryLimit, format_size, give_back
from asapc.passes.analyse import OUTPUT_TOLERANCE, Analysis, Site, analyse
from asapc.passes.audit import settle_exact_sorting
from asapc.passes.candidates import DISTILLED, Choice, fits_needed
from asapc.passes.patches import chosen_programs, compiled_modules
from asapc.passes.rewrite import rewritten_programs
from asapc.passes.select import (
    WholeModel,
    exceeded_together,
    select,
    turned_back,
)
from asapc.program.call import Call, Undescribable, described, known_of, parameters_of
from asapc.program.code import traced_inputs
from asapc.program.compiled import OwnCodeWarning
from asapc.program.live import installed_patches
from asapc.program.runner import Runner, Tap
from asapc.report import Report, evaluate
from asapc.report.baseline import Baseline, compare
from asapc.report.evaluate import Unseen
from asapc.report.gates import Gate, gate_result
from asapc.terminal.progress import Progress
from asapc.training.refresh import RefreshSettings, train

SAMPLE_EXAMPLES = 32  # slices and pivots are made from
EXAMPLE_BATCH = 4  # examples a model is captured and replayed on
REPLAYED_BATCHES = 3
VERIFIED_EXAMPLES = 16  # that a file is run on, at many shapes
ROUND_TRIP_TOLERANCE = 1e-5  # a program written and read back, relative to its own output


@dataclass(frozen=True)
class Inspection:
    """What `asapc inspect` shows."""

    model: str
    capture: str
    capture_reason: str | None
    sites: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "capture": self.capture,
            "capture_reason": self.capture_reason,
            "sites": self.sites,
        }


def inspect(teacher: Teacher, data: str | None = None) -> Inspection:
    """Every attention region with its convention, or the reason it is left alone."""
    example, *more = _examples(teacher, data)
    analysis = analyse(teacher, example, more=more)
    entries = {site.name: _inspected(site) for site in analysis.sites}
    for left in analysis.left_alone:
        entries[left.name] = {
            "name": left.name,
            "status": left.status,
            "reason": left.reason,
            "heads": left.heads,
            "head_dim": left.head_dim,
            "replay_error": left.replay_error,
            "replay": dict(left.replay),
            "convention": left.convention.to_dict() if left.convention else None,
        }
    sites = [entries[name] for name in analysis.regions]
    return Inspection(teacher.source, analysis.capture.kind, analysis.capture.reason, sites)


def calibrate(
    teacher: Teacher,
    data: str | DataSource,
    out: str | Path,
    recipe: Recipe,
    progress: Progress,
    sequential: bool = False,
    restart: bool = False,
    max_memory: int | None = None,
) -> Calibration:
    """Fit every candidate of every site: of those that predict a dual from statistics alone, of those
    that are distilled from a sample of the site's activations.

    In parallel, one pass over the data fits all sites behind the teacher's own layers. Sequentially
    each site is fitted in a pass of its own behind the layers that are already fitted, with their first
    candidate, on the activations it will really see.

    What is unfinished is kept beside `out`: after a crash the same call goes on where it was, and one
    with another model, recipe or other data is refused. After a faulty example other data is taken, where
    that example is mended: what was calibrated before it is gone on with as far as the data still begins
    with it. restart: begin anew. max_memory: bytes that the process may hold; batches get smaller, and
    fits that keep activations keep fewer, until that holds.
    """
    check_replaceable(out, [teacher.source, *_paths(data)])
    source = open_data(data, forward_signature(teacher))
    example, *more = first_batches(source)
    analysis = analyse(teacher, example, recipe.drop_attention_maps, more)
    require_sites(analysis)
    _note_left_alone(analysis, progress)
    recipe.check_patterns(site.name for site in analysis.sites)
    pending = _pending(analysis, recipe)
    order = "sequential" if sequential else "parallel"
    if sequential and any(p.collector.recipe.coefficients == "shared" for p in pending):
        raise InputError(
            "calibrate: coefficients shared by all sites are fitted in one pass",
            got="--sequential with `coefficients: shared`",
            help="use `coefficients: per_head` or leave out --sequential",
        )
    size = recipe.batch_size
    limit = None if max_memory is None else MemoryLimit(max_memory)
    if limit is not None and pending:
        size = _within(limit, analysis, pending, source, recipe)
    indices = sorted({p.site for p in pending})
    rounds = [[index] for index in indices] if sequential else [indices]
    fingerprint = {
        "model": digest(
            [teacher.fingerprint, [[site.name, site.convention.to_dict()] for site in analysis.sites]]
        ),
        "data": source.fingerprint,
        "recipe": digest({**recipe.to_dict(), "order": order, "max_memory": max_memory}),
        "code": code_digest(),
    }
    fitted: dict[str, dict[int, AnySiteCalibration]] = {}
    seen: list[int] = []
    behind = ""
    with _aside(out, fingerprint, restart) as aside:
        for own in rounds if pending else []:
            label = f"calibrating {analysis.sites[own[0]].name}" if sequential else "calibrating"
            waiting = [p for p in pending if p.site in own]
            first = {name: fits[min(fits)] for name, fits in fitted.items()}
            tap = Tap(analysis.model, _behind_fitted(analysis, first), analysis.names)
            fits, seen = stream(
                waiting,
                _examples_of(source, recipe, size, waiting, behind),
                partial(_observed, tap, limit),
                aside,
                progress,
                label,
            )
            if not seen:
                raise InputError(
                    f"{source.source}: the calibration split needs examples",
                    got="none: too few examples in all",
                    help="70 % of the examples are used for calibration, chosen by content",
                )
            behind = digest([behind, seen])
            for p in pending:
                if p.key in fits:
                    fitted.setdefault(p.name, {})[p.candidate] = fits[p.key]
        sites = {name: tuple(fits[i] for i in sorted(fits)) for name, fits in fitted.items()}
        calibration = Calibration(
            teacher=teacher.fingerprint,
            recipe=recipe.to_dict(),
            capture=analysis.capture.kind,
            sites=sites,
            data=places.recorded(source.source, out),
            order=order,
            seen_hashes=tuple(seen),
            warnings=_warnings(shortages(sites), progress),
        )
        save_calibration(out, calibration)
        aside.discard()
    if limit is not None:
        most = limit.peak()
        kept = "" if most <= limit.limit else ": more than allowed, later batches were larger"
        progress.note(
            f"{format_size(most)} of {format_size(limit.limit)} memory taken at most, "
            f"in batches of {size}{kept}"
        )
    return calibration


def compile(
    teacher: Teacher,
    calibration_path: str | Path,
    out: str | Path,
    recipe: Recipe | None,
    data: str | DataSource | None,
    progress: Progress,
    onnx: OnnxSettings | None = None,
) -> dict[str, Any]:
    """Select an operator per site, rewrite, verify, write the artefact; returns its manifest.

    onnx: write OUT/model.onnx too, verified on examples that calibration and selection have not seen;
    where that fails nothing is written at all.
    """
    check_replaceable(out, [calibration_path, teacher.source, *_paths(data)])
    if onnx is not None:
        require_extra()
    calibration = load_calibration(calibration_path)
    if calibration.teacher != teacher.fingerprint:
        raise InputError(
            f"{calibration_path}: must be of the model that is compiled",
            got=f"teacher {calibration.teacher[:12]}, this model is {teacher.fingerprint[:12]}",
            help="run `asapc calibrate` on this model",
        )
    recipe = recipe or Recipe.from_dict(calibration.recipe, where=f"{calibration_path}: recipe")
    data = data or recorded_data(calibration.data, calibration_path, "compile")
    check_replaceable(out, _paths(data))
    source = open_data(data, forward_signature(teacher))
    example, *more = first_batches(source)
    analysis = analyse(teacher, example, recipe.drop_attention_maps, more)
    require_sites(analysis)
    _note_left_alone(analysis, progress)
    recipe.check_patterns(site.name for site in analysis.sites)

    batches = list(_selection_batches(source, recipe))
    if batches:
        _verify_lossless(analysis, batches[0])
    elif _needs_selection(analysis, recipe):
        raise InputError(
            f"{source.source}: the selection split needs examples",
            got="none: too few examples in all",
            help="15 % of the examples are used for selection, chosen by content",
        )
    selection = select(analysis, recipe, calibration, batches, progress)
    choices, switch = _settled(analysis, selection.choices, batches, recipe)
    fits = [choice.fit for choice in choices if choice.fit is not None]
    compiled = chosen_programs(analysis, choices)
    output = Runner(analysis.model, compiled)(example)
    _verify_finite(output, teacher)
    modules = (
        compiled_modules(analysis, choices, compiled, example) if teacher.onnx is None else ([], {})
    )

    manifest = {
        "teacher": {"source": _source(teacher, out), "fingerprint": teacher.fingerprint},
        "capture": analysis.capture.kind,
        "call": call_of(example.args, example.kwargs, list(forward_signature(teacher).parameters)),
        "forward": _forward(teacher, compiled[0], output) if analysis.capture.kind == "whole" else None,
        "data": places.recorded(source.source, out),
        "calibration_order": calibration.order,
        "sites": [
            _manifest_site(site, choice)
            for site, choice in zip(analysis.sites, choices, strict=True)
        ],
        "refused": [
            {"name": left.name, "status": left.status, "reason": left.reason}
            for left in analysis.left_alone
        ],
        "warnings": _warnings(shortages(calibration.sites, fits), progress),
        **({} if switch is None else {"soft_to_hard": switch}),
        **({} if teacher.onnx is None else {"onnx": _interface(teacher)}),
    }
    programs: dict[Stage, Sequence[Program]] = {
        "graph": compiled, "lossless": analysis.lifted, "teacher": analysis.capture.programs,
    }  # fmt: skip
    seen = [*calibration.seen_hashes, *(content for batch in batches for content in batch.hashes)]
    told = {"fit_seconds": calibration.fit_seconds, **selection.trail}
    with replace_folder(out) as folder:
        write_artifact(folder, manifest, recipe, programs, seen, analysis.model, told, modules)
        _note_unlisted(programs, progress)
        _verify_written(folder, analysis.model, programs, example)
        _verify_live(folder, analysis.model, output, example)
        if teacher.onnx is not None and analysis.capture.kind == "whole":
            captured, own = analysis.capture.programs[0].graph, compiled[0].graph
            _write_edited(folder, teacher, captured, own, source, onnx or OnnxSettings(), progress)
        elif onnx is not None:
            _write_onnx(read_artifact(folder, ("graph",), trust=True), source, onnx, progress)
        elif teacher.onnx is not None:
            progress.note("no model.onnx: torch.export could trace the teacher by its modules only")
    return manifest


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
    source = open_data(
        data or recorded_data(artifact.manifest["data"], artifact_path, "export"), artifact.signature()
    )
    return _write_onnx(artifact, source, settings, progress)


def report(
    artifact_path: str | Path,
    data: str | DataSource | None,
    limits: Sequence[Gate] = (),
    baseline: Baseline | None = None,
    *,
    model: str | nn.Module | None = None,
    weights: str | None = None,
    kwargs: str | None = None,
    examples: int = evaluate.REPORT_EXAMPLES,
    trust: bool = False,
    progress: Progress,
) -> Report:
    """Measure on unseen examples, compare with the baseline, check the limits."""
    measured = evaluate.report(
        artifact_path, data, model=model, weights=weights, kwargs=kwargs, examples=examples,
        trust=trust, progress=progress,
    )  # fmt: skip
    comparison = None if baseline is None else compare(measured, baseline)
    return replace(measured, gate=gate_result(measured, limits, comparison))


def refresh(
    artifact_path: str | Path,
    data: str,
    settings: RefreshSettings,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    weights: str | None = None,
    kwargs: str | None = None,
    trust: bool = False,
    progress: Progress,
) -> dict[str, Any]:
    """Train a compiled artefact for a few epochs and write it again; returns its refresh entry."""
    target = artifact_path if out is None else out
    check_replaceable(target, _paths(data))
    artifact = read_artifact(artifact_path, trust=trust)
    surrounding = surrounding_model(artifact, model, weights, kwargs)
    source = open_data(data, artifact.signature())
    with replace_folder(target) as folder:
        refreshed = train(artifact, surrounding, source, settings, progress)
        manifest = places_moved(refreshed.manifest, artifact.folder, target)
        write_refreshed(
            folder, artifact, manifest, refreshed.weights, refreshed.seen_hashes, refreshed.edit
        )
        compiled: dict[Stage, Sequence[Program]] = {"graph": artifact.programs["graph"]}
        _verify_written(folder, surrounding, compiled, refreshed.example)
    entry: dict[str, Any] = manifest["refresh"]
    return entry


# Steps of the commands above


def _warnings(found: Sequence[Shortage], progress: Progress) -> list[dict[str, Any]]:
    """Said, and as files have them."""
    for own in found:
        progress.note(f"warning: {own.text}")
    return [own.to_dict() for own in found]


def _source(teacher: Teacher, out: str | Path) -> str:
    """In words, or the file of an ONNX teacher, which is timed beside what is compiled."""
    return teacher.source if teacher.onnx is None else places.recorded(teacher.source, out)


def _interface(teacher: Teacher) -> dict[str, list[str]]:
    """What an ONNX teacher calls its inputs and outputs."""
    from asapc.inputs.onnx.module import OnnxModule

    assert isinstance(teacher.model, OnnxModule)
    inputs = [value.name for value in teacher.model.inputs]
    return {"inputs": inputs, "outputs": list(teacher.model.graph.outputs)}


def _write_edited(
    folder: Path,
    teacher: Teacher,
    captured: GraphModule,
    compiled: GraphModule,
    source: DataSource,
    settings: OnnxSettings,
    progress: Progress,
) -> None:
    from asapc.onnx.export import write_edited

    batches = _unseen(read_artifact(folder, ()), source)
    try:
        write_edited(folder, teacher, captured, compiled, batches, settings, progress)
    except InputError as error:
        progress.note(f"writing the whole program anew, for the teacher's file cannot be edited: {error}")
        _write_onnx(read_artifact(folder, ("graph",), trust=True), source, settings, progress)


def _write_onnx(
    artifact: Artifact, source: DataSource, settings: OnnxSettings, progress: Progress
) -> dict[str, Any]:
    require_extra()
    from asapc.onnx.export import write_onnx

    return write_onnx(artifact, _unseen(artifact, source), settings, progress)


def _unseen(artifact: Artifact, source: DataSource) -> list[Batch]:
    """Examples that calibration and selection have not seen."""
    select = Unseen(artifact, source).select
    return list(source.batches(VERIFIED_EXAMPLES, select=select, limit=VERIFIED_EXAMPLES))


def _note_unlisted(programs: Mapping[Stage, Sequence[Program]], progress: Progress) -> None:
    names = {name for own in programs.values() for program in own for name in unlisted(program.graph)}
    if names:
        progress.note(
            f"the programs call {', '.join(sorted(names))}, beyond the operators that SECURITY.md lists: "
            "they are read with --trust (in Python asapc.load(OUT, trust=True)) alone"
        )


def _paths(data: str | DataSource | None) -> list[str]:
    return [data] if isinstance(data, str) else []


def forward_signature(teacher: Teacher) -> inspection.Signature:
    if teacher.model is not None:
        return inspection.signature(teacher.model.forward)
    assert teacher.program is not None
    keywords = teacher.program.call_spec.in_spec.children_specs[1].context or []
    positional = [n for n in teacher.program.graph_signature.user_inputs if n not in keywords]
    return signature_of({"args": positional, "kwargs": list(keywords)})


def _examples(teacher: Teacher, data: str | None) -> list[Batch]:
    if data is not None:
        return first_batches(open_data(data, forward_signature(teacher)))
    built_in = example_inputs(teacher)
    if built_in is None:
        raise InputError(
            "inspect: a model that is not built in needs one batch to be run on",
            help="pass --data DATA with arrays named after the arguments of forward",
        )
    return [Batch((), dict(built_in), None, [0] * EXAMPLE_BATCH)]


def first_batches(source: DataSource) -> list[Batch]:
    """What a model is captured on, and what its sites are replayed on besides."""
    found = list(itertools.islice(source.batches(EXAMPLE_BATCH), REPLAYED_BATCHES))
    if not found:
        raise InputError(f"{source.source}: the data must hold examples", got="none")
    return found


def require_sites(analysis: Analysis) -> None:
    if analysis.sites:
        return
    reasons = "; ".join(f"{left.name}: {left.reason}" for left in analysis.left_alone[:4])
    raise NoSiteError(
        "no attention layer of the model can be compiled",
        got=reasons or "a model without any product of queries and keys",
        help="`asapc inspect` lists every layer with its reason",
    )


def site_collector(name: str, convention: Convention, recipe: Recipe) -> Collector | None:
    """What collects one candidate of a Sinkhorn site; None where no dual can be predicted."""
    if recipe.operator in DISTILLED:
        return Distiller(name, convention, recipe)
    plan = closure_plan(convention, recipe.closures, recipe.side)
    return None if plan is None else SiteStatistics(name, convention, plan, recipe)


def _pending(analysis: Analysis, recipe: Recipe) -> list[Pending]:
    """Every fit that is needed, site by site."""
    pending = []
    for place, site in enumerate(analysis.sites):
        needed = fits_needed(site.convention, recipe.for_site(site.name))
        for candidate, (own, _) in enumerate(needed):
            collector = site_collector(site.name, site.loop, own)
            assert collector is not None
            pending.append(Pending(place, site.name, candidate, collector))
    return pending


@contextlib.contextmanager
def _aside(
    out: str | Path, fingerprint: Mapping[str, str], restart: bool
) -> Iterator[Shards]:
    """Where a calibration that is cut short leaves its work."""
    shards = Shards.beside(out, fingerprint)
    if restart:
        shards.discard()
    with shards.open() as aside:
        try:
            yield aside
        except BaseException:
            if not aside.keys():  # nothing to go on with: the next call may differ
                aside.discard()
            raise


def digest(document: Any) -> str:
    """sha256 of JSON types."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _needs_selection(analysis: Analysis, recipe: Recipe) -> bool:
    return any(fits_needed(s.convention, recipe.for_site(s.name)) for s in analysis.sites)


def _observed(tap: Tap, limit: MemoryLimit | None, batch: Batch) -> list[SiteTensors]:
    if limit is not None:
        give_back()
    return tap(batch)[1]


def _note_left_alone(analysis: Analysis, progress: Progress) -> None:
    for left in analysis.left_alone:
        progress.note(f"{left.name} {left.status}: {left.reason}")


def _within(
    limit: MemoryLimit,
    analysis: Analysis,
    pending: Sequence[Pending],
    source: DataSource,
    recipe: Recipe,
) -> int:
    """The batch that fits into the limit, by trying; what collectors keep is bounded."""
    keeping = [
        p for p in pending if isinstance(p.collector, Distiller) or p.collector.recipe.fit == "kl"
    ]
    for p in keeping:
        p.collector.keep_at_most(limit.kept(len(keeping), 2**28))
    tap = Tap(analysis.model, analysis.lifted, analysis.names)

    def step(examples: int) -> None:
        batch = next(source.batches(examples))
        take_in(_pending(analysis, recipe), tap(batch)[1])

    step(1)  # what is loaded on a first call is not a batch's
    return limit.batch_size(step, recipe.batch_size)


def _examples_of(
    source: DataSource, recipe: Recipe, size: int, pending: Sequence[Pending], behind: str
) -> Examples:
    """The calibration split, and the selection split where anything is distilled."""
    calibration = partial(source.batches, size, select=lambda own: split_of(own) == "calibration")
    distilled = any(isinstance(p.collector, Distiller) for p in pending)
    return Examples(
        sample=partial(calibration, limit=min(SAMPLE_EXAMPLES, recipe.max_examples)),
        batches=partial(calibration, limit=recipe.max_examples),
        held_out=partial(_selection_batches, source, recipe, size) if distilled else tuple,
        count=_batch_count(source, recipe, size),
        behind=behind,
    )


def _batch_count(source: DataSource, recipe: Recipe, size: int) -> int | None:
    if source.examples is None:
        return None
    expected = min(recipe.max_examples, round(0.7 * source.examples))
    return max(1, -(-expected // size))


def _settled(
    analysis: Analysis, choices: Sequence[Choice], batches: Sequence[Batch], recipe: Recipe
) -> tuple[list[Choice], dict[str, Any] | None]:
    """The choices, with exact sorting where predictions on the selection split allow it, alone, and the
    budget of the whole model does, with everything else that is approximate."""
    recipes = [recipe.for_site(site.name) for site in analysis.sites]
    settled, switch = settle_exact_sorting(
        analysis.model, analysis.lifted, analysis.names, choices, recipes, batches
    )
    auto = any(
        own.operator == "esp_hard" and r.operator == "auto"
        for own, r in zip(settled, recipes, strict=True)
    )
    if switch is None or not auto:
        return settled, switch
    beyond = exceeded_together(WholeModel(analysis, batches, recipe), settled)
    if not beyond:
        return settled, switch
    why = f"exact sorting, with what is approximate elsewhere, exceeds the budget: {beyond}"
    soft = [
        turned_back(own, "esp_soft", why)
        if own.operator == "esp_hard" and r.operator == "auto" else own
        for own, r in zip(settled, recipes, strict=True)
    ]  # fmt: skip
    return soft, {**switch, "switched": any(own.operator == "esp_hard" for own in soft)}


def _selection_batches(
    source: DataSource, recipe: Recipe, size: int | None = None
) -> Iterator[Batch]:
    return source.batches(
        size or recipe.batch_size,
        select=lambda content: split_of(content) == "selection",
        limit=recipe.selection_examples,
    )


def _verify_lossless(analysis: Analysis, batch: Batch) -> None:
    """The lossless rewrite against the untouched model on a full batch of other examples.

    Padding, branches and early stops that the few examples of the capture did not show would show
    here.
    """
    untouched = Runner(analysis.model, () if analysis.model else analysis.capture.programs)
    error = largest_difference(
        comparable(untouched(batch)), comparable(Runner(analysis.model, analysis.lifted)(batch))
    )
    if not error <= OUTPUT_TOLERANCE:
        raise VerificationError(
            f"the lossless rewrite reproduces the untouched model on {len(batch)} more examples",
            got=f"relative difference {error:.2g}",
            help="the model treats these examples in a way the captured ones did not show, such as "
            "a mask that differs between queries or an early stop",
        )


def _behind_fitted(
    analysis: Analysis, fitted: Mapping[str, AnySiteCalibration]
) -> list[Program]:
    """The lifted programs with every fitted site replaced."""
    return rewritten_programs(
        analysis.lifted, {name: site.replacement for name, site in fitted.items()}
    )


def _verify_finite(output: Any, teacher: Teacher) -> None:
    for tensor in tensor_outputs(output):
        if not bool(tensor.isfinite().all()):
            raise VerificationError(
                "the compiled model's outputs are finite",
                got="NaN or infinity",
                help=f"use `operator: sinkhorn` and report {teacher.source}",
            )


def _verify_written(
    folder: Path,
    model: nn.Module | None,
    programs: Mapping[Stage, Sequence[Program]],
    example: Batch,
) -> None:
    """What was written computes what was verified."""
    written = read_artifact(folder, list(programs), trust=True)
    returns_as(written)
    for stage, own in programs.items():
        before = Runner(model, own)(example)
        after = Runner(model, written.programs[stage])(example)
        error = largest_difference(before, after)
        if not error <= ROUND_TRIP_TOLERANCE:
            raise VerificationError(
                f"{stage}: the written program computes what was verified",
                got=f"relative difference {error:.2g}",
                help="this is a defect of asapc: please report the model",
            )


def _verify_live(folder: Path, model: nn.Module | None, output: Any, example: Batch) -> None:
    """A live model with what was written for it computes what was verified."""
    written = read_artifact(folder, (), trust=True)
    patches = read_patches(written)
    if model is None or not patches:
        return
    with installed_patches(model, patches, written.manifest["sites"]), warnings.catch_warnings():
        warnings.simplefilter("error", OwnCodeWarning)
        error = largest_difference(output, Runner(model)(example))
    if not error <= ROUND_TRIP_TOLERANCE:
        raise VerificationError(
            "live: the patched model computes what was verified",
            got=f"relative difference {error:.2g}",
            help="this is a defect of asapc: please report the model",
        )


def _forward(teacher: Teacher, program: Program, output: Any) -> dict[str, Any]:
    """How the compiled model is called and what it returns, for the manifest."""
    try:
        signature = forward_signature(teacher)
        parameters = parameters_of(signature, program.args, program.kwargs, [])
        returned = described(output, [], output=True)
        return Call(parameters, returned, *known_of(traced_inputs(program.graph))).to_dict()
    except Undescribable as problem:
        raise InputError(
            "the model takes and returns tensors, constants and containers of them", got=problem,
            help="compile a module around it that takes and returns plain containers",
        ) from None  # fmt: skip


def _inspected(site: Site) -> dict[str, Any]:
    return {
        "name": site.name,
        "status": "matched",
        "reason": "",
        "heads": site.heads,
        "head_dim": site.head_dim,
        "replay_error": site.replay_error,
        "replay": dict(site.replay),
        "convention": site.convention.to_dict(),
    }


def _manifest_site(site: Site, choice: Choice) -> dict[str, Any]:
    return {
        "name": site.name,
        "operator": choice.operator,
        "reason": choice.reason,
        "heads": site.heads,
        "head_dim": site.head_dim,
        "convention": site.convention.to_dict(),
        "replay_error": site.replay_error,
        "replay": dict(site.replay),
        "selection_attention_rel_l2": choice.attention_rel_l2,
        **fit_facts(choice.fit),
    }
