"""CPU twin of operators.esp.esp_hard, by heads on worker threads; padded tokens are left out.

NumPy sorts one integer per token that holds value and index, the distances of a slice are taken in cache,
and the weighted gathers of all slices are one embedding_bag. Heads in which tokens tie go the way of
operators.matching from there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from asapc.ir import Coupling, Ties
from asapc.kernels.cpu.workers import TILE_BYTES, each_group
from asapc.operators.matching import (
    Ranked,
    gather_sum,
    group_bounds,
    match,
    matched_costs,
    rank_partners,
    ranked,
    slice_weights,
)
from asapc.operators.ranks import Clouds, clouds_of
from asapc.operators.sinkhorn import widen

# Of heads without padded tokens:
# (their clouds [1, G, ...], v [G, M, E], tau [G], weights of slices [G, L]) -> [G, N, E]
Core = Callable[[Clouds, Tensor, Tensor, Tensor], Tensor]


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
