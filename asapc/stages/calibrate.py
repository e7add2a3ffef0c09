"""Calibrate: which fits a calibration needs, in which passes over the data, and the passes themselves."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from asapc.calibration.collect import SiteStatistics
from asapc.calibration.distill import Distiller
from asapc.calibration.enough import shortages
from asapc.calibration.reading import Examples
from asapc.calibration.shards import Shards, code_digest
from asapc.calibration.stored import AnySiteCalibration
from asapc.calibration.stream import Collector, Pending, stream, take_in
from asapc.errors import InputError
from asapc.features.predictor import transform_plan
from asapc.inputs.data import Batch, DataSource, empty_split, split_of
from asapc.inputs.recipe import Recipe
from asapc.inputs.teacher import Teacher
from asapc.ir import Convention, SiteTensors
from asapc.memory import MemoryLimit, give_back
from asapc.passes.analyse import Analysis
from asapc.passes.candidates import DISTILLED, fits_needed
from asapc.processes import ALONE, Processes
from asapc.program.runner import Tap
from asapc.terminal.progress import Progress

SAMPLE_EXAMPLES = 32  # slices and pivots are made from


@dataclass(frozen=True)
class Plan:
    """pending: every fit, site by site.  size: of a batch.  rounds: the places of the sites that are
    fitted in each pass.

    In parallel, one pass over the data fits all sites behind the teacher's own layers. Sequentially
    each site is fitted in a separate pass behind the layers that are already fitted, with their first
    candidate, on the activations it will really see.
    """

    recipe: Recipe
    pending: Sequence[Pending]
    sequential: bool
    size: int
    limit: MemoryLimit | None

    @property
    def order(self) -> Literal["parallel", "sequential"]:
        return "sequential" if self.sequential else "parallel"

    @property
    def rounds(self) -> list[list[int]]:
        sites = sorted({pending.site for pending in self.pending})
        return [[site] for site in sites] if self.sequential else [sites] if sites else []

    def fingerprints(
        self, teacher: Teacher, analysis: Analysis, source: DataSource, processes: Processes
    ) -> dict[str, str]:
        """What the fits are made from: those of an earlier run are good where these are the same."""
        most = None if self.limit is None else self.limit.limit
        conventions = [[site.name, site.convention.to_json()] for site in analysis.sites]
        return {
            "model": digest([teacher.fingerprint, conventions]),
            "data": source.fingerprint,
            "recipe": digest({**self.recipe.to_dict(), "order": self.order, "max_memory": most}),
            "code": code_digest(),
            **({} if processes.alone else {"number of processes": str(processes.size)}),
        }


def plan_fits(
    analysis: Analysis,
    source: DataSource,
    recipe: Recipe,
    sequential: bool,
    max_memory: int | None,
    processes: Processes = ALONE,
) -> Plan:
    """sequential: see Plan.  max_memory: bytes that the process may hold; batches get smaller, and fits
    that keep activations keep fewer, until that holds, which is tried by running the model."""
    recipe.check_patterns(analysis.names)
    pending = _pending(analysis, recipe)
    if sequential and any(p.collector.recipe.coefficients == "shared" for p in pending):
        raise InputError(
            "calibrate: coefficients shared by all sites are fitted in one pass",
            got="--sequential with `coefficients: shared`",
            help="use `coefficients: per_head` or leave out --sequential",
        )
    limit = None if max_memory is None else MemoryLimit(max_memory)
    size = recipe.batch_size
    if limit is not None and pending:
        size = processes.least(_within(limit, analysis, pending, source, recipe))
    return Plan(recipe, pending, sequential, size, limit)


def fit(
    analysis: Analysis,
    source: DataSource,
    plan: Plan,
    aside: Shards,
    progress: Progress,
    processes: Processes = ALONE,
) -> tuple[dict[str, tuple[AnySiteCalibration, ...]], list[int]]:
    """The fits of every site, in the order of its candidates, and the hashes of the examples used."""
    fitted: dict[str, dict[int, AnySiteCalibration]] = {}
    hashes: list[int] = []
    behind = ""
    for sites in plan.rounds:
        first = {name: fits[min(fits)] for name, fits in fitted.items()}
        behind_them = analysis.rewritten({name: earliest.replacement for name, earliest in first.items()})
        tap = Tap(analysis.model, behind_them, analysis.names)
        waiting = [p for p in plan.pending if p.site in sites]
        fits, hashes = stream(
            waiting,
            examples_of_fit(source, plan.recipe, plan.size, waiting, behind, processes),
            partial(_observed, tap, any(isinstance(p.collector, Distiller) for p in waiting)),
            aside,
            progress,
            f"calibrating {analysis.sites[sites[0]].name}" if plan.sequential else "calibrating",
            processes,
        )
        if not hashes:
            raise empty_split(source, "calibration")
        behind = digest([behind, hashes])
        for p in waiting:
            if p.key in fits:
                fitted.setdefault(p.name, {})[p.candidate] = fits[p.key]
    return {name: tuple(fits[i] for i in sorted(fits)) for name, fits in fitted.items()}, hashes


@contextlib.contextmanager
def unfinished(
    out: str | Path, fingerprints: Mapping[str, str], restart: bool, processes: Processes = ALONE
) -> Iterator[Shards]:
    """Where a calibration that is cut short leaves its work, which is gone when it ends well.

    An earlier run is continued where its fingerprints are these, and refused where they are not.
    restart: begin anew.  processes: each has its own place.
    """
    shards = Shards.beside(out if processes.first else f"{out}.{processes.rank}", fingerprints)
    if restart:
        shards.discard()
    with shards.open() as aside:
        try:
            yield aside
        except BaseException:
            if not aside.keys():  # nothing to go on with: the next call may differ
                aside.discard()
            raise
        aside.discard()


def tell_shortages(
    sites: Mapping[str, Sequence[AnySiteCalibration]],
    chosen: Sequence[AnySiteCalibration] | None,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Warn of fits, of those chosen or of all, that rest on too little; returns what files say of it."""
    missing = shortages(sites, chosen)
    for shortage in missing:
        progress.note(f"warning: {shortage.text}")
    return [shortage.to_dict() for shortage in missing]


def site_collector(name: str, convention: Convention, recipe: Recipe) -> Collector | None:
    """What collects one candidate of a Sinkhorn site; None where no dual can be predicted."""
    if recipe.operator in DISTILLED:
        return Distiller(name, convention, recipe)
    plan = transform_plan(convention, recipe.c_transforms, recipe.side, recipe.aim)
    return None if plan is None else SiteStatistics(name, convention, plan, recipe)


def _pending(analysis: Analysis, recipe: Recipe) -> list[Pending]:
    """Every fit that is needed, site by site."""
    pending = []
    for place, site in enumerate(analysis.sites):
        needed = fits_needed(site.convention, recipe.for_site(site.name))
        for candidate, (fit_recipe, _) in enumerate(needed):
            collector = site_collector(site.name, site.loop, fit_recipe)
            assert collector is not None
            size: dict[str, Any] = {"heads": site.heads, "head_dim": site.head_dim}
            pending.append(Pending(place, site.name, candidate, collector, **size))
    return pending


def digest(document: Any) -> str:
    """sha256 of JSON types."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _observed(tap: Tap, with_values: bool, batch: Batch) -> list[SiteTensors]:
    """What every site sees.  with_values: a fit needs them."""
    by_site: dict[str, SiteTensors] = {}

    def see(site: str, t: SiteTensors) -> None:
        if not with_values:  # as views they would keep the values, too
            t = replace(t, q=t.q.clone(), k=t.k.clone(), v=None)
        by_site[site] = t
        give_back()  # what is kept lies between what is not

    tap.watch(batch, see)
    return [by_site[site] for site in tap.sites]


def _within(
    limit: MemoryLimit, analysis: Analysis, pending: Sequence[Pending], source: DataSource, recipe: Recipe
) -> int:
    """The batch that fits into the limit, by trying; what collectors keep is bounded."""
    keeping = [p for p in pending if isinstance(p.collector, Distiller) or p.collector.recipe.fit == "kl"]
    for p in keeping:
        p.collector.keep_at_most(limit.kept(len(keeping), 2**28))
    tap = Tap(analysis.model, analysis.lifted, analysis.names)

    def step(examples: int) -> None:
        batch = next(source.batches(examples))
        take_in(_pending(analysis, recipe), tap(batch)[1])

    return limit.batch_size(step, recipe.batch_size)


def examples_of_fit(
    source: DataSource,
    recipe: Recipe,
    size: int,
    pending: Sequence[Pending],
    behind: str = "",
    processes: Processes = ALONE,
) -> Examples:
    """A process's share of the calibration split, and the selection split where anything is distilled."""
    distilled = any(isinstance(p.collector, Distiller) for p in pending)
    return Examples(
        sample=partial(calibration_batches, source, size, min(SAMPLE_EXAMPLES, recipe.max_examples)),
        batches=lambda: processes.share(calibration_batches(source, size, recipe.max_examples)),
        held_out=partial(selection_batches, source, size, recipe.selection_examples)
        if distilled else tuple,
        count=source.count(size * processes.size, select=_is_fitted_on, limit=recipe.max_examples),
        behind=behind,
    )  # fmt: skip


def calibration_batches(source: DataSource, size: int, limit: int) -> Iterator[Batch]:
    return source.batches(size, select=_is_fitted_on, limit=limit)


def selection_batches(source: DataSource, size: int, limit: int) -> Iterator[Batch]:
    return source.batches(size, select=lambda content: split_of(content) == "selection", limit=limit)


def _is_fitted_on(content: int) -> bool:
    return split_of(content) == "calibration"
