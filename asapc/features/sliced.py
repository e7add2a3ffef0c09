"""Sliced potentials: exact one-dimensional optimal-transport duals, one per direction.

Source: ASAP, Section 3.2, Eqs. 11-12 (equal numbers of unmasked queries and keys). Padding and
N != M use a quantile coupling instead: every query row is a source of mass 1/N, every active key a
target of mass 1/n, and the slope between two neighbouring queries is the key quantile there.

All values are in units of epsilon (see asapc.ir).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def slices(num_slices: int, dim: int, seed: int) -> Tensor:
    """Random unit directions theta [L, D], float32, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(num_slices, dim, generator=generator, dtype=torch.float64)
    return (theta / theta.norm(dim=-1, keepdim=True)).float()


def sliced_potentials(
    q: Tensor, k: Tensor, keep: Tensor | None, theta: Tensor, score_multiplier: float
) -> Tensor:
    """Source potentials of each slice, centred over the queries: [B, H, N, L].

    With a = sqrt(score_multiplier) theta.q and b likewise for keys, sorted ascending,

        f_(1) = 0,   f_(r+1) = f_(r) + (a_(r+1)^2 - a_(r)^2) / 2 - b_(r) (a_(r+1) - a_(r)),

    which is ASAP's f_(r) = a_(r)^2 / 2 - phi_r without the cancellation. If keep is given or
    N != M, b_(r) is the quantile of the active keys at r/N, linear between their ranks. Equal
    projections get equal potentials, so the order among ties has no effect.

    q: [B, H, N, D]; k: [B, H, M, D]; keep: [B, M] bool, True on active keys; theta: [L, D].
    Half precision is computed and returned in float32. An example without an active key gives 0.
    """
    potentials = uncentred_potentials(q, k, keep, theta, score_multiplier)
    return centre(potentials).transpose(-1, -2)


def predict_dual(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    theta: Tensor,
    coefficients: Tensor,
    score_multiplier: float,
) -> Tensor:
    """The predicted source dual in score coordinates: centre(X omega) - rho, [B, H, N].

    X: the sliced potentials; coefficients omega: [1, L] for all heads or [H, L];
    rho_i = |score_multiplier| |q_i|^2 / 2 turns cost coordinates into score coordinates.
    Other arguments and the dtype as in sliced_potentials.  Source: ASAP, Eq. 13 and Appendix D.1.
    """
    potentials = uncentred_potentials(q, k, keep, theta, score_multiplier)
    weights = coefficients.to(potentials.dtype)[:, None, :]  # [1|H, 1, L]
    predicted = (weights @ potentials)[..., 0, :]
    return centre(predicted) - cost_offset(q, score_multiplier).to(predicted.dtype)


def cost_offset(q: Tensor, score_multiplier: float) -> Tensor:
    """rho_i = |score_multiplier| |q_i|^2 / 2, cost minus score coordinates of f: [B, H, N]."""
    wide = widen(q)
    return (wide * wide).sum(-1) * (abs(score_multiplier) / 2)


def stable_sort(values: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending along the last dimension: sorted values and the order that sorts."""
    return torch.sort(values, dim=-1, stable=True)


def stable_sort_values(values: Tensor) -> Tensor:
    return stable_sort(values)[0]


def uncentred_potentials(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    theta: Tensor,
    score_multiplier: float,
    sort: Callable[[Tensor], tuple[Tensor, Tensor]] = stable_sort,
    sort_values: Callable[[Tensor], Tensor] = stable_sort_values,
) -> Tensor:
    """sliced_potentials before centring, in the layout they are sorted in: [B, H, L, N].

    Both sorts run along the last dimension and may treat ties as they like.
    """
    q, k = widen(q), widen(k)
    directions = theta.to(q.dtype) * math.sqrt(abs(score_multiplier))
    # A negative multiplier is the cost between -q and k.
    a = (directions if score_multiplier >= 0 else -directions) @ q.transpose(-1, -2)
    b = directions @ k.transpose(-1, -2)
    sorted_a, order = sort(a)
    slope = _key_quantiles(b, keep, a.shape[-1], sort_values)  # [B, H, L, N-1]
    low, high = sorted_a[..., :-1], sorted_a[..., 1:]
    steps = (high - low) * ((high + low) / 2 - slope)
    ranked = torch.nn.functional.pad(torch.cumsum(steps, dim=-1), (1, 0))
    potentials = torch.zeros_like(ranked).scatter(-1, order, ranked)
    if keep is None:
        return potentials
    return potentials.masked_fill(~keep.any(-1)[:, None, None, None], 0.0)


def _key_quantiles(
    b: Tensor, keep: Tensor | None, num_queries: int, sort_values: Callable[[Tensor], Tensor]
) -> Tensor:
    """The key quantile at r/N for r = 1 .. N-1: [B, H, L, N-1], ascending.

    With n active keys the rank r n / N is interpolated between its neighbours (and held at the
    smallest key below rank 1), so that n = N gives the r-th smallest key itself.
    """
    num_keys = b.shape[-1]
    if keep is None and num_queries == num_keys:
        return sort_values(b)[..., :-1]
    ranks = torch.arange(1, num_queries, device=b.device)
    if keep is None:
        active = torch.full((1, 1), num_keys, device=b.device)
        sorted_b = sort_values(b)
    else:
        active = keep.sum(-1, keepdim=True)  # [B, 1]
        sorted_b = sort_values(b.masked_fill(~keep[:, None, None, :], math.inf))
        behind = torch.arange(num_keys, device=b.device) >= active
        sorted_b = sorted_b.masked_fill(behind[:, None, None, :], 0.0)
    # Integer arithmetic keeps the ranks exact: r n = whole N + rest.
    product = ranks * active
    whole = torch.div(product, num_queries, rounding_mode="floor")
    weight = (product - whole * num_queries).to(b.dtype) / num_queries
    last = (active - 1).clamp(min=0)
    below = _at(sorted_b, torch.minimum((whole - 1).clamp(min=0), last))
    above = _at(sorted_b, torch.minimum(whole, last))
    return torch.lerp(below, above, weight[:, None, None, :].expand_as(below))


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values[..., index] for values [B, H, L, M] and index [1|B, R]: [B, H, L, R]."""
    return values.gather(-1, index[:, None, None, :].expand(*values.shape[:-1], -1))


def centre(values: Tensor) -> Tensor:
    return values - values.mean(-1, keepdim=True)


def widen(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
