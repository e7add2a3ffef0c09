"""The loop on a band: the operator against closed forms and float64, and the layers that become one."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import banded_nets as nets
import pytest
import torch
from analyses import analysed, ran, random
from torch import Tensor, nn

import asapc
import asapc.kernels.library
from asapc.errors import InputError
from asapc.ir import OutputFactor
from asapc.kernels import dispatch, native
from asapc.kernels.library.gradients import depths
from asapc.operators import banded as reference
from asapc.operators.banded import BandedConvention
from asapc.operators.catalogue import convention_from_json
from asapc.passes.analyse import Analysis
from asapc.passes.capture import capture
from asapc.passes.match import match
from asapc.report.tables import convention_text

op, dense = torch.ops.asapc.banded_sinkhorn, torch.ops.asapc.banded_sinkhorn_attention
UNIT = [1.0, 1.0, 0.0, 0.0]


def problem(b: int, h: int, n: int, m: int, spread: float = 1.0) -> tuple[Tensor, ...]:
    return spread * random(b, h, n, 8), random(b, h, m, 8, seed=1), random(b, h, m, 3, seed=2)


# The operator


@pytest.mark.parametrize("rows_first", [True, False], ids=["rows", "columns"])
def test_a_window_of_everything_is_the_loop_itself(rows_first: bool) -> None:
    q, k, v = problem(2, 2, 70, 70)
    loop = (0.3, 6, rows_first, [1.0, 0.0, 1.0, 0.0])
    expected = torch.ops.asapc.sinkhorn(q, k, v, None, None, *loop)
    assert torch.allclose(op(q, k, v, None, *loop, -69, 69), expected, atol=1e-5)
    assert torch.allclose(op(q, k, v, None, *loop, -(2**40), 2**40), expected, atol=1e-5)


def test_equal_scores_of_one_half_step_are_means_of_windows() -> None:
    q, k, v = problem(1, 1, 37, 37)
    found = op(0 * q, k, v, None, 1.0, 1, True, UNIT, -3, 2)
    expected = torch.stack([v[:, :, max(0, i - 3) : i + 3].mean(2) for i in range(37)], 2)
    assert torch.allclose(found, expected, atol=1e-6)


BANDS = [(0, 0), (-2, 2), (-5, 0), (0, 9), (-20, 31), (3, 5), (-400, 400), (9, 4), (300, 310)]
LOOPS = [(1, False), (2, True), (5, False)]
SIZES = {
    "one": (1, 1), "few": (5, 5), "tail": (33, 33), "blocks": (150, 150), "cross": (60, 71),
    "tall": (71, 20),
}  # fmt: skip


def keeps(batch: int, keys: int, masked: bool) -> Tensor | None:
    """Padding longer than windows, and holes; an example without keys."""
    if not masked:
        return None
    keep = torch.ones(batch, keys, dtype=torch.bool)
    keep[0, (keys + 1) // 2 :], keep[1, 1::3], keep[2] = False, False, False
    return keep


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("size", "spread"), [*zip(SIZES.values(), (1.0, 8.0, 60.0) * 2, strict=True)], ids=SIZES
)
def test_against_float64(size: tuple[int, int], spread: float, masked: bool) -> None:
    """At most twice as wrong as the reference in its dtype, worst against worst; exact in float64."""
    q, k, v = problem(3, 2, *size, spread=spread)
    keep = keeps(3, size[1], masked)
    if keep is not None:  # what is masked may hold anything
        k, v = (x.masked_fill(~keep[:, None, :, None], math.nan) for x in (k, v))
    ours = theirs = exactly = 0.0
    for (low, high), (half_steps, rows_first) in itertools.product(BANDS, LOOPS):
        rest = (keep, 0.35, half_steps, rows_first, [1.0, 1.0, 0.0, 0.0], low, high)
        exact = reference.banded_sinkhorn(q.double(), k.double(), v.double(), *rest)
        plan = reference.banded_sinkhorn_attention(q.double(), k.double(), *rest)
        assert bool(exact.isfinite().all())
        for run, found in ((op, exact), (dense, plan)):
            tensors = (q, k, v) if run is op else (q, k)
            meaning = reference.banded_sinkhorn if run is op else reference.banded_sinkhorn_attention
            ours = max(ours, float((run(*tensors, *rest) - found).abs().max()))
            theirs = max(theirs, float((meaning(*tensors, *rest) - found).abs().max()))
            apart = run(*(x.double() for x in tensors), *rest) - found
            exactly = max(exactly, float(apart.abs().max()))
    # Scores are sums in another order: their rounding is another draw.
    largest = 0.35 * float((q @ k.nan_to_num().transpose(-1, -2)).abs().max())
    assert ours <= 2 * theirs + 1e-6 + largest * 2**-24 and exactly <= 1e-10


def test_scalings_that_spread_along_a_sequence_leave_the_linear_domain() -> None:
    """In windows that end at the query only one permutation has mass: scalings run apart with every
    half-step, though no row of scores spans more than 30."""
    n = 150
    q, k, v = torch.ones(1, 2, n, 1), random(1, 2, n, 1).clamp(-1, 1), random(1, 2, n, 3)
    k[:, 0] *= 0.01
    rest = (None, 15.0, 1000, True, UNIT, -9, 0)
    found = op(q, k, v, *rest)
    exact = reference.banded_sinkhorn(q.double(), k.double(), v.double(), *rest)
    plain = reference.banded_sinkhorn(q, k, v, *rest)
    assert float((found - exact).abs().max()) <= 2 * float((plain - exact).abs().max()) + 1e-6


def test_drawn_problems_from_smooth_to_sharp() -> None:
    """Widths that fill no register, windows beside the keys, sums that leave float32's range."""
    for seed in range(60):
        drawn = torch.Generator().manual_seed(seed)
        n, m, d, e, t = (int(torch.randint(1, most, (), generator=drawn)) for most in (90, 90, 20, 40, 7))
        low, high = sorted(torch.randint(-30, 30, (2,), generator=drawn).tolist())
        q, k, v = random(2, 2, n, d, seed=seed), random(2, 2, m, d, seed=-seed), random(2, 2, m, e)
        q = q * 10.0 ** float(3 * torch.rand((), generator=drawn))
        rest = (None, 0.35, t, bool(seed % 2), UNIT, low, high)
        exact = reference.banded_sinkhorn(q.double(), k.double(), v.double(), *rest)
        scores = 0.35 * float((q @ k.transpose(-1, -2)).abs().max())
        assert float((op(q, k, v, *rest) - exact).abs().max()) <= 1e-5 + scores * 2**-20
        doubles = (x.double() for x in (q, k, v))
        assert float((op(*doubles, *rest) - exact).abs().max()) <= 1e-11 * (1 + scores)


@pytest.mark.skipif(native.missing() is not None, reason="the reference forms N x M scores")
@pytest.mark.parametrize("spread", [1.0, 300.0], ids=["linear domain", "log domain"])
def test_memory_is_linear_in_the_tokens(spread: float) -> None:
    """N x M scores would take 40 GB; what a query sees far from the others is what it sees here."""
    n, low, high = 100_000, -20, 20
    q, k, v = problem(1, 1, n, n, spread=spread)
    rest = (None, 0.3, 2, False, [1.0, 1.0, 0.0, 0.0], low, high)
    few = [x[:, :, :200] for x in (q, k, v)]
    torch.testing.assert_close(op(q, k, v, *rest)[:, :, :100], op(*few, *rest)[:, :, :100])
    every, some = gradients(op, (q, k, v), rest), gradients(op, few, rest)
    for long, short in zip(every, some, strict=True):
        torch.testing.assert_close(
            long[:, :, :80], short[:, :, :80], rtol=0, atol=1e-3 * float(short.abs().max())
        )


def gradients(run: Any, tensors: Sequence[Tensor], rest: Sequence[Any]) -> list[Tensor]:
    """Of q, k and v, for the same draw of the output's gradient at every position."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = run(*leaves, *rest)
    grad = drawn_gradient(*out.shape[:2], out.shape[3])[:, :, : out.shape[2]].to(out.dtype)
    return list(torch.autograd.grad(out, leaves, grad))


@functools.cache
def drawn_gradient(b: int, h: int, e: int) -> Tensor:
    return random(b, h, 100_000, e, seed=5)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_those_of_the_reference(name: str, masked: bool) -> None:
    """Of the whole loop and of tails, from smooth to sharp, wherever the window lies."""
    keep = keeps(3, SIZES[name][1], masked)
    every = [*itertools.product((1.0, 60.0), (False, True), LOOPS, BANDS)]
    for spread, of_tail, (half_steps, rows_first), (low, high) in every[masked::4]:
        tail = half_steps - 1 if of_tail else None
        q, k, v = (x.double() for x in problem(3, 2, *SIZES[name], spread=spread))
        rest = (keep, 0.35, half_steps, rows_first, [1.0, 1.0, 0.0, 1.0], low, high, tail)
        exact = gradients(reference.banded_sinkhorn, (q, k, v), rest)
        assert all(bool(x.isfinite().all()) for x in exact)
        largest = max(float(x.abs().max()) for x in exact)
        for ours, theirs in zip(gradients(op, (q, k, v), rest), exact, strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-11 * (1 + largest) * (1 + spread)


@pytest.mark.parametrize("spread", [0.3, 4.0, 60.0])
def test_gradients_in_float32_and_certified_tails(spread: float) -> None:
    q, k, v = problem(2, 2, 60, 60, spread=spread)
    rest = (None, 0.35, 12, True, UNIT, -40, 30)
    doubles = [x.double() for x in (q, k, v)]
    exact = gradients(reference.banded_sinkhorn, doubles, rest)
    rough = gradients(reference.banded_sinkhorn, (q, k, v), rest)
    with depths() as passed:
        short = gradients(op, doubles, (*rest, None, 1e-3))
    depth, scores = int(passed[0].max()), 0.35 * float((q @ k.transpose(-1, -2)).abs().max())
    assert 1 <= depth <= 12 and (spread > 0.3 or depth < 12)
    every = zip(short, gradients(op, (q, k, v), rest), rough, exact, strict=True)
    for found, ours, theirs, wanted in every:
        largest = float(wanted.abs().max())
        budget = 4 * float((theirs - wanted).abs().max()) + 2**-24 * (64 + scores) * largest
        assert float((ours - wanted).abs().max()) <= budget
        assert float((found - wanted).norm()) <= 2e-2 * float(wanted.norm())


def test_without_the_engine_the_loop_keeps_to_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = problem(2, 2, 150, 150)
    rest = (keeps(3, 150, True)[:2], 0.35, 5, False, UNIT, -3, 4)
    expected = op(q, k, v, *rest)
    monkeypatch.setattr(native, "missing", lambda: "no engine")
    with dispatch.explained() as noted:
        torch.testing.assert_close(op(q, k, v, *rest), expected, rtol=1e-4, atol=1e-5)
    assert [(x.kernel, x.reason) for x in noted] == [("plain PyTorch, a band", "no engine")]


def test_gradients_and_half_precision() -> None:
    q, k, v = (x.double().requires_grad_() for x in problem(1, 2, 9, 9))
    keep = torch.arange(9)[None] < 6
    rest = (0.4, 3, True, UNIT, -1, 1)
    assert torch.autograd.gradcheck(lambda *x: op(*x, keep, *rest), (q, k, v))
    half = op(*(x.detach().to(torch.bfloat16) for x in (q, k, v)), keep, *rest)
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.double(), op(q, k, v, keep, *rest), atol=0.05)


# Layers


def build(kind: type[nn.Module], *settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*settings).eval()


def alike(net: nn.Module, analysis: Analysis, *inputs: Tensor) -> None:
    with torch.no_grad():
        theirs, ours = net(*inputs), ran(analysis, *inputs)
    assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("short", [True, False])
def test_a_window_is_recognised_however_it_is_hidden(short: bool) -> None:
    """From an example that is shorter than the window, too."""
    idioms = [nets.IDIOMS[name] for name in nets.IDIOMS if (name == "positions") == short]
    net = zoo.Beside(build(nets.Windowed, hide) for hide, _ in idioms)
    analysis = analysed(net, random(2, 4 if short else 20, 16))
    for site, (_, (low, high)) in zip(analysis.sites, idioms, strict=True):
        assert isinstance(site.convention, BandedConvention)
        expected = BandedConvention(
            3, "row", site.convention.score_multiplier, low, high, OutputFactor(queries=1)
        )
        assert site.convention == expected
        assert site.convention.score_multiplier == pytest.approx(8**-0.5, rel=1e-6)
        assert convention_from_json(json.loads(json.dumps(expected.to_json()))) == expected
    for shape, scale in (((1, 130, 16), 4.0), ((2, 3, 16), 1.0)):
        alike(net, analysis, scale * random(*shape, seed=3))


def test_what_is_no_band_is_not_taken_for_one() -> None:
    net = zoo.Beside(build(nets.Windowed, hide) for hide in nets.OTHERS.values())
    (program,) = capture(net, (random(2, 20, 16),), {}).programs
    found = match(program)
    assert len(found) == len(nets.OTHERS)
    assert not any(isinstance(getattr(x, "convention", None), BandedConvention) for x in found)


def test_a_mask_of_keys_goes_with_the_window() -> None:
    """Joined by `&` with a window in a buffer, for lengths up to that of the buffer."""
    net = build(nets.Padded)
    padding = torch.arange(30)[None, :] >= torch.tensor([30, 24])[:, None]
    analysis = analysed(net, random(2, 30, 16), padding)
    (site,) = analysis.sites
    assert isinstance(site.convention, BandedConvention)
    assert (site.convention.low, site.convention.high, site.convention.mask) == (-4, 2, "key")
    for n in (5, 30, 45):
        long = torch.arange(n)[None, :] >= torch.tensor([n, max(1, n // 3), 1])[:, None]
        alike(net, analysis, random(3, n, 16, seed=n), long)
    assert "window of keys i-4 to i+2" in convention_text(site.convention.to_json())


def test_somebody_elses_layer_from_end_to_end(tmp_path: Path) -> None:
    """Compiled, written, loaded without trust, run at other sizes; its recipe cannot ask for a fit."""
    net = build(nets.LocalAttention)
    data = [{"hidden_states": random(20, 24, 16, seed=seed)} for seed in range(4)]
    recipe = {"batch_size": 16, "max_examples": 32, "selection_examples": 16, "operator": "lossless"}
    _, report = asapc.compile(net, data, recipe=recipe, out=tmp_path / "out", examples=16)
    (site,) = report.facts["sites"]
    assert site["operator"] == "banded_sinkhorn" and site["metrics"]["attention_rel_l2"] < 1e-5
    assert (site["convention"]["low"], site["convention"]["high"]) == (-6, 6)
    loaded, x = asapc.load(tmp_path / "out"), 4 * random(3, 65, 16, seed=9)
    with torch.no_grad():
        assert torch.allclose(loaded(x), net(x), atol=1e-4)
    leaf, grad = nn.Parameter(x), random(*net(x).shape, seed=4)
    (theirs,) = torch.autograd.grad(net(leaf), leaf, grad)
    with depths() as passed:
        (full,) = torch.autograd.grad(loaded(leaf), leaf, grad)
        (short,) = torch.autograd.grad(asapc.tail_gradients(loaded, 2)(leaf), leaf, grad)
    assert [int(x.max()) for x in passed] == [site["convention"]["half_steps"], 2]
    assert float((full - theirs).norm()) <= 1e-4 * float(theirs.norm())
    assert 1e-4 < float((short - theirs).norm() / theirs.norm()) <= 0.5
    with pytest.raises(InputError, match="banded_sinkhorn"):
        asapc.compile(net, data, recipe=recipe | {"operator": "asap"}, out=tmp_path / "no", examples=16)
