"""Match: find where a score product meets a value product, and decide by experiment what lies between.

before: a functional graph
after:  AttentionSite, EspSite or LotSite for every region that replays a known convention, Refusal with a
        reason for every other attention-like region

Only products are recognised by their operator; each family of sites has its own experiments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from asapc.ir import EspConvention, Program
from asapc.passes.cut import ancestors
from asapc.passes.early_stop import stop_left, stops_by_scores
from asapc.passes.match_esp import EspSite, match_esp
from asapc.passes.match_lot import LotSite, match_lot
from asapc.passes.match_sinkhorn import AttentionSite, examine
from asapc.passes.products import BARRIERS, Unidentified, site_name
from asapc.passes.regions import Refusal, find_regions, unattended

aten = torch.ops.aten
FUSED = {aten.scaled_dot_product_attention.default}

AnySite = AttentionSite | EspSite | LotSite


def match(program: Program) -> list[AnySite | Refusal]:
    """All attention-like regions of a program in graph order, each matched or refused."""
    graph = program.graph
    results: list[tuple[int, AnySite | Refusal]] = []
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    _record_examples(program)
    owned: set[Node] = set()  # inside a site that has been found
    likely: list[EspConvention] = []
    glued = match_lot(program)
    for node, site in glued:
        if isinstance(site, LotSite):
            owned |= {*site.inside, node}
            results.append((order[node], site))
    unknown = {node: site for node, site in glued if isinstance(site, Unidentified)}
    found = find_regions(graph)
    stops = stops_by_scores(program, found)
    for score, regions in [(s, r) for s, r in found.items() if s not in owned]:
        outcomes: list[AttentionSite | Refusal] = []
        for region in regions:
            outcome = examine(program, region, stops.get(score, ()))
            outcomes.append(outcome)
            if isinstance(outcome, AttentionSite):
                break
        chosen = next((o for o in outcomes if isinstance(o, AttentionSite)), None)
        if chosen is not None:
            results.append((order[score], chosen))
            continue
        value = regions[0].value
        sliced = match_esp(program, value, likely)
        if isinstance(sliced, EspSite):
            owned |= {*sliced.inside, value.node}
            likely.append(sliced.convention)
            results.append((order[value.node], sliced))
            continue
        refusal = outcomes[0]
        assert isinstance(refusal, Refusal)
        better = sliced or unknown.get(value.node)
        if better is not None:
            owned |= better.inside
            refusal = replace(refusal, reason=better.reason)
        results.append((order[score], refusal))
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in FUSED:
            reason = "not Sinkhorn: rows only (scaled_dot_product_attention)"
            results.append((order[node], Refusal(site_name(program, node), reason, node.name)))
    left: list[tuple[Node, str]] = []
    for product, reason in unattended(graph, found):
        if product.node in owned:
            continue
        sliced = match_esp(program, product, likely)
        if isinstance(sliced, EspSite):
            owned |= {*sliced.inside, product.node}
            likely.append(sliced.convention)
            results.append((order[product.node], sliced))
            continue
        better = sliced or unknown.get(product.node)
        if better is not None:
            owned |= better.inside - {product.node}
        left.append((product.node, reason if better is None else better.reason))
    results.extend(
        (order[node], Refusal(site_name(program, node), reason, node.name))
        for node, reason in left
        if node not in owned
    )
    results = [(place, _unless_it_stops(program, own)) for place, own in results]
    unique: dict[str, int] = {}
    named: list[AnySite | Refusal] = []
    for _, result in sorted(results, key=lambda pair: pair[0]):
        count = unique[result.name] = unique.get(result.name, 0) + 1
        name = result.name if count == 1 else f"{result.name}#{count}"
        named.append(replace(result, name=name))
    elsewhere = not_the_model(program, named)
    if elsewhere is None:
        return named
    # What the graph computes there is not what the code does, and all that follows sees it.
    why = f"the captured graph is not the model: {elsewhere}"
    return [own if isinstance(own, Refusal) else Refusal(own.name, why, own.part().output.name)
            for own in named]  # fmt: skip


def not_the_model(program: Program, found: Sequence[AnySite | Refusal]) -> str | None:
    """Why a program may compute something else than the model: a branch that is no site's early stop."""
    if not program.stops:
        return None
    tried = {own.score.node for own in found if isinstance(own, AttentionSite)}
    return stop_left(stops_by_scores(program, find_regions(program.graph)), tried)


def _unless_it_stops(program: Program, own: AnySite | Refusal) -> AnySite | Refusal:
    """A sliced or glued plan whose code may end a loop early is refused: only what an early stop changes
    in a Sinkhorn layer is tried."""
    if isinstance(own, EspSite | LotSite):
        part = own.part()
        for stop in program.stops:
            if ancestors(stop.residual, until=BARRIERS) & part.inside:
                reason = "its loops may end early, which is understood in Sinkhorn layers only"
                return Refusal(own.name, reason, part.output.name)
    return own


def _record_examples(program: Program) -> None:
    """Note in node.meta["example"] what the outside inputs of every region hold on the example call."""
    nodes = {
        source
        for regions in find_regions(program.graph).values()
        for region in regions
        for node in region.inside
        for source in node.all_input_nodes
        if source not in region.inside and source is not region.score.node
    }

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if n in nodes and isinstance(value, Tensor):
                n.meta["example"] = value.detach()
            return value

    if nodes:
        flat = pytree.tree_leaves((program.args, program.kwargs))
        with torch.no_grad():
            Recorder(program.graph).run(*flat, enable_io_processing=False)
