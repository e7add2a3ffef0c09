"""CPU path for one head whose K would not fit: blocks of its rows are formed again on every visit.

A row half-step and the column half-step after it share one visit, and the last row half-step shares
the product with v, so T half-steps form K about T / 2 + 1 times. Extra memory is O(N + M) and a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.kernels.cpu.workers import SAFE_ROW_RANGE


def stream_head(
    scaled_q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dual: Tensor | None,
    key_bias: Tensor | None,
    half_steps: int,
    rows_first: bool,
    mass: float,
    bounded: bool,
    block: int,
) -> Tensor:
    """mass * diag(a) K diag(b) v [N, E] after `half_steps` half-steps.

    scaled_q: [N, D]; k: [M, D]; v: [M, E]; bias: [N, M]; dual: [N]; key_bias: [M]; mass: that of each
    row or column of the last side; bounded: exp(S) is known to be safe; block: rows of K at a time.
    """
    key_bias = torch.zeros_like(k[:, 0]) if key_bias is None else key_bias
    arguments = (scaled_q, k, v, bias, dual, key_bias, half_steps, rows_first, mass, block)
    top = torch.zeros_like(scaled_q[:, 0])
    if not bounded:
        top, row_range = _row_tops(scaled_q, k, bias, key_bias, block)
        if not row_range <= SAFE_ROW_RANGE[k.dtype]:
            return _log_domain(*arguments)
    return _linear(*arguments, top)


def _row_tops(
    scaled_q: Tensor, k: Tensor, bias: Tensor | None, key_bias: Tensor, block: int
) -> tuple[Tensor, float]:
    """max_j S_ij [N], and the widest range of a row."""
    top = torch.empty_like(scaled_q[:, 0])
    widest = torch.zeros_like(top[:1])
    scores = k.new_empty((block, k.size(0)))
    transposed = k.t()
    for start in range(0, scaled_q.size(0), block):
        q_part = scaled_q[start : start + block]
        part = scores[: q_part.size(0)]
        torch.addmm(key_bias, q_part, transposed, out=part)
        if bias is not None:
            part += bias[start : start + block]
        highest = part.amax(1)
        top[start : start + block] = highest
        widest = torch.maximum(widest, (highest - part.amin(1)).max())
    return top, float(widest.item())


def _linear(
    scaled_q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dual: Tensor | None,
    key_bias: Tensor,
    half_steps: int,
    rows_first: bool,
    mass: float,
    block: int,
    top: Tensor,
) -> Tensor:
    """a = 1 / K b and b = N / (M K'a) with K = exp(S - top), `block` rows of it at a time.

    The totals of rows and columns are equal, as in kernels.cpu.sinkhorn.
    """
    share = float(scaled_q.size(0)) / float(k.size(0))
    # One more channel subtracts the top within the product.
    shifted_q = torch.cat([scaled_q, -top.unsqueeze(1)], 1)
    transposed = torch.cat([k, torch.ones_like(k[:, :1])], 1).t()
    log_a = top if dual is None else top + dual
    a = (log_a - log_a.max()).exp_()
    b = torch.ones_like(key_bias)
    total = torch.empty_like(b)
    kernel = k.new_empty((block, k.size(0)))
    out = v.new_empty((scaled_q.size(0), v.size(1)))
    # Views are made once: each takes the interpreter as long as an operator on the views does.
    rows = [
        (q_part, part, part.t(), a_part, out_part)
        for q_part, a_part, out_part in zip(
            shifted_q.split(block), a.split(block), out.split(block), strict=True
        )
        for part in [kernel[: len(q_part)]]
    ]
    biases = [None] * len(rows) if bias is None else bias.split(block)

    rows_turn = rows_first
    left = half_steps
    scale = mass
    applied = False
    while not applied:
        closes_rows = rows_turn and left > 0
        closes_columns = left > (1 if closes_rows else 0)
        total.zero_()
        weighted = v if closes_columns else b.unsqueeze(1) * v
        for (q_part, part, part_t, a_part, out_part), bias_part in zip(rows, biases, strict=True):
            torch.addmm(key_bias, q_part, transposed, out=part)
            if bias_part is not None:
                part += bias_part
            part.exp_()
            if closes_rows:
                torch.mv(part, b, out=a_part)
                a_part.reciprocal_()
            if closes_columns:
                total.addmv_(part_t, a_part)
            else:
                torch.mm(part, weighted, out=out_part)
        if closes_columns:
            torch.reciprocal(total, out=b)
            b.mul_(share)
            left -= 2 if closes_rows else 1
            rows_turn = True
        else:
            scale = mass if closes_rows else mass / share
            applied = True
    return out.mul_((a * scale).unsqueeze(1))


def _log_domain(
    scaled_q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dual: Tensor | None,
    key_bias: Tensor,
    half_steps: int,
    rows_first: bool,
    mass: float,
    block: int,
) -> Tensor:
    """The same with f = log a and g = log b, for score ranges that the linear domain cannot hold."""
    transposed = k.t()
    f = torch.zeros_like(scaled_q[:, 0]) if dual is None else dual.clone()
    g = torch.zeros_like(key_bias)
    scores = k.new_empty((block, k.size(0)))
    rows_turn = rows_first
    for _ in range(half_steps):
        added = key_bias + g if rows_turn else key_bias
        top = torch.full_like(g, -float("inf"))
        total = torch.zeros_like(g)
        for start in range(0, scaled_q.size(0), block):
            q_part = scaled_q[start : start + block]
            part = scores[: q_part.size(0)]
            torch.addmm(added, q_part, transposed, out=part)
            if bias is not None:
                part += bias[start : start + block]
            if rows_turn:
                f[start : start + block] = -torch.logsumexp(part, 1)
            else:
                part += f[start : start + block].unsqueeze(1)
                new_top = torch.maximum(top, part.amax(0))
                total = total * (top - new_top).exp() + (part - new_top).exp_().sum(0)
                top = new_top
        if not rows_turn:
            g = -(top + total.log())
        rows_turn = not rows_turn
    out = v.new_empty((scaled_q.size(0), v.size(1)))
    for start in range(0, scaled_q.size(0), block):
        q_part = scaled_q[start : start + block]
        part = scores[: q_part.size(0)]
        torch.addmm(key_bias + g, q_part, transposed, out=part)
        if bias is not None:
            part += bias[start : start + block]
        part += f[start : start + block].unsqueeze(1)
        torch.mm(part.exp_(), v, out=out[start : start + block])
    return out.mul_(mass)
