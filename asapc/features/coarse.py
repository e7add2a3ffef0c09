"""Coarse: the teacher's own finite loop on a small problem, R clusters in place of the points y.

Every y with mass joins its nearest pivot, or is shared by equally near ones. A cluster c of n_c points
with mean m_c and variance s_c (per dimension, averaged over dimensions) stands for n_c equal points,
whose score with x_i is, to second order,

    S_ic = x_i . m_c + |x_i|^2 s_c / 2.

A variance for each dimension gains nothing (within 0.001 of the attention error on the AG News teacher)
and would double the cost.

From u = v = 0 the teacher's half-steps up to the predicted dual are run on the N x R problem,

    u_i <- -LSE_c(S_ic + log n_c + v_c),        v_c <- -LSE_i(S_ic + u_i),

and the column is the last u plus |x|^2 / 2. Uniform masses only shift u and v, so they are left out.
The finite budget matters: a padded batch has one slow mode, padded against real queries, that the
teacher leaves unconverged. The clusters ignore a score bias. Cost O((N + M) R D + T N R) per head, for
N >> R a fraction of one c-transform.

What gained nothing beside it, in a prototype on an IMDb teacher (queries' dual, one c-transform, 128
examples to fit on), where `coarse:32 gaussian` is at 0.0207, and with `raw` at 0.0172: a loop on a kernel
of rank 32, exp(x z') exp(z z')^-1 exp(z y') with pivots of both clouds, 0.0171 beside these, 0.22 alone;
clusters of 16 and 8, too, without `raw`, 0.0229; the coarse loop run to its fixed point, which Newton
steps would reach sooner, 0.0202.

Farthest: as coarse, with clusters around each example's own farthest points.

Pivots shared by all examples fit none of them: a short text occupies a few of 32, and the rest stay
empty. Here the first pivot is the point y with mass farthest from the mean of those, and each further one
is the point farthest from all pivots before it (Gonzalez 1985: at most twice the radius of the best R
balls). Only the coefficient is fitted. Costs O(M R D) a head, as joining points to pivots
does, in R steps that need each other, and makes a prediction take about twice as long. On padded AG News
(32 pivots, 42 tokens with mass on average) the attention error is a third of that of shared pivots.
Rounds that take several points at once come close (0.0208 for 0.0191) and save little; splitting every
cluster at each round, random points, half of the pivots shared, and Lloyd steps on shared pivots are
worse (0.040, 0.040, 0.032, 0.054), and a Lloyd step after these gains 0.0002. On a CIFAR-10 teacher
without padding (N = 65, one c-transform, 0.024; shared pivots 0.054) every other token gives 0.039,
random ones 0.042, the tokens next to shared pivots 0.052, and shared pivots learnt by gradient descent on
the dual's error 0.050, or 0.047 with soft clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asapc.features.clouds import Budget, Clouds

SAMPLE_POINTS = 4096  # a head's pivots come from at most so many points
ITERATIONS = 20  # of Lloyd's


def parameter(sample: Clouds, count: int, kind: str, seed: int) -> Tensor:
    """Pivots [H, R, D] float32: k-means of the points y of each head.  kind: unused, there is one.

    With fewer distinct points than pivots, the surplus pivots repeat the first.
    """
    points = sample.y.transpose(0, 1).cpu()
    points = points.flatten(1, 2) if sample.y_keep is None else points[:, sample.y_keep.cpu()]
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(points.shape[1])[:SAMPLE_POINTS]
    return kmeans(points[:, torch.from_numpy(chosen)].double(), count, generator).float()


def kmeans(points: Tensor, count: int, generator: np.random.Generator) -> Tensor:
    """`count` centres of the points of each head: [H, count, D] from float64 [H, n, D].

    If there are fewer distinct points, these and copies of the first; 0 if there are none.
    k-means++ and Lloyd's iteration run on all heads at once: a large model has hundreds.
    """
    heads, size, dim = points.shape
    if size == 0:
        return points.new_zeros(heads, count, dim)
    rows = torch.arange(heads)
    chosen = torch.from_numpy(generator.integers(size, size=(1, heads)))
    least = points.new_full((heads, size), math.inf)
    while True:
        least = torch.minimum(least, (points - points[rows, chosen[-1], None]).square().sum(-1))
        if len(chosen) == count:
            break
        ends = least.cumsum(-1)
        drawn = torch.from_numpy(generator.random((heads, 1))) * ends[:, -1:]
        place = torch.searchsorted(ends, drawn, right=True)[:, 0].clamp(max=size - 1)
        chosen = torch.cat([chosen, torch.where(ends[:, -1] > 0, place, chosen[0])[None]])
    centres = points[rows[:, None], chosen.T]
    for _ in range(ITERATIONS):
        products = torch.baddbmm(
            centres.square().sum(-1)[:, None], points, centres.transpose(1, 2), alpha=-2
        )
        nearest = torch.zeros_like(products).scatter_(2, products.argmin(2, keepdim=True), 1.0)
        sizes = nearest.sum(1)[..., None]
        means = nearest.transpose(1, 2) @ points / sizes.clamp(min=1)
        moved = torch.where(sizes > 0, means, centres)
        if bool((moved == centres).all()):
            break
        centres = moved
    return centres


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """The last u plus |x|^2 / 2: [B, H, N, 1]."""
    assert parameter is not None
    return dual_and_mass(clouds, parameter, parameter.shape[-2], budget, False)[0][..., None]


def dual_and_mass(
    clouds: Clouds, pivots: Tensor | None, count: int, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """The last u plus |x|^2 / 2 [B, H, N]; and if wanted the predicted masses of the points y in the plan
    that the budget ends on, 1 on average: [B, H, M].

    pivots: [H, R, D] or [B, H, R, D]; None for those of farthest_points, `count` of them.
    The last half-step closes x, so a cluster c of y has the mass r_c = exp(v_c - v'_c), where v' is v
    after one more half-step. The clusters' total mass is that of the points x, which a column step has
    just made exact.
    """
    problem = coarse_problem(clouds, farthest_points(clouds, count) if pivots is None else pivots)
    u, v = coarse_duals(problem, clouds.x_keep, budget)
    column = u + clouds.cost_offset()
    if not want_mass:
        return column, None
    return column, masses_of(problem, v, over_x(problem.scores + u[..., None], clouds.x_keep))


def masses_of(problem: CoarseProblem, v: Tensor, sums: Tensor) -> Tensor:
    """The masses of dual_and_mass, of the dual v and of sums = LSE_i(S_ic + u_i), both [B, H, R]."""
    log_mass = v + sums
    used = problem.counts > 0
    top = log_mass.masked_fill(~used, -math.inf).amax(-1, keepdim=True)
    masses = (log_mass - top.masked_fill(top == -math.inf, 0.0)).exp().masked_fill(~used, 0.0)
    total = (problem.counts * masses).sum(-1, keepdim=True)
    masses = masses * problem.counts.sum(-1, keepdim=True) / torch.where(total > 0, total, 1.0)
    return (problem.member @ masses[..., None])[..., 0]


@dataclass(frozen=True)
class CoarseProblem:
    """member: [B, H, M, R], the share of each y in each cluster, 0 on points without mass.

    scores S: [B, H, N, R]; counts n: [B, H, R].
    """

    scores: Tensor
    counts: Tensor
    member: Tensor


def coarse_problem(clouds: Clouds, pivots: Tensor) -> CoarseProblem:
    """pivots: [H, R, D], or [B, H, R, D] where every example has its own."""
    y, z = clouds.y, pivots.to(clouds.y)
    # |y - z|^2 / 2 without |y|^2 / 2, which does not decide.
    distance = z.square().sum(-1)[..., None, :] / 2 - y @ z.transpose(-1, -2)  # [B, H, M, R]
    nearest = (distance == distance.amin(-1, keepdim=True)).to(y.dtype)
    member = nearest / nearest.sum(-1, keepdim=True)
    if clouds.y_keep is not None:
        member = member * clouds.y_keep[:, None, :, None]
    counts = member.sum(2)
    total = counts.sum(-1)[..., None, None].clamp(min=1.0)
    weight = member.sum(-1, keepdim=True)  # 1, or 0 without mass
    centre = (weight * y).sum(2, keepdim=True) / total  # [B, H, 1, D]
    # Moments about the common mean keep the variances, which are small differences, accurate. An
    # empty cluster sits at the mean, where its scores are in range and its weight 0 removes it.
    local = y - centre
    share = member.transpose(-1, -2) / counts.clamp(min=torch.finfo(y.dtype).tiny)[..., None]
    offset = share @ local
    second = (share @ local.square().sum(-1, keepdim=True))[..., 0]
    return CoarseProblem(scores_of(clouds, centre, offset, second), counts, member)


def scores_of(clouds: Clouds, centre: Tensor, offset: Tensor, second: Tensor) -> Tensor:
    """S [B, H, N, R] from the moments of clusters.

    centre: the common mean of the points y [B, H, 1, D]; offset, second: means [B, H, R, D] and mean
    squares [B, H, R] of the clusters about it.
    """
    variance = (second - offset.square().sum(-1)).clamp(min=0.0) / clouds.y.shape[3]  # [B, H, R]
    scores = clouds.x @ (centre + offset).transpose(-1, -2)
    return scores + clouds.cost_offset()[..., None] * variance[..., None, :]


def coarse_duals(problem: CoarseProblem, x_keep: Tensor | None, budget: Budget) -> tuple[Tensor, Tensor]:
    """u [B, H, N] and v [B, H, R] after the budget's half-steps from zero."""
    rows = problem.scores + problem.counts.log()[..., None, :]  # -inf on empty clusters
    empty = (problem.counts.sum(-1) == 0)[..., None]  # [B, H, 1]: no point with mass at all
    u = torch.zeros_like(problem.scores[..., 0])
    v = torch.zeros_like(problem.counts)
    on_x = budget.starts_on_x
    for _ in range(budget.half_steps):
        if on_x:
            logits = (rows + v[..., None, :]).masked_fill(empty[..., None], 0.0)
            u = (-torch.logsumexp(logits, -1)).masked_fill(empty, 0.0)
        else:
            v = -over_x(problem.scores + u[..., None], x_keep)
        on_x = not on_x
    return u, v


def over_x(logits: Tensor, x_keep: Tensor | None) -> Tensor:
    """logsumexp over the points x with mass, [B, H, R]; over all of them where none has any."""
    if x_keep is not None:
        keep = x_keep[:, None, :, None]
        logits = torch.where(keep | ~keep.any(2, keepdim=True), logits, -math.inf)
    return torch.logsumexp(logits, -2)


@torch.no_grad()
def farthest_points(clouds: Clouds, count: int) -> Tensor:
    """Pivots [B, H, R, D]: `count` points y with mass, which repeat where there are fewer.

    Without gradients: a dual depends on the pivots only through which of them is nearest.
    """
    batch, heads, size, dim = clouds.y.shape
    y = clouds.y.flatten(0, 1)  # [G, M, D]
    weight = torch.ones_like(y[..., :1])
    if clouds.y_keep is not None:
        weight = weight * clouds.y_keep.repeat_interleave(heads, 0)[..., None]
    local = y - (y * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1.0)
    squares = local.square().sum(-1)
    # |y - z|^2 = |y|^2 - 2 z . y + |z|^2, one vector times a matrix a step; -inf for points without mass.
    base = squares.masked_fill(weight[..., 0] == 0, -math.inf)[:, None]  # [G, 1, M]
    columns, as_pivots = local.transpose(1, 2).contiguous(), (-2 * local).flatten(0, 1)
    first = torch.arange(batch * heads, device=y.device) * size
    least, places = base, list[Tensor]()
    while True:
        places.append(first + least.argmax(-1)[:, 0])
        if len(places) == count:
            break
        away = torch.baddbmm(base, as_pivots[places[-1]][:, None], columns)
        away = away + squares.flatten()[places[-1]][:, None, None]
        # The mean, which the first was compared with, is not a pivot.
        least = away if len(places) == 1 else torch.minimum(least, away)
    return y.flatten(0, 1)[torch.stack(places, -1)].view(batch, heads, count, dim)
