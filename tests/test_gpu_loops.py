"""Triton kernels of the loop and of its gradient against operators/ in float64; interpreted on a CPU.

One table of hostile inputs and one of loops. Every input goes through both half-steps and a loop by one
of the ways to run one, every other through a gradient; every loop goes through each way. A kernel may be
at most twice as wrong as the same formula in float32, and its rounding to the kernel's dtype.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from gpu_env import DEVICE
from torch import Tensor

pytest.importorskip("triton")

from asapc.kernels import dispatch
from asapc.kernels.gpu import backward, block, half_step, resident, sinkhorn, stored, tiles
from asapc.kernels.library import gradients
from asapc.kernels.loop import Loop, Tail
from asapc.operators import asap as asap_meaning
from asapc.operators import c_transforms
from asapc.operators import sinkhorn as meaning

SCALE = 0.4


class Case:
    """Inputs of one call: what the kernel gets, and the same numbers with masked keys emptied."""

    def __init__(
        self, shape: tuple[int, ...] = (2, 2, 18, 37, 16, 16), dtype: torch.dtype = torch.float32,
        masked: bool = False, bias: tuple[int, ...] | None = None, spread: float = 1.0,
        strided: bool = False,
    ) -> None:  # fmt: skip
        b, h, n, m, d, e = shape
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        def points(count: int, dim: int) -> Tensor:
            if strided:  # a slice of one projection, as models produce it, backwards in the features
                return draw(b, count, 3, h, dim)[:, :, 1].transpose(1, 2).flip(3).to(dtype)
            return draw(b, h, count, dim).to(dtype)

        self.q, self.k, self.v = points(n, d) * spread, points(m, d), points(m, e)
        if strided:
            self.q = self.q[:, :1].expand(b, h, n, d)
            self.k, self.v = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (self.k, self.v))
        self.keep = None
        if masked:  # the last example has no active key at all
            self.keep = torch.rand(b, m, generator=generator) > 0.3
            self.keep[:, 0] = True
            self.keep[-1] = b == 1
        self.bias = None if bias is None else draw(*bias, n, m).to(dtype)
        self.f, self.g = 3 * draw(b, h, n), 3 * draw(b, h, m)
        self.grad = draw(b, h, n, e).to(dtype)

    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """q, k, v, keep, bias on the device, NaN where nothing may be read."""
        k, v = self.k, self.v
        if self.keep is not None:
            hidden = ~self.keep[:, None, :, None]
            k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.nan)
        keep, bias = (None if t is None else t.to(DEVICE) for t in (self.keep, self.bias))
        return self.q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), keep, bias

    def dual(self, first: str) -> Tensor:
        """Where a loop starts whose first half-step is this one, NaN on masked keys."""
        if first == "column" or self.keep is None:
            return (self.f if first == "column" else self.g).to(DEVICE)
        return self.g.masked_fill(~self.keep[:, None], math.nan).to(DEVICE)

    def scores(self, dtype: torch.dtype, q: Tensor | None = None, k: Tensor | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.to(dtype)
        q, k = (own.to(dtype) if x is None else x for own, x in ((self.q, q), (self.k, k)))
        return meaning.score_matrix(q, k, self.keep, bias, SCALE)

    def factors(self) -> list[float]:
        """N P; divided by the active keys where there is a mask."""
        return [1.0, 1.0, 0.0, 0.0] if self.keep is None else [0.5, 0.0, 2.0, -1.0]


CASES: dict[str, dict[str, Any]] = {
    "tails": {"shape": (2, 2, 33, 70, 16, 16)},
    "half": {"dtype": torch.float16},
    "bfloat": {"dtype": torch.bfloat16},
    "masked": {"masked": True},
    "masked half": {"masked": True, "dtype": torch.float16, "bias": (2, 1)},
    "bias of heads, masked": {"bias": (1, 2), "masked": True},
    "bias of all, bfloat": {"bias": (), "dtype": torch.bfloat16},
    "strided": {"strided": True},
    "strided half, masked": {"strided": True, "dtype": torch.bfloat16, "masked": True},
    "one query": {"shape": (1, 2, 1, 20, 16, 16)},
    "one key, masked": {"shape": (2, 1, 20, 1, 16, 16), "masked": True},
    "one of each": {"shape": (1, 1, 1, 1, 1, 1)},
    "odd dims": {"shape": (1, 2, 17, 19, 5, 48)},
    "odd dims, half": {"shape": (1, 2, 17, 19, 48, 5), "dtype": torch.float16},
    "several tiles": {"shape": (1, 1, 65, 80, 72, 40)},
    "huge": {"spread": 600.0, "masked": True},
    "many keys, masked": {"shape": (1, 1, 17, 300, 16, 16), "masked": True, "dtype": torch.bfloat16},
}
LOOPS = {  # half-steps, first side, from a dual
    "R": (1, "row", True),
    "C": (1, "column", False),
    "RC from g": (2, "row", True),
    "CR": (2, "column", False),
    "RCR": (3, "row", False),
    "CRC from f": (3, "column", True),
    "CRCR from f": (4, "column", True),
    "RCRCR from g": (5, "row", True),
    "CRCRC": (5, "column", False),
    "RCRCRC": (6, "row", False),
    "nothing": (0, "row", True),
}


def in_one_launch(*given: Any) -> Tensor:
    """Where a row is closed, which that asks for."""
    closes_rows = given[-1].half_steps >= (1 if given[-1].first_side == "row" else 2)
    return (resident.resident_loop if closes_rows else sinkhorn.streaming_loop)(*given)


def with_its_matrix(*given: Any) -> Tensor:
    """Where a column is closed after a row."""
    least = 2 if given[-1].first_side == "row" else 3
    closes_both = given[-1].half_steps - given[-1].ends_on_rows >= least
    return (stored.stored_loop if closes_both else sinkhorn.streaming_loop)(*given)


RUNNERS = {"resident": in_one_launch, "stored": with_its_matrix, "streaming": sinkhorn.streaming_loop}


def assert_honest(own: Tensor, exact: Tensor, rough: Tensor, rounding: float) -> None:
    """rounding: what is allowed besides twice the formula's own error."""
    assert own.shape == exact.shape
    own = own.cpu().double()
    assert torch.equal(own.isinf(), exact.isinf()) and not bool(own.isnan().any())
    finite = exact.isfinite()
    if bool(finite.any()):
        honest = float((rough.double() - exact)[finite].abs().max())
        assert float((own - exact)[finite].abs().max()) <= 2 * honest + rounding


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As the kernels round to `dtype`; Triton's interpreter cuts bfloat16 off instead."""
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        tensor = (tensor.float().view(torch.int32) & -65536).view(torch.float32)
    return tensor.to(dtype)


def duals_of(case: Case, scores: Tensor, loop: Any, dual: Tensor | None) -> tuple[Tensor, Tensor]:
    half_steps, first, _ = loop
    f, g = meaning.initial_duals(scores, case.keep)
    if dual is not None and first == "column":
        f = dual
    elif dual is not None:  # not masked_fill(g + 0): the gradient of a masked key's dual is 0
        g = dual if case.keep is None else torch.where(case.keep[:, None], dual, g)
    return meaning.run_half_steps(scores, f, g, half_steps, first, case.keep)


def output(case: Case, loop: Any, dtype: torch.dtype) -> Tensor:
    """The formula's A v; in float32 as a half-precision product has it."""
    scores = case.scores(dtype)
    dual = (case.f if loop[1] == "column" else case.g).to(dtype) if loop[2] else None
    f, g = duals_of(case, scores, loop, dual)
    plan = meaning.attention_map(scores, f, g, case.factors(), case.keep)
    if dtype == torch.float64 or case.v.dtype == torch.float32:
        return plan @ case.v.to(dtype)
    largest = plan.amax(-1, keepdim=True).clamp(min=1e-30)
    product = rounded(plan / largest, case.v.dtype).float() @ case.v.float()
    return rounded(product * largest, case.v.dtype)


def reach_of(*summed: Tensor) -> float:
    """The largest sum of finite numbers, one of each."""
    return sum(float(t[t.isfinite()].abs().max()) if bool(t.isfinite().any()) else 0.0 for t in summed)


def scored(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None
) -> tuple[tiles.Scores, Tensor]:
    return tiles.Scores(q, k, keep, bias, SCALE), v


def assert_loop(case: Case, runner: Any, loop: Any) -> None:
    half_steps, first, started = loop
    exact, rough = (output(case, loop, dtype) for dtype in (torch.float64, torch.float32))
    dual = case.dual(first) if started else None
    own = runner(*scored(*case.given()), dual, Loop(SCALE, half_steps, first, case.factors()))
    assert own.dtype == case.v.dtype
    # The order in which a product is summed decides a last digit of a score; a far start has its own.
    reach = reach_of(case.scores(torch.float32), *([] if dual is None else [case.f, case.g]))
    rounding = 1e-6 * max(1.0, float(exact.abs().max())) + torch.finfo(torch.float32).eps * reach
    if case.v.dtype != torch.float32:  # weights lie otherwise between powers of two than the formula's
        rounding += torch.finfo(case.v.dtype).eps / 4 * exact.abs().max()
    assert_honest(own, exact, rough, float(rounding))


def gradients_of(case: Case, loop: Any, dtype: torch.dtype) -> list[Tensor]:
    """Of q, k, v and the start dual, by autograd."""
    q, k, v, dual = (
        x.to(dtype).detach().clone().requires_grad_()
        for x in (case.q, case.k, case.v, case.f if loop[1] == "column" else case.g)
    )
    scores = case.scores(dtype, q, k)
    f, g = duals_of(case, scores, loop, dual if loop[2] else None)
    out = meaning.attention_map(scores, f, g, case.factors(), case.keep) @ v
    wanted = [q, k, v, *([dual] if loop[2] else [])]
    return list(torch.autograd.grad(out, wanted, case.grad.to(out), materialize_grads=True))


# Plans and slopes are rounded to the inputs' precision; the interpreter cuts bfloat16 off.
STEPS = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def assert_gradients(case: Case, loop: Any) -> None:
    """Besides, exp(S + f + g) is no better than the float32 S, f and g it is of, and where a small
    gradient is what larger ones leave, it is no better than those."""
    q, k, v, keep, bias = case.given()
    half_steps, first, started = loop
    own = backward.sinkhorn_backward(
        case.grad.to(DEVICE), q, k, v, keep, bias, case.dual(first) if started else None,
        Loop(SCALE, half_steps, first, case.factors()), Tail(half_steps),
    )  # fmt: skip
    exact, rough = (gradients_of(case, loop, dtype) for dtype in (torch.float64, torch.float32))
    reach = reach_of(case.scores(torch.float32), case.f, case.g)
    scale = max(1.0, *(float(t.abs().max()) for t in exact))
    step = (STEPS[case.q.dtype] + 2.0**-23 * reach) * scale
    for mine, true, reference in zip(own[: len(exact)], exact, rough, strict=True):
        assert mine is not None
        assert_honest(mine, true, reference.to(mine.dtype), step)


STARTS = ((False, None), (True, 0.5), (True, None), (True, 500.0))


@pytest.mark.parametrize(("place", "name"), enumerate(CASES))
def test_half_steps(place: int, name: str) -> None:
    case = Case(**CASES[name])
    inputs, _ = scored(*case.given())
    for start, far in STARTS[place // 2 % 2 :: 2]:
        f, g = (case.dual(first) / math.log(2) if start else None for first in ("column", "row"))
        own = (half_step.close_rows(inputs, g), half_step.close_columns(inputs, f))
        if far is not None:  # from earlier duals, which may be anything
            early = [x + far * torch.arange(x.shape[2], device=x.device).sin() for x in own]
            own = (
                half_step.close_rows(inputs, g, early[0]),
                half_step.close_columns(inputs, f, early[1]),
            )
        results = []
        for dtype in (torch.float64, torch.float32):
            scores = case.scores(dtype)
            log_mu, log_nu = c_transforms.log_marginals(*scores.shape[2:], case.keep, scores)
            zero_f, zero_g = meaning.initial_duals(scores, case.keep)
            rows = c_transforms.close_rows(scores, zero_g + case.g.to(dtype) * start, log_mu)
            columns = c_transforms.close_columns(scores, zero_f + case.f.to(dtype) * start, log_nu)
            results.append((rows, columns))
        for in_log2, exact, rough in zip(own, *results, strict=True):
            assert in_log2.dtype == torch.float32
            mine = in_log2 * math.log(2)
            largest = float(exact[exact.isfinite()].abs().max())
            assert_honest(mine, exact, rough, 1e-6 * max(1.0, largest))


SAMPLED = list(zip(CASES, itertools.cycle(LOOPS.values()), itertools.cycle(RUNNERS)))


@pytest.mark.parametrize(("name", "loop", "runner"), SAMPLED)
def test_hostile_inputs(name: str, loop: Any, runner: str) -> None:
    assert_loop(Case(**CASES[name]), RUNNERS[runner], loop)


@pytest.mark.parametrize(("name", "loop", "_"), SAMPLED[:-1:2])  # which test_loops has of every loop
def test_gradients_of_hostile_inputs(name: str, loop: Any, _: str) -> None:
    assert_gradients(Case(**CASES[name]), loop if loop[0] else (3, "column", True))


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    case = Case((1, 2, 9, 17, 8, 8), masked=True)
    for runner in RUNNERS.values():
        assert_loop(case, runner, LOOPS[name])
    assert_gradients(case, LOOPS[name])


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(("name", "shape", "dtype"), [
    *((name, (2, 2, 33, 50, 16, 40), half) for name, half in zip([*LOOPS][:-1], itertools.cycle(HALVES))),
    *((name, (2, 1, 150, 197, 40, 64), torch.bfloat16) for name in ("R", "CRC from f", "RCRCRC")),
], ids=str)  # fmt: skip
def test_half_precision_in_one_launch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_loop(Case(shape, dtype, masked=True), in_one_launch, LOOPS[name])


def test_scores_that_one_scaling_cannot_hold() -> None:
    case = Case((1, 2, 33, 140, 16, 16), torch.bfloat16, spread=600.0)
    for name in ("RCRCR from g", "CRCRC"):
        assert_loop(case, in_one_launch, LOOPS[name])


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_key_that_a_bias_hides_from_all_queries(runner: str) -> None:
    """It keeps the dual 0, and attention 0; so does a query from which all keys are hidden."""
    case = Case((1, 2, 20, 24, 16, 16), bias=(1, 2))
    assert case.bias is not None
    case.bias[..., 3] = -math.inf
    case.bias[:, 1, 5] = -math.inf
    for half_steps, first in ((2, "row"), (3, "column")):
        assert_loop(case, RUNNERS[runner], (half_steps, first, False))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("loop", "apart"), [
    ((1, "row", True), 100.0), ((2, "row", True), math.inf), ((2, "column", True), 600.0),
    ((6, "row", True), math.inf), ((6, "row", True), 600.0),
])  # fmt: skip
def test_starts_that_float32_cannot_scale(loop: Any, apart: float, runner: str) -> None:
    """The tokens are in two parts, which a bias keeps apart, and one starts far below the other."""
    case = Case((1, 2, 16, 18, 8, 8), bias=())
    assert case.bias is not None
    case.bias[:8, 9:] = case.bias[8:, :9] = -math.inf
    case.f[..., :8] -= apart
    case.g[..., :9] -= apart
    assert_loop(case, RUNNERS[runner], loop)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("loop", [(3, "row", True), (2, "column", True)])
def test_a_start_without_mass_anywhere(loop: Any, runner: str) -> None:
    case = Case((1, 1, 16, 18, 8, 8))
    case.f.fill_(-math.inf)
    case.g.fill_(-math.inf)
    assert_loop(case, RUNNERS[runner], loop)


@pytest.mark.parametrize("runner", RUNNERS)
def test_scalings_that_grow_without_end(runner: str) -> None:
    """Two parts whose rows and columns cannot both be closed: 2^7 a pair of half-steps."""
    case = Case((1, 1, 13, 13, 8, 8), bias=())
    assert case.bias is not None
    case.bias[0, 12] = case.bias[1:, :12] = -math.inf
    assert_loop(case, RUNNERS[runner], (41, "row", False))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_nan_is_not_hidden(runner: str) -> None:
    case = Case((1, 1, 18, 37, 8, 8))
    case.q[:, :, 3, 2] = math.nan
    q, k, v, keep, bias = case.given()
    loop = Loop(SCALE, 6, "row", case.factors())
    assert bool(RUNNERS[runner](*scored(q, k, v, keep, bias), None, loop).isnan().all())


def test_each_way_where_it_is_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def noted(name: str, run: Any, *given: Any) -> Any:
        taken.append(name)
        return run(*given)

    ways = ((resident, "resident_loop"), (stored, "stored_loop"), (sinkhorn, "streaming_loop"))
    for module, name in ways:
        monkeypatch.setattr(module, name, partial(noted, name, getattr(module, name)))
    monkeypatch.setattr(block, "shape_for", lambda q, k, v: None)
    monkeypatch.setattr(resident, "fits", lambda q, k, v, loop: k.shape[2] <= 32 and loop.half_steps == 6)
    monkeypatch.setattr(stored, "MOST_BYTES", 5 * 48 * 4)
    for keys in (32, 33, 49):
        assert_loop(Case((1, 1, 5, keys, 8, 8)), sinkhorn.sinkhorn_loop, (6, "column", False))
    for keys in (5, 33):  # few half-steps
        assert_loop(Case((1, 1, 5, keys, 8, 8)), sinkhorn.sinkhorn_loop, (3, "row", False))
    assert taken == ["resident_loop", "stored_loop", *["streaming_loop"] * 3]


@pytest.mark.parametrize("shape", [(0, 2, 5, 7, 8, 8), (2, 2, 5, 0, 8, 8), (2, 2, 0, 7, 8, 8)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, ...]) -> None:
    case = Case(shape)
    q, k, v, *rest = case.given()
    loop = Loop(SCALE, 3, "row", case.factors())
    found = [run(*scored(q, k, v, *rest), None, loop) for run in RUNNERS.values()]
    grads = backward.sinkhorn_backward(torch.ones_like(q), q, k, v, *rest, None, loop, Tail(3))
    for own, like in zip((*found, *grads[:3]), (*[q] * len(found), q, k, v), strict=True):
        assert own is not None and own.shape == like.shape and not own.any()


def test_refusals_say_why() -> None:
    q, k, v, _, _ = Case((1, 1, 4, 4, 8, 8)).given()
    single = torch.zeros(4, 4, device=DEVICE)
    wide, double = torch.zeros(1, 1, 4, 257, device=DEVICE), single.double()
    assert sinkhorn.supported(q, k, v, None) is None
    assert sinkhorn.supported(q.half(), k, v.bfloat16(), single) is None
    for given, why in (
        ((q.double(), k, v, None), "q is torch.float64"), ((q, k, v, double), "bias is torch.float64"),
        ((wide, wide, v, None), "D is 257"), ((q, k, wide, None), "E is 257"),
        ((q[0], k, v, None), "4 axes"),
    ):  # fmt: skip
        assert why in str(sinkhorn.supported(*given))


CALLS: dict[str, tuple[str, Any]] = {
    "sinkhorn": ("sinkhorn", lambda keep, f, g: (keep, None, SCALE, 4, True, [1.0, 1.0, 0.0, 0.0])),
    "source": ("asap", lambda keep, f, g: (keep, None, f, None, SCALE, 3, [1.0, 1.0, 0.0, 0.0])),
    "target": ("asap", lambda keep, f, g: (keep, None, None, g, SCALE, 1, [1.0, 1.0, 0.0, 0.0])),
}


@pytest.mark.parametrize("name", CALLS)
def test_registered_gradients(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As if the tensors were on a GPU.  One example has no active key: nothing flows to its queries and
    keys, and v gets 1 / M."""
    asked: list[str] = []

    def backend(operator: str, *_: Any, **_names: Any) -> str:
        asked.append(operator)
        return "gpu"

    monkeypatch.setattr(dispatch, "attention_backend", backend)
    monkeypatch.setattr(gradients, "_on_cpu", lambda tensor: False)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 2, 9, 8, generator=generator) for _ in range(3)]
    given += [torch.randn(2, 2, 9, generator=generator) for _ in range(2)]
    weights = torch.randn(2, 2, 9, 8, generator=generator)
    keep = (torch.arange(9)[None] < torch.tensor([[5], [0]])).to(DEVICE)
    operator, tail = CALLS[name]
    reference = meaning.sinkhorn if operator == "sinkhorn" else asap_meaning.asap
    own_function, found = getattr(torch.ops.asapc, operator), []
    for function, dtype in ((own_function, torch.float32), (reference, torch.float64)):
        leaves = [t.to(DEVICE, dtype).requires_grad_() for t in given]
        out = function(*leaves[:3], *tail(keep, *leaves[3:]))
        used = [*leaves[:3], *{"sinkhorn": [], "source": [leaves[3]], "target": [leaves[4]]}[name]]
        found.append(torch.autograd.grad(out, used, weights.to(DEVICE, dtype)))
    for own, exact in zip(*found, strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=1e-4, atol=1e-5)
    assert operator in asked
