"""ASAP: a predicted source dual, then a fixed small number of closures (ASAP paper, Eqs. 16-18).

    columns last, 1 closure:   g0 = T_K(f^)
    columns last, 3 closures:  g0 = T_K(f^), f+ = T_Q(g0), g+ = T_K(f+)
    rows last,    2 closures:  g0 = T_K(f^), f+ = T_Q(g0)

The predicted dual is the teacher's own, as many half-steps before its end as there are closures, so
an exact prediction reproduces the finite teacher exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asapc.operators.sinkhorn import (
    _wide,
    attention_map,
    initial_duals,
    run_half_steps,
    score_matrix,
    widen,
)


def asap_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor,
    score_multiplier: float,
    closures: int,
    output_factor: Sequence[float],
) -> Tensor:
    """Dense attention map after `closures` closures from the source dual, [B, H, N, M].

    dual: [B, H, N], the predicted source dual in score coordinates; its gauge is free.
    """
    scores = score_matrix(_wide(q), _wide(k), keep, widen(bias), score_multiplier)
    _, g = initial_duals(scores, keep)
    f, g = run_half_steps(scores, dual.to(scores.dtype), g, closures, "column", keep)
    return attention_map(scores, f, g, output_factor, keep).to(q.dtype)


def asap(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor,
    score_multiplier: float,
    closures: int,
    output_factor: Sequence[float],
) -> Tensor:
    """A v for the ASAP attention map A: [B, H, N, E] in v's dtype.  Arguments as asap_attention."""
    attention = asap_attention(
        _wide(q), _wide(k), keep, bias, dual, score_multiplier, closures, output_factor
    )
    return (attention @ _wide(v)).to(v.dtype)
