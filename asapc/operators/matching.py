"""Exact sorting as gathers: which keys every query meets in every slice, and what that costs.

Equal ranks meet, or those that a coupling pairs (operators.ranks). Where tokens tie, tables grow instead
of the number of gathers: tied keys become one more row, their mean, and so does what a tied group of
queries receives, so that what ties cost grows with their number. No N x M matrix is formed.

The cost of a slice is linear in its plan, and ties of equal points leave it as any order of them has it.
Of a tied group of different points every pair counts: such plans are formed instead, see operators.esp.

How much there is to do depends on the data: only what follows orders without ties may be traced, and not
the stairs of the monotone coupling.
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
class Ranked:
    """A cloud in order of size: the token of every rank, [B, H, L, N].

    same: [B, H, L, N - 1] bool, whether a rank ties with the one before; None where none does, or where
    ties are not shared.  first, end: the range of ranks that tie with each, None likewise.
    """

    order: Tensor
    same: Tensor | None = None
    first: Tensor | None = None
    end: Tensor | None = None

    @property
    def tied(self) -> Tensor:
        """[B, H, L, N] bool."""
        assert self.first is not None and self.end is not None
        return self.end - self.first > 1


@dataclass(frozen=True)
class Bag:
    """Rows that a table grows by: weighted sums of those it has.

    rows, weights: [T]; starts: [G], where each sum begins among them.
    """

    rows: Tensor
    weights: Tensor
    starts: Tensor

    def grown(self, table: Tensor) -> Tensor:
        sums = embedding_bag(
            self.rows, table, self.starts, mode="sum", per_sample_weights=self.weights.to(table.dtype)
        )
        return torch.cat([table, sums])


@dataclass(frozen=True)
class Matching:
    """What every query meets in every slice.

    keys: K of [B, H, L, N], rows of the table; shares: K of them that sum to 1, or None for one key.
    means: what the table, all keys of all heads one after the other, grows by.
    met, met_shares: the same with ties in the order of the tokens, rows of the keys alone.
    """

    keys: tuple[Tensor, ...]
    shares: tuple[Tensor, ...] | None
    means: tuple[Bag, ...]
    met: tuple[Tensor, ...]
    met_shares: tuple[Tensor, ...] | None

    def table(self, values: Tensor) -> Tensor:
        """[rows, E] of values [B, H, M, E]."""
        table = values.flatten(0, 2)
        for bag in self.means:
            table = bag.grown(table)
        return table

    def weighted(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and their entries [B, H, K L, N].  weights: of the slices [B, H, L, N]."""
        if self.shares is None:
            return self.keys[0], weights
        return torch.cat(self.keys, 2), torch.cat([weights * share for share in self.shares], 2)


def ranked(x: Tensor, keep: Tensor | None, ties: Ties) -> Ranked:
    """x [B, H, L, N] in order, and where tokens tie if they share."""
    x = padded_last(x, keep)
    order = order_of(x, ties)
    if ties != "shared":
        return Ranked(order)
    ordered = x.gather(-1, order)
    same = ordered[..., 1:] == ordered[..., :-1]
    if keep is not None:
        later = torch.arange(1, x.shape[-1], device=x.device)
        same = same & (later < spread(keep.sum(-1, keepdim=True), x))
    if not bool(same.any()):
        return Ranked(order)
    return Ranked(order, same, *group_bounds(same))


def group_bounds(same: Tensor) -> tuple[Tensor, Tensor]:
    """The first rank of every rank's group and the one behind its last, [..., N].  same: [..., N - 1]."""
    ranks = torch.arange(1, same.shape[-1] + 2, device=same.device)
    rank, last = ranks[:-1], ranks[-1:]
    first = torch.nn.functional.pad(torch.where(same, 0, rank), (1, 0))
    end = torch.cat([torch.where(same, last, rank), last.expand(*same.shape[:-1], 1)], -1)
    return first.cummax(-1).values, end.flip(-1).cummin(-1).values.flip(-1)


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


def match(clouds: Clouds, queries: Ranked, keys: Ranked, coupling: Coupling) -> Matching:
    """Who meets whom, of two clouds in order."""
    ranks, shares = rank_partners(clouds, coupling)
    size, bags = clouds.k[..., 0].numel(), []
    rows = plain = keys.order + _starts(clouds.k)
    if keys.same is not None:
        (rows,), _, bag = _shared(keys, (rows,), None, size)
        bags.append(bag)
        size += len(bag.starts)

    def of_ranks(rows: Tensor) -> tuple[Tensor, ...]:  # [B, H, L, M] -> K of [B, H, L, N]
        if shares is None:
            return (rows,)
        shape = (*queries.order.shape[:3], -1)
        return tuple(rows.gather(-1, met[:, None, None].expand(*shape)) for met in ranks)

    def by_token(of_ranks: Tensor) -> Tensor:
        out = of_ranks.new_empty(queries.order.shape)
        return out.scatter_(-1, queries.order, of_ranks.expand(out.shape))

    def all_by_token(of_ranks: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
        return None if of_ranks is None else tuple(map(by_token, of_ranks))

    by_rank = of_ranks(rows)
    shares_by_rank = None if shares is None else tuple(share[:, None, None] for share in shares)
    met_shares = all_by_token(shares_by_rank)
    if queries.same is None:
        found, found_shares = tuple(map(by_token, by_rank)), met_shares
    else:
        by_rank, shares_by_rank, bag = _shared(queries, by_rank, shares_by_rank, size)
        bags.append(bag)
        found, found_shares = tuple(map(by_token, by_rank)), all_by_token(shares_by_rank)
    met = found if not bags else tuple(map(by_token, of_ranks(plain)))
    return Matching(found, found_shares, tuple(bags), met, met_shares)


def _starts(points: Tensor) -> Tensor:
    """The first row of every head in a table of all points: [B, H, 1, 1].  points: [B, H, M, D]."""
    batch, heads, count, _ = points.shape
    return torch.arange(batch * heads, device=points.device).view(batch, heads, 1, 1) * count


def _shared(
    tokens: Ranked, rows: tuple[Tensor, ...], shares: tuple[Tensor, ...] | None, size: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None, Bag]:
    """rows and shares with one row, the mean of what its group has, in place of every tied rank's.

    rows: K of [B, H, L, R] of a table of `size`; shares: K that broadcast to them.
    """
    assert tokens.first is not None and tokens.end is not None
    tied, shape = tokens.tied, tokens.order.shape
    where = tied.flatten().nonzero()[:, 0]
    begins = tokens.first.flatten()[where] == where % shape[-1]
    weight = (tokens.end - tokens.first).flatten()[where].double().reciprocal()
    given = [weight] * len(rows)
    if shares is not None:
        given = [share.expand(shape).flatten()[where] * weight for share in shares]
    bag = Bag(
        torch.stack([row.flatten()[where] for row in rows], -1).flatten(),
        torch.stack(given, -1).flatten(),
        begins.nonzero()[:, 0] * len(rows),
    )
    first = rows[0].masked_scatter(tied, size + begins.cumsum(0) - 1)
    if shares is not None:
        shares = tuple(torch.where(tied, float(i == 0), share) for i, share in enumerate(shares))
    return (first, *rows[1:]), shares, bag


def tie_apart(tokens: Ranked, points: Tensor) -> bool:
    """Whether any that tie are different points [B, H, N, D]."""
    if tokens.same is None:
        return False
    where = torch.nn.functional.pad(tokens.same, (1, 0)).flatten().nonzero()[:, 0]
    rows, flat = (tokens.order + _starts(points)).flatten(), points.flatten(0, 2)
    return bool((flat[rows[where]] != flat[rows[where - 1]]).any())


def matched_costs(clouds: Clouds, matching: Matching, squared: bool) -> Tensor:
    """sum_ij |q_i - k_j| P_l,ij [B, H, L], or of its square, in float64, where only equal points tie.

    O(L N D) work. The keys of several slices are gathered together.
    """
    left_out = None if clouds.query_keep is None else ~spread(clouds.query_keep, clouds.x)

    def costs(q: Tensor, k: Tensor, part: slice) -> Tensor:
        total: Tensor | float = 0.0
        for index, rows in enumerate(matching.met):
            met_keys = k.flatten(0, 2).index_select(0, rows[:, :, part].flatten())
            away = distance(q[:, :, None] - met_keys.view(*rows[:, :, part].shape, k.shape[3]), squared)
            share = None if matching.met_shares is None else matching.met_shares[index][:, :, part]
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
    rows, entries = matching.weighted(weights)
    batch, heads, count, queries = rows.shape
    rows, entries = (t.transpose(2, 3).reshape(-1, count) for t in (rows, entries))
    table = matching.table(v)
    out = embedding_bag(rows, table, mode="sum", per_sample_weights=entries.to(table.dtype))
    return out.view(batch, heads, queries, v.shape[3])


def scatter_sum(matching: Matching, width: int, weights: Tensor) -> Tensor:
    """The map that gather_sum multiplies by v, [B, H, N, M], where nothing ties.  width: M."""
    rows, entries = matching.weighted(weights)
    keys, (batch, heads, count, queries) = rows % width, rows.shape
    result = entries.new_zeros(batch, heads, queries, width)
    for index in range(count):  # one entry a row each: the order of sums is fixed
        result.scatter_add_(3, *(part[:, :, index, :, None] for part in (keys, entries)))
    return result
