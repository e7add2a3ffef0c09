"""A program holds for the sizes at which the code takes the branches that were traced, and says which;
what begins at a size that the data does not have is found."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import asapc
from asapc.errors import InputError, SizeError
from asapc.formats.limits import MOST, fixed_size, limits_of
from asapc.inputs.data import Batch
from asapc.inputs.onnx.verify import run_program
from asapc.ir import Convention, Program
from asapc.measure.differences import largest_difference
from asapc.passes import size_guards
from asapc.passes.capture import capture, export_graph, program_of
from asapc.passes.lift import lift
from asapc.passes.match import match
from asapc.passes.regions import Refusal
from asapc.passes.site import Site
from asapc.program.call import known_of
from asapc.program.runner import Runner

MATH_LOG = math.log
EXAMPLE = (3, 9)  # examples and tokens
BRANCHES: dict[str, Callable[[int, int], int]] = {
    "n % 5": lambda b, n: 3 if n % 5 == 0 else 7,
    "n > b": lambda b, n: 3 if n > b else 7,
    "min(12, n // 2)": lambda b, n: min(12, n // 2),
    "int(log2 n)": lambda b, n: 3 + int(math.log2(n)),
    "b * n": lambda b, n: 3 if b * n <= 100 else 7,
    "n != 12": lambda b, n: 3 if n != 12 else 7,
    "ceil(n / 4) > 2": lambda b, n: 3 if math.ceil(n / 4) > 2 else 7,
    "int(n**0.5)": lambda b, n: int(n**0.5),
    "divmod(n, 4)": lambda b, n: 3 + divmod(n, 4)[1],
    "n & 1": lambda b, n: 3 if n & 1 else 7,
    "{True: 3}[n > 9]": lambda b, n: {True: 3, False: 7}[n > 9],
    "(3, 7)[n > 9]": lambda b, n: (3, 7)[n > 9],
    "(n > 9) in (False,)": lambda b, n: 3 if (n > 9) in (False,) else 7,
    "str(n > 9)": lambda b, n: 3 if str(n > 9) == "False" else 7,
    "f'{n}'": lambda b, n: {"12": 3}.get(f"{n}", 7),  # as of a key of a ModuleDict
    "log(n) > 3": lambda b, n: 3 if math.log(n) > 3 else 7,
    "isinstance(n, int)": lambda b, n: 3 if isinstance(n, int) and isinstance(n > 9, bool) else 7,
    "none": lambda b, n: 3,
}
FREE = {"none", "isinstance(n, int)"}


def steps(branch: str) -> nn.Module:
    """As many as the sizes say."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for _ in range(BRANCHES[branch](x.shape[0], x.shape[1])):
            x = x.log_softmax(-1) + x.mean(1, keepdim=True)
        return x

    return zoo.module(forward)


def allowed(program: Any) -> tuple[tuple[int, int], ...]:
    """The least and the most of examples and of tokens."""
    (place,) = (node for node in program.graph.graph.nodes if node.op == "placeholder")
    (own,), limits = known_of([place.meta["val"]])
    return tuple(
        limits.get(size, (0, MOST)) if isinstance(size, str) else (size, size) for size in own.sizes[:2]
    )


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_program_is_the_model_wherever_it_says_so(branch: str) -> None:
    torch.manual_seed(0)
    model = steps(branch)
    (program,) = capture(model, (torch.randn(*EXAMPLE, 4),), {}).programs
    limits = allowed(program)
    ran = 0
    for b in (2, 3, 4, 7, 12):
        for n in (2, 5, 8, 9, 10, 12, 25, 70):
            if all(low <= size <= high for size, (low, high) in zip((b, n), limits, strict=True)):
                x = torch.randn(b, n, 4)
                torch.testing.assert_close(program.graph(x), model(x))
                ran += 1
    assert ran == 40 if branch in FREE else 0 < ran < 40
    assert limits[0] == (0, MOST) or "b" in branch
    assert all(low <= size <= high for size, (low, high) in zip(EXAMPLE, limits, strict=True))


def test_a_program_from_a_file_keeps_to_its_guards_too() -> None:
    x = torch.randn(*EXAMPLE, 4)
    free = ({0: Dim.AUTO, 1: Dim.AUTO, 2: Dim.STATIC},)
    stored = io.BytesIO()
    torch.export.save(torch.export.export(steps("n % 5"), (x,), dynamic_shapes=free), stored)
    stored.seek(0)
    (program,) = capture(torch.export.load(stored), (x,), {}).programs
    assert allowed(program) == ((0, MOST), (6, 9))
    again = torch.export.export(program.graph, (x,), dynamic_shapes=program.dynamic_shapes, strict=False)
    again.module()(torch.randn(5, 7, 4))
    with pytest.raises(Exception, match=r"(?i)guard|range|constraint|expected"):
        again.module()(torch.randn(5, 10, 4))


ONES: dict[str, tuple[Callable[[int, int], bool], int, int]] = {
    "b == 1": (lambda b, n: b == 1, 2, 0), "n == 1": (lambda b, n: n == 1, 0, 2),
    "b == 1 and n > 16": (lambda b, n: b == 1 and n > 16, 2, 0),
    "b * n <= 2": (lambda b, n: b * n <= 2, 1, 3), "b + n < 4": (lambda b, n: b + n < 4, 1, 3),
    "(b, n) == (1, 1)": (lambda b, n: (b, n) == (1, 1), 2, 0),
    "b * n < 2": (lambda b, n: b * n < 2, 1, 2), "n >= 1": (lambda b, n: n >= 1, 0, 0),
    "[b * n < 2]": (lambda b, n: (False, True)[b * n < 2], 1, 2),
}  # fmt: skip


def asking(branch: str) -> nn.Module:
    asks = ONES[branch][0]
    return zoo.module(
        lambda self, x: x.softmax(-1) if asks(x.shape[0], x.shape[1]) else x.log_softmax(-1)
    )


@pytest.mark.parametrize("branch", ONES)
def test_what_code_asks_of_small_sizes_is_held_to_in_combination(branch: str) -> None:
    """One example alone does the same as several, and a trace has no guard for it."""
    (program,) = capture(asking(branch), (torch.randn(*EXAMPLE, 4),), {}).programs
    _, examples, tokens = ONES[branch]
    assert allowed(program) == ((examples, MOST), (tokens, MOST))


def test_one_example_of_one_token_is_tried_where_torch_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_guards, "_NOT_THE_MODELS", str(Path(__file__).parent))
    (program,) = capture(asking("b * n < 2"), (torch.randn(*EXAMPLE, 4),), {}).programs
    assert allowed(program) == ((0, MOST), (2, MOST))


class Nested(nn.Module):
    def forward(self, x: Tensor, others: list[Tensor], more: dict[str, Tensor]) -> Tensor:
        steps = 2 if others[0].shape[1] % 4 else 3
        factor = 2 if more["y"].shape[1] > others[0].shape[1] else 3
        for _ in range(steps):
            x = x.softmax(-1)
        return x * factor + others[0].sum() + more["y"].sum()


def test_sizes_of_nested_inputs_are_found_by_name() -> None:
    args = (torch.randn(2, 5, 4), [torch.randn(2, 7, 4)])
    kwargs = {"more": {"y": torch.randn(2, 11, 4)}}
    (program,) = capture(Nested(), args, kwargs).programs
    values = [node.meta["val"] for node in program.graph.graph.nodes if node.op == "placeholder"]
    known, limits = known_of(values)
    assert limits == {known[1].sizes[1]: (5, 7)}
    assert known[0].sizes[1] not in limits and known[2].sizes[1] == 11


FUNCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "log": lambda s, n: s * math.log(n),
    "sqrt": lambda s, n: s / math.sqrt(n),
    "filled": lambda s, n: s + torch.full((n,), -math.log(n)).cumsum(0),
    "a number": lambda s, n: s * int(math.log2(n)),
}


def entropy(function: str) -> nn.Module:
    """Scores scaled with a function of their number."""
    own = FUNCTIONS[function]
    return zoo.module(lambda self, x: own(x @ x.transpose(-1, -2), x.shape[1]).softmax(-1))


def places(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A dustbin that is written where the tokens end."""
    n, m = x.shape[1], x.shape[2]
    z = torch.zeros(x.shape[0], n + 1, 2, n + 2)
    z[:, n] = x.sum((1, 2))[:, None, None]
    z[..., n] += 3.0
    z[0, :n, 1, n + 1] = x[0, :, 0]
    z[..., 0, n] = z[..., 1, n + 1] * 2
    z[:, -1] *= 0.5
    z[:, n - 1, 1, m - 2] = 7.0
    z[:, n, 0, 1] = x.mean((1, 2))[None]  # a leading axis too many, as indexing allows
    return z, z[:, None, n, :, 1:], z[n - n]


def tabled(self: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    return (x @ x.mT + self.table[..., :n, :n]).softmax(-1) @ x


def table(*leads: int) -> nn.Module:
    return zoo.module(tabled, table=nn.Parameter(torch.randn(*leads, 12, 12)))


def blocks(self: nn.Module, x: Tensor) -> Tensor:
    """Attention within blocks of three tokens, the last one filled up where a part of it is missing."""
    n = x.shape[1]
    y = nn.functional.pad(x, (0, 0, 0, -n % 3))
    y = y.view(x.shape[0], y.shape[1] // 3, 3, 4)
    return ((y @ y.mT).softmax(-1) @ y).view(x.shape[0], -1, 4)[:, :n]


def windows(self: nn.Module, x: Tensor) -> Tensor:
    """Attention within windows of 2 x 3 pixels."""
    b, h, w, c = x.shape
    y = x.view(b, h // 2, 2, w // 3, 3, c).transpose(2, 3).reshape(-1, 6, c)
    y = (y @ y.mT).softmax(-1) @ y
    return y.view(b, h // 2, w // 3, 2, 3, c).transpose(2, 3).reshape(b, h, w, c)


# A model, how many tokens its example has, the most that it may have, and others.
ALLOWED: dict[str, tuple[nn.Module, int, int, tuple[int, ...]]] = {
    **{name: (entropy(name), 9, MOST, (2, 5, 100)) for name in FUNCTIONS if name != "a number"},
    "a place that is a size": (zoo.module(places), 9, MOST, (9, 5, 30)),
    **{f"{tokens} of a table of {leads}": (table(*leads), tokens, 12, (1, 5, 12))
       for tokens in (12, 7) for leads in ((), (1, 1), (1, 3))},
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_what_follows_a_length_is_computed_where_the_program_runs(name: str) -> None:
    model, tokens, most, lengths = ALLOWED[name]
    (program,) = capture(model, (torch.randn(3, tokens, 4),), {}).programs
    free = "(1, 3)" not in name  # a table of each example
    assert allowed(program) == ((0, MOST) if free else (3, 3), (0, most))
    for batch, n in zip((3, 2, 6), lengths, strict=True):
        x = torch.randn(batch if free else 3, n, 4)
        torch.testing.assert_close(program.graph(x), model(x), rtol=0, atol=0)
    assert math.log is MATH_LOG


def test_sizes_that_torch_asks_for_are_those_that_the_model_needs() -> None:
    """Pixels are free where the data has pictures of other sizes: windows have to fill them."""
    of = lambda *sizes: Batch((torch.randn(*sizes),), {}, None, [])  # noqa: E731
    for more, width in (([], 9), ([of(3, 6, 12, 5)], None)):
        (program,) = capture(zoo.module(windows), of(3, 4, 9, 5).args, {}, more).programs
        (place,) = program.graph.graph.find_nodes(op="placeholder")
        assert [fixed_size(size) for size in place.meta["val"].shape] == [None, None, width, 5]
    for batch in (of(2, 4, 6, 5), of(1, 10, 15, 5), of(4, 6, 9, 5)):
        torch.testing.assert_close(program.graph(*batch.args), windows(program.graph, *batch.args))
    with pytest.raises(RuntimeError):
        program.graph(torch.randn(3, 4, 8, 5))
    (program,) = capture(zoo.module(blocks), of(3, 8, 4).args, {}).programs
    assert allowed(program) == ((0, MOST), (0, MOST))
    for batch in (of(3, 9, 4), of(1, 1, 4), of(2, 3, 4), of(2, 29, 4)):
        torch.testing.assert_close(program.graph(*batch.args), blocks(program.graph, *batch.args))


def thirds(self: Any, x: Tensor) -> Tensor:
    """Attention to every third pair, of a number that torch finds by asking for n % 3."""
    y = nn.functional.avg_pool1d(x.mT, 2, 3, ceil_mode=True).mT
    return x + self.gate * ((x @ y.mT).softmax(-1) @ y) / y.shape[1]


def first(self: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    part = x[:, : y.shape[1]]
    x = ((x @ part.mT).softmax(-1) @ part).view(len(z), z.shape[1], x.shape[1] // z.shape[1], 4)
    return (x.mean(2) + z) / part.shape[1]


def longer(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Twice as much where x is longer; blocks of 29 and 31 fill both at few pairs of lengths."""
    parts = x.view(3, x.shape[1] // 29, 29, 4), y.view(3, y.shape[1] // 31, 31, 4)
    whole = parts[0].sum((1, 2)) + parts[1].sum((1, 2))
    return self.gate * (2 * whole if x.shape[1] > y.shape[1] else whole)


R = lambda *sizes: torch.randn(3, *sizes, generator=torch.Generator().manual_seed(0))  # noqa: E731
# What hides at other sizes that a program is for one of them: a model, whether its gate is open, inputs.
HIDDEN: dict[str, tuple[Any, float, Callable[[int], tuple[Tensor, ...]], int, tuple[int, ...]]] = {
    "a gate": (thirds, 0.0, lambda n: (R(n, 4),), 12, (8, 13)),
    "a mask": (lambda self, x, pad: thirds(self, x).masked_fill(pad == 0, -1e9), 1.0,
               lambda n: (R(n, 4), torch.arange(4).expand(3, n, 4)), 12, (8, 13)),
    "places": (lambda self, x, place: thirds(self, x).gather(1, place[..., None].expand(-1, -1, 4)), 1.0,
               lambda n: (R(n, 4), torch.full((3, 1), n - 1)), 70, (9, 20)),
    "what few sizes meet": (longer, 1.0, lambda n: (R(29 * n, 4), R(31, 4)), 2, (1, 3)),
    "a size": (first, 1.0, lambda n: (R(n, 4), R(8, 4), R(n // 2, 4)), 24, (4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_hides_a_size_does_not_free_it(hidden: str) -> None:
    function, gate, inputs, tokens, others = HIDDEN[hidden]
    model = zoo.module(function, gate=nn.Parameter(torch.full((1,), gate)))
    run = Runner(model, capture(model, inputs(tokens), {}).programs)
    model.gate.data.fill_(1)
    for n in others:
        with contextlib.suppress(SizeError):
            torch.testing.assert_close(run(Batch(inputs(n), {}, None, [0] * 3)), model(*inputs(n)))


def test_a_length_that_became_a_number_is_not_run_at_another() -> None:
    model = entropy("a number")
    x = torch.randn(*EXAMPLE, 4, generator=torch.Generator().manual_seed(0))
    run = Runner(model, capture(model, (x,), {}).programs)
    torch.testing.assert_close(run(Batch((x[:2],), {}, None, [0, 1])), model(x[:2]))
    with pytest.raises(InputError, match="the program holds for x") as caught:
        run(Batch((x[:, :5],), {}, None, [0, 1, 2]))
    assert "x: size 1 was captured as 9, but is 5" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda n: math.ceil(n / 4), "rounds a size"), (lambda n: round(n / 4), "rounds a size"),
        (lambda n: abs(n - 12), "takes abs of a size"), (lambda n: n >> 1, "shifts a size"),
    ],
)  # fmt: skip
def test_what_no_file_holds_of_a_size_is_told(function: Callable[[Any], int], says: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return (x @ x.mT * torch.ones(function(x.shape[1])).sum()).softmax(-1) @ x

    ((_, reason),) = capture(zoo.module(forward), (torch.randn(*EXAMPLE, 4),), {}).skipped
    assert says in reason and "test_size_guards.py, line " in reason


def test_a_part_of_a_larger_tensor_ties_no_size_to_the_example() -> None:
    whole = torch.randn(EXAMPLE[0], EXAMPLE[1] + 1, 4)
    (program,) = capture(zoo.module(places), (whole[:, 1:],), {}).programs
    assert allowed(program) == ((0, MOST), (0, MOST))


class Windowed(zoo.Biased):
    """Its bias is looked up for as many pairs as one length has, as in the windows of a picture."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        n = x.shape[1]
        bias = self.table[:, self.offsets.view(-1)].view(-1, n, 100 // n)
        weights = (q @ k.mT * 0.3 + bias).softmax(-1)
        for _ in range(3):
            weights = weights / weights.sum(-2, keepdim=True)
            weights = weights / weights.sum(-1, keepdim=True)
        return self.merge(weights @ v)


def test_a_size_that_is_one_number_alone_is_that_number() -> None:
    program = capture(Windowed(), (torch.randn(3, 10, 16),), {}).programs[0]
    (place,) = program.graph.graph.find_nodes(op="placeholder")
    assert [fixed_size(size) for size in place.meta["val"].shape] == [None, 10, 16]
    (site,) = match(program)
    assert isinstance(site, Site) and isinstance(site.convention, Convention) and site.convention.bias


# Lengths that a trace does not hold for, and what begins at some size


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
