"""Loops that end early where that changes their plan: the operator's rule, and who may have it."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from analyses import analysed, batch, ran, random
from torch import Tensor, nn

import asapc
import asapc.kernels.library
import asapc.passes.analyse as analysis_module
from asapc.errors import InputError
from asapc.inputs.program_operators import refused_call
from asapc.ir import WRITTEN, Ending, PlanConvention
from asapc.kernels import native
from asapc.kernels.cpu import plan as cpu_plan
from asapc.kernels.plan import Task, changes
from asapc.onnx import twins
from asapc.operators import plan as reference
from asapc.operators.catalogue import convention_from_json
from asapc.passes.analyse import Analysis
from asapc.passes.replay import Replay
from asapc.program.calls import sites_of
from asapc.program.compiled import OwnCodeWarning
from asapc.program.runner import Runner
from asapc.report.tables import convention_text

assert asapc.kernels.library
PLAIN = [1.0, 0.0, 0.0, 0.0]
SPREADS = (0.0, 0.1, 0.5, 1.0, 3.0)
op = torch.ops.asapc.plan


# The operator


def written_out(s: Tensor, most: int, rows_first: bool, rule: Ending) -> tuple[Tensor, int]:
    """The plan in float64, and the half-steps that were done."""
    s = s.double()
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    mu, nu = (0.0 if rule.ones else -math.log(size) for size in s.shape[-2:])
    left, done = math.inf, most
    for step in range(most):
        if left == 0:
            done = step
            break
        left -= 1
        if (step % 2 == 0) != rows_first:
            g = nu - torch.logsumexp(s + f[..., None], -2)
            continue
        before, f = f, mu - torch.logsumexp(s + g[..., None, :], -1)
        change = f - before if rule.moves == "duals" else f.exp() - before.exp()
        total = change.abs().sum(-1) if rule.summed else change.abs().mean(-1)
        if left == math.inf and total.mean() <= rule.threshold:
            left = rule.after
    plan = (s + f[..., None] + g[..., None, :]).exp()
    return plan / plan.sum((-2, -1), keepdim=True), done  # the operator's has a mass of 1


THRESHOLDS = {"duals": 0.03, "scalings": 1e-4}
RULES = [
    Ending(moves, threshold, *rest)
    for moves, threshold in THRESHOLDS.items()
    for rest in [*itertools.product((False, True), (0, 1, 2)), (True, 1, True)]
]  # fmt: skip


@pytest.mark.parametrize("rows_first", [True, False], ids=["rows first", "columns first"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_ends_where_the_loop_does(rule: Ending, rows_first: bool) -> None:
    counts = set()
    for spread, shape in itertools.product(SPREADS, [(3, 2, 9, 7), (2, 1, 40, 33)]):
        s = spread * random(*shape)
        s = s[..., : shape[-1], :] if rule.ones else s  # of unequal sizes those never settle
        expected, count = written_out(s, 31, rows_first, rule)
        given = (s, None, None, 1.0, 31, rows_first, PLAIN)
        named = asdict(rule)
        counts.add(count)
        for function in (op, reference.plan, twins.plan):
            torch.testing.assert_close(function(*given, **named).double(), expected, rtol=1e-4, atol=1e-7)
            assert torch.allclose(function(*given, **named, log=True).exp().double(), expected, rtol=1e-4)
    assert len(counts) > 3  # they are told apart


@pytest.mark.parametrize("function", [op, reference.plan], ids=["kernel", "reference"])
def test_small_changes_of_large_scalings_are_told_apart(function: Callable[..., Tensor]) -> None:
    """Of 1e5 and more, of which float32 rounds off as much as the threshold."""
    for seed in range(8):
        s = (random(32, 1, 49, 4, seed=seed).tanh() - 1) / 0.1
        _, count = written_out(s, 200, True, Ending("scalings", 1e-2))
        ours = function(s, None, None, 1.0, 200, True, PLAIN, threshold=1e-2, moves="scalings")
        assert 20 < count < 199
        assert torch.equal(ours, function(s, None, None, 1.0, count, True, PLAIN))


@pytest.mark.skipif(native.missing() is not None, reason="the reference tells")
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", [(5, 2, 4, 3), (3, 1, 1, 7), (2, 2, 33, 20), (9, 1, 17, 16)], ids=str)
def test_the_engine_ends_where_the_reference_does(rule: Ending, shape: tuple[int, ...]) -> None:
    """Small matrices side by side, others each, whatever their masses; of scores that it does not hold
    the reference tells."""
    batch, heads, queries, keys = shape
    mu = random(batch, heads, queries, seed=1).log_softmax(-1)
    nu = random(batch, 1, keys, seed=2).log_softmax(-1)
    none = mu.masked_fill(torch.arange(queries) == 0, -math.inf)
    varied = itertools.product([None, mu, none], [None, nu], [True, False], [None, (0.9, 0.7)], SPREADS)
    cases = [*enumerate(varied)][RULES.index(rule) % 7 :: 7]  # another seventh of them for every rule
    for seed, (log_mu, log_nu, rows_first, damping, spread) in cases:
        threshold = rule.threshold * 10.0 ** (seed % 4 - 2)
        settings = {"rows_first": rows_first, "damping": damping, "by_head": [1.0, 0.5][:heads]}
        task = Task.of(
            log_mu, log_nu, score_multiplier=-2.0, half_steps=60, output_factor=PLAIN, **settings,
            **{**asdict(rule), "threshold": threshold},
        )  # fmt: skip
        scores = spread * random(*shape, seed=seed)
        found = task.ended(scores, cpu_plan.changes).settings
        assert found == task.ended(scores, changes).settings


@pytest.mark.skipif(native.missing() is not None, reason="the reference tells")
def test_the_engine_need_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_plan, "plain_changes", None)
    settings = {"threshold": 1e-3, "moves": "duals"}
    for spread in SPREADS:
        op(spread * random(3, 1, 20, 33), None, None, 1.0, 50, True, PLAIN, **settings)


@pytest.mark.parametrize("form", WRITTEN)
def test_beside_hidden_tokens_it_ends_where_the_code_does(form: str) -> None:
    """Which float32 duals decide that keep no digit, in the order in which the code adds them."""
    net = Loop(lambda x, y: (y - x).abs().mean(), most=40)
    for seed, spread in itertools.product(range(4), (0.3, 1.0, 4.0)):
        s = spread * random(2, 1, 8, 7, seed=seed)
        s[0, ..., 3:], s[1, ..., 5:], s[0, :, seed:2] = -1e9, -1e9, -1e9
        given, named = (s, None, None, 1.0, 40, True, PLAIN), {"form": form, "shares": True}
        plans = [f(*given, **named, threshold=1e-2) for f in (op, reference.plan, twins.plan)]
        expected = net(s[:, 0])[:, None] if form == "increments" else plans[1]
        for found in plans:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_it_may_end_at_once_and_need_not_end() -> None:
    flat, sharp = torch.zeros(2, 1, 6, 5), 30 * random(2, 1, 6, 5)
    named = {"threshold": 1e-3, "moves": "duals"}
    rows = op(flat, None, None, 1.0, 400, True, PLAIN, **named)
    assert torch.equal(rows, op(flat, None, None, 1.0, 3, True, PLAIN))  # the first moves f to log 1/N
    for s, threshold in ((sharp, 1e-30), (torch.full_like(flat, math.nan), 1e9)):
        ours = op(s, None, None, 1.0, 30, True, PLAIN, threshold=threshold)
        torch.testing.assert_close(ours, op(s, None, None, 1.0, 30, True, PLAIN), equal_nan=True)


def test_a_batch_ends_as_one() -> None:
    """Its flat example goes on as long as the sharp one; alone it would not."""
    flat, sharp = 0.05 * random(1, 1, 6, 5), 3 * random(1, 1, 6, 5)
    end = lambda s: op(s, None, None, 1.0, 200, True, PLAIN, threshold=1e-3)  # noqa: E731
    both, alone = end(torch.cat([flat, sharp])), torch.cat([end(flat), end(sharp)])
    expected, _ = written_out(torch.cat([flat, sharp]), 200, True, Ending("duals", 1e-3))
    torch.testing.assert_close(both.double(), expected, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(both, alone, rtol=1e-4)


def test_masses_scores_by_head_and_kernels_may_be_given() -> None:
    s, log_mu = random(2, 3, 6, 5), random(2, 1, 6, seed=1).log_softmax(-1)
    by_head = [1.0, 2.0, 0.5]
    scaled = s * torch.tensor(by_head)[:, None, None]
    named = {"threshold": 1e-2, "moves": "scalings"}
    ours = op(s, log_mu, None, 1.0, 60, True, PLAIN, by_head=by_head, **named)
    same = op(scaled.exp(), log_mu, None, 1.0, 60, True, PLAIN, is_kernel=True, **named)
    exact = reference.plan(scaled.double(), log_mu.double(), None, 1.0, 60, True, PLAIN, **named)
    for found in (ours, same):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-7)


def test_gradients_are_those_of_the_half_steps_that_were_done() -> None:
    s = random(2, 1, 6, 5).double()
    rule = Ending("duals", 1e-2)
    _, count = written_out(s, 60, True, rule)
    assert 3 < count < 60
    both = []
    for half_steps, threshold in ((60, rule.threshold), (count, None)):
        x = s.clone().requires_grad_()
        out = op(x, None, None, 1.0, half_steps, True, PLAIN, threshold=threshold)
        both += torch.autograd.grad(out, x, random(2, 1, 6, 5, seed=3).double())
    torch.testing.assert_close(*both)


def test_no_cuda_graph_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    s = random(2, 1, 6, 5)
    with pytest.raises(InputError, match="a CUDA graph holds a fixed number of half-steps"):
        op(s, None, None, 1.0, 60, True, PLAIN, threshold=1e-2)
    assert op(s, None, None, 1.0, 60, True, PLAIN).isfinite().all()


def test_a_rule_is_written_down_and_read_back() -> None:
    convention = PlanConvention(21, "row", 1.0, ending=Ending("duals", 0.0025, after=1))
    assert convention_from_json(convention.to_json()) == convention
    assert "ends early at 0.0025" in convention_text(convention.to_json())
    assert "ending" not in replace(convention, ending=None).to_json()
    for wrong in ({"moves": "plans"}, {"threshold": math.nan}, {"threshold": -1.0}, {"after": -1}):
        with pytest.raises(ValueError, match="must be"):
            Ending(**{"moves": "duals", "threshold": 1.0, **wrong})


@pytest.mark.parametrize("wrong", [{"moves": "plans"}, {"threshold": math.nan}, {"after": -1}], ids=str)
def test_a_file_with_another_rule_is_refused(wrong: dict[str, Any]) -> None:
    arguments = {"threshold": 0.1, "moves": "duals", "after": 0}
    assert refused_call("asapc.plan.default", arguments) is None
    assert "must be" in str(refused_call("asapc.plan.default", arguments | wrong))
    assert "beside a constant" in str(refused_call("asapc.plan.default", arguments | {"constant": 1e-6}))


# Which loops have such a rule


class Loop(nn.Module):
    """Sinkformers' loop on scores, and its relatives.

    change: what of row duals before and after is compared, after which half-steps, 0 for rows and 1 for
    columns.  threshold: a number, or made of the numbers of examples and rows.  ends: what is made
    of the plan of a loop, told whether it ended early.
    """

    def __init__(
        self, change: Callable[[Tensor, Tensor], Tensor], threshold: Any = 1e-2, most: int = 8,
        looks: Sequence[int] = (0, 1), ends: Callable[[Tensor, bool], Any] = lambda plan, early: plan,
    ) -> None:  # fmt: skip
        super().__init__()
        self.change, self.threshold, self.most = change, threshold, most
        self.looks, self.ends = looks, ends

    def forward(self, scores: Tensor) -> Any:
        b, n, m = scores.shape
        mu, nu = (torch.full((b, size), 1 / size, dtype=scores.dtype) for size in (n, m))
        u, v = torch.zeros_like(mu), torch.zeros_like(nu)
        early = False
        threshold = self.threshold(b, n) if callable(self.threshold) else self.threshold
        for step in range(self.most):
            if step % 2 == 0:
                before = u
                u = mu.log() - torch.logsumexp(scores + u[..., None] + v[..., None, :], -1) + u
                residual = self.change(before, u)
            else:
                v = nu.log() - torch.logsumexp(scores + u[..., None] + v[..., None, :], -2) + v
            if step % 2 in self.looks and residual.item() < threshold:
                early = True
                break
        return self.ends((scores + u[..., None] + v[..., None, :]).exp(), early)


class Scalings(nn.Module):
    """PLOT's and DIML's."""

    def forward(self, scores: Tensor) -> Tensor:
        kernel = torch.exp(scores)
        b, n, m = scores.shape
        mu, nu = (torch.full((b, size), 1 / size) for size in (n, m))
        r, c = torch.ones_like(mu), torch.ones_like(nu)
        for _ in range(20):
            before = r
            r = mu / torch.matmul(kernel, c.unsqueeze(-1)).squeeze(-1)
            c = nu / torch.matmul(kernel.permute(0, 2, 1).contiguous(), r.unsqueeze(-1)).squeeze(-1)
            if (r - before).abs().mean().item() < 1e-3:
                break
        return torch.matmul(r.unsqueeze(-1), c.unsqueeze(-2)) * kernel


class Ones(nn.Module):
    """Of masses of 1."""

    def forward(self, scores: Tensor) -> Tensor:
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for _ in range(7):
            before, f = f, -torch.logsumexp(scores + g[..., None, :], -1)
            g = -torch.logsumexp(scores + f[..., None], -2)
            if (f - before).abs().mean() < 1e-2:
                break
        return (scores + f[..., None] + g[..., None, :]).exp()


def summed(before: Tensor, after: Tensor) -> Tensor:
    return (after - before).abs().sum(-1).mean()


def same_on(net: nn.Module, analysis: Analysis, inputs: Sequence[Tensor]) -> None:
    for x in inputs:
        ours = ran(analysis, x)
        torch.testing.assert_close(ours, net(x), rtol=1e-4, atol=1e-7)


FOUND = {
    "after rows": (Loop(summed), Ending("duals", 1e-2, True)),
    "in another unit": (Loop(lambda x, y: 4 * (y - x).abs().mean()), Ending("duals", 2.5e-3)),
    "of a threshold a token": (
        Loop(lambda x, y: (y - x).abs().sum(), lambda b, n: 1e-3 * n * b), Ending("duals", 1e-3)
    ),
    "of a threshold by a size": (
        Loop(lambda x, y: (y - x).abs().mean(), lambda b, n: 1e-2 / n), Ending("duals", 1e-2, True)
    ),
    "of masses of 1": (Ones(), Ending("duals", 1e-2, False, 1, True)),
    "scalings, after pairs": (Scalings(), Ending("scalings", 1e-3, False, 1)),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_rule_is_found(name: str) -> None:
    net, rule = FOUND[name]
    analysis = analysed(net, random(3, 9, 7))
    assert [site.convention.ending for site in analysis.sites] == [rule] and not analysis.left_alone
    with torch.no_grad():
        same_on(net, analysis, [spread * random(4, 11, 7, seed=1) for spread in SPREADS])
        uneven = torch.tensor([0.02, 4.0])[:, None, None] * random(2, 8, 7, seed=2)
        normalised = torch.randn(3, 7, 7).log_softmax(-1)  # of masses of 1, rows do not move at first
        same_on(net, analysis, [uneven, uneven[:1], uneven[1:], normalised])
        hidden = random(2, 8, 7, seed=2)
        hidden[0, :, 3:], hidden[1, :, 5:] = -1e9, -1e9  # of which float32 duals keep no digit
        row = hidden.clone()
        row[0, 2] = -1e9
        if isinstance(net, Loop):  # scalings of hidden columns are infinite
            same_on(net, analysis, [hidden, row])
    (site,) = analysis.sites
    # No program holds the teacher's own code: its graph never ends early.
    assert sites_of(analysis.rewritten({site.name: None})[0]) == [site.name]


def test_where_entries_are_hidden_logarithms_are_infinite() -> None:
    hide = lambda s: s.masked_fill(random(9, 9, seed=5).fill_diagonal_(0) > 0.8, -math.inf)  # noqa: E731
    net = Loop(summed, ends=lambda plan, early: plan.log())
    analysis = analysed(net, hide(random(3, 9, 9)))
    assert [site.convention.ending for site in analysis.sites] == [Ending("duals", 1e-2, True)]
    same_on(net, analysis, [hide(spread * random(4, 9, 9, seed=1)) for spread in SPREADS])


def otherwise(plan: Tensor, early: bool) -> Tensor:
    return plan if early else 1.001 * plan


def one_or_two(plan: Tensor, early: bool) -> tuple[Tensor, ...]:
    return (plan,) if early else (plan, plan)


REFUSED = {
    "the largest example": Loop(lambda x, y: (y - x).abs().sum(-1).max()),
    "the largest row": Loop(lambda x, y: (y - x).abs().max()),
    "all examples summed": Loop(lambda x, y: (y - x).abs().sum()),
    "rows that are not hidden": Loop(lambda x, y: (y - x)[y.abs() < 1e8].abs().mean()),
    "the first example": Loop(lambda x, y: (y - x)[0].abs().mean()),
    "a square": Loop(lambda x, y: (y - x).square().mean()),
    "relative": Loop(lambda x, y: (y - x).abs().mean() / y.abs().mean()),
    "told of rows, after columns": Loop(summed, looks=[1]),
    "another end where it does not end early": Loop(summed, ends=otherwise),
    "it says whether it ended early": Loop(summed, ends=lambda plan, early: (plan, early)),
    "a harmless end, likewise": Loop(summed, 0.0, ends=lambda plan, early: (plan, early)),
    "another number of outputs": Loop(summed, looks=[0], ends=one_or_two),
}


@pytest.mark.parametrize("how", REFUSED)
def test_another_rule_is_refused(how: str) -> None:
    (left,) = analysed(REFUSED[how], random(3, 9, 7)).left_alone
    assert "ends early" in left.reason


class Weighted(nn.Module):
    """A mean over rows that are told apart by a mask of which the plan knows nothing, or by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unit", torch.ones(()))

    def forward(self, scores: Tensor, keep: Tensor | None = None) -> Tensor:
        keep = self.unit if keep is None else keep
        loop = Loop(lambda x, y: ((y - x).abs() * keep).sum() / (keep + 0 * x).sum())
        plan: Tensor = loop(scores)
        return plan


def test_a_residual_that_other_data_enter_is_refused() -> None:
    for given, name in (((torch.ones(3, 9),), "keep"), ((), "unit")):
        (left,) = analysed(Weighted(), random(3, 9, 7), *given).left_alone
        assert f"ends early on a residual that {name} enters" in left.reason


class Layer(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.qkv, self.loop = nn.Linear(dim, 3 * dim), Loop(summed)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (2 * self.qkv(x)).chunk(3, -1)
        mixed: Tensor = x + x.shape[1] * self.loop(q @ k.mT / 4) @ v
        return mixed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_in_halves_residuals_are_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    analysis = analysed(Layer().to(dtype), random(3, 9, 16).to(dtype))
    assert bool(analysis.sites) is (dtype is torch.float64)


class Layers(nn.Sequential):
    """numpy: between the layers, so that each is captured by itself."""

    def __init__(self, numpy: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(Layer(), Layer())
        self.numpy = numpy

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x) + 0.0 * float(x.detach().numpy()[0, 0, 0]) if self.numpy else layer(x)
        return x


@pytest.mark.parametrize("numpy", [False, True], ids=["whole", "by module"])
def test_every_layer_ends_by_itself(numpy: bool) -> None:
    net = Layers(numpy)
    analysis = analysed(net, random(3, 9, 16))
    assert [site.convention.ending for site in analysis.sites] == [Ending("duals", 1e-2, True)] * 2
    compiled = Runner(analysis.model, analysis.lifted)
    with torch.no_grad():
        for spread in SPREADS:
            x = spread * random(2, 7, 16, seed=1)
            ours = compiled(batch(x))
            torch.testing.assert_close(ours, net(x), rtol=1e-3, atol=1e-4)


def test_where_one_of_them_does_not_replay_none_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that is left would run that one to its end."""
    true = analysis_module.judged

    def judged(site: Any, errors: Any) -> Any:
        return true(site, Replay({"the data": 1.0}) if site.name.startswith("0") else errors)

    monkeypatch.setattr(analysis_module, "judged", judged)
    analysis = analysed(Layers(), random(3, 9, 16))
    assert not analysis.sites and len(analysis.left_alone) == 2
    assert "the captured graph is not the model" in analysis.left_alone[-1].reason


def test_its_own_code_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the operator is."""
    monkeypatch.setattr("asapc.passes.price.Price.slower_than", lambda *_: (4, 9))
    batches = [{"scores": random(8, 9, 7, seed=seed)} for seed in range(4)]
    recipe = {"batch_size": 8, "max_examples": 8, "selection_examples": 8}
    net = Loop(summed).eval()
    result = asapc.compile(net, batches, recipe=recipe, examples=4)
    (site,) = result.report.facts["sites"]
    assert site["operator"] == "plan" and "which its captured code does not" in site["reason"]
    x, ours = 4 * random(2, 9, 7), copy.deepcopy(result.model)
    with pytest.warns(OwnCodeWarning, match="a loop that ends early computes in single or double"):
        assert torch.equal(ours(x.bfloat16()), net(x.bfloat16()))
    with torch.autocast("cpu", torch.float16), pytest.warns(OwnCodeWarning, match="ends early"):
        assert torch.equal(result.model(x), net(x))
