"""Loops that end early where that changes their plan: the operator's rule, and who may have it."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import asapc.kernels.library
from asapc.inputs.program_operators import refused_call
from asapc.ir import Ending, PlanConvention
from asapc.onnx import twins
from asapc.operators import plan as reference
from asapc.operators.catalogue import convention_from_json
from asapc.report.tables import convention_text

assert asapc.kernels.library
PLAIN = [1.0, 0.0, 0.0, 0.0]
SPREADS = (0.0, 0.1, 0.5, 1.0, 3.0)
op = torch.ops.asapc.plan


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The operator


def written_out(s: Tensor, most: int, rows_first: bool, rule: Ending) -> tuple[Tensor, int]:
    """The plan in float64, and the half-steps that were done."""
    s = s.double()
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    left = math.inf
    for step in range(most):
        if left == 0:
            return (s + f[..., None] + g[..., None, :]).exp(), step
        left -= 1
        if (step % 2 == 0) != rows_first:
            g = -math.log(s.shape[-1]) - torch.logsumexp(s + f[..., None], -2)
            continue
        before, f = f, -math.log(s.shape[-2]) - torch.logsumexp(s + g[..., None, :], -1)
        change = f - before if rule.moves == "duals" else f.exp() - before.exp()
        total = change.abs().sum(-1) if rule.summed else change.abs().mean(-1)
        if left == math.inf and total.mean() <= rule.threshold:
            left = rule.after
    return (s + f[..., None] + g[..., None, :]).exp(), most


THRESHOLDS = {"duals": 0.03, "scalings": 1e-4}
RULES = [
    Ending(moves, threshold, *rest)
    for moves, threshold in THRESHOLDS.items() for rest in itertools.product((False, True), (0, 1, 2))
]  # fmt: skip


@pytest.mark.parametrize("rows_first", [True, False], ids=["rows first", "columns first"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_ends_where_the_loop_does(rule: Ending, rows_first: bool) -> None:
    counts = set()
    for spread, shape in itertools.product(SPREADS, [(3, 2, 9, 7), (2, 1, 40, 33)]):
        s = spread * random(*shape)
        expected, count = written_out(s, 31, rows_first, rule)
        given = (s, None, None, 1.0, 31, rows_first, PLAIN)
        named = asdict(rule)
        counts.add(count)
        for function in (op, reference.plan, twins.plan):
            torch.testing.assert_close(function(*given, **named).double(), expected, rtol=1e-4, atol=1e-7)
            assert torch.allclose(function(*given, **named, log=True).exp().double(), expected, rtol=1e-4)
    assert len(counts) > 3  # they are told apart


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
