"""The finite Sinkhorn loop of the built-in teachers, exactly as trained: slow, plain, traceable."""

from __future__ import annotations

import torch
from torch import Tensor

PADDED_SCORE = -1e9  # what a padded key's score is set to, in the released text classifier
PADDED_DUAL = 9e8  # a target dual above this belongs to a padded key: it cancelled PADDED_SCORE


def sinkhorn_attention(scores: Tensor, max_iter: int, epsilon: float) -> Tensor:
    """Attention M * P after max_iter half-steps from zero duals, rows first.

        u_i <- eps (log 1/N - LSE_j((S_ij + u_i + v_j) / eps)) + u_i      even half-steps
        v_j <- eps (log 1/M - LSE_i((S_ij + u_i + v_j) / eps)) + v_j      odd half-steps

    scores: [..., N, M], padded keys at PADDED_SCORE.  Returns [..., N, M].
    Padded keys keep v = 0, so their plan stays 0; all N rows keep mass 1/N, padded ones too.  The
    released code also stops once a row update is below 1e-12, which its float32 never reaches
    unless the duals stand still: the plan is the same.
    Source: Sander et al. 2022, Sinkformers (ASAP, Eq. 3), and its code: max_iter counts half-steps.
    """
    rows, keys = scores.shape[-2], scores.shape[-1]
    u = torch.zeros_like(scores[..., 0])  # [..., N]
    v = torch.zeros_like(scores[..., 0, :])  # [..., M]
    log_mu = torch.log(torch.full_like(u, 1.0 / rows))
    log_nu = torch.log(torch.full_like(v, 1.0 / keys))

    def potentials() -> Tensor:
        return (scores + u.unsqueeze(-1) + v.unsqueeze(-2)) / epsilon

    for half_step in range(max_iter):
        if half_step % 2 == 0:
            u = epsilon * (log_mu - torch.logsumexp(potentials(), dim=-1)) + u
        else:
            v = epsilon * (log_nu - torch.logsumexp(potentials(), dim=-2)) + v
            v = torch.where(v > PADDED_DUAL, torch.zeros_like(v), v)
    return torch.exp(potentials()) * keys
