"""Banded: a finite Sinkhorn loop whose queries see a window of keys, whatever the data holds.

before: q k^T -> [hidden where j - i is outside [low, high], key mask, the loop] -> A v
after:  torch.ops.asapc.banded_sinkhorn(q, k, v, keep, ..., low, high), or why the loop is none

Which keys a query sees by position alone is read from what sizes and constants make. Such a mask is often
joined with one of the data before it meets the scores. They are told apart by going back through what is
done entry by entry to where the data says the same of every query.

The loop is identified with everything shown, like any other; then what hides does so, and the region is
held against operators.banded, at lengths beyond the window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.formats.limits import fixed_size, limits_of
from asapc.ir import Program
from asapc.operators.banded import BandedConvention, banded_map, settings_of
from asapc.operators.catalogue import OPERATORS
from asapc.operators.masks import MASKED_BELOW
from asapc.operators.sinkhorn import factor_terms
from asapc.passes.branches import spoken
from asapc.passes.cut import (
    PROBE_LENGTHS,
    SHAPE_ONLY,
    constant_at,
    depends_on_data,
    is_tensor,
    line_of,
    reached,
    reaches,
)
from asapc.passes.experiment import Lengths, NoFit, assigned, outcome, relative_error
from asapc.passes.lifting import Lifting, Swap
from asapc.passes.masks import spreads_entries, varies
from asapc.passes.products import KeyMask, same, site_name
from asapc.passes.regions import Region
from asapc.passes.sinkhorn.match import (
    USED_ELSEWHERE,
    RegionExperiment,
    first_of_each,
    heads_of,
    run_experiments,
    used_outside,
)
from asapc.passes.sinkhorn.probe import HELD
from asapc.passes.sinkhorn.site import LoopSite
from asapc.passes.site import Found, Place, Unidentified

# Numbers of tokens at which a mask is read, beside that of the example: no usual ones, and beyond usual
# windows. The longest only where a window has not ended before.
LENGTHS = (3, 17, 67, 259, 1031, 2053)
LONGEST = 4099
# Standard deviations of scores in units of epsilon with the band in place, and half-steps times entries
# beyond which the first must do.
SPREADS = (1.0, 4.0, 16.0, 64.0)
WORK = 3e8
BEYOND = 9  # tokens more than the longer side of the window


@dataclass(frozen=True)
class BandedSite(LoopSite):
    """A region that is a finite Sinkhorn loop on a band of its scores."""

    convention: BandedConvention

    def lift(self, lifting: Lifting) -> list[Swap]:
        with lifting.before_map(self.value):
            q, k = lifting.operands(self.score.map, self.score.keys)
            rest = {"keep": lifting.keep(self.mask, q), **settings_of(self.convention)}
            return lifting.put_map(OPERATORS["banded_sinkhorn"], q, k, rest, self.value)


def find_banded(program: Program, places: Sequence[Place]) -> Iterator[Found]:
    """The first region of each place that is such a loop, or why the likeliest is none; nothing of places
    without a band."""
    return first_of_each(places, lambda region, _: _examine(program, region))


def _examine(program: Program, region: Region) -> BandedSite | Unidentified | None:
    shape = region.score.result.shape
    if len(shape) not in (3, 4) or not same(shape[-2], shape[-1]):
        return None  # a band of unequal numbers of tokens leaves some without a partner
    opened = open_region(region)
    if not opened.masks:
        return None
    band = band_of(program.graph, opened.masks, shape)
    if band is None or not all(map(math.isfinite, band)):
        return None
    low, high = map(int, band)
    result = outcome(lambda: _identified(program, opened, low, high))
    if isinstance(result, NoFit):
        return Unidentified(f"a window of {high - low + 1} keys: {result}")
    valued = replace(region, inside=opened.valued)  # of the rest, such as a full_like, only sizes count
    elsewhere = used_outside(valued, besides=region.inside)
    if elsewhere is not None:
        return Unidentified(USED_ELSEWHERE, node=elsewhere)
    convention, mask, error = result
    inputs = tuple(node for node in opened.region.inputs if node not in opened.masks)
    return BandedSite(
        site_name(program, region.value.node), convention, heads_of(region),
        int(region.score.map.shape[-1]), error, region.score, region.value, mask,
        opened.region.inside, inputs,
    )  # fmt: skip


def _identified(
    program: Program, opened: Opened, low: int, high: int
) -> tuple[BandedConvention, KeyMask | None, float]:
    """The convention, its mask, and the largest relative error.  Raises NoFit."""
    experiment = RegionExperiment(program, opened.region)
    shown = {}
    for node in opened.masks:
        value = constant_at(program.graph, node)
        if value is None or not value.numel():
            raise NoFit(f"{node.name} cannot be computed on its own")
        shown[node] = float(value.flatten()[0])  # for a query and its own key, which a band shows
    fit, (mask, queries), bias = run_experiments(experiment, shown)
    if bias is not None:
        raise NoFit(f"{spoken(bias.node)} is added to its scores, which no operator with a band supports")
    if queries is not None:
        raise NoFit("a mask hides queries, too, which no operator with a band supports")
    if fit.convention.stabiliser is not None:
        raise NoFit("a constant in its divisions, which no operator with a band supports")
    loop = fit.convention
    convention = BandedConvention(
        loop.half_steps, loop.first_side, loop.score_multiplier, low, high, loop.output_factor,
        "none" if mask is None else "key",
    )  # fmt: skip
    error = _error_in_band(experiment, opened.masks, mask, convention)
    return convention, mask, max(fit.error, error)


def _error_in_band(
    experiment: RegionExperiment, bands: Sequence[Node], mask: KeyMask | None,
    convention: BandedConvention,
) -> float:  # fmt: skip
    """The largest relative error of the convention with its band in place.  Raises NoFit.

    bands: the inputs that hold it.
    """
    worst, graph, factor = 0.0, experiment.program.graph, factor_terms(convention.output_factor)
    window, rows_first = (convention.low, convention.high), convention.first_side == "row"
    for what, at, spread, active in _trials(experiment, mask, convention):
        inputs, kept = experiment.masked((mask, None), active, at)
        for node in bands:
            band, index = constant_at(graph, node, at), experiment.region.inputs.index(node)
            assert band is not None
            inputs[index] = band.to(inputs[index].dtype)
        s = experiment.scores(spread, at)
        theirs = experiment.attention(s, inputs, at)
        if spread > SPREADS[0] and not bool(theirs.isfinite().all()):
            continue  # exp overflows at sharp scores
        s, keep = s * convention.score_multiplier, kept.get("keep")
        ours = banded_map(s, keep, convention.half_steps, rows_first, factor, *window)
        worst = max(worst, relative_error(ours, theirs))
        if not worst <= HELD:
            raise NoFit(f"another loop with {what}", worst)
    return worst


def _trials(
    experiment: RegionExperiment, mask: KeyMask | None, convention: BandedConvention
) -> Iterator[tuple[str, Lengths, float, Tensor | None]]:
    """What is tried, in words; the sizes, the spread of the scores and the active keys, None for all."""
    low, high = convention.low, convention.high

    def beyond(more: int) -> Lengths:
        """More tokens than either side of the window, where their number is free."""
        return experiment.small(more + max(-low, high) - PROBE_LENGTHS[0])[-1]

    for at in (beyond(BEYOND), beyond(BEYOND + 6)):
        large = math.prod(experiment.size(at)) * convention.half_steps > WORK
        yield from (("its band in place", at, spread, None) for spread in SPREADS[: 1 if large else None])
    if mask is not None:
        at = beyond(BEYOND + high - low)
        keys = torch.arange(experiment.size(at)[-1])
        yield "some keys masked", at, 1.0, keys % 3 != 1
        yield "the keys of whole windows masked", at, 1.0, keys < len(keys) // 3
        yield "all keys masked", at, 1.0, keys < 0


# Reading a band


Band = tuple[float, float]
"""low, high: keys i + low .. i + high of query i; infinite where that side has no end."""


@dataclass(frozen=True)
class Opened:
    """A region from what the data brings in: masks of positions are inside, or `masks`.

    region: with `masks` and the data as its inputs.  valued: what of it is computed from scores.
    masks: made of sizes and constants alone, with a row for every query and a column for every key.
    """

    region: Region
    valued: tuple[Node, ...]
    masks: tuple[Node, ...]


def open_region(region: Region) -> Opened:
    score = region.score.node
    valued = {score}
    for node in region.inside:
        if node.target not in SHAPE_ONLY and any(source in valued for source in node.all_input_nodes):
            valued.add(node)
    valued.discard(score)
    sizes = region.score.result.shape[-2:]

    def is_joined(node: Node) -> bool:
        by_query = _is_matrix(node, sizes) and spreads_entries(node) and varies(node, -2)
        return by_query and depends_on_data(node)

    def onward(node: Node) -> list[Node]:
        made = [x for x in node.all_input_nodes if x not in valued and x is not score and is_tensor(x)]
        return made if node in valued or is_joined(node) else []

    entering = reached(valued, onward) - valued
    opened = {node for node in entering if is_joined(node)}
    sources = entering - opened
    in_graph = sorted(sources)
    masks = tuple(node for node in in_graph if _is_matrix(node, sizes) and not depends_on_data(node))
    data = (node for node in in_graph if depends_on_data(node))
    constant = (node for node in region.inputs if node in sources and node not in masks)
    inputs = tuple(dict.fromkeys((*masks, *data, *constant)))
    inside = tuple(sorted(valued | opened))
    in_order = tuple(node for node in inside if node in valued)
    return Opened(replace(region, inside=inside, inputs=inputs), in_order, masks)


def band_of(graph: GraphModule, masks: Sequence[Node], shape: Sequence[Any]) -> Band | None:
    """What all masks show; None where one is more or less than a band.  shape: [*, N, N], of scores."""
    bands = [_read(graph, node, shape) for node in masks]
    if None in bands:
        return None
    lows, highs = zip((-math.inf, math.inf), *(band for band in bands if band is not None), strict=True)
    return max(lows), min(highs)


def _is_matrix(node: Node, sizes: Sequence[Any]) -> bool:
    """[..., N, M], with sizes of 1 for what broadcasts."""
    shape = node.meta["val"].shape
    return len(shape) >= 2 and all(same(one, other) for one, other in zip(shape[-2:], sizes, strict=True))


def _read(graph: GraphModule, node: Node, shape: Sequence[Any]) -> Band | None:
    trained = {name for name, _ in graph.named_parameters()}
    if reaches(node, lambda n: n.op == "get_attr" and n.target in trained):
        return None
    band: Band | None = None
    matrices: list[Tensor] = []
    for lengths, length in _lengths(shape):
        if length == LONGEST and band is not None and all(map(math.isfinite, band)):
            break
        value = constant_at(graph, node, lengths)
        if value is None or value.shape[-2:] != (length, length):
            return None
        shown = _shown(value, node.meta["val"].dtype == torch.bool)
        if shown is None:
            return None
        matrices.append(shown)
        band = _band_in(shown)
    return band if band is not None and all(_is_band(shown, *band) for shown in matrices) else None


def _lengths(shape: Sequence[Any]) -> Iterator[tuple[Lengths | None, int]]:
    """Sizes to evaluate a graph at, of one example, and how many tokens those are, the most last."""
    *leads, _, tokens = shape
    fixed = fixed_size(tokens)
    if fixed is not None:
        yield None, fixed
        return
    line = line_of(tokens)
    if line is None or line.factor != 1:
        return
    low, high = (limit + line.more for limit in limits_of(tokens.node.shape_env, line.symbol))
    wanted = {*LENGTHS, LONGEST, int(tokens.node.hint), *([high] if high < LONGEST else [])}
    one = assigned((size, 1) for size in leads)
    for length in sorted(wanted):
        if low <= length <= high and length > line.more:
            yield {**one, line.symbol: length - line.more}, length


def _shown(value: Tensor, is_bool: bool) -> Tensor | None:
    """What a mask [..., N, N] shows [N, N]; None where it is none, or not the same for all."""
    length = value.shape[-1]
    matrices = value.reshape(-1, length, length)
    first = matrices[0]
    if not length or bool((matrices != first).any()):
        return None
    show = float(first[0, 0])
    shown = first == show
    hidden = first[~shown]
    hides = is_bool or bool(
        (hidden <= MASKED_BELOW).all() if show == 0.0 else (hidden == 0.0).all() and show == 1.0
    )
    return shown if hides else None


def _band_in(shown: Tensor) -> Band:
    """The only band that this may be, its ends where they are seen."""
    last = len(shown) - 1
    high, low = (int(line.nonzero()[-1]) for line in (shown[0], shown[:, 0]))
    return -math.inf if low == last else -low, math.inf if high == last else high


def _is_band(shown: Tensor, low: float, high: float) -> bool:
    """Whether [N, N] is that band."""
    places = torch.arange(len(shown), device=shown.device)
    offsets = places - places[:, None]
    return torch.equal(shown, (offsets >= low) & (offsets <= high))
