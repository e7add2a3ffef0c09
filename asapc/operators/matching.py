"""Exact sorting as gathers: which keys every query meets in every slice, and what that costs.

Equal ranks meet, or those that a coupling pairs (operators.ranks). No N x M matrix is formed. Where
tokens tie and share their mass, plans are formed instead, see operators.esp.

What follows orders may be traced, except the stairs of the monotone coupling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag
from torch.utils.checkpoint import checkpoint

from asapc.ir import Coupling, Ties
from asapc.operators.ranks import Clouds, counts, group_mass, order_of, padded_last, partners, spread

GATHERED_AT_ONCE = 1 << 24  # entries of the keys gathered for several slices together


@dataclass(frozen=True)
class Matching:
    """What every query meets in every slice.

    keys: K of [B, H, L, N], rows of a table of all keys of all heads one after the other.  shares: K of
    them that sum to 1, or None for one key.
    """

    keys: tuple[Tensor, ...]
    shares: tuple[Tensor, ...] | None


def orders_of(clouds: Clouds, ties: Ties) -> tuple[Tensor, Tensor]:
    """The token of every rank, of queries [B, H, L, N] and of keys [B, H, L, M]."""
    of_x = order_of(padded_last(clouds.x, clouds.query_keep), ties)
    return of_x, order_of(padded_last(clouds.y, clouds.keep), ties)


def tie(x: Tensor, order: Tensor, keep: Tensor | None) -> bool:
    """Whether any tokens of x [B, H, L, N] do, which are in order of size."""
    ordered = x.gather(-1, order)
    same = ordered[..., 1:] == ordered[..., :-1]
    if keep is not None:
        later = torch.arange(1, x.shape[-1], device=x.device)
        same = same & (later < spread(keep.sum(-1, keepdim=True), x))
    return bool(same.any())


def rank_partners(
    clouds: Clouds, coupling: Coupling
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """The K ranks of keys that every rank of queries meets, and their shares, each [B or 1, N].

    K is 1 where there are as many of either, 2 interpolated, else at most 1 + ceil(m / n).
    """
    rank = torch.arange(clouds.q.shape[2], device=clouds.q.device)[None]
    if clouds.one_to_one():
        return (rank,), None
    n, m = (count[:, None] for count in counts(clouds))
    rank = torch.minimum(rank, n - 1)  # those of padded tokens stay inside
    low, end = partners(coupling, rank, rank + 1, n, m)
    if coupling == "interpolated":
        gaps = (n - 1).clamp(min=1)
        share = (rank * (m - 1) - low * gaps).to(clouds.q.dtype) / gaps
        return (low, torch.minimum(low + 1, m - 1)), (1 - share, share)
    met, shares = [], []
    for i in range(int((end - low).max())):
        met.append(torch.minimum(low + i, m - 1))
        given = group_mass(coupling, rank, rank + 1, low + i, low + i + 1, n, m)
        shares.append(given.masked_fill(low + i >= m, 0.0).to(clouds.q.dtype))
    return tuple(met), tuple(shares)


def match(clouds: Clouds, order_x: Tensor, order_y: Tensor, coupling: Coupling) -> Matching:
    """Who meets whom, of two clouds whose orders these are."""
    ranks, shares = rank_partners(clouds, coupling)
    rows = order_y + _starts(clouds.k)
    if shares is None:
        by_rank: tuple[Tensor, ...] = (rows,)
    else:
        shape = (*order_x.shape[:3], -1)
        by_rank = tuple(rows.gather(-1, met[:, None, None].expand(*shape)) for met in ranks)

    def by_token(of_ranks: Tensor) -> Tensor:
        out = of_ranks.new_empty(order_x.shape)
        return out.scatter_(-1, order_x, of_ranks.expand(out.shape))

    keys = tuple(map(by_token, by_rank))
    return Matching(keys, shares and tuple(by_token(share[:, None, None]) for share in shares))


def _starts(points: Tensor) -> Tensor:
    """The first row of every head in a table of all points: [B, H, 1, 1].  points: [B, H, M, D]."""
    batch, heads, count, _ = points.shape
    return torch.arange(batch * heads, device=points.device).view(batch, heads, 1, 1) * count


def matched_costs(clouds: Clouds, matching: Matching, squared: bool) -> Tensor:
    """sum_ij |q_i - k_j| P_l,ij [B, H, L], or of its square, in float64, where no tokens tie.

    O(L N D) work. The keys of several slices are gathered together.
    """
    left_out = None if clouds.query_keep is None else ~spread(clouds.query_keep, clouds.x)

    def costs(q: Tensor, k: Tensor, part: slice) -> Tensor:
        total: Tensor | float = 0.0
        for index, rows in enumerate(matching.keys):
            met_keys = k.flatten(0, 2).index_select(0, rows[:, :, part].flatten())
            away = distance(q[:, :, None] - met_keys.view(*rows[:, :, part].shape, k.shape[3]), squared)
            share = None if matching.shares is None else matching.shares[index][:, :, part]
            total = total + (away if share is None else away * share)
        assert isinstance(total, Tensor)
        if left_out is not None:
            total = total.masked_fill(left_out, 0.0)
        return total.sum(-1, dtype=torch.float64)

    most = GATHERED_AT_ONCE
    step = most if torch.compiler.is_exporting() else max(1, most // max(1, clouds.q.numel()))
    parts = [slice(i, i + step) for i in range(0, clouds.num_slices, step)]
    return torch.cat([recomputed(costs, clouds.q, clouds.k, part) for part in parts], -1)


def distance(apart: Tensor, squared: bool) -> Tensor:
    """The norm along the last dimension, whose gradient is 0 at 0, or its square."""
    return apart.square().sum(-1) if squared else torch.linalg.vector_norm(apart, dim=-1)


def cost_matrix(q: Tensor, k: Tensor, squared: bool) -> Tensor:
    """|q_i - k_j| [..., N, M], or its square; by differences, which lose no digits near 0."""
    distance = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.square() if squared else distance


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), whose intermediates are computed again in backward, not kept."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def slice_weights(
    cost: Tensor, inverse_temperature: Tensor, count: Tensor | int, mean_cost: bool,
    slice_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """omega exp(-tau D) over its sum over the slices.  cost: [B, H, L] in float64; count: of the queries;
    slice_weight: [L] or [H, L]."""
    if mean_cost:
        cost = cost / count
    tau = inverse_temperature.to(cost.dtype)[:, None]
    weights = torch.softmax(-tau * (cost - cost.detach().amin(-1, keepdim=True)), -1)
    if slice_weight is None:
        return weights
    weights = weights * slice_weight.to(weights.dtype)
    return weights / weights.sum(-1, keepdim=True)


def gather_sum(matching: Matching, v: Tensor, weights: Tensor) -> Tensor:
    """out_i = sum_l w_l (P_l v)_i: [B, H, N, E].  v: [B, H, M, E]; weights: [B, H, L, N]."""
    rows, shares = torch.cat(matching.keys, 2), matching.shares
    entries = weights if shares is None else torch.cat([weights * share for share in shares], 2)
    batch, heads, count, queries = rows.shape
    rows, entries = (t.transpose(2, 3).reshape(-1, count) for t in (rows, entries))
    table = v.flatten(0, 2)
    out = embedding_bag(rows, table, mode="sum", per_sample_weights=entries.to(table.dtype))
    return out.view(batch, heads, queries, v.shape[3])
