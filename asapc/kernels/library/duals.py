"""asapc::dual and asapc::dual_and_row_mass: what a layer predicts instead of looping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asapc.kernels import dispatch
from asapc.kernels.cpu import dual as cpu_dual
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import operator
from asapc.kernels.library.sizes import share_sizes
from asapc.operators import asap as asap_meaning


def _dual_twin(backend: dispatch.Backend) -> Any:
    if backend == "plain":
        return asap_meaning
    if backend == "gpu":
        from asapc.kernels.gpu import dual as gpu_dual

        return gpu_dual
    return cpu_dual


@operator
def dual(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    coefficients: Tensor,
    features: str,
    side: str,
    score_multiplier: float,
    half_steps: int,
    starts_on_x: bool,
) -> Tensor:
    twin = _dual_twin(dispatch.dual_backend("dual", q, k, features))
    result: Tensor = twin.dual(
        q, k, keep, bias, parameters, coefficients, features, side, score_multiplier, half_steps,
        starts_on_x,
    )  # fmt: skip
    return result


@operator
def dual_and_row_mass(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    coefficients: Tensor,
    features: str,
    score_multiplier: float,
    half_steps: int,
    starts_on_x: bool,
) -> tuple[Tensor, Tensor]:
    twin = _dual_twin(dispatch.dual_backend("dual_and_row_mass", q, k, features))
    result: tuple[Tensor, Tensor] = twin.dual_and_row_mass(
        q, k, keep, bias, parameters, coefficients, features, score_multiplier, half_steps,
        starts_on_x,
    )  # fmt: skip
    return result


@dual.register_fake
def _(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    _bias: Tensor | None,
    _parameters: Sequence[Tensor],
    _coefficients: Tensor,
    _features: str,
    side: str,
    *_rest: Any,
) -> Tensor:
    share_sizes(q, k, None, keep)
    return _float_like(q, q if side == "source" else k)


@dual_and_row_mass.register_fake
def _(q: Tensor, k: Tensor, keep: Tensor | None, *_rest: Any) -> tuple[Tensor, Tensor]:
    share_sizes(q, k, None, keep)
    return _float_like(q, k), _float_like(q, q)


def _float_like(q: Tensor, points: Tensor) -> Tensor:
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    return q.new_empty(points.shape[:3], dtype=dtype)


differentiate(dual, asap_meaning.dual)
differentiate(dual_and_row_mass, asap_meaning.dual_and_row_mass)
