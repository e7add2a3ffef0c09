"""Coarse: the teacher's own finite loop on a small problem, R clusters in place of the points y.

Every y with mass joins its nearest pivot. A cluster c of n_c points with mean m_c and variances
s_c stands for n_c equal points, whose score with x_i is, to second order,

    S_ic = x_i . m_c + sum_d x_id^2 s_cd / 2.

From u = v = 0 the teacher's half-steps up to the predicted dual are run on the N x R problem,

    u_i <- -LSE_c(S_ic + log n_c + v_c),        v_c <- -LSE_i(S_ic + u_i),

and the column is the last u plus |x|^2 / 2. Uniform masses only shift u and v, so they are left out.
The finite budget matters: a padded batch has one slow mode, padded against real queries, that the
teacher leaves unconverged. Cost O((N + M) R D + T N R) a head, a fraction of one closure for N >> R.
A score bias is not seen by the clusters.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor

from asapc.features.clouds import Budget, Clouds

SAMPLE_POINTS = 8192  # a head's pivots come from at most so many points


def parameter(sample: Clouds, count: int, kind: str, seed: int) -> Tensor:
    """Pivots [H, R, D] float32: k-means of the points y of each head.  kind: unused, there is one.

    With fewer distinct points than pivots, the surplus pivots attract nothing.
    """
    heads, dim = sample.y.shape[1], sample.y.shape[3]
    pivots = torch.zeros(heads, count, dim)
    for head in range(heads):
        points = sample.y[:, head]
        points = points.flatten(0, 1) if sample.y_keep is None else points[sample.y_keep]
        generator = np.random.default_rng(seed)
        chosen = generator.permutation(len(points))[:SAMPLE_POINTS]
        rows = points[torch.from_numpy(chosen)].double().cpu().numpy()
        pivots[head] = torch.from_numpy(_kmeans(rows, count, generator)).float()
    return pivots


def _kmeans(rows: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    distinct = np.unique(rows, axis=0)
    if len(distinct) <= count:
        # Repeats of the first point lose every tie against it, which argmin gives to the first.
        filler = np.repeat(distinct[:1] if len(distinct) else np.zeros((1, rows.shape[1])), count, 0)
        return np.concatenate([distinct, filler])[:count]
    centres, _ = kmeans2(rows, count, iter=20, minit="++", missing="warn", seed=generator)
    return np.asarray(centres)


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """The last u plus |x|^2 / 2: [B, H, N, 1]."""
    assert parameter is not None
    scores, counts = coarse_problem(clouds, parameter)
    u, _ = coarse_duals(scores, counts, clouds.x_keep, budget)
    return (u + clouds.cost_offset())[..., None]


def coarse_problem(clouds: Clouds, pivots: Tensor) -> tuple[Tensor, Tensor]:
    """Second-order scores S [B, H, N, R] and cluster sizes n [B, H, R]."""
    y, z = clouds.y, pivots.to(clouds.y)
    # |y - z|^2 without |y|^2, which does not decide.
    distance = z.square().sum(-1)[:, None, :] / 2 - y @ z.transpose(-1, -2)  # [B, H, M, R]
    member = torch.nn.functional.one_hot(distance.argmin(-1), z.shape[1]).to(y.dtype)
    if clouds.y_keep is not None:
        member = member * clouds.y_keep[:, None, :, None]
    counts = member.sum(2)
    share = member.transpose(-1, -2) / counts.clamp(min=1.0)[..., None]  # [B, H, R, M]
    # Moments about the pivot: the variance is a small difference only where the cluster is small.
    nearest = member @ z  # [B, H, M, D], 0 on points without mass, whose share is 0 too
    local = y - nearest
    offset = share @ local
    variance = (share @ local.square() - offset.square()).clamp(min=0.0)
    scores = clouds.x @ (z + offset).transpose(-1, -2)
    scores = scores + clouds.x.square() @ (variance / 2).transpose(-1, -2)
    return scores, counts


def coarse_duals(
    scores: Tensor, counts: Tensor, x_keep: Tensor | None, budget: Budget
) -> tuple[Tensor, Tensor]:
    """u [B, H, N] and v [B, H, R] after the budget's half-steps from zero; massless points keep 0."""
    rows = scores + counts.log()[..., None, :]  # -inf on empty clusters
    empty = (counts.sum(-1) == 0)[..., None]  # [B, H, 1]: no point with mass at all
    u = torch.zeros_like(scores[..., 0])
    v = torch.zeros_like(counts)
    on_x = budget.starts_on_x
    massless = None if x_keep is None else ~x_keep[:, None, :, None]
    if massless is not None:
        scores = scores.masked_fill(massless, -math.inf)
        gone = massless.all(2)  # [B, 1, 1]: no x with mass
    for _ in range(budget.half_steps):
        if on_x:
            logits = (rows + v[..., None, :]).masked_fill(empty[..., None], 0.0)
            u = (-torch.logsumexp(logits, -1)).masked_fill(empty, 0.0)
        else:
            logits = scores + u[..., None]
            if massless is not None:
                logits = logits.masked_fill(gone[..., None], 0.0)
            v = -torch.logsumexp(logits, -2)
        on_x = not on_x
    return u, v


def row_mass(clouds: Clouds, pivots: Tensor, budget: Budget) -> Tensor:
    """Predicted masses of the points y in the plan that the budget ends on: [B, H, M].

    In attention units: 1 for a point in balance. The last half-step closes x, so a cluster c of y
    has the mass r_c = exp(v_c - v'_c), where v' is what one more half-step would make of v. The
    clusters' total mass is that of the points x, which a column step has just made exact.
    """
    scores, counts = coarse_problem(clouds, pivots)
    u, v = coarse_duals(scores, counts, clouds.x_keep, budget)
    return mass_of_members(clouds, pivots, counts, log_mass(scores, u, v, clouds.x_keep))


def log_mass(scores: Tensor, u: Tensor, v: Tensor, x_keep: Tensor | None) -> Tensor:
    """log r_c up to a constant: [B, H, R]."""
    logits = scores + u[..., None]
    if x_keep is not None:
        keep = x_keep[:, None, :, None]
        logits = torch.where(keep | ~keep.any(2, keepdim=True), logits, -math.inf)
    return v + torch.logsumexp(logits, -2)


def mass_of_members(clouds: Clouds, pivots: Tensor, counts: Tensor, log_masses: Tensor) -> Tensor:
    """Every y gets its cluster's mass, scaled to the total mass of x: [B, H, M]."""
    used = counts > 0
    top = log_masses.masked_fill(~used, -math.inf).amax(-1, keepdim=True)
    masses = (log_masses - top.clamp(min=torch.finfo(top.dtype).min)).exp().masked_fill(~used, 0.0)
    total = (counts * masses).sum(-1, keepdim=True).clamp(min=torch.finfo(top.dtype).tiny)
    share = _active_share(clouds)  # [B, 1, 1] or 1.0
    masses = masses * (counts.sum(-1, keepdim=True) / total) * share
    z = pivots.to(clouds.y)
    distance = z.square().sum(-1)[:, None, :] / 2 - clouds.y @ z.transpose(-1, -2)
    return masses.gather(-1, distance.argmin(-1))


def _active_share(clouds: Clouds) -> Tensor | float:
    """The part of the points x that carry mass, n / N."""
    if clouds.x_keep is None:
        return 1.0
    return clouds.x_keep.to(clouds.x.dtype).mean(-1)[:, None, None]
