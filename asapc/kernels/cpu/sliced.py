"""CPU twin of features/sliced.py: the same formula on cache-sized tiles, sorted by NumPy.

NumPy sorts float rows with vector instructions, 3 to 20 times faster than torch.sort where the
processor has them. Its order among ties differs, which the formula does not see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from asapc.features.clouds import Budget, Clouds
from asapc.features.sliced import potentials
from asapc.kernels.cpu.workers import TILE_BYTES, each_worker

_INDEX_BITS = (1 << 28) - 1


def contribution(clouds: Clouds, theta: Tensor, weights: Tensor, budget: Budget) -> Tensor:
    """sliced.columns @ weights, not centred: [B, H, N].  No gradient.

    theta: [L, D]; weights: [1, L] for all heads or [H, L].  A head is computed alone, so that the
    result does not depend on which heads share a tile or which thread takes it.
    """
    batch, heads, num_x, _ = clouds.x.shape
    rows = batch * heads
    flat = _heads_as_examples(clouds)
    theta = theta.detach().to(clouds.x)
    weights = weights.detach().to(clouds.x).expand(heads, -1).repeat(batch, 1)[:, None, None]
    out = clouds.x.new_empty(rows, num_x)
    head_bytes = theta.shape[0] * max(num_x, clouds.y.shape[2]) * out.element_size()
    size = _tile_size(rows, head_bytes)

    def work(starts: Iterator[int]) -> None:
        for start in starts:
            part = slice(start, start + size)
            values = potentials(_part(flat, part), theta, _sort, _sort_values)  # [G, 1, L, N]
            out[part] = (weights[part] @ values)[:, 0, 0]

    each_worker(work, range(0, rows, size))
    return out.view(batch, heads, num_x)


def _heads_as_examples(clouds: Clouds) -> Clouds:
    """[B H, 1, N, D] in place of [B, H, N, D]; only what the slices read."""
    heads = clouds.x.shape[1]

    def each_head(keep: Tensor | None) -> Tensor | None:
        return None if keep is None else keep.repeat_interleave(heads, 0)

    return Clouds(
        clouds.x.detach().flatten(0, 1)[:, None],
        clouds.y.detach().flatten(0, 1)[:, None],
        each_head(clouds.x_keep),
        each_head(clouds.y_keep),
    )


def _part(clouds: Clouds, part: slice) -> Clouds:
    return Clouds(
        clouds.x[part],
        clouds.y[part],
        None if clouds.x_keep is None else clouds.x_keep[part],
        None if clouds.y_keep is None else clouds.y_keep[part],
    )


def _tile_size(rows: int, head_bytes: int) -> int:
    """Heads per tile: all of them if they fit one, which needs no worker; else equal shares."""
    most = max(1, TILE_BYTES // max(1, head_bytes))
    if rows <= most:
        return max(1, rows)
    threads = torch.get_num_threads()
    rounds = math.ceil(rows / (most * threads))
    return math.ceil(rows / (rounds * threads))


def _sort(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted values and their order, from one sort of values: an argsort costs three times as much.

    A float32 leaves the low 29 bits of a float64 zero. The index is put there: below half a float32
    ulp it cannot change the order of different values, and rounding to float32 removes it again.
    """
    if values.dtype != torch.float32:
        order = torch.from_numpy(values.detach().numpy().argsort(-1))
        return values.gather(-1, order), order
    keys = values.detach().double()
    bits = keys.view(torch.int64)
    bits |= torch.arange(values.shape[-1])
    keys.numpy().sort(-1)
    return keys.float(), bits & _INDEX_BITS


def _sort_values(values: Tensor) -> Tensor:
    """Sorts in place: the projections are not needed again."""
    values.detach().numpy().sort(-1)
    return values
