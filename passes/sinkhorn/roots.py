"""Roots: the boolean key mask that everything else in a loop is made of.

before: inputs (1 - keep) * -1e9, log(1 / n), n and keep[:, :, None] & keep[:, None], of keep [B, M]
after:  keep is the only input, and how the others are made of it is inside the region

Then an experiment that hides keys hides them as the code does, with the numbers that it has, whatever the
data holds.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from asapc.passes.cut import depends_on_data, is_bool, is_tensor, mask_root, reached
from asapc.passes.masks import varies
from asapc.passes.products import BARRIERS, rank_of, same
from asapc.passes.regions import Region


def rooted(region: Region, heads: int) -> Region:
    """The region with the mask as its input in place of all that is made of it; as it is where there are
    several, one boolean tensor is made of it that broadcasts to the scores, it has not one row for every
    example, or the scores [B * H, N, M] do not tell what of them are heads."""
    roots: dict[Node, Node] = {}
    made: set[Node] = set()
    for node in region.inputs:
        found = _made_of(node, region) if depends_on_data(node) else None
        if found is not None:
            roots[node], nodes = found
            made |= nodes
    if len(set(roots.values())) != 1 or (len(roots) == 1 and _broadcasts(next(iter(roots)), region)):
        return region
    (root,) = set(roots.values())
    shape = region.score.result.shape
    if (len(shape) == 4 or heads == 1) and not same(root.meta["val"].shape[0], shape[0]):
        return region
    inside = sorted({*region.inside, *made})
    inputs = dict.fromkeys(roots.get(node, node) for node in region.inputs)
    return replace(region, inside=tuple(inside), inputs=tuple(inputs), root=root)


def _made_of(node: Node, region: Region) -> tuple[Node, set[Node]] | None:
    """The only mask [B, M] that a node is computed of, and what is computed on the way; None where other
    data enters, or parameters."""
    def onward(current: Node) -> list[Node]:
        return [] if _is_root(current) else [x for x in current.all_input_nodes if is_tensor(x)]

    above = reached([node], onward)
    found = {current for current in above if _is_root(current)}
    between = above - found
    enters = any(x.op != "call_function" or x.target in BARRIERS for x in between)
    if enters or len(found) != 1:
        return None
    (root,) = found
    keys = region.score.result.shape[-1]
    return (root, between) if rank_of(root) == 2 and same(root.meta["val"].shape[-1], keys) else None


def _is_root(node: Node) -> bool:
    """Whether a mask starts here: it is no view of another, and no pair of a query and a key."""
    if not (is_bool(node) and depends_on_data(node) and mask_root(node) is node):
        return False
    return rank_of(node) <= 2 or not all(is_bool(x) for x in node.all_input_nodes if is_tensor(x))


def _broadcasts(node: Node, region: Region) -> bool:
    """Whether it hides keys alone, as it is."""
    rank = rank_of(node)
    of_keys = rank == 2 or (rank == len(region.score.result.shape) and not varies(node, -2))
    return is_bool(node) and of_keys
