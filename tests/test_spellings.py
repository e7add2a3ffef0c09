"""What torch can say in several ways is said in one, and matched however it was said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asapc.passes.capture import capture
from asapc.passes.lift import lift
from asapc.passes.match import match
from asapc.passes.plan.site import PlanSite
from asapc.passes.sinkhorn.site import AttentionSite
from asapc.passes.spellings import ALIASES, RESPELT


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


@pytest.mark.parametrize("kind, size", [(Attention, (3, 7, 6)), (Plane, (7, 6))])
def test_a_loop_is_matched_however_it_is_spelt(kind: type[nn.Module], size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    (found,) = match(capture(kind().eval(), (torch.randn(size),), {}).programs[0])
    assert isinstance(found, AttentionSite if kind is Attention else PlanSite)
    assert found.convention.half_steps == (5 if kind is Attention else 8)


class Masses(nn.Module):
    """Given masses, whose logarithms are taken anew in every half-step."""

    def forward(self, scores: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        g = torch.zeros_like(scores[..., 0, :])
        for _ in range(4):
            f = mu.log()[:, None] - (scores + g[..., None, :]).logsumexp(-1)
            g = nu.log()[:, None] - (scores + f[..., None]).logsumexp(-2)
        return (scores + f[..., None] + g[..., None, :]).exp()


def test_logarithms_of_given_masses_are_one() -> None:
    masses = (torch.rand(3, 7).softmax(-1), torch.rand(3, 5).softmax(-1))
    (found,) = match(capture(Masses(), (torch.randn(3, 1, 7, 5), *masses), {}).programs[0])
    assert isinstance(found, PlanSite) and found.convention.half_steps == 8
