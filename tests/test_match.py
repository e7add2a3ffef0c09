"""Capture, match, lift: attention written many ways, recognised by what it does."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import attention_zoo as zoo
import pytest
import torch
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
from asapc.passes.sinkhorn.site import AttentionSite
from asapc.program.calls import operator_calls


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
    "Multiplied": "an input multiplies its attention within the loop",
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


@pytest.mark.parametrize("name", ["Causal", "ChannelMixing"])
def test_loops_between_other_things_become_plans(name: str) -> None:
    """A mask that differs between queries is part of the scores; a mixer's values are streams."""
    model, program, (site,) = captured(name)
    assert isinstance(site, PlanSite) and site.probe_error < 1e-9
    replays(model, program, site)


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
    with pytest.raises(InputError, match="the model runs on the given data") as raised:
        capture(model, (torch.randn(3, 10, 7),), {})
    assert isinstance(raised.value.__cause__, error or RuntimeError)


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
