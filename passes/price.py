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

    def at(x: Tensor | None, positions: Tensor) -> Tensor | None:
        if x is None:
            return None
        axis = 2 if x.dim() == 4 else 1
        return x.index_select(0, rows.to(x.device)).index_select(axis, positions.to(x.device))

    q, k = at(t.q, queries), at(t.k, keys)
    assert q is not None and k is not None
    if t.scored:
        return replace(
            SiteTensors.of_scores(q.index_select(3, keys.to(q.device))),
            log_mu=_marginal(t.log_mu, rows, queries), log_nu=_marginal(t.log_nu, rows, keys),
        )  # fmt: skip
    return SiteTensors(
        q, k, at(t.keep, keys), _bias(t.bias, rows, queries, keys),
        at(t.query_keep, queries), at(t.v, keys),
    )  # fmt: skip


def _marginal(logs: Tensor | None, rows: Tensor, tokens: Tensor) -> Tensor | None:
    """[X], or broadcastable to [B, H, X]."""
    if logs is None:
        return None
    if logs.dim() > 1 and logs.shape[0] > 1:
        logs = logs.index_select(0, rows.to(logs.device))
    return logs.index_select(-1, tokens.to(logs.device))


def _bias(bias: Tensor | None, rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor | None:
    if bias is None:
        return None
    for axis, positions in ((-1, keys), (-2, queries), (-4, rows)):
        if bias.dim() >= -axis and bias.shape[axis] > 1:
            bias = bias.index_select(bias.dim() + axis, positions.to(bias.device))
    return bias


def prices(
    calls: Mapping[str, Apply],
    t: SiteTensors,
    shapes: Sequence[Shape],
    repeats: int = 6,
    memory: bool = False,
) -> dict[str, Price]:
    """Every call's price; the calls take turns. memory: also what a call holds at its peak.  repeats: six
    are the fewest that give an interval.

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
                times = _timed(bound, repeats)
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


def _timed(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
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
