"""Loops with a constant in their divisions, against the plainest code that has one."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from torch import Tensor

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.ir import Stabiliser
from asapc.operators.sinkhorn import sinkhorn_attention

FACTOR = [1.0, 1.0, 0.0, 0.0]


def tensors(scale: float, m: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64) for n in (6, m, m))
    keep = torch.arange(m) < torch.tensor([[m], [2]])
    return scale * q, k, v, keep


def divided(total: Tensor, kind: str, constant: float) -> Tensor:
    return total + constant if kind == "add" else total.clamp(min=constant)


def by_hand(scores: Tensor, form: str, kind: str, constant: float, half_steps: int) -> Tensor:
    """Rows first, unit masses, as somebody would write it."""
    if form == "plan":
        plan = scores.softmax(-1)
        for step in range(1, half_steps):
            plan = plan / divided(plan.sum(-2 if step % 2 else -1, keepdim=True), kind, constant)
        return plan
    kernel = scores.exp()
    b = torch.ones_like(kernel[..., :1, :])
    for step in range(half_steps):
        if step % 2 == 0:
            a = 1 / divided((kernel * b).sum(-1, keepdim=True), kind, constant)
        else:
            b = 1 / divided((kernel * a).sum(-2, keepdim=True), kind, constant)
    return a * kernel * b


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "masked"])
@pytest.mark.parametrize("half_steps", [1, 2, 5, 40])
@pytest.mark.parametrize("kind", ["add", "clamp"])
@pytest.mark.parametrize("form", ["plan", "scaling"])
def test_the_operator_is_the_loop_that_somebody_wrote(
    form: str, kind: str, half_steps: int, masked: bool, scale: float
) -> None:
    q, k, v, keep = tensors(scale)
    own = Stabiliser.of(form, kind, 1e-8, "softmax" if form == "plan" else "plain", False, False)
    scores = 0.5 * q @ k.transpose(-1, -2)
    if masked:
        scores = scores.masked_fill(~keep[:, None, None, :], -torch.inf)
    expected = by_hand(scores, form, kind, 1e-8, half_steps)
    settings = (0.5, half_steps, True, *astuple(own), FACTOR)
    kept = keep if masked else None
    dense = torch.ops.asapc.stabilised_sinkhorn_attention(q, k, kept, None, *settings)
    assert float((dense - expected).abs().max() / expected.abs().max()) < 1e-12
    applied = torch.ops.asapc.stabilised_sinkhorn(q, k, v, kept, None, *settings)
    assert float((applied - expected @ v).abs().max() / expected.abs().max()) < 1e-11


def test_a_constant_too_small_to_be_seen_is_the_plain_loop() -> None:
    q, k, _, keep = tensors(0.5, m=9)
    own = Stabiliser("scaling", "add", 1e-300, shares=True)
    args = (q, k, keep, None, 0.5, 9, False)
    dense = torch.ops.asapc.stabilised_sinkhorn_attention(*args, *astuple(own), FACTOR)
    assert float((dense - sinkhorn_attention(*args, FACTOR)).abs().max()) < 1e-13


def test_what_a_file_may_not_say() -> None:
    constants = (("plan", "add", 0.0), ("plan", "add", -1.0))
    for own in (("map", "add", 1e-6), ("plan", "multiply", 1e-6), *constants):
        with pytest.raises(ValueError, match="must be"):
            Stabiliser.of(*own, "plain", False, False)
