"""Modules that are alike are traced once: the copies are what a trace of each would have given."""

from __future__ import annotations

from collections.abc import Iterator

import attention_zoo as zoo
import pytest
import torch
from torch import Tensor, nn

from asapc.passes import capture as capturing
from asapc.passes.capture import capture
from asapc.passes.repeated import Repeated


class Layer(nn.Module):
    """Scaled attention with a loop, in place as released code has it."""

    def __init__(self, dim: int = 8, number: int = 0) -> None:
        super().__init__()
        self.qk, self.out = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.number = number

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.mT
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None], -5.0)
        weights = scores.exp()
        for _ in range(2):
            weights /= weights.sum(-1, keepdim=True)
            weights /= weights.sum(-2, keepdim=True)
        return self.changed(x, x + self.out(weights @ x))

    def changed(self, x: Tensor, y: Tensor) -> Tensor:
        return y


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, keep)
        return x.mean(1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Repeated]]:
    """The traces of a test, in order."""
    made: list[Repeated] = []

    class Kept(Repeated):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(capturing, "Repeated", Kept)
    yield made


def plainly(model: nn.Module, args: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The capture with every module traced."""
    monkeypatch.setattr("asapc.passes.repeated._alike", lambda root: [])
    return capture(model, args, {})


def assert_same(model: nn.Module, args: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operators of the same nodes, in the same modules, and the same calls."""
    quick, slow = capture(model, args, {}), plainly(model, args, monkeypatch)
    assert quick.kind == slow.kind == "whole"
    one, other = quick.programs[0], slow.programs[0]
    places = [{x: place for place, x in enumerate(p.graph.graph.nodes)} for p in (one, other)]
    for x, y in zip(one.graph.graph.nodes, other.graph.graph.nodes, strict=True):
        assert x.op == y.op and (x.op == "placeholder" or str(x.target) == str(y.target))
        assert [places[0][s] for s in x.all_input_nodes] == [places[1][s] for s in y.all_input_nodes]
        paths = [[path for path, _ in (n.meta.get("nn_module_stack") or {}).values()] for n in (x, y)]
        assert paths[0] == paths[1]
        values = [n.meta.get("val") for n in (x, y)]
        if isinstance(values[0], Tensor):
            assert str(values[0].shape) == str(values[1].shape)
            assert str(values[0].stride()) == str(values[1].stride())
    for call, plain in zip(one.calls, other.calls, strict=True):
        assert (call.name, call.start, call.end) == (plain.name, plain.start, plain.end)
        for mine, theirs in ((call.inputs, plain.inputs), (call.outputs, plain.outputs)):
            assert [places[0][x] for x in mine] == [places[1][x] for x in theirs]
    torch.testing.assert_close(one.graph(*args), model(*args))


def test_a_stack_of_layers(copied: list[Repeated], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    keep = torch.tensor([[True, True, True, True, True], [True, True, True, False, False]])
    model = Stack(Layer(), Layer(), Layer()).eval()
    assert_same(model, (torch.randn(2, 5, 8), keep), monkeypatch)
    assert [x.copied for x in copied] == [2, 0]
    assert all("forward" not in vars(module) for module in model.modules())


class Asks(Layer):
    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        return super().forward(x if bool((self.out.weight > -1e9).all()) else -x, keep)


class Keeps(Layer):
    """Its map is read by the model afterwards."""

    def changed(self, x: Tensor, y: Tensor) -> Tensor:
        self.last = y
        return y


class Writes(Layer):
    def changed(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)


SHARED = torch.ones(8)


class Reads(Layer):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = [scale]  # no weight

    def changed(self, x: Tensor, y: Tensor) -> Tensor:
        return y * self.scale[0]


def test_what_is_not_alike_is_traced(copied: list[Repeated]) -> None:
    pairs = [(Layer(number=1), Layer(number=2)), (Asks(), Asks()), (Keeps(), Keeps()),
             (Writes(), Writes()), (Reads(SHARED), Reads(2 * SHARED))]  # fmt: skip
    model = Stack(*(layer for pair in pairs for layer in pair)).eval()
    x = 0.1 * torch.randn(2, 5, 8)
    found = capture(model, (x.clone(),), {})
    assert all(not made.copied for made in copied)
    assert found.kind == "whole"
    torch.testing.assert_close(found.programs[0].graph(x.clone()), model(x.clone()))


def collected(self: nn.Module, x: Tensor) -> Tensor:
    """Layers leave their maps in a list of the module's, which a copy would not."""
    TOLD.clear()
    for layer in self.layers:
        x = layer(x)
    return torch.stack(TOLD).sum(0)


TOLD: list[Tensor] = []
TELL = TOLD.append.__call__  # of which nothing shows what it appends to


class Tells(Layer):
    def changed(self, x: Tensor, y: Tensor) -> Tensor:
        TELL(y)
        return y


@pytest.mark.parametrize("leaves", [False, True], ids=["hooks", "a list elsewhere"])
def test_what_is_done_beside_a_layer_is_not_lost(copied: list[Repeated], leaves: bool) -> None:
    """By a user's hooks, or by code of which nothing shows but the output, which is compared."""
    torch.manual_seed(0)
    model, x = Stack(Layer(), Layer()).eval(), torch.randn(2, 5, 8)
    for layer in model.layers:
        layer.out.register_forward_hook(lambda module, given, output: output * 2)
    if leaves:
        model = zoo.module(collected, layers=nn.ModuleList([Tells(), Tells(), Tells()])).eval()
    found = capture(model, (x,), {})
    assert [made.copied for made in copied] == ([2, 0] if leaves else [0])  # once more, without copies
    torch.testing.assert_close(found.programs[0].graph(x), model(x))
