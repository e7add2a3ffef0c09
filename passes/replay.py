"""Replay: a site's operator against the teacher's own code, on the given data and beyond it.

On every batch the operator, as it will run, is held against the map that the teacher computes, or, where
that is in half precision and far from itself, against the teacher's own code in float64. Data may
be harmless: a loop that has converged there is any longer loop. So the teacher's part of the graph is
cut out in float64 and both are run again where the data does not go: queries a quarter and four times as
long, those of a Sinkhorn layer longer still until rows are nearly one-hot; fewer tokens; all keys but one
masked, and all of them, in the model's own precision. Of batches of the same sizes that is done on the
first, and of layers whose parts are the same graph with the same constants, too: the others are tried at
the sharpest queries alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import torch
from annotated_types import Ge
from pydantic import BeforeValidator, Strict, TypeAdapter
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from asapc.device import settle
from asapc.formats.json_text import plain
from asapc.inputs.data import Batch
from asapc.inputs.settings import NonNegative
from asapc.ir import Convention, PlanConvention, Program, SiteTensors
from asapc.operators.banded import BandedConvention, in_band
from asapc.operators.masks import HIDDEN_SCORE, MASKED_BELOW, hidden_queries
from asapc.operators.sinkhorn import score_matrix
from asapc.passes.branches import spoken
from asapc.passes.cut import HALVES, Cut, Part, descendants, evaluate, line_of
from asapc.passes.decisions import HUGE, Change, Decisions, Sides, both_sides, makes_up_for
from asapc.passes.experiment import one_thread
from asapc.passes.lift import beside
from asapc.passes.plan.hidden import may_hide
from asapc.passes.price import selected
from asapc.passes.site import Site
from asapc.program.calls import SiteFunction, site_function
from asapc.program.runner import Tap
from asapc.terminal.progress import SILENT, Progress

TOLERANCE = 1e-4  # of maps, relative to the largest entry
FAR = {  # as far as single precision still tells scores apart
    "queries / 1000": Change(1e-3), "queries x 1e5": Change(1e5), "keys + 1e5": Change(shift=1e5),
}  # fmt: skip
AS_GIVEN = Change()
SCALES = {"queries / 4": Change(0.25), "as given, in float64": AS_GIVEN, "queries x 4": Change(4.0)}
BY_SCORES = (Convention, PlanConvention, BandedConvention)
SHARPER = tuple(float(1 << power) for power in range(4, 13))
ONE_HOT = 0.9  # mean largest entry of a softmax of the scores at which rows are nearly one-hot
LOWEST = torch.finfo(torch.float32).min  # which all scores are lost beside
EXAMPLES = 2  # of each batch, beyond the data
SMALL = 1 << 22  # entries of a batch's maps up to which one thread does what is beyond the data
ENTRIES = 1 << 18  # of a map beyond the data: of larger ones, one example
LONG = 128  # tokens of the runs with other scores than the data's
FEW = 12  # tokens of the many runs that look for thresholds
MANY = 1024  # tokens, over which what is cut off a map's entries sums up,
MODERATE = 1e3  # of scores whose errors are no rounding
FEW_ENTRIES = 1 << 12  # of a map: of larger ones, fewer runs and one example
BEYOND = (1e8, 1e9, 1e10)  # scales at which only what takes no differences of scores still is right
ROUNDED = 10.0  # times the error of single precision on the same scores, which nobody can hold


Error = Annotated[float, Strict(), Ge(0), BeforeValidator(lambda x: math.inf if x is None else x)]


@dataclass
class Replay:
    """Largest errors of one site by what was tried, relative to the largest entry of each map.

    rounding: where the data shows an error, how far the teacher is from its own code in float64 there.
    gradient: largest error of its gradients where keys are hidden.
    """

    errors: dict[str, Error] = field(default_factory=dict)
    rounding: Error = 0.0
    gradient: Error = 0.0

    def note(self, tried: str, error: float) -> None:
        error = math.inf if error != error else error
        self.errors[tried] = max(error, self.errors.get(tried, 0.0))

    @property
    def worst(self) -> tuple[str, float]:
        """What was tried where the error is largest, and the error."""
        return max(self.errors.items(), key=lambda pair: pair[1])


@dataclass(frozen=True)
class Replayed:
    """What was found at every site, and of the whole model with the sites that replay as operators, None
    where that was not tried.  of: a digest of all that it depends on."""

    of: str
    sites: dict[str, Replay]
    output_error: NonNegative | None = None
    gradient: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Numbers that are not finite as None."""
        document: dict[str, Any] = plain(asdict(self))
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Replayed | None:
        """Inverse of to_json; None for anything else."""
        try:
            return TypeAdapter(cls).validate_python(dict(document))
        except (TypeError, ValueError):
            return None


def replay(
    model: nn.Module | None,
    programs: Sequence[Program],
    matched: Sequence[Sequence[Site]],
    batches: Sequence[Batch],
    progress: Progress = SILENT,
) -> dict[str, Replay]:
    """Every matched site by name.  matched: the sites of each program."""
    matched = [[site.whole for site in its_sites] for its_sites in matched]
    sites = {site.name: (program, site) for program, its_sites in zip(programs, matched, strict=True)
             for site in its_sites}  # fmt: skip
    replays = {name: Replay() for name in sites}
    if not sites:
        return replays
    parts = {name: site.part() for name, (_, site) in sites.items()}
    values: dict[str, dict[Node, Tensor]] = {}
    lifted = []
    for program, its_sites in zip(programs, matched, strict=True):
        both, nodes = beside(program, its_sites)
        _watch(both.graph, nodes, {site.name: parts[site.name] for site in its_sites}, values)
        settle(both.graph, batches[0].device)  # a site's own tensors
        lifted.append(both)
    tap = Tap(model, lifted, list(sites))
    kernels = {name: site_function(lifted, name) for name in sites}
    references = {name: site_function(lifted, name, plain=True) for name in sites}
    cuts = {
        name: Cut(program.graph, parts[name].inputs, parts[name].output, parts[name].inside)
        for name, (program, _) in sites.items()
    }
    kinds = {
        name: (cut.fingerprint(), sites[name][1].convention,
               makes_up_for(descendants([parts[name].output])) is None)
        for name, cut in cuts.items()
    }  # fmt: skip
    tried_on: set[tuple[object, ...]] = set()
    kinds_gradient: dict[object, float] = {}

    def observed() -> Iterator[tuple[str, dict[Node, Tensor], SiteTensors]]:
        for batch in batches:
            seen = tap(batch)[1]
            theirs = [values.pop(name) for name in sites]  # not held any longer than they are needed
            yield from zip(sites, theirs, seen, strict=True)

    for name, given, t in progress.track(observed(), "replaying", len(batches) * len(sites)):
        site = sites[name][1]
        expected = _canonical(given[parts[name].output], parts[name])
        beyond = _Beyond(cuts[name], sites[name][0].graph, site, given, t, references[name])
        if expected.dtype in HALVES:
            expected, t = beyond.exact(), _single(t)
        if not bool(site.weighed(expected).isfinite().all()):
            replays[name].note("the data", math.inf)
            replays[name].rounding = math.inf
            continue
        with torch.no_grad():
            ours = _operated(site, kernels[name], t, expected)
        replays[name].note("the data", _difference(site, ours, expected))
        if not replays[name].errors["the data"] <= TOLERANCE:
            replays[name].rounding = max(replays[name].rounding, beyond.rounding(expected))
        sizes = tuple(given[node].shape for node in parts[name].inputs)
        if (name, sizes) in tried_on:
            continue
        alike = (kinds[name], sizes) in tried_on
        small = t.q.shape[:3].numel() * t.k.shape[2] <= SMALL
        with one_thread() if small else contextlib.nullcontext():
            beyond_data = list(beyond.errors(sharpest_alone=alike))
            if not alike:
                kinds_gradient[kinds[name]] = beyond.gradient_error(kernels[name])
        for tried, error in beyond_data:
            replays[name].note(tried, error)
        replays[name].gradient = max(replays[name].gradient, kinds_gradient[kinds[name]])
        tried_on.add((name, sizes))
        if beyond_data and all(error <= TOLERANCE for _, error in beyond_data):
            tried_on.add((kinds[name], sizes))  # where one fails, others may yet hold, or fail too
    return replays


def _watch(
    graph: GraphModule, nodes: Mapping[Node, Node], parts: Mapping[str, Part],
    into: dict[str, dict[Node, Tensor]],
) -> None:  # fmt: skip
    """Have a graph note, by site, what enters and leaves its part while the teacher's own code runs.

    nodes: of the graph, by those that the parts name.
    """
    for site, part in parts.items():
        for node in {*part.inputs, part.output}:
            def record(value: Tensor, site: str = site, node: Node = node) -> None:
                into.setdefault(site, {})[node] = value.detach()

            after = nodes[node]
            while after.next.op == "placeholder":
                after = after.next
            with graph.graph.inserting_after(after):
                graph.graph.call_function(record, (nodes[node],))
    graph.recompile()


class _Beyond:
    """One site on one batch, changed in ways that the data does not show."""

    def __init__(
        self, cut: Cut, graph: GraphModule, site: Site, values: Mapping[Node, Tensor], seen: SiteTensors,
        reference: SiteFunction,
    ) -> None:  # fmt: skip
        self.cut, self.graph, self.site, self.part = cut, graph, site, site.part()
        self.seen, self.reference, self._given = seen, reference, values
        self.sizes = self.cut.lengths(_sizes(self.part.inputs, values))
        self.heads = seen.q.shape[1]

    @cached_property
    def values(self) -> Mapping[Node, Tensor]:
        """In float64, made when they are needed: they are as large as all else that is held here."""
        return {
            node: value.to(self.cut.precision) if value.is_floating_point() else value
            for node, value in self._given.items()
        }

    def errors(self, sharpest_alone: bool) -> Iterable[tuple[str, float]]:
        """What was tried, and the error.  sharpest_alone: only where rows are nearly one-hot, or, in
        layers of which that cannot be said, at queries four times as long."""
        whole = self._with_examples()
        few = self._with_tokens(whole, lambda length: min(LONG, length))
        if sharpest_alone:
            one_hot = next((scale for scale, is_one in self._sharper(few) if is_one), None)
            tried = "queries x 4" if one_hot is None else "rows nearly one-hot"
            error = self._error(few, SCALES["queries x 4"] if one_hot is None else Change(one_hot))
            if error is not None:
                yield tried, error
            return
        for tried, change in SCALES.items():
            error = self._error(whole if change == AS_GIVEN else few, change)
            if error is not None:
                yield tried, error
        others: dict[str, float | None] = {}
        for scale, one_hot in self._sharper(few):
            error = self._error(few, Change(scale))
            if error is None:
                break  # the teacher itself is not finite here
            others["sharper queries"] = max(error, others.get("sharper queries") or 0.0)
            if one_hot:
                others["rows nearly one-hot"] = error
        small = self._with_tokens(few, lambda length: min(FEW, length))
        yield from self._beyond_thresholds(small)
        yield from self._made_up_for(small)
        others |= {tried: self._robust_error(small, change) for tried, change in FAR.items()}
        fewer = self._with_tokens(few, lambda length: max(2, length * 2 // 3))
        if fewer != few:
            others["fewer tokens"] = self._error(fewer)
        keys = evaluate(self.part.keys, few)
        if self.part.masks and keys > 1:
            others["all but one key masked"] = self._error(few, active=[keys // 2])
        by_scores = isinstance(self.site.convention, BY_SCORES)
        if self.part.masks and self.site.takes_empty:
            own = self._in_own_precision() if by_scores else self
            others["no key active"] = own._error(few, active=[])
        if self.part.masks and not by_scores:
            others["some keys masked, others far below them"] = self._robust_error(
                few, Change(HUGE), [key for key in range(keys) if key % 3 != 1]
            )
        yield from ((tried, error) for tried, error in others.items() if error is not None)

    def gradient_error(self, kernel: SiteFunction) -> float:
        """How far gradients are from those of the teacher's code where some keys are hidden, relative to
        their largest entry; 0 where nothing hides keys, or its code has no gradient there."""
        part, scored = self.part, self.seen.scored
        if not (part.masks or (scored and may_hide(part.inputs[0]))):
            return 0.0
        own = self._in_own_precision()
        sizes = self._with_tokens(self._with_examples(), lambda length: min(FEW, length))
        low_scores = {HIDDEN_SCORE, LOWEST} if scored or None in dict(part.masks).values() else {LOWEST}
        return max(own._gradient_error(kernel, sizes, low) for low in low_scores)

    def _gradient_error(self, kernel: SiteFunction, sizes: dict[Any, int], low: float) -> float:
        m = evaluate(self.part.keys, sizes)
        active = [key for key in range(m) if key % 3 != 1]
        tensors, t = self._inputs(sizes, AS_GIVEN), self._tensors(sizes)
        masks = dict(self.part.masks)
        if masks:
            t, tensors = self._masked(t, active), self._with_hidden(tensors, active, low)
        else:
            low = -low if self._of_costs else low
            others = torch.tensor([key not in active for key in range(m)], device=t.q.device)
            tensors[0] = tensors[0].masked_fill(others, low)
            t = replace(t, q=t.q.masked_fill(others, low))
        t = t if self.cut.precision == torch.float64 else _single(t, (torch.float64,))
        pairs = [
            (theirs.requires_grad_(), ours.requires_grad_())
            for node, theirs, ours in zip(self.part.inputs, tensors, (t.q, t.k), strict=False)
            if node not in masks and _alike(theirs, ours)
        ]
        expected = _canonical(self.cut.differentiable(tensors, sizes), self.part)
        if not pairs or not expected.requires_grad or not bool(expected.isfinite().all()):
            return 0.0
        cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(expected)
        theirs = torch.autograd.grad(expected, [x for x, _ in pairs], cotangent, allow_unused=True)
        try:
            with torch.enable_grad():
                result = _operated(self.site, kernel, t, expected)
            ours = torch.autograd.grad(result, [x for _, x in pairs], cotangent, allow_unused=True)
        except (RuntimeError, NotImplementedError):  # no gradient at all, which is said elsewhere
            return 0.0
        return max(
            (_sorted_difference(x, y) for x, y in zip(theirs, ours, strict=True) if x is not None),
            default=0.0,
        )

    def rounding(self, given: Tensor) -> float:
        """The difference between what the teacher gave on the data and its own code in float64."""
        return _difference(self.site, given, self.exact())

    def exact(self) -> Tensor:
        """What the teacher's own code gives in float64 on the data."""
        tensors = [self._input(node, self.sizes) for node in self.part.inputs]
        return _canonical(self.cut.run(tensors, self.sizes), self.part)

    def _sharper(self, sizes: dict[Any, int]) -> Iterator[tuple[float, bool]]:
        """Growing scales of a Sinkhorn layer's queries, to the first at which a softmax of the scores is
        nearly one-hot, and whether it is."""
        convention = self.site.convention
        if not isinstance(convention, BY_SCORES):
            return
        t = self._tensors(sizes)
        scores = score_matrix(t.q, t.k, t.keep, None, convention.score_multiplier)
        if isinstance(convention, BandedConvention):
            tokens = t.q.shape[2], t.k.shape[2]
            shown = in_band(tokens[0], tokens[1], convention.low, convention.high, scores)
            scores = scores.masked_fill(~shown, -math.inf)
        for scale in SHARPER:
            bias = 0.0 if t.bias is None else t.bias.detach()
            share = float(torch.softmax(scores * scale + bias, -1).amax(-1).nanmean().detach())
            yield scale, share >= ONE_HOT
            if share >= ONE_HOT:
                return

    def _in_own_precision(self) -> _Beyond:
        """The same in float32, unless the teacher has float64: rounding beside the numbers that hide keys
        decides what an example without any gives."""
        if any(node.meta["val"].dtype == torch.float64 for node in self.part.inputs):
            return self
        part = self.part
        cut = Cut(self.graph, part.inputs, part.output, part.inside, precision=torch.float32)
        return _Beyond(cut, self.graph, self.site, self._given, self.seen, self.reference)

    def _with_examples(self) -> dict[Any, int]:
        """Sizes with few examples, where their number is free."""
        q, k = self.seen.q, self.seen.k
        most = 1 if self.heads * q.shape[2] * k.shape[2] > ENTRIES else EXAMPLES
        return self._shrunk(self.sizes, self.part.batch, min(most, q.shape[0]))

    def _with_tokens(self, sizes: dict[Any, int], count: Callable[[int], int]) -> dict[Any, int]:
        """Sizes with as many tokens of what there are, where their number is free."""
        if self.seen.log_mu is not None or self.seen.log_nu is not None:
            return sizes  # marginals are those of all the tokens
        for size in (self.part.queries, self.part.keys):
            sizes = self._shrunk(sizes, size, count(evaluate(size, sizes)))
        return sizes

    def _beyond_thresholds(self, sizes: dict[Any, int]) -> Iterator[tuple[str, float]]:
        """The errors on both sides of everything that the part decides by its scores."""
        decisions = Decisions(self.cut.module, 1 if self.seen.scored else 2)
        if not decisions.nodes:
            return
        n, m = (evaluate(size, sizes) for size in (self.part.queries, self.part.keys))
        large = self.heads * n * m > FEW_ENTRIES
        sizes = self._shrunk(sizes, self.part.batch, 1) if large else sizes

        def look(change: Change) -> Sides:
            self.cut.run(self._inputs(sizes, change), sizes, decisions)
            return decisions.taken()

        longest = MANY if isinstance(self.part.keys, torch.SymInt) else m
        summed = max(1.0, longest / evaluate(self.part.keys, sizes))

        def judge(change: Change) -> float | None:
            error = self._robust_error(sizes, change)
            return error if error is None or max(map(abs, change)) > MODERATE else error * summed

        for node, error in both_sides(decisions, look, judge, large):
            yield f"scores on the other side of {spoken(node)}", math.inf if error is None else error

    @property
    def _of_costs(self) -> bool:
        convention = self.site.convention
        return isinstance(convention, PlanConvention) and convention.score_multiplier < 0

    def _made_up_for(self, sizes: dict[Any, int]) -> Iterator[tuple[str, float]]:
        """Whether sharp scores give NaN, of which code behind the part makes numbers: the operator has
        the plan there."""
        maker = makes_up_for(descendants([self.part.output]))
        if maker is None:
            return
        own, every = self._in_own_precision(), [*range(evaluate(self.part.keys, sizes))]
        drawn = torch.Generator()

        def finite(change: Change, low: bool = False) -> Tensor:
            tensors = own._with_hidden(own._inputs(sizes, change), every)
            if self.seen.scored:  # in which masks may be
                noise = torch.randn(tensors[0].shape, generator=drawn.manual_seed(0))
                tensors[0] = (noise * change.scale).to(tensors[0])
            if low:
                tensors[0][..., ::3] = math.inf if self._of_costs else -math.inf
            return _canonical(own.cut.run(tensors, sizes), self.part).isfinite()

        before, *after = (finite(Change(10.0**power)) for power in range(7))
        if self.seen.scored and may_hide(self.part.inputs[0]):  # some keys hidden by -inf
            shown = torch.arange(before.shape[-1]) % 3 != 0
            after.append(finite(AS_GIVEN, low=True) | ~shown)
        if any(bool((before & ~now).any()) for now in after):
            yield f"scores of which {spoken(maker)} sees NaN", math.inf

    def _robust_error(
        self, sizes: dict[Any, int], change: Change, active: list[int] | None = None
    ) -> float | None:
        """The relative error; None also where nobody can tell in single precision."""
        error = self._error(sizes, change, active)
        if error is None or error <= TOLERANCE:
            return error
        own = self._own_rounding(sizes, change, active)
        if max(map(abs, change)) > HUGE:  # there one scale may be lucky
            own = max(own, *(self._own_rounding(sizes, Change(scale), active) for scale in BEYOND))
            own = own if own <= TOLERANCE else math.inf
        return None if error <= ROUNDED * own else error

    def _own_rounding(self, sizes: dict[Any, int], change: Change, active: list[int] | None) -> float:
        """How far the operator in single precision is from itself; infinite where it is not finite."""
        t = self._masked(self._tensors(sizes, change), active)
        with torch.no_grad():
            exact, single = (
                self.reference(x, x.v if self.site.takes_values else None)
                for x in (t, _single(t, (torch.float64,)))
            )
        error = _difference(self.site, single, exact)
        return math.inf if error != error else error

    def _shrunk(self, sizes: dict[Any, int], size: Any, to: int) -> dict[Any, int]:
        """Sizes in which a dynamic one, or the only symbol of a product, is smaller."""
        line = line_of(size)
        if line is None or line.more or (line.factor != 1 and size is not self.part.batch):
            return sizes  # a length that is computed from another: what becomes of it is not known
        shrunk = {**sizes, line.symbol: min(to, sizes[line.symbol])}
        parts = self.part.batch, self.part.queries, self.part.keys  # n - 8 queries may be the last ones
        return shrunk if all(evaluate(part, shrunk) > 0 for part in parts) else sizes

    def _error(
        self, sizes: dict[Any, int], change: Change = AS_GIVEN, active: list[int] | None = None
    ) -> float | None:
        """The relative error; None where the teacher's own code is not finite.  active: the keys that are
        not masked, those of the data by default."""
        tensors, t = self._inputs(sizes, change), self._masked(self._tensors(sizes, change), active)
        if active is not None:
            tensors = self._with_hidden(tensors, active)
        theirs = _canonical(self.cut.run(tensors, sizes), self.part)
        if not bool(self.site.weighed(theirs).isfinite().all()):
            return None
        with torch.no_grad():
            ours = _operated(self.site, self.reference, t, theirs)
        if active == [] and (times := self._multiplied(tensors, sizes)) is not None:
            ours, theirs = ours * times, theirs * times
        return _difference(self.site, ours, theirs)

    def _multiplied(self, tensors: list[Tensor], sizes: dict[Any, int]) -> Tensor | None:
        """What the code multiplies the output by, None where it does not: the number of active keys makes
        nothing of whatever a loop gives without any."""
        output = self.part.output
        (user, *others) = output.users or (None,)
        if others or user is None or user.target is not torch.ops.aten.mul.Tensor:
            return None
        operands = [node for node in user.all_input_nodes if node is not output]
        if len(operands) != 1 or self.part.order is not None:
            return None
        try:
            times = Cut(self.graph, self.part.inputs, operands[0], self.part.inside).run(tensors, sizes)
        except Exception:  # it is the user's code, and may need more than what enters the loop
            return None
        return times if bool(times.isfinite().all()) else None

    def _with_hidden(
        self, tensors: list[Tensor], active: list[int], low: float | None = None
    ) -> list[Tensor]:
        """The inputs, with masks that hide all but the active keys.  low: as _all_but takes it."""
        hidden = dict(self.part.masks)
        return [
            _all_but(value, active, hidden[node], low) if node in hidden else value
            for node, value in zip(self.part.inputs, tensors, strict=True)
        ]

    def _masked(self, t: SiteTensors, active: list[int] | None) -> SiteTensors:
        if active is None:
            return t
        only, queries = (_shown(active, x.shape[2], x.device).expand(len(x), -1) for x in (t.k, t.q))
        hides, bias = self.site.convention.mask, t.bias
        keep = None if hides == "query" else self.site.opened(only)
        if hides in ("query", "both"):
            shown = queries if keep is None or len(self.part.masks) > 1 else keep
            own, hidden = self._own_bias(t), hidden_queries(shown)
            bias = hidden if own is None else own + hidden
        return replace(t, keep=keep, bias=bias, query_keep=None if t.query_keep is None else queries)

    def _own_bias(self, t: SiteTensors) -> Tensor | None:
        """What the code adds to the scores in units of epsilon, before any query is hidden."""
        bias = getattr(self.site, "bias", None)
        if bias is None:
            return None
        value = self.values[bias.node]
        if bias.merged and value.dim() == 3:
            value = value.unflatten(0, (-1, t.q.shape[1]))
        sizes = (*t.q.shape[:3], t.k.shape[2])[4 - value.dim():]
        return bias.coefficient * value[tuple(slice(0, size) for size in sizes)].to(t.q.dtype)

    def _inputs(self, sizes: dict[Any, int], change: Change) -> list[Tensor]:
        tensors = [self._input(node, sizes) for node in self.part.inputs]
        for place, (scale, shift) in enumerate(self._parts(change)):
            tensors[place] = self.site.scaled(tensors[place], scale, shift)
        return tensors

    def _parts(self, change: Change) -> tuple[Change, ...]:
        """Of queries and keys, or of scores.  Keys that are shifted alike shift each row of scores."""
        if self.seen.scored:
            return (Change(change.scale, min(change.shift, self.site.largest_shift)),)
        if isinstance(self.site.convention, BY_SCORES):
            return Change(change.scale), Change(shift=change.shift)
        half = Change(math.copysign(abs(change.scale) ** 0.5, change.scale), change.shift)
        return half, half

    def _input(self, node: Node, sizes: dict[Any, int]) -> Tensor:
        shape = self.cut.shape_of(node, sizes)
        return self.values[node][tuple(slice(0, length) for length in shape)].contiguous()

    def _tensors(self, sizes: dict[Any, int], change: Change = AS_GIVEN) -> SiteTensors:
        t = self.seen
        batch = evaluate(self.part.batch, sizes)
        if t.q.shape[0] * self.heads == evaluate(self.part.batch, self.sizes) and self.heads > 1:
            batch //= self.heads  # heads are merged into the batch
        n, m = (evaluate(size, sizes) for size in (self.part.queries, self.part.keys))
        t = selected(t, self._examples(batch, sizes), *map(torch.arange, (n, m)))
        t = _mapped(t, lambda x: x.double() if x.is_floating_point() else x)
        of_q, of_k = (*self._parts(change), AS_GIVEN)[:2]
        return replace(t, q=self.site.moved(t, *of_q), k=t.k * of_k.scale + of_k.shift)

    def _examples(self, batch: int, sizes: dict[Any, int]) -> Tensor:
        """Which of all examples are left at these sizes: not the first where several axes hold them, as
        in [2, B, N, M] of a stack, of which B is smaller."""
        shape = self.part.inputs[0].meta["val"].shape[:-2]
        whole, left = ([evaluate(size, of) for size in shape] for of in (self.sizes, sizes))
        every = torch.arange(math.prod(whole))
        if len(every) != self.seen.q.shape[0] or math.prod(left) != batch:
            return torch.arange(batch)
        return every.view(whole)[tuple(slice(0, size) for size in left)].flatten()


def _operated(site: Site, call: SiteFunction, t: SiteTensors, expected: Tensor) -> Tensor:
    """What the site's call gives, as what is expected is laid out; it may have more columns of values."""
    values = None if not site.takes_values or t.v is None else t.v[..., : expected.shape[-1]]
    return site.completed(call(t, values), t).reshape(expected.shape)


def _sizes(nodes: Sequence[Node], values: Mapping[Node, Tensor]) -> dict[Any, int]:
    """What the dynamic sizes of the nodes are on a batch."""
    found: dict[Any, int] = {}
    for node in nodes:
        for size, length in zip(node.meta["val"].shape, values[node].shape, strict=True):
            line = line_of(size)
            if line is not None:  # also of batch times heads, and of tokens and a dustbin
                found.setdefault(line.symbol, (int(length) - line.more) // line.factor)
    return found


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether tensors have the same entries, in whatever order."""
    if one.numel() != other.numel() or not one.is_floating_point():
        return False
    return torch.equal(*(x.detach().double().flatten().sort().values for x in (one, other)))


def _sorted_difference(expected: Tensor, found: Tensor | None) -> float:
    """Of the sorted entries, relative to the largest: a lower bound, whatever the layouts are."""
    one = expected.double().flatten().sort().values
    if not one.numel() or not bool(one.isfinite().all()):
        return 0.0
    other = torch.zeros_like(one) if found is None else found.double().flatten().sort().values
    error = float((one - other).abs().max()) / max(float(one.abs().max()), 1e-30)
    return math.inf if error != error else error


def _shown(active: list[int], count: int, device: torch.device) -> Tensor:
    """[count], True at these tokens; of fewer than there are, counting begins again."""
    shown = torch.zeros(count, dtype=torch.bool, device=device)
    shown[[place % max(1, count) for place in active]] = True
    return shown


def _all_but(mask: Tensor, active: list[int], hidden: bool | None, low: float | None = None) -> Tensor:
    """The mask with every key but these hidden.  low: by a mask of scores."""
    others = ~_shown(active, mask.shape[-1], mask.device)
    if hidden is None:
        shown = torch.where(mask <= MASKED_BELOW, 0.0, mask)
        low = (HIDDEN_SCORE if active else LOWEST) if low is None else low
        return torch.where(others, low, shown)
    return torch.where(others, hidden, not hidden).expand(mask.shape).contiguous()


def _canonical(value: Tensor, part: Part) -> Tensor:
    return value if part.order is None else value.permute(part.order)


def _single(t: SiteTensors, others: tuple[torch.dtype, ...] = HALVES) -> SiteTensors:
    """Single precision in place of others."""
    return _mapped(t, lambda x: x.float() if x.dtype in others else x)


def _mapped(t: SiteTensors, change: Callable[[Tensor], Tensor]) -> SiteTensors:
    tensors = {name: change(x) for name, x in vars(t).items() if isinstance(x, Tensor)}
    return replace(t, **tensors)  # type: ignore[arg-type]


def _difference(site: Site, ours: Tensor, expected: Tensor) -> float:
    if not ours.numel():
        return 0.0
    ours, expected = site.weighed(ours), site.weighed(expected)
    scale = float(expected.abs().max())
    return float((ours.double() - expected.double()).abs().max()) / max(scale, 1e-30)
