"""Bands: which keys a query sees by position alone, read from what sizes and constants make.

before: scores that are hidden where j - i is outside [low, high], by anything that depends on no data
after:  [low, high], the same at every length that was tried, or None

A mask of positions is often joined with one of the data before it meets the scores. They are told apart
by going back through what is done entry by entry to where the data says the same of every query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.formats.limits import fixed_size, limits_of
from asapc.operators.banded import in_band
from asapc.operators.masks import MASKED_BELOW
from asapc.passes.cut import (
    SHAPE_ONLY,
    constant_at,
    depends_on_data,
    is_tensor,
    line_of,
    reached,
    reaches,
)
from asapc.passes.experiment import assigned
from asapc.passes.masks import spreads_entries, varies
from asapc.passes.products import same
from asapc.passes.regions import Region

# Numbers of tokens at which a mask is read, beside that of the example: no usual ones, and beyond usual
# windows. The longest only where a window has not ended before.
LENGTHS = (3, 17, 67, 259, 1031, 2053)
LONGEST = 4099


@dataclass(frozen=True)
class Band:
    """Keys i + low .. i + high of query i; None where that side has no end."""

    low: int | None
    high: int | None

    def within(self, other: Band) -> Band:
        """What both show."""
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return Band(max(lows, default=None), min(highs, default=None))


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
    found = sorted(sources)
    masks = tuple(node for node in found if _is_matrix(node, sizes) and not depends_on_data(node))
    data = (node for node in found if depends_on_data(node))
    constant = (node for node in region.inputs if node in sources and node not in masks)
    inputs = tuple(dict.fromkeys((*masks, *data, *constant)))
    inside = tuple(sorted(valued | opened))
    in_order = tuple(node for node in inside if node in valued)
    return Opened(replace(region, inside=inside, inputs=inputs), in_order, masks)


def band_of(graph: GraphModule, masks: Sequence[Node], shape: Sequence[Any]) -> Band | None:
    """What all masks show; None where one is more or less than a band.  shape: [*, N, N], of scores."""
    found = Band(None, None)
    for node in masks:
        band = _read(graph, node, shape)
        if band is None:
            return None
        found = found.within(band)
    return found


def shown_value(graph: GraphModule, node: Node) -> float | None:
    """What a mask holds for a query and its own key, which a band shows."""
    value = constant_at(graph, node)
    return None if value is None or not value.numel() else float(value.flatten()[0])


def _is_matrix(node: Node, sizes: Sequence[Any]) -> bool:
    """[..., N, M], with sizes of 1 for what broadcasts."""
    shape = node.meta["val"].shape
    return len(shape) >= 2 and all(same(one, other) for one, other in zip(shape[-2:], sizes, strict=True))


def _read(graph: GraphModule, node: Node, shape: Sequence[Any]) -> Band | None:
    if reaches(node, lambda n: n.op == "get_attr" and _is_trained(graph, n)):
        return None
    found: Band | None = None
    seen: list[tuple[int, Band]] = []
    for lengths, length in _lengths(shape):
        if length == LONGEST and found is not None and None not in (found.low, found.high):
            break
        value = constant_at(graph, node, lengths)
        if value is None or value.shape[-2:] != (length, length):
            return None
        found = _band_in(value, node.meta["val"].dtype == torch.bool)
        if found is None:
            return None
        seen.append((length, found))
    for length, band in seen:  # what is seen of the band at fewer tokens
        if found is None or band != _part(found, length):
            return None
    return found


def _is_trained(graph: GraphModule, node: Node) -> bool:
    return any(name == node.target for name, _ in graph.named_parameters())


def _part(band: Band, length: int) -> Band:
    """The band, where so few tokens show its ends."""
    low, high = band.low, band.high
    return Band(
        None if low is None or low <= 1 - length else low,
        None if high is None or high >= length - 1 else high,
    )


def _lengths(shape: Sequence[Any]) -> Iterator[tuple[dict[Any, int] | None, int]]:
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


def _band_in(value: Tensor, is_bool: bool) -> Band | None:
    """The band that [..., N, N] shows, its ends where they are seen."""
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
    if not hides:
        return None
    along = shown[0].nonzero()[-1], shown[:, 0].nonzero()[-1]  # of a band, all that it has is seen here
    high, low = (int(last) for last in along)
    if not torch.equal(shown, in_band(length, length, -low, high, first)):
        return None
    return Band(None if low == length - 1 else -low, None if high == length - 1 else high)
