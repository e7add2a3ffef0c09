"""What gives A v, or with `_attention` the map A: registered with sizes and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from asapc.kernels import dispatch
from asapc.kernels.library import fakes
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import Plain, Run, operator, register_fake
from asapc.operators.catalogue import OPERATORS

Gradient = Callable[[CustomOpDef, Callable[..., Any]], None]


def attention(
    name: str, run: Run, gradient: Gradient | None = differentiate,
    at_once: Callable[..., Tensor | None] | None = None,
) -> None:  # fmt: skip
    """Registers an operator of the catalogue.

    run: computes both, the map where there are no values.  gradient: registers that of one of them, by
    its reference; None for an operator without.  at_once: as `operator` has it, of A v, or of a map from
    scores.
    """
    entry = OPERATORS[name]
    for dense in entry.forms:
        quick = at_once if entry.scored or not dense else None
        registered = operator(entry.reference_of(dense), run, quick)
        register_fake(registered, fakes.plan if entry.scored else fakes.attention)
        if gradient is not None:
            gradient(registered, entry.reference_of(dense))


def without_kernels() -> None:
    """Registers what has none: the reference runs wherever it is."""
    for entry in OPERATORS.values():
        if entry.plain:
            attention(entry.name, partial(_plainly, entry.plain))


def _plainly(why: str, plain: Plain, q: Tensor, k: Tensor, **_rest: Any) -> Any:
    return dispatch.plainly(plain, q, k, why)
