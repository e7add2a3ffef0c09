"""What the host side of kernels shares."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

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


class Launches:
    """Of kernels that a loop launches again and again, each time with other tensors of the same kinds.

    Triton looks at every argument of a launch, which takes some 50 us of Python. Here only the first
    launch of a key does; the others go to what was compiled for it. Launches of one key differ in nothing
    but tensors, alike in dtype and alignment, and numbers that are not specialised.
    """

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        key: Hashable,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        **options: int,
    ) -> None:
        """constants: in the order of the kernel's.  options: num_warps and the like."""
        compiled = self._compiled.get(key)
        if compiled is None:  # also what the interpreter, which compiles nothing, has left
            self._compiled[key] = kernel[grid](*arguments, **constants, **options)
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants.values())
