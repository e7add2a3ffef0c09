"""GPU twin of kernels.native: the finite loop, which keeps at most a few heads' matrices.

Small heads run in one launch. Of larger ones the matrix is kept, some heads at a time; the largest, and
short loops, stream the tiles once a half-step. A row c-transform at the end is fused with the product by
v, so T half-steps of a stream cost T passes when the loop ends on rows and T + 1 when it ends on columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.kernels.gpu import resident, stored
from asapc.kernels.gpu.half_step import attend, close_columns, close_rows
from asapc.kernels.gpu.launch import Launches
from asapc.kernels.gpu.tiles import LOG2_E, Scores, supported
from asapc.kernels.loop import Loop

__all__ = ["sinkhorn_loop", "streaming_loop", "supported"]


def sinkhorn_loop(scores: Scores, v: Tensor, dual: Tensor | None, loop: Loop) -> Tensor:
    """A v [B, H, N, E] in v's dtype.  Where `supported` is None.

    dual: where the loop starts, None for zero: the source dual [B, H, N] where columns are closed
    first, the target dual [B, H, M] where rows are.
    """
    run = streaming_loop
    if resident.fits(scores.q, scores.k, v, loop):
        run = resident.resident_loop
    elif stored.fits(scores.q, scores.k, loop):
        run = stored.stored_loop
    return run(scores, v, dual, loop)


def streaming_loop(scores: Scores, v: Tensor, dual: Tensor | None, loop: Loop) -> Tensor:
    """The same in O(N + M) memory beside the output, for any N and M."""
    dual = None if dual is None else (dual.float() * LOG2_E.value).contiguous()
    rows_turn = loop.first_side == "row"
    f, g = (None, dual) if rows_turn else (dual, None)
    launches = Launches()
    for _ in range(loop.half_steps - loop.ends_on_rows):
        if rows_turn:
            f = close_rows(scores, g, f, launches)
        else:
            g = close_columns(scores, f, g, launches)
        rows_turn = not rows_turn
    if not loop.ends_on_rows and f is None:
        f = torch.zeros(scores.q.shape[:3], dtype=torch.float32, device=v.device)
    closes = loop.ends_on_rows  # within the product with the values
    return attend(scores, v, f, g, loop.output_factor, closes)[0]
