"""Price: what the candidates of a site cost at the shapes they have to pay at, next to the teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.ir import SiteTensors
from asapc.measure.bootstrap import Interval
from asapc.measure.timing import ENOUGH, extra_bytes, interleaved_times, quartiles, ratio_interval
from asapc.operators.catalogue import TEACHER

LONG = 500.0  # milliseconds: a call as long is timed once where it is clearly slower than all others
CLEARLY = 0.5  # of its time is the most that the others take
REPEATS = 6  # the fewest that give an interval
Shape = tuple[int, int]  # examples, tokens
Apply = Callable[[SiteTensors, Tensor | None], Any]


@dataclass(frozen=True)
class Price:
    """Milliseconds of one call by shape, with quartiles; MiB at the peak of one call at the largest.

    gain: the interval of the teacher's time over this one, where there were rounds enough.
    """

    median: Mapping[Shape, float]
    low: Mapping[Shape, float]
    high: Mapping[Shape, float]
    mib: float | None = None
    gain: Mapping[Shape, Interval] = field(default_factory=dict)

    @property
    def milliseconds(self) -> float:
        """Of one call at every shape."""
        return sum(self.median.values())

    def slower_than(self, other: Price) -> Shape | None:
        """The first shape at which this is slower by more than the spread of either measurement."""
        return next((shape for shape in self.median if self.low[shape] > other.high[shape]), None)


def shapes_of(t: SiteTensors, wanted: Sequence[Shape], batch: int) -> list[Shape]:
    """(examples, tokens) to measure at; where nothing is wanted, those of the tensors."""
    listed = [(examples or batch, tokens) for examples, tokens in wanted]
    return list(dict.fromkeys(listed)) or [(t.q.shape[0], t.q.shape[2])]


def resized(t: SiteTensors, shape: Shape) -> SiteTensors:
    """The same activations at another shape: examples and tokens over again, or fewer of them.

    Keys keep their ratio to queries. A site of one shape, with a bias or an embedding for each position,
    is measured as if it had them for the others.
    """
    examples, tokens = shape
    if shape == (t.q.shape[0], t.q.shape[2]):
        return t
    num_keys = max(1, round(tokens * t.k.shape[2] / max(1, t.q.shape[2])))
    rows = torch.arange(examples) % max(1, t.q.shape[0])
    queries, keys = torch.arange(tokens) % t.q.shape[2], torch.arange(num_keys) % t.k.shape[2]
    return selected(t, rows, queries, keys)


def selected(t: SiteTensors, rows: Tensor, queries: Tensor, keys: Tensor) -> SiteTensors:
    """The activations of these examples, queries and keys, by their numbers."""
    if t.scored:
        seen = SiteTensors.of_scores(_at(t.q, {-4: rows, -2: queries, -1: keys}))
    else:
        of_keys, of_queries = {-4: rows, -2: keys}, {-4: rows, -2: queries}
        seen = SiteTensors(
            _at(t.q, of_queries), _at(t.k, of_keys), v=None if t.v is None else _at(t.v, of_keys)
        )

    def masked(mask: Tensor | None, tokens: Tensor) -> Tensor | None:
        return None if mask is None else _at(mask, {-2: rows, -1: tokens})

    def spread(x: Tensor | None, places: dict[int, Tensor]) -> Tensor | None:
        """Of what broadcasts: an axis that is there, and longer than 1."""
        if x is None:
            return None
        return _at(x, {at: n for at, n in places.items() if x.dim() >= -at and x.shape[at] > 1})

    return replace(
        seen, keep=masked(t.keep, keys), query_keep=masked(t.query_keep, queries),
        bias=spread(t.bias, {-1: keys, -2: queries, -4: rows}),
        log_mu=spread(t.log_mu, {-1: queries, -3: rows}), log_nu=spread(t.log_nu, {-1: keys, -3: rows}),
    )  # fmt: skip


def _at(x: Tensor, places: Mapping[int, Tensor]) -> Tensor:
    """The entries at these places of axes from the end."""
    for axis, positions in places.items():
        x = x.index_select(x.dim() + axis, positions.to(x.device))
    return x


def prices(
    calls: Mapping[str, Apply], t: SiteTensors, shapes: Sequence[Shape], memory: bool = False
) -> dict[str, Price]:
    """Every call's price; the calls take turns. memory: also what a call holds at its peak.

    Where the model returns the attention map, the calls compute the map, as they will in it.
    """
    taken: dict[str, dict[str, dict[Shape, float]]] = {
        name: {"median_ms": {}, "q1": {}, "q3": {}} for name in calls
    }
    gains: dict[str, dict[Shape, Interval]] = {name: {} for name in calls}
    mib: dict[str, float | None] = dict.fromkeys(calls)
    with torch.no_grad():
        for shape in shapes:
            with _fitting(shape):
                tensors = resized(t, shape)
                bound = {name: partial(f, tensors, tensors.v) for name, f in calls.items()}
                times = timed(bound, REPEATS)
            for name, rounds in times.items():
                found = quartiles(rounds)
                for key, into in taken[name].items():
                    into[shape] = found[key]
                gain = ratio_interval(times.get(TEACHER, []), rounds)
                if gain is not None:
                    gains[name][shape] = gain
        if memory:
            tensors = resized(t, max(shapes, key=lambda shape: shape[0] * shape[1] ** 2))
            for name, f in calls.items():
                held = extra_bytes(partial(f, tensors, tensors.v), t.q.device.type)
                mib[name] = None if held is None else held / 2**20
    return {
        name: Price(timing["median_ms"], timing["q1"], timing["q3"], mib[name], gains[name])
        for name, timing in taken.items()
    }


def timed(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """As interleaved_times has it, but a long call that is clearly the slowest is made once only: what
    its first call takes beyond another is no part of such a difference."""
    times = interleaved_times(calls, repeats=1, warmup=0)
    once = {name: found[0] for name, found in times.items()}
    slowest = max(once, key=lambda name: once[name])
    others = {name: call for name, call in calls.items() if name != slowest}
    if once[slowest] < LONG or any(once[name] > CLEARLY * once[slowest] for name in others):
        return interleaved_times(calls, repeats=repeats, warmup=1, enough=ENOUGH)
    return {slowest: times[slowest], **interleaved_times(others, repeats, warmup=1, enough=ENOUGH)}


@contextmanager
def _fitting(shape: Shape) -> Iterator[None]:
    """InputError where this machine's memory does not hold a call at the shape."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocat" not in str(error):
            raise
        raise InputError(
            "recipe: shapes: candidates are timed on this machine, whose memory must hold them",
            got=f"{shape[0]}x{shape[1]}, examples by tokens",
            help="name smaller shapes",
        ) from error
