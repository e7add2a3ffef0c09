"""asapc::lot and asapc::lot_attention, which returns the map."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asapc.kernels import dispatch
from asapc.kernels.cpu import lot as cpu_lot
from asapc.kernels.library.attention import attention
from asapc.kernels.library.registration import Plain


def _lot(
    plain: Plain,
    q: Tensor,
    k: Tensor,
    query_half_steps: int,
    key_half_steps: int,
    v: Tensor | None = None,
    **rest: Any,
) -> Any:
    def describe() -> tuple[str, str]:
        names = ("keep", "query_keep", "key_bias", "pivots", "pivot_mass", "query_multiplier",
                 "key_multiplier")  # fmt: skip
        settings = {name: rest[name] for name in names}
        steps = sorted((query_half_steps, key_half_steps))
        return cpu_lot.describe(q, k, **settings, half_steps=(steps[0], steps[1]))

    backend = dispatch.token_backend(plain.func.__name__, q, k, v, describe)
    return plain() if backend == "plain" else cpu_lot.lot(**plain.keywords)


attention("lot", _lot)
