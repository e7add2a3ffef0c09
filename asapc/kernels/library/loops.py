"""asapc::sinkhorn, asapc::asap and their `_attention` twins, which return the map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from asapc.kernels import dispatch, key_c_transform
from asapc.kernels.cpu import sinkhorn as cpu_sinkhorn
from asapc.kernels.library.attention import attention
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import Plain
from asapc.kernels.loop import Loop
from asapc.operators import asap as asap_reference
from asapc.operators import sinkhorn as sinkhorn_reference


def _sinkhorn_loop(arguments: Mapping[str, Any]) -> tuple[str | None, Loop]:
    side: Any = "row" if arguments["rows_first"] else "column"
    multiplier, factor = arguments["score_multiplier"], arguments["output_factor"]
    return None, Loop(multiplier, arguments["half_steps"], side, factor)


def _asap_loop(arguments: Mapping[str, Any]) -> tuple[str | None, Loop]:
    half_steps = arguments["c_transforms"]
    duals = arguments["source_dual"], arguments["target_dual"]
    side = asap_reference.first_c_transform(*duals, half_steps)
    start = "source_dual" if side == "column" else "target_dual"
    return start, Loop(arguments["score_multiplier"], half_steps, side, arguments["output_factor"])


def _sinkhorn(
    plain: Plain,
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    v: Tensor | None = None,
    **_rest: Any,
) -> Any:
    name = plain.func.__name__
    _, loop = _sinkhorn_loop(plain.keywords)
    if loop.half_steps == 1 and loop.first_side == "row" and v is not None and v.numel() and q.numel():
        backend = dispatch.attention_backend(name, q, k, v, keep, bias, score_multiplier, 1, True)
        if backend == "softmax":
            q, keep, bias = sinkhorn_reference.open_empty(q, keep, bias)
            factor = loop.output_factor
            return key_c_transform.key_c_transform(q, k, v, keep, bias, None, score_multiplier, factor)
        if backend == "plain":
            return plain()
        return _run(backend, q, k, v, keep, bias, None, loop)
    if keep is None and bias is None and cpu_sinkhorn.is_short(q, k, loop.half_steps):
        dispatch.note(name, q, k, "CPU, log domain", "short: a few calls on all heads take least")
        return cpu_sinkhorn.few_half_steps(q, k, v, loop)
    backend = dispatch.attention_backend(name, q, k, v, keep, bias, score_multiplier)
    if backend == "plain":
        return plain()
    return _run(backend, q, k, v, keep, bias, None, loop)


def _asap(
    plain: Plain,
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    target_dual: Tensor | None,
    score_multiplier: float,
    c_transforms: int,
    output_factor: Sequence[float],
    v: Tensor | None = None,
    **_rest: Any,
) -> Any:
    start, loop = _asap_loop(plain.keywords)
    some = v is None or (q.shape[2] > 0 and k.shape[2] > 0)
    backend = dispatch.attention_backend(
        plain.func.__name__, q, k, v, keep, bias, score_multiplier, c_transforms,
        loop.first_side == "row" and some,
    )  # fmt: skip
    if backend == "softmax" and v is not None and target_dual is not None:
        opened_dual = asap_reference.open_dual(target_dual, keep)
        q, keep, bias = sinkhorn_reference.open_empty(q, keep, bias)
        return key_c_transform.key_c_transform(
            q, k, v, keep, bias, opened_dual, score_multiplier, output_factor
        )
    if backend == "plain":
        return plain()
    return _run(backend, q, k, v, keep, bias, plain.keywords[str(start)], loop)


def _run(
    backend: dispatch.Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    start: Tensor | None,
    loop: Loop,
) -> Tensor:
    start = None if start is None else asap_reference.open_dual(start, keep)
    q, keep, bias = sinkhorn_reference.open_empty(q, keep, bias)
    v = None if v is None else sinkhorn_reference.clean_values(v, keep)
    if backend == "gpu" and v is not None:
        from asapc.kernels.gpu import sinkhorn as gpu

        return gpu.sinkhorn_loop(q, k, v, keep, bias, start, loop)
    return cpu_sinkhorn.sinkhorn_loop(q, k, v, keep, bias, start, loop)


attention("sinkhorn", _sinkhorn, partial(differentiate, as_loop=_sinkhorn_loop))
attention("asap", _asap, partial(differentiate, as_loop=_asap_loop))
