"""What holds for every operator: one table of calls, and what is asked of all of them.

Values and gradients are the reference's, with the engine and without it; torch's own checks of a custom
operator; contiguous results, whatever the layout of what is given; export for other sizes. Autocast
decides what an operator is given, never what happens inside, on any number of threads.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.ir import FallbackKernel
from torch._subclasses.fake_tensor import FakeTensorMode

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.kernels import native
from asapc.operators import asap
from asapc.operators.catalogue import reference_named

ops = torch.ops.asapc
HEADS, DIM, VALUE_DIM = 3, 4, 5
ATTENTION = [1.0, 1.0, 0.0, 0.0]
HALVES = (torch.bfloat16, torch.float16)


def calls(batch: int = 2, queries: int = 9, keys: int = 7) -> dict[str, tuple[Any, list[Any]]]:
    """Operator and arguments, by the operator's name and what is particular."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = (
        random(batch, HEADS, tokens, dim)
        for tokens, dim in ((queries, DIM), (keys, DIM), (keys, VALUE_DIM))
    )
    keep = torch.ones(batch, keys, dtype=torch.bool)
    keep[:1, -2:] = False
    bias = random(HEADS, queries, keys)
    f, g = random(batch, HEADS, queries), random(batch, HEADS, keys)
    sorting = [keep, None, random(HEADS, 6, DIM), torch.tensor([0.5, 1.0, 2.0])]
    soft, hard = [*sorting, 0.3, False, True, 1.0], [*sorting, False, True, 1.0]
    pivots, mass = random(HEADS, 4, DIM), torch.full((HEADS, 4), 0.25)
    lot = [keep, None, random(1, HEADS, 4, keys), pivots, mass, 0.5, 0.5, 2, True, 3, False,
           [1.0, 0.0, 0.0, 1.0]]  # fmt: skip
    features = {
        "norm": ([], 1), "raw": ([], DIM), "gaussian": ([], 3), "sliced:4": ([random(4, DIM)], 4),
        "coarse:4": ([pivots], 1),
    }  # fmt: skip
    constant = ["plan", "clamp", 1e-6, "softmax", False, False]
    alike, beside = q[:, :, :keys], [keep, bias[:, :keys], 2, 0.5, random(HEADS, VALUE_DIM, 3)]
    fitted = [torch.tensor([0.5, 1.0, 2.0]), 0.5, 3, True, ATTENTION]
    forms = {"lot": [None, *lot[3:]], "esp_hard": hard[2:], "fitted_sinkhorn": fitted}
    return {
        "sinkhorn": (ops.sinkhorn, [q, k, v, keep, bias, 0.5, 5, True, ATTENTION]),
        "stabilised_sinkhorn": (
            ops.stabilised_sinkhorn, [q, k, v, keep, bias, 0.5, 5, True, *constant, ATTENTION]
        ),
        "stabilised_sinkhorn_attention": (
            ops.stabilised_sinkhorn_attention, [q, k, keep, bias, 0.5, 5, True, *constant, ATTENTION]
        ),
        "sinkhorn, open": (ops.sinkhorn, [q, k, v, None, None, 0.5, 5, True, ATTENTION]),
        "sinkhorn_attention": (ops.sinkhorn_attention, [q, k, keep, bias, 0.5, 3, True, ATTENTION]),
        "banded_sinkhorn": (ops.banded_sinkhorn, [q, k, v, keep, 0.5, 4, True, ATTENTION, -2, 3]),
        "banded_sinkhorn_attention": (
            ops.banded_sinkhorn_attention, [q, k, keep, 0.5, 5, False, ATTENTION, -2, 3]
        ),
        "asap, source": (ops.asap, [q, k, v, keep, bias, f, None, 0.5, 2, ATTENTION]),
        "asap, target": (ops.asap, [q, k, v, None, None, None, g, 0.5, 2, ATTENTION]),
        "asap, one pass": (ops.asap, [q, k, v, keep, bias, None, g, 0.5, 1, ATTENTION]),
        "asap, no pass": (ops.asap, [q, k, v, keep, bias, f, g, 0.5, 0, ATTENTION]),
        "asap_attention": (ops.asap_attention, [q, k, keep, bias, f, None, 0.5, 3, ATTENTION]),
        **{
            f"dual, {name} {side}": (
                ops.dual,
                [q, k, keep, bias, own, random(HEADS, width), name, side, 0.5, 5, side == "target"],
            )
            for side in ("source", "target")
            for name, (own, width) in features.items()
        },
        "dual_and_row_mass": (
            ops.dual_and_row_mass,
            [q, k, keep, bias, [pivots], random(HEADS, 1), "coarse:4", 0.5, 5, True],
        ),
        "esp_soft": (ops.esp_soft, [q, k, v, *soft]),
        "esp_soft, weighed axes": (
            ops.esp_soft,
            [q, k, v, keep, None, None, *soft[3:], "monotone", random(HEADS, DIM).exp(), 0, 1],
        ),
        "esp_soft_attention": (ops.esp_soft_attention, [q, k, *soft]),
        "plan": (
            ops.plan,
            [random(batch, HEADS, queries, keys), f.sum((0, 1)), None, -0.5, 5, True, ATTENTION],
        ),
        "plan, log": (ops.plan, [bias[None], None, g.sum((0, 1)), 0.5, 4, False, ATTENTION, True]),
        "plan, larger": (ops.plan, [random(1, 2, 20, 17), None, None, 0.5, 4, False, ATTENTION]),
        "plan, constant": (
            ops.plan,
            [bias[None], None, None, 0.5, 5, True, ATTENTION, False, None, 1e-6, "scaling", "add"],
        ),
        "plan, of a kernel": (
            ops.plan,
            [bias[None].exp().clamp(min=0.5), None, None, 1.0, 5, True, ATTENTION, False, None, None,
             "plan", "clamp", "plain", False, False, None, True],
        ),
        "kept_keys": (ops.kept_keys, [torch.where(keep, 0.0, -1e9), -1e4]),
        "is_one": (ops.is_one, [keep.long()]),
        "rows_kept": (ops.rows_kept, [bias, True]),
        "keys_of_empty": (
            ops.keys_of_empty, [keep & False, torch.full(keep.shape, -1e4), q, k, 0.5, False]
        ),
        "some_keys": (ops.some_keys, [keep]),
        "esp_released_hard_attention": (ops.esp_released_hard_attention, [q, k, *soft]),
        "esp_hard": (ops.esp_hard, [q, k, v, *hard]),
        "esp_hard_attention": (ops.esp_hard_attention, [q, k, *hard]),
        "fitted_sinkhorn": (ops.fitted_sinkhorn, [q, k, v, keep, bias, *fitted]),
        "fitted_sinkhorn_attention": (ops.fitted_sinkhorn_attention, [q, k, keep, bias, *fitted]),
        **{
            f"hybrid_{name}{form}": (
                getattr(ops, f"hybrid_{name}{form}"), [alike, k, *values, *beside, *settings]
            )
            for name, settings in forms.items()
            for form, values in (("", [v]), ("_attention", []))
        },
        "lot": (ops.lot, [q, k, v, *lot]),
        "lot, weighed rows of all heads": (
            ops.lot,
            [q, k, v, None, None, None, pivots, random(HEADS, 4).softmax(-1), 0.6, 0.4, 3, True, 2, False,
             [1.5, 1.0, -1.0, 0.5], True, random(HEADS, 4).exp()],
        ),
        "lot_attention": (ops.lot_attention, [q, k, *lot]),
    }


CALLS = calls()
MASKS = ("kept_keys", "is_one", "rows_kept", "keys_of_empty", "some_keys")


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def run(operator: Any, inputs: Sequence[Any], has_gradient: bool = True) -> list[Tensor]:
    """The outputs, then the gradients of every input that has one."""
    has_gradient = has_gradient and operator is not ops.esp_released_hard_attention  # argmax has none
    leaves = [x.detach().requires_grad_(has_gradient) if is_float(x) else x for x in inputs]
    given = operator(*leaves)
    outputs = [given] if isinstance(given, Tensor) else list(given)
    generator = torch.Generator().manual_seed(1)
    parts = [(x * torch.randn(x.shape, generator=generator)).sum() for x in outputs if x.requires_grad]
    if parts:
        torch.stack(parts).sum().backward()
    grads = [x.grad for x in leaves if is_float(x) and x.grad is not None]
    return [*(x.detach() for x in outputs), *grads]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_operator_is_among_the_calls() -> None:
    registered = {
        name.removeprefix("asapc::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("asapc::")
    }
    called = {operator._qualified_op_name.removeprefix("asapc::") for operator, _ in CALLS.values()}
    # Beside those within a gradient, marks in a graph, which compute nothing.
    assert {x for x in registered - called if not x.endswith("_gradients")} == {"child", "holds", "seen"}


def reference_of(operator: Any) -> Any:
    name = operator._qualified_op_name.removeprefix("asapc::")
    return getattr(asap, name) if name in ("dual", "dual_and_row_mass") else reference_named(name)


def test_no_argument_has_a_name_that_inductor_takes() -> None:
    """It hands settings on by name, beside its own: `kernel` was one of both."""
    taken = set(inspect.signature(FallbackKernel.create).parameters)
    for name, (function, _) in CALLS.items():
        assert not taken & {argument.name for argument in function.default._schema.arguments}, name


@pytest.mark.parametrize("engine", [True, False], ids=["engine", "no engine"])
@pytest.mark.parametrize("name", [name for name in CALLS if name not in MASKS])
def test_values_and_gradients_are_the_references(
    name: str, engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, of everything that is a number; gradients by autograd through the reference."""
    if not engine:
        monkeypatch.setattr(native, "missing", lambda: "ASAPC_NATIVE=0")
    operator, inputs = CALLS[name]
    given = [in_double(x) for x in inputs]
    has_gradient = "released" not in name
    found, exact = run(operator, given), run(reference_of(operator), given, has_gradient)
    for own, true in zip(found, exact, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "size", [(0, 9, 7), (2, 0, 7), (2, 9, 0), (2, 0, 0)],
    ids=["no examples", "no queries", "no keys", "none"],
)  # fmt: skip
def test_nothing_comes_of_nothing(size: tuple[int, int, int]) -> None:
    """But for those whose originals fail: a convolution and an argmax.  Duals may be NaN there."""
    for name, (operator, inputs) in calls(*size).items():
        if "hybrid" not in name and "released" not in name:
            found, *grads = run(operator, inputs)
            assert found.dim() < 4 or found.shape[:3] == (size[0], HEADS, size[1]) or "plan" in name
            if "dual" not in name and name not in MASKS:
                assert not any(x.any() for x in (found, *grads)) or "plan" in name, name


def in_double(value: Any) -> Any:
    if isinstance(value, list):
        return [in_double(x) for x in value]
    return value.double() if is_float(value) else value


@pytest.mark.parametrize("name", CALLS)
def test_torchs_own_checks(name: str) -> None:
    operator, inputs = CALLS[name]
    with_gradient = name not in MASKS and "released" not in name
    given = [x.clone().requires_grad_(with_gradient) if is_float(x) else x for x in inputs]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator.default, tuple(given), test_utils=checks)


def turned(x: Any) -> Any:
    """The same numbers, with tokens outside of heads: heads that were split off a projection."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def faked(mode: FakeTensorMode, x: Any) -> Any:
    if isinstance(x, list):
        return [faked(mode, own) for own in x]
    return mode.from_tensor(x) if isinstance(x, Tensor) else x


@pytest.mark.parametrize("name", CALLS)
def test_any_layout_is_taken_and_results_are_laid_out_as_their_fakes(name: str) -> None:
    """A program that torch.compile has made counts on the strides of the fakes."""
    operator, inputs = CALLS[name]
    given = [turned(x) for x in inputs]
    found = leaves(operator(*given))
    torch.testing.assert_close(found, leaves(operator(*inputs)))
    assert all(x.is_contiguous() for x in found)
    with FakeTensorMode() as mode:
        fakes = leaves(operator(*(faked(mode, x) for x in given)))
    assert [x.stride() for x in fakes] == [x.stride() for x in found]


@pytest.mark.parametrize("half_steps", [1, 4])
def test_gradients_are_laid_out_as_their_fakes(half_steps: int) -> None:
    given = [turned(torch.randn(2, 3, 6, 4)) for _ in range(4)]
    settings = (None, None, None, 0.5, half_steps, True, ATTENTION, half_steps, 0.0)
    found = ops.loop_gradients(*given, *settings)
    with FakeTensorMode() as mode:
        fakes = ops.loop_gradients(*(faked(mode, x) for x in given), *settings)
    assert [x.stride() for x in fakes] == [x.stride() for x in found]


@pytest.mark.parametrize("name", ["sinkhorn_attention", "plan, larger"])
def test_exported_for_other_sizes_and_compiled(name: str) -> None:
    """Sizes that differ between two calls are dynamic; compiled with its gradient where it has values."""
    operator, inputs = CALLS[name]
    _, others = calls(batch=3, queries=12, keys=8)[name]
    places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            given = dict(zip(places, tensors, strict=True))
            return operator(*(given.get(i, x) for i, x in enumerate(inputs))) * 2.0

    own, other = ([given[i] for i in places] for given in (inputs, others))
    dynamic = [
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(x.shape) if size != y.shape[axis]}
        for x, y in zip(own, other, strict=True)
    ]
    exported = torch.export.export(Module(), tuple(own), dynamic_shapes=(tuple(dynamic),)).module()
    for tensors in (own, other):
        torch.testing.assert_close(exported(*tensors), Module()(*tensors))
    compiled = torch.compile(Module(), backend="aot_eager", dynamic=True)
    torch.testing.assert_close(run(compiled, own), run(Module(), own))


def leaves(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


@pytest.mark.parametrize(
    ("name", "dtype", "threads"), [
        (name, *case) for name, case in zip(CALLS, itertools.cycle(itertools.product(HALVES, (1, 2))))
    ], indirect=["threads"],
)  # fmt: skip
def test_an_operator_under_autocast_is_the_operator(name: str, dtype: torch.dtype, threads: int) -> None:
    operator, inputs = CALLS[name]
    expected = run(operator, inputs)
    with torch.autocast("cpu", dtype):
        found = run(operator, inputs)
        assert torch.is_autocast_enabled("cpu")  # for what comes after
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in MASKS])
def test_every_mixture_that_autocast_makes_is_taken(name: str) -> None:
    """One input in half precision beside float32, or the other way round.

    Each counts as what it holds: the result is that of the same numbers in float32, rounded to the
    dtype of the values, or of q for a map.
    """
    operator, inputs = CALLS[name]
    places = [i for i, value in enumerate(inputs) if is_float(value)]
    valued = isinstance(inputs[2], Tensor) and inputs[2].dim() == 4
    for place in places:
        alone, half = (place + len(name)) % 2 == 0, HALVES[place % 2]
        mixed = [x.to(half) if is_float(x) and (i == place) == alone else x for i, x in enumerate(inputs)]
        found = run(operator, mixed)
        expected = run(operator, [x.float() if is_float(x) else x for x in mixed])
        is_dual = name.startswith("dual")
        assert found[0].dtype == (torch.float32 if is_dual else mixed[2 if valued else 0].dtype)
        for own, exact in zip(found, expected, strict=True):
            # Rounded once, and a gradient's incoming one too; a gradient of a shared input
            # is a sum of rounded parts.
            near = 4 * torch.finfo(half).eps * float(exact.abs().max())
            torch.testing.assert_close(own.float(), exact, rtol=0, atol=near + 1e-6)
