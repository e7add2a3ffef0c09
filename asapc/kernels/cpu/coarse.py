"""CPU twin of features/coarse.py: the duals of the coarse loop, from the logarithm of its plan.

    log P_ic = S_ic + log n_c + u_i + v_c

Scores that spread too far for float32 are taken in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.features.clouds import Budget, Clouds
from asapc.features.coarse import CoarseProblem, coarse_duals, coarse_problem, masses_of, over_x
from asapc.kernels import native
from asapc.kernels.cpu.plan import plan
from asapc.kernels.loop import precision
from asapc.kernels.plan import Task

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
            masses.append(masses_of(problem, v, sums))
    return torch.cat(columns), torch.cat(masses) if want_mass else None


def _duals(problem: CoarseProblem, x_keep: Tensor | None, budget: Budget) -> tuple[Tensor, Tensor]:
    """u [B, H, N] and v [B, H, R] as coarse_duals has them up to the gauge; u is 0 on x without mass."""
    scores, empty = problem.scores, problem.counts.sum(-1, keepdim=True) == 0
    if native.missing() is not None or budget.half_steps < 1 or scores.numel() == 0:
        return coarse_duals(problem, x_keep, budget)
    widest = float((scores.amax(-1) - scores.amin(-1)).max())
    if precision(widest, scores.dtype) is not scores.dtype:
        scores = scores.double()
    log_counts = problem.counts.masked_fill(empty, 1.0).to(scores.dtype).log()
    rows, log_mu, row = scores + log_counts[..., None, :], None, torch.zeros((), dtype=torch.int64)
    if x_keep is not None:
        shown = x_keep | ~x_keep.any(-1, keepdim=True)
        log_mu = torch.where(shown, 0.0, -torch.inf)[:, None]
        rows = rows.masked_fill(~shown[:, None, :, None], -torch.inf)
        row = shown.int().argmax(-1)[:, None]
    task = Task.of(
        log_mu, log_counts, score_multiplier=1.0, half_steps=budget.half_steps,
        rows_first=budget.starts_on_x, output_factor=[1.0, 0.0, 0.0, 0.0], log=True,
    )  # fmt: skip
    log_plan, cluster = plan(rows, task), log_counts.argmax(-1)[..., None]

    def both(index: Tensor, axis: int) -> Tensor:
        """u + v along a row or a column of the plan in which nothing with mass is hidden."""
        there, scored = (torch.take_along_dim(x, index, axis) for x in (log_plan, rows))
        return (there - scored).squeeze(axis)

    u, v = both(cluster[..., None, :], -1), both(row.expand(empty.shape[:2])[..., None, None], -2)
    v = (v - torch.take_along_dim(v, cluster, -1)).masked_fill(empty | (problem.counts == 0), 0.0)
    u = u.masked_fill(empty if x_keep is None else empty | ~x_keep[:, None], 0.0)
    return u.to(problem.scores.dtype), v.to(problem.scores.dtype)
