"""Drift: does a loaded model still see scores like those its duals were fitted on?

    model = asapc.load(OUT).enable_monitor()
    ...
    model.monitor    {site: {"batches": 812, "out_of_range": 3, "low": 4.1, "high": 61.7}}

A predicted dual is only as good as its fit, which has seen the scores of the calibration data. Scores
themselves are never formed at inference, so what is watched is a bound on them that costs O(N D), one
number for each example,

    score_multiplier * max_i |q_i| * max_j |k_j|  >=  max_ij |score_multiplier q_i.k_j|

over all queries and the active keys, with norms over all heads together, so that it bounds the scores
of each (norms of every head by itself take twice as long). A score bias is left out on both sides: it
is a parameter in nearly every model, and reading it would cost O(N M). Calibration stores the smallest
and the largest of these bounds, and of the true scores, for the report; a batch is out of range where
an example's bound is not within them and a margin. Like is compared with like, but it is a bound: scores
may drift without it, where angles change and norms do not. And a range is that of a sample: of n
calibration examples, about one in n of fresh ones lies below it and one above, so a batch now and then
out of range is no drift; it is the share that tells.

The methods are attributes of the loaded module, which stays what it was: the same class, signature and
state dict, as a wrapper module would not be. Until it is enabled its graphs hold nothing of this;
enabling adds one call before each watched operator, and disabling takes it out again. Counting needs no
value on the host, so a GPU is not waited for until `monitor` is read. A module that already has
attributes of these names keeps them, and cannot be monitored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from asapc.errors import InputError
from asapc.formats.records import Record
from asapc.program.calls import Operands, operator_calls
from asapc.program.code import Code
from asapc.terminal.printed import short

MARGIN = 0.1
_PENDING = 256  # batches whose bounds stay on the device until they are counted
_DIGITS = 4  # kept of a range: batch sizes change the last ones of a float32 activation
_ATTRIBUTES = ("enable_monitor", "disable_monitor", "monitor")


def score_bound(q: Tensor, k: Tensor, keep: Tensor | None, score_multiplier: float) -> Tensor:
    """The bound of the module docstring for each example, float32 or wider: [B]; 0 without active keys.

    q: [B, H, N, D]; k: [B, H, M, D]; keep: [B, M] bool.
    """
    rows, columns = (torch.linalg.vector_norm(_wide(x.detach()), dim=(1, 3)) for x in (q, k))
    if keep is not None:
        columns = columns.masked_fill(~keep, 0.0)
    return rows.amax(-1) * columns.amax(-1) * abs(score_multiplier)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@dataclass(frozen=True)
class ScoreRange(Record):
    """What calibration saw of a site's scores, in units of epsilon.

    score_low, score_high: of every active score, with its bias.  bound_low, bound_high: of score_bound.
    """

    score_low: float = math.inf
    score_high: float = -math.inf
    bound_low: float = math.inf
    bound_high: float = -math.inf

    @classmethod
    def from_json(cls, document: Any, where: str, **apart: Any) -> Self:
        found = super().from_json(document, where, **apart)
        if not found.known:
            raise InputError(f"{where} must have four finite numbers", got=short(document))
        return found

    @classmethod
    def of(cls, scores: Tensor, bound: Tensor) -> ScoreRange:
        """scores: [B, H, N, M], -inf where there is none; bound: [B], of examples with active keys."""
        if not scores.numel() or not bound.numel():
            return cls()
        lowest = scores.masked_fill(scores.isneginf(), math.inf).amin()
        return cls(*(float(x) for x in (lowest, scores.amax(), bound.amin(), bound.amax())))

    def joined(self, other: ScoreRange) -> ScoreRange:
        return ScoreRange(
            min(self.score_low, other.score_low), max(self.score_high, other.score_high),
            min(self.bound_low, other.bound_low), max(self.bound_high, other.bound_high),
        )  # fmt: skip

    @property
    def known(self) -> bool:
        """Something was seen."""
        return all(math.isfinite(value) for value in asdict(self).values())

    def rounded(self) -> ScoreRange:
        return ScoreRange(*(float(f"{value:.{_DIGITS}g}") for value in asdict(self).values()))


@dataclass
class _Watch:
    """The index-th operator call of a graph, that of one site, before which `watch` is called.

    range: None where calibration saw no score.
    """

    graph: Code
    index: int
    name: str
    score_multiplier: float
    range: ScoreRange | None

    def begin(self, margin: float) -> None:
        """Count from 0."""
        assert self.range is not None
        self.least = self.range.bound_low * (1 - margin)
        self.most = self.range.bound_high * (1 + margin)
        self.batches = self.out_of_range = 0
        self.low, self.high = math.inf, -math.inf
        # Smallest and largest bound of batches that are yet to be counted.
        self._pending: list[tuple[Tensor, Tensor]] = []
        operands = _calls(self.graph)[self.index]
        with self.graph.graph.inserting_before(operands.call):
            self.graph.graph.call_function(self.watch, (operands.q, operands.k, operands.keep))

    def watch(self, q: Tensor, k: Tensor, keep: Tensor | None) -> None:
        bound = score_bound(q, k, keep, self.score_multiplier)
        self.batches += 1
        if not bound.numel():
            return
        if keep is None:
            low, high = bound.aminmax()
        else:  # where nothing attends there is no score
            empty = ~keep.any(-1)
            low = bound.masked_fill(empty, math.inf).amin()
            high = bound.masked_fill(empty, -math.inf).amax()
        self._pending.append((low, high))
        if len(self._pending) == _PENDING:
            self._count()

    def _count(self) -> None:
        if not self._pending:
            return
        low, high = torch.tensor([[x.item() for x in pair] for pair in self._pending]).double().T
        self._pending = []
        inside = (low >= self.least) & (high <= self.most)  # NaN is not
        self.out_of_range += int((~inside).sum())
        finite = torch.cat([low[low.isfinite()], high[high.isfinite()]])
        if len(finite):
            self.low = min(self.low, float(finite.amin()))
            self.high = max(self.high, float(finite.amax()))

    def counts(self) -> dict[str, Any]:
        """low, high: the smallest and largest finite bound of an example; None before the first."""
        self._count()
        low, high = (x if math.isfinite(x) else None for x in (self.low, self.high))
        counted = {"batches": self.batches, "out_of_range": self.out_of_range}
        return {**counted, "low": low, "high": high}


@dataclass(eq=False)
class Monitor(Mapping[str, dict[str, Any]]):
    """{site: {"batches", "out_of_range", "low", "high"}} of a loaded module, empty unless enabled."""

    module: nn.Module
    places: list[_Watch]
    _watches: list[_Watch] = field(default_factory=list)

    def enable(self, margin: float = MARGIN) -> nn.Module:
        """Count from 0; returns the module.  margin: how far beyond the calibrated range is still in it.

        Sites whose loop was kept, or replaced without a fitted dual, have nothing that could drift and
        are not listed. Raises InputError for an artefact whose calibration saw no scores.
        """
        if unseen := [place.name for place in self.places if place.range is None]:
            raise InputError(
                f"monitor: {', '.join(unseen)}: calibration must have stored the score range",
                got="a site without one", help="calibrate on data with active keys and compile again",
            )  # fmt: skip
        if not (math.isfinite(margin) and margin >= 0):
            raise InputError("monitor: the margin must be a number from 0", got=margin)
        self.disable()
        self._watches = self.places
        for watch in self._watches:
            watch.begin(margin)
        self._recompile()
        return self.module

    def disable(self) -> nn.Module:
        """Take the counters out again; returns the module.  The counts are gone."""
        self._watches = []
        for place in self.places:
            for node in list(place.graph.graph.nodes):
                if isinstance(getattr(node.target, "__self__", None), _Watch):
                    place.graph.graph.erase_node(node)
        self._recompile()
        return self.module

    def _recompile(self) -> None:
        for graph in {id(place.graph): place.graph for place in self.places}.values():
            graph.recompile()

    def __getitem__(self, name: str) -> dict[str, Any]:
        for watch in self._watches:
            if watch.name == name:
                return watch.counts()
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (watch.name for watch in self._watches)

    def __len__(self) -> int:
        return len(self._watches)

    def __repr__(self) -> str:
        return repr(dict(self))


def attach(
    module: nn.Module, codes: Sequence[tuple[Code, Sequence[str]]], sites: Sequence[Mapping[str, Any]]
) -> None:
    """Give a loaded module enable_monitor(margin), disable_monitor() and monitor.

    codes: the compiled graphs that run in it, each with the sites of its operator calls in order; sites:
    of the manifest.  Raises InputError where a site's range is not one.
    """
    if any(hasattr(module, name) and not _is_ours(module, name) for name in _ATTRIBUTES):
        return  # the user's attributes
    known = {str(site["name"]): site for site in sites}
    called: list[tuple[Mapping[str, Any], Code, int]] = []
    for code, names in codes:
        count = len(_calls(code))
        if len(names) != count or not set(names) <= set(known):
            raise InputError(
                "the manifest must list the sites that the programs hold",
                got=f"{len(names)} sites for {count} operator calls", help="compile again",
            )  # fmt: skip
        called += [(known[name], code, index) for index, name in enumerate(names)]
    places = []
    for site, graph, index in called:
        if site["operator"] != "asap":
            continue
        name, told = str(site["name"]), site.get("range")
        seen = None if told is None else ScoreRange.from_json(told, f"{name}: range")
        try:
            multiplier = float(site["convention"]["score_multiplier"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"{name}: the manifest's range must hold finite numbers",
                got=f"{type(error).__name__}: {error}", help="compile again",
            ) from error  # fmt: skip
        places.append(_Watch(graph, index, name, multiplier, seen))
    monitor = Monitor(module, places)
    module.enable_monitor = monitor.enable  # type: ignore[assignment]
    module.disable_monitor = monitor.disable  # type: ignore[assignment]
    module.monitor = monitor  # type: ignore[assignment]


def _calls(code: Code) -> list[Operands]:
    return operator_calls(cast(GraphModule, code))


def _is_ours(module: nn.Module, name: str) -> bool:
    value = getattr(module, name)
    return isinstance(value, Monitor) or isinstance(getattr(value, "__self__", None), Monitor)
