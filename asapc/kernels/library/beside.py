"""What stands beside attention in a graph: what layers predict instead of looping (asapc::dual and
dual_and_row_mass), what masks of numbers hide (kept_keys, is_one, keys_of_empty, some_keys, rows_kept),
and marks (child, seen and holds)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asapc.errors import BranchError
from asapc.features import coarse, gaussian
from asapc.features.clouds import Budget, Clouds
from asapc.kernels import dispatch, native
from asapc.kernels.dual import Backend
from asapc.kernels.library import fakes
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import Plain, operator, register_fake
from asapc.operators import asap, masks


def _dual_and_mass(
    clouds: Clouds, pivots: Tensor | None, count: int, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """As features.coarse.dual_and_mass, the dual up to a constant; without gradients."""
    if native.missing() is None and budget.half_steps > 0:
        column, mass, held = native.feature("coarse", clouds, pivots, None, count, budget, want_mass)
        if held:
            return column, mass
    return coarse.dual_and_mass(clouds, pivots, count, budget, want_mass)


def _sliced(clouds: Clouds, theta: Tensor, weights: Tensor, budget: Budget) -> Tensor | None:
    return None if native.missing() else native.feature("sliced", clouds, theta, weights)[0]


def _gaussian(clouds: Clouds, parameter: None, weights: Tensor, budget: Budget) -> Tensor | None:
    beta = None if native.missing() else native.brenier_potential(clouds)
    return None if beta is None else gaussian.weighted(clouds, beta, weights)


# The engine's features, where it runs.
_ON_CPU = Backend({"sliced": _sliced, "gaussian": _gaussian}, _dual_and_mass)


def _dual(plain: Plain, q: Tensor, k: Tensor, features: str, **_rest: Any) -> Any:
    name = plain.func.__name__
    backend = dispatch.dual_backend(name, q, k, features)
    if backend == "plain":
        return plain()
    if backend == "cpu":
        return getattr(_ON_CPU, name)(**plain.keywords)
    from asapc.kernels.gpu import dual as gpu_dual

    return getattr(gpu_dual, name)(**plain.keywords)


for _reference, _fake in ((asap.dual, fakes.dual), (asap.dual_and_row_mass, fakes.dual_and_row_mass)):
    _registered = operator(_reference, _dual)
    register_fake(_registered, _fake)
    differentiate(_registered, _reference)

register_fake(operator(masks.kept_keys), fakes.kept_keys)
register_fake(operator(masks.is_one), fakes.kept_keys)
register_fake(operator(masks.keys_of_empty), fakes.keys_of_empty)
register_fake(operator(masks.some_keys), fakes.keys_of_empty)
register_fake(operator(masks.rows_kept), fakes.rows_kept)


@torch.library.custom_op("asapc::child", mutates_args=())
def child(inputs: Sequence[Tensor], outputs: Sequence[Tensor], number: str) -> list[Tensor]:
    """The outputs.  number: of the layer's call among those of the program.

        child([x], [linear(x, weight, bias)], "0")  ->  [a copy of linear(x, weight, bias)]

    Marks what a layer of a module computes. A program on disk holds operators alone: between the marks of
    a layer's inputs and outputs it computes what the layer computed when it was traced, and
    asapc.program.live replaces that by a call of the layer where the module is live.
    """
    return [output.clone() for output in outputs]


@torch.library.custom_op("asapc::seen", mutates_args=())
def seen(tensors: Sequence[Tensor], label: str) -> None:
    """Names tensors in a trace, see asapc.passes.observe; it computes nothing."""


@torch.library.custom_op("asapc::holds", mutates_args=())
def holds(condition: Tensor, answer: bool, asked: str) -> None:
    """A branch of the code that was traced goes the way it was traced, see asapc.passes.branches."""
    if bool(condition) != answer:
        raise BranchError(asked, answer)


child.register_fake(lambda inputs, outputs, number: [x.new_empty(x.shape) for x in outputs])
for _mark in (seen, holds):
    _mark.register_fake(lambda *_: None)
    torch.fx.node.has_side_effect(_mark._opoverload)  # nothing uses it, and it has to stay
