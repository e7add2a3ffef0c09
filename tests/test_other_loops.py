"""Loops as others write them, compiled and held against the untouched model, with its gradients, on what
calibration did not hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from analyses import random
from torch import Tensor, nn

import asapc
from asapc.errors import InputError, NoSiteError

LOSSLESS = {"operator": "lossless", "batch_size": 8, "max_examples": 8, "selection_examples": 8}
Inputs = Callable[..., dict[str, Tensor]]


def compiled(net: nn.Module, inputs: Inputs) -> nn.Module:
    batches = [inputs(4, 12, seed) for seed in range(9)]
    model, report = asapc.compile(copy.deepcopy(net), batches, recipe=LOSSLESS, examples=4)
    assert report.facts["sites"] and not report.facts.get("refused")
    return model


def assert_equal(net: nn.Module, model: nn.Module, tried: Iterable[dict[str, Tensor]]) -> None:
    """Outputs, and gradients of inputs and of all parameters."""
    for given in tried:
        both = []
        for one in (net, model):
            own = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in given.items()}
            output = one(**own)
            wanted = [x for x in own.values() if x.requires_grad] + list(one.parameters())
            weights = random(*output.shape, seed=9)
            slopes = torch.autograd.grad((output * weights).sum(), wanted, allow_unused=True)
            both.append((output, *slopes))
        most = max(float(x.abs().max()) for x in both[0][1:] if x is not None)
        for expected, found in zip(*both, strict=True):
            if expected is None:
                assert found is None or not found.any()
                continue
            assert bool(expected.isfinite().all())
            apart, largest = (x.detach().abs().max() for x in (found - expected, expected))
            # Of a gradient, what its terms leave where they cancel: as in passes.gradients.
            assert float(apart) <= 1e-4 * float(largest) + 2e-5 * most * (expected is not both[0][0])


# A mask within the loop


class Pooling(nn.Module):
    """Latents that share the tokens among them; a mask takes its mass from a token at every turn."""

    def __init__(self, way: str, rows_last: bool) -> None:
        super().__init__()
        self.latents, self.way, self.rows_last = nn.Parameter(random(4, 6, seed=5)), way, rows_last

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = x @ self.latents.mT
        plan = self.duals(scores, mask) if self.way == "duals" else self.scalings(scores, mask)
        return plan.mT @ x

    def duals(self, scores: Tensor, hidden: Tensor) -> Tensor:
        share = (4 / (~hidden).sum(1, keepdim=True)).log()
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[:, 0])
        for step in range(5 if self.rows_last else 4):
            if step % 2 == 0:
                f = (share - torch.logsumexp(scores + g[:, None], 2)).masked_fill(hidden, -1e8)
            else:
                g = -torch.logsumexp(scores + f[..., None], 1)
        return torch.exp(scores + f[..., None] + g[:, None])

    def scalings(self, scores: Tensor, keep: Tensor) -> Tensor:
        kernel, shown = scores.exp(), keep.float()
        share = 4.0 / shown.sum(1, keepdim=True)
        b = torch.ones_like(scores[:, 0])
        for step in range(5 if self.rows_last else 4):
            if step % 2 == 0:
                a = share / (kernel @ b[..., None])[..., 0] * shown
            else:
                b = 1.0 / (kernel.mT @ a[..., None])[..., 0]
        return a[..., None] * kernel * b[:, None]


class Shares(Pooling):
    """Masses that somebody else has divided among the tokens."""

    def scalings(self, scores: Tensor, keep: Tensor) -> Tensor:
        kernel, share = scores.exp(), 4.0 * keep / keep.sum(1, keepdim=True)
        b = torch.ones_like(scores[:, 0])
        for _ in range(3):
            a = share / (kernel @ b[..., None])[..., 0]
            b = 1.0 / (kernel.mT @ a[..., None])[..., 0]
        return a[..., None] * kernel * b[:, None]


WAYS = ["duals", "scalings", "numbers"]


def masked(way: str) -> Inputs:
    def inputs(batch: int, tokens: int, seed: int, lengths: Any = None, scale: float = 1.0) -> Any:
        if lengths is None:
            lengths = 3 + (random(batch, seed=seed).abs() * tokens).long() % (tokens - 2)
        keep = torch.arange(tokens) < torch.as_tensor(lengths)[:, None]
        mask = {"duals": ~keep, "scalings": keep, "numbers": keep.float()}[way]
        return {"x": scale * random(batch, tokens, 6, seed=seed), "mask": mask}

    return inputs


@pytest.mark.parametrize("rows_last", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_within_the_loop_takes_mass(way: str, rows_last: bool) -> None:
    net, inputs = Pooling(way, rows_last).eval(), masked(way)
    model = compiled(net, inputs)
    sharp = 20.0 if way == "duals" else 3.0  # exp holds no more
    tried = [inputs(9, 12, 10), inputs(1, 17, 11), inputs(3, 5, 12, [5, 5, 5]),
             inputs(4, 9, 13, [1, 9, 2, 1]), inputs(3, 30, 14, scale=sharp)]  # fmt: skip
    assert_equal(net, model, tried)
    with torch.no_grad(), pytest.raises(InputError, match="every example has an active key"):
        model(**inputs(2, 6, 15, [0, 6]))


def test_a_mask_of_numbers_hides_what_scores_like_far_more() -> None:
    net, inputs = Pooling("numbers", False).eval(), masked("numbers")
    given = inputs(3, 12, 10, [4, 9, 1])
    shown = given["mask"][..., None]
    given["x"] *= 0.3
    with torch.no_grad():  # of a mask of 0 the gradient is more than float32 holds
        given["x"] += (5 - 85 * shown) * torch.linalg.pinv(net.latents)[:, 0]  # for one latent alone
        torch.testing.assert_close(compiled(net, inputs)(**given), net(**given), rtol=1e-4, atol=1e-5)


def test_masses_that_are_never_0_in_the_data_have_gradients_where_they_are() -> None:
    net, inputs = Shares("numbers", False).eval(), masked("numbers")

    def whole(batch: int, tokens: int, seed: int) -> dict[str, Tensor]:
        return inputs(batch, tokens, seed, [tokens] * batch)

    model = compiled(net, whole)
    assert_equal(net, model, [whole(3, 12, 10), inputs(9, 12, 10), inputs(4, 9, 13, [1, 9, 2, 5])])


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_is_kept_whose_data_has_an_example_without_tokens(way: str) -> None:
    inputs = masked(way)
    batches = [inputs(4, 12, seed, [0, 3, 12, 7]) for seed in range(9)]
    with pytest.raises(NoSiteError, match="hides every token"):
        asapc.compile(Pooling(way, False).eval(), batches, recipe=LOSSLESS, examples=4)


# Padding whose scores are raised, as if they were costs


class Bridge(nn.Module):
    """Tokens to pivots to tokens: every half-step moves the mass back to what a mask has raised, and the
    loop may end early."""

    def __init__(self) -> None:
        super().__init__()
        self.pivots = nn.Parameter(random(5, 6, seed=5))

    def plan(self, similarity: Tensor) -> Tensor:
        cost = -similarity
        f, g = torch.zeros_like(cost[..., 0]), torch.zeros_like(cost[:, 0])
        log_mu, log_nu = (torch.full_like(x, 1 / x.shape[1]).log() for x in (f, g))
        for step in range(5):
            logs = -cost + f[..., None] + g[:, None]
            if step % 2 == 0:
                before = f
                f = log_mu - torch.logsumexp(logs, -1) + f
                if (f - before).abs().sum(-1).mean().item() < 1e-12:
                    break
            else:
                g = log_nu - torch.logsumexp(logs, -2) + g
        return torch.exp(-cost + f[..., None] + g[:, None])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        raised = 1e6 * (1 - mask.float())
        there = self.plan(x @ self.pivots.mT + raised[..., None])
        back = self.plan(self.pivots @ x.mT + raised[:, None])
        rows = there @ (back @ torch.ones_like(x[..., :1]))
        return there @ (back @ x) / rows.clamp_min(1e-6) * mask[..., None]


@pytest.mark.parametrize("way", ["scalings", "numbers"])
def test_padding_that_is_raised_keeps_its_mass(way: str) -> None:
    net, inputs = Bridge().eval(), masked(way)
    model = compiled(net, inputs)
    tried = [inputs(9, 12, 10), inputs(1, 17, 11), inputs(3, 5, 12, [5, 5, 5]),
             inputs(4, 9, 13, [1, 0, 2, 9]), inputs(3, 30, 14, scale=20.0)]  # fmt: skip
    assert_equal(net, model, tried)


# Slack that is learnt


class Matcher(nn.Module):
    """A row and a column for points without a partner, of one learnt score, never normalised."""

    def __init__(self, log: bool) -> None:
        super().__init__()
        self.alone, self.log = nn.Parameter(torch.full((1,), 0.4)), log

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = x @ y.mT
        scores = torch.cat([scores, scores.new_ones(len(x), x.shape[1], 1) * self.alone], -1)
        scores = torch.cat([scores, self.alone.expand(len(x), 1, scores.shape[-1])], -2)
        for step in range(5):
            if step % 2 == 0:
                inner, last = scores[:, :-1], scores[:, -1:]
                scores = torch.cat([inner - inner.logsumexp(-1, keepdim=True), last], -2)
            else:
                inner, last = scores[..., :-1], scores[..., -1:]
                scores = torch.cat([inner - inner.logsumexp(-2, keepdim=True), last], -1)
        logs = scores[:, :-1, :-1]
        return logs if self.log else logs.exp()


def points(batch: int, tokens: int, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    x, y = random(batch, tokens, 4, seed=seed), random(batch, tokens - 2, 4, seed=seed + 50)
    return {"x": scale * x, "y": y}


@pytest.mark.parametrize("log", [False, True])
def test_slack_that_is_learnt_stays_a_weight(log: bool) -> None:
    net = Matcher(log).eval()
    model = compiled(net, points)
    for level in (0.4, -3.0, 2.5):
        for one in (net, model):
            one.load_state_dict({"alone": torch.tensor([level])})
        tried = [points(9, 12, 10), points(1, 17, 11), points(2, 4, 12), points(3, 30, 13, 20.0)]
        assert_equal(net, model, tried)


# Support, damping and a constant at once


class Flow(nn.Module):
    """Mass moves to near points alone, and may be lost; where it went, on average, is what counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        near = torch.cdist(x, y) < 3.0
        kernel = torch.exp(-self.scale * torch.cdist(x.sin(), y.sin())) * near
        n, m = kernel.shape[1:]
        a, power = torch.ones_like(kernel[..., :1]) / n, 0.7
        for _ in range(3):
            b = (1 / m / (kernel.mT @ a + 1e-8)) ** power
            a = (1 / n / (kernel @ b + 1e-8)) ** power
        plan = a * kernel * b.mT
        return plan @ y / (plan.sum(-1, keepdim=True) + 1e-8)


def test_support_damping_and_a_constant_at_once() -> None:
    net = Flow().eval()
    model = compiled(net, points)
    tried = [points(9, 12, 10), points(1, 17, 11), points(2, 4, 12), points(3, 30, 13, 20.0)]
    assert_equal(net, model, tried)
