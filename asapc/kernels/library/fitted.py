"""asapc::fitted_sinkhorn and the hybrid operators, made of others: of their kernels and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from asapc.kernels.library.attention import attention
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import Plain
from asapc.operators.catalogue import HYBRIDS
from asapc.operators.fitted_sinkhorn import scaled
from asapc.operators.hybrid import PREFIX, hybrid


def _fitted_sinkhorn(
    q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None, head_multiplier: Tensor,
    v: Tensor | None = None, **loop: Any,
) -> Tensor:  # fmt: skip
    points, bias = scaled(q, bias, head_multiplier)
    seen = {"q": points, "k": k, "keep": keep, "bias": bias, **loop}
    if v is None:
        dense: Tensor = torch.ops.asapc.sinkhorn_attention(**seen)
        return dense.to(q.dtype)
    out: Tensor = torch.ops.asapc.sinkhorn(v=v, **seen)
    return out


@cache
def _of_kernels(name: str) -> Callable[..., Tensor]:
    """The operator of a reference's name, made of registered ones."""
    if not name.startswith(PREFIX):
        return _fitted_sinkhorn

    def registered(inner: str) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = getattr(torch.ops.asapc, inner)
        return found

    return hybrid(name.removeprefix(PREFIX), registered)


def _made_of(name: str, **arguments: Any) -> Tensor:
    return _of_kernels(name)(**arguments)  # when it is called, its parts are registered


def _run(plain: Plain, **arguments: Any) -> Any:
    return _made_of(plain.func.__name__, **arguments)


def _gradient(registered: CustomOpDef, reference: Callable[..., Any]) -> None:
    differentiate(registered, partial(_made_of, reference.__name__))


attention("fitted_sinkhorn", _run, _gradient)
for _name in HYBRIDS.values():
    attention(_name, _run, _gradient)
