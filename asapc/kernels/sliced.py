"""CPU twin of features/sliced.py: the same formula on cache-sized tiles, sorted by NumPy.

NumPy sorts float rows with vector instructions, 3 to 20 times faster than torch.sort where the
processor has them. Its order among ties differs, which the formula does not see.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from asapc.features.sliced import centre, cost_offset, uncentred_potentials, widen
from asapc.kernels.workers import TILE_BYTES, each_worker

_INDEX_BITS = (1 << 28) - 1


def predict_dual(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    theta: Tensor,
    coefficients: Tensor,
    score_multiplier: float,
) -> Tensor:
    """centre(X omega) - rho, [B, H, N]; arguments as features.sliced.predict_dual. No gradient."""
    batch, heads, queries, _ = q.shape
    q, k = widen(q.detach()), widen(k.detach())
    flat_q, flat_k = q.flatten(0, 1)[:, None], k.flatten(0, 1)[:, None]  # [B H, 1, N, D]
    flat_keep = None if keep is None else keep.repeat_interleave(heads, 0)  # [B H, M]
    weights = coefficients.detach().to(q.dtype).expand(heads, -1).repeat(batch, 1)[:, None, None]
    predicted = q.new_empty(batch * heads, 1, queries)
    row_bytes = theta.shape[0] * max(queries, k.shape[2]) * q.element_size()
    tile = max(1, TILE_BYTES // max(1, row_bytes))

    def work(starts: Iterator[int]) -> None:
        for start in starts:
            part = slice(start, start + tile)
            potentials = uncentred_potentials(
                flat_q[part],
                flat_k[part],
                None if flat_keep is None else flat_keep[part],
                theta.detach(),
                score_multiplier,
                _sort,
                _sort_values,
            )
            predicted[part] = (weights[part] @ potentials)[:, :, 0]

    each_worker(work, range(0, batch * heads, tile))
    return centre(predicted.view(batch, heads, queries)) - cost_offset(q, score_multiplier)


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
