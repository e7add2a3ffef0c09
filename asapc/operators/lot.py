"""LOT attention: queries to pivots, pivots to keys, glued (LOTFormer, Eqs. 1-4).

    S1_ri = query_multiplier z_r.q_i               Gamma1: the finite loop between pivots and queries
    S2_rj = key_multiplier z_r.k_j + key_bias_rj   Gamma2: the finite loop between pivots and keys
    A     = factor * Gamma1' diag(omega / sigma) Gamma2,  applied as Gamma1' (omega (Gamma2 v) / sigma)

omega is 1: features over the roots of masses that the loops do not have leave another.

Both loops start from zero duals. Active queries weigh mu_i = 1/n_q, active keys nu_j = 1/n_k, padded
tokens nothing: a dual of theirs is -inf from the start, so that no pivot ever sees them. Time and
memory are linear in the number of tokens; A itself is formed only by `lot_attention`.

Plain PyTorch in the log domain, any dtype, differentiable in every tensor. kernels/native is its
fast twin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from asapc.ir import Side
from asapc.operators.c_transforms import uniform_log_mass
from asapc.operators.pair import pair
from asapc.operators.sinkhorn import alternate, clean_values, masked, opened_keys


def _lot(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, query_keep: Tensor | None,
    key_bias: Tensor | None, pivots: Tensor, pivot_mass: Tensor, query_multiplier: float,
    key_multiplier: float, query_half_steps: int, queries_first: bool, key_half_steps: int,
    keys_first: bool, output_factor: Sequence[float], interleaved: bool = False,
    pivot_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A v: [B, H, N, E] in v's dtype, 0 at padded queries and where an example has no active key; or the
    dense map A: [B, H, N, M] in q's dtype, 0 on padded tokens.

    q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; keep: [B, M] and query_keep: [B, N] bool, True
    on active tokens; key_bias: [B|1, H|1, 1|R, M], in units of epsilon: positions p_j added to the keys
    are z_r.p_j; pivots: [H, R, D]; pivot_mass: sigma [H, R], rows sum to 1 (a pivot of mass 0 takes
    no part); pivot_weight: omega [H, R], 1 if None.
    queries_first, keys_first: the first half-step is on the tokens' side, not the pivots'.
    output_factor: (coefficient, a, b, c) for factor = coefficient n_q^a n_k^b N^c; n counts active
    tokens, N all queries.
    interleaved: head h of example b has row (b H + h) // B of sigma and omega, not row h: so has it code
    that merges examples and heads into one axis and repeats each row B times.
    Source: LOTFormer, Eq. 4.
    """
    if k.shape[2] == 0 or q.shape[2] == 0:
        return q.new_zeros((*q.shape[:3], k.shape[2] if v is None else v.shape[3]))
    dtype = work_dtype(q)
    if interleaved:
        pivot_mass = by_example(pivot_mass, q.shape[0])
        pivot_weight = None if pivot_weight is None else by_example(pivot_weight, q.shape[0])
    first_scores = pivot_scores(q, query_keep, None, pivots, query_multiplier, dtype)
    second_scores = pivot_scores(k, keep, key_bias, pivots, key_multiplier, dtype)
    # Gamma1 [B, H, R, N] and diag(omega / sigma) Gamma2 [B, H, R, M]
    first = pivot_plan(first_scores, query_keep, pivot_mass, query_half_steps, queries_first, False)
    second = pivot_plan(second_scores, keep, pivot_mass, key_half_steps, keys_first, True)
    if pivot_weight is not None:
        second = second * pivot_weight.to(dtype)[..., None]
    if v is not None:
        second = second @ clean_values(v, keep).to(second.dtype)  # [B, H, R, E]
    out = first.transpose(-1, -2) @ second
    out = out * token_factor(output_factor, q, k, keep, query_keep)
    return masked(out, keep, query_keep)


lot, lot_attention = pair("lot", _lot)


def by_example(table: Tensor, batch: int) -> Tensor:
    """[B, H, R], of example b and head h row (b H + h) // B of the table [H, R]."""
    rows = torch.arange(batch * table.shape[0], device=table.device)
    return table[rows // batch].reshape(batch, *table.shape)


def pivot_scores(
    tokens: Tensor, keep: Tensor | None, bias: Tensor | None, pivots: Tensor, multiplier: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """S_ri = multiplier z_r.x_i + bias_ri: [B, H, R, N] in dtype; padded tokens score 0.

    tokens: [B, H, N, D]; keep: [B, N]; bias: [B|1, H|1, 1|R, N]; pivots: [H, R, D].
    """
    points = clean_values(tokens, keep).to(dtype)
    scores = (pivots.to(dtype) * multiplier) @ points.transpose(-1, -2)
    if bias is None:
        return scores
    if keep is not None:
        bias = bias.masked_fill(~keep[:, None, None, :], 0.0)
    return scores + bias.to(dtype)


def pivot_plan(
    scores: Tensor, keep: Tensor | None, pivot_mass: Tensor, half_steps: int, tokens_first: bool,
    over_mass: bool,
) -> Tensor:  # fmt: skip
    """Gamma [B, H, R, N] after `half_steps` half-steps from zero duals; 0 on padded tokens.

    scores: [B, H, R, N]; keep: [B, N]; pivot_mass: [H, R] or [B, H, R].  over_mass: diag(1 / sigma)
    Gamma, which holds where sigma itself is too small for 1 / sigma.  Where no token is active
    all are: the caller masks what comes of it.
    Source: LOTFormer, Eqs. 1 and 2, a finite number of half-steps.
    """
    pivot_mass = pivot_mass.to(scores.dtype)
    massless = pivot_mass <= 0
    finite = torch.where(massless, 1.0, pivot_mass).log()  # log 0 would have no gradient
    log_sigma = torch.where(massless, -math.inf, finite)  # [H, R]
    log_mass = token_log_mass(keep, scores)  # [N] or [B, 1, N]
    # -inf on what carries no mass, else 0; f of the pivots [B, H, R], g of the tokens [B, H, N].
    f = torch.where(massless, -math.inf, torch.zeros_like(finite)).expand(scores.shape[:3])
    g = torch.where(torch.isneginf(log_mass), log_mass, 0.0).expand(*scores.shape[:2], -1)
    side: Side = "column" if tokens_first else "row"
    f, g = alternate(scores, f, g, half_steps, side, log_sigma, log_mass)
    if over_mass:
        f = f - finite
    return torch.exp(scores + f[..., :, None] + g[..., None, :])


def token_log_mass(keep: Tensor | None, scores: Tensor) -> Tensor:
    """log(1 / n) on the n active tokens, -inf on the others: [N], or [B, 1, N] with keep [B, N]."""
    if keep is None:
        return uniform_log_mass(scores.shape[-1], scores)
    opened = opened_keys(keep)
    log_count = opened.sum(-1, keepdim=True).to(scores.dtype).log()
    return torch.where(opened, -log_count, -math.inf)[:, None, :]


def token_factor(
    output_factor: Sequence[float], q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None
) -> float | Tensor:
    """coefficient n_q^a n_k^b N^c, counts at least 1: a float, or [B, 1, 1, 1] where a mask enters."""
    coefficient, query_power, key_power, length_power = output_factor
    value: float | Tensor = coefficient * torch.sym_max(1, q.shape[2]) ** float(length_power)
    for tokens, mask, power in ((q, query_keep, query_power), (k, keep, key_power)):
        if power == 0:
            continue
        if mask is None:
            value = value * torch.sym_max(1, tokens.shape[2]) ** float(power)
        else:
            counts = mask.sum(-1).clamp(min=1).to(torch.float64)[:, None, None, None]
            value = value * counts**power
    return value.to(work_dtype(q)) if isinstance(value, Tensor) else value


def work_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
