"""Sinkhorn: is what a region does to its scores a finite Sinkhorn loop, and which?

before: a region between a score product and a value product
after:  AttentionSite with its convention, masks and bias, or the reason why it is none

The region is cut out, promoted to float64 and run on synthetic scores, masks and biases (see probe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from asapc.ir import Convention, Program, Stop
from asapc.operators.masks import HIDDEN_SCORE, MASKED_BELOW
from asapc.passes.branches import spoken
from asapc.passes.cut import (
    PROBE_BATCH,
    PROBE_LENGTHS,
    descendants,
    is_tensor,
    made_alike,
    moved_nodes,
)
from asapc.passes.early_stop import (
    MANY_EXAMPLES,
    Crowd,
    Stopping,
    of_many,
    residuals_cut,
    what_a_stop_changes,
)
from asapc.passes.experiment import (
    STABILISED,
    Experiment,
    NoFit,
    assigned,
    larger_sizes,
    outcome,
    relative_error,
)
from asapc.passes.masks import heads_vary, varies
from asapc.passes.products import Canonical, KeyMask, merged_heads, rank_of, same, site_name
from asapc.passes.regions import Region
from asapc.passes.sinkhorn.empty import EmptyExamples
from asapc.passes.sinkhorn.hard import with_low_numbers
from asapc.passes.sinkhorn.probe import (
    HELD,
    Fit,
    Guesses,
    Sample,
    attention_of,
    convention_error,
    drawings,
    identify,
    overflown,
    score_multiplier,
    separated,
    with_factor,
)
from asapc.passes.sinkhorn.roots import rooted
from asapc.passes.sinkhorn.site import AttentionSite, ScoreBias
from asapc.passes.site import Found, Place, Site, Unidentified

aten = torch.ops.aten

LARGE = 64 * 64
MANY_TOKENS = 100
SHARP_MASKED = 25.0
# Standard deviations of scores and of the bias that is added to them, in units of epsilon.
BIASES = ((2.0, 1.0), (1.0, 5.0), (0.0, 25.0), (1.0, 100.0))
SMALL_CONSTANT = 1e-2  # what may stabilise a division is smaller
ROWS_ONLY = "not Sinkhorn: rows only, with a mask that differs between queries (causal or windowed)"
MULTIPLIED = "an input multiplies its attention within the loop: mask the scores before it"
USED_ELSEWHERE = "an intermediate value of the loop is also used elsewhere"
SOFTMAX = {aten.softmax.int, aten._softmax.default, aten._safe_softmax.default}
MAXIMA = {aten.amax.default, aten.max.dim, aten.max.default}
CLAMPS = {aten.clamp.default, aten.clamp_min.default, aten.maximum.default}


class RegionExperiment(Experiment):
    """A region as a function of scores, masks and biases."""

    def __init__(
        self, program: Program, region: Region, precision: torch.dtype = torch.float64
    ) -> None:
        inputs = [region.score.result, *map(Canonical, region.inputs)]
        output = Canonical(region.attention, region.value.left_order)
        super().__init__(program.graph, inputs, output, region.inside, precision=precision)
        self.program, self.region = program, region

    @cached_property
    def own(self) -> RegionExperiment:
        """The same in float32, unless the region is in float64."""
        wide = self.region.score.node.meta["val"].dtype == torch.float64
        return self if wide else RegionExperiment(self.program, self.region, torch.float32)

    def size(self, lengths: dict[Any, int] | None = None) -> tuple[int, ...]:
        """Of the scores, `few` unless told."""
        return self.dims(self.region.score.result, self.few if lengths is None else lengths)

    @cached_property
    def few(self) -> dict[Any, int]:
        """Small, different lengths for every dynamic dimension of the scores."""
        *batch, queries, keys = self.region.score.result.shape
        sizes = [(size, PROBE_BATCH) for size in batch]
        sizes += zip((queries, keys), PROBE_LENGTHS, strict=True)
        return self.cut.lengths(assigned(sizes))

    def sizes_to_try(self) -> list[dict[Any, int]]:
        """`few`, and a second set with every dynamic length moved, where there is one."""
        symbols = _symbols(self.region.score.result.shape[-2:])
        moved = {symbol: self.few[symbol] + 5 for symbol in symbols}
        return [self.few, {**self.few, **moved}] if moved else [self.few]

    def attention(
        self, scores: Tensor, inputs: Sequence[Tensor], lengths: dict[Any, int] | None = None
    ) -> Tensor:
        """In the shape of the scores."""
        given = (x.to(self.cut.precision) if x.is_floating_point() else x for x in (scores, *inputs))
        return self.run([*given], self.few if lengths is None else lengths).reshape(scores.shape)

    def resized(self, neutral: Sequence[Tensor], lengths: dict[Any, int]) -> list[Tensor]:
        """Constant inputs at another size."""
        return [
            torch.full(self.cut.shape_of(node, lengths), value.flatten()[0].item(), dtype=value.dtype)
            for node, value in zip(self.region.inputs, neutral, strict=True)
        ]


def find_sinkhorn(program: Program, places: Sequence[Place]) -> Iterator[Found]:
    """The first region of each place that is a finite loop, or why the likeliest is none."""
    known: dict[object, Known] = {}
    return first_of_each(places, lambda region, stops: _examine(program, region, stops, known))


def first_of_each(
    places: Sequence[Place],
    examine: Callable[[Region, Sequence[Stop]], Site | Unidentified | None],
) -> Iterator[Found]:
    """The first site among the regions of each place, or why the likeliest is none, if that is known."""
    for place in places:
        first: Site | Unidentified | None = None
        for region in place.regions:
            found = examine(region, place.stops)
            if first is None or isinstance(found, Site):
                first = found
            if isinstance(found, Site):
                break
        if first is not None:
            yield place.value.node, first


def _examine(
    program: Program, region: Region, stops: Sequence[Stop], known: dict[object, Known]
) -> AttentionSite | Unidentified:
    """Run the experiments on one region.  stops: of its loop.  known: of the regions before."""
    shape = region.score.result.shape
    if len(shape) not in (3, 4):
        return Unidentified(f"scores have {len(shape)} dimensions, not [B, H, N, M] or [B*H, N, M]")
    elsewhere = used_outside(region)
    inner, region = region, rooted(region, heads_of(region))
    found = outcome(lambda: _identified(program, region, stops, known))
    if isinstance(found, str) and region is not inner:
        region = inner
        found = outcome(lambda: _identified(program, region, stops, known))
    if isinstance(found, str):
        return Unidentified(found)
    if elsewhere is not None:
        return Unidentified(USED_ELSEWHERE, node=elsewhere)
    fit, mask, bias, _ = found
    softmax = not program.softmax and any(node.target in SOFTMAX for node in region.inside)
    convention = fit.convention
    if convention.half_steps == 1 and convention.first_side == "row" and softmax:
        return Unidentified("not Sinkhorn: rows only")
    heads = heads_of(region)
    convention = replace(
        convention,
        mask="none" if mask is None else convention.mask,
        bias=bias is not None,
        early_stop=bool(stops),
    )
    return AttentionSite(
        site_name(program, region.value.node), convention, heads, int(region.score.map.shape[-1]),
        fit.error, region.score, region.value, region.attention, mask, region.inside, region.inputs, bias,
    )  # fmt: skip


Outcome = tuple[Fit[Convention], KeyMask | None, ScoreBias | None, list[Tensor]] | str


Known = tuple[tuple[Node, ...], Outcome]
"""What was found in a region with these inputs."""


def _identified(
    program: Program, region: Region, stops: Sequence[Stop], known: dict[object, Known]
) -> Outcome:
    """What experiments say of a region, or have said of another that computes the same: the layers of a
    model are examined once, and every one of them is replayed."""
    experiment = RegionExperiment(program, region)
    alike = _seen_by_experiments(program, experiment, stops)
    if alike not in known:
        known[alike] = region.inputs, _examined(program, experiment, stops)
    inputs, found = known[alike]
    outcome: Outcome = moved_nodes(found, dict(zip(inputs, region.inputs, strict=True)))
    return outcome


def _seen_by_experiments(
    program: Program, experiment: RegionExperiment, stops: Sequence[Stop]
) -> object:
    """All that decides what is found in a region: the same of two regions where one says it of both."""
    region = experiment.region
    entering = [region.score.node, *region.inputs]
    residuals = residuals_cut(program, stops, entering).fingerprint() if stops else None
    return (
        experiment.cut.fingerprint(), residuals, tuple(stop.threshold for stop in stops),
        region.score.result.order, region.value.left_order, heads_of(region),
        tuple(made_alike(node) for node in region.inputs),
    )  # fmt: skip


def _examined(program: Program, experiment: RegionExperiment, stops: Sequence[Stop]) -> Outcome:
    found = run_experiments(experiment)
    if stops and not isinstance(found, str):
        fit, mask, _, neutral = found
        changed = _stopping(program, stops, experiment, fit.convention, mask, neutral)
        return found if changed is None else changed
    return found


def run_experiments(
    experiment: RegionExperiment, shown: Mapping[Node, float] = MappingProxyType({})
) -> Outcome:
    """Identify the loop without masks, then what every input does, then everything together.

    shown: what inputs that only hide entries hold where they do not; what they hide is for the caller.
    Also returns the inputs that hide nothing and add nothing.
    """
    region, search = experiment.region, _Search(experiment)
    roles: list[str] = []
    for node in region.inputs:
        role = "band" if node in shown else _input_role(experiment, node)
        if role is None:
            return f"the attention depends on {spoken(node)}, which is neither a mask nor a bias"
        roles.append(role)
    neutral = _neutral_inputs(experiment, roles, search.scores(0.1), shown)
    if isinstance(neutral, str):
        return neutral
    search.neutral = neutral
    fit = search.without_masks()
    if isinstance(fit, str):
        ones = [x + 1 if x.is_floating_point() else x for x in neutral]
        zero, one = (experiment.attention(search.scores(0.1), given) for given in (neutral, ones))
        return MULTIPLIED if not (zero > 0).all() and (one > 0).all() else fit
    mask: KeyMask | None = None
    bias: ScoreBias | None = None
    for index, (node, role) in enumerate(zip(region.inputs, roles, strict=True)):
        if role == "additive" and _adds_more(node) and not _may_hide(experiment, index, neutral):
            role = "bias"
        if role in ("mask", "additive"):
            if mask is not None:
                return f"two masks enter the scores ({spoken(mask.node)} and {spoken(node)})"
            masked = search.masked(fit, index, role == "additive")
            if isinstance(masked, str):
                return masked
            fit, mask = masked
        if role == "bias" or (mask is not None and mask.node is node and mask.is_bias):
            if bias is not None:
                return f"two biases enter the scores ({spoken(bias.node)} and {spoken(node)})"
            coefficient = _bias_coefficient(experiment, index, neutral, fit.convention)
            if isinstance(coefficient, NoFit):
                return str(coefficient)
            bias = ScoreBias(node, coefficient, _merged(node, region))
            if mask is None or mask.node is not node:
                checked = with_low_numbers(experiment, fit.convention, bias, neutral)
                if isinstance(checked, str):
                    return checked
                bias = checked
    if mask is not None and bias is not None and mask.node is not bias.node:
        error = _error_together(experiment, fit.convention, mask, bias, neutral)
        if not error <= HELD:
            names = f"{spoken(mask.node)} and {spoken(bias.node)}"
            return f"with {names} at once: another loop; relative error {error:.2g}"
    return fit, mask, bias, neutral


class _Search:
    """A region on scores that are drawn one after the other.

    neutral: inputs that hide nothing and add nothing.  rough: the multiplier, as seen first.
    samples: observations without masks, the mildest first.
    """

    def __init__(self, experiment: RegionExperiment) -> None:
        self.experiment, self.generator = experiment, torch.Generator().manual_seed(0)
        self.neutral: list[Tensor] = []
        self.rough = 1.0
        self.samples: list[Sample] = []

    def scores(self, spread: float) -> Tensor:
        size = self.experiment.size()
        return spread * torch.randn(size, generator=self.generator, dtype=torch.float64)

    def sample(self, s: Tensor, at: dict[Any, int], mild: bool = False) -> Sample | None:
        """What is seen of these scores, None where they overflow."""
        a = self.experiment.attention(s, self.experiment.resized(self.neutral, at), at)
        return None if overflown(a) else Sample(four(s), four(a), mild=mild)

    def without_masks(self) -> Fit[Convention] | str:
        """The loop where nothing is hidden or added, or why it is none."""
        experiment, dims, inside = self.experiment, self.experiment.size(), self.experiment.region.inside
        first = experiment.attention(self.scores(1.0), self.neutral)
        if not bool(first.isfinite().all()):
            return "the region gives NaN or infinity on random scores"
        trial = self.scores(1.0)
        tried = experiment.attention(trial, self.neutral)
        settled = without_choice(dims)
        if settled is not None and relative_error(tried, first) <= STABILISED:
            return settled
        rough = identify_multiplier(trial, tried)
        if isinstance(rough, NoFit):
            rows = any(node.target in SOFTMAX for node in inside)
            by_query = rows and rough.reason.startswith("not Sinkhorn: the attention is not strictly")
            return ROWS_ONLY if by_query else str(rough)
        self.rough = rough
        sizes = experiment.sizes_to_try()
        drawn = (
            self.sample(one.scores(experiment.size(at), self.generator) / rough, at, one.mild)
            for one, at in drawings(sizes, dims[-2] * dims[-1] > LARGE)
        )
        self.samples = [sample for sample in drawn if sample is not None]
        if not self.samples:
            return "the region gives NaN or infinity on random scores"
        again = partial(identify, guesses=guesses_of(inside))
        fit = again(self.samples)
        if isinstance(fit, Fit) and fit.rival is not None:
            few = partial(self.sample, at=experiment.few)
            fit = separated(fit, self.samples, dims, few, convention_error, again)
        if isinstance(fit, NoFit):
            return str(fit)
        return _at_larger_sizes(experiment, self.neutral, fit.convention) or fit

    def masked(
        self, fit: Fit[Convention], index: int, additive: bool
    ) -> tuple[Fit[Convention], KeyMask] | str:
        """The loop with an input that hides keys, by low scores that it adds or as a boolean; or why it
        is no mask."""
        experiment, neutral = self.experiment, self.neutral
        region, node = experiment.region, experiment.region.inputs[index]
        keys = torch.arange(experiment.size()[-1])
        polarity = None if additive else bool(not neutral[index].flatten()[0])

        def hidden(spread: float, active: Tensor) -> Sample:
            s = self.scores(spread / abs(self.rough))
            a = four(experiment.attention(s, hiding(neutral, index, active, polarity)))
            return Sample(four(s), a, active.expand(len(a), len(keys)))

        pattern, alone = keys % 3 != 1, keys == len(keys) // 2  # True: active
        first = hidden(1.0, pattern)
        if not bool(first.attention.isfinite().all()):
            return f"masking keys through {spoken(node)} gives NaN or infinity"
        if float(first.attention[..., ~pattern].abs().max()) > 1e-12:
            return f"keys masked through {spoken(node)} still receive attention"
        hides = HIDDEN_SCORE
        if additive:
            hides = _hides(experiment, index, neutral, pattern, first)
            example = node.meta["example"]
            if bool(((example > hides) & (example <= MASKED_BELOW)).any()):
                return f"keys masked through {spoken(node)} still receive attention at {MASKED_BELOW:g}"
        seen = [first]
        for spread, active in ((SHARP_MASKED, pattern), (1.0, alone), (SHARP_MASKED, alone)):
            sample = hidden(spread, active)
            seen += [] if overflown(sample.attention) else [sample]
        if node is region.root:
            seen.append(_unlike_examples(experiment, index, neutral, 1.0 / self.rough))
        sizes = experiment.sizes_to_try()
        every, mildest = [*self.samples, *seen], [*self.samples[: len(sizes)], first]
        masked = with_factor(fit.convention, every, mildest)
        if isinstance(masked, NoFit) and same(*region.score.result.shape[-2:]):
            both = with_factor(fit.convention, every, mildest, "both")
            masked = masked if isinstance(both, NoFit) else both
        if isinstance(masked, NoFit):
            return f"with {spoken(node)} as key mask: {masked}"

        def empty(at: dict[Any, int], score: float) -> list[Tensor]:
            nothing = torch.zeros(experiment.size(at)[-1], dtype=torch.bool)
            return hiding(experiment.resized(neutral, at), index, nothing, polarity, score)

        plain = replace(masked.convention, mask="none")
        examples = EmptyExamples(experiment, plain, node, sizes, empty)
        gives = examples.of_scores(hides) if additive else examples.of_mask()
        if isinstance(gives, str):
            return gives
        is_bias = additive and _adds_more(node)
        return masked, KeyMask(node, polarity, _merged(node, region), is_bias, gives, hides)


def _unlike_examples(
    experiment: RegionExperiment, index: int, neutral: Sequence[Tensor], spread: float
) -> Sample:
    """With a mask [B, M] that hides other keys in every example: what is made of a mask may be made of
    other examples' too."""
    mask = neutral[index].clone()
    generator = torch.Generator().manual_seed(7)
    active = torch.rand(mask.shape, generator=generator) < 0.5
    active[:, 0] = active[0] = True
    active[-1, 1:3] = False
    mask[~active] = ~mask[~active]
    s = spread * torch.randn(experiment.size(), generator=generator, dtype=torch.float64)
    a = four(experiment.attention(s, [*neutral[:index], mask, *neutral[index + 1 :]]))
    return Sample(four(s), a, active.repeat_interleave(len(a) // len(active), 0))


def _error_together(
    experiment: RegionExperiment, convention: Convention, mask: KeyMask, bias: ScoreBias,
    neutral: Sequence[Tensor],
) -> float:  # fmt: skip
    """Of the convention where keys are hidden and scores have a bias."""
    inputs, dims = experiment.region.inputs, experiment.size()
    generator = torch.Generator().manual_seed(8)
    active = torch.arange(dims[-1]) % 3 != 1
    given = hiding(neutral, inputs.index(mask.node), active, mask.true_means_masked)
    place = inputs.index(bias.node)
    noise = torch.randn(given[place].shape, generator=generator, dtype=torch.float64)
    given[place] = noise / abs(bias.coefficient)
    s = torch.randn(dims, generator=generator, dtype=torch.float64) / abs(convention.score_multiplier)
    added = _spread(given[place], dims) * bias.coefficient / convention.score_multiplier
    a = four(experiment.attention(s, given))
    return convention_error(convention, [Sample(four(s + added), a, active.expand(len(a), -1))])


def _spread(bias: Tensor, dims: Sequence[int]) -> Tensor:
    """Over the scores, whose heads may be merged with the batch."""
    return (bias if bias.dim() <= len(dims) else bias.flatten(0, -3)).expand(dims)


def _bias_coefficient(
    experiment: RegionExperiment, index: int, neutral: Sequence[Tensor], convention: Convention
) -> float | NoFit:
    """How much of an input is added to the scores, in units of epsilon, at every size of it.

    A bias of keys alone, which the last half-step on columns removes, is added to scores or products.
    """
    name = experiment.region.inputs[index].name
    dims, multiplier = experiment.size(), convention.score_multiplier
    generator = torch.Generator().manual_seed(6)
    probe = torch.randn(neutral[index].shape, generator=generator, dtype=torch.float64)
    dense = _spread(probe, dims)

    def attention(scores: Tensor, strength: float) -> Tensor:
        inputs = list(neutral)
        inputs[index] = probe * strength
        return experiment.attention(scores, inputs)

    def apart(coefficient: float) -> float:
        seen = []
        for spread, strength in BIASES:
            noise = torch.randn(dims, generator=generator, dtype=torch.float64)
            s, strength = noise * spread / abs(multiplier), strength / abs(coefficient)
            a = attention(s, strength)
            if bool(a.isfinite().all()):
                added = strength * coefficient / multiplier * dense
                seen.append(Sample(four(s + added), four(a)))
        return convention_error(replace(convention, mask="none"), seen)

    measured = identify_multiplier(dense, attention(torch.zeros(dims, dtype=torch.float64), 1.0))
    candidates = [measured] if isinstance(measured, float) else []
    if probe.shape[-2] == 1:
        candidates = [1.0, multiplier]
    if not candidates:
        return NoFit(f"{name} enters the attention, but not as an additive score bias")
    error, coefficient = min((apart(candidate), candidate) for candidate in candidates)
    if error <= HELD:
        return coefficient
    return NoFit(f"with {name} as score bias: another loop", error)


def _stopping(
    program: Program,
    stops: Sequence[Stop],
    experiment: RegionExperiment,
    convention: Convention,
    mask: KeyMask | None,
    neutral: Sequence[Tensor],
) -> str | None:
    """What an early stop would change, None if nothing."""
    region, few = experiment.region, experiment.few
    shape = region.score.result.shape
    many = dict.fromkeys(_symbols(shape[:-2]), MANY_EXAMPLES)
    long = dict.fromkeys(_symbols(shape[-2:]), MANY_TOKENS)
    convention = replace(convention, mask="none" if mask is None else convention.mask)

    def feed(units: Tensor, at: dict[Any, int], active: Tensor | None) -> tuple[list[Tensor], Any]:
        s, inputs = units / abs(convention.score_multiplier), experiment.resized(neutral, at)
        keep: Tensor | None = None
        if mask is not None and active is not None:
            inputs = hiding(inputs, region.inputs.index(mask.node), active, mask.true_means_masked)
            keep = active.expand(len(four(s)), -1)
        return [experiment.raw(region.score.result, s, at), *inputs], (four(s), keep)

    def attention(observed: tuple[Tensor, Tensor | None], half_steps: int) -> Tensor:
        return attention_of(replace(convention, half_steps=half_steps), *observed)

    entering = [region.score.node, *region.inputs]
    steps = convention.half_steps
    loop = Stopping(program, stops, entering, region.inside, steps, experiment.size, feed, attention)
    tokens, keys = slice(0, 8), torch.arange(experiment.size()[-1])
    crowds = [Crowd(few), *of_many(few, many)]
    if long:
        crowds.append(Crowd(few, many | long, (slice(-1, None), ..., tokens, tokens)))
    if mask is not None:
        crowds += [Crowd(few, active=keys % 3 != 1), Crowd(few, many, active=keys < 2)]
    return what_a_stop_changes(loop, crowds)


def _symbols(sizes: Sequence[Any]) -> set[Any]:
    return {x for size in sizes if isinstance(size, torch.SymInt) for x in size.node.expr.free_symbols}


def without_choice(size: Sequence[int]) -> str | None:
    """Why scores [*, N, M] decide nothing of a plan whose columns are closed; None where they do."""
    if 1 not in size[-2:]:
        return None
    side = "query" if size[-2] == 1 else "key"
    return f"with one {side} the plan does not depend on the scores: it is kept as it is"


def identify_multiplier(scores: Tensor, attention: Tensor) -> float | NoFit:
    return score_multiplier([Sample(four(scores), four(attention))])


def _at_larger_sizes(
    experiment: RegionExperiment, neutral: Sequence[Tensor], convention: Convention
) -> str | None:
    """What is wrong with a convention where there are many tokens or examples, None if nothing:
    log(1 / N + 1e-6) is log(1 / N) for a few."""
    *batch, queries, keys = experiment.region.score.result.shape
    depth = convention.half_steps * experiment.size()[-3] / (PROBE_BATCH if len(batch) < 2 else 1)
    generator = torch.Generator().manual_seed(5)
    for at in larger_sizes(experiment.cut, experiment.few, batch, (queries, keys), depth):
        s = torch.randn(experiment.size(at), generator=generator, dtype=torch.float64)
        s = s / abs(convention.score_multiplier)
        a = experiment.attention(s, experiment.resized(neutral, at), at)
        error = convention_error(convention, [Sample(four(s), four(a))])
        if not error <= HELD:
            return f"another loop {where(s.shape)}; relative error {error:.2g}"
    return None


def where(sizes: Sequence[int]) -> str:
    """Scores of these sizes, in words."""
    return f"where scores are {' x '.join(map(str, sizes))}"


def guesses_of(inside: Collection[Node]) -> Guesses:
    """Numbers in the region that may keep a division from being one by 0, in order, and what else of the
    ways to do so its operators leave open."""
    found: dict[float, set[str]] = {}
    for node in inside:
        for value in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, float) and 0.0 < value < SMALL_CONSTANT:
                found.setdefault(value, set()).add("clamp" if node.target in CLAMPS else "add")
    targets = {node.target for node in inside}
    starts = [
        *(["softmax"] if targets & SOFTMAX else []), "plain",
        *(["row", "matrix", "tensor"] if targets & MAXIMA else []),
    ]  # fmt: skip
    return Guesses(tuple(found), sorted(set().union(*found.values())), starts)


def _input_role(experiment: RegionExperiment, node: Node) -> str | None:
    """mask (bool), additive (float, may hide keys), bias (float), or None for anything else."""
    queries, keys = experiment.size()[-2:]
    shape = experiment.cut.shape_of(node, experiment.few)
    if not shape or shape[-1] != keys:
        return None
    if node.meta["val"].dtype == torch.bool:
        return "mask"
    if not node.meta["val"].is_floating_point() or len(shape) < 2:
        return None
    example = node.meta.get("example")
    if shape[-2] not in (queries, 1):
        return None
    # Without padding in the example a padding mask is all zero: it must still be known for a mask.
    hides = isinstance(example, Tensor) and bool((example <= MASKED_BELOW).any())
    silent = isinstance(example, Tensor) and not bool(example.any())
    by_row = varies(node, -2) or (len(shape) == 4 and varies(node, -3))
    return "additive" if hides or (not by_row and (silent or shape[-2] == 1)) else "bias"


def _adds_more(node: Node) -> bool:
    """Whether an additive mask also holds finite values, a bias in the same tensor."""
    example = node.meta["example"]
    return bool(((example != 0) & (example > MASKED_BELOW)).any())


def _neutral_inputs(
    experiment: RegionExperiment, roles: Sequence[str], scores: Tensor, shown: Mapping[Node, float]
) -> list[Tensor] | str:
    """Inputs that hide nothing and add nothing; the polarity of a bool mask is found by trying."""
    region = experiment.region
    neutral: list[Tensor] = []
    for node, role in zip(region.inputs, roles, strict=True):
        shape = experiment.cut.shape_of(node, experiment.few)
        dtype = torch.bool if node.meta["val"].dtype == torch.bool else torch.float64
        neutral.append(torch.full(shape, shown.get(node, 0.0)).to(dtype))
        example = node.meta.get("example")
        if role in ("mask", "additive") and isinstance(example, Tensor):
            if node is region.root:
                continue  # [B, M]: how it enters is inside
            if varies(node, -2):
                return (
                    f"the mask {spoken(node)} differs between queries (causal or windowed), or may on "
                    "other data, which has no transport plan with these marginals"
                )
            sizes = region.score.result.shape
            if heads_vary(node, heads_of(region), sizes[0] if len(sizes) == 4 else None):
                return f"the mask {spoken(node)} differs between heads, or may on other data"
    for index, role in enumerate(roles):
        if role != "mask":
            continue
        # A mask that hides everything gives no attention at all, NaN, or the same to every key; or, by
        # low numbers, what no mask gives: then it is seen where it hides some.
        attention = experiment.attention(scores, neutral)
        flipped = list(neutral)
        flipped[index] = ~neutral[index]
        other = experiment.attention(scores, flipped)
        more, less = _informative(other, scores), _informative(attention, scores)
        if more > less or (more == less and _hides_some(experiment, index, flipped, scores)):
            neutral = flipped
    return neutral


def _hides_some(
    experiment: RegionExperiment, index: int, neutral: Sequence[Tensor], scores: Tensor
) -> bool:
    """Whether a boolean mask hides the keys at which it is not as it is in the neutral inputs."""
    active = torch.arange(scores.shape[-1]) % 3 != 1
    inputs = hiding(neutral, index, active, bool(not neutral[index].flatten()[0]))
    return not bool(experiment.attention(scores, inputs)[..., ~active].any())


def _informative(attention: Tensor, scores: Tensor) -> int:
    """2 if the attention is positive and follows the scores, 1 if it is positive, else 0."""
    if not bool((attention > 0).all()) or not bool(attention.isfinite().all()):
        return 0
    return 2 if not isinstance(identify_multiplier(scores, attention), NoFit) else 1


def _may_hide(experiment: RegionExperiment, index: int, neutral: Sequence[Tensor]) -> bool:
    """Whether a low added score hides its key, as in a mask, or is a number like others."""
    example = experiment.region.inputs[index].meta["example"]
    if bool((example <= MASKED_BELOW).any()):
        return True
    zero = torch.zeros(experiment.size(), dtype=torch.float64)
    active = torch.arange(zero.shape[-1]) % 3 != 1
    attention = experiment.attention(zero, hiding(neutral, index, active, None))
    return not bool((attention[..., ~active].abs() > 1e-12).any())


def _hides(
    experiment: RegionExperiment, index: int, neutral: Sequence[Tensor], active: Tensor, seen: Sample
) -> float:
    """The highest added score that hides keys as HIDDEN_SCORE did in what was seen."""
    scores = seen.scores.reshape(experiment.size())
    for score in (MASKED_BELOW, float(torch.finfo(torch.float16).min)):
        inputs = hiding(neutral, index, active, None, score)
        if relative_error(four(experiment.attention(scores, inputs)), seen.attention) <= STABILISED:
            return score
    return HIDDEN_SCORE


def hiding(
    inputs: Sequence[Tensor], index: int, active: Tensor, true_means_masked: bool | None,
    score: float = HIDDEN_SCORE,
) -> list[Tensor]:  # fmt: skip
    """The inputs with one of them, which hides nothing, hiding the keys outside `active`."""
    mask = inputs[index].clone()
    mask[..., ~active] = score if true_means_masked is None else true_means_masked
    return [*inputs[:index], mask, *inputs[index + 1 :]]


def four(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 4 else tensor[:, None]


def used_outside(region: Region, besides: Iterable[Node] = ()) -> Node | None:
    """A value of the loop, other than the attention itself, that something else reads.

    besides: what may read it besides the region.
    """
    inside = {*region.inside, *besides}
    for node in (region.score.node, *region.inside):
        if node is region.attention:
            continue
        for user in node.users:
            if user not in inside and is_tensor(user) and _is_live(user):
                return node
            if user.op == "output":
                return node
    return None


def _is_live(node: Node) -> bool:
    """Whether the graph's output depends on the node."""
    return any(user.op == "output" for user in descendants([node]))


def heads_of(region: Region) -> int:
    """H: the second of four dimensions, or what a [B, H, N, D] -> [B*H, N, D] view merged, else 1."""
    shape = region.score.result.shape
    if len(shape) == 4:
        return int(shape[1])
    heads = {merged_heads(operand) for operand in (region.score.left, region.score.right)}
    return heads.pop() if len(heads) == 1 else 1


def _merged(node: Node, region: Region) -> bool:
    """Whether a mask's leading dimension is batch times heads, as that of scores or of a value that it
    feeds with three dimensions."""
    consumers = [user for user in node.users if user in set(region.inside)]
    return any(rank_of(x) == 3 for x in (region.score.node, *consumers))
