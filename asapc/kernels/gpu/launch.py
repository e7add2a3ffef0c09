"""What the host side of the feature kernels shares."""

from __future__ import annotations

import torch
from torch import Tensor


def padded(size: int) -> int:
    """The smallest power of two that is at least `size` and 16, the least a tl.dot takes."""
    return max(16, 1 << max(0, size - 1).bit_length())


def keep_arguments(keep: Tensor | None, stand_in: Tensor) -> tuple[Tensor, int, int]:
    """A mask [B, N] as bytes and its strides; any tensor where there is none, which is not read."""
    if keep is None:
        return stand_in, 0, 0
    return keep.view(torch.uint8), keep.stride(0), keep.stride(1)
