"""Match: find where a score product meets a value product, and where rows and columns are normalised in
turn, and let every family say what that is.

before: a functional graph
after:  a Site for every region that replays a known convention, Refusal with a reason for every other
        attention-like region

Only products and sums are recognised by their operator; each family of sites has its own experiments.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from asapc.ir import Program
from asapc.passes.branches import spoken
from asapc.passes.cut import ancestors, is_tensor, recorded
from asapc.passes.decisions import rounded
from asapc.passes.early_stop import stop_left, stops_by_scores
from asapc.passes.families import MATCHERS
from asapc.passes.fused import fused_calls
from asapc.passes.plan.loops import Loop, find_loops
from asapc.passes.products import BARRIERS, site_name
from asapc.passes.regions import Refusal, find_regions, rooted, unattended
from asapc.passes.sinkhorn.banded import open_region
from asapc.passes.sinkhorn.match import heads_of
from asapc.passes.site import Place, Site, Unexplained, Unidentified

NOT_THE_MODEL = "the captured graph is not the model"
Outcomes = list[Site | Refusal]
UNKNOWN = Unidentified("not attention: its scores are not a product of queries and keys")


def match(program: Program) -> Outcomes:
    """All attention-like regions of a program in graph order, each matched or refused."""
    _record_examples(program)
    places = _places(program)
    loops = find_loops(program.graph)
    sites: dict[Node, Site] = {}
    taken: set[Node] = set()  # inside a site
    reasons: dict[Node, Unidentified] = {}
    for find in MATCHERS:
        free = Unexplained(
            place for place in places if place.at not in taken and place.value.node not in sites
        )
        free.loops = [loop for loop in loops if not taken & {*loop.sums}]
        for node, outcome in find(program, free):
            if isinstance(outcome, Site):
                sites[node] = outcome
                taken |= {outcome.at, *outcome.part().inside, *outcome.stops_on}
            elif outcome.inside or node not in reasons:
                reasons[node] = outcome
    left = [
        place for place in places
        if place.at not in taken and place.value.node not in sites
        and not any(loop.at in sites and _is_within(loop, place) for loop in loops)
    ]  # fmt: skip
    apart = _loops_apart([loop for loop in loops if not taken & {*loop.sums}], left, reasons)
    results = [(site.at, _unless_it_departs(program, site)) for site in sites.values()]
    # Weights inside of what is refused as a whole have no reason of their own.
    within = {x for p in left for x in reasons.get(p.value.node, UNKNOWN).inside - {p.value.node}}
    explained = [place for place in left if place.regions or place.at not in within]
    results += [(place.at, _refused(program, place, reasons)) for place in explained]
    for loop in apart:
        known = reasons[loop.at]
        refusal = Refusal(site_name(program, loop.at), known.reason, (known.node or loop.at).name)
        results.append((loop.at, refusal))
    for node in fused_calls(program):
        reason = "not Sinkhorn: rows only (scaled_dot_product_attention)"
        results.append((node, Refusal(site_name(program, node), reason, node.name)))
    named = _named(program, results)
    elsewhere = not_the_model(program, named)
    if elsewhere is None:
        return named
    # What the graph computes there is not what the code does, and all that follows sees it.
    why = f"{NOT_THE_MODEL}: {elsewhere}"
    return [site if isinstance(site, Refusal) else Refusal(site.name, why, site.part().output.name)
            for site in named]  # fmt: skip


def _places(program: Program) -> list[Place]:
    """Where attention may be: regions by their scores, then normalised weights without."""
    regions_of = find_regions(program.graph)
    stops = stops_by_scores(program, regions_of)
    places = [
        Place(regions[0].value, tuple(regions), tuple(stops.get(score, ())))
        for score, regions in regions_of.items()
    ]
    return places + [Place(product) for product in unattended(program.graph, regions_of)]


def _loops_apart(
    loops: Sequence[Loop], left: Sequence[Place], reasons: dict[Node, Unidentified]
) -> list[Loop]:
    """The loops that are refused and belong to no product that is: those have a row of their own. Where
    nobody knows why such a product is refused, its loop does; it knows better where its sums are none of
    rows and columns."""
    apart = []
    for loop in loops:
        around = next((place for place in left if _is_within(loop, place)), None)
        if around is None:
            apart.append(loop)
        elif loop.axes is None:  # what its sums are over is seen, and no experiment's guess
            reasons[around.value.node] = reasons[loop.at]
        else:
            reasons.setdefault(around.value.node, reasons[loop.at])
    return apart


def _is_within(loop: Loop, place: Place) -> bool:
    """Whether a product with values is that of a loop's plan, or comes after it."""
    sums = {*loop.sums}
    if any(sums & {*region.inside} for region in place.regions):
        return True
    operands = (place.value.left, place.value.right)
    return not place.regions and bool(sums & ancestors(*operands, until=BARRIERS))


def _refused(program: Program, place: Place, reasons: dict[Node, Unidentified]) -> Refusal:
    refusal = reasons.get(place.value.node, UNKNOWN)
    node = refusal.node or (place.regions[0].attention if place.regions else place.value.node)
    return Refusal(site_name(program, place.value.node), refusal.reason, node.name)


def _named(program: Program, results: Sequence[tuple[Node, Site | Refusal]]) -> list[Site | Refusal]:
    """In graph order, a second one of a name with its number."""
    counts: dict[str, int] = {}
    named: list[Site | Refusal] = []
    for _, result in sorted(results, key=lambda pair: pair[0]):
        count = counts[result.name] = counts.get(result.name, 0) + 1
        named.append(replace(result, name=result.name if count == 1 else f"{result.name}#{count}"))
    return named


def not_the_model(program: Program, results: Sequence[Site | Refusal]) -> str | None:
    """Why a program may compute something else than the model: a branch that is no site's early stop."""
    if not program.stops:
        return None
    tried = {node for site in results if isinstance(site, Site) for node in site.stops_on}
    return stop_left(stops_by_scores(program, {*find_regions(program.graph), *tried}), tried)


def _unless_it_departs(program: Program, site: Site) -> Site | Refusal:
    """Refuse a site that rounds its scores, or whose loop may end early as its family has not tried."""
    part = site.part()
    reason = rounded(part)
    nodes = (*part.inputs, *sorted(part.inside))
    with_imaginary = next((x for x in nodes if is_tensor(x) and x.meta["val"].is_complex()), None)
    if with_imaginary is not None:
        reason = f"{spoken(with_imaginary)} gives it complex numbers, which no operator has"
    if not site.stops_on and any(
        ancestors(stop.residual, until=BARRIERS) & part.inside for stop in program.stops
    ):
        reason = "its loops may end early, which is understood in Sinkhorn layers only"
    if site.at not in ancestors(program.graph.graph.output_node()):
        reason = "nothing of it reaches the outputs"
    return site if reason is None else Refusal(site.name, reason, part.output.name)


def _record_examples(program: Program) -> None:
    """Note in node.meta["example"] what the outside inputs of every region hold on the example call."""
    regions = [*itertools.chain(*find_regions(program.graph).values())]
    nodes = {
        source
        for region in regions
        for node in region.inside
        for source in node.all_input_nodes
        if source not in region.inside and source is not region.score.node
    } | {source for region in regions for source in open_region(region).region.inputs}
    nodes |= {root for region in regions for root in rooted(region, heads_of(region)).roots}
    if nodes:
        for node, value in recorded(program.graph, nodes, (program.args, program.kwargs)).items():
            node.meta["example"] = value
