"""asapc::esp_soft, asapc::esp_hard, their `_attention` twins and the released hard map.

What exact sorting has to do depends on the data, on what ties, so that its gradient cannot be traced: it
is an operator too, asapc::esp_hard_gradients. `coupling` and `ties` have defaults: programs that were
exported without them load, and tied tokens share in them, too.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from asapc.ir import Coupling, Ties
from asapc.kernels import dispatch
from asapc.kernels.cpu import esp as cpu_esp
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import operator, without_autocast
from asapc.kernels.library.sizes import share_sizes
from asapc.operators import esp as meaning


def _one_of(value: str, kind: Any) -> Any:
    if value not in get_args(kind):
        raise ValueError(f"one of {', '.join(get_args(kind))} is needed, got {value!r}")
    return value


@operator
def esp_soft(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    softsort_temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
    coupling: str = "interpolated",
) -> Tensor:
    backend = dispatch.token_backend("esp_soft", q, k, v, lambda: cpu_esp.describe_soft(q, k))
    twin: Any = meaning if backend == "plain" else cpu_esp
    result: Tensor = twin.esp_soft(
        q, k, v, keep, query_keep, slices, inverse_temperature, softsort_temperature, squared_cost,
        mean_cost, output_factor, _one_of(coupling, Coupling),
    )  # fmt: skip
    return result


@operator
def esp_soft_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    softsort_temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
    coupling: str = "interpolated",
) -> Tensor:
    dispatch.token_backend("esp_soft_attention", q, k, None, cpu_esp.describe_hard)
    return meaning.esp_soft_attention(
        q, k, keep, query_keep, slices, inverse_temperature, softsort_temperature, squared_cost,
        mean_cost, output_factor, _one_of(coupling, Coupling),
    )  # fmt: skip


@operator
def esp_released_hard_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    softsort_temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
    coupling: str = "interpolated",
) -> Tensor:
    dispatch.token_backend("esp_released_hard_attention", q, k, None, cpu_esp.describe_hard)
    return meaning.esp_released_hard_attention(
        q, k, keep, query_keep, slices, inverse_temperature, softsort_temperature, squared_cost,
        mean_cost, output_factor, _one_of(coupling, Coupling),
    )  # fmt: skip


@operator
def esp_hard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
    coupling: str = "interpolated",
    ties: str = "shared",
) -> Tensor:
    backend = dispatch.token_backend("esp_hard", q, k, v, cpu_esp.describe_hard)
    twin: Any = meaning if backend == "plain" else cpu_esp
    result: Tensor = twin.esp_hard(
        q, k, v, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost,
        output_factor, _one_of(coupling, Coupling), _one_of(ties, Ties),
    )  # fmt: skip
    return result


@operator
def esp_hard_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
    coupling: str = "interpolated",
    ties: str = "shared",
) -> Tensor:
    dispatch.token_backend("esp_hard_attention", q, k, None, cpu_esp.describe_hard)
    return meaning.esp_hard_attention(
        q, k, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost,
        output_factor, _one_of(coupling, Coupling), _one_of(ties, Ties),
    )  # fmt: skip


def _fake_output(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, query_keep: Tensor | None, *_rest: Any
) -> Tensor:
    share_sizes(q, k, v, keep, query_keep)
    return v.new_empty((*q.shape[:3], v.shape[3]))


def _fake_map(
    q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None, *_rest: Any
) -> Tensor:
    share_sizes(q, k, None, keep, query_keep)
    return q.new_empty((*q.shape[:3], k.shape[2]))


for _operator in (esp_soft, esp_hard):
    _operator.register_fake(_fake_output)
for _operator in (esp_soft_attention, esp_released_hard_attention, esp_hard_attention):
    _operator.register_fake(_fake_map)

differentiate(esp_soft, meaning.esp_soft)
differentiate(esp_soft_attention, meaning.esp_soft_attention)

# Not a custom_op: those run with autograd switched off below them.
_library = torch.library.Library("asapc", "FRAGMENT")
_library.define(
    "esp_hard_gradients(Tensor grad_out, Tensor q, Tensor k, Tensor? v, Tensor? keep, "
    "Tensor? query_keep, Tensor? slices, Tensor inverse_temperature, bool squared_cost, bool mean_cost, "
    "float output_factor, str coupling, str ties) -> (Tensor, Tensor, Tensor, Tensor)"
)


def esp_hard_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None,
    query_keep: Tensor | None, slices: Tensor | None, inverse_temperature: Tensor, *settings: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of A v, or of A without v, with respect to q, k, v (empty without it) and inverse_temperature."""
    given = (q, k, inverse_temperature) if v is None else (q, k, inverse_temperature, v)
    with without_autocast(given), torch.enable_grad():
        q, k, tau, *values = (x.detach().requires_grad_() for x in given)
        hard: Any = meaning.esp_hard if values else meaning.esp_hard_attention
        output = hard(q, k, *values, keep, query_keep, slices, tau, *settings)
    leaves = (q, k, tau, *values)
    if output.requires_grad:
        found = torch.autograd.grad(output, leaves, grad_out, allow_unused=True, materialize_grads=True)
    else:
        found = tuple(map(torch.zeros_like, leaves))
    return found[0], found[1], found[3] if values else q.new_empty(0), found[2]


_library.impl("esp_hard_gradients", esp_hard_gradients, "CompositeExplicitAutograd")


@torch.library.register_fake("asapc::esp_hard_gradients", lib=_library)
def _(
    _grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor | None, _keep: Tensor | None,
    _query_keep: Tensor | None, _slices: Tensor | None, inverse_temperature: Tensor, *_settings: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dv = q.new_empty(0) if v is None else torch.empty_like(v)
    return torch.empty_like(q), torch.empty_like(k), dv, torch.empty_like(inverse_temperature)


def _differentiate_hard(operator: Any, has_values: bool) -> None:
    places = (0, 1, 2, 6) if has_values else (0, 1, None, 5)  # of q, k, v and inverse_temperature

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.save_for_backward(*tensors)
        ctx.settings = inputs[places[3] + 1 :]

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, *rest = ctx.saved_tensors[: places[3] + 1]
        values = rest if has_values else (None, *rest)
        found = torch.ops.asapc.esp_hard_gradients(grad, q, k, *values, *ctx.settings)
        result: list[Any] = [None] * len(ctx.needs_input_grad)
        for place, own in zip(places, found, strict=True):
            if place is not None and ctx.needs_input_grad[place]:
                result[place] = own
        return tuple(result)

    operator.register_autograd(backward, setup_context=setup_context)


_differentiate_hard(esp_hard, True)
_differentiate_hard(esp_hard_attention, False)
