"""asapc::esp_soft, asapc::esp_hard, their `_attention` twins and the released hard map.

`coupling` and `ties` have defaults: programs that were exported without them load, and tied tokens share
in them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asapc.kernels import dispatch, native
from asapc.kernels.library.attention import attention
from asapc.kernels.library.gradients import ByKernels, differentiate
from asapc.kernels.library.registration import Plain
from asapc.operators import esp as reference


def _with_one_factor(
    q: Tensor, k: Tensor, output_factor: float, v: Tensor | None = None, query_power: int = 0,
    key_power: int = 0, **others: Any,
) -> dict[str, Any]:  # fmt: skip
    """The same arguments, as the kernels take them."""
    factor = reference.with_lengths(output_factor, q, k, query_power, key_power)
    if v is None and "softsort_temperature" not in others:  # the map is A I
        v = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return {"q": q, "k": k, "v": v, "output_factor": factor, **others}


def _esp(plain: Plain, q: Tensor, k: Tensor, v: Tensor | None = None, **_rest: Any) -> Any:
    name, reason = plain.func.__name__, dispatch.no_engine(q)
    if name.startswith("esp_released_hard"):
        reason = dispatch.MAP
    if reason is not None:
        return dispatch.plainly(plain, q, k, reason)
    dispatch.note(name, q, k, lambda: (f"CPU, {native.described()}", "the tensors are on the CPU"))
    return native.esp(**_with_one_factor(**plain.keywords))


def _gradients(grad_out: Tensor, **given: Any) -> Mapping[str, Tensor | None] | None:
    """Exact sorts are constants, those of the slices too."""
    if dispatch.no_engine(given["q"]) is not None:
        return None
    return native.esp_gradients(grad_out, **_with_one_factor(**given))


def _twice_differentiable(v: Tensor | None = None, **arguments: Any) -> Tensor:
    """A v by the map: torch has no second derivative of the sum of rows that the reference takes."""
    dense = reference.esp_hard_attention(**arguments)
    return dense if v is None else dense @ v


_BY_KERNELS = ByKernels(_gradients, lambda given: dispatch.no_engine(given["q"]) is None)
# What exact sorting has to do depends on the data, on what ties: it cannot be traced.
_OPAQUE = ByKernels(_gradients, lambda given: True, ("slices",))

attention("esp_soft", _esp, partial(differentiate, by_kernels=_BY_KERNELS))
attention("esp_hard", _esp, partial(differentiate, by_kernels=_OPAQUE, twice=_twice_differentiable))
attention("esp_released_hard", _esp, None)
