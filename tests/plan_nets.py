"""Loops on scores that no layer's queries and keys give, in the styles that people write them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class Matcher(nn.Module):
    """Two images' descriptors, a learnt dustbin, potentials in the log domain; the log plan is returned,
    and so is each point's best match (the style of matchers)."""

    def __init__(self, half_steps: int = 6, dim: int = 8) -> None:
        super().__init__()
        self.project, self.bin = nn.Linear(dim, dim), nn.Parameter(torch.tensor(0.7))
        self.half_steps = half_steps

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.project(x) @ self.project(y).transpose(-1, -2)
        b, n, m = scores.shape
        column, row = self.bin.expand(b, n, 1), self.bin.expand(b, 1, m)
        corner = self.bin.expand(b, 1, 1)
        scores = torch.cat([torch.cat([scores, column], -1), torch.cat([row, corner], -1)], 1)
        one = torch.tensor(1.0)  # a number that the program holds and the model does not
        norm = -(n * one + m * one).log()
        log_mu = torch.cat([norm.expand(n), (m * one).log()[None] + norm])[None].expand(b, -1)
        log_nu = torch.cat([norm.expand(m), (n * one).log()[None] + norm])[None].expand(b, -1)
        u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
        for step in range(self.half_steps):
            if step % 2 == 0:
                u = log_mu - torch.logsumexp(scores + v[:, None], 2)
            else:
                v = log_nu - torch.logsumexp(scores + u[:, :, None], 1)
        log_plan = scores + u[:, :, None] + v[:, None] - norm
        return log_plan, log_plan[:, :-1, :-1].argmax(-1)


class Latents(nn.Module):
    """Learnt queries, squared distances as costs, one learnt epsilon a head, duals in cost units."""

    def __init__(self, latents: int = 6, dim: int = 8, heads: int = 2, iterations: int = 3) -> None:
        super().__init__()
        self.q, self.kv = nn.Parameter(torch.randn(latents, dim)), nn.Linear(dim, 2 * dim)
        self.log_epsilon = nn.Parameter(torch.linspace(0.3, -0.5, heads))
        self.heads, self.iterations = heads, iterations

    def forward(self, x: Tensor) -> Tensor:
        k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in self.kv(x).chunk(2, -1))
        q = self.q.expand(x.shape[0], -1, -1).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
        costs, epsilon = torch.cdist(q, k).square(), self.log_epsilon.exp()[:, None, None]
        f, g = torch.zeros_like(costs[..., :1]), torch.zeros_like(costs[..., :1, :])
        for _ in range(self.iterations):
            f = -epsilon * torch.logsumexp((g - costs) / epsilon, -1, keepdim=True)
            g = -epsilon * torch.logsumexp((f - costs) / epsilon, -2, keepdim=True)
        plan = torch.exp((f + g - costs) / epsilon)
        return (plan @ v).transpose(1, 2).flatten(2)


class Masses(nn.Module):
    """Marginals that the model is given, as masses: tokens without mass have none."""

    def forward(self, scores: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        log_mu, log_nu = mu.log(), nu.log()
        f, g = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
        for _ in range(3):
            g = log_nu - torch.logsumexp(scores + f[..., None], -2)
            f = log_mu - torch.logsumexp(scores + g[..., None, :], -1)
        return (scores + f[..., None] + g[..., None, :]).exp()


class MassesAnew(Masses):
    """Every half-step takes the logarithms anew, beside a constant."""

    def forward(self, scores: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        f, g = torch.zeros_like(mu), torch.zeros_like(nu)
        for _ in range(3):
            g = torch.log(nu + 1e-8) - torch.logsumexp(scores + f[..., None], -2)
            f = torch.log(mu + 1e-8) - torch.logsumexp(scores + g[..., None, :], -1)
        return (scores + f[..., None] + g[..., None, :]).exp()


class MassesByScalings(Masses):
    """The same as optimal transport is taught: a kernel, its scalings, a constant in the divisions."""

    def forward(self, scores: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        kernel = (scores - scores.amax((-1, -2), keepdim=True)).exp()
        a = torch.ones_like(mu)
        for _ in range(3):
            b = nu / ((kernel.mT @ a[..., None])[..., 0] + 1e-4)
            a = mu / ((kernel @ b[..., None])[..., 0] + 1e-4)
        return a[..., None] * kernel * b[..., None, :]


class MassesOfAttention(MassesByScalings):
    """The same, of which attention is made: every row is divided by its sum."""

    def forward(self, scores: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        plan = super().forward(scores, mu, nu)
        return plan / plan.sum(-1, keepdim=True).clamp(min=1e-12)


class MassesInThePlan(Masses):
    """The same on the plan itself: each of its sums is brought to a mass."""

    def forward(self, scores: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        plan = (scores - scores.amax((-1, -2), keepdim=True)).exp()
        for _ in range(3):
            plan = plan * nu[:, None] / (plan.sum(-2, keepdim=True) + 1e-3)
            plan = plan / (plan.sum(-1, keepdim=True) + 1e-3) * mu[..., None]
        return plan


class ActiveMasses(nn.Module):
    """The tokens of a cloud among themselves: one tensor [B, 1, N] is both marginals, 1/n or nothing."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.to_qk, self.heads = nn.Linear(8, 16 * heads), heads

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        q, k = self.to_qk(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / 8**0.5).masked_fill(~shown[:, None, None], -1e9)
        count = shown.sum(-1).float()
        masses = torch.where(shown, -count.log()[:, None], -1e9)[:, None]
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for _ in range(3):
            f = masses - torch.logsumexp(scores + g[..., None, :], -1)
            g = masses - torch.logsumexp(scores + f[..., None], -2)
        return torch.exp(scores + f[..., None] + g[..., None, :]) * count[:, None, None, None]


class TokensFirst(nn.Module):
    """Scores [B, N, M, H] from a network on pairs: normalised over axes 1 and 2."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.net = nn.Linear(4, heads)

    def forward(self, pairs: Tensor) -> Tensor:
        scores = 3 * self.net(pairs)
        for step in range(4):
            scores = scores - scores.logsumexp(1 if step % 2 else 2, keepdim=True)
        return scores.exp()


class Static(nn.Module):
    """Streams that are mixed alike whatever they hold: the scores are a parameter."""

    def __init__(self, streams: int = 4) -> None:
        super().__init__()
        self.mix, self.layer = nn.Parameter(torch.randn(streams, streams)), nn.Linear(8, 8)

    def forward(self, streams: Tensor) -> Tensor:
        log_plan = self.mix / 0.7
        for step in range(20):
            log_plan = log_plan.log_softmax(-2 if step % 2 else -1)
        return torch.einsum("ij,bnjd->bnid", log_plan.exp(), self.layer(streams))


class TwoViews(nn.Module):
    """The scores of two views of every example, side by side in one tensor; twice the plan, by its
    logarithm."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        views = torch.stack([x, self.project(x)])
        plan = views @ views.flip(0).mT
        for step in range(6):
            plan = plan - plan.logsumexp(-2 if step % 2 else -1, keepdim=True)
        return (plan + math.log(2)).exp().transpose(0, 1)


class Turned(nn.Module):
    """Every sum is over the rows of something: of the scores, or of their transpose."""

    def __init__(self, streams: int = 4) -> None:
        super().__init__()
        self.to_scores, self.streams = nn.Linear(8, streams * streams), streams

    def forward(self, x: Tensor) -> Tensor:
        scores = 2 * self.to_scores(x).unflatten(-1, (self.streams, self.streams))
        f = torch.zeros_like(scores[..., 0])
        for _ in range(3):
            g = -torch.logsumexp(scores + f[..., None], -2)
            f = -torch.logsumexp(scores.mT + g[..., None], -2)
        return torch.exp(scores + f[..., None] + g[..., None, :])


class Stacked(nn.Module):
    """Streams that are mixed twice; what makes scores of them multiplies a weight, and is no layer."""

    def __init__(self, einsum: bool, streams: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.einsum = einsum
        self.weights = nn.ParameterList(torch.randn(streams * dim, streams**2) / 3 for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        streams = torch.stack([x, x.roll(1, -1), -x, x.flip(-1)], -2)
        for weight in self.weights:
            flat = nn.functional.normalize(streams.flatten(-2), dim=-1) * 4
            scores = torch.einsum("... d, d e -> ... e", flat, weight) if self.einsum else flat @ weight
            mixer = scores.unflatten(-1, (4, 4))
            for step in range(6):
                mixer = mixer - mixer.logsumexp(-2 if step % 2 else -1, keepdim=True)
            streams = torch.einsum("...ij,...jd->...id", mixer.exp(), streams)
        return streams


class Columns(nn.Module):
    """One matrix, whose scalings are columns of numbers beside it."""

    def forward(self, scores: Tensor) -> Tensor:
        kernel = torch.exp(scores)
        n, m = kernel.shape
        a = torch.full((n, 1), 1 / n)
        for _ in range(4):
            b = torch.full((m, 1), 1 / m) / (kernel.t() @ a + 1e-12)
            a = torch.full((n, 1), 1 / n) / (kernel @ b + 1e-12)
        return a * kernel * b.t()


class Written(nn.Module):
    """Its kernel and shares are written into zeros, example by example."""

    def forward(self, scores: Tensor) -> Tensor:
        plan, rows = torch.zeros_like(scores), scores.shape[1]
        for b in range(len(plan)):
            plan[b, :rows] = scores[b, :rows].sigmoid()
        plan = plan + 1e-4
        for step in range(8):
            sums = plan.sum(-1 - step % 2, keepdim=True).expand(plan.shape)
            shares = torch.zeros_like(plan)
            for b in range(len(plan)):
                shares[b, :rows] = 1 / sums[b, :rows]
            plan = plan * shares
        return plan


class OneQuery(nn.Module):
    """One seed pools everything: its plan is what its columns' mass is, whatever the scores."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.seed = nn.Parameter(torch.randn(1, dim))

    def forward(self, x: Tensor) -> Tensor:
        log_a = -torch.cdist(self.seed.expand(x.shape[0], -1, -1), x)
        for _ in range(3):
            log_a = log_a - log_a.logsumexp(-1, keepdim=True)
            log_a = log_a - log_a.logsumexp(-2, keepdim=True)
        return log_a.exp() @ x


class Damped(nn.Module):
    """Unbalanced: every update is damped.  unit: masses of 1, not of 1/N.  outside: of the damped sum."""

    def __init__(
        self, rows: float = 0.8, columns: float = 0.8, half_steps: int = 6, unit: bool = True,
        outside: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rows, self.columns, self.half_steps = rows, columns, half_steps
        self.unit, self.outside = unit, outside

    def forward(self, scores: Tensor, mu: Tensor | None = None, nu: Tensor | None = None) -> Tensor:
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        log_mu, log_nu = (
            torch.zeros_like(x) - (0.0 if self.unit else (x.new_ones(()) * x.shape[-1]).log())
            for x in (f, g)
        )
        if mu is not None and nu is not None:
            log_mu, log_nu = mu.log(), nu.log()
        for step in range(self.half_steps):
            if step % 2 == 0:
                f = self.update(torch.logsumexp(scores + g[..., None, :], -1), log_mu, self.rows)
            else:
                g = self.update(torch.logsumexp(scores + f[..., None], -2), log_nu, self.columns)
        return (scores + f[..., None] + g[..., None, :]).exp()

    def update(self, total: Tensor, log_mass: Tensor, damping: float) -> Tensor:
        return log_mass - damping * total if self.outside else damping * (log_mass - total)


class Unbalanced(nn.Module):
    """The same in the exp domain, from scalings of 1/N and 1/M."""

    rows, columns, half_steps = 2 / 3, 2 / 3, 6

    def forward(self, scores: Tensor) -> Tensor:
        kernel = scores.exp()
        n, m = scores.shape[-2:]
        u, v = torch.ones_like(kernel[..., :1]) / n, torch.ones_like(kernel[..., :1, :]).mT / m
        for _ in range(self.half_steps // 2):
            u = (1 / (kernel @ v) / n) ** self.rows
            v = (1 / (kernel.mT @ u) / m) ** self.columns
        return u * kernel * v.mT


class Stopping(nn.Module):
    """Ends where a half-step changes little, as libraries of transport do: looked at now and then."""

    def __init__(self, threshold: float = 1e-2) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, scores: Tensor) -> Tensor:
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for step in range(12):
            g = -torch.logsumexp(scores + f[..., None], -2)
            f = -torch.logsumexp(scores + g[..., None, :], -1)
            if step % 5 == 0:
                sums = (scores + f[..., None] + g[..., None, :]).exp().sum(-2)
                if (sums - scores.shape[-2] / scores.shape[-1]).norm().item() < self.threshold:
                    break
        return (scores + f[..., None] + g[..., None, :]).exp()


class StoppingScalings(nn.Module):
    """The same with scalings, of which the plan's are one product."""

    def forward(self, scores: Tensor) -> Tensor:
        kernel = torch.exp(scores)
        a, b = torch.ones_like(kernel[..., :1]), torch.ones_like(kernel[..., :1, :]).mT
        for _ in range(12):
            before = a
            a = 1 / (kernel @ b)
            b = 1 / (kernel.mT @ a)
            if (a - before).abs().mean().item() < 1e-2:
                break
        return (a @ b.mT) * kernel


class Stepped(nn.Module):
    """Every dual is half of what it was and half of what it would be: no finite loop of ours."""

    def forward(self, scores: Tensor) -> Tensor:
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for _ in range(5):
            f = 0.5 * f - 0.5 * torch.logsumexp(scores + g[..., None, :], -1)
            g = 0.5 * g - 0.5 * torch.logsumexp(scores + f[..., None], -2)
        return (scores + f[..., None] + g[..., None, :]).exp()


class Duals(nn.Module):
    """The potentials are returned, too."""

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for _ in range(5):
            f = -torch.logsumexp(scores + g[..., None, :], -1)
            g = -torch.logsumexp(scores + f[..., None], -2)
        return (scores + f[..., None] + g[..., None, :]).exp(), g


class SideBySide(nn.Module):
    """Two softmaxes of the same scores: no loop."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1) * scores.softmax(-2)


class Scaled(nn.Module):
    """The exp domain: vectors that are multiplied with K, and a sum that is added in every half-step."""

    def forward(self, scores: Tensor) -> Tensor:
        kernel = torch.exp(scores)
        a = torch.ones_like(kernel[..., :1])
        for _ in range(3):
            b = 1.0 / (kernel.transpose(-1, -2) @ a + 1e-8)
            a = 1.0 / (kernel @ b + 1e-8)
        return a * kernel * b.transpose(-1, -2)


class Spread(nn.Module):
    """Sums that matrices of ones repeat, spelt out over three axes."""

    def forward(self, scores: Tensor) -> Tensor:
        plan, (n, m) = scores.exp(), scores.shape[1:]
        for _ in range(3):
            plan = plan / (torch.ones(1, n, n).unsqueeze(3) * plan.unsqueeze(1)).sum(2)
            plan = plan / (plan.unsqueeze(3) * torch.ones(1, m, m).unsqueeze(1)).sum(2)
        return plan


class Products(nn.Module):
    """A kernel of products of positive features, no exponential anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        features = nn.functional.softplus(x)
        plan = features @ features.transpose(-1, -2)
        for _ in range(3):
            plan = plan / plan.sum(-1, keepdim=True)
            plan = plan / plan.sum(-2, keepdim=True)
        return plan


class PaddedMatcher(nn.Module):
    """Points of two clouds, some of which are padding; dustbin and masses are written in place."""

    far = 1e12

    def __init__(self, half_steps: int = 6) -> None:
        super().__init__()
        self.bin, self.half_steps = nn.Parameter(torch.tensor(1.0)), half_steps

    def masses(self, hidden: Tensor, rest: Tensor, norm: Tensor) -> Tensor:
        n = hidden.shape[1] - 1
        logs = torch.empty(hidden.shape)
        logs[:, :n] = norm[:, None]
        logs[:, n] = rest.log() + norm
        logs[hidden] = -self.far
        return logs

    def forward(self, x: Tensor, y: Tensor, shown: Tensor, others: Tensor) -> Tensor:
        b, n, m = x.shape[0], x.shape[1], y.shape[1]
        rows, columns = torch.zeros(b, n + 1, dtype=torch.bool), torch.zeros(b, m + 1, dtype=torch.bool)
        rows[:, :n], columns[:, :m] = ~shown, ~others
        scores = torch.cat([x @ y.transpose(1, 2), self.bin.expand(b, n, 1)], -1)
        scores = torch.cat([scores, self.bin.expand(b, 1, m + 1)], 1)
        scores = scores.masked_fill(rows[:, :, None] | columns[:, None], -self.far)
        some, other = shown.float().sum(1), others.float().sum(1)
        norm = -(some + other).log()
        log_mu, log_nu = self.masses(rows, other, norm), self.masses(columns, some, norm)
        u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
        for _ in range(self.half_steps // 2):
            u = log_mu - (scores + v[:, None]).logsumexp(2)
            v = log_nu - (scores + u[:, :, None]).logsumexp(1)
        return scores + u[:, :, None] + v[:, None] - norm[:, None, None]


class Bridged(nn.Module):
    """Tokens to pivots to tokens, some of which cost more; heads merged into the batch, masses of theirs,
    and a division by the rows of both plans' product."""

    heads, pivots = 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.pivot = nn.Parameter(torch.randn(self.heads, self.pivots, 4))
        self.logits = nn.Parameter(torch.randn(self.heads, self.pivots))

    def plan(self, scores: Tensor, log_mu: Tensor, log_nu: Tensor) -> Tensor:
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for _ in range(2):
            f = log_mu - (scores + g[..., None, :]).logsumexp(-1)
            g = log_nu - (scores + f[..., None]).logsumexp(-2)
        return (scores + f[..., None] + g[..., None, :]).exp()

    def forward(self, x: Tensor, cost: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = x.unflatten(-1, (self.heads, -1)).transpose(1, 2).reshape(b * self.heads, n, -1)
        z = self.pivot[None].expand(b, -1, -1, -1).reshape(b * self.heads, self.pivots, -1)
        mass = self.logits.log_softmax(-1)[None].expand(b, -1, -1).reshape(b * self.heads, self.pivots)
        even = torch.zeros_like(q[..., 0]) - torch.ones_like(q[0, :, 0]).sum().log()
        there = self.plan(q @ z.mT, even, mass)
        back = self.plan(z @ q.mT - cost.repeat_interleave(self.heads, 0)[:, None], mass, even)
        y = there @ (back @ q)
        y = y / (there @ (back @ torch.ones_like(q[..., :1]))).clamp_min(1e-6)
        return y.reshape(b, self.heads, n, -1).transpose(1, 2).flatten(2)


def inputs_for(net: nn.Module, batch: int = 3, tokens: int = 9, seed: int = 0) -> tuple[Any, ...]:
    """An example call."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if isinstance(net, Matcher):
        return random(batch, tokens, 8), random(batch, tokens - 2, 8)
    if isinstance(net, PaddedMatcher):
        shown = torch.arange(tokens) < torch.tensor([[tokens], [4], [2]])[torch.arange(batch) % 3]
        return random(batch, tokens, 8), random(batch, tokens - 1, 8), shown, shown[:, 1:]
    if isinstance(net, ActiveMasses):
        return random(batch, tokens, 8), torch.arange(tokens) < tokens - torch.arange(batch)[:, None]
    if isinstance(net, Bridged):
        return random(batch, tokens, 8), random(batch, tokens).square()
    if isinstance(net, Masses):
        masses = random(batch, tokens).softmax(-1), random(batch, 5).softmax(-1).clone()
        masses[1][0, 3] = 0.0
        return random(batch, tokens, 5), *masses
    if isinstance(net, Static):
        return (random(batch, tokens, 4, 8),)
    if isinstance(net, TokensFirst):
        return (random(batch, tokens, 7, 4),)
    if isinstance(net, Damped | Unbalanced | Stepped | Duals | SideBySide | Scaled):
        return (random(batch, tokens, 6),)
    return (random(batch, tokens, 8),)
