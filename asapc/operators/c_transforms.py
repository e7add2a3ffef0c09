"""The two entropic c-transforms everything else is built on, and the marginals they close to.

All scores and duals are in units of epsilon (see asapc.ir); -inf marks a key that carries no mass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asapc.operators.masks import all_hidden


def log_marginals(
    num_queries: int, num_keys: int, keep: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Logarithms of mu_i = 1/N on every query row and nu_j = 1/M on active keys, 0 on masked ones.

    N and M count padding: the released Sinkformers give a padded batch mass n/N after a column step
    and mass 1 after a row step, and that is the convention to reproduce (ASAP, Eq. D.1).
    keep: [B, M] bool or None.  like: gives dtype and device.
    Returns log_mu [N] and log_nu [M] or [B, 1, M].
    """
    log_mu, log_nu = uniform_log_mass(num_queries, like), uniform_log_mass(num_keys, like)
    if keep is not None:
        log_nu = torch.where(keep[:, None, :], log_nu, -math.inf)
    return log_mu, log_nu


def uniform_log_mass(count: int, like: Tensor) -> Tensor:
    """log 1/n of n points, [n]: of a tensor, since math.log of a size would fix it in a graph."""
    return -like.new_full((count,), count).log()


def close_columns(scores: Tensor, f: Tensor, log_nu: Tensor) -> Tensor:
    """T_K:  g_j = log nu_j - logsumexp_i(S_ij + f_i).  After it every key column has mass nu_j.

    scores: [B, H, N, M]; f: [B, H, N]; log_nu: broadcastable to [B, H, M].  Returns g [B, H, M],
    -inf where nu_j = 0, and 0 where a column with mass is seen by no query at all.
    Source: ASAP, Eq. 8, in score coordinates.
    """
    massless = torch.isneginf(log_nu)
    # A masked column of scores is all -inf, whose logsumexp has no gradient: it is left out first.
    logits = torch.where(massless[..., None, :], 0.0, scores) + f[..., :, None]
    return torch.where(massless, -math.inf, _closed(logits, torch.where(massless, 0.0, log_nu), -2))


def close_rows(scores: Tensor, g: Tensor, log_mu: Tensor) -> Tensor:
    """T_Q:  f_i = log mu_i - logsumexp_j(S_ij + g_j).  After it every query row has mass mu_i.

    scores: [B, H, N, M]; g: [B, H, M]; log_mu: broadcastable to [B, H, N].  Returns f [B, H, N],
    0 where a row sees no active key at all (its plan row is 0 whatever f is).
    Source: ASAP, Eq. 15, in score coordinates.
    """
    return _closed(scores + g[..., None, :], log_mu, -1)


def _closed(logits: Tensor, log_mass: Tensor, axis: int) -> Tensor:
    """log mass - logsumexp along an axis, 0 where all is -inf, which has no gradient."""
    empty = all_hidden(logits, axis)
    total = torch.logsumexp(torch.where(empty.unsqueeze(axis), 0.0, logits), dim=axis)
    return torch.where(empty, 0.0, log_mass - total)


def closed_log_plan(log_plan: Tensor, axis: int, log_mass: Tensor | float) -> Tensor:
    """A log plan [..., N, M] scaled to these masses of its rows (axis -1) or columns (axis -2).

    log_mass: broadcastable to the plan.  A running plan keeps the digits of its largest entries, which
    are near 0, where duals as large as the scores would not.  A row that is -inf stays as it is.
    """
    empty = torch.isneginf(log_plan.detach().amax(axis, keepdim=True))
    closed = log_plan.masked_fill(empty, 0.0).log_softmax(axis) + log_mass
    return torch.where(empty, log_plan, closed)  # no gradient of what is all -inf
