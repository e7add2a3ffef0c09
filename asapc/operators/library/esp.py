"""asapc::esp_soft, asapc::esp_hard, their `_attention` twins and the released hard map."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asapc.kernels import dispatch
from asapc.kernels.cpu import esp as cpu_esp
from asapc.operators import esp as meaning
from asapc.operators.library.gradients import differentiate
from asapc.operators.library.registration import operator
from asapc.operators.library.sizes import share_sizes


@operator
def esp_soft(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    softsort_temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    backend = dispatch.token_backend("esp_soft", q, k, v, lambda: cpu_esp.describe_soft(q, k))
    twin: Any = meaning if backend == "plain" else cpu_esp
    result: Tensor = twin.esp_soft(
        q, k, v, keep, query_keep, slices, inverse_temperature, softsort_temperature, squared_cost,
        mean_cost, output_factor,
    )  # fmt: skip
    return result


@operator
def esp_soft_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    softsort_temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    dispatch.token_backend("esp_soft_attention", q, k, None, cpu_esp.describe_hard)
    return meaning.esp_soft_attention(
        q, k, keep, query_keep, slices, inverse_temperature, softsort_temperature, squared_cost,
        mean_cost, output_factor,
    )  # fmt: skip


@operator
def esp_released_hard_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    softsort_temperature: float,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    dispatch.token_backend("esp_released_hard_attention", q, k, None, cpu_esp.describe_hard)
    return meaning.esp_released_hard_attention(
        q, k, keep, query_keep, slices, inverse_temperature, softsort_temperature, squared_cost,
        mean_cost, output_factor,
    )  # fmt: skip


@operator
def esp_hard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    backend = dispatch.token_backend("esp_hard", q, k, v, cpu_esp.describe_hard)
    twin: Any = meaning if backend == "plain" else cpu_esp
    result: Tensor = twin.esp_hard(
        q, k, v, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost,
        output_factor,
    )  # fmt: skip
    return result


@operator
def esp_hard_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    slices: Tensor | None,
    inverse_temperature: Tensor,
    squared_cost: bool,
    mean_cost: bool,
    output_factor: float,
) -> Tensor:
    dispatch.token_backend("esp_hard_attention", q, k, None, cpu_esp.describe_hard)
    return meaning.esp_hard_attention(
        q, k, keep, query_keep, slices, inverse_temperature, squared_cost, mean_cost, output_factor
    )


def _fake_output(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, query_keep: Tensor | None, *_rest: Any
) -> Tensor:
    share_sizes(q, k, v, keep, query_keep)
    return v.new_empty((*q.shape[:3], v.shape[3]))


def _fake_map(
    q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None, *_rest: Any
) -> Tensor:
    share_sizes(q, k, None, keep, query_keep)
    return q.new_empty((*q.shape[:3], k.shape[2]))


for _operator in (esp_soft, esp_hard):
    _operator.register_fake(_fake_output)
for _operator in (esp_soft_attention, esp_released_hard_attention, esp_hard_attention):
    _operator.register_fake(_fake_map)

differentiate(esp_soft, meaning.esp_soft)
differentiate(esp_soft_attention, meaning.esp_soft_attention)
differentiate(esp_hard, meaning.esp_hard)
differentiate(esp_hard_attention, meaning.esp_hard_attention)
