"""Choose: an operator for every site, on examples that calibration has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asapc.calibration.stored import AnySiteCalibration, Calibration, load_calibration
from asapc.errors import InputError, VerificationError
from asapc.inputs.data import Batch, DataSource, empty_split
from asapc.inputs.recipe import Recipe
from asapc.inputs.teacher import Teacher
from asapc.ir import Convention
from asapc.measure.differences import comparable, largest_difference
from asapc.memory import MemoryLimit, give_back
from asapc.passes.analyse import OUTPUT_TOLERANCE, Analysis, own_rounding
from asapc.passes.audit import settle_exact_sorting
from asapc.passes.candidates import Choice, fits_needed
from asapc.passes.select import WholeModel, exceeded_together, select, turned_back
from asapc.program.apply import apply_lossless
from asapc.program.runner import Runner, Tap
from asapc.stages.calibrate import selection_batches
from asapc.terminal.progress import Progress


@dataclass(frozen=True)
class Chosen:
    """choices: by site.  hashes: of the examples that were looked at.  trail: what was tried, and why.
    switch: what became of soft sorts that might be exact."""

    choices: Sequence[Choice]
    hashes: Sequence[int]
    trail: Mapping[str, Any]
    switch: Mapping[str, Any] | None

    @property
    def fits(self) -> list[AnySiteCalibration]:
        return [choice.fit for choice in self.choices if choice.fit is not None]


def calibration_of(teacher: Teacher, path: str | Path) -> Calibration:
    """The fits in a folder.  Raises InputError where they are of another model."""
    calibration = load_calibration(path)
    if calibration.teacher != teacher.fingerprint:
        raise InputError(
            f"{path}: must belong to the model being compiled",
            got=f"teacher {calibration.teacher[:12]}, this model is {teacher.fingerprint[:12]}",
            help="run `asapc calibrate` on this model",
        )
    return calibration


def choose(
    analysis: Analysis,
    recipe: Recipe,
    calibration: Calibration,
    source: DataSource,
    progress: Progress,
    limit: MemoryLimit | None = None,
) -> Chosen:
    """Raises VerificationError where the lossless rewrite is another model on these examples.

    limit: batches get smaller until they fit."""
    recipe.check_patterns(analysis.names)
    if limit is not None:
        recipe = replace(recipe, batch_size=_within(limit, analysis, source, recipe.batch_size))
    batches = list(selection_batches(source, recipe.batch_size, recipe.selection_examples))
    if batches:
        with progress.phase("verifying the lossless model"):
            _verify_lossless(analysis, batches[0])
    elif any(fits_needed(s.convention, recipe.for_site(s.name)) for s in analysis.sites):
        raise empty_split(source, "selection")
    selection = select(analysis, recipe, calibration, batches, progress)
    choices, switch = _settled(analysis, selection.choices, batches, recipe)
    hashes = [content for batch in batches for content in batch.hashes]
    if limit is not None:
        progress.note(limit.told(recipe.batch_size))
    return Chosen(choices, hashes, selection.trail, switch)


def _within(limit: MemoryLimit, analysis: Analysis, source: DataSource, most: int) -> int:
    """The batch that fits into the limit, by trying."""
    untouched = Runner(analysis.model, () if analysis.model else analysis.capture.untouched)
    tap = Tap(analysis.model, analysis.lifted, analysis.names)

    def step(examples: int) -> None:
        batch = next(source.batches(examples))
        untouched(batch)
        for site, t in zip(analysis.sites, tap(batch)[1], strict=True):
            if isinstance(site.convention, Convention):
                apply_lossless(site.convention, t, None)  # its map, as it is compared
        give_back()

    return limit.batch_size(step, most)


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
        choice.operator == "esp_hard" and r.operator == "auto"
        for choice, r in zip(settled, recipes, strict=True)
    )
    if switch is None or not auto:
        return settled, switch
    beyond = exceeded_together(WholeModel(analysis, batches, recipe), settled)
    if not beyond:
        return settled, switch
    why = f"exact sorting, with what is approximate elsewhere, exceeds the budget: {beyond}"
    soft = [
        turned_back(choice, "esp_soft", why)
        if choice.operator == "esp_hard" and r.operator == "auto" else choice
        for choice, r in zip(settled, recipes, strict=True)
    ]  # fmt: skip
    return soft, {**switch, "switched": any(choice.operator == "esp_hard" for choice in soft)}


def _verify_lossless(analysis: Analysis, batch: Batch) -> None:
    """The lossless rewrite against the untouched model on a full batch of other examples.

    Padding, branches and early stops that the few examples of the capture did not show would show
    here.
    """
    untouched = Runner(analysis.model, () if analysis.model else analysis.capture.untouched)
    lossless = Runner(analysis.model, analysis.lifted)
    error = largest_difference(*(comparable(run(batch)) for run in (untouched, lossless)))
    if not error <= OUTPUT_TOLERANCE + own_rounding(analysis.model, batch):
        raise VerificationError(
            f"the lossless rewrite reproduces the untouched model on {len(batch)} more examples",
            got=f"relative difference {error:.2g}",
            help="the model treats these examples in a way the captured ones did not show, such as "
            "a mask that differs between queries or an early stop",
        )
