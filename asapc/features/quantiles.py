"""Two clouds on L lines: projections, sorting, and quantiles between points.

Of n points of equal mass, the one of rank p (1 the smallest) is the quantile at p / n; between ranks
it is linear, below rank 1 and above rank n it is held. Points without mass get the largest float, sort
last and are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asapc.features.clouds import Clouds

Sort = Callable[[Tensor], tuple[Tensor, Tensor]]
SortValues = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Lines:
    """a = theta . x [B, H, L, N] and b = theta . y [B, H, L, M], the largest float without mass.

    n_x, n_y: [B|1, 1, 1, 1] int64, how many points carry mass.
    """

    a: Tensor
    b: Tensor
    n_x: Tensor
    n_y: Tensor


def project(clouds: Clouds, theta: Tensor) -> Lines:
    """Both clouds on the directions theta [L, D]; O((N + M) L D) a head."""
    a, n_x = _project(clouds.x, clouds.x_keep, theta)
    b, n_y = _project(clouds.y, clouds.y_keep, theta)
    return Lines(a, b, n_x, n_y)


def _project(points: Tensor, keep: Tensor | None, theta: Tensor) -> tuple[Tensor, Tensor]:
    # One product per head, so that a head's rounding does not depend on the heads beside it.
    directions = theta.to(points).expand(*points.shape[:2], -1, -1)
    values = directions @ points.transpose(-1, -2)
    if keep is None:
        return values, torch.full((1, 1, 1, 1), points.shape[2], device=points.device)
    keep = keep[:, None, None, :]
    last = torch.finfo(values.dtype).max  # not inf: the CPU twin's sort key has no room for it
    return values.masked_fill(~keep, last), keep.sum(-1, keepdim=True)


def stable_sort(values: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending along the last dimension: sorted values and the order that sorts."""
    return torch.sort(values, dim=-1, stable=True)


def stable_sort_values(values: Tensor) -> Tensor:
    return stable_sort(values)[0]


def drop_massless(ordered: Tensor, keep: Tensor | None, count: Tensor) -> Tensor:
    """0 in place of the points without mass, which are behind the first `count` sorted ones."""
    if keep is None:
        return ordered
    return ordered.masked_fill(torch.arange(ordered.shape[-1], device=ordered.device) >= count, 0.0)


def quantiles(ordered: Tensor, count: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Values at the ranks numerator / denominator of the first `count` of ordered [B, H, L, M].

    numerator, denominator, count: int64, broadcastable to [B, H, L, R]; integers keep the ranks
    exact.  Returns [B, H, L, R]; without any point with mass, what `ordered` holds first.
    """
    whole = torch.div(numerator, denominator, rounding_mode="floor")
    weight = (numerator - whole * denominator).to(ordered.dtype) / denominator
    last = (count - 1).clamp(min=0)
    below = at(ordered, torch.minimum((whole - 1).clamp(min=0), last))
    above = at(ordered, torch.minimum(whole, last))
    return torch.lerp(below, above, weight.expand_as(below))


def at(ordered: Tensor, index: Tensor) -> Tensor:
    """ordered [B, H, L, M] at int64 indices that broadcast to [B, H, L, R]."""
    return ordered.gather(-1, index.expand(*ordered.shape[:-1], -1))
