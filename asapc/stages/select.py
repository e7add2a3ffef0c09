"""Choose: an operator for every site, on examples that calibration has not seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from asapc.calibration.stored import Calibration, load_calibration
from asapc.errors import InputError, VerificationError
from asapc.inputs.data import Batch, DataSource, empty_split
from asapc.inputs.recipe import Recipe
from asapc.inputs.teacher import Teacher
from asapc.ir import Convention
from asapc.measure.differences import comparable, largest_difference
from asapc.memory import MemoryLimit, give_back
from asapc.passes.analyse import OUTPUT_TOLERANCE, Analysis, own_rounding
from asapc.passes.candidates import fits_needed
from asapc.passes.select import Selection, select
from asapc.program.apply import apply_lossless
from asapc.program.runner import Runner, Tap
from asapc.stages.calibrate import selection_batches
from asapc.terminal.progress import Progress


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
) -> Selection:
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
    if limit is not None:
        progress.note(limit.told(recipe.batch_size))
    return selection


def _within(limit: MemoryLimit, analysis: Analysis, source: DataSource, most: int) -> int:
    """The batch that fits into the limit, by trying."""
    untouched = analysis.untouched
    tap = Tap(analysis.model, analysis.lifted, analysis.names)

    def step(examples: int) -> None:
        batch = next(source.batches(examples))
        untouched(batch)
        for site, t in zip(analysis.sites, tap(batch)[1], strict=True):
            if isinstance(site.convention, Convention):
                apply_lossless(site.convention, t, None)  # its map, as it is compared
        give_back()

    return limit.batch_size(step, most)


def _verify_lossless(analysis: Analysis, batch: Batch) -> None:
    """The lossless rewrite against the untouched model on a full batch of other examples.

    Padding, branches and early stops that the few examples of the capture did not show would show
    here.
    """
    runs = analysis.untouched, Runner(analysis.model, analysis.lifted)
    error = largest_difference(*(comparable(run(batch)) for run in runs))
    if not error <= OUTPUT_TOLERANCE + own_rounding(analysis.model, batch):
        raise VerificationError(
            f"the lossless rewrite reproduces the untouched model on {len(batch)} more examples",
            got=f"relative difference {error:.2g}",
            help="the model treats these examples in a way the captured ones did not show, such as "
            "a mask that differs between queries or an early stop",
        )
