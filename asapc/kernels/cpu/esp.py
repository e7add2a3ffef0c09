"""CPU twins of operators/esp.py, on worker threads by heads; padded tokens are dropped, not multiplied.

Hard: NumPy sorts one integer per token that holds value and index, the distances of a slice are taken in
cache, and the weighted gathers of all slices are one embedding_bag. Heads in which tokens tie go the way
of operators.matching from there.

Soft: of short sequences all slices are formed at once, as the reference does. Else a SoftSort entry
below exp(-reach) is beyond rounding. Small heads are stacked, and such entries raised to that, because
numbers that fall out of the normal range cost a hundred times more than others. In large heads tokens are
put in order and only the band within reach is computed, a block of ranks at a time: at a low temperature
that is a small part of the N x M x N products of every slice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from asapc.ir import Coupling, Ties
from asapc.kernels.cpu.workers import TILE_BYTES, each_group
from asapc.operators import esp as reference
from asapc.operators.esp import REACH
from asapc.operators.matching import (
    Ranked,
    cost_matrix,
    gather_sum,
    group_bounds,
    match,
    matched_costs,
    rank_partners,
    ranked,
    slice_weights,
)
from asapc.operators.ranks import Clouds, clouds_of, counts, partners, rank_matrix
from asapc.operators.sinkhorn import widen

SHORT = 4096  # entries of a slice's plans, of all heads, up to which calls cost more than what they do
RANKS = 128  # rows of a SoftSort matrix computed together, where not all of them are

# Of heads without padded tokens:
# (their clouds [1, G, ...], v [G, M, E], tau [G], weights of slices [G, L]) -> [G, N, E]
Core = Callable[[Clouds, Tensor, Tensor, Tensor], Tensor]


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
    coupling: Coupling = "interpolated",
    slice_weight: Tensor | None = None,
) -> Tensor:
    """As operators.esp.esp_soft."""
    if _is_short(q, k):
        return reference.esp_soft(
            q, k, v, keep, query_keep, slices, inverse_temperature, softsort_temperature, squared_cost,
            mean_cost, output_factor, coupling, slice_weight,
        )  # fmt: skip

    def stacked(clouds: Clouds, v: Tensor, tau: Tensor, omega: Tensor) -> Tensor:
        cost = cost_matrix(clouds.q, clouds.k, squared_cost)[0]
        if mean_cost:
            cost /= cost.shape[1]
        together = max(1, TILE_BYTES // (2 * cost.numel() * cost.element_size()))
        return _stacked_heads(
            clouds.x[0], clouds.y[0], cost, v, rank_matrix(clouds, coupling), tau.to(v.dtype),
            omega.to(v.dtype), softsort_temperature, REACH[v.dtype], together,
        )  # fmt: skip

    def banded(clouds: Clouds, v: Tensor, tau: Tensor, omega: Tensor) -> Tensor:
        args = (softsort_temperature, squared_cost, mean_cost, coupling)
        return _banded_head(clouds, v[0], float(tau), omega[0].tolist(), *args)[None]

    core, size = (stacked, 2 * _plan_bytes(q, k)) if _is_stacked(q, k) else (banded, None)
    weighing = inverse_temperature, slice_weight
    out = _by_heads(q, k, v, keep, query_keep, slices, *weighing, size, core)
    return out.mul_(output_factor).to(v.dtype)


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
    coupling: Coupling = "interpolated",
    ties: Ties = "shared",
    slice_weight: Tensor | None = None,
) -> Tensor:
    """As operators.esp.esp_hard."""

    def core(clouds: Clouds, v: Tensor, tau: Tensor, omega: Tensor) -> Tensor:
        queries, keys = _ranked(clouds.x, ties), _ranked(clouds.y, ties)
        if queries.same is not None or keys.same is not None:
            return _tied_heads(clouds, v, tau, omega, queries, keys, squared_cost, mean_cost, coupling)
        points = clouds.q[0, 0]
        together = max(1, TILE_BYTES // (4 * points.numel() * points.element_size()))
        ranks, shares = rank_partners(clouds, coupling)
        return _matched_heads(
            clouds.q[0], clouds.k[0], v, queries.order[0], keys.order[0],
            [] if shares is None else [met[0] for met in ranks],
            [] if shares is None else [share[0] for share in shares],
            tau.double(), omega.double(), squared_cost, mean_cost, together,
        )  # fmt: skip

    num_slices = q.shape[3] if slices is None else slices.shape[-2]
    size = 4 * num_slices * max(q.shape[2], k.shape[2]) * torch.int64.itemsize
    weighing = inverse_temperature, slice_weight
    out = _by_heads(q, k, v, keep, query_keep, slices, *weighing, size, core)
    return out.mul_(output_factor).to(v.dtype)


def describe_soft(q: Tensor, k: Tensor) -> tuple[str, str]:
    """What esp_soft runs, and why."""
    if _is_short(q, k):
        return "CPU, all slices at once", "the plans of a slice are so small that a call costs more"
    mib = f"one slice's plan takes {_plan_bytes(q, k) / 2**20:.2f} MiB of a head"
    if _is_stacked(q, k):
        return "CPU, heads stacked", f"{mib}, which a private cache holds"
    return "CPU, banded", f"{mib}: only what the SoftSort temperature reaches is computed"


def describe_hard() -> tuple[str, str]:
    """What esp_hard runs, and why."""
    return "CPU, sorted and gathered", "the tensors are on the CPU"


def _is_short(q: Tensor, k: Tensor) -> bool:
    return q.shape[:2].numel() * q.shape[2] * k.shape[2] <= SHORT


def _plan_bytes(q: Tensor, k: Tensor) -> int:
    return q.shape[2] * k.shape[2] * widen(q).element_size()


def _is_stacked(q: Tensor, k: Tensor) -> bool:
    return _plan_bytes(q, k) <= TILE_BYTES


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    tau: Tensor,
    slice_weight: Tensor | None,
    head_bytes: int | None,
    core: Core,
) -> Tensor:
    """core on tiles of heads, their active tokens alone: [B, H, N, E] in the dtype of the computation."""
    q, k, v = widen(q.detach()), widen(k.detach()), widen(v.detach())
    batch, heads, queries, _ = q.shape
    out = q.new_zeros(batch, heads, queries, v.shape[3])
    if 0 in (out.numel(), k.numel()):
        return out
    tau = tau.detach().expand(heads)
    slices = None if slices is None else slices.detach().expand(heads, -1, -1)
    count = q.shape[3] if slices is None else slices.shape[-2]
    omega = q.new_ones(heads, count) if slice_weight is None else slice_weight.detach().expand(heads, -1)
    masked = keep is not None or query_keep is not None
    result = out
    if not masked:  # every example is alike: all heads are those of one
        q, k, v, result = (t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v, out))
        tau, omega = tau.repeat(batch), omega.repeat(batch, 1)
        slices = None if slices is None else slices.repeat(batch, 1, 1)
    for example in range(len(q)):
        rows, columns = _active(query_keep, example), _active(keep, example)
        one_q, one_k, one_v, moved = q[example], k[example], v[example], result[example]
        if rows is not None:
            one_q = one_q[:, rows]
        if columns is not None:
            one_k, one_v = one_k[:, columns], one_v[:, columns]
        if 0 in (one_q.numel(), one_k.numel()):
            continue
        found = moved if rows is None else torch.empty_like(moved[:, : len(rows)])
        cloud = one_q, one_k, one_v, slices, tau, omega
        each_group(partial(_some_heads, core, cloud, found), q.shape[1], head_bytes, tiles=2)
        if rows is not None:
            moved.index_copy_(1, rows, found)
    return out


def _some_heads(
    core: Core,
    cloud: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor],
    found: Tensor,
    parts: Iterator[slice],
) -> None:
    """core on parts of the heads of one example, written to found [H, N, E]."""
    q, k, v, slices, tau, omega = cloud
    for part in parts:
        some_slices = None if slices is None else slices[part]
        clouds = clouds_of(q[None, part], k[None, part], None, None, some_slices)
        found[part] = core(clouds, v[part], tau[part], omega[part])


def _active(keep: Tensor | None, example: int) -> Tensor | None:
    """Indices of the active tokens of one example, None for all."""
    return None if keep is None else keep[example].nonzero().squeeze(1)


def _descending_order(x: Tensor) -> Tensor:
    """argsort, largest first, ties in order: six times faster than torch.sort where NumPy has vectors."""
    if x.dtype != torch.float32:
        return torch.sort(x, dim=-1, descending=True, stable=True).indices
    return _sorted_keys(x) & 0xFFFFFFFF


def _sorted_keys(x: Tensor) -> Tensor:
    """int64 that sort as float32 do from the largest on: their bits, read as an integer that has that
    order, in the upper half and the index in the lower."""
    bits = (x.contiguous() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (~bits).long().bitwise_left_shift_(32)
    keys |= torch.arange(x.shape[-1])
    keys.numpy().sort(-1)
    return keys


def _ranked(x: Tensor, ties: Ties) -> Ranked:
    """As operators.matching.ranked; ties are seen in the sorted keys."""
    if ties != "shared" or x.dtype != torch.float32:
        return ranked(x, None, ties, _descending_order)
    keys = _sorted_keys(x)
    order, upper = keys & 0xFFFFFFFF, keys.numpy().view("i4")[..., int(sys.byteorder == "little") :: 2]
    same = upper[..., 1:] == upper[..., :-1]
    if not same.any():
        return Ranked(order)
    found = torch.from_numpy(same)
    return Ranked(order, found, *group_bounds(found))


def _tied_heads(
    clouds: Clouds,
    v: Tensor,
    tau: Tensor,
    omega: Tensor,
    queries: Ranked,
    keys: Ranked,
    squared_cost: bool,
    mean_cost: bool,
    coupling: Coupling,
) -> Tensor:
    """As _matched_heads, with the same means of tied tokens as the plain operator."""
    matching = match(clouds, queries, keys, coupling)
    at_once = TILE_BYTES // (4 * v.element_size())
    cost = matched_costs(clouds, queries, keys, matching, coupling, squared_cost, at_once)
    weights = slice_weights(cost, tau, clouds.q.shape[2], mean_cost, omega).to(v.dtype)
    return gather_sum(matching, v[None], weights[..., None].expand(clouds.x.shape))[0]


def _distances(q: Tensor, k: Tensor, keys: Tensor, squared: bool, together: int) -> Tensor:
    """|q_i - k[keys_li]| [G, L, N], or its square.  q: [G, N, D]; k: [G, M, D]; keys: [G, L, N].

    together: the slices whose keys are gathered at once.
    """
    ones = torch.ones_like(q[0, 0])
    out = torch.empty([keys.size(0), keys.size(1), keys.size(2)], dtype=q.dtype)
    for head in range(keys.size(0)):
        for start in range(0, keys.size(1), together):
            part = keys[head, start : start + together]
            apart = torch.index_select(k[head], 0, part.flatten()).view(part.size(0), -1, k.size(2))
            apart.sub_(q[head]).square_()
            torch.mv(apart.flatten(0, 1), ones, out=out[head, start : start + together].view(-1))
    return out if squared else out.sqrt_()


def _matched_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order_x: Tensor,
    order_y: Tensor,
    ranks: list[Tensor],
    shares: list[Tensor],
    tau: Tensor,
    omega: Tensor,
    squared_cost: bool,
    mean_cost: bool,
    together: int,
) -> Tensor:
    """sum_l w_l P_l v [G, N, E].  q: [G, N, D]; k: [G, M, D]; v: [G, M, E]; order_x: [G, L, N];
    order_y: [G, L, M]; ranks, shares: of the keys that every rank of queries meets, [N] each, or
    nothing where equal ranks meet; tau: [G] and omega: [G, L] in float64.
    """
    one_to_one = len(ranks) == 0
    found: list[Tensor] = []
    parts: list[Tensor] = []
    distances = torch.zeros([1], dtype=q.dtype)
    for i in range(max(1, len(ranks))):
        met = order_y if one_to_one else order_y.index_select(2, ranks[i])
        by_token = torch.empty_like(order_x).scatter_(2, order_x, met)  # by token, not by rank
        found.append(by_token)
        away = _distances(q, k, by_token, squared_cost, together)
        if not one_to_one:
            if i == 1 and len(ranks) == 2:
                part = 1.0 - parts[0]
            else:
                part = torch.empty_like(away).scatter_(2, order_x, shares[i].expand_as(order_x))
            parts.append(part)
            away.mul_(part)
        distances = away if i == 0 else distances.add_(away)
    cost = distances.sum(-1, dtype=torch.float64)  # [G, L]
    if mean_cost:
        cost /= q.size(1)
    weights = torch.softmax(-tau.unsqueeze(1) * (cost - cost.amin(-1, keepdim=True)), -1) * omega
    weights = (weights / weights.sum(-1, keepdim=True)).to(v.dtype)
    entries = weights.unsqueeze(2).expand_as(order_x)
    keys = found[0]
    if not one_to_one:
        keys = torch.cat(found, 1)
        entries = torch.cat(parts, 1) * entries.repeat(1, len(ranks), 1)
    first = torch.arange(k.size(0)).view(-1, 1, 1) * k.size(1)
    rows = (keys + first).transpose(1, 2).reshape(-1, keys.size(1))
    row_weights = entries.transpose(1, 2).reshape(-1, keys.size(1))
    out = embedding_bag(rows, v.flatten(0, 1), mode="sum", per_sample_weights=row_weights)
    return out.view(q.size(0), q.size(1), v.size(2))


def _soft_rows(rows: Tensor, x: Tensor, temperature: float, reach: float) -> Tensor:
    """Rows of SoftSort: softmax_i(max(-(rows_r - x_i)^2 / temperature, -reach)) [..., R, N]."""
    logits = (rows.unsqueeze(-1) - x.unsqueeze(-2)).square_().div_(-temperature)
    return torch.softmax(logits.clamp_(min=-reach), -1)


def _stacked_heads(
    x: Tensor,
    y: Tensor,
    cost: Tensor,
    v: Tensor,
    ranks: Tensor | None,
    tau: Tensor,
    omega: Tensor,
    temperature: float,
    reach: float,
    together: int,
) -> Tensor:
    """sum_l w_l P_l v [G, N, E], by an online softmax.  x: [G, L, N]; y: [G, L, M]; cost: [G, N, M];
    v: [G, M, E]; ranks: [1, N, M], see operators.ranks.rank_matrix; tau: [G]; omega: [G, L].

    together: slices whose plans are formed at once.
    """
    heads, queries, keys = cost.size(0), cost.size(1), cost.size(2)
    tau = -tau.view(-1, 1)
    result = torch.zeros_like(v[:, :1])
    total = torch.zeros_like(tau)
    lowest = total
    for start in range(0, x.size(1), together):
        slice_x = x[:, start : start + together].flatten(0, 1)
        slice_y = y[:, start : start + together].flatten(0, 1)
        a = _soft_rows(torch.sort(slice_x, -1, True)[0], slice_x, temperature, reach)
        b = _soft_rows(torch.sort(slice_y, -1, True)[0], slice_y, temperature, reach)
        if ranks is not None:
            b = torch.matmul(ranks, b)
        plan = torch.bmm(a.transpose(1, 2), b).view(heads, -1, queries, keys)
        slice_cost = (cost.unsqueeze(1) * plan).sum([-2, -1])  # [G, slices]
        least = slice_cost.amin(1, keepdim=True)
        before = least if start == 0 else lowest
        lowest = torch.minimum(before, least)
        kept, weight = torch.exp(tau * (before - lowest)), torch.exp(tau * (slice_cost - lowest))
        weight = weight * omega[:, start : start + together]
        if plan.size(1) == 1:
            moved = weight.unsqueeze(2) * torch.bmm(plan[:, 0], v)
        else:
            mixed = torch.bmm(weight.unsqueeze(1), plan.view(heads, -1, queries * keys))
            moved = torch.bmm(mixed.view(heads, queries, keys), v)
        result = result * kept.unsqueeze(2) + moved
        total = total * kept + weight.sum(1, keepdim=True)
    return result / total.unsqueeze(2)


def _banded_head(
    clouds: Clouds,
    v: Tensor,
    tau: float,
    omega: list[float],
    temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    coupling: Coupling,
) -> Tensor:
    """sum_l w_l P_l v of one head, by an online softmax: [N, E].  v: [M, E]."""
    cost = cost_matrix(clouds.q, clouds.k, squared_cost)[0, 0]
    orders_x, orders_y = (_descending_order(t[0, 0]) for t in (clouds.x, clouds.y))  # [L, N], [L, M]
    rank = torch.arange(clouds.q.shape[2])
    low, end = rank, rank + 1
    ranks = rank_matrix(clouds, coupling)
    if ranks is not None:
        low, end = partners(coupling, rank, rank + 1, *counts(clouds))
        ranks = ranks[0]
    count = clouds.q.shape[2] if mean_cost else 1
    result = v.new_zeros(clouds.q.shape[2], v.shape[1])
    total, lowest = 0.0, math.inf
    for index, (order_x, order_y) in enumerate(zip(orders_x, orders_y, strict=True)):
        slice_cost, moved = _banded_slice(
            clouds.x[0, 0, index][order_x], clouds.y[0, 0, index][order_y],
            cost.index_select(0, order_x).index_select(1, order_y), v[order_y],
            ranks, low, end, temperature, REACH[v.dtype], RANKS,
        )  # fmt: skip
        slice_cost /= count
        before = slice_cost if index == 0 else lowest
        lowest = min(before, slice_cost)
        kept, weight = math.exp(-tau * (before - lowest)), math.exp(-tau * (slice_cost - lowest))
        weight *= omega[index]
        result.mul_(kept).index_add_(0, order_x, moved, alpha=weight)
        total = total * kept + weight
    return result.div_(total)


def _within(x: Tensor, most: Tensor, least: Tensor) -> Iterator[tuple[int, int]]:
    """The ranges of x [N], in descending order, that lie between pairs of numbers [P]."""
    ascending = -x
    first = torch.searchsorted(ascending, -most)
    end = torch.searchsorted(ascending, -least, right=True)
    return zip(first.tolist(), end.tolist(), strict=True)


def _banded_slice(
    x: Tensor,
    y: Tensor,
    cost: Tensor,
    v: Tensor,
    ranks: Tensor | None,
    low: Tensor,
    end: Tensor,
    temperature: float,
    reach: float,
    block: int,
) -> tuple[float, Tensor]:
    """sum C o P and P v [N, E] of one slice, everything in descending order of x [N] and y [M].

    cost: [N, M]; v: [M, E]; ranks: [N, M], see operators.ranks.rank_matrix, and from where to where
    its rows are not 0, low and end: [N].
    """
    out = torch.zeros([x.size(0), v.size(1)], dtype=v.dtype)
    width = (reach * temperature) ** 0.5
    starts = torch.arange(0, len(x), block)
    ends = (starts + block).clamp_(max=len(x))
    first, last = low[starts], end[ends - 1]  # of the keys that a block of queries meets
    near = _within(x, x[starts] + width, x[ends - 1] - width)
    met = _within(y, y[first] + width, y[last - 1] - width)
    blocks = zip(starts.tolist(), ends.tolist(), first.tolist(), last.tolist(), near, met, strict=True)
    totals = []
    for start, stop, key, key_end, (i, i_end), (j, j_end) in blocks:
        rows = slice(start, stop)
        a = _soft_rows(x[rows], x[i:i_end], temperature, reach)
        b = _soft_rows(y[key:key_end], y[j:j_end], temperature, reach)
        if ranks is not None:
            b = ranks[rows, key:key_end] @ b
        totals.append((a @ cost[i:i_end, j:j_end]).mul_(b).sum(dtype=torch.float64))
        out[i:i_end].addmm_(a.t(), b @ v[j:j_end])
    return float(torch.stack(totals).sum()), out
