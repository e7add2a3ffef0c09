"""Registering a function as torch.ops.asapc.<its name>, and what holds for every operator alike.

An operator computes at the precision of its inputs: in float64 where q is float64, else in float32, in
which half precision is accumulated too. The result has the dtype of v, a map that of q; a dual is
float32 or float64. Autocast never reaches inside. It decides what the operator is given, such as q and
k in bfloat16 from a linear layer beside a float32 bias: any mixture of half precision and float32 is
taken, and each input counts as what it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef


def operator(function: Callable[..., Any]) -> CustomOpDef:
    """Decorator: torch.ops.asapc.<name of the function>, with the schema of its signature."""

    @functools.wraps(function)
    def at_own_precision(*inputs: Any) -> Any:
        with without_autocast(inputs):
            return function(*inputs)

    # Of the function itself: annotations are resolved in its module's names.
    schema = torch.library.infer_schema(function, mutates_args=())
    name = f"asapc::{function.__name__}"
    return torch.library.custom_op(name, at_own_precision, mutates_args=(), schema=schema)


def without_autocast(given: Iterable[Any]) -> AbstractContextManager[object]:
    """Autocast is off inside, on the device of the first tensor among `given`.

    A kernel's worker threads never see it; without this the same call on one thread would.
    """
    device = next(value.device.type for value in given if isinstance(value, Tensor))
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
