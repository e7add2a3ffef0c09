"""Regions: what lies between a product of scores and the product with values that it is used in.

before: a functional graph
after:  candidate regions by their score product, found by the two products alone
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from asapc.passes.cut import (
    ancestors,
    depends_on_data,
    holds_tensors,
    is_bool,
    is_tensor,
    reached,
    reaches,
)
from asapc.passes.masks import spreads_entries, varies
from asapc.passes.plan.loops import find_loops, is_divided_by
from asapc.passes.products import (
    BARRIERS,
    NORMALISERS,
    SORTS,
    Product,
    is_vector,
    product_of,
    rank_of,
    same,
)


@dataclass(frozen=True)
class Refusal:
    """A region that looks like attention and is left alone, with the reason and the node."""

    name: str
    reason: str
    node: str


@dataclass(frozen=True)
class Region:
    """Everything between a score product and the left operand of a value product."""

    score: Product
    value: Product
    inside: tuple[Node, ...]
    inputs: tuple[Node, ...]  # masks and biases: tensors from outside that are more than constants
    roots: tuple[Node, ...] = ()  # of the inputs: masks [B, M] or [B, N] of which others are made inside

    @property
    def attention(self) -> Node:
        return self.value.left


def holds_attention(graph: GraphModule) -> bool:
    """Whether anything in a graph would be matched or refused."""
    regions = find_regions(graph)
    return bool(regions or unattended(graph, regions) or find_loops(graph))


def find_regions(graph: GraphModule) -> dict[Node, list[Region]]:
    """Candidate regions by score product: a product whose result, through anything but a layer,
    becomes the left operand of another product of the same [N, M]."""
    products = {node: product for node in graph.graph.nodes if (product := product_of(node)) is not None}
    regions: dict[Node, list[Region]] = {}
    for value in products.values():
        if is_vector(value):
            continue
        sources = _sources(value.left, products)
        for source in sorted(sources, reverse=True):
            if is_vector(products[source]) and is_divided_by(source):
                continue  # a step of a loop, whose scalings multiply each other
            region = _region(products[source], value)
            if region is not None:
                regions.setdefault(source, []).append(region)
    return _one_score_per_value(regions)


def _one_score_per_value(regions: dict[Node, list[Region]]) -> dict[Node, list[Region]]:
    """Nested products inside one loop (diag(u) K diag(v)) share a value product: the earliest
    score product of a value product owns it."""
    owner: dict[Node, Node] = {}
    for score in sorted(regions):
        for region in regions[score]:
            owner.setdefault(region.value.node, score)
    kept: dict[Node, list[Region]] = {}
    for score, candidates in regions.items():
        # The last value product is the attention's; earlier ones are steps of a loop.
        for region in sorted(candidates, key=lambda r: r.value.node, reverse=True):
            if owner[region.value.node] is score:
                kept.setdefault(score, []).append(region)
    return kept


def _sources(attention: Node, products: dict[Node, Product]) -> list[Node]:
    """Products of the same size as `attention` that it is computed from, without a layer between."""
    # The map itself is one in linear attention, or where a product is a weight: refused later.
    above = reached([attention], lambda n: n.all_input_nodes if _is_local(n) else ()) & products.keys()
    entries = attention.meta["val"].numel()
    return [
        node for node in above
        if node is attention or (_is_local(node) and same(node.meta["val"].numel(), entries))
    ]  # fmt: skip


def _is_local(node: Node) -> bool:
    """Whether it is no layer, which parts one attention from another."""
    return is_tensor(node) and node.target not in BARRIERS


def _region(score: Product, value: Product) -> Region | None:
    """The nodes on data paths from the scores to the attention, or None if a layer is on a path."""
    attention = value.left
    downstream = reached(
        [score.node], lambda n: [user for user in n.users if holds_tensors(user) and not user > attention]
    )
    if attention not in downstream:
        return None
    inside = reached([attention], lambda n: [x for x in n.all_input_nodes if x in downstream])
    inside.discard(score.node)
    if any(node.target in BARRIERS for node in inside):
        return None
    in_order = tuple(sorted(inside))
    entering = dict.fromkeys(source for node in in_order for source in node.all_input_nodes)
    inputs = [
        source for source in entering if source not in inside and source is not score.node
        and is_tensor(source) and not _is_constant(source)
    ]  # fmt: skip
    return Region(score, value, in_order, tuple(inputs))


def _is_constant(node: Node) -> bool:
    """A number, or a tensor computed from shapes alone that holds one value (a uniform marginal).

    A constant mask (causal) or bias (ALiBi) must be seen by the probe, so it counts as an input.
    """
    value = node.meta["val"]
    if value.dtype == torch.bool and value.numel() != 1:
        return False
    if reaches(node, lambda n: n.op == "get_attr" and n.meta["val"].numel() != 1):
        return False
    if depends_on_data(node):
        return False
    example = node.meta.get("example")
    return example is None or example.numel() == 0 or bool((example == example.flatten()[0]).all())


def unattended(graph: GraphModule, regions: Mapping[Node, Sequence[Region]]) -> list[Product]:
    """Normalised weights, and what is made of sorted tokens, that multiply something but do not come from
    a product of two activations."""
    owned = {region.value.node for candidates in regions.values() for region in candidates}
    products = []
    for node in graph.graph.nodes:
        product = product_of(node)
        if product is None or node in owned or is_vector(product):
            continue
        weights = any(_is_normalised(operand) for operand in (product.left, product.right))
        if weights or any(x.target in SORTS for x in ancestors(product.left, until=BARRIERS)):
            products.append(product)
    return products


def _is_normalised(node: Node) -> bool:
    def onward(current: Node) -> list[Node]:
        goes_on = _is_local(current) and (current is node or product_of(current) is None)
        return current.all_input_nodes if goes_on else []

    return any(is_tensor(n) and n.target in NORMALISERS for n in reached([node], onward))


def rooted(region: Region, heads: int) -> Region:
    """The region with the masks, one or two, that everything else in its loop is made of.

    before: inputs (1 - keep) * -1e9, log(1 / n), n and keep[:, :, None] & keep[:, None], of keep [B, M]
    after:  keep is the only input, and how the others are made of it is inside the region

    Then an experiment that hides tokens hides them as the code does. The region is as it is where there
    are more masks, one boolean tensor is made of one that broadcasts to the scores, they have not one row
    for every example, or the scores [B * H, N, M] do not tell what of them are heads.
    """
    made_of: dict[Node, list[Node]] = {}
    made: set[Node] = set()
    for node in region.inputs:
        origin = _made_of(node, region) if depends_on_data(node) else None
        if origin is not None:
            made_of[node], nodes = origin
            made |= nodes
    roots = dict.fromkeys(root for origin in made_of.values() for root in origin)
    if len(roots) not in (1, 2) or (len(made_of) == 1 and _broadcasts(next(iter(made_of)), region)):
        return _with_others_inside(region)
    shape = region.score.result.shape
    if (len(shape) == 4 or heads == 1) and not all(same(x.meta["val"].shape[0], shape[0]) for x in roots):
        return region
    inside = sorted({*region.inside, *made})
    inputs = dict.fromkeys(x for node in region.inputs for x in made_of.get(node, [node]))
    return replace(region, inside=tuple(inside), inputs=tuple(inputs), roots=tuple(roots))


def _with_others_inside(region: Region) -> Region:
    """The region with one input of keys that several are made of, as of ext [B, 1, 1, M], which is added
    to the scores and compared: ext < -1.  What is made of it is inside."""
    data = [node for node in region.inputs if depends_on_data(node)]
    for source in dict.fromkeys([*data, *map(_start, data)]):
        made = {node: nodes for node in data if (nodes := made_only_of(node, [source])) is not None}
        if len(made) > 1 and not varies(source, -2):
            inside = sorted({*region.inside}.union(*made.values()))
            inputs = dict.fromkeys(source if node in made else node for node in region.inputs)
            return replace(region, inside=tuple(inside), inputs=tuple(inputs))
    return region


def _made_of(node: Node, region: Region) -> tuple[list[Node], set[Node]] | None:
    """The masks [B, M] or [B, N], one or two, that a node is computed of, and what is computed on the
    way; None where other data enters, or parameters."""
    above = reached([node], lambda x: () if _is_root(x) else filter(_matters, x.all_input_nodes))
    roots = sorted(current for current in above if _is_root(current))
    between = made_only_of(node, roots)
    if between is None or len(roots) > 2 or any(rank_of(root) != 2 for root in roots):
        return None
    sizes = [(root.meta["val"].shape[-1], region.score.result.shape[-2:]) for root in roots]
    return (roots, between) if all(any(same(x, y) for y in of) for x, of in sizes) else None


def made_only_of(node: Node, roots: Collection[Node]) -> set[Node] | None:
    """What is computed of roots on the way to a node; None where other data enters, or parameters."""
    above = reached([node], lambda x: () if x in roots else filter(_matters, x.all_input_nodes))
    between = above.difference(roots)
    enters = any(x.op != "call_function" or x.target in BARRIERS for x in between)
    return None if enters or between == above else between


def _matters(node: Node) -> bool:
    return is_tensor(node) and not _is_constant(node)


def _is_root(node: Node) -> bool:
    """Whether a mask starts here: it is made of no other, entry by entry, and is no pair of a query and a
    key."""
    if not (is_bool(node) and depends_on_data(node) and _start(node) is node):
        return False
    return rank_of(node) <= 2 or not all(is_bool(x) for x in node.all_input_nodes if is_tensor(x))


def _start(node: Node) -> Node:
    """The boolean mask that another, such as 1 - mask.float() == 0, says the same as, entry by entry."""
    start = node
    while spreads_entries(node):
        sources = [x for x in node.all_input_nodes if is_tensor(x)]
        if len(sources) != 1:
            break
        (node,) = sources
        start = node if is_bool(node) else start
    return start


def _broadcasts(node: Node, region: Region) -> bool:
    """Whether it hides keys alone, as it is."""
    rank = rank_of(node)
    of_keys = rank == 2 or (rank == len(region.score.result.shape) and not varies(node, -2))
    return is_bool(node) and of_keys
