"""The Sinkformers' loop for training: the same map from the linear domain, with its exact adjoint.

    set_loop(model, trainable_sinkhorn_attention)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from asapc.models.sinkhorn import PADDED_SCORE, sinkhorn_attention
from asapc.models.text import MultiHeadAttention
from asapc.models.vit import SinkhornAttention


def set_loop(model: nn.Module, loop: Callable[[Tensor, int, float], Tensor]) -> None:
    """Have every attention of a Sinkformer run this loop."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention | SinkhornAttention):
            module.loop = loop


def trainable_sinkhorn_attention(scores: Tensor, max_iter: int, epsilon: float) -> Tensor:
    """The same map from the linear domain, with the exact adjoint of the finite loop, for training.

    Some ten times faster than backpropagation through `sinkhorn_attention`; first derivatives only.
    Arguments and result as there.  When a row's active scores span more than LINEAR_RANGE epsilon,
    beyond which float32 scalings would not hold the loop, the batch goes through that function.
    """
    flat = scores.detach().flatten(0, -3)
    padded = flat[:, :1] < 0.5 * PADDED_SCORE  # [G, 1, M]
    top = flat.amax(-1, keepdim=True)
    span = (top - torch.where(padded, top, flat).amin(-1, keepdim=True)) / epsilon
    if not bool((span <= LINEAR_RANGE).all()):
        return sinkhorn_attention(scores, max_iter, epsilon)
    result: Tensor = _LinearLoop.apply(scores, padded, top, max_iter, epsilon)
    return result


LINEAR_RANGE = 80.0
MAPS_AT_ONCE = 1 << 18  # entries of K in cache at a time


class _LinearLoop(torch.autograd.Function):
    """A = diag(a) K diag(b), K = exp(S / epsilon - row maximum), T alternating rescalings."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, padded: Tensor, top: Tensor, max_iter: int, epsilon: float
    ) -> Tensor:
        shape = scores.shape
        kernel = ((scores.flatten(0, -3) - top) / epsilon).exp_()  # [G, N, M]
        group = max(1, MAPS_AT_ONCE // max(1, kernel.shape[1] * kernel.shape[2]))
        # Columns are closed to N/n, the rows' total shared out, so that the scalings do not drift.
        share = kernel.shape[1] / (~padded).sum(-1, keepdim=True).clamp(min=1).to(kernel.dtype)
        a = [kernel.new_ones(len(kernel), 1, kernel.shape[1])]  # every value the scalings take
        b = [kernel.new_ones(len(kernel), 1, kernel.shape[2])]
        for half_step in range(max_iter):
            if half_step % 2 == 0:
                a.append(_products(kernel, b[-1], True, group).reciprocal_())
            else:
                total = _products(kernel, a[-1], False, group)
                b.append(total.masked_fill_(padded, 1.0).reciprocal_().mul_(share))
        attention = kernel * a[-1].transpose(1, 2) * b[-1]
        if max_iter % 2 == 0:
            attention /= share
        ctx.save_for_backward(kernel, padded, share, attention, *a, *b)
        ctx.counts, ctx.max_iter, ctx.epsilon, ctx.group = len(a), max_iter, epsilon, group
        return attention.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel, padded, share, attention, *scalings = ctx.saved_tensors
        a, b = list(scalings[: ctx.counts]), list(scalings[ctx.counts :])
        flow = grad.reshape(attention.shape) * attention  # A dA, which is also S's direct gradient
        grad_a = flow.sum(-1).unsqueeze(1) / a[-1]  # [G, 1, N]
        grad_b = flow.sum(-2, keepdim=True) / b[-1]  # [G, 1, M]
        left: list[Tensor] = []  # the gradient of K is sum_t left_t (x) right_t
        right: list[Tensor] = []
        for half_step in reversed(range(ctx.max_iter)):
            if half_step % 2 == 0:  # a = 1 / (K b)
                grad_total = -grad_a * a.pop().square()
                left.append(grad_total)
                right.append(b[-1])
                grad_b = grad_b + _products(kernel, grad_total, False, ctx.group)
                grad_a = torch.zeros_like(grad_a)
            else:  # b = share / (K' a)
                grad_total = (-grad_b * b.pop().square() / share).masked_fill_(padded, 0.0)
                left.append(a[-1])
                right.append(grad_total)
                grad_a = grad_a + _products(kernel, grad_total, True, ctx.group)
                grad_b = torch.zeros_like(grad_b)
        outer = torch.bmm(torch.cat(left, 1).transpose(1, 2), torch.cat(right, 1))
        return flow.addcmul_(outer, kernel).div_(ctx.epsilon).view(grad.shape), None, None, None, None


def _products(kernel: Tensor, vector: Tensor, rows: bool, group: int) -> Tensor:
    """K b [G, 1, N] where `rows`, K' a [G, 1, M] otherwise, by groups that stay in cache."""
    matrices = kernel.transpose(1, 2) if rows else kernel
    if kernel.shape[0] == 0:
        return torch.bmm(vector, matrices)
    pairs = zip(vector.split(group), matrices.split(group), strict=True)
    return torch.cat([torch.bmm(x, matrix) for x, matrix in pairs])
