"""A model whose code surely keeps nothing is not searched for memory; any other is."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_zoo import module
from torch import Tensor, nn, set_grad_enabled

from asapc.inputs.data import Batch
from asapc.passes import state
from asapc.passes.pure import leaves_nothing

SEEN: list[int] = []
COUNT = itertools.count()
LEVEL = 1.0
RANDOM = np.random.default_rng(0)
kept = Tensor.add_


@functools.lru_cache
def half(n: int) -> float:
    return n / 2


def scaled(x: Tensor, by: float = 0.5) -> Tensor:
    return x * by * LEVEL


def remembering() -> Callable[[Any, Tensor], Tensor]:
    held: dict[int, Tensor] = {}
    return lambda m, x: held.setdefault(len(held), x)


def with_default(m: Any, x: Tensor, held: list[int] = []) -> Tensor:  # noqa: B006
    held.append(1)
    return x * len(held)


def in_a_global(m: Any, x: Tensor) -> Tensor:
    global LEVEL
    LEVEL = 2.0
    return x


def listed(m: Any, x: Tensor) -> Tensor:
    parts = []
    for i in range(m.steps):
        x = x - x.logsumexp(-1 if i % 2 else -2, keepdim=True)
        parts.append(x)
    return torch.stack(parts).mean(0) / math.sqrt(x.shape[-1])


def halved(m: Any, x: Tensor) -> Tensor:
    level = x.amax(-1, keepdim=True)

    def lowered(by: float = 2.0) -> Tensor:
        return (x - level) / by

    return lowered() + lowered(3.0)


def stored(m: Any, x: Tensor) -> Tensor:
    m.longest = max(m.longest, x.shape[1])
    return x * m.longest


def sliced(m: Any, x: Tensor) -> Tensor:
    m.buffer[0] = x.sum()
    return x * m.buffer[0]


def aliased(m: Any, x: Tensor) -> Tensor:
    level = m.buffer
    level += 1
    return x * level[0]


PURE = {
    "loops and lists": listed,
    "a layer": lambda m, x: m.linear(x).softmax(-1),
    "another precision": lambda m, x: m.linear(x.double().to(x.dtype)).float() + m.linear.weight.float(),
    "functions": lambda m, x: F.gelu(scaled(x)) + sum(p for p in [x, x]),
    "functions that can write": lambda m, x: F.dropout(F.elu(F.relu(x), 0.5), 0.1, m.training),
    "a function inside": halved,
    "sizes": lambda m, x: x.reshape(x.shape[0], -1, m.steps).flatten(1),
}
KEEPING = {
    "an attribute": stored,
    "an item": sliced,
    "an alias": aliased,
    "a list of the module's": lambda m, x: x * (m.seen.append(1) or len(m.seen)),
    "a global list": lambda m, x: x * (SEEN.append(1) or len(SEEN)),
    "a global": in_a_global,
    "a default": with_default,
    "a closure": remembering(),
    "a counter": lambda m, x: x * next(COUNT),
    "generators of numpy": lambda m, x: x * RANDOM.normal(),
    "in place": lambda m, x: m.buffer.add_(1) * x.sum(),
    "in place by another name": lambda m, x: kept(m.buffer, 1) * x.sum(),
    "in place by its place": lambda m, x: F.relu(m.buffer, True) * x.sum(),
    "in place by a place nobody sees": lambda m, x: F.relu(*m.two) * x.sum(),
    "in place by a name of the module's": lambda m, x: m.act(m.buffer, True) * x.sum(),
    "a layer made on the way": lambda m, x: nn.ReLU(True)(m.buffer) * x.sum(),
    "out by its place": lambda m, x: F.normalize(x[0], 2.0, 1, 1e-12, m.square) * x.sum(),
    "running means of another name": lambda m, x: x * torch.native_batch_norm(
        x, m.buffer, m.buffer, m.buffer, m.buffer, True, 0.1, 1e-5)[0],
    "initialisers": lambda m, x: x * nn.init.normal(m.buffer),  # type: ignore[attr-defined]
    "a setting": lambda m, x: x * (set_grad_enabled(False) is not None),
    "foreach": lambda m, x: x * (torch._foreach_add_([m.buffer], 1) is None),
    "out": lambda m, x: x * torch.add(m.buffer, 1, out=m.buffer),
    "keywords": lambda m, x: x * torch.add(m.buffer, 1, **m.keywords),
    "running means": lambda m, x: F.batch_norm(x, m.buffer, m.buffer, None, None, True),
    "a cache": lambda m, x: x * half(x.shape[1]),
    "setattr": lambda m, x: setattr(m, "buffer", x) or x,
    "a layer in another precision": lambda m, x: m.linear.double() if x.shape[1] > 9 else x.double(),
    "one of several": lambda m, x: m.listed[0].to(x.dtype) and x,
    "the parts": lambda m, x: m.__dict__.update(steps=m.steps + 1) or x,
}


class Net(nn.Module):
    buffer: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.steps, self.longest, self.seen = nn.Linear(4, 4), 2, 1, list[int]()
        self.keywords: dict[str, Any] = {}
        self.act, self.square, self.two = F.relu, torch.ones(4, 4), (torch.ones(4), True)
        self.register_buffer("buffer", torch.zeros(4))
        self.listed = nn.ModuleList([nn.Linear(4, 4)])
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def verdict(model: nn.Module) -> bool:
    profile = state._profiled(model, Batch((torch.randn(2, 4, 4),), {}, None, []))
    codes = set().union(*profile.codes.values())
    return leaves_nothing(model, codes, [*profile.spaces.values(), vars_of(model)])


def vars_of(model: nn.Module) -> dict[str, Any]:
    """Functions are known by what holds them: here, the tables above."""
    return {f"_{name}": body for name, body in (*PURE.items(), *KEEPING.items())}


@pytest.mark.parametrize("name", PURE)
def test_code_that_keeps_nothing(name: str) -> None:
    assert verdict(Net(PURE[name]).eval())


@pytest.mark.parametrize("name", KEEPING)
def test_code_that_may_keep_something(name: str) -> None:
    with torch.no_grad():
        assert not verdict(Net(KEEPING[name]).eval())


def test_layers_that_write_and_hooks() -> None:
    watching = torch.ao.quantization.MinMaxObserver()
    for layer in (nn.ReLU(inplace=True), nn.Embedding(4, 4, max_norm=1.0), watching):
        model = Net(PURE["a layer"])
        model.other = layer
        assert not verdict(model.eval())
    model = Net(PURE["a layer"])
    assert not verdict(model.train())
    model.linear.register_forward_hook(lambda *_: None)
    assert not verdict(model.eval())


def test_a_pure_model_is_not_called_with_larger_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []
    monkeypatch.setattr(state, "_note_memory", lambda *given: searched.append(given))
    example = Batch((torch.randn(2, 4, 4),), {}, None, [])

    for model, times in ((module(lambda self, x: x.softmax(-1)), 0), (Net(KEEPING["an attribute"]), 1)):
        state.observed(model.eval(), [example, example], [example])
        assert len(searched) == times
