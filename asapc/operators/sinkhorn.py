"""The finite Sinkhorn loop exactly as a teacher runs it: the lossless operator's reference.

Plain PyTorch in the log domain, any dtype, differentiable. `asapc.kernels` holds the fast twins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, overload

import torch
from torch import Tensor

from asapc.ir import Convention, OutputFactor, Side
from asapc.operators.c_transforms import close_columns, close_rows, log_marginals
from asapc.operators.catalogue import OPERATORS, Operator
from asapc.operators.pair import pair


def open_empty(
    q: Tensor, keep: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q, keep and bias with every key of an example that has no active one active, at score 0.

    Teachers mask by a finite score such as -1e9: where all scores are equal, attention is uniform.
    """
    if keep is None:
        return q, keep, bias
    here = ~keep.any(-1)[:, None, None, None]
    if bias is not None:
        bias = torch.where(here, 0.0, bias)
    return q.masked_fill(here, 0.0), opened_keys(keep), bias


@overload
def opened_keys(keep: Tensor) -> Tensor: ...
@overload
def opened_keys(keep: None) -> None: ...
def opened_keys(keep: Tensor | None) -> Tensor | None:
    """[B, M], with every key of an example that has no active one active."""
    return None if keep is None else keep | ~keep.any(-1, keepdim=True)


def clean_values(v: Tensor, keep: Tensor | None) -> Tensor:
    """v with 0 at masked keys, where 0 * nan would be nan.  v: [B, H, M, E]."""
    return v if keep is None else v.masked_fill(~keep[:, None, :, None], 0.0)


def masked(out: Tensor, keep: Tensor | None, query_keep: Tensor | None) -> Tensor:
    """0 in padded rows, and in every row of an example without an active key.  out: [B, H, N, ...]."""
    out = clean_values(out, query_keep)
    return out if keep is None else out.masked_fill(~keep.any(-1)[:, None, None, None], 0.0)


def score_matrix(
    q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None, score_multiplier: float
) -> Tensor:
    """S = score_multiplier * q k^T + bias, -inf on masked keys.

    q: [B, H, N, D]; k: [B, H, M, D]; keep: [B, M] bool; bias: broadcastable to [B, H, N, M].
    Returns [B, H, N, M].
    """
    scores = (q * score_multiplier) @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None, :], -math.inf)
    return scores


def initial_duals(scores: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """f = 0 [B, H, N] and g = 0 [B, H, M], with g = -inf on masked keys."""
    f = scores.new_zeros(scores.shape[:-1])
    g = scores.new_zeros((*scores.shape[:-2], scores.shape[-1]))
    if keep is not None:
        g = g.masked_fill(~keep[:, None, :], -math.inf)
    return f, g


def run_half_steps(
    scores: Tensor, f: Tensor, g: Tensor, half_steps: int, first_side: Side, keep: Tensor | None,
    tail: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`half_steps` alternating c-transforms from the duals (f, g), the first one on `first_side`."""
    marginals = log_marginals(scores.shape[-2], scores.shape[-1], keep, scores)
    return alternate(scores, f, g, half_steps, first_side, *marginals, tail=tail)


def alternate(
    scores: Tensor, f: Tensor, g: Tensor, half_steps: int, first_side: Side, log_mu: Tensor,
    log_nu: Tensor, damping: Sequence[float] | None = None, tail: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same with marginals that are given, broadcastable to f [B, H, N] and g [B, H, M].

    damping: (of rows, of columns), by which every new dual is multiplied; see operators.plan.
    tail: the scores' gradients pass through the last of the half-steps alone.
    """
    rows, columns = damping or (1.0, 1.0)
    stopped = 0 if tail is None else half_steps - tail
    for step in range(half_steps):
        here = scores.detach() if step < stopped else scores
        if (step % 2 == 0) == (first_side == "row"):
            f = close_rows(here, g, log_mu)
            f = f if rows == 1.0 else f * rows
        else:
            g = close_columns(here, f, log_nu)
            g = g if columns == 1.0 else g * columns
    return f, g


def finite_duals(
    scores: Tensor, half_steps: int, first_side: Side, keep: Tensor | None, tail: int | None = None
) -> tuple[Tensor, Tensor]:
    """The teacher's duals after `half_steps` half-steps from zero: f [B, H, N], g [B, H, M].

    Absolute duals, so the plan is exp(S + f + g).  tail: gradients pass through the last of them alone.
    Source: Sinkformers, in the log domain (ESPFormer, Appendix B); block-wise paper, 2.2, for the tail.
    """
    return run_half_steps(scores, *initial_duals(scores, keep), half_steps, first_side, keep, tail)


def factor_value(
    output_factor: Sequence[float], num_queries: int, num_keys: int, keep: Tensor | None
) -> float | Tensor:
    """Evaluate [coefficient, N power, M power, n power]; a [B, 1, 1, 1] tensor if n enters."""
    coefficient, queries, keys, active = output_factor
    num_queries, num_keys = torch.sym_max(num_queries, 1), torch.sym_max(num_keys, 1)
    value = coefficient * num_queries**queries * num_keys**keys
    if active and keep is not None:
        count = keep.sum(-1).clamp(min=1).to(torch.float64)
        return (value * count**active)[:, None, None, None]
    return value * num_keys**active if active else value


def factor_terms(factor: OutputFactor) -> list[float]:
    """An OutputFactor as the flat list the registered operators take."""
    return [factor.coefficient, float(factor.queries), float(factor.keys), float(factor.active)]


def loop_settings(convention: Any) -> dict[str, Any]:
    """The settings that operators of a finite loop have in common, by name."""
    return {
        "score_multiplier": convention.score_multiplier, "half_steps": convention.half_steps,
        "rows_first": convention.first_side == "row",
        "output_factor": factor_terms(convention.output_factor),
    }  # fmt: skip


def loop_of(convention: Convention) -> tuple[Operator, dict[str, Any]]:
    """The operator of a finite loop, and its settings by name."""
    settings = loop_settings(convention)
    if convention.stabiliser is None:
        return OPERATORS["sinkhorn"], settings
    return OPERATORS["stabilised_sinkhorn"], settings | asdict(convention.stabiliser)


def attention_map(
    scores: Tensor, f: Tensor, g: Tensor, output_factor: Sequence[float], keep: Tensor | None
) -> Tensor:
    """A = factor * exp(S + f + g): [B, H, N, M], exactly 0 on masked keys."""
    factor = factor_value(output_factor, scores.shape[-2], scores.shape[-1], keep)
    plan = torch.exp(scores + f[..., :, None] + g[..., None, :])
    return plan * (factor.to(plan.dtype) if isinstance(factor, Tensor) else factor)


@overload
def widen(tensor: Tensor) -> Tensor: ...
@overload
def widen(tensor: None) -> None: ...
def widen(tensor: Tensor | None) -> Tensor | None:
    """Half precision is accumulated in float32; float32 and float64 stay."""
    if tensor is None or tensor.dtype in (torch.float32, torch.float64, torch.bool):
        return tensor
    return tensor.float()


def _sinkhorn(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, bias: Tensor | None,
    score_multiplier: float, half_steps: int, rows_first: bool, output_factor: Sequence[float],
    tail: int | None = None, tolerance: float = 0.0,
) -> Tensor:  # fmt: skip
    """A v for the finite loop's attention map A: [B, H, N, E] in v's dtype; or A [B, H, N, M] in q's.

    q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; keep: [B, M] bool, True on active keys;
    bias: broadcastable to [B, H, N, M] and already divided by epsilon.

    tail: half-steps that gradients pass through, from the last one; None for all of them.  tolerance:
    what a gradient may leave out of the scores' beyond that, see kernels.loop.Tail; nothing here.
    """
    q, keep, bias = open_empty(q, keep, bias)
    scores = score_matrix(widen(q), widen(k), keep, widen(bias), score_multiplier)
    side: Side = "row" if rows_first else "column"
    f, g = finite_duals(scores, half_steps, side, keep, tail)
    attention = attention_map(scores, f, g, output_factor, keep)
    return attention if v is None else attention @ widen(clean_values(v, keep))


sinkhorn, sinkhorn_attention = pair("sinkhorn", _sinkhorn)
