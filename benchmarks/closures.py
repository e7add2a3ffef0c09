"""One c-transform from the keys' dual, softmax(S + g) v, by what torch has for it.

asapc's own pass (kernels/gpu/half_step.py) is one way; these are the others, timed beside it in
attention.py, so that the first run on hardware says which is best at which shape:

    bias     scaled_dot_product_attention with g as a mask [B, H, 1, M], spread over the queries
    folded   the same without a mask, which flash attention does not take: g is part of the keys
    flex     FlexAttention with a score bias, under torch.compile

q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; g: [B, H, M], float32 at least; the result is
[B, H, N, E] in v's dtype.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

MULTIPLE = 8  # of the width of a head that flash attention takes


def bias(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    mask = g[:, :, None, :].to(q.dtype).expand(-1, -1, q.shape[2], -1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def folded(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    """[q, 1, 1, 1] [k, g_high, g_middle, g_low]': three bfloat16 hold the 24 bits of a float32 between
    them, and products are added up in float32.  In float32 and float64 one column is enough.
    """
    parts = _parts((g - g.amax(-1, keepdim=True)) / scale, q.dtype)
    width, values = q.shape[-1] + len(parts), v.shape[-1]
    wide = -(-max(width, values) // MULTIPLE) * MULTIPLE
    queries = pad(pad(q, (0, len(parts)), value=1.0), (0, wide - width))
    keys = pad(torch.cat([k, *(part[..., None] for part in parts)], dim=-1), (0, wide - width))
    out = scaled_dot_product_attention(queries, keys, pad(v, (0, wide - values)), scale=scale)
    return out[..., :values]


def _parts(g: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of `dtype` whose sum is g."""
    parts, left = [], g
    for _ in range(3 if dtype in (torch.bfloat16, torch.float16) else 1):
        parts.append(left.to(dtype))
        left = left - parts[-1]
    return parts


def flex(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    def with_dual(score: Tensor, b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + g[b, h, column]

    return _flex_attention()(q, k, v, score_mod=with_dual, scale=scale)  # type: ignore[no-any-return]


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


WAYS = {"bias": bias, "folded": folded, "flex": flex}
