"""asapc::esp_soft, asapc::esp_hard, their `_attention` twins and the released hard map.

Their gradients are an operator too, asapc::esp_gradients: the engine's, and those of exact sorting, which
cannot be traced: what it has to do depends on the data, on what ties. `coupling` and `ties` have
defaults: programs that were exported without them load, and tied tokens share in them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from asapc.kernels import dispatch, native
from asapc.kernels.library import fakes
from asapc.kernels.library.attention import attention
from asapc.kernels.library.gradients import differentiate, of_reference
from asapc.kernels.library.registration import Plain, operator, register_fake
from asapc.operators import esp as reference

WITH_GRADIENT = ("q", "k", "v", "slices", "inverse_temperature", "slice_weight")


def _with_one_factor(
    q: Tensor, k: Tensor, output_factor: float, query_power: int = 0, key_power: int = 0, **others: Any
) -> dict[str, Any]:
    """The same arguments, as the kernels take them."""
    factor = reference.with_lengths(output_factor, q, k, query_power, key_power)
    return {"q": q, "k": k, "v": None, "output_factor": factor, **others}


def _esp(plain: Plain, q: Tensor, k: Tensor, v: Tensor | None = None, **_rest: Any) -> Any:
    name, reason = plain.func.__name__, dispatch.no_engine(q)
    if v is None and name != reference.esp_soft_attention.__name__:
        reason = dispatch.MAP
    if reason is not None:
        return dispatch.plainly(plain, q, k, reason)
    dispatch.note(name, q, k, lambda: (f"CPU, {native.described()}", "the tensors are on the CPU"))
    return native.esp(**_with_one_factor(**plain.keywords))


@operator
@torch.inference_mode(False)  # which an operator's kernel may not record gradients without
@torch.no_grad()
def esp_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None,
    query_keep: Tensor | None, slices: Tensor | None, inverse_temperature: Tensor, squared_cost: bool,
    mean_cost: bool, output_factor: float, coupling: str, slice_weight: Tensor | None, query_power: int,
    key_power: int, softsort_temperature: float | None, ties: str | None,
) -> list[Tensor]:  # fmt: skip
    """Of A v, or of A without v, with respect to WITH_GRADIENT; of what is not there it is empty.

    softsort_temperature: of soft sorts.  ties: of exact ones, which are constants, those of the slices
    too. The engine has them all but those of an exact map.
    """
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "keep": keep, "query_keep": query_keep, "slices": slices,
        "inverse_temperature": inverse_temperature, "squared_cost": squared_cost, "mean_cost": mean_cost,
        "output_factor": output_factor, "coupling": coupling, "slice_weight": slice_weight,
        "query_power": query_power, "key_power": key_power,
    }  # fmt: skip
    if softsort_temperature is not None:
        settings = _with_one_factor(**given, softsort_temperature=softsort_temperature)
        found = native.esp_gradients(grad_out, **settings)
    elif v is not None and dispatch.no_engine(q) is None:
        found = native.esp_gradients(grad_out, **_with_one_factor(**given, ties=ties))
    else:
        hard: Any = reference.esp_hard if v is not None else reference.esp_hard_attention
        needed, own = dict.fromkeys(WITH_GRADIENT, True), {**given, "ties": ties}
        found = of_reference(hard, own if v is not None else _without_values(**own), needed, [grad_out])
    return fakes.gradients(given, WITH_GRADIENT, found)


def _without_values(v: None, **given: Any) -> dict[str, Any]:
    return given


register_fake(esp_gradients, lambda arguments: fakes.gradients(arguments, WITH_GRADIENT))


def _by_kernels(arguments: Mapping[str, Any], grad: Tensor) -> dict[str, Tensor] | None:
    """Gradients by name; None for those of soft sorts where there is no engine."""
    soft = "softsort_temperature" in arguments
    if soft and dispatch.no_engine(arguments["q"]) is not None:
        return None
    given = {"v": None, "softsort_temperature": None, "ties": None, **arguments}
    found = dict(zip(WITH_GRADIENT, esp_gradients(grad_out=grad, **given), strict=True))
    return found if soft else {name: x for name, x in found.items() if name != "slices"}


def _twice_differentiable(v: Tensor | None = None, **arguments: Any) -> Tensor:
    """A v by the map: torch has no second derivative of the sum of rows that the reference takes."""
    dense = reference.esp_hard_attention(**arguments)
    return dense if v is None else dense @ v


def _differentiate_hard(registered: CustomOpDef, _reference: Callable[..., Tensor]) -> None:
    differentiate(registered, _twice_differentiable, by_kernels=_by_kernels)


attention("esp_soft", _esp, partial(differentiate, by_kernels=_by_kernels))
attention("esp_hard", _esp, _differentiate_hard)
attention("esp_released_hard", _esp, None)
