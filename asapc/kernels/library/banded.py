"""asapc::banded_sinkhorn and asapc::banded_sinkhorn_attention, which returns the map."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asapc.kernels import band, dispatch, native
from asapc.kernels.library.attention import attention
from asapc.kernels.library.gradients import differentiate, from_zero
from asapc.kernels.library.registration import Plain
from asapc.kernels.loop import Loop
from asapc.operators.banded import in_band


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
    **_of_gradients: Any,
) -> Any:
    name = plain.func.__name__
    missing = dispatch.no_engine(q)
    loop = Loop(score_multiplier, half_steps, "row" if rows_first else "column", output_factor)
    if v is not None and half_steps > 0:
        out = None if missing else native.banded(q, k, v, keep, loop, low, high)
        if out is not None:
            why = f"windows of {high - low + 1} keys; float64 where they need it"
            dispatch.note(name, q, k, lambda: (f"CPU, {native.described()}, a band", why))
            return out
        beyond = "scores spread further than float64 holds"
        dispatch.note(name, q, k, lambda: ("plain PyTorch, a band", missing or beyond))
        return band.banded(q if missing else q.double(), k, v, keep, loop, low, high)
    if half_steps < 1 or missing is not None:
        return dispatch.plainly(plain, q, k, missing or "no half-step")
    if keep is not None or q.shape[2] != k.shape[2] or not low <= 0 <= high:
        return dispatch.plainly(plain, q, k, "some queries or keys are in no window")
    hidden = ~in_band(q.shape[2], k.shape[2], low, high, q)
    bias = hidden.new_zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, -math.inf)
    out, widest = native.sinkhorn_loop(q, k, None, None, bias, None, loop)
    dispatch.note(name, q, k, lambda: native.path(q, k, widest))
    return out


attention("banded_sinkhorn", _banded, partial(differentiate, as_loop=from_zero))
