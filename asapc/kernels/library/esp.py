"""asapc::esp_soft, asapc::esp_hard, their `_attention` twins and the released hard map.

What exact sorting has to do depends on the data, on what ties, so that its gradient cannot be traced: it
is an operator too, asapc::esp_hard_gradients. `coupling` and `ties` have defaults: programs that were
exported without them load, and tied tokens share in them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from asapc.kernels import dispatch, native
from asapc.kernels.library import fakes
from asapc.kernels.library.attention import attention
from asapc.kernels.library.gradients import of_reference, save, saved
from asapc.kernels.library.registration import Plain, operator, register_fake
from asapc.operators import esp as reference


def _esp(plain: Plain, q: Tensor, k: Tensor, v: Tensor | None = None, **_rest: Any) -> Any:
    name, reason = plain.func.__name__, dispatch.no_engine(q)
    if v is None and name != reference.esp_soft_attention.__name__:
        reason = dispatch.MAP
    if reason is not None:
        return dispatch.plainly(plain, q, k, reason)
    dispatch.note(name, q, k, lambda: (f"CPU, {native.described()}", "the tensors are on the CPU"))
    given = dict(plain.keywords)  # the kernels know one factor
    powers = (given.pop(name, 0) for name in ("query_power", "key_power"))
    given["output_factor"] = reference.with_lengths(given["output_factor"], q, k, *powers)
    return native.esp(**{"v": None, **given})


@operator
@torch.inference_mode(False)  # which an operator's kernel may not record gradients without
@torch.enable_grad()
def esp_hard_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None,
    query_keep: Tensor | None, slices: Tensor | None, inverse_temperature: Tensor, squared_cost: bool,
    mean_cost: bool, output_factor: float, coupling: str, ties: str, slice_weight: Tensor | None,
    query_power: int, key_power: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of A v, or of A without v, with respect to WITH_GRADIENT; of what is not there it is empty."""
    given = {
        "q": q, "k": k, "v": v, "inverse_temperature": inverse_temperature, "slice_weight": slice_weight
    }  # fmt: skip
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
    hard: Any = reference.esp_hard_attention if v is None else reference.esp_hard
    output = hard(
        **{"slice_weight": None, **leaves}, keep=keep, query_keep=query_keep, slices=slices,
        squared_cost=squared_cost, mean_cost=mean_cost, output_factor=output_factor, coupling=coupling,
        ties=ties, query_power=query_power, key_power=key_power,
    )  # fmt: skip
    inputs = [*leaves.values()]
    if output.requires_grad:
        grads = torch.autograd.grad(output, inputs, grad_out, allow_unused=True, materialize_grads=True)
    else:
        grads = tuple(map(torch.zeros_like, inputs))
    found = dict(zip(leaves, grads, strict=True))
    none = q.new_empty(0)
    dq, dk, dv, dtau, dweight = (found.get(name, none) for name in WITH_GRADIENT)
    return dq, dk, dv, dtau, dweight


WITH_GRADIENT = ("q", "k", "v", "inverse_temperature", "slice_weight")
register_fake(esp_hard_gradients, lambda arguments: fakes.gradients(arguments, *WITH_GRADIENT))


def _twice_differentiable(v: Tensor | None = None, **arguments: Any) -> Tensor:
    """A v by the map: torch has no second derivative of the sum of rows that the reference takes."""
    dense = reference.esp_hard_attention(**arguments)
    return dense if v is None else dense @ v


def _differentiate_hard(registered: CustomOpDef, _reference: Callable[..., Tensor]) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        arguments, needed = saved(ctx, registered)
        if torch.is_grad_enabled():
            found = of_reference(_twice_differentiable, arguments, needed, [grad])
            return tuple(found.get(name) for name in needed)
        grads = esp_hard_gradients(grad_out=grad, **{"v": None, **arguments})
        found = dict(zip(WITH_GRADIENT, grads, strict=True))
        return tuple(found.get(name) if need else None for name, need in needed.items())

    registered.register_autograd(backward, setup_context=setup_context)


attention("esp_soft", _esp)
attention("esp_hard", _esp, _differentiate_hard)
attention("esp_released_hard", _esp, None)
