"""Layers that compute the same are examined once, and only those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from asapc.passes.capture import capture
from asapc.passes.match import match
from asapc.passes.sinkhorn import match as sinkhorn
from asapc.passes.sinkhorn.site import AttentionSite

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


BIASES = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1))
DIFFERENT = {
    "half-steps": Layer(half_steps=4),
    "a floor": Layer(floor=1e-6),
    "a bias": Layer(bias=BIASES[0]),
    "hides nothing": Layer(hidden=lambda padded: torch.zeros_like(padded[:, None], dtype=torch.float32)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_layer_that_differs_is_examined_itself(what: str, examined: list[object]) -> None:
    one, other = sites_of(Layer(), DIFFERENT[what])
    assert len(examined) == 2
    assert one.convention != other.convention or one.bias != other.bias
    assert one.convention.half_steps == 3
    assert other.convention.half_steps == (4 if what == "half-steps" else 3)
