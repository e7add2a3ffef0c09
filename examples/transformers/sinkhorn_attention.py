"""A Sinkhorn attention for any model of transformers that takes an attention function.

    scores = q k^T / sqrt(d) + mask;  ITERATIONS of rows and columns in the log domain, rows last

The mask is transformers' additive one, 0 or the least float. The keys that it hides get no mass: their
columns stay as they are. Keys and values of grouped heads are repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ITERATIONS = 4
HIDDEN = -1e6  # a column of scores that a mask hides is less


def sinkhorn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """As transformers.AttentionInterface has it: query [B, H, N, D], key and value [B, G, M, D]."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores + attention_mask
    for _iteration in range(ITERATIONS):
        scores = scores - scores.logsumexp(-1, keepdim=True)  # [B, H, N, M]
        columns = scores.logsumexp(-2, keepdim=True)
        scores = scores - torch.where(columns < HIDDEN, 0.0, columns)
    attention = torch.softmax(scores, dim=-1)
    attention = nn.functional.dropout(attention, dropout, module.training)
    return (attention @ value).transpose(1, 2).contiguous(), attention
