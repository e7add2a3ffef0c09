"""Sliced: exact one-dimensional optimal-transport duals, one column per direction theta.

With a = theta . x and b = theta . y, each sorted ascending over the points with mass,

    f_(1) = 0,   f_(r+1) = f_(r) + (a_(r+1)^2 - a_(r)^2) / 2 - b_(r) (a_(r+1) - a_(r)),

which is ASAP's f_(r) = a_(r)^2 / 2 - phi_r without its cancellation. With n_x points x and n_y
points y of equal mass on either side, b_(r) is the y of rank ceil(r n_y / n_x), the last that the
first r of the x give mass to: the r-th y itself where n_x = n_y. Equal projections get equal
potentials, so the order among ties has no effect. Without any y with mass, all y count as 0.

This is exact: with g = min_i (C_ij - f_i), mean f + mean g is the transport cost. Any slope between this
y and the first that the next x gives mass to would do; an interpolated quantile mostly lies outside.

Columns [B, H, N, L]. Cost O((N + M) L (D + log N + log M)) a head.
Source: ASAP, Section 3.2, Eqs. 11-12, for n_x = n_y; the general case is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.features.clouds import Budget, Clouds
from asapc.features.gaussian import moments

KINDS = ("random", "orthogonal", "axis", "principal")
AT_MOST_DIM = ("axis", "principal")


def _project(points: Tensor, keep: Tensor | None, theta: Tensor) -> tuple[Tensor, Tensor]:
    """theta . x [B, H, L, N], the largest float without mass; and how many points carry mass,
    [B|1, 1, 1, 1] int64.  O(N L D) a head."""
    # One product per head, so that a head's rounding does not depend on the heads beside it.
    directions = theta.to(points).expand(*points.shape[:2], -1, -1)
    values = directions @ points.transpose(-1, -2)
    if keep is None:
        return values, torch.full((1, 1, 1, 1), points.shape[2], device=points.device)
    keep = keep[:, None, None, :]
    return values.masked_fill(~keep, torch.finfo(values.dtype).max), keep.sum(-1, keepdim=True)


def _drop_massless(ordered: Tensor, keep: Tensor | None, count: Tensor) -> Tensor:
    """Set points without mass, which come after the first `count` sorted ones, to 0."""
    if keep is None:
        return ordered
    return ordered.masked_fill(torch.arange(ordered.shape[-1], device=ordered.device) >= count, 0.0)


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """The potentials of each slice, not centred: [B, H, N, L].  parameter: theta [L, D]."""
    assert parameter is not None
    return potentials(clouds, parameter).transpose(-1, -2)


def potentials(clouds: Clouds, theta: Tensor) -> Tensor:
    """The same in the layout it is sorted in: [B, H, L, N]."""
    a, n_x = _project(clouds.x, clouds.x_keep, theta)
    b, n_y = _project(clouds.y, clouds.y_keep, theta)
    num_x, num_y = a.shape[-1], b.shape[-1]
    if num_x * num_y == 0:
        return torch.zeros_like(a)
    ordered, order = torch.sort(a, dim=-1, stable=True)
    ordered = _drop_massless(ordered, clouds.x_keep, n_x)
    ordered_y = _drop_massless(torch.sort(b, dim=-1, stable=True)[0], clouds.y_keep, n_y)
    if clouds.x_keep is None and clouds.y_keep is None and num_x == num_y:
        slope = ordered_y[..., :-1]
    else:
        ranks = torch.arange(1, num_x, device=ordered.device)
        n_x = n_x.clamp(min=1)
        last = (ranks * n_y + n_x - 1).div(n_x, rounding_mode="floor") - 1
        last = torch.minimum(last, n_y - 1).clamp(min=0)
        slope = ordered_y.gather(-1, last.expand(*ordered_y.shape[:-1], -1))
    low, high = ordered[..., :-1], ordered[..., 1:]
    steps = (high - low) * ((high + low) / 2 - slope)
    ranked = torch.nn.functional.pad(torch.cumsum(steps, dim=-1), (1, 0))
    return torch.zeros_like(ranked).scatter(-1, order, ranked)


def parameter(sample: Clouds, count: int, kind: str, seed: int) -> Tensor:
    """Unit directions theta [L, D], float32, the same for the same sample and seed.

    random: uniform on the sphere.  orthogonal: rows of random rotations, D to a rotation.
    axis: the first L coordinates.  principal: the leading eigenvectors of the covariance of the
    points with mass about the mean of their own cloud, averaged over examples, heads and sides.
    """
    dim = sample.x.shape[3]
    if kind in AT_MOST_DIM and count > dim:
        raise InputError(
            f"slices: there are at most {dim} of kind {kind}, one per head dimension",
            got=count,
            help=f"ask for at most {dim}, or for kind random or orthogonal",
        )
    generator = torch.Generator().manual_seed(seed)
    if kind == "random":
        theta = torch.randn(count, dim, generator=generator, dtype=torch.float64)
        return (theta / theta.norm(dim=-1, keepdim=True)).float()
    if kind == "orthogonal":
        blocks = [_rotation(dim, generator) for _ in range(-(-count // dim))]
        return torch.cat(blocks)[:count].float()
    if kind == "axis":
        return torch.eye(dim)[:count]
    assert kind == "principal", kind
    return _principal(sample)[:count].float()


def _rotation(dim: int, generator: torch.Generator) -> Tensor:
    """Orthonormal rows [D, D], uniform: QR with the signs that make the factor R positive."""
    matrix = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(matrix)
    return q.T * torch.where(r.diagonal() < 0, -1.0, 1.0)[:, None]


def _principal(sample: Clouds) -> Tensor:
    """Eigenvectors as rows [D, D], leading first, the largest entry of each positive."""
    _, spread_x = moments(sample.x.detach().double(), sample.x_keep)
    _, spread_y = moments(sample.y.detach().double(), sample.y_keep)
    _, vectors = torch.linalg.eigh((spread_x + spread_y).mean((0, 1)).cpu())
    rows = vectors.T.flip(0)
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return rows * torch.where(largest < 0, -1.0, 1.0)
