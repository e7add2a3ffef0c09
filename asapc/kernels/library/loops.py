"""asapc::sinkhorn, asapc::asap and their `_attention` twins, which return the map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from asapc.kernels import dispatch, key_c_transform, native
from asapc.kernels.library.attention import attention
from asapc.kernels.library.gradients import AsLoop, differentiate, from_zero
from asapc.kernels.library.registration import Plain
from asapc.kernels.loop import Loop
from asapc.operators import asap as asap_reference
from asapc.operators import sinkhorn as sinkhorn_reference


def _asap_loop(arguments: Mapping[str, Any]) -> tuple[str | None, Loop]:
    half_steps = arguments["c_transforms"]
    duals = arguments["source_dual"], arguments["target_dual"]
    side = asap_reference.first_c_transform(*duals, half_steps)
    start = "source_dual" if side == "column" else "target_dual"
    return start, Loop(arguments["score_multiplier"], half_steps, side, arguments["output_factor"])


def _run(
    plain: Plain,
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    v: Tensor | None = None,
    *,
    as_loop: AsLoop,
    **_rest: Any,
) -> Any:
    name = plain.func.__name__
    start_name, loop = as_loop(plain.keywords)
    start = None if start_name is None else plain.keywords[start_name]
    from_key = loop.first_side == "row" and v is not None and v.numel() > 0 and q.numel() > 0
    backend = dispatch.attention_backend(name, q, k, v, bias, loop.half_steps, from_key)
    if backend == "plain":
        return plain()
    if backend == "cpu":
        if start is not None and bool(start.isneginf().any()):
            return dispatch.plainly(plain, q, k, "a dual of -inf, which its own half-step forgets")
        out, widest = native.sinkhorn_loop(q, k, v, keep, bias, start, loop)
        dispatch.note(name, q, k, lambda: native.path(q, k, widest))
        return out
    start = None if start is None else asap_reference.open_dual(start, keep)
    q, keep, bias = sinkhorn_reference.open_empty(q, keep, bias)
    assert v is not None
    if backend == "softmax":
        factor = loop.output_factor
        return key_c_transform.key_c_transform(q, k, v, keep, bias, start, loop.score_multiplier, factor)
    from asapc.kernels.gpu import sinkhorn as gpu

    values = sinkhorn_reference.clean_values(v, keep)
    return gpu.sinkhorn_loop(q, k, values, keep, bias, start, loop)


def _usual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    multiplier: float,
    half_steps: int,
    rows_first: bool,
    factor: Sequence[float],
    *_of_gradients: Any,
) -> Tensor | None:
    """What _run makes of most calls of asapc::sinkhorn, without what takes longer than a short loop."""
    if half_steps < 2 or dispatch.listening() or native.missing() is not None:
        return None
    loop = Loop(multiplier, half_steps, "row" if rows_first else "column", factor)
    return native.sinkhorn_loop(q, k, v, keep, bias, None, loop)[0]


attention("sinkhorn", partial(_run, as_loop=from_zero), partial(differentiate, as_loop=from_zero), _usual)
attention("asap", partial(_run, as_loop=_asap_loop), partial(differentiate, as_loop=_asap_loop))
