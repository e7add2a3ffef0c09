"""Plans of scores that hide rows and columns, though the data hid none: ours against the original's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from test_plan import analysed, random
from torch import Tensor, nn

from asapc.inputs.data import Batch
from asapc.program.runner import Runner

Spelling = Callable[[Tensor, list[int]], Tensor]
LOW = (-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf)


def softmaxes(s: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        s = s.log_softmax(axis)
    return s.exp()


def subtracted(s: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        s = s - s.logsumexp(axis, keepdim=True)
    return s.exp()


def duals(s: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    f, g = torch.zeros_like(s[..., :1]), torch.zeros_like(s[..., :1, :])
    for axis in axes:
        if axis == -1:
            f = -(s + g).logsumexp(-1, keepdim=True)
        else:
            g = -(s + f).logsumexp(-2, keepdim=True)
    return f, g


def increments(s: Tensor, axes: list[int]) -> Tensor:
    f, g = torch.zeros_like(s[..., :1]), torch.zeros_like(s[..., :1, :])
    for axis in axes:
        if axis == -1:
            f = f - (s + f + g).logsumexp(-1, keepdim=True)
        else:
            g = g - (s + f + g).logsumexp(-2, keepdim=True)
    return (s + f + g).exp()


def rows_added_first(s: Tensor, axes: list[int]) -> Tensor:
    f, g = duals(s, axes)
    return (s + f + g).exp()


def columns_added_first(s: Tensor, axes: list[int]) -> Tensor:
    f, g = duals(s, axes)
    return (s + g + f).exp()


def duals_added_first(s: Tensor, axes: list[int]) -> Tensor:
    f, g = duals(s, axes)
    return (f + g + s).exp()


def divided(s: Tensor, axes: list[int]) -> Tensor:
    plan = s.softmax(axes[0])
    for axis in axes[1:]:
        plan = plan / plan.sum(axis, keepdim=True)
    return plan


def divided_with_constant(s: Tensor, axes: list[int]) -> Tensor:
    plan = s.softmax(axes[0])
    for axis in axes[1:]:
        plan = plan / (plan.sum(axis, keepdim=True) + 1e-8)
    return plan


SPELLINGS: dict[str, tuple[Spelling, list[int]]] = {
    f"{spelling.__name__}, {name}": (spelling, axes)
    for spelling in (softmaxes, subtracted, increments, rows_added_first, columns_added_first,
                     duals_added_first, divided, divided_with_constant)
    for name, axes in {"rows first": [-1, -2] * 3, "columns first": [-2, -1] * 2 + [-2]}.items()
}  # fmt: skip


class Loop(nn.Module):
    """A loop on scores that are given: nothing says that they may hide anything."""

    def __init__(self, spelling: Spelling, axes: list[int]) -> None:
        super().__init__()
        self.spelling, self.axes = spelling, axes

    def forward(self, scores: Tensor) -> Tensor:
        return self.spelling(scores, self.axes)


def hidden(n: int, m: int) -> Tensor:
    """Rows, columns, both, all, none, and all but one entry or column: [7, n, m]."""
    row, column = torch.arange(n)[:, None] >= n - 2, torch.arange(m) >= m - 2
    one = torch.ones(n, m, dtype=torch.bool)
    some = [row & one, column & one, row | column, one, ~one, one.clone(), one.clone()]
    some[5][0, 0], some[6][:, 1] = False, False
    return torch.stack(some)


def scores_that_hide(n: int, m: int) -> Tensor:
    """At every spread, with every low number: [84, n, m]."""
    noise = [spread * random(7, n, m, seed=seed) for seed, spread in enumerate((0.1, 3.0, 30.0))]
    pairs = itertools.product(noise, LOW)
    return torch.cat([scores.masked_fill(hidden(n, m), low) for scores, low in pairs])


def agrees(net: nn.Module, ours: Runner, *inputs: Tensor) -> None:
    """Every example that the original gives, relative to its largest entry."""
    with torch.no_grad():
        theirs, found = net(*inputs), ours(Batch(inputs, {}, None, [0] * len(inputs[0])))
    finite = theirs.isfinite().flatten(1).all(1)
    assert int(finite.sum()) >= len(finite) // 2
    theirs, found = theirs[finite].flatten(1), found[finite].flatten(1)
    error = (found - theirs).abs().amax(1) / theirs.abs().amax(1).clamp(min=1e-30)
    assert float(error.max()) <= 1e-4


@pytest.mark.parametrize("name", SPELLINGS)
def test_what_hides_at_run_time_alone(name: str) -> None:
    net = Loop(*SPELLINGS[name])
    analysis = analysed(net, random(4, 9, 7))
    assert len(analysis.sites) == 1
    ours = Runner(None, analysis.lifted)
    for n, m in ((9, 7), (36, 7)):
        agrees(net, ours, scores_that_hide(n, m))
