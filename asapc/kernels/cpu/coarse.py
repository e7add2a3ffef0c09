"""CPU twin of features/coarse.py: the coarse loop in the linear domain, by the engine.

K = exp(S - rowmax) [N, R] is formed once; every half-step is then a product with a vector. Scores that
spread too far for float32 are taken in float64, and by the formula, in the log domain, where they spread
too far for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.features.clouds import Budget, Clouds
from asapc.features.coarse import CoarseProblem, coarse_duals, coarse_problem, masses_of, over_x
from asapc.kernels import native
from asapc.kernels.cpu.workers import SAFE_ROW_RANGE

ENTRIES = 1 << 19  # of the scores of some examples, which are worked on together


def dual_and_mass(
    clouds: Clouds, pivots: Tensor, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """The coarse column u + |x|^2 / 2 [B, H, N], and features.coarse.row_mass [B, H, M] if wanted.

    pivots: [H, R, D], or [B, H, R, D]. Without gradients.
    """
    batch, heads, queries, _ = clouds.x.shape
    entries = heads * max(queries, clouds.y.shape[2]) * pivots.shape[-2]
    step = max(1, ENTRIES // max(1, entries))
    columns, masses = [], []
    for start in range(0, max(1, batch), step):
        some = clouds.unbiased(slice(start, start + step))
        problem = coarse_problem(some, pivots if pivots.dim() == 3 else pivots[start : start + step])
        u, v = _duals(problem, some.x_keep, budget)
        columns.append(u + some.cost_offset())
        if want_mass:
            sums = over_x(problem.scores + u[..., None], some.x_keep)
            masses.append(masses_of(problem, v, sums, some.x_keep))
    return torch.cat(columns), torch.cat(masses) if want_mass else None


def _duals(problem: CoarseProblem, x_keep: Tensor | None, budget: Budget) -> tuple[Tensor, Tensor]:
    """u [B, H, N] and v [B, H, R] as coarse_duals has them up to the gauge; u is 0 on x without mass."""
    scores = problem.scores
    if native.missing() is None and budget.half_steps > 0 and scores.numel() > 0:
        top = scores.amax(-1, keepdim=True)
        widest = float((top - scores.amin(-1, keepdim=True)).max())
        for dtype in (scores.dtype, torch.float64):
            if widest <= SAFE_ROW_RANGE[dtype]:
                return _in_linear_domain(problem, x_keep, budget, top, dtype)
    return coarse_duals(problem, x_keep, budget)


def _in_linear_domain(
    problem: CoarseProblem, x_keep: Tensor | None, budget: Budget, top: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """top: [B, H, N, 1], the rows' largest scores."""
    batch, _, queries, _ = problem.scores.shape
    kernel = (problem.scores.to(dtype) - top).exp_().flatten(0, 1)
    mu = kernel.new_ones(batch, 1, queries)
    if x_keep is not None:
        mu = mu * x_keep[:, None]
    counts = problem.counts.to(dtype)
    active = counts.sum(-1, keepdim=True)
    # Of the same total as mu, so that the scalings do not drift.
    nu = counts * (mu.sum(-1, keepdim=True) / active.clamp(min=1.0))
    highest = top.masked_fill(mu[..., None] == 0, -torch.inf).amax(2, keepdim=True)
    a = (top - highest).to(dtype).exp_()[..., 0].masked_fill(mu == 0, 0.0)  # u = 0
    b = nu.clone()  # v = 0
    native.scale(
        kernel.contiguous(), a.flatten(0, 1), b.flatten(0, 1),
        mu.expand(a.shape).flatten(0, 1).contiguous(), nu.flatten(0, 1), budget.half_steps,
        budget.starts_on_x,
    )  # fmt: skip
    u = (a.log() - top[..., 0]).masked_fill((mu == 0) | (active == 0), 0.0)
    v = torch.where(nu > 0, b.log() - nu.log(), 0.0)
    return u.to(problem.scores.dtype), v.to(problem.scores.dtype)
