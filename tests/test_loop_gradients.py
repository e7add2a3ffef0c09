"""Gradients of the finite loop: the CPU's kernel and tails, against autograd of operators/ in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gpu_env  # before triton
import pytest
import torch
from torch import Tensor

import asapc.kernels.library
from asapc.ir import Side
from asapc.kernels import native
from asapc.kernels.cpu import gradients as cpu
from asapc.kernels.loop import Loop, Tail
from asapc.operators import sinkhorn as meaning

assert asapc.kernels.library
SHAPES = [(1, 1), (1, 9), (9, 1), (13, 13), (70, 57)]
Given = dict[str, Any]


def given(
    queries: int, keys: int, dtype: torch.dtype, first: Side, *, spread: float = 1.0,
    masked: bool = False, biased: bool = False, started: bool = False,
) -> Given:  # fmt: skip
    """Inputs of two examples with two heads; where masked, the second one's last key alone is active."""
    generator = torch.Generator().manual_seed(queries * 97 + keys)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    keep = None
    if masked:
        keep = torch.rand(2, keys, generator=generator) < 0.6
        keep[0, 0], keep[1] = True, torch.arange(keys) == keys - 1
    return {
        "q": randn(2, 2, queries, 5) * spread, "k": randn(2, 2, keys, 5), "v": randn(2, 2, keys, 3),
        "grad": randn(2, 2, queries, 3), "keep": keep,
        "bias": randn(1, 2, queries, keys) if biased else None,
        "dual": randn(2, 2, keys if first == "row" else queries) if started else None,
    }  # fmt: skip


def by_kernel(case: Given, loop: Loop, tail: Tail | None = None) -> list[Tensor]:
    q, keep, bias = meaning.open_empty(case["q"], case["keep"], case["bias"])
    v = meaning.clean_values(case["v"], keep)
    found = cpu.sinkhorn_backward(
        case["grad"], q, case["k"], v, keep, bias, case["dual"], loop, tail or Tail(loop.half_steps)
    )
    return [x for x in found[:4] if x is not None]


def by_autograd(case: Given, loop: Loop, dtype: torch.dtype, tail: int | None = None) -> list[Tensor]:
    """The meaning's gradients of q, k, v and, if there is one, the dual."""
    leaves = [case[name].to(dtype).clone().requires_grad_() for name in ("q", "k", "v")]
    bias = None if case["bias"] is None else case["bias"].to(dtype)
    scores = meaning.score_matrix(leaves[0], leaves[1], case["keep"], bias, loop.score_multiplier)
    f, g = meaning.initial_duals(scores, case["keep"])
    if case["dual"] is not None:
        dual = case["dual"].to(dtype).clone().requires_grad_()
        leaves.append(dual)
        masked = None if case["keep"] is None else ~case["keep"][:, None]
        if loop.first_side == "column":
            f = dual
        else:
            g = dual if masked is None else dual.masked_fill(masked, -math.inf)
    if tail is None:
        f, g = meaning.run_half_steps(scores, f, g, loop.half_steps, loop.first_side, case["keep"])
    else:
        f, g = meaning.finite_duals(scores, loop.half_steps, loop.first_side, case["keep"], tail)
    values = meaning.clean_values(leaves[2], case["keep"])
    out = meaning.attention_map(scores, f, g, loop.output_factor, case["keep"]) @ values
    found = torch.autograd.grad(out, leaves, case["grad"].to(dtype), allow_unused=True)
    return [torch.zeros_like(x) if y is None else y for x, y in zip(leaves, found, strict=True)]


def assert_honest(own: Sequence[Tensor], case: Given, loop: Loop, tail: int | None = None) -> None:
    """To rounding in float64; in float32 at most four times as wrong as autograd in float32, or as the
    rounding of one product. Entries that are what larger ones leave are no better than those."""
    exact = by_autograd(case, loop, torch.float64, tail)
    honest = by_autograd(case, loop, torch.float32, tail)
    size = max(float(x.abs().max()) for x in (*exact, case["grad"]))
    for number, (found, wanted, rough) in enumerate(zip(own, exact, honest, strict=True)):
        error = float((found.double() - wanted).abs().max())
        if found.dtype == torch.float64:
            # A last place of scores as large as these queries moves a key's gradient by as much.
            assert error <= 1e-12 * max(size, float(case["q"].abs().max())), number
            continue
        allowed = 4 * float((rough.double() - wanted).abs().max()) + 4e-6 * size
        assert error <= allowed, number


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("first", "half_steps"),
    [("row", 1), ("column", 1), ("row", 2), ("column", 3), ("row", 8), ("column", 8)],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_whole_loop(dtype: torch.dtype, first: Side, half_steps: int, shape: tuple[int, int]) -> None:
    for masked, biased, started in [(False, False, False), (True, True, False), (True, False, True)]:
        case = given(*shape, dtype, first, masked=masked, biased=biased, started=started)
        loop = Loop(0.5, half_steps, first, [2.0, 1.0, 0.0, 1.0])
        assert_honest(by_kernel(case, loop), case, loop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("first", ["row", "column"])
def test_rows_that_a_bias_hides(dtype: torch.dtype, first: Side) -> None:
    """As where padded queries are hidden: they have no gradient, and no part in the columns' sums."""
    some, all_but_one = slice(None, None, 3), slice(1, None)
    for spread, half_steps, started, rows in (
        (1.0, 5, False, some), (1.0, 80, False, all_but_one), (60.0, 4, False, some),
        (1.0, 6, True, some),
    ):  # fmt: skip
        case = given(13, 17, dtype, first, spread=spread, masked=True, biased=True, started=started)
        case["bias"][..., rows, :] = -math.inf
        loop = Loop(0.5, half_steps, first, [1.0, 1.0, 0.0, 0.0])
        assert_honest(by_kernel(case, loop), case, loop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("spread", [12.0, 60.0, 400.0])
@pytest.mark.parametrize("first", ["row", "column"])
def test_scores_that_one_format_cannot_hold(dtype: torch.dtype, spread: float, first: Side) -> None:
    """Spread over some 80, 400 and 2,600: the linear domain in float32 and float64, the log domain."""
    for masked in (False, True):
        case = given(13, 17, dtype, first, spread=spread, masked=masked)
        loop = Loop(0.5, 5, first, [1.0, 0.0, 1.0, 0.0])
        assert_honest(by_kernel(case, loop), case, loop)


def test_the_gradient_of_scores_beside_which_duals_keep_no_digit() -> None:
    """Where each row has its own key it is 0: in float32, duals of 1e5 would leave 0.01 of it."""
    loop = Loop(0.5, 5, "row", [1.0, 0.0, 1.0, 0.0])
    case = given(13, 17, torch.float32, "row", spread=1e4)
    exact = by_autograd(case, loop, torch.float64)
    for found, wanted in zip(by_kernel(case, loop), exact, strict=True):
        assert float((found.double() - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("first", "spread", "started"), [("row", 1.0, True), ("column", 12.0, False), ("row", 12.0, True)]
)
def test_a_head_that_is_not_kept(
    first: Side, spread: float, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a few rows, formed again at every visit: the same gradients."""
    monkeypatch.setattr(native, "RESIDENT_BYTES", 0)
    for biased, masked in [(False, False), (True, True)]:
        case = given(
            23, 17, torch.float64, first, spread=spread, masked=masked, biased=biased, started=started
        )
        loop = Loop(0.5, 6, first, [1.0, 0.0, 1.0, 0.0])
        assert_honest(by_kernel(case, loop), case, loop)


@pytest.mark.parametrize("first", ["row", "column"])
@pytest.mark.parametrize("spread", [1.0, 400.0], ids=["linear", "log"])
@pytest.mark.parametrize("tail", [0, 1, 2, 7, 99])
def test_a_tail(first: Side, spread: float, tail: int) -> None:
    """The gradient of the loop whose first half-steps are constants."""
    case = given(19, 16, torch.float64, first, spread=spread, masked=True)
    loop = Loop(0.5, 7, first, [1.0, 0.0, 1.0, 0.0])
    assert_honest(by_kernel(case, loop, Tail(tail)), case, loop, tail)


@pytest.mark.parametrize(
    ("first", "spread"), [("row", 0.3), ("column", 1.0), ("row", 4.0), ("column", 16.0)]
)
@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-6])
def test_a_certified_tail_leaves_out_no_more_than_it_says(
    first: Side, spread: float, tolerance: float
) -> None:
    """In L1 on the scores' gradient of every head, which a unit key matrix shows: dq is that gradient."""
    loop = Loop(1.0, 20, first, [1.0, 0.0, 0.0, 0.0])
    case = given(24, 24, torch.float64, first)
    generator = torch.Generator().manual_seed(3)
    case["q"] = spread * torch.randn(2, 2, 24, 24, generator=generator, dtype=torch.float64)
    case["k"] = torch.eye(24, dtype=torch.float64).expand(2, 2, 24, 24)
    full = by_kernel(case, loop)[0]
    found = cpu.sinkhorn_backward(
        case["grad"], case["q"], case["k"], case["v"], None, None, None, loop, Tail(20, tolerance)
    )
    scores = case["q"]
    f, g = meaning.finite_duals(scores, 20, first, None)
    plan = meaning.attention_map(scores, f, g, loop.output_factor, None)
    slopes = case["grad"] @ case["v"].transpose(2, 3)
    slopes = slopes - (plan * slopes).sum(-1, keepdim=True) / plan.sum(-1, keepdim=True)
    size = (plan * slopes).abs().sum((2, 3))
    left_out = (found.q - full).abs().sum((2, 3))
    assert bool((left_out <= tolerance * size * (1 + 1e-9)).all())
    assert bool((found.depth >= 1).all()) and bool((found.depth <= 20).all())
    if spread <= 1 and tolerance >= 1e-3 and native.missing() is None:
        assert int(found.depth.max()) < 20  # it is worth something on scores as models have them


ARGUMENTS = (None, None, 0.5, 9, True, [1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("dense", [False, True], ids=["values", "map"])
def test_the_operator_has_a_tail(dense: bool) -> None:
    case = given(21, 21, torch.float64, "row")
    operator = torch.ops.asapc.sinkhorn_attention if dense else torch.ops.asapc.sinkhorn
    reference = meaning.sinkhorn_attention if dense else meaning.sinkhorn
    count = 2 if dense else 3
    weights = torch.randn(operator(*(case[n] for n in "qkv"[:count]), *ARGUMENTS).shape).double()
    for tail in (None, 0, 1, 4, 50):
        found = []
        for function in (operator, reference):
            leaves = [case[name].clone().requires_grad_() for name in "qkv"[:count]]
            out = function(*leaves, *ARGUMENTS, tail)
            found.append((out, *torch.autograd.grad(out, leaves, weights)))
        for own, exact in zip(*found, strict=True):
            torch.testing.assert_close(own, exact, rtol=1e-10, atol=1e-12)


# The GPU's kernels, in the interpreter where there is no GPU


@pytest.mark.parametrize(
    ("first", "tail"),
    [("row", Tail(0)), ("column", Tail(3)), ("column", Tail(6, 1e-2)), ("row", Tail(6, 1e-9))],
    ids=str,
)  # fmt: skip
def test_tails_on_the_gpu(first: Side, tail: Tail) -> None:
    pytest.importorskip("triton")
    from asapc.kernels.gpu import backward

    case = {k: None if v is None else v.to(gpu_env.DEVICE) for k, v in given(
        19, 16, torch.float32, first, masked=True, spread=0.5).items()}  # fmt: skip
    loop = Loop(0.5, 6, first, [1.0, 0.0, 0.0, 1.0])
    arguments = [case[name] for name in ("grad", "q", "k", "v", "keep", "bias", "dual")]
    arguments[3] = meaning.clean_values(case["v"], case["keep"])
    found = backward.sinkhorn_backward(*arguments, loop, tail)
    depth = int(found[4][0, 0])
    assert bool((found[4] == depth).all())
    arguments = [None if x is None else x.cpu() for x in arguments]
    by_pairs = int(cpu.sinkhorn_backward(*arguments, loop, tail).depth.max())
    # The CPU looks after every pair of half-steps, and without the engine not at all.
    assert depth <= by_pairs <= depth + 1 or native.missing() is not None
    same = cpu.sinkhorn_backward(*arguments, loop, Tail(depth))
    for own, exact in zip(found[:3], same[:3], strict=True):
        torch.testing.assert_close(own.cpu(), exact, rtol=1e-4, atol=2e-5)
