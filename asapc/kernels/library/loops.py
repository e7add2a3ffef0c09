"""Operators of finite loops and their `_attention` twins, which return the map: asapc::sinkhorn, asap,
stabilised_sinkhorn, banded_sinkhorn and lot; asapc::plan, of scores that are given; and those that are
made of others, of their kernels and gradients: asapc::fitted_sinkhorn and the hybrid operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from asapc.ir import Stabiliser
from asapc.kernels import band, dispatch, native
from asapc.kernels.cpu import plan as cpu_plan
from asapc.kernels.library.attention import attention
from asapc.kernels.library.gradients import AsLoop, ByKernels, differentiate, from_zero
from asapc.kernels.library.registration import Plain
from asapc.kernels.loop import Loop, precision
from asapc.kernels.plan import Task, changes
from asapc.operators import asap as asap_reference
from asapc.operators import plan as plan_reference
from asapc.operators.catalogue import HYBRIDS
from asapc.operators.fitted_sinkhorn import scaled
from asapc.operators.hybrid import PREFIX, hybrid
from asapc.operators.sinkhorn import (
    clean_values,
    factor_value,
    open_empty,
    opened_keys,
    score_matrix,
    widen,
)


def _asap_loop(arguments: Mapping[str, Any]) -> tuple[str | None, Loop]:
    half_steps = arguments["c_transforms"]
    duals = arguments["source_dual"], arguments["target_dual"]
    side = asap_reference.first_c_transform(*duals, half_steps)
    start = "source_dual" if side == "column" else "target_dual"
    return start, Loop(arguments["score_multiplier"], half_steps, side, arguments["output_factor"])


def _run(
    plain: Plain, q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None, v: Tensor | None = None,
    *, as_loop: AsLoop, **_rest: Any,
) -> Any:  # fmt: skip
    name = plain.func.__name__
    start_name, loop = as_loop(plain.keywords)
    start = None if start_name is None else plain.keywords[start_name]
    if start is not None and start.is_cpu and bool(start.isneginf().any()):
        return dispatch.plainly(plain, q, k, "a dual of -inf, which its own half-step forgets")
    from_key = loop.first_side == "row" and v is not None and v.numel() > 0 and q.numel() > 0
    backend = dispatch.attention_backend(name, q, k, v, bias, loop.half_steps, from_key)
    if backend == "plain":
        return plain()
    if backend == "cpu":
        out, widest = native.sinkhorn_loop(q, k, v, keep, bias, start, loop)
        if loop.half_steps > 1 or not from_key:
            dispatch.note(name, q, k, lambda: native.path(q, k, widest))
        return out
    start = None if start is None else asap_reference.open_dual(start, keep)
    q, keep, bias = open_empty(q, keep, bias)
    assert v is not None
    if backend == "softmax":
        factor = loop.output_factor
        return _softmax(q, k, v, keep, bias, start, loop.score_multiplier, factor)
    from asapc.kernels.gpu import sinkhorn as gpu
    from asapc.kernels.gpu.tiles import Scores

    scores = Scores(q, k, keep, bias, loop.score_multiplier)
    return gpu.sinkhorn_loop(scores, clean_values(v, keep), start, loop)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, target_dual: Tensor | None,
    score_multiplier: float, output_factor: Sequence[float],
) -> Tensor:  # fmt: skip
    """operators.asap.asap of one c-transform from the target dual: softmax attention with a key bias.

        out_i = factor / N * sum_j softmax_j(S_ij + g_j) v_j

    By torch's own attention, with a broadcast mask [B, H, 1, M]: N x M is never stored, a score bias,
    which is that large itself, excepted. Half precision runs in float32.
    target_dual: None for zero, of which it is softmax attention alone.
    keep: with an active key in every example (operators.sinkhorn.open_empty).
    """
    wide_q, wide_k, wide_v = widen(q), widen(k), widen(v)
    dtype = torch.promote_types(wide_q.dtype, wide_v.dtype)
    mask = None if target_dual is None else target_dual.to(dtype)[:, :, None, :]
    if keep is not None:
        nothing = wide_q.new_zeros((), dtype=dtype) if mask is None else mask
        mask = nothing.masked_fill(~keep[:, None, None, :], -math.inf)
    of_queries = bias is not None and bias.shape[-1] == 1  # alike for every key, softmax is blind to it
    if bias is not None and not of_queries:
        mask = bias.to(dtype) if mask is None else mask + bias.to(dtype)
    # 0 * inf of a masked key is nan
    keys, values = (clean_values(x.to(dtype), keep) for x in (wide_k, wide_v))
    out = torch.nn.functional.scaled_dot_product_attention(
        wide_q.to(dtype), keys, values, attn_mask=mask, scale=score_multiplier
    )
    if bias is not None and of_queries:
        out = out.masked_fill(bias.isneginf(), 0.0)
    factor = factor_value(output_factor, q.shape[2], k.shape[2], keep)
    out = out * (factor.to(dtype) if isinstance(factor, Tensor) else factor) / q.shape[2]
    return out.to(v.dtype)


def _usual(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, multiplier: float,
    half_steps: int, rows_first: bool, factor: Sequence[float], *_of_gradients: Any,
) -> Tensor | None:  # fmt: skip
    """What _run makes of most calls of asapc::sinkhorn, without what takes longer than a short loop."""
    if half_steps < 1 or dispatch.listening() or native.missing() is not None:
        return None
    loop = Loop(multiplier, half_steps, "row" if rows_first else "column", factor)
    return native.sinkhorn_loop(q, k, v, keep, bias, None, loop)[0]


def _stabilised(
    plain: Plain, q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None, v: Tensor | None = None,
    **settings: Any,
) -> Any:  # fmt: skip
    """By the plan of scores, formed first, where the engine does not start like that or float64 ends."""
    name, (_, loop) = plain.func.__name__, from_zero(settings)
    reason = native.missing() if q.device.type == "cpu" else "the constant in its divisions is kept"
    if reason is not None:
        return dispatch.plainly(plain, q, k, reason)
    stabiliser = Stabiliser.of(*(settings[field.name] for field in fields(Stabiliser)))
    if native.runs(stabiliser) and loop.half_steps > 0:
        out, widest = native.sinkhorn_loop(q, k, v, keep, bias, None, loop, stabiliser)
        if precision(widest, torch.float64):
            dispatch.note(name, q, k, lambda: native.path(q, k, widest))
            return out
    values = None if v is None else clean_values(widen(v), opened_keys(keep))
    q, keep, bias = open_empty(q, keep, bias)
    scores = score_matrix(widen(q), widen(k), keep, widen(bias), loop.score_multiplier)
    # The number of active keys is an example's own.
    plainest = {"score_multiplier": 1.0, "output_factor": [1.0, 0.0, 0.0, 0.0]}
    task = Task.of(None, None, **settings | plainest)
    dispatch.note(name, q, k, lambda: cpu_plan.described(scores, task))
    factor = factor_value(loop.output_factor, q.shape[2], k.shape[2], keep)
    factor = factor.to(scores.dtype) if isinstance(factor, Tensor) else factor
    dense = cpu_plan.plan(scores, task) * factor
    if values is None or v is None:
        return dense.to(q.dtype)
    return (dense @ values.to(dense.dtype)).to(v.dtype)


def _banded(
    plain: Plain, q: Tensor, k: Tensor, keep: Tensor | None, low: int, high: int, v: Tensor | None = None,
    **settings: Any,
) -> Any:  # fmt: skip
    name, missing, (_, loop) = plain.func.__name__, dispatch.no_engine(q), from_zero(settings)
    if loop.half_steps < 1 or (missing is not None and v is None):
        return dispatch.plainly(plain, q, k, missing or "no half-step")
    if missing is None:
        out, widest = native.sinkhorn_loop(q, k, v, keep, None, None, loop, band=(low, high))
        dispatch.note(name, q, k, lambda: native.path(q, k[:, :, : max(0, high - low + 1)], widest))
        return out
    assert v is not None
    dispatch.note(name, q, k, lambda: ("plain PyTorch, a band", missing))
    return band.banded(q, k, v, keep, loop, low, high)


def _lot(
    plain: Plain, q: Tensor, k: Tensor, pivots: Tensor, query_half_steps: int, key_half_steps: int,
    v: Tensor | None = None, **_rest: Any,
) -> Any:  # fmt: skip
    reason = dispatch.no_engine(q) if v is not None else dispatch.MAP
    if 0 in (query_half_steps, key_half_steps):
        reason = "there are no half-steps to run"
    if reason is not None:
        return dispatch.plainly(plain, q, k, reason)
    out, widest = native.lot(**plain.keywords)
    longer = q if q.shape[2] > k.shape[2] else k
    dispatch.note(plain.func.__name__, q, k, lambda: native.path(longer, pivots[None], widest))
    return out


def _lot_takes(given: Mapping[str, Any]) -> bool:
    steps = given["query_half_steps"], given["key_half_steps"]
    return "v" in given and 0 not in steps and dispatch.no_engine(given["q"]) is None


def _plan(plain: Plain, scores: Tensor, **rest: Any) -> Any:
    by_engine = scores.device.type == "cpu" and native.missing() is None
    task = Task.of(**rest).ended(scores, cpu_plan.changes if by_engine else changes)
    backend = dispatch.plan_backend(scores, task, lambda: cpu_plan.described(scores, task))
    if backend == "gpu":
        from asapc.kernels.gpu.plan import plan

        if not task.settings["is_kernel"]:
            return plan(scores, task)
        return plan(plan_reference.logs_of(widen(scores)), task.of_scores()).to(scores.dtype)
    if backend == "cpu":
        return cpu_plan.plan(scores, task)
    if scores.device.type == "cpu":
        cpu_plan.require_masses(task)
    return task.plain(scores)


def _at_once(
    scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, *settings: Any
) -> Tensor | None:
    """What _plan makes of most calls, without what takes longer than the loop of a small matrix."""
    if dispatch.listening() or native.missing() is not None:
        return None
    if log_mu is None and log_nu is None and (found := cpu_plan.at_once(scores, *settings)) is not None:
        return found
    task = Task.of_values(log_mu, log_nu, settings).ended(scores, cpu_plan.changes)
    return cpu_plan.plan(scores, task)


def _fitted_sinkhorn(
    q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None, head_multiplier: Tensor,
    v: Tensor | None = None, **loop: Any,
) -> Tensor:  # fmt: skip
    points, bias = scaled(q, bias, head_multiplier)
    seen = {"q": points, "k": k, "keep": keep, "bias": bias, **loop}
    if v is None:
        dense: Tensor = torch.ops.asapc.sinkhorn_attention(**seen)
        return dense.to(q.dtype)
    out: Tensor = torch.ops.asapc.sinkhorn(v=v, **seen)
    return out


@cache
def _of_kernels(name: str) -> Callable[..., Tensor]:
    """The operator of a reference's name, made of registered ones."""
    if not name.startswith(PREFIX):
        return _fitted_sinkhorn

    def registered(inner: str) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = getattr(torch.ops.asapc, inner)
        return found

    return hybrid(name.removeprefix(PREFIX), registered)


def _made_of(name: str, **arguments: Any) -> Tensor:
    return _of_kernels(name)(**arguments)  # when it is called, its parts are registered


def _run_parts(plain: Plain, **arguments: Any) -> Any:
    return _made_of(plain.func.__name__, **arguments)


def _gradient(registered: CustomOpDef, reference: Callable[..., Any]) -> None:
    differentiate(registered, partial(_made_of, reference.__name__))


attention("sinkhorn", partial(_run, as_loop=from_zero), partial(differentiate, as_loop=from_zero), _usual)
attention("asap", partial(_run, as_loop=_asap_loop), partial(differentiate, as_loop=_asap_loop))
attention("stabilised_sinkhorn", _stabilised)
attention("banded_sinkhorn", _banded, partial(differentiate, as_loop=from_zero))
_LOT = ByKernels(native.lot_gradients, _lot_takes)
attention("lot", _lot, partial(differentiate, by_kernels=_LOT))
attention("plan", _plan, at_once=_at_once)
attention("fitted_sinkhorn", _run_parts, _gradient)
for _name in HYBRIDS.values():
    attention(_name, _run_parts, _gradient)
