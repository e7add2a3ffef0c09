"""Expected sliced plans: attention is a weighted mean of one plan per slice (ESPFormer).

    x_l = q theta_l, y_l = k theta_l;  A_l, B_l sort them, largest first;  P_l = A_l' I B_l
    D_l = sum_ij C_ij P_l,ij,  C_ij = |q_i - k_j| or its square;  w_l ~ omega_l exp(-tau D_l), sum 1
    A = factor N^a M^b sum_l w_l P_l

Soft: A_l and B_l are SoftSort matrices, and only one slice's N x M matrices exist at a time.
Hard: they are permutations, or where tokens tie averages of them (Eq. 5), which are never formed:
what a query meets is gathered (operators.matching).
I is the identity where there are as many queries as keys, else one of two couplings (operators.ranks).
Source: Shahbazi et al. 2025, ESPFormer, Eqs. 7-11 and Algorithm 1; its code sums distances over all
pairs (`mean_cost` False, `squared_cost` False), the paper averages squares over the queries.

Plain PyTorch, any dtype, differentiable; permutations are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asapc.ir import Coupling, Ties
from asapc.operators.matching import (
    cost_matrix,
    gather_sum,
    match,
    matched_costs,
    orders_of,
    recomputed,
    slice_weights,
    tie,
)
from asapc.operators.pair import pair
from asapc.operators.ranks import (
    Clouds,
    active,
    close,
    clouds_of,
    group_mass,
    order_of,
    padded_last,
    rank_matrix,
    spread,
)
from asapc.operators.sinkhorn import clean_values, widen

# exp(-reach) is below the rounding of a row of SoftSort, and its square still a normal number: what falls
# out of the normal range takes a CPU a hundred times longer.
REACH = {torch.float32: 36.0, torch.float64: 80.0}
ENTRIES = 1 << 18  # of the plans that are formed at once; a plan with more is formed alone


def with_lengths(output_factor: float, q: Tensor, k: Tensor, query_power: int, key_power: int) -> float:
    """factor N^a M^b; no length counts as less than 1."""
    if query_power:
        output_factor = output_factor * torch.sym_max(1, q.shape[2]) ** float(query_power)
    if key_power:
        output_factor = output_factor * torch.sym_max(1, k.shape[2]) ** float(key_power)
    return output_factor


def scanned(
    step: Callable[..., tuple[Tensor, ...]], state: Sequence[Tensor], lines: Sequence[Tensor | None],
    given: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The state after step(*state, *part, *given) for every part of the lines, a loop in the program."""

    def filled(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors[len(state) :])
        others = (None if one is None else next(rest) for one in (*lines, *given))
        return [part.clone() for part in step(*tensors[: len(state)], *others)]

    there = ([one.contiguous() for one in some if one is not None] for some in (lines, given))
    scan: Any = torch.ops.higher_order.scan
    return tuple(scan(filled, list(state), *map(tuple, there)))


def soft_sort(x: Tensor, keep: Tensor | None, temperature: float) -> Tensor:
    """softmax_i(-(sort(x)_r - x_i)^2 / temperature) [B, H, r, i], 0 for padded r and i.

    x: [B, H, N].  What is under exp(-reach) is raised to that: see REACH.
    Source: ESPFormer, Eq. 7, largest value first as in its code.
    """
    least = -REACH[torch.float64 if x.dtype == torch.float64 else torch.float32]
    ordered = torch.sort(padded_last(x, keep), dim=-1, descending=True, stable=True).values
    if keep is None:
        logits = -((ordered[..., :, None] - x[..., None, :]) ** 2) / temperature
        return torch.softmax(logits.clamp(min=least), -1)
    rows = torch.arange(x.shape[-1], device=x.device) < keep.sum(-1, keepdim=True)
    rows = spread(rows, x)
    ordered = ordered.masked_fill(~rows, 0.0)
    logits = (-((ordered[..., :, None] - x[..., None, :]) ** 2) / temperature).clamp(min=least)
    logits = logits.masked_fill(~spread(keep, logits), -torch.inf)
    return torch.softmax(logits, -1).masked_fill(~rows[..., None], 0.0)


def soft_plan(
    x: Tensor, y: Tensor, keep: Tensor | None, query_keep: Tensor | None, ranks: Tensor | None,
    sort: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:  # fmt: skip
    """P = A' I B [B, H, N, M] of one slice, rows sum to about 1.  x: [B, H, N]; y: [B, H, M].

    ranks: I as operators.ranks.rank_matrix has it.
    """
    b = sort(y, keep)
    if ranks is not None:
        b = ranks[:, None] @ b
    return sort(x, query_keep).transpose(-1, -2) @ b


def lifted_plan(
    x: Tensor, y: Tensor, keep: Tensor | None, query_keep: Tensor | None, coupling: Coupling, ties: Ties
) -> Tensor:
    """P of one slice sorted exactly [B, H, N, M] in float64.  x: [B, H, N]; y: [B, H, M]."""
    g, g_end = (bound[..., None] for bound in _token_bounds(x, query_keep, ties))
    h, h_end = (bound[..., None, :] for bound in _token_bounds(y, keep, ties))
    n = active(query_keep, x[..., None])[:, None, None, None]
    m = active(keep, y[..., None])[:, None, None, None]
    mass = group_mass(coupling, g, g_end, h, h_end, n, m) / ((g_end - g) * (h_end - h))
    return mass.masked_fill((g >= n) | (h >= m), 0.0)


def _token_bounds(x: Tensor, keep: Tensor | None, ties: Ties) -> tuple[Tensor, Tensor]:
    """The ranks that every token shares, from and up to, [B, H, N]; those of padded tokens are last."""
    if ties != "shared":
        order = order_of(padded_last(x, keep), ties)
        rank = torch.arange(x.shape[-1], device=x.device).expand(x.shape)
        first = torch.empty_like(order).scatter_(-1, order, rank)
        return first, first + 1
    others, mine = x[..., None, :], x[..., :, None]
    larger, as_large = others > mine, others >= mine
    if keep is not None:
        larger, as_large = (flags & keep[:, None, None] for flags in (larger, as_large))
    first, end = larger.sum(-1), as_large.sum(-1)
    if keep is not None:
        end = torch.where(keep[:, None], end, x.shape[-1] + 1)
        first = torch.where(keep[:, None], first, x.shape[-1])
    return first, end


def expected_plan(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, query_keep: Tensor | None,
    slices: Tensor | None, inverse_temperature: Tensor, squared_cost: bool, mean_cost: bool,
    output_factor: float, slice_weight: Tensor | None,
    plan_of: Callable[[Clouds, Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """factor sum_l w_l P_l, times v if given, by an online softmax over the slices.

    plan_of: (clouds, x [B, G, N], y [B, G, M]) -> P [B, G, N, M] of one slice of G heads, or of several
    slices of some: as many at once as make small tensors.
    Costs meet tau only as differences, which is what keeps the digits of small weights.
    """
    clouds = clouds_of(q, k, keep, query_keep, slices)
    values = None if v is None else clean_values(widen(v), keep)
    cost = cost_matrix(clouds.q, clouds.k, squared_cost)
    tau = inverse_temperature.to(cost.dtype).view(-1, 1)

    def with_some(
        result: Tensor, total: Tensor, lowest: Tensor,
        x: Tensor, y: Tensor, omega: Tensor | None, *given: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The sums of weights times P or P v and of weights, relative to the lowest cost, with theirs."""
        q, k, keep, query_keep, cost, v, tau = given  # all it takes, for it may be a program of its own
        plans = plan_of(Clouds(q, k, x, y, keep, query_keep), x.flatten(1, 2), y.flatten(1, 2))
        plans = plans.to(cost.dtype).unflatten(1, x.shape[1:3])  # [B, H, slices, N, M]
        costs = (cost[:, :, None] * plans).sum((-1, -2))  # [B, H, slices]
        costs = costs / active(query_keep, q).view(-1, 1, 1) if mean_cost else costs
        before, lowest = lowest, torch.minimum(lowest, costs.detach().amin(-1, keepdim=True))
        kept = torch.exp(-tau * torch.where(before == torch.inf, 0.0, before - lowest))
        weights = torch.exp(-tau * (costs - lowest))
        weights = weights if omega is None else weights * omega.to(weights.dtype)
        mixed = (weights[..., None, None] * plans).sum(2)
        result = result * kept[..., None] + (mixed if v is None else mixed @ v)
        return result, total * kept + weights.sum(-1, keepdim=True), lowest

    width = clouds.k.shape[2] if values is None else values.shape[3]
    total = cost.new_zeros(*clouds.q.shape[:2], 1)
    state: tuple[Tensor, ...] = (cost.new_zeros(*clouds.q.shape[:3], width), total, total + torch.inf)
    given = (clouds.q, clouds.k, clouds.keep, clouds.query_keep, cost, values, tau)
    if torch.compiler.is_exporting():
        lines = [None if line is None else line.movedim(axis, 0).unsqueeze(axis)
                 for line, axis in ((clouds.x, -2), (clouds.y, -2), (slice_weight, -1))]  # fmt: skip
        state = scanned(with_some, state, lines, given)
    else:
        together = max(1, ENTRIES // max(1, cost.numel()))
        for start in range(0, clouds.num_slices, together):
            x, y = (line[:, :, start : start + together] for line in (clouds.x, clouds.y))
            omega = None if slice_weight is None else slice_weight[..., start : start + together]
            state = recomputed(with_some, *state, x, y, omega, *given)
    result, total, _ = state
    return close(result / total[..., None], keep, query_keep, output_factor)


def hardest(x: Tensor, keep: Tensor | None, temperature: float) -> Tensor:
    """soft_sort, every row of which becomes its top entry: the released code's `hard` flag.

    Not a permutation where rounding or ties give two rows the same top.
    """
    soft = soft_sort(x, keep, temperature)
    chosen = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
    return chosen.masked_fill(soft == 0, 0.0)  # rows of padded tokens stay empty


def _by_sorting(sort: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """sort: as soft_sort."""

    def compute(
        q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, query_keep: Tensor | None,
        slices: Tensor | None, inverse_temperature: Tensor, softsort_temperature: float,
        squared_cost: bool, mean_cost: bool, output_factor: float, coupling: Coupling = "interpolated",
        slice_weight: Tensor | None = None, query_power: int = 0, key_power: int = 0,
    ) -> Tensor:  # fmt: skip
        """A v for the map A of the soft plans: [B, H, N, E] in v's dtype; or A [B, H, N, M] in q's.

        q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; keep: [B, M] and query_keep: [B, N] bool, True
        on active tokens; slices: theta [L, D] or [H, L, D], None for the D axes; inverse_temperature:
        tau [1] or [H]; mean_cost: D_l is divided by the number of active queries; coupling: of unequal
        numbers; slice_weight: omega [L] or [H, L], 1 if None; query_power, key_power: a and b, N and M
        with padding. Memory O(N M + N E); a gradient keeps O(L N E) and computes every plan again.
        """

        def plan_of(clouds: Clouds, x: Tensor, y: Tensor) -> Tensor:
            ranks, own = rank_matrix(clouds, coupling), partial(sort, temperature=softsort_temperature)
            return soft_plan(x, y, clouds.keep, clouds.query_keep, ranks, own)

        return expected_plan(
            q, k, v, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost,
            with_lengths(output_factor, q, k, query_power, key_power), slice_weight, plan_of,
        )  # fmt: skip

    return compute


esp_soft, esp_soft_attention = pair("esp_soft", _by_sorting(soft_sort))
esp_released_hard_attention = pair("esp_released_hard", _by_sorting(hardest))[1]


def _esp_hard(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, query_keep: Tensor | None,
    slices: Tensor | None, inverse_temperature: Tensor, squared_cost: bool, mean_cost: bool,
    output_factor: float, coupling: Coupling = "interpolated", ties: Ties = "shared",
    slice_weight: Tensor | None = None, query_power: int = 0, key_power: int = 0,
) -> Tensor:  # fmt: skip
    """A v for the map A of the plans sorted exactly: [B, H, N, E] in v's dtype; or A in q's.

    Arguments as esp_soft.  ties: tokens of equal projections share their mass (Eq. 5, what esp_soft tends
    to as its temperature falls), or keep their order in a stable sort, largest or smallest first.
    O(L N (log N + D + E)) time, O(L N) memory, no N x M matrix: keys are gathered. The plans are formed
    of a map, where tokens tie and share, where masked tokens are coupled monotonely, of which each
    example meets another number, and while a CUDA graph is recorded or a program exported, which must not
    depend on the data.
    """
    output_factor = with_lengths(output_factor, q, k, query_power, key_power)
    settings = (slices, inverse_temperature, squared_cost, mean_cost, output_factor)

    def formed() -> Tensor:
        def plan_of(clouds: Clouds, x: Tensor, y: Tensor) -> Tensor:
            pairs: Coupling = "monotone" if clouds.one_to_one() else coupling  # the same, and shorter
            return lifted_plan(x, y, clouds.keep, clouds.query_keep, pairs, ties)

        return expected_plan(q, k, v, keep, query_keep, *settings, slice_weight, plan_of)

    if torch.compiler.is_exporting() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return formed()
    if v is None or (coupling == "monotone" and not (keep is None and query_keep is None)):
        return formed()
    clouds = clouds_of(q, k, keep, query_keep, slices)
    if 0 in (clouds.x.numel(), clouds.y.numel(), v.shape[3]):
        return clouds.q.new_zeros(*clouds.q.shape[:3], v.shape[3])
    orders, masks = orders_of(clouds, ties), (clouds.query_keep, clouds.keep)
    if ties == "shared" and any(map(tie, (clouds.x, clouds.y), orders, masks)):
        return formed()
    matching = match(clouds, *orders, coupling)
    cost = matched_costs(clouds, matching, squared_cost)
    count = active(clouds.query_keep, clouds.q)[:, None, None]
    weights = slice_weights(cost, inverse_temperature, count, mean_cost, slice_weight)
    weights = weights.to(clouds.q.dtype)[..., None].expand(clouds.x.shape)
    result = gather_sum(matching, clean_values(widen(v), keep), weights)
    return close(result, keep, query_keep, output_factor)


esp_hard, esp_hard_attention = pair("esp_hard", _esp_hard)
