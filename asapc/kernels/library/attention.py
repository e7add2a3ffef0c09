"""What gives A v, or with `_attention` the map A: registered with sizes and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import CustomOpDef

from asapc.kernels.library import fakes
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import Run, operator, register_fake
from asapc.operators.catalogue import OPERATORS

Gradient = Callable[[CustomOpDef, Callable[..., Any]], None]


def attention(name: str, run: Run, gradient: Gradient | None = differentiate) -> None:
    """Registers an operator of the catalogue.

    run: computes both, the map where there are no values.  gradient: registers that of one of them, by
    its reference; None for an operator without.
    """
    entry = OPERATORS[name]
    for dense in entry.forms:
        registered = operator(entry.reference_of(dense), run)
        register_fake(registered, fakes.plan if entry.scored else fakes.attention)
        if gradient is not None:
            gradient(registered, entry.reference_of(dense))
