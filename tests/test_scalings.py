"""Scalings that are applied apart: a loop whose plan no tensor holds is the attention it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asapc.measure.differences import largest_difference
from asapc.passes.capture import capture
from asapc.passes.identify import matched_program
from asapc.passes.lift import lift
from asapc.passes.match import match
from asapc.passes.plan.loops import find_loops
from asapc.passes.scalings import joined_program
from asapc.passes.site import Site


class Vectors(nn.Module):
    """Scalings as vectors, the kernel multiplied with them as columns."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        kernel = torch.exp(q @ k.mT / 4)
        b = torch.ones_like(kernel[..., 0, :])
        for _ in range(3):
            a = 1 / (kernel @ b[..., None])[..., 0]
            b = 1 / (kernel.mT @ a[..., None])[..., 0]
        return self.out(a, kernel, b, v)

    def out(self, a: Tensor, kernel: Tensor, b: Tensor, v: Tensor) -> Any:
        return a[..., None] * (kernel @ (b[..., None] * v))


class Divided(Vectors):
    """The last rows are closed by a division of the output."""

    def out(self, a: Tensor, kernel: Tensor, b: Tensor, v: Tensor) -> Any:
        return (kernel @ (v * b[..., None])) / (kernel @ b[..., None])


class Turned(Vectors):
    """From keys to queries: the transposed kernel is multiplied."""

    def out(self, a: Tensor, kernel: Tensor, b: Tensor, v: Tensor) -> Any:
        return b[..., None] * (kernel.mT @ (a[..., None] * v))


class Twice(nn.Module):
    """What one layer gives is another's values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Vectors()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.layer(q, k, self.layer(k, q, v))


class Widened(Vectors):
    def out(self, a: Tensor, kernel: Tensor, b: Tensor, v: Tensor) -> Any:
        return a[..., None] * (kernel @ (b[..., None] * v.round().long()))


class Repeated(Vectors):
    def out(self, a: Tensor, kernel: Tensor, b: Tensor, v: Tensor) -> Any:
        return a[..., None] * (kernel @ (b[..., None] * v.mean(1, keepdim=True)))


class Sums(nn.Module):
    """Marginals of 1/N, in the letters of einsum."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = torch.exp(torch.einsum("bid,bjd->bij", q, k) / 4)
        n, m = q.shape[1], k.shape[1]
        b = torch.ones_like(kernel[:, 0]) / m
        for _ in range(3):
            a = (1 / n) / torch.einsum("bij,bj->bi", kernel, b)
            b = (1 / m) / torch.einsum("bij,bi->bj", kernel, a)
        return torch.einsum("bij,bjd->bid", kernel, b.unsqueeze(-1) * v) * a.unsqueeze(-1) * n


class AtOnce(Vectors):
    def out(self, a: Tensor, kernel: Tensor, b: Tensor, v: Tensor) -> Any:
        return torch.einsum("bi,bij,bj,bjd->bid", a, kernel, b, v)


class Potentials(nn.Module):
    """Duals in the log domain, whose exponentials are applied apart."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / 4
        f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
        for _ in range(3):
            f = -torch.logsumexp(scores + g[..., None, :], -1)
            g = -torch.logsumexp(scores + f[..., None], -2)
        return f.exp()[..., None] * (scores.exp() @ (g.exp()[..., None] * v))


def inputs(batch: int, tokens: int, scale: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    return tuple(scale * torch.randn(batch, tokens, 16, generator=generator) for _ in range(3))


@pytest.mark.parametrize(
    "kind, half_steps",
    [(Vectors, 6), (Divided, 7), (Sums, 6), (AtOnce, 6), (Potentials, 6)], ids=lambda x: str(x),
)  # fmt: skip
def test_an_attention_whose_scalings_are_applied_apart(kind: Any, half_steps: int) -> None:
    model = kind().eval()
    program = capture(model, inputs(3, 10), {}).programs[0]
    rewritten, (site,) = matched_program(program)
    assert isinstance(site, Site) and site.convention.half_steps == half_steps
    assert site.head_dim == 16  # its operator takes queries, keys and values
    lifted = lift(rewritten, [site])
    assert not find_loops(lifted.graph)
    for given in (inputs(3, 10), inputs(5, 10, 3.0), inputs(2, 33)):
        if kind is Sums and given[0].shape[1] != 10:
            continue  # 1 / N is a number of its trace
        with torch.no_grad():
            assert largest_difference(model(*given), lifted.graph(*given)) < 5e-6


@pytest.mark.parametrize("kind", [Turned, Twice, Widened, Repeated])
def test_whatever_is_joined_is_what_it_was(kind: Any) -> None:
    """Values of another type, or one for all keys, stay apart; the others are sites."""
    model = kind().eval()
    rewritten, found = matched_program(capture(model, inputs(3, 10), {}).programs[0])
    sites = [one for one in found if isinstance(one, Site)]
    assert len(sites) == {Turned: 1, Twice: 2}.get(kind, 0)
    lifted = lift(rewritten, sites)
    for given in (inputs(3, 10), inputs(2, 33, 2.0)):
        with torch.no_grad():
            assert largest_difference(model(*given), lifted.graph(*given)) < 5e-6


def test_a_program_without_loops_is_not_rewritten() -> None:
    class Weighed(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            gate = q.mean(-1, keepdim=True).sigmoid()
            return gate * ((q @ k.mT).softmax(-1) @ (gate * v))

    program = capture(Weighed().eval(), inputs(3, 10), {}).programs[0]
    assert joined_program(program) is None and matched_program(program)[0] is program


def test_a_sum_that_is_read_at_one_place_is_a_loops() -> None:
    """`(K @ b[:, None])[:, 0]` was overlooked, and a model of such loops was said to have none."""
    program = capture(Vectors().eval(), inputs(3, 10), {}).programs[0]
    assert len(find_loops(program.graph)) == 1 and match(program)
