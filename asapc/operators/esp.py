"""Expected sliced plans: attention is a weighted mean of one plan per slice (ESPFormer).

    x_l = q theta_l, y_l = k theta_l;  A_l, B_l sort them, largest first;  P_l = A_l' I B_l
    D_l = sum_ij C_ij P_l,ij,  C_ij = |q_i - k_j| or its square;  w = softmax(-tau D)
    A = factor sum_l w_l P_l

Soft: A_l and B_l are SoftSort matrices, and only one slice's N x M matrices exist at a time.
Hard: they are permutations, which are never formed: matched tokens are gathered.
I interpolates where there are more queries than keys or fewer, and is the identity otherwise.
Source: Shahbazi et al. 2025, ESPFormer, Eqs. 7-11 and Algorithm 1; its code sums distances over all
pairs (`mean_cost` False, `squared_cost` False), the paper averages squares over the queries.

Plain PyTorch, any dtype, differentiable; permutations are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag
from torch.utils.checkpoint import checkpoint

from asapc.operators.sinkhorn import clean_values, widen

GATHERED_AT_ONCE = 1 << 24  # entries of the keys gathered for several slices together


@dataclass(frozen=True)
class Clouds:
    """Queries and keys, 0 in padded rows, in the dtype of the computation, and their slices.

    q: [B, H, N, D]; k: [B, H, M, D]; x: [B, H, L, N]; y: [B, H, L, M]; keep: [B, M] and query_keep:
    [B, N] bool with an active token in every example, or None.
    """

    q: Tensor
    k: Tensor
    x: Tensor
    y: Tensor
    keep: Tensor | None
    query_keep: Tensor | None

    @property
    def num_slices(self) -> int:
        return self.x.shape[2]

    def one_to_one(self) -> bool:
        """Whether there are as many active queries as keys, as far as shapes alone tell."""
        masked = self.keep is not None or self.query_keep is not None
        return not masked and self.x.shape[3] == self.y.shape[3]


def clouds_of(
    q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None, slices: Tensor | None
) -> Clouds:
    """A side without an active token is opened, and `close` empties the result instead."""
    q, k = clean_values(widen(q), query_keep), clean_values(widen(k), keep)
    x, y = projections(q, slices), projections(k, slices)
    return Clouds(q, k, x, y, opened(keep), opened(query_keep))


def opened(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep | ~keep.any(-1, keepdim=True)


def close(result: Tensor, keep: Tensor | None, query_keep: Tensor | None, output_factor: float) -> Tensor:
    """factor * result, 0 for padded queries and examples without a key.  result: [B, H, N, E]."""
    if keep is not None:
        result = result.masked_fill(~keep.any(-1)[:, None, None, None], 0.0)
    if query_keep is not None:
        result = result.masked_fill(~query_keep[:, None, :, None], 0.0)
    return result * output_factor


def projections(points: Tensor, slices: Tensor | None) -> Tensor:
    """[B, H, L, N] of points [B, H, N, D]; slices: [L, D], [H, L, D], or None for the axes.

    Summed in float64 and rounded, so that equal points tie exactly wherever they stand.
    """
    if slices is None:
        return points.transpose(-1, -2)
    return (slices.double() @ points.double().transpose(-1, -2)).to(points.dtype)


def padded_last(x: Tensor, keep: Tensor | None) -> Tensor:
    """x [B, H, ..., N] with padded tokens where a descending sort puts them last."""
    return x if keep is None else x.masked_fill(~_spread(keep, x), -torch.inf)


def descending_order(x: Tensor) -> Tensor:
    """argsort along the last dimension, largest first; ties keep the order of the tokens."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices


def _spread(keep: Tensor, like: Tensor) -> Tensor:
    """[B, N] with the dimensions between that `like` has."""
    return keep.reshape(keep.shape[0], *[1] * (like.dim() - 2), keep.shape[1])


def active(keep: Tensor | None, points: Tensor) -> Tensor:
    """Number of active tokens, [B] int64, or [1] without a mask.  points: [B, H, N, D]."""
    if keep is None:
        return torch.full((1,), points.shape[2], device=points.device)
    return keep.sum(-1)


def interpolation(clouds: Clouds) -> tuple[Tensor, Tensor, Tensor]:
    """Between which two ranks of the keys each rank of the queries falls: low, high and the share
    of high, each [B or 1, N].

    Rank r of n is at r (m - 1) / (n - 1) of m: first meets first, last meets last. The paper's Eq. 11
    as printed gives each neighbour the other's share; this is what its code computes.
    """
    n = active(clouds.query_keep, clouds.q)[:, None]
    m = active(clouds.keep, clouds.k)[:, None]
    rank = torch.arange(clouds.q.shape[2], device=clouds.q.device).expand(n.shape[0], -1)
    gaps = (n - 1).clamp(min=1)
    place = torch.minimum(rank, gaps) * (m - 1)  # in gaps of the queries; padded ranks stay inside
    low = place // gaps
    share = (place - low * gaps).to(clouds.q.dtype) / gaps
    return low, torch.minimum(low + 1, m - 1), share


def soft_sort(x: Tensor, keep: Tensor | None, temperature: float) -> Tensor:
    """softmax_i(-(sort(x)_r - x_i)^2 / temperature) [B, H, r, i], 0 for padded r and i.

    x: [B, H, N].  Source: ESPFormer, Eq. 7, largest value first as in its code.
    """
    ordered = torch.sort(padded_last(x, keep), dim=-1, descending=True).values
    if keep is None:
        return torch.softmax(-((ordered[..., :, None] - x[..., None, :]) ** 2) / temperature, -1)
    rows = torch.arange(x.shape[-1], device=x.device) < keep.sum(-1, keepdim=True)
    rows = _spread(rows, x)
    ordered = ordered.masked_fill(~rows, 0.0)
    logits = -((ordered[..., :, None] - x[..., None, :]) ** 2) / temperature
    logits = logits.masked_fill(~_spread(keep, logits), -torch.inf)
    return torch.softmax(logits, -1).masked_fill(~rows[..., None], 0.0)


def soft_plan(
    x: Tensor,
    y: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    between: tuple[Tensor, Tensor, Tensor] | None,
    sort: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """P = A' I B [B, H, N, M] of one slice, rows sum to about 1.  x: [B, H, N]; y: [B, H, M]."""
    b = sort(y, keep)
    if between is not None:
        low, high, share = (t[:, None, :, None] for t in between)
        below, above = (
            b.gather(-2, ranks.expand(*b.shape[:2], -1, b.shape[3])) for ranks in (low, high)
        )
        b = torch.lerp(below, above, share)
    return sort(x, query_keep).transpose(-1, -2) @ b


def cost_matrix(q: Tensor, k: Tensor, squared: bool) -> Tensor:
    """|q_i - k_j| [B, H, N, M], or its square; by differences, which lose no digits near 0."""
    distance = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.square() if squared else distance


def expected_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
    sort: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """factor sum_l w_l P_l, times v if given, by an online softmax over the slices.

    sort: (x [B, H, N], keep) -> the matrix [B, H, ranks, N] that sorts it.
    Costs meet tau only as differences, which is what keeps the digits of small weights.
    """
    clouds = clouds_of(q, k, keep, query_keep, slices)
    values = None if v is None else clean_values(widen(v), keep)
    cost = cost_matrix(clouds.q, clouds.k, squared_cost)
    between = None if clouds.one_to_one() else interpolation(clouds)
    tau = inverse_temperature.to(cost.dtype).view(-1, 1, 1)
    count = active(clouds.query_keep, clouds.q).view(-1, 1, 1, 1)

    def slice_of(x: Tensor, y: Tensor, cost: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        plan = soft_plan(x, y, clouds.keep, clouds.query_keep, between, sort)
        own = (cost * plan).sum((-1, -2))[..., None, None]  # [B, H, 1, 1]
        return own / count if mean_cost else own, plan if v is None else plan @ v

    width = clouds.k.shape[2] if values is None else values.shape[3]
    result = total = lowest = cost.new_zeros(*clouds.q.shape[:3], width)
    for index in range(clouds.num_slices):
        own, moved = recomputed(slice_of, clouds.x[:, :, index], clouds.y[:, :, index], cost, values)
        before = own.detach() if index == 0 else lowest
        lowest = torch.minimum(before, own.detach())
        kept, weight = torch.exp(-tau * (before - lowest)), torch.exp(-tau * (own - lowest))
        result, total = result * kept + weight * moved, total * kept + weight
    return close(result / total, keep, query_keep, output_factor)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), whose intermediates are computed again in backward, not kept."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def esp_soft(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    softsort_temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    """A v for the map of the soft plans: [B, H, N, E] in v's dtype.

    q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; keep: [B, M] and query_keep: [B, N] bool, True
    on active tokens; slices: theta [L, D] or [H, L, D], None for the D axes; inverse_temperature: tau
    [1] or [H]; mean_cost: D_l is divided by the number of active queries.
    Memory O(N M + N E); a gradient keeps O(L N E) and computes every plan again.
    """
    return expected_plan(
        q, k, v, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost,
        output_factor, lambda x, kept: soft_sort(x, kept, softsort_temperature),
    ).to(v.dtype)  # fmt: skip


def esp_soft_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    softsort_temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    """The map itself, [B, H, N, M] in q's dtype.  Arguments as esp_soft."""
    return expected_plan(
        q, k, None, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost,
        output_factor, lambda x, kept: soft_sort(x, kept, softsort_temperature),
    ).to(q.dtype)  # fmt: skip


def esp_released_hard_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    softsort_temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    """The map [B, H, N, M] of the released code's `hard` flag: every SoftSort row becomes its top entry.

    Not a permutation where rounding or ties give two rows the same top.  Arguments as esp_soft.
    """

    def top(x: Tensor, kept: Tensor | None) -> Tensor:
        soft = soft_sort(x, kept, softsort_temperature)
        chosen = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
        return chosen.masked_fill(soft == 0, 0.0)  # rows of padded tokens stay empty

    return expected_plan(
        q, k, None, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost,
        output_factor, top,
    ).to(q.dtype)  # fmt: skip


@dataclass(frozen=True)
class Matching:
    """The partners of every query in every slice.

    keys: one [B, H, L, N] of indices, or two to interpolate between; share: of the second [B, H, L, N].
    """

    keys: tuple[Tensor, ...]
    share: Tensor | None

    def shares(self) -> tuple[Tensor | float, ...]:
        """Of each of `keys` in a query's row; they sum to 1."""
        return (1.0,) if self.share is None else (1 - self.share, self.share)

    def of_rows(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and their entries in the map [B, H, L or 2 L, N].  weights: [B, H, L, N]."""
        if self.share is None:
            return self.keys[0], weights
        return torch.cat(self.keys, 2), torch.cat([weights * share for share in self.shares()], 2)


def match_ranks(clouds: Clouds) -> Matching:
    """Sort, then equal ranks meet; O(L N log N)."""
    order_x = descending_order(padded_last(clouds.x, clouds.query_keep))
    order_y = descending_order(padded_last(clouds.y, clouds.keep))

    def by_token(of_ranks: Tensor) -> Tensor:  # [B, H, L, ranks of queries] -> [B, H, L, queries]
        return of_ranks.new_empty(of_ranks.shape).scatter_(-1, order_x, of_ranks)

    if clouds.one_to_one():
        return Matching((by_token(order_y),), None)
    low, high, share = (t[:, None, None].expand(order_x.shape) for t in interpolation(clouds))
    keys = tuple(by_token(order_y.gather(-1, ranks)) for ranks in (low, high))
    return Matching(keys, by_token(share))


def matched_costs(clouds: Clouds, matching: Matching, squared: bool) -> Tensor:
    """sum_i |q_i - partner| [B, H, L], or of its square, in float64; O(L N D) work.

    The keys of several slices are gathered together, `GATHERED_AT_ONCE` entries at a time.
    """

    def costs(q: Tensor, k: Tensor, part: slice) -> Tensor:
        total: Tensor | float = 0.0
        for keys, share in zip(matching.keys, matching.shares(), strict=True):
            own = keys[:, :, part]
            rows = own.flatten(2)[..., None].expand(-1, -1, -1, k.shape[3])
            apart = q[:, :, None] - k.gather(2, rows).unflatten(2, own.shape[2:])
            if squared:
                distance = apart.square().sum(-1)
            else:
                distance = torch.linalg.vector_norm(apart, dim=-1)  # gradient 0 where points meet
            total = total + distance * (share[:, :, part] if isinstance(share, Tensor) else share)
        assert isinstance(total, Tensor)
        if clouds.query_keep is not None:
            total = total.masked_fill(~_spread(clouds.query_keep, total), 0.0)
        return total.sum(-1, dtype=torch.float64)

    step = max(1, GATHERED_AT_ONCE // max(1, clouds.q.numel()))
    parts = [slice(i, i + step) for i in range(0, clouds.num_slices, step)]
    return torch.cat([recomputed(costs, clouds.q, clouds.k, part) for part in parts], -1)


def matched_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    """factor sum_l w_l P_l of permutations P_l, times v if given."""
    clouds = clouds_of(q, k, keep, query_keep, slices)
    width = clouds.k.shape[2] if v is None else v.shape[3]
    if 0 in (clouds.x.numel(), clouds.y.numel(), width):
        return clouds.q.new_zeros(*clouds.q.shape[:3], width)
    matching = match_ranks(clouds)
    cost = matched_costs(clouds, matching, squared_cost)
    if mean_cost:
        cost = cost / active(clouds.query_keep, clouds.q)[:, None, None]
    tau = inverse_temperature.to(cost.dtype)[:, None]
    weights = torch.softmax(-tau * (cost - cost.detach().amin(-1, keepdim=True)), -1)
    weights = weights.to(clouds.q.dtype)[..., None].expand(clouds.x.shape)
    keys, shares = matching.of_rows(weights)
    if v is None:
        result = scatter_sum(width, keys, shares)
    else:
        result = gather_sum(clean_values(widen(v), keep), keys, shares)
    return close(result, keep, query_keep, output_factor)


def gather_sum(v: Tensor, keys: Tensor, shares: Tensor) -> Tensor:
    """out_i = sum_l shares_li v[keys_li]: [B, H, N, E].  v: [B, H, M, E]; keys, shares: [B, H, L, N]."""
    batch, heads, count, queries = keys.shape
    first = torch.arange(batch * heads, device=v.device).view(batch, heads, 1, 1) * v.shape[2]
    rows = (keys + first).transpose(2, 3).reshape(-1, count)
    own = shares.transpose(2, 3).reshape(-1, count)
    out = embedding_bag(rows, v.flatten(0, 2), mode="sum", per_sample_weights=own)
    return out.view(batch, heads, queries, v.shape[3])


def scatter_sum(width: int, keys: Tensor, shares: Tensor) -> Tensor:
    """The map that gather_sum multiplies by v, [B, H, N, M].  width: M."""
    batch, heads, count, queries = keys.shape
    result = shares.new_zeros(batch, heads, queries, width)
    for index in range(count):  # one entry a row each: the order of sums is fixed
        own = (part[:, :, index, :, None] for part in (keys, shares))
        result.scatter_add_(3, *own)
    return result


def esp_hard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    """A v for the map of the exact permutations: [B, H, N, E] in v's dtype.

    Arguments as esp_soft.  O(L N (log N + D + E)) time, O(L N) memory, no N x M matrix.
    """
    return matched_plan(
        q, k, v, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost,
        output_factor,
    ).to(v.dtype)  # fmt: skip


def esp_hard_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    """The map itself, [B, H, N, M] in q's dtype, for those who want to see it.  Arguments as esp_soft."""
    return matched_plan(
        q, k, None, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost,
        output_factor,
    ).to(q.dtype)  # fmt: skip
