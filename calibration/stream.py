"""Stream: batches through a teacher into every candidate of every site, and out come the fits.

The teacher's duals on a batch are computed once for all candidates of a site. What was collected is put
aside now and then, and every finished fit at once, so that a killed run goes on where it was: a site
that has taken in n batches passes over the first n. Collectors that keep activations (KL fits and
distillation) are not put aside: they see the data again, and only their fits, the long part, are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from asapc.calibration.collect import SiteStatistics, check_finite, finish, pieces
from asapc.calibration.distill import Distiller
from asapc.calibration.teacher import TeacherDuals
from asapc.data import Batch
from asapc.errors import InputError
from asapc.formats.calibration import (
    AnySiteCalibration,
    fit_document,
    fit_from,
    fit_tensors,
)
from asapc.ir import SiteTensors
from asapc.progress import Progress

ASIDE_EVERY = 15.0  # seconds between two times that statistics are put aside
ASIDE_SHARE = 0.05  # of the run's time, at most, goes into that

Collector = SiteStatistics | Distiller
Observe = Callable[[Batch], list[SiteTensors]]
Tensors = Mapping[str, Tensor]


class Aside(Protocol):
    """Where unfinished work is kept, see formats.shards."""

    def get(self, key: str) -> tuple[Tensors, Mapping[str, Any]] | None: ...

    def put(self, key: str, tensors: Tensors, facts: Mapping[str, Any]) -> None: ...


@dataclass
class Pending:
    """One candidate of one site on its way: site is its place among the sites of the model."""

    site: int
    name: str
    candidate: int
    collector: Collector
    done: int = 0

    @property
    def key(self) -> str:
        return f"{self.name}.{self.candidate}"


def stream(
    pending: Sequence[Pending],
    sample: Iterable[Batch],
    batches: Iterable[Batch],
    held_out: Iterable[Batch],
    observe: Observe,
    aside: Aside,
    progress: Progress,
    batch_size: int,
) -> tuple[dict[str, AnySiteCalibration], list[int]]:
    """Fits by Pending.key, and the hashes of the examples used, held-out ones included.

    sample: slices and pivots are made from, whatever the size of a batch.
    batches: to fit on, already tracked.  held_out: to stop distillation by.  observe: what every site
    sees on a batch.  batch_size: of the batches: work put aside in others is not gone on with.
    """
    fitted = _finished_fits(pending, aside)
    waiting = [p for p in pending if p.key not in fitted]
    for p in waiting:
        _restore(p, aside, batch_size)
    _prepare(waiting, sample, observe)
    clock = _Clock()
    seen: list[int] = []
    try:
        for number, batch in enumerate(batches):
            seen.extend(batch.hashes)
            behind = [p for p in waiting if p.done <= number]
            if not behind:
                continue
            take_in(behind, observe(batch))
            if clock.due():
                for p in waiting:
                    _put_aside(p, aside, batch_size)
                clock.restart()
    except InputError:  # of an example: what came before it need not be done again
        for p in waiting:
            if p.done:
                _put_aside(p, aside, batch_size)
        raise
    if not seen:
        return {}, []
    if any(isinstance(p.collector, Distiller) for p in pending):
        distillers = [p for p in waiting if isinstance(p.collector, Distiller)]
        for batch in held_out:
            seen.extend(batch.hashes)
            if distillers:
                tensors = observe(batch)
                for p in distillers:
                    assert isinstance(p.collector, Distiller)
                    p.collector.hold_out(tensors[p.site])
    return fitted | _fits(waiting, aside, progress), seen


def _prepare(pending: Sequence[Pending], sample: Iterable[Batch], observe: Observe) -> None:
    """Slices and pivots of every candidate, from the examples of the sample that have one shape."""
    if all(p.done > 0 for p in pending):
        return
    seen: list[list[SiteTensors]] = []
    for batch in sample:
        tensors = observe(batch)
        if seen and _layout(tensors) != _layout(seen[0]):
            break
        seen.append([replace(t, bias=None) for t in tensors])  # which may be large, and has no part
    for p in pending if seen else ():
        own = _joined([tensors[p.site] for tensors in seen])
        check_finite(p.name, own)
        p.collector.prepare(own)


def _layout(tensors: Sequence[SiteTensors]) -> list[Any]:
    return [(t.q.shape[1:], t.k.shape[1:]) for t in tensors]


def _joined(parts: Sequence[SiteTensors]) -> SiteTensors:
    def join(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    return SiteTensors(join("q"), join("k"), join("keep"), None, join("query_keep"), join("v"))


def take_in(pending: Sequence[Pending], tensors: Sequence[SiteTensors]) -> None:
    """One batch into every candidate, site by site: the loop in float64 is what takes the time."""
    for site in dict.fromkeys(p.site for p in pending):
        own = [p for p in pending if p.site == site]
        start = time.perf_counter()
        check_finite(own[0].name, tensors[site])
        for p in own:
            p.collector.prepare(tensors[site])
        for piece in pieces(tensors[site]):
            with torch.no_grad():
                duals = TeacherDuals(piece, own[0].collector.convention)
                for p in own:
                    p.collector.add(duals)
        for p in own:
            p.done += 1
            if isinstance(p.collector, SiteStatistics):  # the other kind has a clock of its own
                p.collector.seconds += (time.perf_counter() - start) / len(own)


def _fits(
    pending: Sequence[Pending], aside: Aside, progress: Progress
) -> dict[str, AnySiteCalibration]:
    fitted: dict[str, AnySiteCalibration] = {}
    for group in _groups(pending):
        own = {p.name: p.collector for p in group if isinstance(p.collector, SiteStatistics)}
        fits = finish(own)
        fitted.update({p.key: fits[p.name] for p in group if p.name in fits})
    for key, fit in fitted.items():
        _keep(key, fit, aside)
    distillers = [p for p in pending if isinstance(p.collector, Distiller)]
    for p in progress.track(distillers, "distilling", len(distillers)) if distillers else ():
        assert isinstance(p.collector, Distiller)
        fitted[p.key] = p.collector.calibration()
        _keep(p.key, fitted[p.key], aside)
    return fitted


def _keep(key: str, fit: AnySiteCalibration, aside: Aside) -> None:
    aside.put(f"fit.{key}", fit_tensors(key, fit), {**fit_document(fit), "seconds": fit.fit_seconds})


def _groups(pending: Sequence[Pending]) -> list[list[Pending]]:
    """The same candidate at every site: these may share their coefficients."""
    groups: dict[str, list[Pending]] = {}
    for p in pending:
        groups.setdefault(p.collector.recipe.label(), []).append(p)
    return list(groups.values())


def _finished_fits(pending: Sequence[Pending], aside: Aside) -> dict[str, AnySiteCalibration]:
    """Fits of an earlier run; those that share coefficients count only together."""
    found: dict[str, AnySiteCalibration] = {}
    for group in _groups(pending):
        own = {p.key: fit for p in group if (fit := _finished(p, aside)) is not None}
        if len(own) == len(group) or group[0].collector.recipe.coefficients != "shared":
            found |= own
    return found


def _finished(p: Pending, aside: Aside) -> AnySiteCalibration | None:
    found = aside.get(f"fit.{p.key}")
    if found is None:
        return None
    tensors, facts = found
    return fit_from(p.key, facts, tensors, float(facts["seconds"]))


def _put_aside(p: Pending, aside: Aside, batch_size: int) -> None:
    if isinstance(p.collector, SiteStatistics) and p.collector.additive:
        tensors, facts = p.collector.state()
        aside.put(f"statistics.{p.key}", tensors, {**facts, "done": p.done, "batch_size": batch_size})


def _restore(p: Pending, aside: Aside, batch_size: int) -> None:
    found = aside.get(f"statistics.{p.key}")
    alike = found is not None and found[1]["batch_size"] == batch_size
    if found is not None and alike and isinstance(p.collector, SiteStatistics):
        p.collector.restore(*found)
        p.done = int(found[1]["done"])


class _Clock:
    """When to put statistics aside: seldom enough to cost little."""

    def __init__(self) -> None:
        self.start, self.pause = time.monotonic(), ASIDE_EVERY

    def due(self) -> bool:
        self.asked = time.monotonic()
        return self.asked - self.start >= self.pause

    def restart(self) -> None:
        self.start = time.monotonic()
        self.pause = max(ASIDE_EVERY, (self.start - self.asked) / ASIDE_SHARE)
