"""ESP's site, and its call of soft or exact sorting.

before: q, k -> projections, sorts, plans, slice weights -> A -> A v
after:  torch.ops.asapc.esp_soft(q, k, v, keep, query_keep, slices, ...), or esp_hard
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import EspConvention
from asapc.operators.catalogue import OPERATORS
from asapc.passes.cut import Part
from asapc.passes.lifting import Lifting, Swap
from asapc.passes.products import Canonical, KeyMask, Product, same
from asapc.passes.site import Site


@dataclass(frozen=True)
class EspSite(Site):
    """A sliced-plan region.

    q, k: [B, H, N, D] or [B*H, N, D] nodes.  slices: float64 directions [L, D] or [H, L, D]; weights: of
    slices that have some of their own, float64 [H, L].
    """

    convention: EspConvention
    q: Node
    k: Node
    value: Product
    inside: frozenset[Node]
    mask: KeyMask | None
    slices: Tensor | None
    weights: Tensor | None = None

    @property
    def at(self) -> Node:
        return self.value.node

    def part(self) -> Part:
        """From the queries and keys to the map."""
        q, k = (node.meta["val"].shape for node in (self.q, self.k))
        mask = self.mask
        masks = () if mask is None else ((mask.node, mask.true_means_masked),)
        return Part(
            (self.q, self.k, *(node for node, _ in masks)), self.value.left, self.inside,
            self.value.map.order, q[0], q[-2], k[-2], masks,
        )  # fmt: skip

    def lift(self, lifting: Lifting) -> list[Swap]:
        c = self.convention
        with lifting.before_map(self.value):
            q, k = lifting.operands(Canonical(self.q), Canonical(self.k))
            keep = lifting.keep(self.mask, q)
            each_other = same(*(x.meta["val"].shape[-2] for x in (self.q, self.k)))
            theta = None if self.slices is None else lifting.tensor("slices", self.slices)
            tau = torch.tensor([c.inverse_temperature], dtype=torch.float64)
            name, sorts = "esp_hard", dict[str, Any](ties=c.ties)
            if c.softsort_temperature is not None:
                name, sorts = "esp_soft", {"softsort_temperature": c.softsort_temperature}
            rest = {
                "keep": keep, "query_keep": keep if each_other else None, "slices": theta,
                "inverse_temperature": lifting.tensor("inverse_temperature", tau),
                "squared_cost": c.squared_cost, "mean_cost": c.mean_cost,
                "output_factor": c.output_factor, "coupling": c.coupling or "interpolated", **sorts,
                "query_power": c.query_power, "key_power": c.key_power,
                "slice_weight": None if self.weights is None else lifting.tensor(
                    "slice_weight", self.weights
                ),
            }  # fmt: skip
            return lifting.put_map(OPERATORS[name], q, k, rest, self.value)
