"""Gradients of the finite loop on a CPU: by the engine, which follows it back in O(T (N + M)) memory.

Where there is no engine, and of heads that the linear domain does not hold, the reference has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.kernels import native
from asapc.kernels.loop import Gradients, Loop, Tail
from asapc.operators.asap import asap
from asapc.operators.sinkhorn import sinkhorn

ENTRIES = 1 << 18  # of the scores of the heads that the reference takes together


def sinkhorn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None,
    dual: Tensor | None, loop: Loop, tail: Tail,
) -> Gradients:  # fmt: skip
    """Gradients for `sinkhorn_loop`, whose arguments these are besides grad_out [B, H, N, E] and tail.

    At least one half-step; every example has an active key.
    """
    given = [x for x in (q, k, v, dual) if x is not None]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    outs = [torch.zeros(x.shape, dtype=work) for x in given]
    entries = q.shape[2] * k.shape[2]
    depth = torch.full(q.shape[:2], -1 if entries else 0)
    if native.missing() is None and depth.numel() * entries:
        native.sinkhorn_gradients(grad_out, q, k, v, keep, bias, dual, loop, tail, outs, depth)
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    lost, count = (depth < 0).nonzero(), max(1, ENTRIES // max(1, entries))
    for some in lost.split(count) if len(lost) else ():
        heads = tuple(some.t())
        leaves = [x[heads][:, None].double().requires_grad_() for x in given]
        hidden = None if keep is None else keep[heads[0]]
        added = None if bias is None else bias[heads][:, None].double()
        found = _by_autograd(grad_out[heads][:, None].double(), leaves, hidden, added, loop, tail)
        for out, gradient in zip(outs, found, strict=True):
            out[heads] = gradient[:, 0].to(work)
        depth[heads] = min(tail.most, loop.half_steps)
    dq, dk, dv, *rest = (out.to(x.dtype) for out, x in zip(outs, given, strict=True))
    return Gradients(dq, dk, dv, rest[0] if rest else None, depth)


@torch.inference_mode(False)  # which an operator's kernel may not record gradients without
@torch.enable_grad()
def _by_autograd(
    grad_out: Tensor, leaves: list[Tensor], keep: Tensor | None, bias: Tensor | None, loop: Loop,
    tail: Tail,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of q, k, v and the dual, where there is one, in the log domain."""
    seen, rows_first = (*leaves[:3], keep, bias), loop.first_side == "row"
    steps = (loop.score_multiplier, loop.half_steps)
    if len(leaves) == 3:
        out = sinkhorn(*seen, *steps, rows_first, loop.output_factor, tail.most)
    else:  # whose gradient passes through all half-steps
        duals = (None, leaves[3]) if rows_first else (leaves[3], None)
        out = asap(*seen, *duals, *steps, loop.output_factor)
    return torch.autograd.grad(out, leaves, grad_out, allow_unused=True, materialize_grads=True)
