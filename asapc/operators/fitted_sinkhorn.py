"""A finite Sinkhorn loop fitted to a layer: its own number of half-steps, an epsilon for each head.

    S_h = head_multiplier_h (score_multiplier q k' + bias),    then T half-steps as in operators.sinkhorn

The layer's scores, with epsilon of head h divided by head_multiplier_h. T = 1 on rows, with multipliers
of 1, is softmax attention itself.

Plain PyTorch, any dtype, differentiable in every tensor. The kernels are those of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asapc.operators.pair import pair
from asapc.operators.sinkhorn import sinkhorn, sinkhorn_attention, widen


def _fitted_sinkhorn(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, bias: Tensor | None,
    head_multiplier: Tensor, score_multiplier: float, half_steps: int, rows_first: bool,
    output_factor: Sequence[float],
) -> Tensor:  # fmt: skip
    """A v: [B, H, N, E] in v's dtype; or the map A: [B, H, N, M] in q's.

    head_multiplier: [H], without a unit; the rest as operators.sinkhorn.sinkhorn.
    Source: Sinkformers (ASAP, Eq. 3), with an epsilon for each head.
    """
    q, bias = scaled(q, bias, head_multiplier)
    settings = (keep, bias, score_multiplier, half_steps, rows_first, output_factor)
    return sinkhorn_attention(q, k, *settings) if v is None else sinkhorn(q, k, v, *settings)


fitted_sinkhorn, fitted_sinkhorn_attention = pair("fitted_sinkhorn", _fitted_sinkhorn)


def scaled(q: Tensor, bias: Tensor | None, head_multiplier: Tensor) -> tuple[Tensor, Tensor | None]:
    """q and bias with every head's scores multiplied.  q: [B, H, N, D]; head_multiplier: [H]."""
    q = widen(q)
    by_head = head_multiplier.to(q.dtype)[:, None, None]
    return q * by_head, None if bias is None else widen(bias) * by_head
