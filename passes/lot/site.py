"""LOT's site, and its call of the glued plans.

before: q -> plan [N, R], k -> plan [R, M], the product of both with the values
after:  torch.ops.asapc.lot(q, k, v, keep, query_keep, None, pivots, ...)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from asapc.ir import LotConvention
from asapc.operators.catalogue import OPERATORS
from asapc.passes.cut import Part
from asapc.passes.lifting import Lifting, Swap
from asapc.passes.products import Canonical, KeyMask, Product
from asapc.passes.site import Site


@dataclass(frozen=True)
class LotSite(Site):
    """A glued plan against pivots.

    inner: plan [R, M] times the values; outer: plan [N, R] times what inner gives.
    pivots: float64 [H, R, D]; mass: float64 [H, R].
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

    takes_values = True

    @property
    def at(self) -> Node:
        return self.outer.node

    def part(self) -> Part:
        """From the queries, keys and values to the output."""
        q, k = self.q.shape, self.k.shape
        both = [mask for mask in (self.mask, self.query_mask) if mask is not None]
        masks = tuple({mask.node: mask.true_means_masked for mask in both}.items())
        return Part(
            (self.q.node, self.k.node, self.inner.right, *(node for node, _ in masks)), self.outer.node,
            self.inside | {self.outer.node}, self.outer.out_order, q[0], q[-2], k[-2], masks,
        )  # fmt: skip

    def lift(self, lifting: Lifting) -> list[Swap]:
        c = self.convention
        with lifting.before(self.outer.node):
            q, k = lifting.operand(self.q), lifting.operand(self.k)
            keep, query_keep = lifting.keep(self.mask, q), lifting.keep(self.query_mask, q)
            rest = {
                "keep": keep, "query_keep": query_keep, "key_bias": None,
                "pivots": lifting.tensor("pivots", self.pivots.float()),
                "pivot_mass": lifting.tensor("pivot_mass", self.mass.float()),
                "query_multiplier": c.queries.score_multiplier, "key_multiplier": c.keys.score_multiplier,
                "query_half_steps": c.queries.half_steps, "queries_first": c.queries.tokens_first,
                "key_half_steps": c.keys.half_steps, "keys_first": c.keys.tokens_first,
                "output_factor": _factor(c),
            }  # fmt: skip
            call = lifting.put(OPERATORS["lot"], q, k, lifting.operand(self.inner.values), rest)
            result = lifting.laid_out(call, self.outer.result)
        return [(lifting.nodes[self.outer.node], result, lambda user: True)]


def _factor(c: LotConvention) -> list[float]:
    """N^a M^b n^c as the operator's n_q^a n_k^b N^c; where a mask enters, tokens attend to each other."""
    factor = c.output_factor
    if c.mask == "none":
        return [factor.coefficient, float(factor.queries), float(factor.keys + factor.active), 0.0]
    return [factor.coefficient, float(factor.active), 0.0, float(factor.queries + factor.keys)]
