"""Capture, match, lift: attention written many ways, recognised by what it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import attention_zoo as zoo
import pytest
import torch
from analyses import batch
from torch import Tensor, nn

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.errors import BranchError, InputError
from asapc.ir import EspConvention, HalfPlan, LotConvention, OutputFactor, Program
from asapc.measure.differences import largest_difference
from asapc.passes.capture import capture
from asapc.passes.esp.site import EspSite
from asapc.passes.lift import lift
from asapc.passes.lot.site import LotSite
from asapc.passes.match import match
from asapc.passes.plan.site import PlanSite
from asapc.passes.regions import Refusal
from asapc.passes.sinkhorn import match as sinkhorn
from asapc.passes.sinkhorn.site import AttentionSite
from asapc.passes.spellings import ALIASES, RESPELT
from asapc.program.calls import operator_calls
from asapc.program.runner import Runner


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    module: nn.Module = getattr(zoo, name)()
    return module.eval()


@functools.cache
def captured(name: str) -> tuple[nn.Module, Program, list[Any]]:
    """The model, its program, and what matching says of it: all are only read."""
    model = build(name)
    program = capture(model, zoo.inputs_for(model), {}).programs[0]
    return model, program, match(program)


# name -> (half_steps, first side, score multiplier, mask, bias, early stop)
MATCHED: dict[str, tuple[Any, ...]] = {
    "LogDomainMasked": (4, "row", 8**-0.5, "key", False, True),
    "ExpDomainMatmul": (6, "row", 1.0, "none", False, False),
    "Alternating": (6, "row", 1.0, "key", False, False),
    "ColumnsFirst": (5, "column", 0.6, "none", False, False),
    "Biased": (4, "row", 0.3 / 0.7, "none", True, False),
    "Cross": (7, "row", 0.6, "none", False, False),
}
# name -> convention
SLICED = {
    "SlicedLearnt": EspConvention(1e-3, 2.0, squared_cost=True, mean_cost=True, slices=5),
    "SlicedMasked": EspConvention(0.1, 0.3, mask="key"),
    "SlicedAscending": EspConvention(None, 0.3, ties="ascending"),
    "SlicedLifted": EspConvention(None, 0.3),
    "SlicedCross": EspConvention(None, 0.3, coupling="monotone", ties="descending"),
    "SlicedCrossReleased": EspConvention(0.1, 0.3, coupling="interpolated"),
}
GLUED = {
    "GluedInside": LotConvention(
        HalfPlan(3, True, 0.5), HalfPlan(3, True, 0.5), 5, OutputFactor(queries=1), "key"
    ),
    "GluedMasked": LotConvention(
        HalfPlan(4, True, 0.5**0.5), HalfPlan(4, True, 0.5**0.5), 5, OutputFactor(), "key"
    ),
    "GluedByDistance": LotConvention(HalfPlan(3, True, 1.0), HalfPlan(3, False, 1.0), 5, OutputFactor()),
}
REFUSED = {
    "SlicedTop": "tokens with equal projections neither share their mass nor have an order of their own",
    "SlicedUnstable": "sort with stable=True",
    "SlicedByNorm": "not a sliced plan weighted by softmax(-tau cost)",
    "Fused": "not Sinkhorn: rows only",
    "Faded": "an input multiplies its attention within the loop",
    "Gated": "log_a = log_a * torch.sigmoid(v.mean((-1, -2)))[..., None, None]` (attention_zoo.py, line ",
}


@pytest.mark.parametrize("name", MATCHED)
def test_sinkhorn_is_recognised_and_replaced(name: str) -> None:
    model, program, outcomes = captured(name)
    assert len(outcomes) == 1 and isinstance(outcomes[0], AttentionSite), outcomes
    site = outcomes[0]
    c = site.convention
    half_steps, first, multiplier, mask, bias, early_stop = MATCHED[name]
    assert (c.half_steps, c.first_side, c.mask, c.bias) == (half_steps, first, mask, bias)
    assert c.score_multiplier == pytest.approx(multiplier, rel=1e-6)
    assert c.early_stop is early_stop and (site.heads, site.head_dim) == (2, 8)
    assert site.probe_error < (1e-6 if name == "ExpDomainMatmul" else 1e-12)

    replays(model, program, site)


def replays(model: nn.Module, program: Program, site: Any) -> None:
    lifted = lift(program, [site])
    assert len(operator_calls(lifted.graph)) == 1
    for seed in (0, 5):  # other tokens and other padding than those captured
        inputs = zoo.inputs_for(model, seed)
        with torch.no_grad():
            assert largest_difference(model(*inputs), lifted.graph(*inputs)) < 2e-6


@pytest.mark.parametrize("name", SLICED)
def test_sliced_plans_are_recognised_and_replaced(name: str) -> None:
    model, program, outcomes = captured(name)
    assert len(outcomes) == 1 and isinstance(outcomes[0], EspSite), outcomes
    site = outcomes[0]
    found, expected = site.convention, SLICED[name]
    assert replace(found, softsort_temperature=None, inverse_temperature=0.0) == replace(
        expected, softsort_temperature=None, inverse_temperature=0.0
    )
    if expected.softsort_temperature is None:
        assert found.softsort_temperature is None
    else:
        assert found.softsort_temperature == pytest.approx(expected.softsort_temperature, rel=1e-6)
    assert found.inverse_temperature == pytest.approx(expected.inverse_temperature, rel=1e-6)
    assert (site.heads, site.head_dim) == (2, 8) and site.probe_error < 1e-8
    replays(model, program, site)


@pytest.mark.parametrize("name", [name for name, own in SLICED.items() if not own.softsort_temperature])
def test_a_layer_that_sorts_exactly_is_replaced_where_tokens_are_repeated(name: str) -> None:
    model, program, outcomes = captured(name)
    lifted = lift(program, outcomes)
    torch.manual_seed(0)
    few = torch.randn(3, 4, 16)
    inputs = [few[:, torch.randint(4, own.shape[1:2])] for own in zoo.inputs_for(model)]
    with torch.no_grad():
        assert largest_difference(model(*inputs), lifted.graph(*inputs)) < 2e-6


@pytest.mark.parametrize("name", GLUED)
def test_glued_plans_are_recognised_and_replaced(name: str) -> None:
    model, program, outcomes = captured(name)
    assert len(outcomes) == 1 and isinstance(outcomes[0], LotSite), outcomes
    site = outcomes[0]
    found, expected = site.convention, GLUED[name]
    for own, right in ((found.queries, expected.queries), (found.keys, expected.keys)):
        assert (own.half_steps, own.tokens_first) == (right.half_steps, right.tokens_first)
        assert own.score_multiplier == pytest.approx(right.score_multiplier, rel=1e-6)
    assert (found.pivots, found.mask, found.output_factor) == (
        expected.pivots, expected.mask, expected.output_factor,
    )  # fmt: skip
    of_scores = name == "GluedByDistance"
    pivots = torch.eye(5).expand(2, -1, -1) if of_scores else model.pivots
    assert torch.allclose(site.pivots.float(), pivots)
    assert torch.allclose(site.mass.float(), torch.softmax(model.masses, -1))
    assert (site.heads, site.head_dim) == (2, 5 if of_scores else 8) and site.probe_error < 1e-9
    replays(model, program, site)


class Unread(zoo.ColumnsFirst):
    """Whose attention runs for nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        return x


def test_attention_that_nothing_reads_is_left_alone() -> None:
    model = zoo.Beside([zoo.ColumnsFirst(), Unread()]).eval()
    outcomes = match(capture(model, (zoo.inputs_for(zoo.ColumnsFirst())[0],), {}).programs[0])
    kinds = [outcome.reason if isinstance(outcome, Refusal) else "site" for outcome in outcomes]
    assert kinds == ["site", "nothing of it reaches the outputs"]


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_with_a_reason(name: str) -> None:
    _, _, outcomes = captured(name)
    assert len(outcomes) == 1 and not isinstance(outcomes[0], AttentionSite)
    assert REFUSED[name] in outcomes[0].reason


@pytest.mark.parametrize("name", ["Causal", "ChannelMixing", "Multiplied"])
def test_loops_between_other_things_become_plans(name: str) -> None:
    """A mask that differs between queries is part of the scores; a mixer's values are streams; a mask
    within the loop is a mass, and none is left of an example without any key."""
    model, program, (site,) = captured(name)
    assert isinstance(site, PlanSite) and site.probe_error < 1e-9
    replays(model, program, site)
    if name == "Multiplied":
        x, keep = zoo.inputs_for(model)
        keep[1] = False
        with torch.no_grad():
            found = lift(program, [site]).graph(x, keep)
            assert largest_difference(model(x, keep), found) < 2e-6


BY_KIND: dict[type, str] = {}  # as einops remembers the library that a kind of tensor is of


class KindsRemembered(zoo.LogDomainPlain):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        BY_KIND.setdefault(type(x), "torch")
        return super().forward(x)


def test_a_model_that_returns_numpy_is_captured_by_module_and_is_what_it_was() -> None:
    """So are the state of torch and its random numbers.

    A trace of the whole model, which fails, leaves its tensors' kind in a cache, which is no state.
    """
    model = build("NumpyMaps").train()
    model.second = KindsRemembered().eval()
    flags = [m.training for m in model.modules()]
    weights = {name: p.clone() for name, p in model.named_parameters()}
    state = (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(),
             torch.Tensor.item)  # fmt: skip
    inputs = zoo.inputs_for(model)
    before = torch.get_rng_state()
    result = capture(model, inputs, {})
    assert torch.equal(before, torch.get_rng_state())
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(weights[n], p) and p.grad is None for n, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert state == (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(),
                     torch.Tensor.item)  # fmt: skip

    assert result.kind == "module" and [p.name for p in result.programs] == ["attention", "second"]
    assert result.reason and not result.skipped and [*BY_KIND] == [torch.Tensor]
    (site,) = match(result.programs[0])
    assert isinstance(site, AttentionSite) and site.name == "attention"


class Branching(nn.Module):
    """A branch on the data that is no early stop must not be traced one way in silence."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if (x > 0).any() else x


def test_a_data_dependent_branch_is_not_traced_silently() -> None:
    (program,) = capture(Branching(), (torch.ones(3, 4),), {}).programs
    assert torch.equal(program.graph(2 * torch.ones(5, 4)), 4 * torch.ones(5, 4))
    with pytest.raises(BranchError, match=r"test_match.py, line \d+\) is true, got data for which it is"):
        program.graph(-torch.ones(3, 4))


@pytest.mark.parametrize("error", [None, TypeError, NameError, KeyError])
def test_a_failing_forward_is_the_users_to_mend(error: type[Exception] | None) -> None:
    model = build("Softmax")
    if error is not None:
        model.register_forward_pre_hook(lambda *_: exec("raise error('b')", {"error": error}))
    with pytest.raises(InputError, match="the model must run on the given data") as raised:
        capture(model, (torch.randn(3, 10, 7),), {})
    assert isinstance(raised.value.__cause__, error or RuntimeError)
    with pytest.raises(InputError, match=r"the given data, got \w+ in a batch of 3 \("):  # later, too
        Runner(model)(batch(torch.randn(3, 10, 7)))


class Merged(nn.Module):
    """Heads are merged with the batch by copies, as for torch.bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 6, 4).transpose(1, 2)
        q, k, v = (part.reshape(-1, x.shape[1], 4) for part in heads.split(2, 1))
        plan = (q @ k.mT).softmax(-1)
        for _ in range(3):
            plan = plan / plan.sum(1, keepdim=True)
            plan = plan / plan.sum(2, keepdim=True)
        return (plan @ v).view(-1, 2, x.shape[1], 4)


def test_merged_heads_are_read_where_they_lie() -> None:
    net, x = Merged().eval(), torch.randn(4, 6, 8)
    program = capture(net, (x,), {}).programs[0]
    lifted = lift(program, match(program)).graph
    torch.testing.assert_close(lifted(x), net(x))
    assert torch.ops.aten.reshape.default not in {node.target for node in lifted.graph.nodes}


class MergedAndMasked(nn.Module):
    """Scores of merged heads, padded and biased as [B, H, N, M], after one of the usual reshapes."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.qkv, self.form = nn.Linear(8, 24), form

    def merged(self, x: Tensor) -> Tensor:
        if self.form == "batch first":
            return x.view(*x.shape[:2], 2, 4).transpose(1, 2).reshape(-1, x.shape[1], 4)
        if self.form == "length first":  # as torch.nn.MultiheadAttention
            x = x.transpose(0, 1)
            return x.contiguous().view(x.shape[0], x.shape[1] * 2, 4).transpose(0, 1)
        return torch.cat(x.split(4, 2))  # of which nothing tells the heads

    def forward(self, x: Tensor, padded: Tensor, bias: Tensor) -> Tensor:
        batch, n, _ = x.shape
        q, k, v = map(self.merged, self.qkv(x).chunk(3, -1))
        hidden, given = padded[:, None, None], bias[:, None]
        axes = (batch, 2)
        if self.form == "heads first":
            hidden, given, axes = hidden.transpose(0, 1), given.transpose(0, 1), (2, batch)
        s = ((q @ k.mT).view(*axes, n, n) + given).masked_fill(hidden, -1e9).view(-1, n, n)
        for _ in range(3):
            s = s - s.logsumexp(-1, keepdim=True)
            columns = s.logsumexp(-2, keepdim=True).view(*axes, 1, n).masked_fill(hidden, 0.0)
            s = s - columns.view(-1, 1, n)
        return s.exp() @ v


@pytest.mark.parametrize("form", ["batch first", "length first", "heads first"])
def test_masks_and_biases_with_an_axis_of_heads_that_scores_do_not_have(form: str) -> None:
    net, padded = MergedAndMasked(form).eval(), torch.arange(6) >= torch.tensor([6, 4, 5, 3])[:, None]
    given = (torch.randn(4, 6, 8), padded, torch.randn(4, 6, 6))
    program = capture(net, given, {}).programs[0]
    (site,) = match(program)
    if form == "heads first":
        assert isinstance(site, Refusal) and "do not tell how many heads" in site.reason
        return
    assert isinstance(site, AttentionSite) and site.bias is not None and site.mask is not None
    torch.testing.assert_close(lift(program, [site]).graph(*given), net(*given))


# What torch can say in several ways


class Everything(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        s = torch.special
        z = torch.stack([x, y @ y.t()], 1)
        return (
            x.T, x.mT, x.H, z.mH, z.adjoint(), x.t(), y[0].t(), z.swapaxes(0, 2), z.swapdims(-1, 1),
            z.movedim(0, -1), torch.moveaxis(z, 2, 0), torch.divide(x, 2 + x), x.true_divide(3),
            torch.subtract(x, x.T, alpha=2), torch.multiply(x, x), torch.negative(x), x.absolute(),
            s.logsumexp(x, -1, keepdim=True), s.softmax(x, 0), s.log_softmax(x, -1), s.exp2(x),
            torch.linalg.matmul(x, y), torch.concat([x, y], 1), torch.concatenate([x, y], dim=-1),
            torch.inner(z, y.T), torch.inner(x[0], x[0]), torch.tensordot(z, y, ([1], [1])),
            torch.tensordot(x, y, 1), torch.tensordot(x, y, 0),
        )  # fmt: skip


def test_the_same_in_one_spelling() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 5), torch.randn(5, 2)
    (program,) = capture(Everything(), (x, y), {}).programs
    for found, expected in zip(program.graph(x, y), Everything()(x, y), strict=True):
        torch.testing.assert_close(found, expected)
    left = {node.target for node in program.graph.graph.nodes} & {*ALIASES, *RESPELT}
    # Of two vectors; of factors that nobody shares.
    assert left == {torch.ops.aten.inner.default, torch.ops.aten.matmul.default}


class Shared(nn.Module):
    """Keys or values that all heads share, or queries that all examples do."""

    def __init__(self, queries: str, keys: str, values: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 4 if x == "heads" else 8) for x in (queries, keys, values))
        self.kinds, self.latent = (queries, keys, values), nn.Parameter(torch.randn(1, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(self.latent if kind == "examples" else x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer, kind in zip((self.q, self.k, self.v), self.kinds, strict=True)
        )
        s = q @ k.mT
        for step in range(5):
            s = s - s.logsumexp(-2 if step % 2 else -1, keepdim=True)
        return s.softmax(-1) @ v


@pytest.mark.parametrize("kinds", [
    ("own", "heads", "heads"), ("own", "own", "heads"), ("heads", "own", "own"),
    ("examples", "own", "own"), ("own", "examples", "examples"), ("examples", "heads", "heads"),
])  # fmt: skip
def test_factors_that_heads_or_examples_share(kinds: tuple[str, str, str]) -> None:
    torch.manual_seed(0)
    net = Shared(*kinds).eval()
    (program,) = capture(net, (torch.randn(3, 6, 8),), {}).programs
    (site,) = match(program)
    assert isinstance(site, AttentionSite)
    lifted, x = lift(program, [site]), torch.randn(4, 9, 8)
    torch.testing.assert_close(lifted.graph(x), net(x), rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    """Written with as few of the usual words as there are others."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        s = torch.linalg.matmul(self.q(x), self.k(x).adjoint())
        for step in range(5):
            s = torch.subtract(s, torch.special.logsumexp(s, -2 if step % 2 else -1, keepdim=True))
        return torch.linalg.matmul(torch.special.softmax(s, -1), self.v(x))


class Plane(Attention):
    """Without a batch: products of vectors with K and its transpose, in place of sums."""

    def forward(self, x: Tensor) -> Tensor:
        kernel = torch.exp(torch.inner(self.q(x), self.k(x)))
        b = torch.ones(len(x))
        for _ in range(4):
            a = torch.reciprocal(kernel @ b)
            b = torch.reciprocal(kernel.T @ a)
        return torch.multiply(torch.multiply(a[:, None], kernel), b) @ self.v(x)


class Turned(Attention):
    """Scores of keys and queries, padded, and the transpose of their plan."""

    def forward(self, x: Tensor) -> Tensor:
        keep = (x != 0).any(-1)
        s = (self.k(x) @ self.q(x).mT).masked_fill(~keep[:, :, None], -1e9)
        for step in range(5):
            total = s.logsumexp(-1 if step % 2 else -2, keepdim=True)
            s = s - (total.masked_fill(~keep[:, :, None], 0.0) if step % 2 else total)
        return s.exp().mT @ self.v(x)


def test_scores_of_keys_and_queries() -> None:
    torch.manual_seed(0)
    model, x = Turned().eval(), torch.randn(3, 7, 6)
    program = capture(model, (x,), {}).programs[0]
    (found,) = match(program)
    assert isinstance(found, AttentionSite)
    convention = found.convention
    assert (convention.half_steps, convention.first_side, convention.mask) == (5, "row", "key")
    x = torch.randn(4, 9, 6)
    x[1, 5:] = x[2, 1:] = 0.0
    torch.testing.assert_close(lift(program, [found]).graph(x), model(x), rtol=1e-4, atol=1e-5)


@torch.library.custom_op("asapc_test::plan", mutates_args=())
def opaque_plan(s: Tensor) -> Tensor:
    return functools.reduce(lambda s, step: s.log_softmax(-1 - step % 2), range(21), s).exp()


opaque_plan.register_fake(torch.empty_like)


class InOneOperator(Attention):  # of another library, which may be any number of half-steps
    def forward(self, x: Tensor) -> Tensor:
        return opaque_plan(self.q(x) @ self.k(x).mT) @ self.v(x)


@pytest.mark.parametrize("kind, size, site, half_steps", [
    (Attention, (3, 7, 6), AttentionSite, 5), (Plane, (7, 6), PlanSite, 8),
    (InOneOperator, (3, 7, 6), AttentionSite, 21),
])  # fmt: skip
def test_a_loop_is_matched_however_it_is_spelt(kind: Any, size: Any, site: type, half_steps: int) -> None:
    torch.manual_seed(0)
    (found,) = match(capture(kind().eval(), (torch.randn(size),), {}).programs[0])
    assert isinstance(found, site) and found.convention.half_steps == half_steps


# Layers that compute the same are examined once, and only those


Ask = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """Additive masks and biases, half-steps and scale as given; the mask is made anew in every layer."""

    def __init__(
        self, half_steps: int = 3, scale: float = 0.5, bias: Tensor | None = None,
        hidden: Ask = lambda padded: torch.zeros_like(padded[:, None], dtype=torch.float32)
        .masked_fill(padded[:, None], -torch.inf), floor: float = 1e-30,
    ) -> None:  # fmt: skip
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.half_steps, self.scale, self.hidden, self.floor = half_steps, scale, hidden, floor
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        s = self.q(x) @ self.k(x).transpose(1, 2) * self.scale
        if self.bias is not None:
            s = s + self.bias
        s = s + self.hidden(padded)
        a = torch.softmax(s, -1)
        for step in range(1, self.half_steps):
            a = a / a.sum(1 if step % 2 else 2, keepdim=True).clamp(min=self.floor)
        return x + a @ self.v(x)


class Stack(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, padded)
        return x


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The regions that were examined."""
    seen: list[object] = []
    examine = sinkhorn.run_experiments

    def counting(experiment: sinkhorn.RegionExperiment, *rest: object) -> object:
        seen.append(experiment.region)
        return examine(experiment, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sinkhorn, "run_experiments", counting)
    return seen


def sites_of(*layers: Layer) -> list[AttentionSite]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 8, generator=generator)
    padded = torch.tensor([[False] * 5 + [True], [False] * 6])
    (program,) = capture(Stack(*layers).eval(), (x, padded), {}).programs
    found = match(program)
    assert all(isinstance(site, AttentionSite) for site in found), found
    return found  # type: ignore[return-value]


def test_the_same_layer_is_examined_once(examined: list[object]) -> None:
    one, other, third = sites_of(Layer(), Layer(), Layer())
    assert len(examined) == 1
    assert one.convention == other.convention == third.convention and one.convention.half_steps == 3
    # What every layer makes of the mask is its own, the mask that it is made of is one.
    masks = {site.mask.node.name for site in (one, other, third) if site.mask is not None}
    assert masks == {"padded"}
    assert all(site.mask is not None and site.mask.node in site.inputs for site in (one, other, third))


def test_layers_that_differ_are_examined_themselves(examined: list[object]) -> None:
    """In half-steps, a floor, a bias, and a mask that hides nothing."""
    biased = Layer(bias=torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))
    shown = Layer(hidden=lambda padded: torch.zeros_like(padded[:, None], dtype=torch.float32))
    one, *others = sites_of(Layer(), Layer(half_steps=4), Layer(floor=1e-6), biased, shown)
    assert len(examined) == 5
    assert [site.convention.half_steps for site in (one, *others)] == [3, 4, 3, 3, 3]
    assert all(own.convention != one.convention or own.bias != one.bias for own in others)
