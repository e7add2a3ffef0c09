"""asapc::dual and asapc::dual_and_row_mass: what a layer predicts instead of looping."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asapc.kernels import dispatch
from asapc.kernels.cpu import dual as cpu_dual
from asapc.kernels.library import fakes
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import Plain, operator, register_fake
from asapc.operators import asap as reference


def _dual(plain: Plain, q: Tensor, k: Tensor, features: str, **_rest: Any) -> Any:
    name = plain.func.__name__
    backend = dispatch.dual_backend(name, q, k, features)
    if backend == "plain":
        return plain()
    if backend == "cpu":
        return getattr(cpu_dual, name)(**plain.keywords)
    from asapc.kernels.gpu import dual as gpu_dual

    return getattr(gpu_dual, name)(**plain.keywords)


for _reference, _fake in (
    (reference.dual, fakes.dual), (reference.dual_and_row_mass, fakes.dual_and_row_mass)
):  # fmt: skip
    _registered = operator(_reference, _dual)
    register_fake(_registered, _fake)
    differentiate(_registered, _reference)
