"""LOT's site, and its call of the glued plans.

before: q -> plan [N, R], k -> plan [R, M], the product of both with the values
after:  torch.ops.asapc.lot(q, k, v, keep, query_keep, None, pivots, ...)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import LotConvention
from asapc.operators.catalogue import OPERATORS
from asapc.passes.cut import Part
from asapc.passes.lifting import Lifting, Swap
from asapc.passes.products import Canonical, KeyMask, Product, rank_of
from asapc.passes.site import Site

aten = torch.ops.aten


@dataclass(frozen=True)
class LotSite(Site):
    """A glued plan against pivots.

    inner: plan [R, M] times the values; outer: plan [N, R] times what inner gives.
    q, k: tokens, or scores with unit vectors as pivots.  pivots: float64 [H, R, D]; mass: float64 [H, R];
    weight: omega, float64 [H, R]; interleaved: see operators.lot.  covers: all that belongs to it, the
    product of its scores too.  row_sums: what is the map times ones, by which code divides.
    """

    convention: LotConvention
    q: Canonical
    k: Canonical
    inner: Product
    outer: Product
    inside: frozenset[Node]
    mask: KeyMask | None
    query_mask: KeyMask | None
    pivots: Tensor
    mass: Tensor
    interleaved: bool = False
    weight: Tensor | None = None
    covers: frozenset[Node] = frozenset()
    row_sums: Node | None = None

    takes_values = True

    @property
    def at(self) -> Node:
        return self.outer.node

    @property
    def stops_on(self) -> frozenset[Node]:
        return self.covers

    def part(self) -> Part:
        """From the queries, keys and values to the output."""
        q, k = self.q.shape, self.k.shape
        both = [mask for mask in (self.mask, self.query_mask) if mask is not None]
        masks = tuple({mask.node: mask.true_means_masked for mask in both}.items())
        return Part(
            (self.q.node, self.k.node, self.inner.right, *(node for node, _ in masks)), self.outer.node,
            self.inside | {self.outer.node}, self.outer.result.order, q[0], q[-2], k[-2], masks,
        )  # fmt: skip

    def lift(self, lifting: Lifting) -> list[Swap]:
        c = self.convention
        with lifting.before(min(node for node in (self.outer.node, self.row_sums) if node is not None)):
            q, k = lifting.operands(self.q, self.k)
            keep, query_keep = lifting.keep(self.mask, q), lifting.keep(self.query_mask, q)
            rest = {
                "keep": keep, "query_keep": query_keep, "key_bias": None,
                "pivots": lifting.tensor("pivots", self.pivots.float()),
                "pivot_mass": lifting.tensor("pivot_mass", self.mass.float()),
                "query_multiplier": c.queries.score_multiplier, "key_multiplier": c.keys.score_multiplier,
                "query_half_steps": c.queries.half_steps, "queries_first": c.queries.tokens_first,
                "key_half_steps": c.keys.half_steps, "keys_first": c.keys.tokens_first,
                "output_factor": _factor(c), "interleaved": self.interleaved,
                "pivot_weight": None if self.weight is None else lifting.tensor(
                    "pivot_weight", self.weight.float()
                ),
            }  # fmt: skip
            (values,) = lifting.operands(self.inner.values, q=q)
            product = lifting.nodes[self.outer.node]
            if self.row_sums is None:
                call = lifting.put(OPERATORS["lot"], q, k, values, rest)
                return [(product, lifting.laid_out(call, self.outer.result), lambda user: True)]
            one = lifting.call(aten.ones_like.default, lifting.call(aten.slice.Tensor, values, -1, 0, 1))
            with_ones = lifting.call(aten.cat.default, [values, one], -1)
            call = lifting.put(OPERATORS["lot"], q, k, with_ones, rest)
            output = lifting.call(aten.slice.Tensor, call, -1, 0, -1)
            output = lifting.laid_out(output, self.outer.result)
            sums = lifting.call(aten.slice.Tensor, call, -1, -1)  # [B, H, N, 1]
            if not ends_in_one(self.row_sums):
                sums = lifting.call(aten.squeeze.dim, sums, -1)
            if rank_of(self.row_sums) < 3 + ends_in_one(self.row_sums):
                sums = lifting.call(aten.flatten.using_ints, sums, 0, 1)
        return [
            (product, output, lambda user: True),
            (lifting.nodes[self.row_sums], sums, lambda user: True),
        ]


def ends_in_one(node: Node) -> bool:
    """Whether a tensor's last axis has one entry."""
    size = node.meta["val"].shape[-1]
    return isinstance(size, int) and size == 1


def _factor(c: LotConvention) -> list[float]:
    """N^a M^b n^c as the operator's n_q^a n_k^b N^c; where a mask enters, tokens attend to each other."""
    factor = c.output_factor
    if c.mask == "none":
        return [factor.coefficient, float(factor.queries), float(factor.keys + factor.active), 0.0]
    return [factor.coefficient, float(factor.active), 0.0, float(factor.queries + factor.keys)]
