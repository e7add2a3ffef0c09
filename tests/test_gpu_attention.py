"""Triton kernels of the loop against operators/ in float64; without a GPU they run interpreted."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from gpu_env import DEVICE
from torch import Tensor

triton = pytest.importorskip("triton")

from asapc.kernels.gpu import apply, half_step, resident, sinkhorn  # noqa: E402
from asapc.kernels.loop import Loop  # noqa: E402
from asapc.kernels.thresholds import Thresholds, using  # noqa: E402
from asapc.operators import c_transforms  # noqa: E402
from asapc.operators import sinkhorn as meaning  # noqa: E402

SCALE = 0.4


class Case:
    """Inputs of one call: what the kernel gets, and the same numbers with masked keys emptied."""

    def __init__(
        self,
        shape: tuple[int, ...] = (2, 2, 33, 70, 16, 16),
        dtype: torch.dtype = torch.float32,
        masked: bool = False,
        bias: tuple[int, ...] | None = None,
        spread: float = 1.0,
        strided: bool = False,
        seed: int = 0,
    ) -> None:
        b, h, n, m, d, e = shape
        generator = torch.Generator().manual_seed(seed)

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

    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """q, k, v, keep, bias on the device, NaN where nothing may be read."""
        k, v = self.k, self.v
        if self.keep is not None:
            hidden = ~self.keep[:, None, :, None]
            k, v = k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.nan)
        keep, bias = (None if t is None else t.to(DEVICE) for t in (self.keep, self.bias))
        return self.q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), keep, bias

    def dual(self, side: str) -> Tensor:
        """A start dual, NaN on masked keys."""
        if side == "source" or self.keep is None:
            return (self.f if side == "source" else self.g).to(DEVICE)
        return self.g.masked_fill(~self.keep[:, None], math.nan).to(DEVICE)

    def scores(self, dtype: torch.dtype) -> Tensor:
        bias = None if self.bias is None else self.bias.to(dtype)
        return meaning.score_matrix(self.q.to(dtype), self.k.to(dtype), self.keep, bias, SCALE)

    def starts(self, dtype: torch.dtype, source: bool, target: bool) -> tuple[Tensor, Tensor]:
        """f and g in `dtype`, zero where not asked for, -inf on masked keys."""
        f, g = meaning.initial_duals(self.scores(dtype), self.keep)
        return f + self.f.to(dtype) * source, g + self.g.to(dtype) * target


CASES: dict[str, dict[str, Any]] = {
    "tails": {},
    "half": {"dtype": torch.float16},
    "bfloat": {"dtype": torch.bfloat16},
    "masked": {"masked": True},
    "masked half": {"masked": True, "dtype": torch.float16, "bias": (2, 1)},
    "bias of examples": {"bias": (2, 1)},
    "bias of heads, masked": {"bias": (1, 2), "masked": True},
    "bias of all, bfloat": {"bias": (), "dtype": torch.bfloat16},
    "strided": {"strided": True},
    "strided half, masked": {"strided": True, "dtype": torch.bfloat16, "masked": True},
    "one query": {"shape": (1, 2, 1, 20, 16, 16)},
    "one key": {"shape": (1, 2, 20, 1, 16, 16)},
    "one key, masked": {"shape": (2, 1, 20, 1, 16, 16), "masked": True},
    "one of each": {"shape": (1, 1, 1, 1, 1, 1)},
    "odd dims": {"shape": (1, 2, 17, 19, 5, 48)},
    "odd dims, half": {"shape": (1, 2, 17, 19, 48, 5), "dtype": torch.float16},
    "several tiles": {"shape": (1, 1, 65, 80, 72, 40)},
    "huge": {"spread": 600.0, "masked": True},
}


def largest_score(case: Case) -> float:
    scores = case.scores(torch.float64)
    return float(scores[scores.isfinite()].abs().max())


def assert_honest(own: Tensor, exact: Tensor, rough: Tensor, largest: float = 0.0) -> None:
    """At most twice as wrong as the meaning in float32, rounded to the kernel's own dtype.

    largest: score; the order in which a product is summed decides a last digit of it, and the meaning's
    own may be lucky.
    """
    assert own.shape == exact.shape
    own = own.cpu().double()
    assert torch.equal(own.isinf(), exact.isinf()) and not bool(own.isnan().any())
    finite = exact.isfinite()
    if not bool(finite.any()):
        return
    honest = float((rough.double() - exact)[finite].abs().max())
    rounding = 1e-6 * max(1.0, float(exact[finite].abs().max()))
    rounding += torch.finfo(torch.float32).eps * largest
    assert float((own - exact)[finite].abs().max()) <= 2 * honest + rounding


@pytest.mark.parametrize("start", [False, True], ids=["from zero", "from a dual"])
@pytest.mark.parametrize("name", CASES)
def test_half_steps(name: str, start: bool) -> None:
    case = Case(**CASES[name])
    q, k, _, keep, bias = case.given()
    own_f = half_step.close_rows(q, k, keep, bias, case.dual("target") if start else None, SCALE)
    own_g = half_step.close_columns(q, k, keep, bias, case.dual("source") if start else None, SCALE)
    results = []
    for dtype in (torch.float64, torch.float32):
        scores = case.scores(dtype)
        log_mu, log_nu = c_transforms.log_marginals(*scores.shape[2:], case.keep, scores)
        f, g = case.starts(dtype, start, start)
        rows = c_transforms.close_rows(scores, g, log_mu)
        columns = c_transforms.close_columns(scores, f, log_nu)
        results.append((rows, columns))
    assert own_f.dtype == own_g.dtype == torch.float32
    assert_honest(own_f, results[0][0], results[1][0])
    assert_honest(own_g, results[0][1], results[1][1])


@pytest.mark.parametrize("shape", [(0, 2, 5, 7, 8, 8), (2, 0, 5, 7, 8, 8), (1, 2, 0, 7, 8, 8)])
def test_half_steps_of_nothing(shape: tuple[int, ...]) -> None:
    q, k, _, keep, bias = Case(shape).given()
    assert half_step.close_rows(q, k, keep, bias, None, SCALE).shape == q.shape[:3]


def factors(case: Case) -> list[float]:
    """N P; divided by the active keys where there is a mask."""
    return [1.0, 1.0, 0.0, 0.0] if case.keep is None else [0.5, 0.0, 2.0, -1.0]


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As the kernels round to `dtype`; Triton's interpreter cuts bfloat16 off instead."""
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        tensor = (tensor.float().view(torch.int32) & -65536).view(torch.float32)
    return tensor.to(dtype)


def plan_times_v(case: Case, f: Tensor, g: Tensor) -> Tensor:
    """The meaning's output from f and g; in float32 as a half-precision product has it."""
    plan = meaning.attention_map(case.scores(f.dtype), f, g, factors(case), case.keep)
    if f.dtype == torch.float64 or case.v.dtype == torch.float32:
        return plan @ case.v.to(f.dtype)
    largest = plan.amax(-1, keepdim=True).clamp(min=1e-30)
    return rounded(
        (rounded(plan / largest, case.v.dtype).float() @ case.v.float()) * largest, case.v.dtype
    )


@pytest.mark.parametrize("closes", [True, False], ids=["closes rows", "given f"])
@pytest.mark.parametrize("name", CASES)
def test_attend(name: str, closes: bool) -> None:
    case = Case(**CASES[name])
    q, k, v, keep, bias = case.given()
    results = []
    f, g = None, case.dual("target")
    if not closes:  # duals of a loop's end: the plan they give has columns of mass 1 / M
        f = case.dual("source")
        g = half_step.close_columns(q, k, keep, bias, f, SCALE)
    for dtype in (torch.float64, torch.float32):
        scores = case.scores(dtype)
        own_f, own_g = case.starts(dtype, True, True)
        first = "row" if closes else "column"
        own_f, own_g = meaning.run_half_steps(scores, own_f, own_g, 1, first, case.keep)
        results.append(plan_times_v(case, own_f, own_g))
    own = apply.attend(q, k, v, keep, bias, f, g, SCALE, factors(case))
    assert own.dtype == v.dtype
    assert_honest(own, *results, largest_score(case))


LOOPS = {  # half-steps, first side, from a dual
    "R": (1, "row", True),
    "C": (1, "column", False),
    "RC from g": (2, "row", True),
    "CR": (2, "column", False),
    "RCR": (3, "row", False),
    "CRC from f": (3, "column", True),
    "RCRC": (4, "row", False),
    "CRCR from f": (4, "column", True),
    "RCRCR from g": (5, "row", True),
    "CRCRC": (5, "column", False),
    "RCRCRC": (6, "row", False),
    "nothing": (0, "row", True),
}


def assert_loop(case: Case, runner: Any, half_steps: int, first: Any, start: bool) -> None:
    results = []
    for dtype in (torch.float64, torch.float32):
        f, g = case.starts(dtype, start and first == "column", start and first == "row")
        f, g = meaning.run_half_steps(case.scores(dtype), f, g, half_steps, first, case.keep)
        results.append(plan_times_v(case, f, g))
    dual = case.dual("target" if first == "row" else "source") if start else None
    own = runner(*case.given(), dual, Loop(SCALE, half_steps, first, factors(case)))
    assert own.dtype == case.v.dtype
    assert_honest(own, *results, largest_score(case))


RUNNERS = {
    "resident": resident.resident_loop, "sweeping": sinkhorn.sweeping_loop,
    "streaming": sinkhorn.streaming_loop,
}  # fmt: skip


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, runner: str) -> None:
    assert_loop(Case((1, 2, 20, 17, 8, 8), masked=True), RUNNERS[runner], *LOOPS[name])


@pytest.mark.parametrize("name", CASES)
def test_resident_loop_on_hostile_inputs(name: str) -> None:
    assert_loop(Case(**CASES[name]), resident.resident_loop, 3, "row", False)
    assert_loop(Case(**CASES[name]), resident.resident_loop, 3, "column", True)


@pytest.mark.parametrize("name", CASES)
def test_sweeping_loop_on_hostile_inputs(name: str) -> None:
    assert_loop(Case(**CASES[name]), sinkhorn.sweeping_loop, 3, "row", True)
    assert_loop(Case(**CASES[name]), sinkhorn.sweeping_loop, 3, "column", False)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_key_that_a_bias_hides_from_all_queries(runner: str) -> None:
    """It keeps the dual 0, and attention 0; so does a query from which all keys are hidden."""
    case = Case((1, 2, 20, 24, 16, 16), bias=(1, 2))
    assert case.bias is not None
    case.bias[..., 3] = -math.inf
    case.bias[:, 1, 5] = -math.inf
    for half_steps, first in ((2, "row"), (3, "row"), (3, "column")):
        assert_loop(case, RUNNERS[runner], half_steps, first, False)


def test_a_sweep_over_several_stripes() -> None:
    """Stripes of 16 queries, the last one not full, and columns that are joined in several programs."""
    case = Case((1, 2, 70, 600, 24, 8), masked=True)
    assert_loop(case, sinkhorn.sweeping_loop, 4, "row", False)


@pytest.mark.parametrize("name", ["strided half, masked", "bias of heads, masked", "huge", "one key"])
def test_streaming_loop_on_hostile_inputs(name: str) -> None:
    assert_loop(Case(**CASES[name]), sinkhorn.streaming_loop, 3, "column", True)


def test_longer_heads_are_swept_and_then_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def noted(name: str, run: Any, *given: Any) -> Any:
        taken.append(name)
        return run(*given)

    for name in ("resident_loop", "sweeping_loop", "streaming_loop"):
        run = getattr(sinkhorn, name)
        monkeypatch.setattr(sinkhorn, name, partial(noted, name, run))
    limits = Thresholds(resident_tokens=20, sweep_tokens=40)
    for keys in (20, 21, 40, 41):
        with using(limits):
            assert_loop(Case((1, 1, 5, keys, 8, 8)), sinkhorn.sinkhorn_loop, 2, "column", False)
    assert taken == ["resident_loop", "sweeping_loop", "sweeping_loop", "streaming_loop"]


@pytest.mark.parametrize("shape", [(0, 2, 5, 7, 8, 8), (2, 2, 5, 0, 8, 8), (2, 2, 0, 7, 8, 8)], ids=str)
@pytest.mark.parametrize("runner", RUNNERS)
def test_loops_of_nothing(runner: str, shape: tuple[int, ...]) -> None:
    case = Case(shape)
    for half_steps in (2, 3):
        loop = Loop(SCALE, half_steps, "row", factors(case))
        out = RUNNERS[runner](*case.given(), None, loop)
        assert out.shape == case.q.shape[:3] + case.v.shape[3:]
        assert float(out.abs().sum()) == 0.0


def test_refusals_say_why() -> None:
    q, k, v, _, _ = Case((1, 1, 4, 4, 8, 8)).given()
    assert sinkhorn.supported(q, k, v, None) is None
    assert sinkhorn.supported(q.half(), k, v.bfloat16(), torch.zeros(4, 4)) is None
    assert "q is torch.float64" in str(sinkhorn.supported(q.double(), k, v, None))
    assert "bias is torch.float64" in str(sinkhorn.supported(q, k, v, torch.zeros(4, 4).double()))
    wide = torch.zeros(1, 1, 4, 257)
    assert "D is 257" in str(sinkhorn.supported(wide, wide, v, None))
    assert "E is 257" in str(sinkhorn.supported(q, k, wide, None))
    assert "4 axes" in str(sinkhorn.supported(q[0], k, v, None))
