"""Sizes that an operator's tensors share, for programs that are traced through it.

An operator is opaque to torch.export: a mask that nothing else reads would keep a length of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def share_sizes(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, query_keep: Tensor | None = None
) -> None:
    """q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; keep: [B, M]; query_keep: [B, N].

    Raises RuntimeError where sizes differ; a batch of 1 stands for any.
    """
    pairs = [(own.shape[0], q.shape[0]) for own in (k, v, keep, query_keep) if own is not None]
    if v is not None:
        pairs.append((v.shape[2], k.shape[2]))
    if keep is not None:
        pairs.append((keep.shape[1], k.shape[2]))
    if query_keep is not None:
        pairs.append((query_keep.shape[1], q.shape[2]))
    for own, wanted in pairs:
        if not (isinstance(own, int) and own == 1):
            torch._check(own == wanted, lambda own=own, wanted=wanted: f"sizes {own} and {wanted} differ")
