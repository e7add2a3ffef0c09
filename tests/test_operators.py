"""Operators: closed forms, invariants, CPU kernels against float64 within the honest error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.operators import asap as asap_meaning
from asapc.operators import sinkhorn as meaning

ATTENTION = [1.0, 1.0, 0.0, 0.0]  # N * P
ops = torch.ops.asapc


def problem(
    shape: tuple[int, ...], *, spread: float = 1.0, masked: bool = False, biased: bool = False
) -> tuple[Any, ...]:
    """q, k, v, keep, bias for (B, H, N, M, D, E); the first example keeps a single key."""
    b, h, n, m, d, e = shape
    torch.manual_seed(b + 10 * n + 100 * m)
    q, k, v = torch.randn(b, h, n, d) * spread, torch.randn(b, h, m, d), torch.randn(b, h, m, e)
    keep = None
    if masked:
        keep = torch.rand(b, m) > 0.4
        keep[:1] = False
        keep[:1, 0] = True
        keep[2:3] = False  # an example without any key
    bias = torch.randn(h, n, m) if biased else None
    return q, k, v, keep, bias


def double(tensors: Sequence[Any]) -> list[Any]:
    return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]


SHAPES = {
    "tails": (3, 2, 17, 31, 8, 5),
    "one token": (2, 1, 1, 1, 4, 3),
    "one key": (2, 2, 5, 1, 4, 4),
    "one query": (3, 1, 1, 9, 4, 4),
    "large heads": (1, 3, 400, 380, 16, 8),
}


LOOPS = {"R": (1, True), "CR": (2, False), "RCR": (3, True), "C..C": (5, False), "R..C": (20, True)}


@pytest.mark.parametrize(("half_steps", "rows_first"), LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(
    ("spread", "masked"), [(1.0, True), (30.0, False)], ids=["linear domain, masked", "log domain"]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_cpu_kernel_is_within_the_honest_error(
    shape: tuple[int, ...], masked: bool, spread: float, rows_first: bool, half_steps: int
) -> None:
    tensors = problem(shape, spread=spread, masked=masked, biased=shape[2] % 2 == 1)
    q, k, v, keep, bias = tensors
    settings = (shape[4] ** -0.5, half_steps, rows_first, ATTENTION)
    exact = meaning.sinkhorn(*double(tensors), *settings)
    plain = meaning.sinkhorn(q, k, v, keep, bias, *settings)
    kernel = ops.sinkhorn(q, k, v, keep, bias, *settings)
    scale = max(1.0, float(exact.abs().max()))
    budget = 2 * float((plain - exact).abs().max()) + 1e-6 * scale
    assert float((kernel - exact).abs().max()) <= budget
    dense = ops.sinkhorn_attention(q, k, keep, bias, *settings)
    assert float((dense.double() @ v.double() - exact).abs().max()) <= budget + 1e-6 * scale
    wide = ops.sinkhorn(*double(tensors), *settings)
    assert float((wide - exact).abs().max()) <= 1e-9 * scale


def test_equal_tokens_attend_uniformly_and_a_strong_permutation_is_recovered() -> None:
    q, k = torch.ones(1, 2, 6, 4) * 0.3, torch.ones(1, 2, 6, 4) * 0.7
    dense = ops.sinkhorn_attention(q, k, None, None, 0.5, 9, True, ATTENTION)
    torch.testing.assert_close(dense, torch.full((1, 2, 6, 6), 1 / 6))
    order, q = torch.tensor([2, 0, 3, 1]), torch.zeros(1, 1, 4, 2)
    bias = (40.0 * torch.eye(4)[order])[None, None]
    dense = ops.sinkhorn_attention(q, q, None, bias, 1.0, 20, True, ATTENTION)
    torch.testing.assert_close(dense[0, 0], torch.eye(4)[order], atol=1e-6, rtol=0)


def test_points_on_a_line_are_matched_in_order() -> None:
    """At small epsilon the plan of the quadratic cost on a line is the sorted matching."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randperm(8, generator=generator).double() ** power / 4 for power in (1.0, 1.5))
    q, k = x[None, None, :, None], y[None, None, :, None]
    epsilon = 1e-3
    dense = ops.sinkhorn_attention(q, k, None, None, 1 / epsilon, 20000, True, ATTENTION)
    expected = torch.zeros(8, 8).double()
    expected[x.argsort(), y.argsort()] = 1
    assert float((dense[0, 0] - expected).abs().max()) < 0.05


@given(seed=st.integers(0, 10**6), half_steps=st.integers(1, 12), rows_first=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_last_side_is_exact(seed: int, half_steps: int, rows_first: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 1, 9, 4, generator=g)
    k = torch.randn(2, 1, 6, 4, generator=g)
    keep = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    plan = ops.sinkhorn_attention(q, k, keep, None, 0.5, half_steps, rows_first, [1.0, 0, 0, 0])
    if rows_first == (half_steps % 2 == 1):
        torch.testing.assert_close(plan.sum(-1), torch.full((2, 1, 9), 1 / 9))
    else:
        torch.testing.assert_close(plan.sum(-2), keep[:, None] / 6)
    assert float(plan[1, ..., 4:].abs().max()) == 0.0


DUALS = {
    "nothing": (3, False, False),
    "source alone": (0, True, False),
    "key alone": (0, False, True),
    "both": (1, True, True),
    "none at all": (0, False, False),
}


@pytest.mark.parametrize(
    ("module", "dense"), [(asap_meaning, False), (ops, True)], ids=["meaning", "registered map"]
)
@pytest.mark.parametrize(("c_transforms", "source", "key"), DUALS.values(), ids=DUALS)
def test_duals_that_do_not_fit_the_c_transforms_are_refused(
    c_transforms: int, source: bool, key: bool, module: Any, dense: bool
) -> None:
    q, k, v, _, _ = problem((1, 2, 5, 4, 3, 6))
    f = torch.zeros(1, 2, 5) if source else None
    g = torch.zeros(1, 2, 4) if key else None
    call = module.asap_attention if dense else module.asap
    values = () if dense else (v,)
    wanted = 1 + (c_transforms == 0)
    with pytest.raises(ValueError, match=f"{c_transforms} c-transforms start from {wanted} dual"):
        call(q, k, *values, None, None, f, g, 0.5, c_transforms, ATTENTION)


def test_two_duals_alone_are_the_plan_itself() -> None:
    """c_transforms = 0: A_ij = N exp(S_ij + f_i + g_j), no marginal repaired."""
    q, k, v, keep, bias = problem((2, 2, 5, 7, 3, 4), masked=True, biased=True)
    f, g = torch.randn(2, 2, 5), torch.randn(2, 2, 7)
    scores = 0.4 * torch.einsum("bhnd,bhmd->bhnm", q, k) + bias
    expected = 5 * torch.exp(scores + f[..., None] + g[:, :, None]) * keep[:, None, None]
    found = ops.asap_attention(q, k, keep, bias, f, g, 0.4, 0, ATTENTION)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ops.asap(q, k, v, keep, bias, f, g, 0.4, 0, ATTENTION), expected @ v)


def test_gradients_are_finite_where_keys_or_whole_examples_are_masked() -> None:
    q, k, v, keep, _ = problem((3, 2, 6, 6, 4, 4), masked=True)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    ops.sinkhorn(q, k, v, keep, None, 0.4, 6, True, ATTENTION).square().sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None and bool(tensor.grad.isfinite().all())
    assert float(q.grad.abs().max()) > 0
