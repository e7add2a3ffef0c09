"""Stream: batches through a teacher into every candidate of every site, and out come the fits.

The teacher's duals on a batch are computed once for all candidates of a site. What was collected is saved
now and then, and every finished fit at once, so that a killed run resumes where it was: a site that has
taken in n batches skips the first n. Collectors that keep activations (KL fits and distillation) are not
saved: they read the data again, and only their fits, which take longest, are kept.

Whatever is saved records what was read for it (calibration.reading). After a run that a faulty example
ended, the next one may come with data in which that example was fixed: it keeps whatever its own first
batches would lead to, and drops the rest.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from asapc.calibration.checked import check_fit
from asapc.calibration.collect import SiteStatistics, check_finite, finish, pieces
from asapc.calibration.distill import Distiller
from asapc.calibration.reading import Examples, Reading
from asapc.calibration.shards import Shards
from asapc.calibration.stored import AnySiteCalibration, fit_from, fit_part
from asapc.calibration.teacher import TeacherDuals
from asapc.errors import InputError
from asapc.inputs.data import Batch
from asapc.ir import SiteTensors
from asapc.memory import give_back
from asapc.processes import ALONE, Processes, apart, together
from asapc.terminal.progress import Progress

ASIDE_EVERY = 15.0  # seconds between two times that statistics are saved
ASIDE_SHARE = 0.05  # the most of a run's time that saving may take
SAMPLE_BYTES = 1 << 28  # queries and keys, of all sites, that slices and pivots are made from
_KEPT = "finished work is kept: {mend}run the same command to resume"

Collector = SiteStatistics | Distiller
Observe = Callable[[Batch], list[SiteTensors]]
Tensors = Mapping[str, Tensor]


@dataclass
class Pending:
    """One candidate of one site that is being fitted.

    site: its place among the sites of the model.  done: the number of batches it has taken in.
    heads, head_dim: of the site, to check what an earlier run left.
    """

    site: int
    name: str
    candidate: int
    collector: Collector
    done: int = 0
    heads: int | None = None
    head_dim: int | None = None

    @property
    def key(self) -> str:
        return f"{self.name}.{self.candidate}"


def stream(
    pending: Sequence[Pending],
    examples: Examples,
    observe: Observe,
    aside: Shards | None,
    progress: Progress,
    label: str,
    processes: Processes = ALONE,
) -> tuple[dict[str, AnySiteCalibration], list[int]]:
    """The fits by Pending.key, and the hashes of the examples used, held-out ones included.

    observe: what every site sees on a batch.  aside: where unfinished work is saved.  label: of the
    progress bar.
    processes: share `examples` out; the first makes the fits, and all of them return the same.
    """
    waiting: list[Pending] = []
    seen: list[int] = []
    held_out: list[int] = []
    number, torn = 0, False
    reading = examples.read()
    try:
        fitted = _shared(_taken_up(pending, examples, aside, progress), processes)
        waiting = [p for p in pending if p.key not in fitted]
        _prepare(waiting, examples.sample(), observe, progress, processes)
        due = time.monotonic() + ASIDE_EVERY
        for batch in progress.track(examples.batches(), label, examples.count):
            behind = [p for p in waiting if p.done <= number]
            tensors = observe(batch) if behind else []
            if behind:
                _check(behind, tensors, batch)
            with _interrupted_afterwards():
                if behind:
                    torn = True
                    take_in(behind, tensors)
                    torn = False
                del tensors  # before the next are made
                number += 1
                seen.extend(batch.hashes)
                reading.add(batch)
            if behind and (asked := time.monotonic()) >= due:
                _put_aside(waiting, aside, number, len(seen), reading)
                due = (done := time.monotonic()) + max(ASIDE_EVERY, (done - asked) / ASIDE_SHARE)
        whole = reading.then()
        for batch in examples.held_out() if processes.first else ():
            _hold_out(waiting, batch, observe)
            held_out.extend(batch.hashes)
            whole.add(batch)
        seen = _gathered(waiting, seen, processes)
        if not seen:
            return {}, []
    except (InputError, KeyboardInterrupt) as error:  # what came before it need not be repeated
        if not torn:
            _put_aside(waiting, aside, number, len(seen), reading)
        if aside is not None and aside.keys() and processes.alone:
            faulty = isinstance(error, InputError)
            if faulty:
                aside.release("data")
            progress.note(_KEPT.format(mend="fix the data, then " if faulty else ""))
        raise
    made = _fits(waiting, aside, progress, whole) if processes.first else {}
    return fitted | _shared(made, processes), [*seen, *held_out]


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, unless it is pressed twice."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []

    def wait(number: int, _frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _shared(
    fitted: Mapping[str, AnySiteCalibration], processes: Processes
) -> dict[str, AnySiteCalibration]:
    """Give the first process's fits to all processes."""
    if processes.alone:
        return dict(fitted)
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for key, fit in fitted.items():
        of_fit, facts[key] = fit_part(key, fit)
        tensors |= of_fit
    tensors, facts = processes.from_first((tensors, facts))
    return {key: fit_from(key, document, tensors) for key, document in facts.items()}


def _gathered(pending: Sequence[Pending], hashes_here: list[int], processes: Processes) -> list[int]:
    """Return the examples of all processes; the first one also gathers what all have collected."""
    if processes.alone:
        return hashes_here
    for p in pending:
        parts = list(processes.gathered(p.collector.part()))
        if parts:
            p.collector.gather(parts)
    parts = processes.exchanged(({}, hashes_here))
    return [content for _, hashes in parts for content in hashes]


def _check(pending: Sequence[Pending], tensors: Sequence[SiteTensors], batch: Batch) -> None:
    """Check a batch before any site takes it in, so that either all do or none."""
    for site, name in {p.site: p.name for p in pending}.items():
        check_finite(name, tensors[site], batch.numbers)


def _hold_out(pending: Sequence[Pending], batch: Batch, observe: Observe) -> None:
    distillers = [(p.site, p.collector) for p in pending if isinstance(p.collector, Distiller)]
    if distillers:
        tensors = observe(batch)
        for site, distiller in distillers:
            with _timed(distiller):
                distiller.hold_out(tensors[site])


def _prepare(
    pending: Sequence[Pending],
    sample: Iterable[Batch],
    observe: Observe,
    progress: Progress,
    processes: Processes,
) -> None:
    """Make slices and pivots of every candidate from the sample's first examples of one shape, as many as
    SAMPLE_BYTES hold.  Every process makes those of its share of the sites."""
    ready = all(p.done > 0 or isinstance(p.collector, Distiller) for p in pending)
    if processes.least(ready):
        return
    seen: list[list[SiteTensors]] = []
    held = 0
    with progress.phase("sampling"):
        for batch in sample:
            tensors = observe(batch)
            if seen and _layout(tensors) != _layout(seen[0]):
                break
            seen.append([_without_large(t) for t in tensors])
            size = sum(t.q.nbytes + t.k.nbytes for t in tensors)
            held += size
            if held + size > SAMPLE_BYTES:
                break
    if not seen:
        return
    for p in progress.track(list(processes.share(pending)), "slices and pivots"):
        joined = _joined([tensors[p.site] for tensors in seen])
        check_finite(p.name, joined)
        p.collector.prepare(joined)
        give_back()
    if not processes.alone:
        _exchange_parameters(pending, processes)


def _exchange_parameters(pending: Sequence[Pending], processes: Processes) -> None:
    """Exchange slices and pivots, so that every process has all of them."""
    prepared = {p.key: p.collector.state()[0] for p in processes.share(pending)
           if isinstance(p.collector, SiteStatistics)}  # fmt: skip
    parts = processes.exchanged((together(prepared.items()), list(prepared)))
    made = {key: apart(tensors, key) for tensors, keys in parts for key in keys}
    for p in pending:
        if isinstance(p.collector, SiteStatistics):
            p.collector.prepare_as(made[p.key])


def _layout(tensors: Sequence[SiteTensors]) -> list[Any]:
    return [(t.q.shape[1:], t.k.shape[1:]) for t in tensors]


def _joined(parts: Sequence[SiteTensors]) -> SiteTensors:
    def join(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    return SiteTensors(*(join(name) for name in ("q", "k", "keep", "bias", "query_keep")))


def _without_large(t: SiteTensors) -> SiteTensors:
    """Without values, and without a bias except one that hides queries: features need no other."""
    hides = t.bias is not None and t.bias.shape[1:] == (1, t.q.shape[2], 1)
    bias = t.bias.expand(len(t.q), -1, -1, -1) if t.bias is not None and hides else None
    return replace(t, bias=bias, v=None)


def take_in(pending: Sequence[Pending], tensors: Sequence[SiteTensors]) -> None:
    """Feed one batch to every candidate, site by site: the loop in float64 takes most of the time."""
    for site in dict.fromkeys(p.site for p in pending):
        candidates = [p for p in pending if p.site == site]
        check_finite(candidates[0].name, tensors[site])
        for p in candidates:
            with _timed(p.collector):
                p.collector.prepare(tensors[site])
        for piece in pieces(tensors[site]):
            with torch.no_grad():
                with _timed(*(p.collector for p in candidates)):
                    duals = TeacherDuals(piece, candidates[0].collector.convention)
                for p in candidates:
                    with _timed(p.collector):
                        p.collector.add(duals)
        for p in candidates:
            p.collector.end_batch()
            p.done += 1


@contextlib.contextmanager
def _timed(*collectors: Collector) -> Iterator[None]:
    """Add the time that the block takes to its collectors, in equal parts."""
    start = time.perf_counter()
    yield
    for collector in collectors:
        collector.seconds += (time.perf_counter() - start) / len(collectors)


def _fits(
    pending: Sequence[Pending], aside: Shards | None, progress: Progress, reading: Reading
) -> dict[str, AnySiteCalibration]:
    fitted: dict[str, AnySiteCalibration] = {}
    for group in _groups(pending):
        statistics = {p.name: p.collector for p in group if isinstance(p.collector, SiteStatistics)}
        fits = finish(statistics)
        fitted.update({p.key: fits[p.name] for p in group if p.name in fits})
    for key, fit in fitted.items():
        _keep(key, fit, aside, reading)
    distillers = [(p.key, p.collector) for p in pending if isinstance(p.collector, Distiller)]
    for key, distiller in progress.track(distillers, "distilling") if distillers else ():
        fitted[key] = distiller.calibration()
        _keep(key, fitted[key], aside, reading)
    return fitted


def _keep(key: str, fit: AnySiteCalibration, aside: Shards | None, reading: Reading) -> None:
    if aside is not None:
        tensors, facts = fit_part(key, fit)
        aside.put(_fit(key), tensors, {**facts, "read": reading.digest})


def _groups(pending: Sequence[Pending]) -> list[list[Pending]]:
    """Group the same candidate of all sites: these may share their coefficients."""
    groups: dict[str, list[Pending]] = {}
    for p in pending:
        groups.setdefault(p.collector.recipe.label(), []).append(p)
    return list(groups.values())


def _taken_up(
    pending: Sequence[Pending], examples: Examples, aside: Shards | None, progress: Progress
) -> dict[str, AnySiteCalibration]:
    """Return the fits of an earlier run that this data would lead to too; restore what it collected."""
    if aside is None:
        return {}
    fits = {p.key: part for p in pending if (part := aside.get(_fit(p.key))) is not None}
    begun = {p.key: part for p in pending if (part := aside.get(_statistics(p.key))) is not None}
    if not fits and not begun:
        return {}
    whole = examples.whole() if fits else ""
    most = max((_count(facts, "done") for _, facts in begun.values()), default=0)
    digests = dict(enumerate(examples.digests(most)))
    finished = {}
    taken, others = 0, 0  # examples that the data still begins with, and that it no longer does
    for p in pending:
        if p.key in begun:
            tensors, facts = begun[p.key]
            if facts.get("read") == digests.get(_count(facts, "done")) and _restored(p, tensors, facts):
                taken = max(taken, _count(facts, "taken"))
            else:
                aside.drop(_statistics(p.key))
                others = max(others, _count(facts, "taken"))
        if p.key in fits:
            tensors, facts = fits[p.key]
            fit = _finished(p, tensors, facts) if facts.get("read") == whole else None
            if fit is None:
                aside.drop(_fit(p.key))
            else:
                finished[p.key] = fit
    fitted = _fitted_together(pending, finished)
    progress.note(_resumed_text(taken, others, len(fitted), len(fits)))
    return fitted


_BROKEN = (  # of a part
    LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, InputError,
)  # fmt: skip


def _count(facts: Mapping[str, Any], name: str) -> int:
    """The count of that name; 0 for anything else, which no run of ours has saved."""
    value = facts.get(name)
    return value if type(value) is int and 0 < value < 2**63 else 0


def _restored(p: Pending, tensors: Tensors, facts: Mapping[str, Any]) -> bool:
    if not isinstance(p.collector, SiteStatistics) or not _count(facts, "done"):
        return False
    try:
        p.collector.restore(tensors, facts, p.heads, p.head_dim)
    except _BROKEN:
        return False
    p.done = _count(facts, "done")
    return True


def _finished(p: Pending, tensors: Tensors, facts: Mapping[str, Any]) -> AnySiteCalibration | None:
    try:
        fit = fit_from(p.key, facts, tensors)
        check_fit(p.key, fit.replacement, p.heads, p.head_dim)
    except _BROKEN:
        return None
    collector = p.collector
    wanted = (collector.convention, collector.plan, collector.recipe.fit_settings())
    return fit if (fit.convention, fit.plan, fit.settings) == wanted else None


def _resumed_text(taken: int, others: int, fitted: int, fits: int) -> str:
    """Say in a sentence what is kept of an earlier run: its examples and its fits."""
    parts = []
    if taken:
        parts.append(f"resuming after the first {taken} examples")
    if others:
        begun = "" if taken else "starting again: "
        parts.append(f"{begun}some of the {others} examples read by an earlier run have changed")
    if fits:
        parts.append(f"{fitted} of {fits} finished fits are kept")
    return "; ".join(parts)


def _fitted_together(
    pending: Sequence[Pending], finished: Mapping[str, AnySiteCalibration]
) -> dict[str, AnySiteCalibration]:
    """Leave out fits that share coefficients with one that is missing."""
    fitted: dict[str, AnySiteCalibration] = {}
    for group in _groups(pending):
        kept = {p.key: finished[p.key] for p in group if p.key in finished}
        if len(kept) == len(group) or group[0].collector.recipe.coefficients != "shared":
            fitted |= kept
    return fitted


def _put_aside(
    pending: Sequence[Pending], aside: Shards | None, batches: int, examples: int, reading: Reading
) -> None:
    """Save what was collected from so many batches; statistics of more batches were saved before."""
    if aside is None:
        return
    for p in pending:
        site = p.collector  # a KL fit keeps activations too, and is not saved
        if isinstance(site, SiteStatistics) and site.recipe.fit == "ls" and p.done == batches > 0:
            tensors, facts = site.state()
            read = {"done": batches, "taken": examples, "read": reading.digest}
            aside.put(_statistics(p.key), tensors, {**facts, **read})


def _fit(key: str) -> str:
    return f"fit.{key}"


def _statistics(key: str) -> str:
    return f"statistics.{key}"
