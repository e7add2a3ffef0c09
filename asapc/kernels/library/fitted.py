"""asapc::fitted_sinkhorn and the hybrid operators, made of other operators' kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from asapc.kernels.library.attention import attention
from asapc.kernels.library.registration import Plain
from asapc.operators.catalogue import HYBRIDS
from asapc.operators.fitted_sinkhorn import scaled
from asapc.operators.hybrid import PREFIX, hybrid


def _fitted_sinkhorn(
    plain: Plain,
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    head_multiplier: Tensor,
    v: Tensor | None = None,
    **loop: Any,
) -> Any:
    points, bias = scaled(q, bias, head_multiplier)
    seen = {"q": points, "k": k, "keep": keep, "bias": bias, **loop}
    if v is None:
        return torch.ops.asapc.sinkhorn_attention(**seen).to(q.dtype)
    return torch.ops.asapc.sinkhorn(v=v, **seen)


def _registered(name: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(torch.ops.asapc, name)
    return found


@cache
def _of_kernels(name: str) -> Callable[..., Tensor]:
    return hybrid(name, _registered)


def _hybrid(plain: Plain, **arguments: Any) -> Any:
    return _of_kernels(plain.func.__name__.removeprefix(PREFIX))(**arguments)


attention("fitted_sinkhorn", _fitted_sinkhorn)
for _name in HYBRIDS.values():
    attention(_name, _hybrid)
