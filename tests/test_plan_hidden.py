"""Plans of scores that hide rows and columns, though the data hid none: ours against the original's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from analyses import analysed, ran, random
from torch import Tensor, nn

import asapc
from asapc.kernels import native
from asapc.kernels.cpu import plan as kernel
from asapc.operators import plan as operators
from asapc.passes.analyse import Analysis
from asapc.program.compiled import OwnCodeWarning

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


ROWS, COLUMNS = [-1, -2] * 3, [-2, -1] * 2 + [-2]
SPELLINGS: dict[Spelling, list[int]] = {
    softmaxes: ROWS, subtracted: COLUMNS, increments: ROWS, rows_added_first: COLUMNS,
    columns_added_first: ROWS, duals_added_first: COLUMNS, divided: ROWS, divided_with_constant: COLUMNS,
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


def agrees(net: nn.Module, analysis: Analysis, *inputs: Tensor) -> None:
    """Every example that the original gives, relative to its largest entry."""
    with torch.no_grad():
        theirs, found = net(*inputs), ran(analysis, *inputs)
    if getattr(net, "log", False):
        theirs, found = theirs.exp(), found.exp()
    finite = theirs.isfinite().flatten(1).all(1)
    assert int(finite.sum()) >= len(finite) // 2
    theirs, found = theirs[finite].flatten(1), found[finite].flatten(1)
    error = (found - theirs).abs().amax(1) / theirs.abs().amax(1).clamp(min=1e-30)
    assert float(error.max()) <= 1e-4


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_what_hides_at_run_time_alone(spelling: Spelling) -> None:
    net = Loop(spelling, SPELLINGS[spelling])
    analysis = analysed(net, random(4, 9, 7))
    assert len(analysis.sites) == 1
    for n, m in ((9, 7), (36, 7)):
        agrees(net, analysis, scores_that_hide(n, m))


class Masked(nn.Module):
    """Points, and a mask that hides nothing in the data, applied in one of the usual ways."""

    def __init__(self, how: str, spelling: Spelling) -> None:
        super().__init__()
        self.how, self.spelling = how, spelling
        self.kinds = nn.Embedding.from_pretrained(torch.tensor([[0.0], [-1e4], [-1e9]]))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        scores = x @ y.mT
        if self.how == "filled":
            scores = scores.masked_fill(~mask[:, None], -1e9)
        elif self.how == "both sides":
            scores = torch.where(mask[:, None] & mask[:, : x.shape[1], None], scores, -1e9)
        elif self.how == "added":
            scores = scores + (1.0 - mask.float())[:, None] * torch.finfo(scores.dtype).min
        else:  # looked up by kind of token
            scores = scores + self.kinds(2 - 2 * mask.long()).mT
        if self.how == "both sides":
            scores = nn.functional.pad(scores, (0, 1, 0, 1))
        return self.spelling(scores, [-1, -2] * 3)


@pytest.mark.parametrize(("how", "spelling"), [
    ("filled", softmaxes), ("both sides", rows_added_first), ("added", rows_added_first),
    ("looked up", softmaxes),
])  # fmt: skip
def test_a_mask_that_hides_nothing_in_the_data(how: str, spelling: Spelling) -> None:
    net = Masked(how, spelling)
    tokens = (9, 9) if how == "both sides" else (9, 7)
    x, y = (random(9, n, 4, seed=n) for n in tokens)
    analysis = analysed(net, x[:4], y[:4], torch.ones(4, tokens[1], dtype=torch.bool))
    assert len(analysis.sites) == 1
    mask = torch.arange(tokens[1]) < torch.tensor([7, 4, 1, 0, 7, 6, 2, 0, 7])[:, None]
    for spread in (0.1, 1.0, 10.0):
        agrees(net, analysis, spread * x, spread * y, mask)


class Optional(nn.Module):
    """A mask that is not in the data, filled in before the loop's module is given the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop(increments, ROWS)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = x @ y.mT
        plan: Tensor = self.loop(scores if mask is None else scores.masked_fill(~mask[:, None], -1e9))
        return plan


def test_a_mask_that_other_calls_have() -> None:
    net, x, y = Optional().eval(), random(24, 9, 4), random(24, 7, 4, seed=1)
    live = asapc.compile(net, {"x": x, "y": y}, recipe={"operator": "lossless"}, examples=8).model
    torch.testing.assert_close(live(x, y), net(x, y))
    mask = (torch.arange(7) < 4).expand(24, 7)
    with pytest.warns(OwnCodeWarning, match="mask was captured as None"):
        assert torch.equal(live(x, y, mask), net(x, y, mask))


class Weighted(nn.Module):
    """Points, and weights that hide nothing as they are; they decide with the points, or alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(4, 1)
        self.register_buffer("added", torch.zeros(7))
        nn.init.constant_(self.gate.bias, -9.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores, is_open = x @ y.mT, self.gate(y).mT > 0
        hows: dict[str, Callable[[], Tensor]] = {
            "added": lambda: scores + self.added, "gated": lambda: scores.masked_fill(is_open, -1e9),
        }
        return subtracted(hows[self.how](), [-1, -2] * 2)


@pytest.mark.parametrize("how", ["added", "gated"])
def test_weights_that_hide_later(how: str) -> None:
    torch.manual_seed(0)
    net = Weighted(how)
    x, y = random(4, 9, 4, seed=9), random(4, 7, 4, seed=7)
    analysis = analysed(net, x, y)
    assert len(analysis.sites) == 1
    with torch.no_grad():  # the graph holds the same
        net.added[2] = -3e38
        net.gate.bias.zero_()
    agrees(net, analysis, x, y)


def test_hidden_tokens_in_float64() -> None:
    net = Loop(rows_added_first, [-1, -2] * 3)
    analysis = analysed(net, random(4, 9, 7).double())
    for low in (-1e9, torch.finfo(torch.float64).min):
        given = random(7, 9, 7).double().masked_fill(hidden(9, 7), low)
        agrees(net, analysis, given)


class Given(nn.Module):
    """Masses that are given, both sides or columns alone, and costs; the log plan or the plan."""

    def __init__(self, log: bool, damping: float = 1.0) -> None:
        super().__init__()
        self.log, self.damping = log, damping

    def forward(self, cost: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        f, g = torch.zeros_like(mu), torch.zeros_like(nu)
        for _ in range(3):
            f = mu.log() - (g[:, None] - 2 * cost).logsumexp(-1)
            g = self.damping * (nu.log() - (f[..., None] - 2 * cost).logsumexp(-2))
        plan = f[..., None] + g[:, None] - 2 * cost
        return plan if self.log else plan.exp()


@pytest.mark.parametrize("net", [Given(True), Given(False, 0.7)], ids=["log", "damped"])
def test_hidden_costs_beside_given_masses(net: Given) -> None:
    mu, nu = random(7, 9, seed=1).softmax(-1), random(7, 7, seed=2).softmax(-1)
    analysis = analysed(net, random(4, 9, 7), mu[:4], nu[:4])
    assert len(analysis.sites) == 1
    for spread, low in itertools.product((0.1, 3.0, 30.0), LOW[:2]):
        given = -(spread * random(7, 9, 7)).masked_fill(hidden(9, 7), low)
        agrees(net, analysis, given, mu, nu)
        masked = torch.arange(7) < torch.tensor([5, 7, 5, 1, 7, 2, 6])[:, None]
        agrees(net, analysis, given, mu, nu * masked)  # and columns without mass
        agrees(net, analysis, -spread * random(7, 9, 7), mu, nu * masked)


class Biased(nn.Module):
    """A bias that is added in every half-step, which may hide tokens as well."""

    def forward(self, x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        scores = x @ y.mT
        f, g = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[..., :1, :])
        for _ in range(3):
            f = -(scores + g + bias).logsumexp(-1, keepdim=True)
            g = -(scores + f + bias).logsumexp(-2, keepdim=True)
        return (scores + f + g + bias).exp()


def test_a_bias_in_every_half_step_may_hide_and_is_refused() -> None:
    """Beside -1e9, (S + g) + bias is not (S + bias) + g."""
    analysis = analysed(Biased(), random(4, 9, 4), random(4, 7, 4), random(4, 9, 7))
    (left,) = analysis.left_alone
    assert "hide tokens through their marginals" in left.reason


@pytest.mark.skipif(bool(native.missing()), reason="the reference runs")
@pytest.mark.parametrize("log", [True, False])
def test_hidden_tokens_without_mass_stay_in_the_linear_domain(
    log: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the teacher adds its terms: beside -1e12 none of them shows."""
    scores, hidden = torch.randn(3, 1, 40, 30), torch.arange(40) > 25
    scores[:, :, hidden], scores[..., hidden[:30]] = -1e12, -1e12
    equal = [torch.zeros(3, 1, n).log_softmax(-1) for n in (40, 30)]
    masses = [x.masked_fill(hidden[: x.shape[-1]], -1e12) for x in equal]
    given = (scores, *masses, 1.0, 20, True, [1.0, 0.0, 0.0, 0.0], log)
    expected = operators.plan(*given, form="reversed")
    monkeypatch.delattr(kernel, "_beyond")
    torch.testing.assert_close(torch.ops.asapc.plan(*given, form="reversed"), expected)


@pytest.mark.skipif(bool(native.missing()), reason="the reference runs")
@pytest.mark.parametrize("form", ["duals", "reversed", "summed", "increments", "logs", "softmax"])
@pytest.mark.parametrize("log", [True, False])
def test_the_engine_keeps_the_order_of_a_teachers_sums(
    form: str, log: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices that are not small, which are padded; beside -1e9 another order shows."""
    monkeypatch.delattr(kernel, "_beyond")
    sizes = ((20, 37, True, 5, -1e9), (37, 16, False, 4, -1e9), (16, 33, False, 1, LOW[2]))
    for n, m, first, half_steps, low in sizes:
        scores = torch.randn(2, 3, n, m, generator=torch.Generator().manual_seed(n))
        scores[0, :, -2:], scores[1, ..., -3:] = low, low
        masses = [random(2, 1, x, seed=x).log_softmax(-1) for x in (n, m)]
        for mu, nu in (masses, (None, None), (masses[0], None)):
            given = (scores, mu, nu, 0.5, half_steps, first, [2.0, 1.0, 0.0, 0.0], log)
            for shares in (False, True):
                settings: dict[str, Any] = {"form": form, "shares": shares}
                if form in ("duals", "reversed", "summed") and shares:
                    settings["damping"] = [0.9, 0.7]
                expected = operators.plan(*given, **settings)
                found = torch.ops.asapc.plan(*given, **settings)
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, equal_nan=True)
