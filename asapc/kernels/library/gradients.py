"""Gradients of the operators: of the plain meaning, except where the GPU kernels have their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asapc.ir import Side
from asapc.kernels import dispatch
from asapc.kernels.library.registration import operator, without_autocast
from asapc.kernels.loop import Loop
from asapc.operators import asap as asap_meaning
from asapc.operators import sinkhorn as sinkhorn_meaning


@operator
def loop_gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    start: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    output_factor: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of A v with respect to q, k, v and start (empty without one), by the GPU kernels."""
    from asapc.kernels.gpu.backward import sinkhorn_backward

    side: Side = "row" if rows_first else "column"
    loop = Loop(score_multiplier, half_steps, side, output_factor)
    opened = None if start is None else asap_meaning.open_dual(start, keep)
    open_q, open_keep, open_bias = sinkhorn_meaning.open_empty(q, keep, bias)
    values = sinkhorn_meaning.clean_values(v, open_keep)
    with torch.cuda.device_of(q):
        dq, dk, dv, dual_grad = sinkhorn_backward(
            grad_out, open_q, k, values, open_keep, open_bias, opened, loop
        )
    if keep is not None:
        dq = dq.masked_fill(~keep.any(-1)[:, None, None, None], 0.0)
    if dual_grad is None:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, asap_meaning.open_dual(dual_grad, keep)


@loop_gradients.register_fake
def _(
    _grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _keep: Tensor | None,
    _bias: Tensor | None,
    start: Tensor | None,
    *_rest: Any,
) -> tuple[Tensor, ...]:
    own = q.new_empty(0) if start is None else torch.empty_like(start)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), own


# The inputs of an operator as a loop: the position of the dual it starts from, None for zero, and
# the half-steps, whether rows come first and the output factor.


LoopOf = Callable[[Sequence[Any]], tuple[int | None, int, bool, Sequence[float]]]


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _by_kernels(
    operator: str, inputs: Sequence[Any], needed: Sequence[bool], grad: Tensor, loop_of: LoopOf
) -> tuple[Any, ...] | None:
    """Gradients of q, k, v and the dual; None where the kernels do not have them."""
    start, half_steps, rows_first, factor = loop_of(inputs)
    q, k, v, keep, bias = inputs[:5]
    if half_steps == 0 or needed[4] or _on_cpu(q):
        return None
    multiplier = inputs[5] if start is None else inputs[7]
    if dispatch.attention_backend(operator, q, k, v, keep, bias, multiplier) != "gpu":
        return None
    dual = None if start is None else inputs[start]
    *own, dual_grad = loop_gradients(
        grad, q, k, v, keep, bias, dual, multiplier, half_steps, rows_first, factor
    )
    result: list[Any] = [*own, *[None] * (len(inputs) - 3)]
    if start is not None:
        result[start] = dual_grad
    return tuple(x if need else None for x, need in zip(result, needed, strict=True))


def differentiate(
    operator: Any,
    meaning: Callable[..., Tensor | tuple[Tensor, ...]],
    loop_of: LoopOf | None = None,
) -> None:
    """Register the gradient, recomputed in backward: only inputs are saved.

    loop_of: of an operator whose gradient the GPU kernels may have.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # A list of tensors (fitted parameters) is a constant: nothing in it is differentiated.
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.layout = [None if isinstance(x, Tensor) else (x,) for x in inputs]

    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: under checkpointing they are recomputed for one reader
        with without_autocast(tensors):
            return gradients(ctx, tensors, output_grads)

    def gradients(ctx: Any, tensors: Sequence[Tensor], output_grads: Sequence[Tensor]) -> tuple[Any, ...]:
        saved = iter(tensors)
        inputs = [next(saved) if constant is None else constant[0] for constant in ctx.layout]
        given = len(ctx.needs_input_grad)  # arguments of the call; the others have their defaults
        if loop_of is not None:
            name, needed = meaning.__name__, ctx.needs_input_grad
            found = _by_kernels(name, inputs, needed, output_grads[0], loop_of)
            if found is not None:
                return found
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_(bool(needed)) if isinstance(x, Tensor) else x
                for x, needed in zip(inputs[:given], ctx.needs_input_grad, strict=True)
            ]
            output = meaning(*leaves, *inputs[given:])
        wanted = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        outputs = [output] if isinstance(output, Tensor) else list(output)
        # An output that depends on nothing differentiable (n / N) has no gradient to give.
        pairs = [
            (own, grad)
            for own, grad in zip(outputs, output_grads, strict=True)
            if own.requires_grad and grad is not None
        ]
        grads = torch.autograd.grad(
            [own for own, _ in pairs], [leaves[i] for i in wanted], [grad for _, grad in pairs],
            allow_unused=True,
        )  # fmt: skip
        result: list[Any] = [[None] * len(x) if _is_tensor_list(x) else None for x in inputs[:given]]
        for index, value in zip(wanted, grads, strict=True):
            result[index] = value
        return tuple(result)

    operator.register_autograd(backward, setup_context=setup_context)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(x, Tensor) for x in value)
