"""What the page's pictures need: a few attention maps, teacher against compiled, small enough to keep."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

EXAMPLES = 3
CELLS = 64  # a side of a map, at most: finer is not seen on a page


@dataclass(frozen=True)
class MapPair:
    """One head's attention in one example, in attention units: rows sum to about 1.

    Only active queries and keys are kept.  teacher, compiled: [n, m] in lists, as processes exchange
    them, n and m at most CELLS, see `pooled`.  error: |A^ - A|_F / |A|_F before pooling.
    """

    example: int  # place among the examples that were measured
    head: int
    active: int  # keys
    teacher: list[list[float]]
    compiled: list[list[float]]
    error: float = 0.0


@dataclass
class SitePictures:
    """The head with the largest error in each of the first EXAMPLES examples of a site that have an
    active key."""

    name: str
    pairs: list[MapPair] = field(default_factory=list)
    passed: int = 0  # examples so far

    def update(
        self,
        teacher_map: Tensor,
        compiled_map: Tensor,
        keep: Tensor | None = None,
        query_keep: Tensor | None = None,
    ) -> None:
        """Add maps [B, H, N, M] in attention units; keep: [B, M], query_keep: [B, N], True if active.

        The masks mean what they mean for `asapc.measure.fidelity.AttentionFidelity`.
        """
        for index in range(len(teacher_map)):
            if len(self.pairs) < EXAMPLES:
                masks = (None if mask is None else mask[index] for mask in (keep, query_keep))
                pair = _pair(self.passed + index, teacher_map[index], compiled_map[index], *masks)
                self.pairs += [] if pair is None else [pair]
        self.passed += len(teacher_map)


def pooled(attention: Tensor) -> Tensor:
    """[N, M] to at most [CELLS, CELLS]: the mean over pooled queries, the sum over pooled keys."""
    queries, keys = attention.shape
    size = min(queries, CELLS), min(keys, CELLS)
    return adaptive_avg_pool2d(attention[None], size)[0] * (keys / size[1])


def _pair(
    example: int, teacher: Tensor, compiled: Tensor, keep: Tensor | None, query_keep: Tensor | None
) -> MapPair | None:
    """[H, N, M] maps of one example; None without an active query or key."""
    exact, approx = teacher.detach().double(), compiled.detach().double()
    if keep is not None:
        exact, approx = exact[:, :, keep], approx[:, :, keep]
    if query_keep is not None:
        exact, approx = exact[:, query_keep], approx[:, query_keep]
    if exact.numel() == 0:
        return None
    difference = torch.linalg.vector_norm(approx - exact, dim=(-2, -1))
    norm = torch.linalg.vector_norm(exact, dim=(-2, -1)).clamp(min=1e-300)
    error = torch.nan_to_num(difference / norm, nan=torch.inf)  # a broken head is the one to show
    head = int(error.argmax())
    first, second = (pooled(x[head]).cpu().tolist() for x in (exact, approx))
    return MapPair(example, head, exact.shape[-1], first, second, float(error[head]))
