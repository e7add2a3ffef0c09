"""asapc::banded_sinkhorn and asapc::banded_sinkhorn_attention, which returns the map."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asapc.kernels import dispatch
from asapc.kernels.cpu import banded as cpu_banded
from asapc.kernels.library.attention import attention
from asapc.kernels.library.registration import Plain
from asapc.kernels.loop import Loop


def _banded(
    plain: Plain,
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    output_factor: Any,
    low: int,
    high: int,
    v: Tensor | None = None,
) -> Any:
    name = plain.func.__name__
    if q.device.type != "cpu" or half_steps < 1:
        reason = "no half-step" if half_steps < 1 else f"there are no kernels for {q.device.type} devices"
        dispatch.note_plain(name, q, k, reason)
        return plain()
    window = f"windows of {high - low + 1} keys"
    dispatch.note(name, q, k, "CPU, blocks of a band", f"{window}; log domain where they need it")
    loop = Loop(score_multiplier, half_steps, "row" if rows_first else "column", output_factor)
    return cpu_banded.banded_loop(q, k, v, keep, loop, low, high)


attention("banded_sinkhorn", _banded)
