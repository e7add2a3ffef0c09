"""asapc::lot and asapc::lot_attention, which returns the map."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asapc.kernels import dispatch, native
from asapc.kernels.library.attention import attention
from asapc.kernels.library.registration import Plain


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


attention("lot", _lot)
