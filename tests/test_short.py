"""Short sequences, within the honest error, and where a few calls on all heads take less than tiles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.operators import esp, lot, sinkhorn

ops = torch.ops.asapc
SHAPES = {
    "tails": (3, 2, 17, 11, 8, 5), "one query": (2, 1, 1, 9, 4, 3), "one key": (1, 3, 7, 1, 4, 4),
    "one token": (1, 1, 1, 1, 2, 2), "square": (2, 4, 16, 16, 8, 8),
}  # fmt: skip


def problem(shape: tuple[int, ...], spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    b, h, n, m, d, e = shape
    generator = torch.Generator().manual_seed(n + 10 * m)
    sizes = (b, h, n, d), (b, h, m, d), (b, h, m, e)
    q, k, v = (torch.randn(*size, generator=generator) for size in sizes)
    return q * spread, k, v


def honest(
    run: Any, meaning: Any, tensors: tuple[Tensor, ...], settings: tuple[Any, ...],
    rounding: float = 1e-12,
) -> None:  # fmt: skip
    exact = meaning(*(t.double() for t in tensors), *settings)
    scale = max(1.0, float(exact.abs().max()))
    budget = 2 * float((meaning(*tensors, *settings) - exact).abs().max()) + 1e-6 * scale
    assert float((run(*tensors, *settings) - exact).abs().max()) <= budget
    exactly = run(*(t.double() for t in tensors), *settings)
    assert float((exactly - exact).abs().max()) <= rounding * scale


@pytest.mark.parametrize("rows_first", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("half_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_few_half_steps(shape: tuple[int, ...], half_steps: int, rows_first: bool) -> None:
    q, k, v = problem(shape)
    loop = (None, None, 0.7, half_steps, rows_first, [1.5, 1.0, -1.0, 1.0])
    honest(ops.sinkhorn, sinkhorn.sinkhorn, (q, k, v), loop)
    honest(ops.sinkhorn_attention, sinkhorn.sinkhorn_attention, (q, k), loop)


def test_scores_that_overflow_exp_do_not_matter() -> None:
    q, k, v = problem((1, 2, 6, 6, 4, 4), spread=4000.0)
    loop = (None, None, 1.0, 3, True, [1.0, 1.0, 0.0, 0.0])
    honest(ops.sinkhorn, sinkhorn.sinkhorn, (q, k, v), loop, rounding=1e-11)  # of scores of 1e4


def test_nothing_at_all() -> None:
    q, k, v = problem((1, 2, 16, 16, 4, 4))
    factor = [1.0, 1.0, 0.0, 0.0]
    empty = ops.sinkhorn(q[:, :, :0], k, v, None, None, 0.5, 2, True, factor)
    none = ops.sinkhorn(q, k[:, :, :0], v[:, :, :0], None, None, 0.5, 2, True, factor)
    assert empty.shape == (1, 2, 0, 4) and none.shape == (1, 2, 16, 4) and not none.any()


def test_half_precision_and_gradients() -> None:
    q, k, v = (t.bfloat16() for t in problem((1, 2, 8, 8, 4, 4)))
    loop = (None, None, 0.5, 3, True, [1.0, 1.0, 0.0, 0.0])
    own = ops.sinkhorn(q, k, v, *loop)
    exact = sinkhorn.sinkhorn(q.double(), k.double(), v.double(), *loop)
    assert own.dtype == torch.bfloat16
    assert float((own.double() - exact).abs().max()) <= 2**-8 * float(exact.abs().max())
    numbers = [t.double().requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *t: ops.sinkhorn(*t, *loop), numbers, fast_mode=True)


@pytest.mark.parametrize("masked", [False, True], ids=["open", "masked"])
@pytest.mark.parametrize("shape", [(2, 2, 9, 9, 6, 4), (1, 2, 7, 12, 3, 5)], ids=["square", "cross"])
def test_slices_at_once(shape: tuple[int, ...], masked: bool) -> None:
    q, k, v = problem(shape, 1.0)
    keep = query_keep = None
    if masked:
        keep = torch.arange(shape[3]) < torch.tensor([[shape[3] - 2], [3]])[: shape[0]]
        query_keep = keep if shape[2] == shape[3] else None
        k, v = (t.masked_fill(~keep[:, None, :, None], math.nan) for t in (k, v))
    tau = torch.tensor([0.2, 1.0])
    omega = torch.rand(2, shape[4]) + 0.1
    settings = (keep, query_keep, None, tau, 0.1, False, True, 1.3, "interpolated", omega, 0, 1)
    honest(ops.esp_soft, esp.esp_soft, (q, k, v), settings)


def test_a_plan_too_large_to_stand_beside_others_is_formed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slices are formed together, the map is the same."""
    q, k, v = problem((2, 2, 9, 9, 6, 4), 1.0)
    settings = (None, None, None, torch.tensor([0.7]), 0.1, False, False, 1.0)
    expected = esp.esp_soft(q.double(), k.double(), v.double(), *settings)
    for entries in (0, 2 * 2 * 9 * 9, 4 * 2 * 2 * 9 * 9):  # one slice, two unevenly, four and two
        monkeypatch.setattr(esp, "ENTRIES", entries)
        found = esp.esp_soft(q.double(), k.double(), v.double(), *settings)
        torch.testing.assert_close(found, expected)


GLUED = [(1, True, 1, False), (3, True, 3, False), (2, False, 5, True), (4, True, 4, True)]


@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["by head", "interleaved"])
@pytest.mark.parametrize("steps", GLUED, ids=str)
def test_two_glued_plans(
    steps: tuple[int, bool, int, bool], interleaved: bool, weighed: bool
) -> None:
    q, k, v = problem((3, 2, 9, 7, 4, 5))
    generator = torch.Generator().manual_seed(1)
    sizes = (2, 3, 4), (2, 3), (2, 3)
    pivots, masses, omega = (torch.randn(*size, generator=generator) for size in sizes)
    glue = omega.exp() if weighed else None
    settings = (
        None, None, None, pivots, masses.softmax(-1), 0.6, 0.4, *steps, [1.5, 1.0, -1.0, 0.5],
        interleaved, glue,
    )  # fmt: skip
    honest(ops.lot, lot.lot, (q, k, v), settings)


def test_interleaved_masses_are_those_of_repeated_rows() -> None:
    """Head h of example b: row (b H + h) // B, as code has it that repeats each row for every example."""
    q, k, v = (t.double() for t in problem((3, 2, 9, 7, 4, 5)))
    generator = torch.Generator().manual_seed(1)
    pivots = torch.randn(2, 3, 4, generator=generator).double()
    masses = torch.randn(2, 3, generator=generator).double().softmax(-1)
    loops = (0.6, 0.4, 3, True, 3, False, [1.0, 1.0, 0.0, 0.0])
    found = ops.lot(q, k, v, None, None, None, pivots, masses, *loops, True)
    repeated = masses.repeat_interleave(3, dim=0)  # of all examples and heads in one axis
    merged = [t.flatten(0, 1)[None] for t in (q, k, v)]
    exact = lot.lot(*merged, None, None, None, pivots.repeat(3, 1, 1), repeated, *loops)
    torch.testing.assert_close(found, exact[0].unflatten(0, (3, 2)))


@pytest.mark.parametrize("steps", GLUED, ids=str)
@pytest.mark.parametrize("least", [1e-38, 1e-20, 0.0])
def test_a_pivot_with_hardly_any_mass(least: float, steps: tuple[int, bool, int, bool]) -> None:
    q, k, v = problem((1, 1, 6, 6, 4, 4))
    pivots, masses = torch.randn(1, 2, 4), torch.tensor([[1.0, least]])
    honest(
        ops.lot, lot.lot, (q, k, v), (None, None, None, pivots, masses, 0.5, 0.5, *steps, [1.0] * 4)
    )
