"""asapc::sinkhorn, asapc::asap and their `_attention` twins, which return the map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asapc.ir import Side
from asapc.kernels import dispatch, key_closure
from asapc.kernels.cpu import sinkhorn as cpu_sinkhorn
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import operator
from asapc.kernels.library.sizes import share_sizes
from asapc.kernels.loop import Loop
from asapc.operators import asap as asap_meaning
from asapc.operators import sinkhorn as sinkhorn_meaning


@operator
def sinkhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    output_factor: Sequence[float],
) -> Tensor:
    backend = dispatch.attention_backend("sinkhorn", q, k, v, keep, bias, score_multiplier)
    if backend == "plain":
        return sinkhorn_meaning.sinkhorn(
            q, k, v, keep, bias, score_multiplier, half_steps, rows_first, output_factor
        )
    side: Side = "row" if rows_first else "column"
    loop = Loop(score_multiplier, half_steps, side, output_factor)
    return _loop(backend, q, k, v, keep, bias, None, loop)


@operator
def sinkhorn_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    output_factor: Sequence[float],
) -> Tensor:
    backend = dispatch.attention_backend(
        "sinkhorn_attention", q, k, None, keep, bias, score_multiplier
    )
    if backend == "plain":
        return sinkhorn_meaning.sinkhorn_attention(
            q, k, keep, bias, score_multiplier, half_steps, rows_first, output_factor
        )
    side: Side = "row" if rows_first else "column"
    loop = Loop(score_multiplier, half_steps, side, output_factor)
    return _loop(backend, q, k, None, keep, bias, None, loop)


@operator
def asap(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    source_dual: Tensor | None,
    target_dual: Tensor | None,
    score_multiplier: float,
    closures: int,
    output_factor: Sequence[float],
) -> Tensor:
    side = asap_meaning.first_closure(source_dual, target_dual, closures)
    some = q.shape[2] > 0 and k.shape[2] > 0
    backend = dispatch.attention_backend(
        "asap", q, k, v, keep, bias, score_multiplier, closures, side == "row" and some
    )
    if backend == "softmax" and target_dual is not None:
        opened_dual = asap_meaning.open_dual(target_dual, keep)
        q, keep, bias = sinkhorn_meaning.open_empty(q, keep, bias)
        return key_closure.key_closure(
            q, k, v, keep, bias, opened_dual, score_multiplier, output_factor
        )
    if backend == "plain":
        return asap_meaning.asap(
            q, k, v, keep, bias, source_dual, target_dual, score_multiplier, closures, output_factor
        )
    loop = Loop(score_multiplier, closures, side, output_factor)
    start = source_dual if side == "column" else target_dual
    return _loop(backend, q, k, v, keep, bias, start, loop)


@operator
def asap_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    source_dual: Tensor | None,
    target_dual: Tensor | None,
    score_multiplier: float,
    closures: int,
    output_factor: Sequence[float],
) -> Tensor:
    side = asap_meaning.first_closure(source_dual, target_dual, closures)
    backend = dispatch.attention_backend(
        "asap_attention", q, k, None, keep, bias, score_multiplier, closures, side == "row"
    )
    if backend == "plain":
        return asap_meaning.asap_attention(
            q, k, keep, bias, source_dual, target_dual, score_multiplier, closures, output_factor
        )
    loop = Loop(score_multiplier, closures, side, output_factor)
    start = source_dual if side == "column" else target_dual
    return _loop(backend, q, k, None, keep, bias, start, loop)


def _loop(
    backend: dispatch.Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    start: Tensor | None,
    loop: Loop,
) -> Tensor:
    start = None if start is None else asap_meaning.open_dual(start, keep)
    q, keep, bias = sinkhorn_meaning.open_empty(q, keep, bias)
    v = None if v is None else sinkhorn_meaning.clean_values(v, keep)
    if backend == "gpu" and v is not None:
        from asapc.kernels.gpu import sinkhorn as gpu

        with torch.cuda.device_of(q):  # Triton launches on the current device
            return gpu.sinkhorn_loop(q, k, v, keep, bias, start, loop)
    return cpu_sinkhorn.sinkhorn_loop(q, k, v, keep, bias, start, loop)


@sinkhorn.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *_rest: Any) -> Tensor:
    share_sizes(q, k, v, keep)
    return v.new_empty((*q.shape[:3], v.shape[3]))


@asap.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *_rest: Any) -> Tensor:
    share_sizes(q, k, v, keep)
    return v.new_empty((*q.shape[:3], v.shape[3]))


@sinkhorn_attention.register_fake
def _(q: Tensor, k: Tensor, keep: Tensor | None, *_rest: Any) -> Tensor:
    share_sizes(q, k, None, keep)
    return q.new_empty((*q.shape[:3], k.shape[2]))


@asap_attention.register_fake
def _(q: Tensor, k: Tensor, keep: Tensor | None, *_rest: Any) -> Tensor:
    share_sizes(q, k, None, keep)
    return q.new_empty((*q.shape[:3], k.shape[2]))


def _sinkhorn_as_loop(inputs: Sequence[Any]) -> tuple[int | None, int, bool, Sequence[float]]:
    return None, inputs[6], inputs[7], inputs[8]


def _asap_as_loop(inputs: Sequence[Any]) -> tuple[int | None, int, bool, Sequence[float]]:
    return (5 if inputs[6] is None else 6), inputs[8], inputs[5] is None, inputs[9]


differentiate(sinkhorn, sinkhorn_meaning.sinkhorn, _sinkhorn_as_loop)
differentiate(sinkhorn_attention, sinkhorn_meaning.sinkhorn_attention)
differentiate(asap, asap_meaning.asap, _asap_as_loop)
differentiate(asap_attention, asap_meaning.asap_attention)
