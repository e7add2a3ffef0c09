"""Pair: an operator and its map, of one function with one list of arguments.

    esp_soft, esp_soft_attention = pair("esp_soft", _esp_soft)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from torch import Tensor


def pair(
    name: str, compute: Callable[..., Tensor]
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """(<name>, <name>_attention): A v in v's dtype, and A in q's, with the arguments of `compute`.

    compute: q, k, v and settings, to A v, or to A where v is None.
    """

    def values(q: Tensor, k: Tensor, v: Tensor, *settings: Any, **by_name: Any) -> Tensor:
        return compute(q, k, v, *settings, **by_name).to(v.dtype)

    def attention(q: Tensor, k: Tensor, *settings: Any, **by_name: Any) -> Tensor:
        return compute(q, k, None, *settings, **by_name).to(q.dtype)

    kinds = get_type_hints(compute) | {"v": Tensor}
    parameters = [
        parameter.replace(annotation=kinds[key])
        for key, parameter in inspect.signature(compute).parameters.items()
    ]
    dense = [parameter for parameter in parameters if parameter.name != "v"]
    made: Any
    for made, suffix, taken in ((values, "", parameters), (attention, "_attention", dense)):
        made.__name__ = made.__qualname__ = name + suffix
        made.__module__, made.__doc__ = compute.__module__, compute.__doc__
        made.__signature__ = inspect.Signature(taken, return_annotation=Tensor)
        made.__annotations__ = {key: kinds[key] for key in (*(x.name for x in taken), "return")}
    return values, attention
