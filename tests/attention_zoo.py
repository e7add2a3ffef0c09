"""Attention modules written the many ways that published and private code writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def module(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module of these parts that has this forward."""
    made = type("Module", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


class _Projected(nn.Module):
    """q, k, v projections of one input, split into heads; subclasses give the attention."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (x.shape[0], x.shape[1], self.heads, -1)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        return q, k, v

    def merge(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(2))


class SinkhornDistance(nn.Module):
    """A potential loop with the habits of published code: squeezed marginals, .item(), in-place."""

    def __init__(self, epsilon: float, half_steps: int, reset: bool = False) -> None:
        super().__init__()
        self.epsilon, self.half_steps, self.reset = epsilon, half_steps, reset

    def forward(self, scores: Tensor) -> Tensor:
        batch, n, m = scores.shape
        mu = torch.empty(batch, n, dtype=torch.float).fill_(1.0 / n).squeeze()
        nu = torch.empty(batch, m, dtype=torch.float).fill_(1.0 / m).squeeze()
        u, v = torch.zeros_like(mu), torch.zeros_like(nu)
        for step in range(self.half_steps):
            m_ij = (scores + u.unsqueeze(-1) + v.unsqueeze(-2)) / self.epsilon
            if step % 2 == 0:
                before = u
                u = self.epsilon * (torch.log(mu) - torch.logsumexp(m_ij, -1)) + u
                err = (u - before).abs().sum(-1).mean()
            else:
                v = self.epsilon * (torch.log(nu) - torch.logsumexp(m_ij.transpose(-2, -1), -1)) + v
                if self.reset:
                    v = v.detach().requires_grad_(False)
                    v[v > 9 * 1e8] = 0.0
            if err.item() < 1e-12:
                break
        return torch.exp((scores + u.unsqueeze(-1) + v.unsqueeze(-2)) / self.epsilon)


class LogDomainMasked(_Projected):
    """Early stop, normaliser made in forward, in-place mask, merged view, maps returned in a list."""

    def __init__(self, half_steps: int = 4, epsilon: float = 1.0) -> None:
        super().__init__()
        self.half_steps, self.epsilon = half_steps, epsilon

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        q, k, v = self.split(x)
        mask = ids.eq(0).unsqueeze(1).repeat(1, x.size(1), 1).unsqueeze(1).repeat(1, 2, 1, 1)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        scores.masked_fill_(mask, -1e9)
        shape = scores.shape
        normalise = SinkhornDistance(self.epsilon, self.half_steps, reset=True)
        weights = normalise(scores.view(-1, shape[2], shape[3]))
        weights = (weights * weights.shape[-1]).view(shape)
        return self.merge(torch.matmul(weights, v)), [weights]


class NumpyMaps(nn.Module):
    """Attention maps converted to numpy inside forward: only its modules can be captured."""

    def __init__(self, half_steps: int = 3) -> None:
        super().__init__()
        self.attention = LogDomainPlain(half_steps)
        self.second = LogDomainPlain(half_steps)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        maps = []
        for block in (self.attention, self.second):
            y, weights = block(x)
            x = x + y
            maps.append(weights.cpu().detach().numpy())
        return x, maps


class LogDomainPlain(_Projected):
    """Log domain, no mask, merged heads, maps returned."""

    def __init__(self, half_steps: int = 3, epsilon: float = 0.5) -> None:
        super().__init__()
        self.sink = SinkhornDistance(epsilon, half_steps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = self.sink(scores.flatten(0, 1)) * scores.shape[-1]
        weights = weights.view(scores.shape)
        return self.merge(weights @ v), weights


class Beside(nn.Module):
    """Layers of the same tokens: one trace for a table of them."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


class ExpDomain(_Projected):
    """Scaling vectors in the exp domain, written with einsum; no attention map leaves."""

    def __init__(self, iterations: int = 3) -> None:
        super().__init__()
        self.iterations = iterations

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        kernel = torch.exp(torch.einsum("bhid,bhjd->bhij", q, k) / 3.0)
        n = kernel.shape[-1]
        b = torch.ones_like(kernel[..., 0, :])
        for _ in range(self.iterations):
            a = 1.0 / n / torch.einsum("bhij,bhj->bhi", kernel, b)
            b = 1.0 / n / torch.einsum("bhij,bhi->bhj", kernel, a)
        plan = torch.einsum("bhi,bhij,bhj->bhij", a, kernel, b)
        return self.merge(torch.einsum("bhij,bhjd->bhid", plan * n, v))


class ExpDomainMatmul(_Projected):
    """The same with matmul steps and a stabilising constant in the denominators."""

    def __init__(self, iterations: int = 3) -> None:
        super().__init__()
        self.iterations = iterations

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x * 0.5)
        kernel = torch.exp(q @ k.mT)
        b = torch.ones_like(kernel[..., :1, :]).mT
        for _ in range(self.iterations):
            a = 1.0 / (kernel @ b + 1e-9)
            b = 1.0 / (kernel.mT @ a + 1e-9)
        return self.merge((a * kernel * b.mT) @ v)


class Alternating(_Projected):
    """Softmax over keys, then alternate column and row normalisation; key mask by -inf."""

    def __init__(self, half_steps: int = 6) -> None:
        super().__init__()
        self.half_steps = half_steps

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = (q * 0.4) @ k.transpose(-2, -1)
        scores = scores.masked_fill(~keep[:, None, None, :], float("-inf"))
        weights = scores.softmax(-1)
        for step in range(1, self.half_steps):
            dim = -2 if step % 2 else -1
            weights = weights / weights.sum(dim, keepdim=True).clamp(min=1e-30)
        return self.merge(weights @ v)


class Multiplied(Alternating):
    """Its first softmax sees the keys that every division hides again."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        p, active = (q @ k.mT).softmax(-1), keep[:, None, None].float()
        for axis in (-2, -1, -2, -1):
            p = p / (p.sum(axis, keepdim=True) + 1e-8) * active
        return self.merge(p @ v)


class Faded(Alternating):
    """Every division of its rows is followed by one that halves what a mask hides, and closes nothing."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        p, shown = (q @ k.mT).softmax(-1), 0.5 + 0.5 * keep[:, None, None].float()
        for _ in range(3):
            p = p / (p.sum(-2, keepdim=True) + 1e-8)
            p = p / (p.sum(-1, keepdim=True) + 1e-8) * shown
        return self.merge(p @ v)


class ColumnsFirst(_Projected):
    """Log-softmax normalisation, columns first."""

    def __init__(self, half_steps: int = 5) -> None:
        super().__init__()
        self.half_steps = half_steps

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        log_a = q @ k.transpose(-2, -1) * 0.6
        for step in range(self.half_steps):
            log_a = log_a.log_softmax(-1 if step % 2 else -2)
        return self.merge(log_a.exp() @ v)


class Biased(_Projected):
    """A learnt relative-position bias of near keys, added to the scores, both folded with epsilon."""

    def __init__(self, half_steps: int = 4, length: int = 10, epsilon: float = 0.7) -> None:
        super().__init__()
        self.half_steps, self.epsilon = half_steps, epsilon
        self.table = nn.Parameter(torch.randn(2, 2 * length - 1))
        offsets = torch.arange(length)[:, None] - torch.arange(length) + length - 1
        self.register_buffer("offsets", offsets)
        self.register_buffer("far", offsets == 0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        bias = self.table[:, self.offsets].masked_fill(self.far, 0.0)
        log_a = (q @ k.transpose(-2, -1) * 0.3 + bias) / self.epsilon
        for step in range(self.half_steps):
            log_a = log_a - log_a.logsumexp(-2 if step % 2 else -1, keepdim=True)
        return self.merge(log_a.exp() @ v)


class Cross(_Projected):
    """Cross-attention, N != M, no heads dimension merged, row-ending."""

    def __init__(self, half_steps: int = 7) -> None:
        super().__init__()
        self.half_steps = half_steps

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, _, _ = self.split(x)
        _, k, v = self.split(memory)
        log_a = q @ k.transpose(-2, -1) * 0.6
        for step in range(self.half_steps):
            log_a = log_a.log_softmax(-2 if step % 2 else -1)
        return self.merge(log_a.exp() @ v)


class Softmax(_Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge((q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v)


class Fused(_Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(nn.functional.scaled_dot_product_attention(q, k, v))


class Causal(_Projected):
    """Sinkhorn under a causal mask."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        n = x.shape[1]
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-2, -1)).masked_fill(future, -1e9).softmax(-1)
        for step in range(4):
            weights = weights / weights.sum(-1 if step % 2 else -2, keepdim=True)
        return self.merge(weights @ v)


class Gated(_Projected):
    """A Sinkhorn loop whose scores also depend on the values: not a function of the scores."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        log_a = q @ k.transpose(-2, -1) + v.mean(-1)[..., None, :].sin() * q.mean(-1)[..., None]
        for step in range(4):
            log_a = log_a * torch.sigmoid(v.mean((-1, -2)))[..., None, None]
            log_a = log_a - log_a.logsumexp(-2 if step % 2 else -1, keepdim=True)
        return self.merge(log_a.exp() @ v)


class ChannelMixing(nn.Module):
    """A 4x4 doubly-stochastic mixing of streams: Sinkhorn, but not attention."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.to_mix = nn.Linear(dim, 16)

    def forward(self, x: Tensor) -> Tensor:
        streams = x.unflatten(-1, (4, -1))
        log_mix = self.to_mix(x).unflatten(-1, (4, 4))
        for step in range(6):
            log_mix = log_mix.log_softmax(-1 if step % 2 else -2)
        return (log_mix.exp() @ streams).flatten(-2)


def soft_sort(x: Tensor, temperature: float) -> Tensor:
    ordered = x.sort(dim=-1, descending=True).values
    return torch.softmax(-((ordered.unsqueeze(-1) - x.unsqueeze(-2)) ** 2) / temperature, -1)


class SlicedSoft(_Projected):
    """Published style: every slice's plan at once, Euclidean costs, axis-aligned slices."""

    def sort(self, values: Tensor) -> Tensor:
        """[..., N] -> [..., N ranks, N]"""
        return soft_sort(values, 0.1)

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        """Plans of queries and keys from their sorts: equal ranks meet."""
        return torch.matmul(first.transpose(-1, -2), second)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = (self.sort(p.transpose(-1, -2)) for p in (q, k))
        plans = self.between(first, second)
        weights = self.weights(plans, q, k)
        return self.merge((weights[..., None, None] * plans).sum(2) @ v)

    def weights(self, plans: Tensor, q: Tensor, k: Tensor) -> Tensor:
        cost = (torch.cdist(q, k).unsqueeze(2) * plans).sum((-1, -2))
        return torch.softmax(-0.3 * cost, -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x))


class SlicedLearnt(SlicedSoft):
    """Learnt slices, queries scaled first, squared costs by inner products, their mean, einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.slicer = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = 0.5 * q, 0.5 * k
        a, b = (soft_sort(self.slicer(p).transpose(-1, -2), 1e-3) for p in (q, k))
        plans = torch.einsum("bhlri,bhlrj->bhlij", a, b)
        cost = (q**2).sum(-1)[..., :, None] + (k**2).sum(-1)[..., None, :] - 2 * q @ k.transpose(-1, -2)
        total = torch.einsum("bhij,bhlij->bhl", cost, plans) / q.shape[2]
        return self.merge(torch.einsum("bhl,bhlij->bhij", torch.softmax(-2 * total, -1), plans) @ v)


class SlicedMasked(SlicedSoft):
    """Padded tokens (True means padded) are sorted last, matched with each other and left out."""

    low = -1e9

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        q, k, v = self.split(x)
        hidden = padded[:, None, None, :]
        sides = []
        for points in (q, k):
            values = points.transpose(-1, -2).masked_fill(hidden, self.low)
            ordered = values.sort(dim=-1, descending=True).values
            logits = -((ordered.unsqueeze(-1) - values.unsqueeze(-2)) ** 2) / 0.1
            active = (ordered > self.low / 10).unsqueeze(-1)
            sides.append(torch.softmax(logits.masked_fill(hidden.unsqueeze(-2), -1e30), -1) * active)
        plans = sides[0].transpose(-1, -2) @ sides[1]
        weights = self.weights(plans, q, k)
        return self.merge((weights[..., None, None] * plans).sum(2) @ v)


class SlicedHard(SlicedSoft):
    """Exact sorting: permutation matrices from a stable argsort."""

    def order(self, values: Tensor) -> Tensor:
        return values.argsort(dim=-1, descending=True, stable=True)

    def sort(self, values: Tensor) -> Tensor:
        n = values.shape[-1]
        return torch.zeros(*values.shape[:-1], n, n).scatter(-1, self.order(values).unsqueeze(-1), 1.0)


class SlicedUnstable(SlicedHard):
    """Which of two equal numbers comes first is left to the machine."""

    def order(self, values: Tensor) -> Tensor:
        return values.argsort(dim=-1, descending=True)


class SlicedAscending(SlicedSoft):
    """Exact sorting, smallest first: ties are met from the other end."""

    def sort(self, values: Tensor) -> Tensor:
        order = values.argsort(dim=-1, stable=True)
        return (order[..., None] == torch.arange(values.shape[-1])).to(values.dtype)

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.einsum("bhlri,bhlrj->bhlij", first, second)


class SlicedLifted(SlicedSoft):
    """Exact sorting as the definition has it: tokens with equal projections share their mass."""

    def sort(self, values: Tensor) -> Tensor:
        equal = (values.sort(dim=-1).values.unsqueeze(-1) == values.unsqueeze(-2)).to(values.dtype)
        return equal / equal.sum(-1, keepdim=True)


class SlicedTop(SlicedSoft):
    """Hardened as the released code does it: the top entry of every row, no permutation where two tie."""

    def sort(self, values: Tensor) -> Tensor:
        top = soft_sort(values, 1e-3).argmax(-1, keepdim=True)
        return (top == torch.arange(values.shape[-1])).to(values.dtype)


class SlicedCross(SlicedSoft):
    """Another number of keys, which meet the queries by the exact coupling of both; sorted exactly."""

    def coupling(self, n: int, m: int) -> tuple[Tensor, int]:
        rows, columns = torch.arange(n)[:, None], torch.arange(m)
        met = torch.minimum((rows + 1) * m, (columns + 1) * n) - torch.maximum(rows * m, columns * n)
        return met.clamp(min=0), m

    def sort(self, values: Tensor) -> Tensor:
        order = values.argsort(dim=-1, descending=True, stable=True)
        return (order[..., None] == torch.arange(values.shape[-1])).to(values.dtype)

    def between(self, first: Tensor, second: Tensor) -> Tensor:
        met, whole = self.coupling(first.shape[-1], second.shape[-1])
        return super().between(first, met.to(second.dtype) @ second / whole)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        _, k, v = self.split(memory)
        return self.attend(self.split(x)[0], k, v)


class SlicedCrossReleased(SlicedCross):
    """The released interpolation between ranks, of soft sorts."""

    def coupling(self, n: int, m: int) -> tuple[Tensor, int]:
        place = torch.arange(n)[:, None] * (m - 1)
        return (n - 1 - (torch.arange(m) * (n - 1) - place).abs()).clamp(min=0), n - 1

    def sort(self, values: Tensor) -> Tensor:
        return soft_sort(values, 0.1)


class SlicedByNorm(SlicedSoft):
    """Weights that do not follow the transport cost: no known convention."""

    def weights(self, plans: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q.mean(2), -1)


class Glued(_Projected):
    """Published style: potentials, learnt pivots and masses, both plans formed, then the values."""

    half_steps, epsilon = 3, 0.5

    def __init__(self) -> None:
        super().__init__()
        self.pivots = nn.Parameter(torch.randn(self.heads, 5, 8))
        self.masses = nn.Parameter(torch.randn(self.heads, 5))

    def plan(self, scores: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
        u, w = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for step in range(self.half_steps):
            if step % 2 == 0:
                u = log_a - torch.logsumexp(scores + w.unsqueeze(-2), -1)
            else:
                w = log_b - torch.logsumexp(scores + u.unsqueeze(-1), -2)
        return torch.exp(scores + u.unsqueeze(-1) + w.unsqueeze(-2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        n, scale = x.shape[1], 8**-0.5 / self.epsilon
        sigma = torch.softmax(self.masses, -1)
        uniform = torch.full_like(q[..., 0], 1.0 / n).log()
        first = self.plan(scale * q @ self.pivots.transpose(-1, -2), uniform, sigma.log())
        second = self.plan(scale * self.pivots @ k.transpose(-1, -2), sigma.log(), uniform)
        return self.merge(n * ((first / sigma[:, None, :]) @ (second @ v)))


class GluedMasked(Glued):
    """Padding by masses (True means active); pivots shared by the heads' code through einsum."""

    half_steps = 4

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scale = 8**-0.5 / self.epsilon
        sigma = torch.softmax(self.masses, -1)
        count = keep.sum(-1).to(x.dtype)
        uniform = (-count.log())[:, None, None].expand(-1, self.heads, x.shape[1])
        uniform = uniform.masked_fill(~keep[:, None, :], -1e30)
        first = self.plan(scale * torch.einsum("bhnd,hrd->bhnr", q, self.pivots), uniform, sigma.log())
        second = self.plan(scale * torch.einsum("bhmd,hrd->bhmr", k, self.pivots), uniform, sigma.log())
        values = torch.einsum("bhmr,bhme->bhre", second, v) / sigma[..., None]
        return self.merge(count[:, None, None, None] * torch.matmul(first, values))


class GluedInside(Glued):
    """Padding by masses, and all tokens, padded ones too, counted in the factor inside the product."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        sigma = torch.softmax(self.masses, -1)
        mass = keep.to(x.dtype) / keep.sum(-1, keepdim=True)
        uniform = mass.clamp(min=1e-300).log()[:, None].expand(-1, self.heads, -1)
        uniform = torch.where(keep[:, None], uniform, -torch.inf)
        first = self.plan(0.5 * (q @ self.pivots.mT), uniform, sigma.log())
        second = self.plan(0.5 * (k @ self.pivots.mT), uniform, sigma.log()).mT
        return self.merge(first @ (x.shape[1] * (second @ v) / sigma[..., None]))


class GluedByDistance(Glued):
    """Costs that are no inner product: not supported, and said so."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        sigma = torch.softmax(self.masses, -1)
        uniform = torch.full_like(q[..., 0], 1.0 / x.shape[1]).log()
        pivots = self.pivots.expand(x.shape[0], -1, -1, -1)
        first = self.plan(-torch.cdist(q, pivots), uniform, sigma.log())
        second = self.plan(-torch.cdist(pivots, k), sigma.log(), uniform)
        return self.merge((first / sigma[:, None, :]) @ (second @ v))


def inputs_for(module: nn.Module, seed: int = 0) -> tuple[Any, ...]:
    """A small example call for any module above."""
    torch.manual_seed(seed)
    x = torch.randn(3, 10, 16)
    if isinstance(module, LogDomainMasked):
        ids = torch.randint(1, 9, (3, 10))
        ids[0, 7:] = 0
        ids[1, 3:] = 0
        return x, ids
    if isinstance(module, SlicedMasked):
        return x, torch.arange(10) >= torch.tensor([[10], [7], [4]])
    if isinstance(module, Alternating | GluedMasked | GluedInside):
        keep = torch.ones(3, 10, dtype=torch.bool)
        keep[0, 6:] = False
        return x, keep
    if isinstance(module, Cross | SlicedCross):
        return x, torch.randn(3, 7, 16)
    return (x,)


def _mixed(self: Any, x: Tensor, keep: Tensor) -> Tensor:
    x = self.start(x)
    x = self.norm(x + self.scaled(x, keep))
    x = self.norm(x + self.sliced(x))
    x = self.norm(x + self.glued(x, keep))
    return self.head(x.mean(1))


def mixed() -> nn.Module:
    """A layer of each kind: x [B, N, 4], keep [B, N] -> [B, 3]."""
    torch.manual_seed(0)
    return module(
        _mixed, start=nn.Linear(4, 16), scaled=Alternating(2), sliced=SlicedSoft(), glued=GluedMasked(),
        norm=nn.LayerNorm(16), head=nn.Linear(16, 3),
    ).eval()  # fmt: skip
