"""Lifting: the operands of a site's operator call, put into a copy of its graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.ir import OutputFactor
from asapc.operators.catalogue import Operator
from asapc.operators.masks import MASKED_BELOW
from asapc.passes.cut import behind
from asapc.passes.products import RESHAPES, SAME, Canonical, KeyMask, Product, rank_of
from asapc.program.calls import SITE, put_call, put_tensor

aten = torch.ops.aten

Swap = tuple[Node, Node, Callable[[Node], bool]]
"""A node, what is put in its place, and for which of its users."""


class Lifting:
    """One site on its way into the copy of a graph.

    index: among the sites; nodes: those of the copy by those of the original; heads: that a merged batch
    has; drop_maps: a map that the model returns is not computed.
    """

    def __init__(
        self, graph: GraphModule, index: int, name: str, heads: int, nodes: Mapping[Node, Node],
        drop_maps: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.index, self.name, self.heads = graph, index, name, heads
        self.nodes, self.drop_maps = nodes, drop_maps

    def call(self, target: Any, *args: Any) -> Node:
        return self.graph.graph.call_function(target, args)

    def before(self, node: Node) -> AbstractContextManager[object]:
        """What is put in stands before this node of the original."""
        return self.graph.graph.inserting_before(self.nodes[node])

    def before_map(self, value: Product) -> AbstractContextManager[object]:
        """Before A v; right behind A where the map has other users, which may stand before A v."""
        if self._is_dense(value):
            return self.graph.graph.inserting_before(self.nodes[value.left].next)
        return self.before(value.node)

    def operand(self, canonical: Canonical) -> Node:
        """[B, H, X, Y]: permuted, and heads split off or added where there are three axes."""
        node = self.turned(self.nodes[canonical.node], canonical.order)
        if rank_of(canonical.node) == 4:
            return node
        if self.heads == 1:
            return self.call(aten.unsqueeze.default, node, 1)
        unmerged = _unmerged(canonical, self.heads)
        if unmerged is not None:
            return self.nodes[unmerged]
        return self.call(aten.unflatten.int, node, 0, [-1, self.heads])

    def operands(self, *canonicals: Canonical, q: Node | None = None) -> list[Node]:
        """[B, H, X, Y] of each, in the batch of q or of one another: learnt points have none."""
        nodes = [self.operand(canonical) for canonical in canonicals]
        single = [_is_single(canonical, self.heads) for canonical in canonicals]
        if not any(single) or (q is None and all(single)):
            return nodes
        batch = self.call(aten.sym_size.int, nodes[single.index(False)] if q is None else q, 0)
        return [
            self.call(aten.expand.default, node, [batch, -1, -1, -1]) if alone else node
            for node, alone in zip(nodes, single, strict=True)
        ]

    def turned(self, node: Node, order: tuple[int, ...] | None) -> Node:
        """With its axes in canonical order."""
        return node if order is None else self.call(aten.permute.default, node, [*order])

    def turned_back(self, node: Node, order: tuple[int, ...] | None) -> Node:
        """From canonical order into that of the graph."""
        if order is None:
            return node
        return self.call(aten.permute.default, node, [order.index(axis) for axis in range(len(order))])

    def tensor(self, what: str, value: Tensor) -> Node:
        """A constant, as a buffer of the graph."""
        return put_tensor(self.graph, self.index, what, value)

    def put(
        self, operator: Operator, q: Node, k: Node | None, values: Node | None, rest: Mapping[str, Any]
    ) -> Node:
        """The site's operator call.  q: the scores of an operator that is given those."""
        call = put_call(self.graph.graph, operator, q, k, values, rest)
        call.meta[SITE] = self.name
        return call

    def put_map(
        self, operator: Operator, q: Node, k: Node, rest: Mapping[str, Any], value: Product,
        shown: Node | None = None,
    ) -> list[Swap]:  # fmt: skip
        """The site's operator call instead of A v, or of A where the map is used otherwise too.

        shown: what the result is multiplied by.
        """
        attention, product = self.nodes[value.left], self.nodes[value.node]
        others = [user for user in attention.users if user is not product]
        dense = self._is_dense(value)
        call = self.put(operator, q, k, None if dense else self.operands(value.values, q=q)[0], rest)
        result = call if shown is None else self.call(aten.mul.Tensor, call, shown)
        if dense:
            return [(attention, self.laid_out(result, value.map), lambda user: user is not call)]
        swaps: list[Swap] = [(product, self.laid_out(result, value.result), lambda user: True)]
        if others:  # maps are dropped: an empty one keeps the structure of the output
            empty = self.call(aten.slice.Tensor, call, 0, 0, 0)
            swaps.append((attention, empty, lambda user: user in others))
        return swaps

    def _is_dense(self, value: Product) -> bool:
        users = self.nodes[value.left].users
        return any(user is not self.nodes[value.node] for user in users) and not self.drop_maps

    def laid_out(self, result: Node, canonical: Canonical) -> Node:
        """The operator's [B, H, X, Y] as the tensor that it replaces has its axes."""
        if rank_of(canonical.node) == 3:
            if self.heads == 1:
                result = self.call(aten.squeeze.dim, result, 1)
            else:
                result = self.call(aten.flatten.using_ints, result, 0, 1)
        return self.turned_back(result, canonical.order)

    def keep(self, mask: KeyMask | None, q: Node, k: Node | None = None) -> Node | None:
        """[B, M] bool, True on active keys, from the mask node wherever it entered.  q: [B, H, N, D];
        k: [B, H, M, D], where all keys of some examples may be active instead of none."""
        if mask is None:
            return None
        batch = self.call(aten.sym_size.int, q, 0)
        entered = self._of_keys(mask)
        keep = entered
        if mask.true_means_masked is None:
            if mask.is_bias:
                keep = self.call(aten.gt.Scalar, keep, MASKED_BELOW)
            else:
                keep = self.call(torch.ops.asapc.kept_keys.default, keep, mask.hides)
        elif mask.true_means_masked:
            keep = self.call(aten.logical_not.default, keep)
        keep = self.call(aten.expand.default, keep, [batch, -1])
        if mask.empty.refused:
            return self.call(torch.ops.asapc.some_keys.default, keep)
        if not mask.empty.open or k is None:
            return keep
        if mask.true_means_masked is None:
            rest = (mask.empty.reach, mask.is_bias)
            return self.call(torch.ops.asapc.keys_of_empty.default, keep, entered, q, k, *rest)
        none = self.call(aten.logical_not.default, self.call(aten.any.dim, keep, 1, True))
        return self.call(aten.logical_or.default, keep, none)

    def _of_keys(self, mask: KeyMask) -> Node:
        """[B or 1, M], what a mask says of each key."""
        narrow = _narrowest(mask.node)
        keys, rank = self.nodes[narrow], rank_of(narrow)
        if mask.merged and rank == 3:
            keys, rank = self.operand(Canonical(narrow)), 4
        elif mask.merged and rank == 2 and self.heads > 1:  # [B * H, M]
            keys, rank = self.call(aten.unflatten.int, keys, 0, [-1, self.heads]), 3
        while rank > 2:
            keys = self.call(aten.select.int, keys, 1, 0)
            rank -= 1
        return self.call(aten.unsqueeze.default, keys, 0) if rank == 1 else keys

    def share(self, mask: KeyMask | None, keep: Node | None, q: Node, k: Node) -> Node | None:
        """[B, 1, 1, 1], by which the operator's result is multiplied, 1 for examples with active keys;
        None where it is 1 for all.  See products.Empty."""
        if mask is None or keep is None:
            return None
        empty, additive = mask.empty, mask.true_means_masked is None
        others = [empty.share, *([empty.infinite] if additive else [])]
        if all(share == SAME for share in others):
            return None
        some = self.call(aten.view.default, self.call(aten.any.dim, keep, 1), [-1, 1, 1, 1])
        if all(share == OutputFactor(0.0) for share in others):
            return some
        none = self.call(aten.logical_not.default, some)
        ones = self.call(aten.new_ones.default, q, [self.call(aten.sym_size.int, q, 0), 1, 1, 1])
        share = self.call(aten.masked_fill.Scalar, ones, none, self._number(empty.share, q, k))
        if additive and empty.infinite != empty.share:
            highest = self.call(aten.amax.default, self._of_keys(mask), [-1])
            lowest = self.call(aten.eq.Scalar, highest, -math.inf)
            low = self.call(aten.view.default, lowest, [-1, 1, 1, 1])
            value = self._number(empty.infinite, q, k)
            share = self.call(aten.masked_fill.Scalar, share, low, value)
        return share

    def _number(self, share: OutputFactor, q: Node, k: Node) -> Any:
        number: Any = share.coefficient
        for tensor, power in ((q, share.queries), (k, share.keys)):
            for _ in range(abs(int(power))):
                size = self.call(aten.sym_size.int, tensor, 2)
                number = self.call(operator.mul if power > 0 else operator.truediv, number, size)
        return number


def _is_single(canonical: Canonical, heads: int) -> bool:
    """Whether it has one batch, of one example: every head's."""
    size = canonical.node.meta["val"].shape[(canonical.order or (0,))[0]]
    return isinstance(size, int) and size == (heads if rank_of(canonical.node) == 3 else 1)


def _unmerged(canonical: Canonical, heads: int) -> Node | None:
    """The [B, H, X, Y] that was merged to [B * H, X, Y], by a copy that kernels do not need."""
    merged, order = canonical.node, canonical.order or (0, 1, 2)
    if merged.target is aten.transpose.int and order == (0, 2, 1):
        before, *axes = merged.args
        if isinstance(before, Node) and axes in ([1, 2], [2, 1], [-1, -2], [-2, -1]):
            merged, order = before, (0, 1, 2)
    source = merged.args[0] if merged.target in RESHAPES else None
    if order != (0, 1, 2) or not isinstance(source, Node):
        return None
    shape, wanted = source.meta["val"].shape, (heads, *merged.meta["val"].shape[1:])
    return source if len(shape) == 4 and [*map(str, shape[1:])] == [*map(str, wanted)] else None


def _narrowest(node: Node) -> Node:
    """The [B, M] tensor a repeated key mask was spread from, so that [B, H, N, M] is never built."""
    current = behind(node, (aten.repeat.default, aten.expand.default, aten.unsqueeze.default))
    sizes = node.meta["val"].shape
    narrow = rank_of(current) == 2 and len(sizes) >= 3
    wanted = [str(sizes[0]), str(sizes[-1])]
    return current if narrow and [*map(str, current.meta["val"].shape)] == wanted else node
