"""The dual a fit aims at: the teacher's own, a few half-steps before its end."""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.features.sliced import cost_offset
from asapc.ir import Convention, Side, SiteTensors
from asapc.operators.sinkhorn import finite_duals, score_matrix

# float64 overflows at exp(709): scores and duals within these leave room for every product of two.
_LINEAR_SCORE_LIMIT = 100.0
_LINEAR_DUAL_LIMIT = 500.0


def legal_closures(convention: Convention, wanted: int) -> int | None:
    """The largest number of closures <= wanted that a predicted source dual can start from.

    The closures must start with a column step, so they are odd in number for a column-ending
    teacher and even for a row-ending one; and the teacher must run a row step before them, c < T.
    None if there is no such number.
    """
    parity = 1 if convention.last_side == "column" else 0
    most = min(wanted, convention.half_steps - 1)
    closures = most if most % 2 == parity else most - 1
    return closures if closures >= 1 else None


def target_dual(tensors: SiteTensors, convention: Convention, closures: int) -> Tensor:
    """centre(f + rho): the teacher's source dual `closures` half-steps before its end.

    [B, H, N] float64, in units of epsilon and quadratic-cost coordinates. An exact prediction
    followed by `closures` closures reproduces the finite teacher (see operators/asap.py).
    Raises InputError if the teacher runs no row step just before those closures.
    """
    if legal_closures(convention, closures) != closures:
        raise InputError(
            f"closures: a {convention.last_side}-ending teacher of {convention.half_steps} "
            f"half-steps allows {_allowed(convention)}",
            got=closures,
            help="lower `closures` in the recipe, or use `operator: sinkhorn` for this site",
        )
    steps = convention.half_steps - closures
    bias = None if tensors.bias is None else tensors.bias.double()
    scores = score_matrix(
        tensors.q.double(), tensors.k.double(), tensors.keep, bias, convention.score_multiplier
    )
    f = source_dual(scores, steps, convention.first_side, tensors.keep)
    f = f + cost_offset(tensors.q.double(), convention.score_multiplier)
    return f - f.mean(-1, keepdim=True)


def source_dual(scores: Tensor, half_steps: int, first_side: Side, keep: Tensor | None) -> Tensor:
    """f of operators.sinkhorn.finite_duals, float64 [B, H, N], by the faster of two equal ways."""
    f = _linear_source_dual(scores, half_steps, first_side, keep)
    return finite_duals(scores, half_steps, first_side, keep)[0] if f is None else f


def _linear_source_dual(
    scores: Tensor, half_steps: int, first_side: Side, keep: Tensor | None
) -> Tensor | None:
    """The loop as matrix-vector products of exp(S); None where float64 might over- or underflow.

    A sum of positive normal numbers is exact to rounding, so within the limits this is as accurate
    as the log domain. A g outside its limit shows in the f that follows it.
    """
    finite = scores if keep is None else scores.masked_fill(~keep[:, None, None, :], 0.0)
    if scores.numel() == 0 or not bool(finite.abs().amax() <= _LINEAR_SCORE_LIMIT):
        return None
    kernel = torch.exp(scores)  # 0 on masked keys
    num_queries, num_keys = scores.shape[-2:]
    scaling_f = scores.new_ones((*scores.shape[:-1], 1))
    scaling_g = scores.new_ones((*scores.shape[:-2], num_keys, 1))
    transposed = kernel.transpose(-1, -2)
    for step in range(half_steps):
        if (step % 2 == 0) == (first_side == "row"):
            total = kernel @ scaling_g
            # A row without an active key keeps f = 0, as in closures.close_rows.
            scaling_f = torch.where(total > 0, 1 / (num_queries * total), 1.0)
        else:
            total = transposed @ scaling_f
            scaling_g = torch.where(total > 0, 1 / (num_keys * total), 0.0)
    f = scaling_f[..., 0].log()
    return f if bool(f.isfinite().all()) and bool(f.abs().amax() < _LINEAR_DUAL_LIMIT) else None


def _allowed(convention: Convention) -> str:
    most = legal_closures(convention, convention.half_steps)
    if most is None:
        return "no closure after a predicted source dual"
    first = 1 if convention.last_side == "column" else 2
    listed = [str(c) for c in range(first, min(most, 5) + 1, 2)]
    return "closures " + ", ".join(listed) + (", ..." if most > 5 else "")
