"""Two clouds on L lines: their projections in order of size, and how their ranks are coupled.

Of n queries each has mass 1 to give to m keys. As numbers on a line, queries r to r + 1:

    monotone:      the stretch [r m, (r + 1) m] meets the stretch [s n, (s + 1) n] of key s; every key
                   receives n / m. The exact coupling, N + M - 1 pairs at most.
    interpolated:  rank r is at p = r (m - 1) / (n - 1) and gives key s max(0, 1 - |s - p|): first meets
                   first, last meets last, and a key receives what comes near it, which may be nothing.

For n = m both pair equal ranks. Tied groups G = [g, g_end) and H = [h, h_end) of ranks share what they
have, which is the lifted plan, and what soft sorts tend to:

    P_ij = (what G gives to H) / (|G| |H|)

Source: Shahbazi et al. 2025, ESPFormer, Eq. 5 (ties) and Eq. 11 (interpolation). As printed Eq. 11 gives
each neighbour the other's share; this is what its code computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asapc.ir import Coupling, Ties
from asapc.operators.sinkhorn import clean_values, masked, opened_keys, widen


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
    return Clouds(q, k, x, y, opened_keys(keep), opened_keys(query_keep))


def close(result: Tensor, keep: Tensor | None, query_keep: Tensor | None, output_factor: float) -> Tensor:
    """factor * result, 0 for padded queries and examples without a key.  result: [B, H, N, E]."""
    return masked(result, keep, query_keep) * output_factor


def projections(points: Tensor, slices: Tensor | None) -> Tensor:
    """[B, H, L, N] of points [B, H, N, D]; slices: [L, D], [H, L, D], or None for the axes.

    Summed in float64 and rounded, so that equal points tie exactly wherever they stand.
    """
    if slices is None:
        return points.transpose(-1, -2)
    return (slices.double() @ points.double().transpose(-1, -2)).to(points.dtype)


def padded_last(x: Tensor, keep: Tensor | None) -> Tensor:
    """x [B, H, ..., N] with padded tokens where a descending sort puts them last."""
    return x if keep is None else x.masked_fill(~spread(keep, x), -torch.inf)


def descending_order(x: Tensor) -> Tensor:
    """argsort along the last dimension, largest first; ties keep the order of the tokens."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices


def order_of(x: Tensor, ties: Ties) -> Tensor:
    """The tokens by rank, largest first.

    Ties keep the order of the tokens, or of an ascending sort that is read from behind.
    """
    if ties != "ascending":
        return descending_order(x)
    return x.shape[-1] - 1 - descending_order(x.flip(-1))


def spread(keep: Tensor, like: Tensor) -> Tensor:
    """[B, N] with the dimensions between that `like` has."""
    return keep.reshape(keep.shape[0], *[1] * (like.dim() - 2), keep.shape[1])


def active(keep: Tensor | None, points: Tensor) -> Tensor:
    """Number of active tokens, [B] int64, or [1] without a mask.  points: [B, H, N, D]."""
    if keep is None:
        return torch.full((1,), points.shape[2], device=points.device)
    return keep.sum(-1)


def counts(clouds: Clouds) -> tuple[Tensor, Tensor]:
    """n and m, active queries and keys, each [B or 1] int64."""
    return active(clouds.query_keep, clouds.q), active(clouds.keep, clouds.k)


def group_mass(
    coupling: Coupling, g: Tensor, g_end: Tensor, h: Tensor, h_end: Tensor, n: Tensor, m: Tensor
) -> Tensor:
    """What ranks g to g_end of n give to ranks h to h_end of m, in float64.  All int64; n, m >= 1."""
    if coupling == "monotone":
        met = torch.minimum(g_end * m, h_end * n) - torch.maximum(g * m, h * n)
        return met.clamp(min=0).double() / m
    given = [_interpolated(end, h_end, n, m) - _interpolated(end, h, n, m) for end in (g_end, g)]
    return given[0] - given[1]


def _interpolated(g: Tensor, s: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """What the first g ranks give to the first s: sum_{r<g} clamp(s - r (m - 1) / (n - 1), 0, 1)."""
    gaps, steps = (n - 1).clamp(min=1), (m - 1).clamp(min=1)
    whole = torch.minimum(g, (_over((s - 1) * gaps, steps) + 1).clamp(min=0))  # ranks that give all
    begun = torch.minimum(g, -_over(-s * gaps, steps))  # and those that give something
    part = (begun - whole) * (2 * s * gaps - (begun + whole - 1) * steps)
    return torch.where(m > 1, whole + part.double() / (2 * gaps), (g * s).double())


def partners(coupling: Coupling, g: Tensor, g_end: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """From which rank and up to which ranks g to g_end give mass.  All int64; n, m >= 1."""
    if coupling == "monotone":
        return _over(g * m, n), -_over(-g_end * m, n)
    gaps = (n - 1).clamp(min=1)
    return _over(g * (m - 1), gaps), torch.minimum(_over((g_end - 1) * (m - 1), gaps) + 2, m)


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator.div(denominator, rounding_mode="floor")


def rank_matrix(clouds: Clouds, coupling: Coupling) -> Tensor | None:
    """What rank r gives to rank s [B or 1, N, M], None where equal ranks meet.

    Ranks of padded tokens give and get nothing.
    """
    if clouds.one_to_one():
        return None
    n, m = (count[:, None, None] for count in counts(clouds))
    r = torch.arange(clouds.q.shape[2], device=n.device)[:, None]
    s = torch.arange(clouds.k.shape[2], device=n.device)
    if coupling == "monotone":
        given = group_mass(coupling, r, r + 1, s, s + 1, n, m)
    else:
        gaps = (n - 1).clamp(min=1)
        given = (1 - (s * gaps - r * (m - 1)).abs().double() / gaps).clamp(min=0)
    return given.masked_fill((r >= n) | (s >= m), 0.0).to(clouds.q.dtype)
