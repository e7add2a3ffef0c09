"""Twin of operators/asap.py for one c-transform from the target dual: softmax attention with a key bias.

    out_i = factor / N * sum_j softmax_j(S_ij + g_j) v_j

runs through torch's own attention with a broadcast mask [B, H, 1, M]; N x M is never stored (a score
bias, which is that large itself, excepted).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from asapc.operators.sinkhorn import clean_values, factor_value, widen


def key_c_transform(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, target_dual: Tensor | None,
    score_multiplier: float, output_factor: Sequence[float],
) -> Tensor:  # fmt: skip
    """Arguments and result as operators.asap.asap with c_transforms = 1; half precision runs in float32.

    target_dual: None for zero, of which it is softmax attention alone.
    keep: with an active key in every example (operators.sinkhorn.open_empty).
    """
    wide_q, wide_k, wide_v = widen(q), widen(k), widen(v)
    dtype = torch.promote_types(wide_q.dtype, wide_v.dtype)
    mask = None if target_dual is None else target_dual.to(dtype)[:, :, None, :]
    if keep is not None:
        nothing = wide_q.new_zeros((), dtype=dtype) if mask is None else mask
        mask = nothing.masked_fill(~keep[:, None, None, :], -math.inf)
    of_queries = bias is not None and bias.shape[-1] == 1  # alike for every key, softmax is blind to it
    if bias is not None and not of_queries:
        mask = bias.to(dtype) if mask is None else mask + bias.to(dtype)
    # 0 * inf of a masked key is nan
    keys, values = (clean_values(x.to(dtype), keep) for x in (wide_k, wide_v))
    out = torch.nn.functional.scaled_dot_product_attention(
        wide_q.to(dtype), keys, values, attn_mask=mask, scale=score_multiplier
    )
    if bias is not None and of_queries:
        out = out.masked_fill(bias.isneginf(), 0.0)
    factor = factor_value(output_factor, q.shape[2], k.shape[2], keep)
    out = out * (factor.to(dtype) if isinstance(factor, Tensor) else factor) / q.shape[2]
    return out.to(v.dtype)
