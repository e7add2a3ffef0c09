"""asapc::stabilised_sinkhorn and its `_attention` twin, which returns the map; they have no kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asapc.kernels import dispatch
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import operator
from asapc.kernels.library.sizes import share_sizes
from asapc.operators import stabilised as reference


@operator
def stabilised_sinkhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    form: str,
    kind: str,
    constant: float,
    start: str,
    shares: bool,
    start_share: bool,
    output_factor: Sequence[float],
) -> Tensor:
    dispatch.note_plain("stabilised_sinkhorn", q, k, WHY)
    return reference.stabilised_sinkhorn(
        q, k, v, keep, bias, score_multiplier, half_steps, rows_first, form, kind, constant, start,
        shares, start_share, output_factor,
    )  # fmt: skip


@operator
def stabilised_sinkhorn_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    form: str,
    kind: str,
    constant: float,
    start: str,
    shares: bool,
    start_share: bool,
    output_factor: Sequence[float],
) -> Tensor:
    dispatch.note_plain("stabilised_sinkhorn_attention", q, k, WHY)
    return reference.stabilised_sinkhorn_attention(
        q, k, keep, bias, score_multiplier, half_steps, rows_first, form, kind, constant, start,
        shares, start_share, output_factor,
    )  # fmt: skip


WHY = "the constant in its divisions is kept: products of exp(S) in float64"


@stabilised_sinkhorn.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *_rest: Any) -> Tensor:
    share_sizes(q, k, v, keep)
    return v.new_empty((*q.shape[:3], v.shape[3]))


@stabilised_sinkhorn_attention.register_fake
def _(q: Tensor, k: Tensor, keep: Tensor | None, *_rest: Any) -> Tensor:
    share_sizes(q, k, None, keep)
    return q.new_empty((*q.shape[:3], k.shape[2]))


differentiate(stabilised_sinkhorn, reference.stabilised_sinkhorn)
differentiate(stabilised_sinkhorn_attention, reference.stabilised_sinkhorn_attention)
