"""What LOTFormer puts around its transport: summary tokens and a depthwise convolution on values.

A [CLS] token (with a distillation token, the first two) gathers from the whole sequence by softmax,
while the other tokens stay doubly stochastic among themselves (LOTFormer, 4.3). Plain PyTorch, made of
operators that export: a rewritten graph may hold them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from asapc.operators.sinkhorn import clean_values, widen

Powers = Sequence[float | Tensor]


def summary_rows(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, query_keep: Tensor | None, multiplier: float,
    powers: Powers | None = None,
) -> Tensor:  # fmt: skip
    """A v, with the attention A of c summary tokens over every key: [B, H, c, E] in v's dtype.

        A_j = softmax_j(multiplier q.k_j)                                            without powers
        softmax_j((m q+.k+ + m q-.k-)^p_same + (m q+.k- + m q-.k+)^p_opposite)       polarised

    with x+ = relu(x), x- = relu(-x), m = multiplier and powers = (p_same, p_opposite), numbers or tensors
    that broadcast to [B, H, c, M].  q: [B, H, c, D]; k: [B, H, M, D]; v: [B, H, M, E]; keep: [B, M];
    query_keep: [B, c].  Rows are 0 at padded queries and where no key is active.  Source: LOTFormer, 4.3.
    """
    points, keys = widen(clean_values(q, query_keep)), widen(clean_values(k, keep)).transpose(-1, -2)
    points = points * multiplier
    logits = points @ keys if powers is None else _polarised(points, keys, *powers)
    if keep is not None:
        some = keep.any(-1, keepdim=True)
        logits = logits.masked_fill(~(keep | ~some)[:, None, None, :], -torch.inf)
        attention = torch.softmax(logits, -1).masked_fill(~some[:, :, None, None], 0.0)
    else:
        attention = torch.softmax(logits, -1)
    attention = clean_values(attention, query_keep).to(widen(q).dtype)
    return (attention @ clean_values(v, keep).to(attention.dtype)).to(v.dtype)


def _polarised(
    points: Tensor, keys: Tensor, same_power: float | Tensor, opposite_power: float | Tensor
) -> Tensor:
    """points: [..., c, D]; keys: [..., D, M].  Bases are sums of products of non-negative numbers."""
    signs = torch.cat([points.relu(), (-points).relu()], -1)
    same = torch.cat([keys.relu(), (-keys).relu()], -2)
    opposite = torch.cat([(-keys).relu(), keys.relu()], -2)
    return torch.pow(signs @ same, same_power) + torch.pow(signs @ opposite, opposite_power)


def depthwise_values(v: Tensor, weight: Tensor, keep: Tensor | None) -> Tensor:
    """DWConv(v), every channel by itself, zeros beyond the ends: [B, H, M, E].

    weight: [H, E, w], w odd, for offsets -(w - 1)/2 to (w - 1)/2.  keep: [B, M]; padded tokens count as 0
    and come out as 0.  Source: LOTFormer, 4.2.
    """
    channels = clean_values(v, keep).transpose(-1, -2).flatten(1, 2)  # [B, H E, M]
    kernel = weight.flatten(0, 1)[:, None]
    out = functional.conv1d(channels, kernel, padding="same", groups=channels.shape[1])
    return clean_values(out.unflatten(1, weight.shape[:2]).transpose(-1, -2), keep)
