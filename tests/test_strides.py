"""Operators give contiguous results whatever they are given, as their fakes say.

A program that torch.compile has made counts on the strides of the fakes, and stops where they are
others. Heads that were split off a projection by view and transpose, as models have them, are laid out
otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_autocast import CALLS, is_float, ops
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

FACTOR = [1.0, 1.0, 0.0, 0.0]


def turned(x: Any) -> Any:
    """The same numbers, with tokens outside of heads."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def strides(results: Any) -> list[tuple[int, ...]]:
    given = results if isinstance(results, tuple) else (results,)
    return [x.stride() for x in given]


@pytest.mark.parametrize("name", CALLS)
def test_results_are_as_their_fakes(name: str) -> None:
    operator, arguments = CALLS[name]
    given = [turned(x) for x in arguments]
    found = operator(*given)
    assert all(x.is_contiguous() for x in (found if isinstance(found, tuple) else (found,)))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else
                 [mode.from_tensor(y) for y in x] if isinstance(x, list) and x and is_float(x[0]) else x
                 for x in given]  # fmt: skip
        assert strides(operator(*fakes)) == strides(found)


@pytest.mark.parametrize("half_steps", [1, 4])
def test_gradients_are_as_their_fakes(half_steps: int) -> None:
    q, k, v, grad = (turned(torch.randn(2, 3, 6, 4)) for _ in range(4))
    settings = (None, None, None, 0.5, half_steps, True, FACTOR, half_steps, 0.0)
    found = ops.loop_gradients(grad, q, k, v, *settings)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (grad, q, k, v)]
        assert strides(ops.loop_gradients(*fakes, *settings)) == strides(found)
