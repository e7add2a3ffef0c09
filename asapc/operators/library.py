"""Registration of the operators as torch.ops.asapc.*: CPU kernels, fakes and gradients.

The plain functions in operators/ are the meaning. On the CPU the registered operators run
kernels/; on any other device they run the meaning itself. Gradients differentiate the meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asapc.features import sliced
from asapc.ir import Side
from asapc.kernels import cpu
from asapc.kernels import sliced as cpu_sliced
from asapc.operators import asap as asap_meaning
from asapc.operators import sinkhorn as sinkhorn_meaning


@torch.library.custom_op("asapc::sinkhorn", mutates_args=())
def sinkhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    output_factor: Sequence[float],
) -> Tensor:
    if q.device.type != "cpu":
        return sinkhorn_meaning.sinkhorn(
            q, k, v, keep, bias, score_multiplier, half_steps, rows_first, output_factor
        )
    side: Side = "row" if rows_first else "column"
    loop = cpu.Loop(score_multiplier, half_steps, side, output_factor)
    return cpu.sinkhorn_loop(q, k, v, keep, bias, None, loop)


@torch.library.custom_op("asapc::sinkhorn_attention", mutates_args=())
def sinkhorn_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    output_factor: Sequence[float],
) -> Tensor:
    if q.device.type != "cpu":
        return sinkhorn_meaning.sinkhorn_attention(
            q, k, keep, bias, score_multiplier, half_steps, rows_first, output_factor
        )
    side: Side = "row" if rows_first else "column"
    loop = cpu.Loop(score_multiplier, half_steps, side, output_factor)
    return cpu.sinkhorn_loop(q, k, None, keep, bias, None, loop)


@torch.library.custom_op("asapc::asap", mutates_args=())
def asap(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor,
    score_multiplier: float,
    closures: int,
    output_factor: Sequence[float],
) -> Tensor:
    if q.device.type != "cpu":
        return asap_meaning.asap(
            q, k, v, keep, bias, dual, score_multiplier, closures, output_factor
        )
    loop = cpu.Loop(score_multiplier, closures, "column", output_factor)
    return cpu.sinkhorn_loop(q, k, v, keep, bias, dual, loop)


@torch.library.custom_op("asapc::asap_attention", mutates_args=())
def asap_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor,
    score_multiplier: float,
    closures: int,
    output_factor: Sequence[float],
) -> Tensor:
    if q.device.type != "cpu":
        return asap_meaning.asap_attention(
            q, k, keep, bias, dual, score_multiplier, closures, output_factor
        )
    loop = cpu.Loop(score_multiplier, closures, "column", output_factor)
    return cpu.sinkhorn_loop(q, k, None, keep, bias, dual, loop)


@torch.library.custom_op("asapc::sliced_dual", mutates_args=())
def sliced_dual(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    theta: Tensor,
    coefficients: Tensor,
    score_multiplier: float,
) -> Tensor:
    twin = cpu_sliced if q.device.type == "cpu" else sliced
    return twin.predict_dual(q, k, keep, theta, coefficients, score_multiplier)


@sinkhorn.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Tensor:
    return v.new_empty((*q.shape[:3], v.shape[3]))


@asap.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Tensor:
    return v.new_empty((*q.shape[:3], v.shape[3]))


@sinkhorn_attention.register_fake
def _(q: Tensor, k: Tensor, *_rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], k.shape[2]))


@asap_attention.register_fake
def _(q: Tensor, k: Tensor, *_rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], k.shape[2]))


@sliced_dual.register_fake
def _(q: Tensor, k: Tensor, *_rest: Any) -> Tensor:
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape[:3], dtype=dtype)


def _differentiate(operator: Any, meaning: Callable[..., Tensor]) -> None:
    """Register the gradient of `meaning`, recomputed in backward: only inputs are saved."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.layout = [None if isinstance(x, Tensor) else (x,) for x in inputs]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if constant is None else constant[0] for constant in ctx.layout]
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_(needed) if isinstance(x, Tensor) else x
                for x, needed in zip(inputs, ctx.needs_input_grad, strict=True)
            ]
            output = meaning(*leaves)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
        grads = torch.autograd.grad(
            output, [leaves[i] for i in wanted], grad, allow_unused=True
        )
        result: list[Tensor | None] = [None] * len(inputs)
        for index, value in zip(wanted, grads, strict=True):
            result[index] = value
        return tuple(result)

    operator.register_autograd(backward, setup_context=setup_context)


_differentiate(sinkhorn, sinkhorn_meaning.sinkhorn)
_differentiate(sinkhorn_attention, sinkhorn_meaning.sinkhorn_attention)
_differentiate(asap, asap_meaning.asap)
_differentiate(asap_attention, asap_meaning.asap_attention)
_differentiate(sliced_dual, sliced.predict_dual)
