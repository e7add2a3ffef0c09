"""asapc::lot and asapc::lot_attention, which returns the map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asapc.kernels import dispatch
from asapc.kernels.cpu import lot as cpu_lot
from asapc.kernels.library.gradients import differentiate
from asapc.kernels.library.registration import operator
from asapc.kernels.library.sizes import share_sizes
from asapc.operators import lot as meaning


@operator
def lot(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    key_bias: Tensor | None,
    pivots: Tensor,
    pivot_mass: Tensor,
    query_multiplier: float,
    key_multiplier: float,
    query_half_steps: int,
    queries_first: bool,
    key_half_steps: int,
    keys_first: bool,
    output_factor: Sequence[float],
) -> Tensor:
    def describe() -> tuple[str, str]:
        return cpu_lot.describe(
            q, k, keep, query_keep, key_bias, pivots, pivot_mass, query_multiplier, key_multiplier,
            min(query_half_steps, key_half_steps),
        )  # fmt: skip

    twin: Any = meaning if dispatch.token_backend("lot", q, k, v, describe) == "plain" else cpu_lot
    result: Tensor = twin.lot(
        q, k, v, keep, query_keep, key_bias, pivots, pivot_mass, query_multiplier, key_multiplier,
        query_half_steps, queries_first, key_half_steps, keys_first, output_factor,
    )  # fmt: skip
    return result


@operator
def lot_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    key_bias: Tensor | None,
    pivots: Tensor,
    pivot_mass: Tensor,
    query_multiplier: float,
    key_multiplier: float,
    query_half_steps: int,
    queries_first: bool,
    key_half_steps: int,
    keys_first: bool,
    output_factor: Sequence[float],
) -> Tensor:
    dispatch.token_backend("lot_attention", q, k, None, lambda: ("", ""))
    return meaning.lot_attention(
        q, k, keep, query_keep, key_bias, pivots, pivot_mass, query_multiplier, key_multiplier,
        query_half_steps, queries_first, key_half_steps, keys_first, output_factor,
    )  # fmt: skip


@lot.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, query_keep: Tensor | None, *_rest: Any
) -> Tensor:
    share_sizes(q, k, v, keep, query_keep)
    return v.new_empty((*q.shape[:3], v.shape[3]))


@lot_attention.register_fake
def _(q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None, *_rest: Any) -> Tensor:
    share_sizes(q, k, None, keep, query_keep)
    return q.new_empty((*q.shape[:3], k.shape[2]))


differentiate(lot, meaning.lot)
differentiate(lot_attention, meaning.lot_attention)
