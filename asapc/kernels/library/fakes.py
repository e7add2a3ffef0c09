"""Fakes: what the operators give, in size and dtype, for programs that are traced through them.

An operator is opaque to torch.export: a mask that nothing else reads would keep a length of its own, so
the sizes that its tensors share are noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def share_sizes(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, query_keep: Tensor | None = None
) -> None:
    """q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; keep: [B, M]; query_keep: [B, N].

    Raises RuntimeError where sizes differ; a batch of 1 stands for any.
    """
    pairs = [(tensor.shape[0], q.shape[0]) for tensor in (k, v, keep, query_keep) if tensor is not None]
    tokens = ((v, 2, k.shape[2]), (keep, 1, k.shape[2]), (query_keep, 1, q.shape[2]))
    pairs += [(tensor.shape[axis], size) for tensor, axis, size in tokens if tensor is not None]
    for size, wanted in pairs:
        if not (isinstance(size, int) and size == 1):
            torch._check(
                size == wanted, lambda size=size, wanted=wanted: f"sizes {size} and {wanted} differ"
            )


def attention(arguments: Mapping[str, Any]) -> Tensor:
    """A v [B, H, N, E] like v, or A [B, H, N, M] like q where there are no values."""
    q, k, v = arguments["q"], arguments["k"], arguments.get("v")
    share_sizes(q, k, v, arguments["keep"], arguments.get("query_keep"))
    like, width = (q, k.shape[2]) if v is None else (v, v.shape[3])
    result: Tensor = like.new_empty((*q.shape[:3], width))
    return result


def plan(arguments: Mapping[str, Any]) -> Tensor:
    """[B, H, N, M] like the scores."""
    return torch.empty_like(arguments["scores"], memory_format=torch.contiguous_format)


def dual(arguments: Mapping[str, Any]) -> Tensor:
    """[B, H, N] of the source, [B, H, M] of the target."""
    share_sizes(arguments["q"], arguments["k"], None, arguments["keep"])
    return _per_token(arguments["q"], arguments["k" if arguments["side"] == "target" else "q"])


def dual_and_row_mass(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    share_sizes(arguments["q"], arguments["k"], None, arguments["keep"])
    return _per_token(arguments["q"], arguments["k"]), _per_token(arguments["q"], arguments["q"])


def _per_token(q: Tensor, points: Tensor) -> Tensor:
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    return q.new_empty(points.shape[:3], dtype=dtype)


def kept_keys(arguments: Mapping[str, Any]) -> Tensor:
    mask: Tensor = arguments["mask"]
    return mask.new_empty(mask.shape, dtype=torch.bool)


def keys_of_empty(arguments: Mapping[str, Any]) -> Tensor:
    keep: Tensor = arguments["keep"]
    return torch.empty_like(keep, memory_format=torch.contiguous_format)


def rows_kept(arguments: Mapping[str, Any]) -> Tensor:
    bias: Tensor = arguments["bias"]
    return bias.new_empty((*bias.shape[:-1], 1), dtype=torch.bool)


def gradients(
    arguments: Mapping[str, Any], names: Sequence[str], found: Mapping[str, Tensor | None] | None = None
) -> list[Tensor]:
    """One of the size of each of these arguments, empty where it is not given.  found: gradients that
    they are, 0 where there is none."""
    q: Tensor = arguments["q"]
    given = {name: arguments.get(name) for name in names}
    if found is None:
        return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in given.values()]
    pairs = ((x, found.get(name)) for name, x in given.items())
    return [q.new_empty(0) if x is None else torch.zeros_like(x) if grad is None else grad
            for x, grad in pairs]  # fmt: skip
