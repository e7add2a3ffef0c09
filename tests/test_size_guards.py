"""A program holds for the sizes at which the code takes the branches that were traced, and says which."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from asapc.errors import InputError
from asapc.formats.limits import MOST, fixed_size
from asapc.inputs.data import Batch
from asapc.ir import Convention
from asapc.passes import size_guards
from asapc.passes.capture import capture
from asapc.passes.match import match
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


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "a number"])
def test_a_function_of_a_length_is_computed_where_the_program_runs(function: str) -> None:
    model = entropy(function)
    (program,) = capture(model, (torch.randn(*EXAMPLE, 4),), {}).programs
    assert allowed(program) == ((0, MOST), (0, MOST))
    for n in (2, 5, 100):
        x = torch.randn(3, n, 4)
        torch.testing.assert_close(program.graph(x), model(x))
    assert math.log is MATH_LOG


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


class Places(nn.Module):
    """A dustbin that is written where the tokens end."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def test_a_place_that_is_a_size_leaves_it_free() -> None:
    (program,) = capture(Places(), (torch.randn(*EXAMPLE, 4),), {}).programs
    for batch, tokens in ((3, 9), (2, 5), (6, 30)):
        x = torch.randn(batch, tokens, 4)
        for expected, found in zip(Places()(x), program.graph(x), strict=True):
            assert torch.equal(expected, found)


def test_a_part_of_a_larger_tensor_ties_no_size_to_the_example() -> None:
    whole = torch.randn(EXAMPLE[0], EXAMPLE[1] + 1, 4)
    (program,) = capture(Places(), (whole[:, 1:],), {}).programs
    assert allowed(program) == ((0, MOST), (0, MOST))


def tabled(self: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    return (x @ x.mT + self.table[..., :n, :n]).softmax(-1) @ x


@pytest.mark.parametrize("tokens", [12, 7])
@pytest.mark.parametrize("leads", [(), (1, 1), (1, 3)])
def test_a_part_of_a_table_holds_for_all_of_it(leads: tuple[int, ...], tokens: int) -> None:
    net = zoo.module(tabled, table=nn.Parameter(torch.randn(*leads, 12, 12)))
    (program,) = capture(net, (torch.randn(3, tokens, 4),), {}).programs
    assert allowed(program)[1] == (0, 12)
    for length in (1, 5, 12):
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(program.graph(x), net(x))


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
