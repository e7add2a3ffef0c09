"""asapc::banded_sinkhorn and asapc::banded_sinkhorn_attention, which returns the map."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from asapc.kernels import dispatch, native
from asapc.kernels.cpu import banded as cpu_banded
from asapc.kernels.library.attention import attention
from asapc.kernels.library.registration import Plain
from asapc.kernels.loop import Loop
from asapc.operators.banded import in_band

SHORT = 1 << 18  # entries of all heads' maps times half-steps: up to here the whole map takes less time


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
    loop = Loop(score_multiplier, half_steps, "row" if rows_first else "column", output_factor)
    all_paired = keep is None and q.shape[2] == k.shape[2] and low <= 0 <= high
    whole = v is None or q.shape[:3].numel() * k.shape[2] * half_steps <= SHORT
    if all_paired and whole and native.missing() is None:
        hidden = ~in_band(q.shape[2], k.shape[2], low, high, q)
        bias = hidden.new_zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, -math.inf)
        out, widest = native.sinkhorn_loop(q, k, v, None, bias, None, loop)
        dispatch.note(name, q, k, lambda: native.path(q, k, widest))
        return out
    if v is None:
        dispatch.note_plain(name, q, k, "the dense attention map is wanted")
        return plain()
    why = f"windows of {high - low + 1} keys; log domain where they need it"
    dispatch.note(name, q, k, lambda: ("CPU, blocks of a band", why))
    return cpu_banded.banded_loop(q, k, v, keep, loop, low, high)


attention("banded_sinkhorn", _banded)
