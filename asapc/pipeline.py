"""The compiler:  load -> analyse -> calibrate -> select -> rewrite -> emit.

analyse is capture, match, lift and replay (asapc.passes.analyse). Each function below is one
command; data travels by value, and nothing is kept between calls.
"""

from __future__ import annotations

import inspect as inspection
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from asapc.artifact import (
    Stage,
    call_of,
    read_artifact,
    signature_of,
    surrounding_model,
    write_artifact,
    write_refreshed,
)
from asapc.audit import settle_exact_sorting
from asapc.calibration.collect import SiteStatistics, finish
from asapc.calibration.distill import Distiller
from asapc.data import Batch, DataSource, open_data, recorded_data, split_of
from asapc.errors import InputError, NoSiteError, VerificationError
from asapc.features.predictor import closure_plan
from asapc.formats.atomic import check_replaceable, replace_folder
from asapc.formats.calibration import (
    AnySiteCalibration,
    Calibration,
    SiteDistillation,
    fit_facts,
    load_calibration,
    save_calibration,
)
from asapc.formats.load import Teacher, example_inputs
from asapc.ir import Convention, Program, SiteTensors
from asapc.passes.analyse import OUTPUT_TOLERANCE, Analysis, Site, analyse
from asapc.passes.rewrite import rewritten_programs
from asapc.passes.select import DISTILLED, Choice, choose, needs_fit
from asapc.passes.verify import comparable, largest_difference, tensor_outputs
from asapc.progress import Progress
from asapc.recipe import Recipe
from asapc.refresh import RefreshSettings, train
from asapc.runner import Runner, Tap

EXAMPLE_BATCH = 4  # examples a model is captured and replayed on
SELECTION_EXAMPLES = 128
FIT_KEYS = ("fit", "coefficients", "ridge", "ridge_mode", "seed", "max_examples")
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
    analysis = analyse(teacher, _example(teacher, data))
    entries = {site.name: _inspected(site) for site in analysis.sites}
    for left in analysis.left_alone:
        entries[left.name] = {
            "name": left.name,
            "status": left.status,
            "reason": left.reason,
            "heads": left.heads,
            "head_dim": left.head_dim,
            "replay_error": left.replay_error,
            "convention": left.convention.to_dict() if left.convention else None,
        }
    sites = [entries[name] for name in analysis.regions]
    return Inspection(teacher.source, analysis.capture.kind, analysis.capture.reason, sites)


def calibrate(
    teacher: Teacher,
    data: str,
    out: str | Path,
    recipe: Recipe,
    progress: Progress,
    sequential: bool = False,
) -> Calibration:
    """Fit every site whose recipe may predict a dual, from statistics alone, or names an operator to
    be distilled, from a sample of its activations.

    In parallel, one pass over the data fits all sites behind the teacher's own layers. Sequentially
    each site is fitted in a pass of its own behind the layers that are already fitted, on the
    activations it will really see.
    """
    check_replaceable(out)
    source = open_data(data, forward_signature(teacher))
    analysis = analyse(teacher, first_batch(source), recipe.drop_attention_maps)
    require_sites(analysis)
    _note_left_alone(analysis, progress)
    recipe.check_patterns(site.name for site in analysis.sites)
    statistics: dict[str, SiteStatistics | Distiller] = {}
    for site in analysis.sites:
        own = recipe.for_site(site.name)
        if not needs_fit(site.convention, own):
            continue
        collector = site_collector(site.name, site.convention, own)
        if collector is not None:
            statistics[site.name] = collector
    rounds = [[name] for name in statistics] if sequential else [list(statistics)]
    if sequential and any(own.recipe.coefficients == "shared" for own in statistics.values()):
        raise InputError(
            "calibrate: coefficients shared by all sites are fitted in one pass",
            got="--sequential with `coefficients: shared`",
            help="use `coefficients: per_head` or leave out --sequential",
        )
    fitted: dict[str, AnySiteCalibration] = {}
    seen: list[int] = []
    for names in rounds if statistics else []:
        batches = source.batches(
            recipe.batch_size,
            select=lambda content: split_of(content) == "calibration",
            limit=recipe.max_examples,
        )
        tap = Tap(analysis.model, _behind_fitted(analysis, fitted))
        distillers = {n: s for n in names if isinstance(s := statistics[n], Distiller)}
        label = "calibrating" if not sequential else f"calibrating {names[0]}"
        seen = []
        for batch in progress.track(batches, label, _batch_count(source, recipe)):
            _, tensors = tap(batch)
            for site, seen_by_site in zip(analysis.sites, tensors, strict=True):
                if site.name in names:
                    statistics[site.name].update(seen_by_site)
            seen.extend(batch.hashes)
        if not seen:
            raise InputError(
                f"{source.source}: the calibration split needs examples",
                got="none: too few examples in all",
                help="70 % of the examples are used for calibration, chosen by content",
            )
        if distillers:
            for batch in _selection_batches(source, recipe):
                for site, seen_by_site in zip(analysis.sites, tap(batch)[1], strict=True):
                    if site.name in distillers:
                        distillers[site.name].hold_out(seen_by_site)
                seen.extend(batch.hashes)
        for name, distiller in progress.track(distillers.items(), "distilling", len(distillers)):
            fitted[name] = distiller.calibration()
        fitted.update(finish({n: s for n in names if isinstance(s := statistics[n], SiteStatistics)}))
    calibration = Calibration(
        teacher=teacher.fingerprint,
        recipe=recipe.to_dict(),
        capture=analysis.capture.kind,
        sites=fitted,
        data=data,
        order="sequential" if sequential else "parallel",
        seen_hashes=tuple(seen),
    )
    save_calibration(out, calibration)
    return calibration


def compile(
    teacher: Teacher,
    calibration_path: str | Path,
    out: str | Path,
    recipe: Recipe | None,
    data: str | None,
    progress: Progress,
) -> dict[str, Any]:
    """Select an operator per site, rewrite, verify, write the artefact; returns its manifest."""
    check_replaceable(out)
    calibration = load_calibration(calibration_path)
    if calibration.teacher != teacher.fingerprint:
        raise InputError(
            f"{calibration_path}: must be of the model that is compiled",
            got=f"teacher {calibration.teacher[:12]}, this model is {teacher.fingerprint[:12]}",
            help="run `asapc calibrate` on this model",
        )
    recipe = recipe or Recipe.from_dict(calibration.recipe, where=f"{calibration_path}: recipe")
    source = open_data(data or recorded_data(calibration.data, "compile"), forward_signature(teacher))
    example = first_batch(source)
    analysis = analyse(teacher, example, recipe.drop_attention_maps)
    require_sites(analysis)
    _note_left_alone(analysis, progress)
    recipe.check_patterns(site.name for site in analysis.sites)
    _check_calibration(analysis, calibration, recipe, calibration_path)

    selection, seen = _selection(analysis, source, recipe, progress)
    choices = [
        choose(
            recipe.for_site(site.name), site.convention, calibration.sites.get(site.name),
            [tensors[index] for tensors in selection],
        )
        for index, site in enumerate(progress.track(analysis.sites, "selecting", None))
    ]  # fmt: skip
    choices, switch = _settled(analysis, choices, source, recipe)
    compiled = rewritten_programs(analysis.lifted, [choice.replacement for choice in choices])
    _verify_finite(Runner(analysis.model, compiled)(example), teacher)

    manifest = {
        "teacher": {"source": teacher.source, "fingerprint": teacher.fingerprint},
        "capture": analysis.capture.kind,
        "call": call_of(example.args, example.kwargs, list(forward_signature(teacher).parameters)),
        "data": source.source,
        "fit_seconds": calibration.fit_seconds,
        "calibration_order": calibration.order,
        "sites": [
            _manifest_site(site, choice, calibration)
            for site, choice in zip(analysis.sites, choices, strict=True)
        ],
        "refused": [
            {"name": left.name, "status": left.status, "reason": left.reason}
            for left in analysis.left_alone
        ],
        **({} if switch is None else {"soft_to_hard": switch}),
    }
    programs: dict[Stage, Sequence[Program]] = {
        "graph": compiled, "lossless": analysis.lifted, "teacher": analysis.capture.programs,
    }  # fmt: skip
    with replace_folder(out) as folder:
        write_artifact(
            folder, manifest, recipe, programs, [*calibration.seen_hashes, *seen], analysis.model
        )
        _verify_written(folder, analysis.model, programs, example)
    return manifest


def refresh(
    artifact_path: str | Path,
    data: str,
    settings: RefreshSettings,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    weights: str | None = None,
    kwargs: str | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """Train a compiled artefact for a few epochs and write it again; returns its refresh entry."""
    artifact = read_artifact(artifact_path)
    surrounding = surrounding_model(artifact, model, weights, kwargs)
    source = open_data(data, artifact.signature())
    with replace_folder(artifact_path if out is None else out) as folder:
        refreshed = train(artifact, surrounding, source, settings, progress)
        write_refreshed(
            folder, artifact, refreshed.manifest, refreshed.weights, refreshed.seen_hashes,
            refreshed.edit,
        )  # fmt: skip
        compiled: dict[Stage, Sequence[Program]] = {"graph": artifact.programs["graph"]}
        _verify_written(folder, surrounding, compiled, refreshed.example)
    entry: dict[str, Any] = refreshed.manifest["refresh"]
    return entry


# Steps of the commands above


def forward_signature(teacher: Teacher) -> inspection.Signature:
    if teacher.model is not None:
        return inspection.signature(teacher.model.forward)
    assert teacher.program is not None
    keywords = teacher.program.call_spec.in_spec.children_specs[1].context or []
    positional = [n for n in teacher.program.graph_signature.user_inputs if n not in keywords]
    return signature_of({"args": positional, "kwargs": list(keywords)})


def _example(teacher: Teacher, data: str | None) -> Batch:
    if data is not None:
        return first_batch(open_data(data, forward_signature(teacher)))
    built_in = example_inputs(teacher)
    if built_in is None:
        raise InputError(
            "inspect: a model that is not built in needs one batch to be run on",
            help="pass --data DATA with arrays named after the arguments of forward",
        )
    return Batch((), dict(built_in), None, [0] * EXAMPLE_BATCH)


def first_batch(source: DataSource) -> Batch:
    for batch in source.batches(EXAMPLE_BATCH):
        return batch
    raise InputError(f"{source.source}: the data must hold examples", got="none")


def require_sites(analysis: Analysis) -> None:
    if analysis.sites:
        return
    reasons = "; ".join(f"{left.name}: {left.reason}" for left in analysis.left_alone[:4])
    raise NoSiteError(
        "no attention layer of the model can be compiled",
        got=reasons or "a model without any product of queries and keys",
        help="`asapc inspect` lists every layer with its reason",
    )


def site_collector(
    name: str, convention: Convention, recipe: Recipe
) -> SiteStatistics | Distiller | None:
    """What collects a Sinkhorn site's calibration; None where no dual can be predicted."""
    if recipe.operator in DISTILLED:
        return Distiller(name, convention, recipe)
    plan = closure_plan(convention, recipe.closures, recipe.side)
    return None if plan is None else SiteStatistics(name, convention, plan, recipe)


def _note_left_alone(analysis: Analysis, progress: Progress) -> None:
    for left in analysis.left_alone:
        progress.note(f"{left.name} {left.status}: {left.reason}")


def _batch_count(source: DataSource, recipe: Recipe) -> int | None:
    if source.examples is None:
        return None
    expected = min(recipe.max_examples, round(0.7 * source.examples))
    return max(1, -(-expected // recipe.batch_size))


def _check_calibration(
    analysis: Analysis, calibration: Calibration, recipe: Recipe, place: str | Path
) -> None:
    """What was fitted must be what the recipe asks for, on the convention found now."""
    with_recipe = Recipe.from_dict(calibration.recipe, where=f"{place}: recipe")
    for site in analysis.sites:
        own, fitted = recipe.for_site(site.name), calibration.sites.get(site.name)
        then = with_recipe.for_site(site.name)
        distilled = own.operator in DISTILLED
        keys = ("operator", DISTILLED[own.operator], *FIT_KEYS[-2:]) if distilled else FIT_KEYS
        differing = [key for key in keys if getattr(then, key) != getattr(own, key)]
        if not needs_fit(site.convention, own):
            continue
        plan = closure_plan(site.convention, own.closures, own.side)
        if plan is None and not distilled and fitted is None:
            continue
        problem = None
        if fitted is None:
            problem = "was not fitted"
        elif not _same_convention(fitted.convention, site.convention):
            problem = "was fitted on another convention"
        elif isinstance(fitted, SiteDistillation) != distilled:
            problem = f"was fitted with `operator: {then.operator}`"
        elif isinstance(fitted, SiteDistillation):
            if differing:
                problem = f"was distilled with `{differing[0]}: {getattr(then, differing[0])}`"
        elif fitted.amortised.plan != plan or fitted.features != own.features:
            was = fitted.amortised.plan
            problem = (
                f"was fitted for {was.closures} closures of the {was.side} dual on "
                f"{', '.join(fitted.features)}"
            )
        elif differing:
            problem = f"was fitted with `{differing[0]}: {getattr(then, differing[0])}`"
        if problem is not None:
            raise InputError(
                f"{place}: {site.name} {problem}",
                help="run `asapc calibrate` with the recipe that compile is given",
            )


def _same_convention(first: Convention, second: Convention) -> bool:
    close = abs(first.score_multiplier - second.score_multiplier) <= 1e-6 * abs(
        second.score_multiplier
    )
    return close and (first.half_steps, first.first_side, first.mask, first.bias) == (
        second.half_steps, second.first_side, second.mask, second.bias,
    )  # fmt: skip


def _selection(
    analysis: Analysis, source: DataSource, recipe: Recipe, progress: Progress
) -> tuple[list[list[SiteTensors]], list[int]]:
    """What every site sees on the selection split, and the hashes of the examples used."""
    needed = any(needs_fit(s.convention, recipe.for_site(s.name)) for s in analysis.sites)
    tap = Tap(analysis.model, analysis.lifted)
    seen: list[int] = []
    tensors: list[list[SiteTensors]] = []
    for batch in progress.track(_selection_batches(source, recipe), "selection split", None):
        if not seen:
            _verify_lossless(analysis, batch)
        seen.extend(batch.hashes)  # even if unused, so that every recipe has the same gate
        if needed:
            tensors.append(tap(batch)[1])
    if not needed:
        return [], seen
    if not tensors:
        raise InputError(
            f"{source.source}: the selection split needs examples",
            got="none: too few examples in all",
            help="15 % of the examples are used for selection, chosen by content",
        )
    return tensors, seen


def _settled(
    analysis: Analysis, choices: Sequence[Choice], source: DataSource, recipe: Recipe
) -> tuple[list[Choice], dict[str, Any] | None]:
    """The choices, with exact sorting where predictions on the selection split allow it."""
    recipes = [recipe.for_site(site.name) for site in analysis.sites]
    selection = source.batches(
        recipe.batch_size,
        select=lambda content: split_of(content) == "selection",
        limit=min(recipe.max_examples, SELECTION_EXAMPLES),
    )
    return settle_exact_sorting(analysis.model, analysis.lifted, choices, recipes, selection)


def _selection_batches(source: DataSource, recipe: Recipe) -> Iterator[Batch]:
    return source.batches(
        recipe.batch_size,
        select=lambda content: split_of(content) == "selection",
        limit=min(recipe.max_examples, SELECTION_EXAMPLES),
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
    own = [fitted.get(site.name) for site in analysis.sites]
    return rewritten_programs(analysis.lifted, [site.replacement if site else None for site in own])


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
    written = read_artifact(folder, list(programs))
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


def _inspected(site: Site) -> dict[str, Any]:
    return {
        "name": site.name,
        "status": "matched",
        "reason": "",
        "heads": site.heads,
        "head_dim": site.head_dim,
        "replay_error": site.replay_error,
        "convention": site.convention.to_dict(),
    }


def _manifest_site(site: Site, choice: Choice, calibration: Calibration) -> dict[str, Any]:
    fitted = calibration.sites.get(site.name) if choice.replacement is not None else None
    return {
        "name": site.name,
        "operator": choice.operator,
        "reason": choice.reason,
        "heads": site.heads,
        "head_dim": site.head_dim,
        "convention": site.convention.to_dict(),
        "replay_error": site.replay_error,
        "selection_attention_rel_l2": choice.attention_rel_l2,
        **fit_facts(fitted),
    }
