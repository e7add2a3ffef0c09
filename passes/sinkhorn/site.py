"""Sinkhorn's site, and its call of the finite loop.

before: q k^T -> [mask, bias, the loop] -> A v
after:  torch.ops.asapc.sinkhorn(q, k, v, keep, bias, ...), or stabilised_sinkhorn
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from asapc.features.clouds import shown_queries
from asapc.ir import Convention, SiteTensors
from asapc.operators.sinkhorn import loop_of, opened_keys
from asapc.passes.cut import Part
from asapc.passes.lifting import Lifting, Swap
from asapc.passes.products import Canonical, KeyMask, Product, rank_of
from asapc.passes.site import Site

aten = torch.ops.aten


@dataclass(frozen=True)
class ScoreBias:
    """A node added to the scores with a coefficient, in units of epsilon.

    small: the operator is the loop only where scores are kept beside its numbers, which is checked.
    all_or_nan: the loop gives NaN where a query's numbers are all -inf.
    """

    node: Node
    coefficient: float
    merged: bool
    small: bool = False
    all_or_nan: bool = False


@dataclass(frozen=True)
class LoopSite(Site):
    """A region between a score product and a value product that is a finite loop."""

    score: Product
    value: Product
    mask: KeyMask | None
    inside: tuple[Node, ...]
    inputs: tuple[Node, ...]

    @property
    def at(self) -> Node:
        return self.score.node

    @property
    def masks(self) -> tuple[KeyMask, ...]:
        return () if self.mask is None else (self.mask,)

    def part(self) -> Part:
        """From the operands of the score product to the map."""
        shape = self.score.result.shape
        return Part(
            (self.score.left, self.score.right, *self.inputs), self.value.left,
            frozenset((self.score.node, *self.inside)), self.value.map.order, shape[0], shape[-2],
            shape[-1], tuple((mask.node, mask.true_means_masked) for mask in self.masks),
        )  # fmt: skip


@dataclass(frozen=True)
class AttentionSite(LoopSite):
    """A region that is a finite Sinkhorn loop.

    query_mask: of queries, which is the one of keys or another.
    """

    convention: Convention
    bias: ScoreBias | None
    query_mask: KeyMask | None = None

    @property
    def masks(self) -> tuple[KeyMask, ...]:
        return tuple(dict.fromkeys(x for x in (self.mask, self.query_mask) if x is not None))

    @property
    def value_dim(self) -> int | None:
        width = self.value.values.shape[-1]
        return width if isinstance(width, int) else None

    @property
    def stops_on(self) -> tuple[Node, ...]:
        return (self.score.node,)

    @property
    def takes_empty(self) -> bool:
        return not any(mask.empty.refused for mask in self.masks)

    def opened(self, keep: Tensor) -> Tensor:
        mask = self.mask
        is_open = mask is not None and mask.empty.open and mask.true_means_masked is not None
        return opened_keys(keep) if is_open else keep

    def completed(self, result: Tensor, seen: SiteTensors) -> Tensor:
        power, shown = self.convention.output_factor.shown, shown_queries(seen.bias)
        if power is not None and shown is not None:
            count = shown.expand(-1, seen.q.shape[2]).sum(1).clamp(min=1).to(result.dtype)
            result = result * count[:, None, None, None] ** power
        if self.mask is None or seen.keep is None:
            return result
        share = self.mask.empty.share.value(seen.q.shape[2], seen.k.shape[2])
        # Chosen before the product: a share that is NaN has no part in other examples' gradients.
        return result * torch.where(seen.keep.any(1)[:, None, None, None], 1.0, share)

    def lift(self, lifting: Lifting) -> list[Swap]:
        with lifting.before_map(self.value):
            q, k = lifting.operands(self.score.map, self.score.keys)
            keep = lifting.keep(self.mask, q, k)
            bias = None if self.bias is None else _bias(lifting, self.bias)
            share = lifting.share(self.mask, keep, q, k)
            if self.bias is not None and (self.bias.small or self.bias.all_or_nan):
                kept = lifting.call(torch.ops.asapc.rows_kept.default, bias, self.bias.small)
                q = lifting.call(aten.where.ScalarOther, kept, q, math.nan)
            queries = keep if self.query_mask == self.mask else lifting.keep(self.query_mask, q)
            if self.query_mask is not None:
                assert queries is not None
                shown = lifting.call(aten.unsqueeze.default, queries, 1)  # operators.masks.hidden_queries
                shown = lifting.call(aten.unsqueeze.default, shown, 3)
                hidden = lifting.call(aten.where.Scalar, shown, 0.0, -math.inf)
                bias = hidden if bias is None else lifting.call(aten.add.Tensor, bias, hidden)
                share = _times_shown(lifting, share, queries, self.convention.output_factor.shown, q)
            operator, settings = loop_of(self.convention)
            rest = {"keep": keep, "bias": bias, **settings}
            return lifting.put_map(operator, q, k, rest, self.value, share)


def _times_shown(
    lifting: Lifting, share: Node | None, shown: Node, power: float | None, q: Node
) -> Node | None:
    """A share [B, 1, 1, 1] times a power of the number of shown queries, if there are any."""
    if power is None:
        return share
    count = lifting.call(aten.sum.dim_IntList, shown, [1])
    count = lifting.call(aten.clamp_min.default, lifting.call(aten.view.default, count, [-1, 1, 1, 1]), 1)
    times = lifting.call(aten.pow.Tensor_Scalar, lifting.call(aten.type_as.default, count, q), power)
    return times if share is None else lifting.call(aten.mul.Tensor, share, times)


def _bias(lifting: Lifting, bias: ScoreBias) -> Node:
    """Broadcastable to [B, H, N, M], in units of epsilon."""
    node = lifting.nodes[bias.node]
    if bias.merged and rank_of(bias.node) == 3:
        node = lifting.operand(Canonical(bias.node))
    if abs(bias.coefficient - 1.0) > 1e-9:
        node = lifting.call(aten.mul.Tensor, node, bias.coefficient)
    return node
