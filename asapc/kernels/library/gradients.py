"""Gradients of the operators: of the reference, except where the GPU kernels have their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from asapc.ir import Side
from asapc.kernels import dispatch
from asapc.kernels.library import fakes
from asapc.kernels.library.registration import bound, operator, register_fake, without_autocast
from asapc.kernels.loop import Loop
from asapc.operators import asap as asap_reference
from asapc.operators import sinkhorn as sinkhorn_reference


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
    opened = None if start is None else asap_reference.open_dual(start, keep)
    open_q, open_keep, open_bias = sinkhorn_reference.open_empty(q, keep, bias)
    values = sinkhorn_reference.clean_values(v, open_keep)
    with torch.cuda.device_of(q):
        dq, dk, dv, dual_grad = sinkhorn_backward(
            grad_out, open_q, k, values, open_keep, open_bias, opened, loop
        )
    if keep is not None:
        dq = dq.masked_fill(~keep.any(-1)[:, None, None, None], 0.0)
    if dual_grad is None:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, asap_reference.open_dual(dual_grad, keep)


register_fake(loop_gradients, lambda arguments: fakes.gradients(arguments, "q", "k", "v", "start"))

AsLoop = Callable[[Mapping[str, Any]], tuple[str | None, Loop]]
"""An operator's arguments as a loop: the name of the dual it starts from, None for zero, and the loop."""


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _by_kernels(
    name: str, arguments: Mapping[str, Any], needed: Mapping[str, bool], grad: Tensor, as_loop: AsLoop
) -> dict[str, Tensor] | None:
    """Gradients of q, k, v and the dual; None where the kernels do not have them."""
    start, loop = as_loop(arguments)
    q, k, v, keep, bias = (arguments.get(key) for key in ("q", "k", "v", "keep", "bias"))
    assert q is not None and k is not None
    if v is None or loop.half_steps == 0 or needed["bias"] or _on_cpu(q):
        return None
    if dispatch.attention_backend(name, q, k, v, keep, bias, loop.score_multiplier) != "gpu":
        return None
    dq, dk, dv, dual_grad = loop_gradients(
        grad, q, k, v, keep, bias, None if start is None else arguments[start], loop.score_multiplier,
        loop.half_steps, loop.first_side == "row", loop.output_factor,
    )  # fmt: skip
    found = {"q": dq, "k": dk, "v": dv}
    return found if start is None else found | {start: dual_grad}


def save(ctx: Any, inputs: Sequence[Any]) -> None:
    """Keeps an operator's arguments for its gradient."""
    ctx.save_for_backward(*[x for x in inputs if isinstance(x, Tensor)])
    ctx.layout = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def saved(ctx: Any, registered: CustomOpDef) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments by name, and whether a gradient is needed, of those that the call was given."""
    tensors = iter(ctx.saved_tensors)  # read once: under checkpointing they are recomputed for one reader
    inputs = [next(tensors) if constant is None else constant[0] for constant in ctx.layout]
    arguments = bound(registered, inputs)
    return arguments, dict(zip(arguments, ctx.needs_input_grad, strict=False))


def differentiate(
    registered: CustomOpDef,
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    as_loop: AsLoop | None = None,
) -> None:
    """Register the gradient, recomputed in backward: only inputs are saved.

    as_loop: of an operator whose gradient the GPU kernels may have.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # A list of tensors (fitted parameters) is a constant: nothing in it is differentiated.
        save(ctx, inputs)

    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        arguments, needed = saved(ctx, registered)
        with without_autocast(arguments.values()):
            found = gradients(arguments, needed, output_grads)
        lists = {
            name: [None] * len(arguments[name]) for name in needed if _is_tensor_list(arguments[name])
        }
        return tuple(
            lists.get(name, found.get(name) if need else None) for name, need in needed.items()
        )

    def gradients(
        arguments: Mapping[str, Any], needed: Mapping[str, Any], output_grads: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        if as_loop is not None:
            found = _by_kernels(reference.__name__, arguments, needed, output_grads[0], as_loop)
            if found is not None:
                return found
        with torch.enable_grad():
            leaves = {
                name: x.detach().requires_grad_(bool(needed.get(name))) if isinstance(x, Tensor) else x
                for name, x in arguments.items()
            }
            output = reference(**leaves)
        wanted = {n: x for n, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad}
        outputs = [output] if isinstance(output, Tensor) else list(output)
        # An output that depends on nothing differentiable (n / N) has no gradient to give.
        pairs = [
            (result, grad)
            for result, grad in zip(outputs, output_grads, strict=True)
            if result.requires_grad and grad is not None
        ]
        grads = torch.autograd.grad(
            [result for result, _ in pairs], [*wanted.values()], [grad for _, grad in pairs],
            allow_unused=True,
        )  # fmt: skip
        return dict(zip(wanted, grads, strict=True))

    registered.register_autograd(backward, setup_context=setup_context)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(x, Tensor) for x in value)
