"""Programs that write into their tensors: respelt where that is plain to see, left to torch elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from asapc.passes.in_place import functional

DROP = nn.Dropout(0.5).eval()


def padded(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.zeros(x.shape[0], x.shape[1] + 1, 4)
    whole[:, :-1] = x
    whole[:, -1] = y[:, 0]
    whole[whole > 1] = 1.0
    return whole


def written_twice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    whole = x * 2
    part = whole[:, 1:]
    part.mul_(3)
    part += y[:, 1:]
    part[..., 0].zero_()
    return whole, part.sum(1)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    scores = x @ y.mT
    scores *= 0.5
    scores.masked_fill_(scores < 0, -1.0).add_(y.sum(-1, keepdim=True), alpha=2)
    return scores.softmax(-1)


def of_a_constant(x: Tensor, y: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(y[0, 0])


def without_dropout(x: Tensor, y: Tensor) -> Tensor:
    kept = x + y
    same = DROP(kept)  # where nothing is dropped, the tensor itself
    kept.exp_()
    return same


def narrowed(x: Tensor, y: Tensor) -> Tensor:
    half = torch.zeros_like(x, dtype=torch.float16)
    half.copy_(y)
    return half


def seen_by_a_view(x: Tensor, y: Tensor) -> Tensor:
    whole = x + 1
    turned = whole.transpose(1, 2)
    whole.mul_(y)
    return turned


def through_a_reshape(x: Tensor, y: Tensor) -> Tensor:
    whole = x + 1
    whole.reshape(-1, 4).mul_(y.reshape(-1, 4))
    return whole


def into_an_input(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def wider(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2).add_(y.double())


PLAIN = [padded, written_twice, scaled, of_a_constant, without_dropout, narrowed]
LEFT = [seen_by_a_view, through_a_reshape, into_an_input, wider]


@pytest.mark.parametrize("function", PLAIN + LEFT, ids=lambda function: function.__name__)
def test_writes_are_what_the_code_does(function, monkeypatch):
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            made = function(x, y)
            return (*made, x) if isinstance(made, tuple) else (made, x)

    traced_again = []
    own = ExportedProgram.run_decompositions
    monkeypatch.setattr(
        ExportedProgram, "run_decompositions", lambda *given: traced_again.append(1) or own(*given)
    )
    sizes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    with torch.no_grad():
        given = torch.randn(3, 6, 4), torch.randn(3, 6, 4)
        exported = torch.export.export(Model(), given, dynamic_shapes=(sizes, sizes), strict=False)
        program = functional(exported)
        graph = program.module(check_guards=False)
        operators = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        schemas = [one._schema for one in operators if isinstance(one, torch._ops.OpOverload)]
        assert bool(traced_again) == (function in LEFT)
        assert function is into_an_input or not any(one.is_mutable for one in schemas)
        for shape in ((3, 6, 4), (2, 9, 4), (1, 2, 4)):
            x, y = torch.randn(shape), torch.randn(shape)
            expected = Model()(x.clone(), y.clone())
            torch.testing.assert_close(graph(x.clone(), y.clone()), expected)
