"""Hybrid: an operator in place of softmax attention, with what LOTFormer keeps beside it.

    rows i < c:   sum_j softmax_j(m q_i.k_j + bias_ij) v_j       over every key, exactly as before
    the others:   sum_j A_ij v_j + DWConv(v)_i                   A: the operator on all tokens but the c

c summary tokens, such as [CLS], gather from the whole sequence, and the other tokens do not see them
(LOTFormer, 4.3); where no other token is active, A is 0. DWConv is a depthwise convolution over the
order of those other tokens (4.2); it has no map: the map that is given is that of the attention alone.

Every operator that softmax attention may become has such a form, hybrid_<name>, which is made here once.
Plain PyTorch, any dtype, differentiable in every tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional

from asapc.operators.catalogue import reference_named
from asapc.operators.sinkhorn import masked, widen
from asapc.operators.tokens import depthwise_values

Named = Callable[[str], Callable[..., Tensor]]
PREFIX = "hybrid_"
OF_ROWS = (1, True, [1.0, 1.0, 0.0, 0.0])  # softmax as a loop: one half-step, on rows, which sum to 1
_SEEN: Mapping[str, Any] = {"keep": Tensor | None, "bias": Tensor | None}
_SETTINGS: Mapping[str, Any] = {
    "summary_tokens": int, "summary_multiplier": float, "depthwise": Tensor | None,
}  # fmt: skip


def hybrid(name: str, named: Named = reference_named) -> Callable[..., Tensor]:
    """The hybrid form of an operator, or of its map: A v [B, H, N, E] in v's dtype, or A [B, H, N, N].

    named: gives operators by name: references, or others of the same meaning.  The returned function
    takes

    q, k: [B, H, N, D]; v: [B, H, N, E]; keep: [B, N] bool; bias: broadcastable to [B, H, N, N];
    summary_tokens: c.  summary_multiplier: m.
    depthwise: [H, E, w], w odd, for offsets -(w - 1)/2 to (w - 1)/2, zeros beyond the ends; or None;
    and the operator's own settings. An operator that asks which queries carry mass is told that all do.
    """
    reference = reference_named(name)
    own, kinds = inspect.signature(reference).parameters, get_type_hints(reference)
    points = [key for key in ("q", "k", "v") if key in own]
    rest = [key for key in own if key not in {*points, *_SEEN, "query_keep"}]
    types: dict[str, Any] = {key: kinds[key] for key in points} | {**_SEEN, **_SETTINGS}
    types |= {key: kinds[key] for key in rest}
    signature = inspect.Signature([
        inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind,
                          default=own[key].default if key in rest else inspect.Parameter.empty)
        for key, kind in types.items()
    ], return_annotation=Tensor)  # fmt: skip
    dense = "v" not in own
    inner, softmax = named(name), named("sinkhorn_attention" if dense else "sinkhorn")

    def combined(*given: Any, **by_name: Any) -> Tensor:
        bound = signature.bind(*given, **by_name)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        q, k, v, keep, bias = (settings.pop(key, None) for key in ("q", "k", "v", "keep", "bias"))
        count, multiplier, depthwise = (settings.pop(key) for key in _SETTINGS)
        # Where there are no others the last token stands in: no branch, and no operator without tokens.
        start = torch.sym_min(count, torch.sym_max(q.shape[2] - 1, 0)) if count else 0
        others = {key: x[:, :, start:] for key, x in (("q", q), ("k", k), ("v", v)) if x is not None}
        seen = {
            "keep": None if keep is None else keep[:, start:], "query_keep": None,
            "bias": without_first(bias, start),
        }  # fmt: skip
        out = inner(*((others | seen | settings)[key] for key in own))
        if count:
            out = masked(out, seen["keep"], None)  # rows without another active key are 0
        if depthwise is not None and not dense:
            wide = widen(others["v"])
            added = depthwise_values(wide, depthwise.to(wide.dtype), seen["keep"])
            out = (widen(out) + added).to(out.dtype)
        if count == 0:
            return out
        out = out[:, :, count - start :, count - start if dense else 0 :]
        there = torch.sym_min(count, q.shape[2])  # a graph of a longer example holds for fewer, too
        first = bias if bias is None or bias.shape[-2] == 1 else bias[..., :there, :]
        values = () if dense else (v,)
        rows = softmax(q[:, :, :there], k, *values, keep, first, multiplier, *OF_ROWS)
        if dense:
            out = functional.pad(out, (k.shape[2] - out.shape[3], 0))  # no other row sees the first keys
        return torch.cat([rows, out.to(rows.dtype)], 2)

    combined.__name__ = combined.__qualname__ = PREFIX + name
    combined.__signature__ = signature  # type: ignore[attr-defined]
    combined.__annotations__ = {**types, "return": Tensor}
    return combined


def without_first(bias: Tensor | None, count: int) -> Tensor | None:
    """The bias of all tokens but the first, broadcastable to [B, H, N - count, M - count]."""
    if bias is None or count == 0:
        return bias
    rows = bias if bias.shape[-2] == 1 else bias[..., count:, :]
    return rows if rows.shape[-1] == 1 else rows[..., count:]


hybrid_lot, hybrid_lot_attention = hybrid("lot"), hybrid("lot_attention")
hybrid_esp_hard, hybrid_esp_hard_attention = hybrid("esp_hard"), hybrid("esp_hard_attention")
hybrid_fitted_sinkhorn = hybrid("fitted_sinkhorn")
hybrid_fitted_sinkhorn_attention = hybrid("fitted_sinkhorn_attention")
