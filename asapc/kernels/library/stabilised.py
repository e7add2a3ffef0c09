"""asapc::stabilised_sinkhorn and its `_attention` twin: on a CPU, the plan of scores formed first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from asapc.ir import Stabiliser
from asapc.kernels import dispatch, native
from asapc.kernels.cpu import plan as cpu_plan
from asapc.kernels.library.attention import attention
from asapc.kernels.library.registration import Plain
from asapc.kernels.loop import Loop, precision
from asapc.kernels.plan import Task
from asapc.operators.sinkhorn import (
    clean_values,
    factor_value,
    open_empty,
    opened_keys,
    score_matrix,
    widen,
)


def _stabilised(
    plain: Plain,
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    output_factor: Sequence[float],
    v: Tensor | None = None,
    **settings: Any,
) -> Any:
    name = plain.func.__name__
    reason = native.missing() if q.device.type == "cpu" else "the constant in its divisions is kept"
    if reason is not None:
        return dispatch.plainly(plain, q, k, reason)
    stabiliser = Stabiliser.of(*(settings[field.name] for field in fields(Stabiliser)))
    half_steps, rows_first = settings["half_steps"], settings["rows_first"]
    if native.runs(stabiliser) and half_steps > 0:
        loop = Loop(score_multiplier, half_steps, "row" if rows_first else "column", output_factor)
        out, widest = native.sinkhorn_loop(q, k, v, keep, bias, None, loop, stabiliser)
        if precision(widest, torch.float64):
            dispatch.note(name, q, k, lambda: native.path(q, k, widest))
            return out
    values = None if v is None else clean_values(widen(v), opened_keys(keep))
    q, keep, bias = open_empty(q, keep, bias)
    scores = score_matrix(widen(q), widen(k), keep, widen(bias), score_multiplier)
    # The number of active keys is an example's own.
    task = Task.of(None, None, score_multiplier=1.0, output_factor=[1.0, 0.0, 0.0, 0.0], **settings)
    dispatch.note(name, q, k, lambda: cpu_plan.described(scores, task))
    factor = factor_value(output_factor, q.shape[2], k.shape[2], keep)
    factor = factor.to(scores.dtype) if isinstance(factor, Tensor) else factor
    dense = cpu_plan.plan(scores, task) * factor
    if values is None or v is None:
        return dense.to(q.dtype)
    return (dense @ values.to(dense.dtype)).to(v.dtype)


attention("stabilised_sinkhorn", _stabilised)
