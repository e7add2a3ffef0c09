"""Sinkhorn: is what a region does to its scores a finite Sinkhorn loop, and which?

before: a region between a score product and a value product
after:  AttentionSite with its convention, masks and bias, or the reason why it is none

The region is cut out, promoted to float64 and run on synthetic scores, masks and biases (see probe.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from asapc.ir import Convention, Mask, OutputFactor, Program, Stop
from asapc.operators.masks import HIDDEN_SCORE, MASKED_BELOW
from asapc.passes.branches import spoken
from asapc.passes.cut import (
    PROBE_BATCH,
    ancestors,
    is_bool,
    is_tensor,
    made_alike,
    moved_nodes,
    operator_name,
)
from asapc.passes.decisions import BOUNDS, HUGE
from asapc.passes.early_stop import (
    MANY_EXAMPLES,
    SUMS,
    Crowd,
    Stopping,
    check_stops,
    of_many,
    residuals_cut,
)
from asapc.passes.experiment import (
    STABILISED,
    Experiment,
    Lengths,
    NoFit,
    assigned,
    first_fit,
    once,
    outcome,
    relative_error,
)
from asapc.passes.masks import heads_vary, varies
from asapc.passes.products import Canonical, KeyMask, merged_heads, padding_of, rank_of, same, site_name
from asapc.passes.regions import Region, rooted
from asapc.passes.sinkhorn.low import EmptyExamples, with_low_numbers
from asapc.passes.sinkhorn.probe import (
    HELD,
    NOT_POSITIVE,
    OTHER_SCORES,
    SPREADS,
    Fit,
    Guesses,
    Sample,
    Trials,
    convention_error,
    identify,
    longest_in,
    overflown,
    score_multiplier,
    with_factor,
)
from asapc.passes.sinkhorn.site import AttentionSite, ScoreBias
from asapc.passes.site import Found, Place, Site, Unidentified

aten = torch.ops.aten

MANY_TOKENS = 100
SHARP_MASKED = 25.0
# Standard deviations of scores and of the bias that is added to them, in units of epsilon.
BIASES = ((2.0, 1.0), (1.0, 5.0), (0.0, 25.0), (1.0, 100.0))
SMALL_CONSTANT = 1e-2  # what may stabilise a division is no larger
MOST_SLACK = 700.0  # whose exp a float64 holds
ROWS_ONLY = "not Sinkhorn: rows only, with a mask that differs between queries (causal or windowed)"
MULTIPLIED = "an input multiplies its attention within the loop: mask the scores before it"
SHOWN_QUERIES = "queries that {} hides from the columns' sums have attention: multiply it by that mask"
USED_ELSEWHERE = "an intermediate value of the loop is also used elsewhere"
SOFTMAX = {aten.softmax.int, aten._softmax.default, aten._safe_softmax.default}
MAXIMA = {aten.amax.default, aten.max.dim, aten.max.default}
CLAMPS = {aten.clamp.default, aten.clamp_min.default, aten.maximum.default}


class RegionExperiment(Experiment, Trials):
    """A region as a function of scores [B, H, N, M], masks and biases; heads that are merged with the
    batch count as examples.

    neutral: inputs that hide nothing and add nothing, as the roles of the inputs make them.
    """

    def __init__(self, program: Program, region: Region, precision: torch.dtype = torch.float64) -> None:
        inputs = [region.score.result, *map(Canonical, region.inputs)]
        super().__init__(program.graph, inputs, region.value.map, region.inside, precision=precision)
        self.program, self.region = program, region
        self.entering = [region.score.node, *region.inputs]
        shape = region.score.result.shape
        self.leads, self.tokens = shape[:-2], shape[-2:]
        self.sizes = self.small()
        self.neutral: list[Tensor] = []

    @cached_property
    def rounded(self) -> RegionExperiment:
        """The same in float32, unless the region is in float64."""
        wide = self.region.score.node.meta["val"].dtype == torch.float64
        return self if wide else RegionExperiment(self.program, self.region, torch.float32)

    def size(self, at: Lengths | None = None) -> tuple[int, ...]:
        """Of the scores, at `few` unless told."""
        return self.shape(self.region.score.result, self.few if at is None else at)

    def attention(
        self, scores: Tensor, inputs: Sequence[Tensor] | None = None, at: Lengths | None = None
    ) -> Tensor:
        """[B, H, N, M], with the neutral inputs unless told."""
        at = self.few if at is None else at
        inputs = self.resized(at) if inputs is None else inputs
        given = (x.to(self.cut.precision) if x.is_floating_point() else x for x in (scores, *inputs))
        return self.run([*given], at).reshape(scores.shape)

    def on(self, scores: Tensor, at: Lengths | None = None, mild: bool = False) -> Sample | None:
        a = self.attention(scores, at=at)
        return None if overflown(a) else Sample(scores, a, mild=mild)

    def resized(self, at: Lengths | None = None) -> list[Tensor]:
        """The neutral inputs at another size."""
        at = self.few if at is None else at
        return [
            torch.full(self.cut.shape_of(node, at), value.flatten()[0].item(), dtype=value.dtype)
            for node, value in zip(self.region.inputs, self.neutral, strict=True)
        ]

    def replaced(self, index: int, value: Tensor) -> list[Tensor]:
        """The neutral inputs with another in place of one."""
        inputs = self.resized()
        inputs[index] = value
        return inputs

    def hiding(
        self, hidden: Mapping[int, Tensor], score: float = HIDDEN_SCORE,
        at: Lengths | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """The neutral inputs, of which these hide the tokens outside [n] or [B, n]; by a number that they
        add, if they are no booleans."""
        inputs = self.resized(at)
        for index, active in hidden.items():
            mask = inputs[index]
            inputs[index] = torch.where(active, mask, ~mask if mask.dtype == torch.bool else score)
        return inputs

    def masked(
        self, masks: Masks, active: Tensor | None, at: Lengths | None = None
    ) -> tuple[list[Tensor], dict[str, Any]]:
        """The neutral inputs with masks that hide the tokens outside `active`, and what they keep, as a
        Sample has it; all tokens are shown without either.  active: [n], of queries and keys alike."""
        hidden, kept = {}, {}
        sizes = self.size(at)
        for name, mask, size in zip(KEPT, masks, (sizes[-1], sizes[-2]), strict=True):
            if mask is not None and active is not None:
                hidden[self.region.inputs.index(mask.node)] = active[:size]
                kept[name] = active[:size].expand(sizes[0], -1)
        return self.hiding(hidden, at=at), kept

    def added(self, bias: Tensor) -> Tensor:
        """Over the scores, whose heads may be merged with the batch."""
        dims = self.dims(self.region.score.result, self.few)
        if len(dims) == 3 and bias.shape[:-2] != dims[:1]:
            heads = heads_of(self.region)
            dims = (dims[0] // heads, heads, *dims[1:])
        return bias.expand(dims).reshape(self.size())


def find_sinkhorn(program: Program, places: Sequence[Place]) -> Iterator[Found]:
    """The first region of each place that is a finite loop, or why the likeliest is none."""
    known: dict[object, Known | NoFit] = {}
    return first_of_each(places, lambda region, stops: _examine(program, region, stops, known))


def first_of_each(
    places: Sequence[Place], examine: Callable[[Region, Sequence[Stop]], Site | Unidentified | None]
) -> Iterator[Found]:
    """The first site among the regions of each place, or why the likeliest is none, if that is known."""
    for place in places:
        best: Site | Unidentified | None = None
        for region in place.regions:
            result = examine(region, place.stops)
            if isinstance(result, Site):
                best = result
                break
            best = best or result
        if best is not None:
            yield place.value.node, best


def _examine(
    program: Program, region: Region, stops: Sequence[Stop], known: dict[object, Known | NoFit]
) -> AttentionSite | Unidentified:
    """Run the experiments on one region.  stops: of its loop.  known: of the regions before."""
    shape = region.score.result.shape
    if len(shape) not in (3, 4):
        return Unidentified(f"scores have {len(shape)} dimensions, not [B, H, N, M] or [B*H, N, M]")
    elsewhere = used_outside(region)
    region, loop = _read(program, region, stops, known)
    if isinstance(loop, NoFit) and loop.reason == OTHER_SCORES and same(*shape[-2:]):
        turned = replace(region, score=region.score.turned())  # scores of keys and queries, a turned map
        turned, of_turned = _read(program, turned, stops, known)
        region, loop = (region, loop) if isinstance(of_turned, NoFit) else (turned, of_turned)
    if isinstance(loop, NoFit):
        return Unidentified(str(loop))
    if elsewhere is not None:
        return Unidentified(USED_ELSEWHERE, node=elsewhere)
    fit, (mask, query_mask), bias = loop
    softmax = not program.softmax and any(node.target in SOFTMAX for node in region.inside)
    convention = replace(fit.convention, bias=bias is not None, early_stop=bool(stops))
    if convention.half_steps == 1 and convention.first_side == "row" and softmax:
        return Unidentified("not Sinkhorn: rows only")
    return AttentionSite(
        site_name(program, region.value.node), convention, heads_of(region),
        int(region.score.map.shape[-1]), fit.error, region.score, region.value, mask, region.inside,
        region.inputs, bias, query_mask,
    )  # fmt: skip


Masks = tuple[KeyMask | None, KeyMask | None]
"""Of keys and of queries; one that hides both is there twice."""
KEPT = ("keep", "query_keep")
Loop = tuple[Fit[Convention], Masks, ScoreBias | None]
Known = tuple[tuple[Node, ...], Loop]
"""The loop of a region with these inputs."""


def _read(
    program: Program, region: Region, stops: Sequence[Stop], known: dict[object, Known | NoFit]
) -> tuple[Region, Loop | NoFit]:
    """A region whose inputs hide together or each by itself, whichever is a loop, and its loop; or why
    the former is none."""
    whole = rooted(region, heads_of(region))
    together = outcome(lambda: _identified(program, whole, stops, known))
    if isinstance(together, NoFit) and whole is not region:
        apart = outcome(lambda: _identified(program, region, stops, known))
        return region, together if isinstance(apart, NoFit) and apart.reason != MULTIPLIED else apart
    return whole, together


def _identified(
    program: Program, region: Region, stops: Sequence[Stop], known: dict[object, Known | NoFit]
) -> Loop:
    """What experiments show of a region, or of another that computes the same: the layers of a model are
    examined once, and every one of them is replayed.  Raises NoFit."""
    experiment = RegionExperiment(program, region)
    residuals = residuals_cut(program, stops, experiment.entering).fingerprint() if stops else None
    alike = (  # all that decides the loop
        experiment.cut.fingerprint(), residuals, tuple(stop.threshold for stop in stops),
        region.score.result.order, region.value.map.order, heads_of(region),
        tuple(made_alike(node) for node in region.inputs),
    )  # fmt: skip

    def examined() -> Known:
        fit, masks, bias = run_experiments(experiment)
        if stops:
            _check_stops(experiment, stops, fit.convention, masks)
        return region.inputs, (fit, masks, bias)

    inputs, loop = once(known, alike, examined)
    moved: Loop = moved_nodes(loop, dict(zip(inputs, region.inputs, strict=True)))
    return moved


def run_experiments(
    experiment: RegionExperiment, shown: Mapping[Node, float] = MappingProxyType({})
) -> Loop:
    """The loop without masks, then what every input does, then everything together.  Raises NoFit.

    shown: what inputs that only hide entries hold where they do not; what they hide is for the caller.
    """
    nodes = experiment.region.inputs
    roles = ["band" if node in shown else _input_role(experiment, node) for node in nodes]
    _find_neutral(experiment, roles, shown)
    fit = _without_masks(experiment)
    roles = [
        "bias" if role == "additive" and _adds_more(node) and not _may_hide(experiment, index) else role
        for index, (node, role) in enumerate(zip(nodes, roles, strict=True))
    ]
    masks: Masks = (None, None)
    hiding = [index for index, role in enumerate(roles) if role in ("mask", "additive")]
    if hiding:
        fit, masks = _masked(experiment, fit, hiding)
    adding = [
        index for index, (node, role) in enumerate(zip(nodes, roles, strict=True))
        if role == "bias" or (role == "additive" and _adds_more(node))
    ]  # fmt: skip
    if len(adding) > 1:
        names = " and ".join(spoken(nodes[index]) for index in adding[:2])
        raise NoFit(f"two biases enter the scores ({names})")
    bias = _bias(experiment, adding[0], fit.convention, masks) if adding else None
    return fit, masks, bias


def _without_masks(experiment: RegionExperiment) -> Fit[Convention]:
    """The loop where nothing is hidden or added.  Raises NoFit."""
    try:
        return _plain_loop(experiment)
    except NoFit:
        s = 0.1 * experiment.noise()
        ones = [x + 1 if x.is_floating_point() else x for x in experiment.neutral]
        zero, one = (experiment.attention(s, inputs) for inputs in (None, ones))
        if not (zero > 0).all() and (one > 0).all():
            raise NoFit(MULTIPLIED) from None
        raise


def _plain_loop(experiment: RegionExperiment) -> Fit[Convention]:
    shape, inside = experiment.region.score.result.shape, experiment.region.inside
    first = experiment.attention(experiment.noise())
    if not bool(first.isfinite().all()):
        raise NoFit("the region gives NaN or infinity on random scores")
    trial = experiment.noise()
    tried = experiment.attention(trial)
    check_choice(tried, first)
    try:
        experiment.rough = score_multiplier([Sample(trial, tried)])
    except NoFit as no_fit:
        if no_fit.reason == NOT_POSITIVE and any(node.target in SOFTMAX for node in inside):
            raise NoFit(ROWS_ONLY) from None
        raise
    experiment.bounds = bounds_of(inside)
    most = longest_in(inside)
    fit = experiment.fitted(partial(identify, made=Convention, guesses=guesses_of(inside), most=most))
    heads = experiment.size()[1] if len(shape) == 4 else experiment.size()[0] / PROBE_BATCH
    experiment.check_larger_loops(fit.convention, heads)
    return fit


Way = tuple[int | None, int | None]
"""Which of some masks hides keys, and which hides queries."""


@dataclass(frozen=True)
class _Hidden:
    """The map of scores some of whose tokens are hidden.  kept: [B, n], by every mask."""

    scores: Tensor
    attention: Tensor
    kept: Sequence[Tensor]
    mild: bool = True

    def sample(self, way: Way) -> Sample:
        keep, query_keep = (None if number is None else self.kept[number] for number in way)
        return Sample(self.scores, self.attention, keep, self.mild, query_keep=query_keep)

    def left(self, way: Way) -> float:
        """The most attention that anything hidden has."""
        sample = self.sample(way)
        kept = ((-1, sample.keep), (-2, sample.query_keep))
        lines = ((sample.attention.abs().transpose(axis, -1), x) for axis, x in kept if x is not None)
        return max(float(a.masked_fill(x[:, None, None], 0.0).max()) for a, x in lines)


def _masked(
    experiment: RegionExperiment, fit: Fit[Convention], places: Sequence[int]
) -> tuple[Fit[Convention], Masks]:
    """The loop with an input that hides tokens, by low scores that it adds or as a boolean, or with one
    input for keys and another for queries.  Raises NoFit."""
    region, nodes = experiment.region, [experiment.region.inputs[index] for index in places]
    ways, named = _ways(region, nodes), " and ".join(map(spoken, nodes))
    if not ways:
        raise NoFit(f"two masks enter the scores ({named})")
    first, *others = _hidden(experiment, places)
    if not bool(first.attention.isfinite().all()):
        raise NoFit(f"masking keys through {named} gives NaN or infinity")
    together, ways = ways, [way for way in ways if first.left(way) <= 1e-12]
    if not ways:
        raise NoFit(f"keys masked through {named} still receive attention")
    hides = HIDDEN_SCORE
    for node in (node for node in nodes if node.meta["val"].dtype != torch.bool):
        hides, example = _highest(experiment, places, first), node.meta["example"]
        if bool(((example > hides) & (example <= MASKED_BELOW)).any()):
            raise NoFit(f"keys masked through {named} still receive attention at {MASKED_BELOW:g}")
    every = [first, *(x for x in others if not overflown(x.attention))]
    try:
        fit, way = _masked_fit(experiment, fit.convention, ways, every)
    except NoFit as no_fit:
        if (0, 0) in set(together).difference(ways):
            alone = [replace(x, attention=x.attention * x.kept[0][:, None, :, None]) for x in every]
            without = outcome(lambda: _masked_fit(experiment, fit.convention, [(0, 0)], alone))
            if not isinstance(without, NoFit):
                raise NoFit(SHOWN_QUERIES.format(named)) from None
        raise NoFit(f"with {named} as {'key mask' if len(nodes) == 1 else 'masks'}: {no_fit}") from None
    masks = []
    for number, (index, node) in enumerate(zip(places, nodes, strict=True)):
        neutral, examples = experiment.neutral[index], EmptyExamples(experiment, fit.convention, index)
        additive = neutral.dtype != torch.bool
        if _counts_queries(way):
            empty = examples.beside([place for place in places if place != index], number == way[0])
        else:
            empty = examples.of_scores(hides) if additive else examples.of_mask()
        polarity = None if additive else bool(not neutral.flatten()[0])
        is_bias = additive and _adds_more(node)
        masks.append(KeyMask(node, polarity, _merged(node, region), is_bias, empty, hides))
    of_keys, of_queries = (None if number is None else masks[number] for number in way)
    return fit, (of_keys, of_queries)


def _masked_fit(
    experiment: RegionExperiment, plain: Convention, ways: Sequence[Way], every: Sequence[_Hidden]
) -> tuple[Fit[Convention], Way]:
    """The first way to hide tokens that gives everything observed.  Raises NoFit."""
    mild = every[:1] if len(every[0].kept) == 1 else [x for x in every if x.mild]
    mildest = experiment.samples[: len(experiment.sizes)]

    def fitted(way: Way, power: int | None) -> tuple[Fit[Convention], Way]:
        mask: Mask = "key" if way[1] is None else "query" if way[0] is None else "both"
        loop = replace(plain, mask=mask, output_factor=OutputFactor(shown=power))
        samples, milder = ([x.sample(way) for x in some] for some in (every, mild))
        return with_factor(loop, [*experiment.samples, *samples], [*mildest, *milder]), way

    powers = {way: (None, 1, -1) if _counts_queries(way) else (None,) for way in ways}
    return first_fit(partial(fitted, way, power) for way in ways for power in powers[way])


def _counts_queries(way: Way) -> bool:
    """Whether shown queries have a number of their own, which is not that of the active keys."""
    return way[1] not in (None, way[0])


def _ways(region: Region, nodes: Sequence[Node]) -> list[Way]:
    """The likeliest first.  Queries are hidden by masks of tokens alone, not by those of keys alone."""
    sizes = region.score.result.shape[:-3:-1]
    ways: list[Way] = [(0, None), (0, 0), (None, 0)] if len(nodes) == 1 else [(0, 1), (1, 0)]

    def fits(way: Way) -> bool:
        if way == (0, None) and nodes[0] not in region.roots:  # it broadcasts to the keys
            return True
        queries = way[1] is None or way[0] == way[1] or nodes[way[1]] in region.roots
        pairs = zip(way, sizes, strict=True)
        return queries and all(i is None or same(nodes[i].meta["val"].shape[-1], x) for i, x in pairs)

    return [way for way in ways if fits(way)] if len(nodes) <= 2 else []


def _hidden(experiment: RegionExperiment, places: Sequence[int]) -> Iterator[_Hidden]:
    """Some tokens hidden first; all but one, too, and where there are two masks, those of one alone; and
    others in every example, since what is made of a mask may be made of other examples' too."""
    tokens = [torch.arange(experiment.neutral[index].shape[-1]) for index in places]
    options = [(x % 3 != 1, x == len(x) // 2, *([x >= 0] if len(places) > 1 else [])) for x in tokens]
    tries = [(shown, spread) for shown in itertools.product(*options) for spread in (1.0, SHARP_MASKED)]
    if any(experiment.region.inputs[index] in experiment.region.roots for index in places):
        generator, unlike = torch.Generator().manual_seed(7), []
        for index in places:
            active = torch.rand(experiment.neutral[index].shape, generator=generator) < 0.5
            active[:, 0] = active[0] = True
            active[-1, 1:3] = False
            unlike.append(active)
        tries.append((tuple(unlike), 1.0))
    for shown, spread in tries:
        s = experiment.scores(spread)
        a = experiment.attention(s, experiment.hiding(dict(zip(places, shown, strict=True))))
        kept = [
            x.expand(len(a), -1) if x.dim() == 1 else x.repeat_interleave(len(a) // len(x), 0)
            for x in shown
        ]
        yield _Hidden(s, a, kept, spread == 1.0)


def _bias(experiment: RegionExperiment, index: int, convention: Convention, masks: Masks) -> ScoreBias:
    """What an input adds to the scores, alone and where tokens are hidden.  Raises NoFit."""
    node, hiding = experiment.region.inputs[index], [mask.node for mask in masks if mask is not None]
    coefficient = _bias_coefficient(experiment, index, convention)
    bias = ScoreBias(node, coefficient, _merged(node, experiment.region))
    if node in hiding:
        return bias
    bias = with_low_numbers(experiment, convention, bias)
    if hiding:
        error = _bias_error(experiment, convention, index, coefficient, masks)
        if not error <= HELD:
            raise NoFit(f"with {spoken(hiding[0])} and {spoken(node)} at once: another loop", error)
    return bias


def _bias_coefficient(experiment: RegionExperiment, index: int, convention: Convention) -> float:
    """How much of an input is added to the scores, in units of epsilon, at every size of it.

    A bias of keys alone, which the last half-step on columns removes, is added to scores or products.
    """
    name = experiment.region.inputs[index].name
    probe = experiment.normal(experiment.neutral[index].shape)
    candidates = [1.0, convention.score_multiplier]
    if probe.shape[-2] != 1:
        dense = experiment.added(probe)
        attention = experiment.attention(torch.zeros_like(dense), experiment.replaced(index, probe))
        measured = outcome(lambda: score_multiplier([Sample(dense, attention)]))
        if isinstance(measured, NoFit):
            raise NoFit(f"{name} enters the attention, but not as an additive score bias")
        candidates = [measured]
    error, coefficient = min((_bias_error(experiment, convention, index, x), x) for x in candidates)
    if not error <= HELD:
        raise NoFit(f"with {name} as score bias: another loop", error)
    return coefficient


def _bias_error(
    experiment: RegionExperiment, convention: Convention, index: int, coefficient: float,
    masks: Masks = (None, None),
) -> float:  # fmt: skip
    """Of the convention where so much of an input is added to the scores; at mild ones, of which masks
    hide some tokens, where there are any."""
    inputs, kept = experiment.masked(masks, torch.arange(max(experiment.size()[-2:])) % 3 != 1)
    samples = []
    for spread, strength in BIASES[:1] if kept else BIASES:
        inputs[index] = strength / abs(coefficient) * experiment.normal(inputs[index].shape)
        s = experiment.scores(spread)
        attention = experiment.attention(s, inputs)
        if kept or bool(attention.isfinite().all()):
            added = experiment.added(inputs[index]) * coefficient / convention.score_multiplier
            samples.append(Sample(s + added, attention, **kept))
    return convention_error(convention, samples)


def _check_stops(
    experiment: RegionExperiment, stops: Sequence[Stop], convention: Convention, masks: Masks
) -> None:
    """That no early stop would change anything."""
    region, few = experiment.region, experiment.few
    many = dict.fromkeys(experiment.examples, MANY_EXAMPLES)
    long = assigned((size, MANY_TOKENS) for size in experiment.tokens)

    def feed(units: Tensor, at: Lengths, active: Tensor | None) -> tuple[list[Tensor], Sample]:
        s = units / abs(convention.score_multiplier)
        inputs, kept = experiment.masked(masks, active, at)
        return [experiment.raw(region.score.result, s, at), *inputs], Sample(s, s, **kept)

    entering = experiment.entering
    loop = Stopping(experiment.program, stops, entering, region.inside, convention, experiment.size, feed)
    tokens, places = slice(0, 8), torch.arange(max(experiment.size()[-2:]))
    crowds = [Crowd(few), *of_many(few, many)]
    if long:
        crowds.append(Crowd(few, many | long, (slice(-1, None), ..., tokens, tokens)))
    if masks != (None, None):
        crowds += [Crowd(few, active=places % 3 != 1), Crowd(few, many, active=places < 2)]
    check_stops(loop, crowds)


def check_choice(one: Tensor, other: Tensor) -> None:
    """That plans [*, N, M] of different scores differ also with one query or key.  Raises NoFit."""
    if 1 in one.shape[-2:] and relative_error(one, other) <= STABILISED:
        side = "query" if one.shape[-2] == 1 else "key"
        raise NoFit(f"with one {side} the plan does not depend on the scores: it is kept as it is")


def guesses_of(inside: Collection[Node]) -> Guesses:
    """Numbers in the region that may keep a division from being one by 0, in order, and what else of the
    ways to do so its operators leave open."""
    constants: dict[float, set[str]] = {}
    for node in inside:
        for value in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, float) and 0.0 < value <= SMALL_CONSTANT:
                constants.setdefault(value, set()).add("clamp" if node.target in CLAMPS else "add")
        slack = padding_of(node)  # a row and a column that stay as they are add it to every sum
        for value in () if slack is None else (math.exp(min(slack, MOST_SLACK)), slack):
            if 0.0 < value < math.exp(MOST_SLACK):
                constants.setdefault(value, set()).add("add")
    targets = {node.target for node in inside}
    starts = [
        *(["softmax"] if targets & SOFTMAX else []), "plain",
        *(["row", "matrix", "tensor"] if targets & MAXIMA else []),
    ]  # fmt: skip
    return Guesses(tuple(constants), sorted(set().union(*constants.values())), starts)


def bounds_of(inside: Collection[Node]) -> list[float]:
    """Numbers in the region that scores are bounded by or compared with before its first sum, larger than
    they are here."""
    scores = itertools.takewhile(lambda node: node.target not in SUMS, inside)
    bounds = {
        abs(value) for node in scores if operator_name(node) in BOUNDS or is_bool(node)
        for value in pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(value, int | float) and not isinstance(value, bool)
    }  # fmt: skip
    return sorted(x for x in bounds if SPREADS[-1] < x < HUGE)


def _input_role(experiment: RegionExperiment, node: Node) -> str:
    """mask (bool), additive (float, may hide keys) or bias (float).  Raises NoFit for anything else."""
    queries, keys = experiment.size()[-2:]
    shape, dtype = experiment.cut.shape_of(node, experiment.few), node.meta["val"].dtype
    if not _fits(node, experiment.region):
        raise NoFit(f"the scores do not tell how many heads they have, which {spoken(node)} tells apart")
    if node in experiment.region.roots or (dtype == torch.bool and shape[-1:] == (keys,)):
        return "mask"
    if not dtype.is_floating_point or shape[-2:] not in ((queries, keys), (1, keys)):
        raise NoFit(f"the attention depends on {spoken(node)}, which is neither a mask nor a bias")
    example = node.meta.get("example")
    # Without padding in the example a padding mask is all zero: it must still be known for a mask.
    hides = isinstance(example, Tensor) and bool((example <= MASKED_BELOW).any())
    silent = isinstance(example, Tensor) and not bool(example.any())
    by_row = varies(node, -2) or (len(shape) == 4 and varies(node, -3))
    return "additive" if hides or (not by_row and (silent or shape[-2] == 1)) else "bias"


def _adds_more(node: Node) -> bool:
    """Whether an additive mask also holds finite values, a bias in the same tensor."""
    example = node.meta["example"]
    return bool(((example != 0) & (example > MASKED_BELOW)).any())


def _find_neutral(
    experiment: RegionExperiment, roles: Sequence[str], shown: Mapping[Node, float]
) -> None:
    """Find the neutral inputs; the polarity of a bool mask is found by trying."""
    region = experiment.region
    for node, role in zip(region.inputs, roles, strict=True):
        shape = experiment.cut.shape_of(node, experiment.few)
        dtype = torch.bool if node.meta["val"].dtype == torch.bool else torch.float64
        experiment.neutral.append(torch.full(shape, shown.get(node, 0.0)).to(dtype))
        example = node.meta.get("example")
        if role in ("mask", "additive") and isinstance(example, Tensor):
            if node in region.roots:
                continue  # [B, M] or [B, N]: how it enters is inside
            if varies(node, -2):
                raise NoFit(
                    f"the mask {spoken(node)} differs between queries (causal or windowed), or may on "
                    "other data, which has no transport plan with these marginals"
                )
            sizes = region.score.result.shape
            if heads_vary(node, heads_of(region), sizes[0] if len(sizes) == 4 else None):
                raise NoFit(f"the mask {spoken(node)} differs between heads, or may on other data")
    scores, as_it_is = 0.1 * experiment.noise(), experiment.neutral
    masks = [index for index, role in enumerate(roles) if role == "mask"][:2]

    def turn(turned: Collection[int]) -> tuple[int, bool]:
        """A mask that hides everything gives no attention at all, NaN, or the same to every key; or, by
        low numbers, what no mask gives: then it is seen where it hides some."""
        experiment.neutral = [~x if index in turned else x for index, x in enumerate(as_it_is)]
        gone = all(_left_of_hidden(experiment, index, scores) == 0.0 for index in masks)
        return _informative(experiment, scores), gone

    ways = [some for count in range(len(masks) + 1) for some in itertools.combinations(masks, count)]
    turn(max(ways, key=turn))


def _informative(experiment: RegionExperiment, scores: Tensor) -> int:
    """2 if the attention is positive and follows the scores, 1 if it is positive, else 0."""
    attention = experiment.attention(scores)
    if not bool((attention > 0).all()) or not bool(attention.isfinite().all()):
        return 0
    return 1 if isinstance(outcome(lambda: score_multiplier([Sample(scores, attention)])), NoFit) else 2


def _left_of_hidden(experiment: RegionExperiment, index: int, scores: Tensor) -> float:
    """The most attention that keys have which an input hides, or queries, if it may hide those."""
    active = torch.arange(experiment.neutral[index].shape[-1]) % 3 != 1
    attention = experiment.attention(scores, experiment.hiding({index: active}))
    ways = _ways(experiment.region, [experiment.region.inputs[index]])
    return min(_Hidden(scores, attention, [active[None]]).left(way) for way in ways)


def _may_hide(experiment: RegionExperiment, index: int) -> bool:
    """Whether a low added score hides its key, as in a mask, or is a number like others."""
    zero = torch.zeros(experiment.size(), dtype=torch.float64)
    low = bool((experiment.region.inputs[index].meta["example"] <= MASKED_BELOW).any())
    return low or not _left_of_hidden(experiment, index, zero) > 1e-12


def _highest(experiment: RegionExperiment, places: Sequence[int], lowest: _Hidden) -> float:
    """The highest added score that hides tokens as HIDDEN_SCORE did."""
    hidden = {index: x[0] for index, x in zip(places, lowest.kept, strict=True)}
    for score in (MASKED_BELOW, float(torch.finfo(torch.float16).min)):
        attention = experiment.attention(lowest.scores, experiment.hiding(hidden, score))
        if relative_error(attention, lowest.attention) <= STABILISED:
            return score
    return HIDDEN_SCORE


def used_outside(region: Region, besides: Iterable[Node] = ()) -> Node | None:
    """A value of the loop, other than the attention itself, that something else reads.

    besides: what may read it besides the region.
    """
    inside, live = {*region.inside, *besides}, ancestors(region.attention.graph.output_node())
    for node in (region.score.node, *region.inside):
        if node is region.attention:
            continue
        for user in node.users:
            if user.op == "output" or (user in live and user not in inside and is_tensor(user)):
                return node
    return None


def heads_of(region: Region) -> int:
    """H: the second of four dimensions, or what a view merged with the batch, else 1."""
    shape = region.score.result.shape
    if len(shape) == 4:
        return int(shape[1])
    heads = {merged_heads(operand) for operand in (region.score.left, region.score.right)}
    return heads.pop() if len(heads) == 1 else 1


def _fits(node: Node, region: Region) -> bool:
    """Whether an input's leading axes are those of scores [B * H, N, M], of [B, H, N, M], or 1."""
    shape, leading, heads = region.score.result.shape, node.meta["val"].shape[:-2], heads_of(region)
    if len(shape) != 3 or not leading:
        return True
    *batch, last = leading
    wanted = (1, heads) if batch else (1, heads, shape[0])
    alone = all(same(size, 1) or same(size * heads, shape[0]) for size in batch)
    return len(batch) <= 1 and alone and any(same(last, size) for size in wanted)


def _merged(node: Node, region: Region) -> bool:
    """Whether a mask's leading dimension is batch times heads, as that of scores or of a value that it
    feeds with three dimensions."""
    shape = region.score.result.shape
    if len(shape) == 3:
        return rank_of(node) in (2, 3) and same(node.meta["val"].shape[0], shape[0])
    if rank_of(node) == 2 and same(node.meta["val"].shape[0], shape[0]):  # [B, M]
        return False
    return any(rank_of(user) == 3 for user in node.users if user in region.inside)
