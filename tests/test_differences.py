"""Differences of maps, (A1 - lambda A2) V: both sites are found, and the program stays what it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asapc
from asapc.ir import Convention, EspConvention, Program
from asapc.passes.capture import capture
from asapc.passes.identify import matched_program
from asapc.passes.lift import lift
from asapc.passes.regions import Refusal
from asapc.program.calls import WRITTEN, operator_calls

Map = Callable[[Tensor, Tensor], Tensor]


def sinkhorn(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    for step in range(3):
        scores = scores - scores.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
    return scores.exp()


def masked(q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    weights = (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None, :], -math.inf).softmax(-1)
    for step in range(1, 4):
        weights = weights / weights.sum(-2 if step % 2 else -1, keepdim=True).clamp(min=1e-30)
    return weights


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)


def scaled(q: Tensor, k: Tensor) -> Tensor:
    """Potentials multiply the map last: they are no coefficients."""
    kernel = torch.exp(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]))
    a = torch.ones_like(kernel[..., :1])
    for _ in range(4):
        b = 1 / (kernel.transpose(-1, -2) @ a)
        a = 1 / (kernel @ b)
    return a * (kernel * b.transpose(-1, -2))


def sliced(q: Tensor, k: Tensor) -> Tensor:
    """Soft sorting along every axis; the plans are added one by one."""
    sides = []
    for points in (q, k):
        values = points.transpose(-1, -2)
        ordered = values.sort(dim=-1, descending=True).values
        sides.append(torch.softmax(-((ordered.unsqueeze(-1) - values.unsqueeze(-2)) ** 2) / 0.1, -1))
    plans = sides[0].transpose(-1, -2) @ sides[1]
    return plans.sum(2) / plans.shape[2]


def unrolled(q: Tensor, k: Tensor) -> Tensor:
    """The same, a slice at a time: a sum that is none of maps."""
    total: Tensor | None = None
    for axis in range(q.shape[-1]):
        plan = sliced(q[..., axis : axis + 1], k[..., axis : axis + 1])
        total = plan if total is None else total + plan
    return total / q.shape[-1]


class Layer(nn.Module):
    """Two maps of their own queries and keys; lambda a head."""

    def __init__(self, first: Map = sinkhorn, second: Map | None = None, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.maps = heads, (first, second or first)
        self.qkv, self.out = nn.Linear(8, 40), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.linspace(0.2, 0.9, heads)[:, None, None])

    def split(self, x: Tensor) -> list[Tensor]:
        parts = (self.qkv(x)).chunk(5, -1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def difference(self, one: Tensor, other: Tensor) -> Tensor:
        return one - self.weight * other

    def forward(self, x: Tensor) -> Tensor:
        q1, k1, q2, k2, v = self.split(x)
        a = self.difference(self.maps[0](q1, k1), self.maps[1](q2, k2))
        return self.out((a @ v).transpose(1, 2).flatten(2))


class Lerped(Layer):
    """A mixture in [0, 1], with dropout, then scaled."""

    def difference(self, one: Tensor, other: Tensor) -> Tensor:
        return 0.8 * nn.functional.dropout(torch.lerp(one, other, self.weight), 0.1, self.training)


class Negative(Layer):
    """Alpha, a sign in front, a division, and more than two terms."""

    def difference(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.sub(-other / 2, one, alpha=0.5) + one.addcmul(self.weight, other, value=-2)


class ByQuery(Layer):
    """Lambda depends on the token."""

    def __init__(self) -> None:
        super().__init__()
        self.to_weight = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        q1, k1, q2, k2, v = self.split(x)
        weight = self.to_weight(x).sigmoid().transpose(1, 2)[..., None]
        a = sinkhorn(q1, k1) - weight.expand(-1, -1, -1, x.shape[1]) * sinkhorn(q2, k2)
        return self.out(torch.einsum("bhnm,bhme->bnhe", a, v).flatten(2))


class Cross(Layer):
    """Other tokens as keys, some of them padded."""

    def forward(self, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
        q1, _, q2, _, _ = self.split(x)
        _, k1, _, k2, v = self.split(y)
        a = masked(q1, k1, keep) - self.weight * masked(q2, k2, keep)
        return self.out((a @ v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """One map of 2 H heads, values twice as wide, lambda by its usual reparametrisation, a norm a head:
    as the Differential Transformer is released, but for the map."""

    def __init__(self, heads: int = 2, width: int = 4) -> None:
        super().__init__()
        self.heads, self.start = heads, 0.3
        dim = 2 * heads * width
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.lambdas = nn.Parameter(0.4 * torch.randn(4, width))
        self.norm = nn.RMSNorm(2 * width)

    @property
    def weight(self) -> Tensor:
        q1, k1, q2, k2 = self.lambdas
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.start

    def map(self, x: Tensor) -> Tensor:
        heads = (2 * self.heads, -1)
        return sinkhorn(*(layer(x).unflatten(-1, heads).transpose(1, 2) for layer in (self.q, self.k)))

    def halves(self, a: Tensor) -> tuple[Tensor, Tensor]:
        a = a.view(a.shape[0], self.heads, 2, *a.shape[-2:])
        return a[:, :, 0], a[:, :, 1]

    def values(self, v: Tensor) -> Tensor:
        return v.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.halves(self.map(x))
        y = self.norm((one - self.weight * other) @ self.values(self.v(x))) * (1 - self.start)
        return self.out(y.transpose(1, 2).flatten(2))


class Chunked(Transformer):
    """All first heads, then all second ones."""

    def halves(self, a: Tensor) -> tuple[Tensor, Tensor]:
        one, other = a.chunk(2, 1)
        return one, other


class Sliced(Transformer):
    def halves(self, a: Tensor) -> tuple[Tensor, Tensor]:
        return a[:, ::2], a[:, 1::2]


class Rearranged(Transformer):
    """The pair in front, as einops writes it, and a batch that heads are merged into."""

    def halves(self, a: Tensor) -> tuple[Tensor, Tensor]:
        b, _, n, m = a.shape
        a = a.reshape(b, self.heads, 2, n, m).permute(2, 0, 1, 3, 4)
        one, other = a.reshape(2, b * self.heads, n, m).unbind(0)
        return one, other

    def values(self, v: Tensor) -> Tensor:
        return super().values(v).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.halves(self.map(x))
        y = torch.bmm(one - self.weight * other, self.values(self.v(x))).unflatten(0, (-1, self.heads))
        return self.out(y.transpose(1, 2).flatten(2))


class Weighed(Transformer):
    """The pair weighed and summed."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.map(x).unflatten(1, (self.heads, 2))
        weight = torch.stack([torch.ones(()), -self.weight]).to(a)[:, None, None]
        y = (weight * a).sum(2) @ self.values(self.v(x))
        return self.out(y.transpose(1, 2).flatten(2))


class Returned(Layer):
    """The difference is returned: it must be formed anyway."""

    def forward(self, x: Tensor) -> Any:
        q1, k1, q2, k2, v = self.split(x)
        a = self.difference(sinkhorn(q1, k1), sinkhorn(q2, k2))
        return a @ v, a


NETS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {  # and the heads of the sites
    "potentials last": (lambda: Layer(scaled), [2, 2]),
    "sliced plans, unrolled": (lambda: Layer(unrolled, heads=4), [4, 4]),
    "a softmax and a loop": (lambda: Layer(softmax, sinkhorn), [2]),
    "lerp, dropout; signs; by query, einsum": (
        lambda: nn.Sequential(Lerped(), Negative(), ByQuery()), [2] * 6
    ),
    "halves by chunk, by slices, rearranged, summed": (
        lambda: nn.Sequential(Chunked(), Sliced(), Rearranged(), Weighed()), [4] * 4
    ),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def captured(net: nn.Module, *args: Tensor) -> Program:
    (program,) = capture(net, args, {}).programs
    return program


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


def width(net: nn.Module) -> int:
    return 16 if any(isinstance(module, Transformer) for module in net.modules()) else 8


@pytest.mark.parametrize("name", NETS)
def test_every_map_is_multiplied_with_the_values(name: str) -> None:
    """The split program and its lossless operators are the teacher to rounding, at all sizes."""
    make, heads = NETS[name]
    net = built(make)
    program = captured(net, random(3, 9, width(net)))
    split, found = matched_program(program)
    sites = [site for site in found if not isinstance(site, Refusal)]
    assert split is not program and split.untouched is program
    assert lift(split, []).graph.code == lift(program, []).graph.code  # without sites as captured
    assert [site.heads for site in sites] == heads
    assert all(isinstance(site.convention, Convention | EspConvention) for site in sites)
    lifted = lift(split, sites)
    assert [call.operator.name for call in operator_calls(lifted.graph)] != ["plan"] * len(heads)
    for batch, tokens in ((3, 9), (1, 6), (4, 15)):
        x = 2 * random(batch, tokens, width(net), seed=tokens)
        with torch.no_grad():
            for graph in (split.graph, lifted.graph):
                assert torch.allclose(graph(x), net(x), rtol=1e-10, atol=1e-12)


def test_other_keys_and_a_mask() -> None:
    net = built(Cross)
    keep = torch.ones(3, 7, dtype=torch.bool)
    keep[1, 4:] = False
    program = captured(net, random(3, 9, 8), random(3, 7, 8, seed=1), keep)
    split, found = matched_program(program)
    sites = [site for site in found if not isinstance(site, Refusal)]
    assert [site.convention.mask for site in sites] == ["key", "key"]  # type: ignore[union-attr]
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[0, 5:] = False
    args = (random(2, 4, 8, seed=2), random(2, 12, 8, seed=3), keep)
    for graph in (split.graph, lift(split, sites).graph):
        assert torch.allclose(graph(*args), net(*args), atol=1e-12)


class Scored(Layer):
    """A row scaling of the whole difference that is made of it."""

    def difference(self, one: Tensor, other: Tensor) -> Tensor:
        a = one - self.weight * other
        return a / a.abs().sum(-1, keepdim=True)


ALONE: dict[str, Callable[[], nn.Module]] = {
    "softmaxes": lambda: Layer(softmax), "returned": Returned, "normalised again": Scored,
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_what_gains_nothing_stays_as_it_was(name: str) -> None:
    net = built(ALONE[name])
    program = captured(net, random(3, 9, width(net)))
    code = program.graph.code
    same, _ = matched_program(program)
    assert same is program and program.graph.code == code


def test_one_layer_of_two_is_split() -> None:
    """The softmax layer keeps its single product."""
    net = built(lambda: nn.Sequential(Layer(softmax), nn.LayerNorm(8), Layer()))
    split, found = matched_program(captured(net, random(3, 9, 8)))
    assert [site.name for site in found if not isinstance(site, Refusal)] == ["2", "2#2"]
    written = [node for node in split.graph.graph.nodes if WRITTEN in node.meta]
    assert sum(node.target is torch.ops.aten.matmul.default for node in written) == 2
    x = random(2, 12, 8, seed=1)
    assert torch.allclose(split.graph(x), net(x), atol=1e-12)


def test_from_end_to_end(tmp_path: Path) -> None:
    """Written, loaded without trust, and as patches of the live model, at other sizes."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), Layer(heads=1)).eval(), torch.randn(48, 9, 8)
    recipe = {
        "operator": "asap", "side": "source", "c_transforms": 2, "features": ["coarse:8"],
        "batch_size": 16, "max_examples": 16, "selection_examples": 16,
        "sites": {"1": {"operator": "lossless"}},
    }  # fmt: skip
    _, report = asapc.compile(net, {"input": x}, recipe=recipe, out=tmp_path / "out", examples=16)
    assert {site["name"]: site["operator"] for site in report.facts["sites"]} == {
        "1": "sinkhorn", "1#2": "asap"
    }  # fmt: skip
    loaded, y = asapc.load(tmp_path / "out"), torch.randn(3, 13, 8)
    with torch.no_grad():
        theirs, ours = net(y), loaded(y)
        assert float((ours - theirs).norm() / theirs.norm()) < 0.1
        patched = asapc.load(tmp_path / "out", model=net)
        assert torch.allclose(patched(y), ours, atol=1e-5)
