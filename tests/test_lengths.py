"""Lengths that a trace does not hold for are refused, and what begins at some size is found."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import pytest
import torch
from torch import Tensor, nn

import asapc
from asapc.errors import InputError
from asapc.formats.limits import MOST, fixed_size, limits_of
from asapc.inputs.onnx.verify import run_program
from asapc.ir import Program
from asapc.measure.differences import largest_difference
from asapc.passes.capture import capture, export_graph, program_of
from asapc.passes.lift import lift
from asapc.passes.match import match
from asapc.passes.regions import Refusal


class Branching(nn.Module):
    """Ten times as much for up to five tokens, no more than twelve."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(12, 4))

    def forward(self, x: Tensor, keep: Tensor) -> dict[str, Tensor]:
        own = (x + self.positions[: x.shape[1]]) * keep[..., None]
        return {"y": own if x.shape[1] > 5 else 10 * own}


def inputs(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(3, length, 4), torch.ones(3, length)


CALLS: dict[str, Any] = {
    "mixed": lambda x, keep: ((x,), {"keep": keep}),
    "by name": lambda x, keep: ((), {"keep": keep, "x": x}),
}


def rewritten(program: Program) -> Any:
    """As an artefact holds it."""
    exported = export_graph(program.graph, program.args, program.kwargs, program.dynamic_shapes)
    return exported.module(check_guards=False)


@pytest.mark.parametrize("name", CALLS)
def test_a_branch_on_a_length(name: str) -> None:
    model, call = Branching().eval(), CALLS[name]
    args, kwargs = call(*inputs(8))
    program = rewritten(capture(model, args, kwargs).programs[0])
    for length in (6, 12):
        args, kwargs = call(*inputs(length))
        torch.testing.assert_close(program(*args, **kwargs), model(*args, **kwargs))
    for length, words in ((4, ">= 6"), (13, "<= 12")):
        args, kwargs = call(*inputs(length))
        with pytest.raises(RuntimeError, match=f"shape.1. to be {words}, but got {length}"):
            program(*args, **kwargs)


def test_of_an_exported_program() -> None:
    shapes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},) * 2
    exported = torch.export.export(Branching().eval(), inputs(8), dynamic_shapes=shapes)
    program = rewritten(program_of(exported, inputs(8), {}))
    program(*inputs(7))
    with pytest.raises(RuntimeError, match=">= 6, but got 4"):
        program(*inputs(4))


def test_onnx_files_are_not_compared_there() -> None:
    program = rewritten(capture(Branching().eval(), inputs(8), {}).programs[0])
    feeds = dict(zip(("x", "keep"), inputs(4), strict=True))
    with pytest.raises(InputError, match="x: 4, traced for 6 to 12"):
        run_program(program, feeds)
    assert run_program(program, dict(zip(feeds, inputs(9), strict=True)))[0].shape == (3, 9, 4)


def distances(scores: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1])
    return (places[:, None] - places).abs()


def late(n: int) -> Tensor:
    """1 for up to 24 tokens, then more."""
    return torch.ones(n).sum().clamp(min=24) / 24


LATE: dict[str, Callable[[Tensor], Tensor]] = {
    "a bias from distance 600 on": lambda s: s * (1 - 0.5 * (distances(s) >= 600)),
    "examples from the ninth on": lambda s: (
        s * (1 + (torch.arange(s.shape[0]) >= 8))[:, None, None, None]
    ),
    "a temperature from 25 tokens on": lambda s: s / late(s.shape[-1]),
}


class Late(zoo._Projected):
    def __init__(self, what: str) -> None:
        super().__init__(8, 1)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = LATE[self.what](q @ k.transpose(-1, -2))
        for step in range(4):
            scores = scores - scores.logsumexp(-1 - step % 2, keepdim=True)
        return self.merge(scores.exp() @ v)


class LateSliced(zoo.SlicedSoft):
    def __init__(self) -> None:
        super().__init__(8, 1)

    def weights(self, plans: Tensor, q: Tensor, k: Tensor) -> Tensor:
        cost = (torch.cdist(q, k).unsqueeze(2) * plans).sum((-1, -2))
        return torch.softmax(-0.3 * late(q.shape[2]) * cost, -1)


class LateGlued(zoo.Glued):
    def plan(self, scores: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
        return super().plan(scores / late(max(scores.shape[-2:])), log_a, log_b)


LATE_MODELS: dict[str, Callable[[], nn.Module]] = {
    **{what: lambda what=what: Late(what) for what in LATE}, "ESP": LateSliced, "LOT": LateGlued,
}  # fmt: skip


@pytest.mark.parametrize("what", LATE_MODELS)
def test_what_begins_at_a_size_that_the_data_does_not_have(what: str) -> None:
    """A layer is what it is at any size, or is left as it is."""
    torch.manual_seed(0)
    model = LATE_MODELS[what]().eval()
    width = 8 if what != "LOT" else 16
    program = capture(model, (torch.randn(3, 10, width),), {}).programs[0]
    sites = [site for site in match(program) if not isinstance(site, Refusal)]
    lifted = lift(program, sites).graph
    for batch, tokens in ((1, 680), (12, 40)):
        x = 2 * torch.randn(batch, tokens, width)
        assert largest_difference(model(x), lifted(x)) < 1e-4


def test_keywords_in_another_order_than_the_signatures_have_axes_of_their_own() -> None:
    model = zoo.module(lambda self, x, mask: (x @ x.mT + mask[:, 0]).softmax(-1) @ x)
    given = {"mask": torch.zeros(4, 1, 1, 9), "x": torch.randn(4, 9, 6)}
    (program,) = capture(model, (), given).programs
    longer = {"mask": torch.zeros(2, 1, 1, 15), "x": torch.randn(2, 15, 6)}
    assert torch.allclose(program.graph(**longer), model(**longer), atol=1e-6)


def of_pairs(self: Any, scores: Tensor, places: Tensor, described: Tensor) -> Tensor:
    """Given scores, and points whose features come before them as a convolution has them."""
    for axis in (-1, -2, -1, -2):
        scores = scores - scores.logsumexp(axis, keepdim=True)
    return self.mix(described) @ scores.exp() @ places


@pytest.mark.parametrize("dim", [8, 9])
def test_axes_as_long_as_a_length_are_lengths(dim: int) -> None:
    """But for the features that are as long by chance."""
    model = zoo.module(of_pairs, mix=nn.Conv1d(8, 8, 1)).eval()

    def call(length: int) -> tuple[Tensor, ...]:
        return torch.randn(2, length, length), torch.randn(2, length, 3), torch.randn(2, 8, length)

    (program,) = capture(model, call(dim), {}).programs
    for length in (dim, 5, 13) if dim != 8 else (dim,):
        torch.testing.assert_close(rewritten(program)(*call(length)).shape, (2, 8, 3))


class WithSlices(zoo._Projected):
    """Potentials are given their axes by `[:, :, None, :]`, as many write it."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = (q @ k.mT).masked_fill(~keep[:, None, None, :], -1e9)
        f = g = torch.zeros(scores.shape[:3])
        for _ in range(3):
            f = -torch.logsumexp(scores + g[:, :, None, :], -1)
            g = -torch.logsumexp(scores + f[:, :, :, None], -2)
            g = g.masked_fill(~keep[:, None, :], 0.0)
        return self.merge(torch.exp(scores + f[:, :, :, None] + g[:, :, None, :]) @ v)


def test_whole_slices_begin_nothing() -> None:
    """Their end, the largest integer, is no size at which code does something else."""
    given = torch.randn(2, 7, 16), torch.randint(0, 2, (2, 7)).bool()
    (program,) = capture(WithSlices().eval(), given, {}).programs
    (site,) = match(program)
    assert not isinstance(site, Refusal)
    for node in program.graph.graph.nodes:
        for size in node.meta["val"].shape[:2] if node.op == "placeholder" else ():
            assert limits_of(size.node.shape_env, size.node.expr)[1] == MOST


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "float": lambda x: float(x.shape[1]), "float of a ratio": lambda x: float(10 / x.shape[1]),
    "int": lambda x: int(x.shape[1]), "int of a product": lambda x: int(x.shape[1] * 1.5),
    "ints": lambda x: [*map(int, x.shape)][1], "round": lambda x: round(x.shape[1] * 0.4),
    "ceil": lambda x: math.ceil(x.shape[1] / 4), "floor": lambda x: math.floor(x.shape[1] / 4),
    "item": lambda x: torch.tensor(x.shape[1]).item(), "tensor": lambda x: torch.tensor(float(len(x[0]))),
    "as asked": lambda x: x.shape[1] if isinstance(x.shape[1], int) else -1.0,
    "a dtype": lambda x: torch.ones(x.shape[1], dtype=float).sum().to(x.dtype) + float(0),
    "of its class": lambda x: float(x.shape[1]) if float.fromhex("0x1p0").is_integer() else -1.0,
    "one type": lambda x: float(x.shape[1]) if type(x.shape[1]) is not float else -1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_python_makes_of_a_length(name: str) -> None:
    number = NUMBERS[name]
    model = zoo.module(lambda self, x: self.layer(x) / number(x), layer=nn.Linear(16, 16)).eval()
    program = capture(model, (torch.randn(3, 12, 16),), {}).programs[0]
    fixed = name == "one type"  # where it asks for a type itself, which nothing stands for
    for tokens in (12,) if fixed else (12, 9, 30):
        x = torch.randn(2, tokens, 16)
        torch.testing.assert_close(program.graph(x), model(x))
    (place,) = program.graph.graph.find_nodes(op="placeholder")
    assert (fixed_size(place.meta["val"].shape[1]) == 12) is fixed


@pytest.mark.parametrize("pick", [
    lambda y, keep: y[keep].relu(), lambda y, keep: y[:, keep[0].nonzero()[:, 0]].mean(1),
    lambda y, keep: y[keep] @ y[keep].mT,
], ids=["by a mask", "by places", "and their products"])  # fmt: skip
@torch.no_grad()
def test_as_many_tokens_as_the_data_say(pick: Callable[[Tensor, Tensor], Tensor], tmp_path: Path) -> None:
    model = zoo.module(lambda self, x: pick(self.layer(x), x[..., 0] > 0), layer=zoo.ExpDomain()).eval()
    recipe = {"operator": "lossless", "batch_size": 8}
    data = {"x": torch.randn(24, 12, 16)}
    live, _ = asapc.compile(model, data, recipe=recipe, out=tmp_path / "out", examples=8, quiet=True)
    alone = asapc.load(tmp_path / "out", trust=True)
    for tokens in (12, 20):
        x = torch.randn(3, tokens, 16)
        for compiled in (live, alone):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def one_by_one(self: Any, x: Tensor, length: Tensor) -> Tensor:
    """Attends within the active tokens of each example by itself."""
    examples = zip(x, length, strict=True)
    return torch.cat([self.attention(one[None, : int(n)]).mean(1) for one, n in examples])


def test_a_loop_over_the_examples() -> None:
    model = zoo.module(one_by_one, attention=zoo.ExpDomain()).eval()
    length = torch.full((40,), 6)
    x = torch.randn(40, 6, 16)
    compiled = asapc.compile(model, {"x": x, "length": length}, quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (1, 5, 40):
            length = torch.randint(1, 7, (count,))
            torch.testing.assert_close(compiled.model(x[:count], length), model(x[:count], length))
