"""Gradients of the Triton kernels against autograd of operators/ in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from gpu_env import DEVICE
from torch import Tensor

pytest.importorskip("triton")

from test_gpu_attention import CASES, LOOPS, SCALE, Case, factors

from asapc.kernels import dispatch
from asapc.kernels.gpu import backward, half_step
from asapc.kernels.library import gradients
from asapc.kernels.loop import Loop, Tail
from asapc.operators import asap as asap_meaning
from asapc.operators import c_transforms
from asapc.operators import sinkhorn as meaning

HOSTILE = {  # smaller, and still of two tiles
    name: {"shape": (2, 2 if "heads" in name else 1, 18, 37, 16, 16), **case}
    for name, case in CASES.items()
    if name not in ("several tiles", "masked half", "bias of examples", "one of each")
}
# The plan and its slopes are rounded to the inputs' precision; the interpreter cuts bfloat16 off.
STEPS = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor | None = None
    f: Tensor | None = None
    g: Tensor | None = None


def close_rows_backward(
    inputs: backward.Inputs, f: Tensor, g: Tensor | None, grad_f: Tensor
) -> Gradients:
    """Of f = close_rows(g): gradients of q, k and g [B, H, M], from that of f [B, H, N]."""
    terms = backward.one_term(inputs, f, g, "row", grad_f)
    dq, _, _ = backward._slopes(inputs, terms, None, "row", points=True)
    dk, _, dg = backward._slopes(inputs, terms, None, "column", points=True, sums=True)
    return Gradients(backward._given(dq), backward._given(dk), g=dg)


def close_columns_backward(
    inputs: backward.Inputs, f: Tensor | None, g: Tensor, grad_g: Tensor
) -> Gradients:
    """Of g = close_columns(f): gradients of q, k and f [B, H, N], from that of g [B, H, M]."""
    terms = backward.one_term(inputs, f, g, "column", grad_g)
    dq, _, df = backward._slopes(inputs, terms, None, "row", points=True, sums=True)
    dk, _, _ = backward._slopes(inputs, terms, None, "column", points=True)
    return Gradients(backward._given(dq), backward._given(dk), f=df)


def attend_backward(
    inputs: backward.Inputs, output: backward.Output, f: Tensor | None, g: Tensor | None
) -> Gradients:
    """Of out = attend(f, g): gradients of q, k, v, g and, unless None closed the rows, of f."""
    if f is None:
        out, f = backward._attend_again(inputs, output, g)
        terms = backward.one_term(inputs, f, g, "row", backward._row_products(output, out))
        dq, _, df = backward._slopes(inputs, terms, output, "row", points=True)
    else:
        terms = backward.one_term(inputs, f, g, "row", None)
        dq, _, df = backward._slopes(inputs, terms, output, "row", points=True, sums=True)
    dk, dv, dg = backward._slopes(inputs, terms, output, "column", points=True, values=True, sums=True)
    return Gradients(backward._given(dq), backward._given(dk), dv, df, dg)


def leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).detach().clone().requires_grad_()


class Reference:
    """The meaning's gradients of (q, k, v, f, g) for one dtype, by autograd."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        self.leaves = [leaf(t, dtype) for t in (case.q, case.k, case.v, case.f, case.g)]
        q, k, self.v, self.f, self.g = self.leaves
        bias = None if case.bias is None else case.bias.to(dtype)
        self.scores = meaning.score_matrix(q, k, case.keep, bias, SCALE)
        sizes = self.scores.shape[2:]
        self.log_mu, self.log_nu = c_transforms.log_marginals(*sizes, case.keep, self.scores)

    def starts(self, source: bool, target: bool) -> tuple[Tensor, Tensor]:
        f, g = meaning.initial_duals(self.scores, self.case.keep)
        if target:  # not masked_fill(g + 0): the gradient of a masked key's dual is 0
            g = self.g if self.case.keep is None else torch.where(self.case.keep[:, None], self.g, g)
        return (self.f if source else f), g

    def out(self, f: Tensor, g: Tensor) -> Tensor:
        plan = meaning.attention_map(self.scores, f, g, factors(self.case), self.case.keep)
        return plan @ self.v

    def gradients(self, result: Tensor, grad: Tensor) -> list[Tensor]:
        masked = torch.where(result.isfinite(), result, 0.0)
        found = torch.autograd.grad(masked, self.leaves, grad.to(result), allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(self.leaves, found, strict=True)]


def assert_honest(own: Sequence[Tensor | None], both: list[list[Tensor]], case: Case) -> None:
    """Those of (q, k, v, f, g) that are given: at most twice as wrong as autograd in float32.

    Besides, exp(S + f + g) is no better than the float32 S, f and g it is of, and where a small
    gradient is what larger ones leave, it is no better than those.
    """
    exact, rough = both
    scores = case.scores(torch.float32)
    reach = sum(float(t[t.isfinite()].abs().max()) for t in (scores, case.f, case.g))
    scale = max(1.0, *(float(t.abs().max()) for t in exact))
    step = (STEPS[case.q.dtype] + 2.0**-23 * reach) * scale
    for mine, true, reference in zip(own, exact, rough, strict=True):
        if mine is None:
            continue
        assert mine.shape == true.shape and bool(mine.isfinite().all())
        honest = float((reference.to(mine.dtype).double() - true).abs().max())
        assert float((mine.cpu().double() - true).abs().max()) <= 2 * honest + step


def upstream(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(7))


def both(
    case: Case,
    start: tuple[bool, bool],
    grad: Tensor,
    steps: Callable[[Reference, Tensor, Tensor], Tensor],
) -> list[list[Tensor]]:
    """Gradients of what `steps` makes of (reference, f, g), in float64 and in float32."""
    results = []
    for dtype in (torch.float64, torch.float32):
        reference = Reference(case, dtype)
        results.append(reference.gradients(steps(reference, *reference.starts(*start)), grad))
    return results


def inputs_of(case: Case) -> tuple[backward.Inputs, Tensor]:
    q, k, v, keep, bias = case.given()
    return backward.Inputs(q, k, keep, bias, SCALE), v


@pytest.mark.parametrize("name", HOSTILE)
def test_half_steps(name: str) -> None:
    case = Case(**HOSTILE[name])
    inputs, _ = inputs_of(case)
    q, k, keep, bias, _ = inputs
    grad_f, grad_g = upstream(*case.q.shape[:3]), upstream(*case.k.shape[:3])
    f, g = case.dual("source"), case.dual("target")

    own_f = half_step.close_rows(q, k, keep, bias, g, SCALE)
    own = close_rows_backward(inputs, own_f, g, grad_f.to(DEVICE))
    results = both(
        case, (False, True), grad_f,
        lambda ref, _, g: c_transforms.close_rows(ref.scores, g, ref.log_mu),
    )  # fmt: skip
    assert own.g is not None and own.f is None
    assert_honest(own, results, case)

    own_g = half_step.close_columns(q, k, keep, bias, f, SCALE)
    own = close_columns_backward(inputs, f, own_g, grad_g.to(DEVICE))
    results = both(
        case, (True, False), grad_g,
        lambda ref, f, _: c_transforms.close_columns(ref.scores, f, ref.log_nu),
    )  # fmt: skip
    assert own.f is not None and own.g is None
    assert_honest(own, results, case)


@pytest.mark.parametrize("closes", [True, False], ids=["closes rows", "given f"])
@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "huge"])
def test_attend(name: str, closes: bool) -> None:
    case = Case(**HOSTILE[name])
    case.f, case.g = case.f - 6, case.g - 6  # plans of about 1 where nothing closes them
    if case.q.dtype != torch.float32:
        case.f, case.g = case.f / 3, case.g / 3
    inputs, v = inputs_of(case)
    grad = upstream(*case.q.shape[:3], case.v.shape[3]).to(case.v.dtype)
    f = None if closes else case.dual("source")
    own = attend_backward(
        inputs, backward.Output(grad.to(DEVICE), v, factors(case)), f, case.dual("target")
    )

    def steps(ref: Reference, f: Tensor, g: Tensor) -> Tensor:
        return ref.out(c_transforms.close_rows(ref.scores, g, ref.log_mu) if closes else f, g)

    assert (own.f is None) == closes and own.g is not None and own.v is not None
    assert_honest(own, both(case, (not closes, True), grad, steps), case)


def assert_loop(case: Case, half_steps: int, first: Any, start: bool) -> None:
    q, k, v, keep, bias = case.given()
    dual = case.dual("target" if first == "row" else "source") if start else None
    loop = Loop(SCALE, half_steps, first, factors(case))
    grad = upstream(*q.shape[:3], v.shape[3]).to(case.v.dtype)
    whole = Tail(loop.half_steps)
    own = backward.sinkhorn_backward(grad.to(DEVICE), q, k, v, keep, bias, dual, loop, whole)

    def steps(ref: Reference, f: Tensor, g: Tensor) -> Tensor:
        return ref.out(*meaning.run_half_steps(ref.scores, f, g, half_steps, first, case.keep))

    results = both(case, (start and first == "column", start and first == "row"), grad, steps)
    grad_dual = own[3] if start else None
    assert all(mine.dtype == q.dtype for mine in own[:3])
    of_duals = [grad_dual, None] if first == "column" else [None, grad_dual]
    assert_honest([*own[:3], *of_duals], results, case)


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    assert_loop(Case((1, 2, 20, 17, 8, 8), masked=True), *LOOPS[name])


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "huge"])
def test_loops_on_hostile_inputs(name: str) -> None:
    assert_loop(Case(**HOSTILE[name]), 3, "column", True)


@pytest.mark.parametrize("shape", [(0, 2, 5, 7, 8, 8), (2, 2, 5, 0, 8, 8), (2, 2, 0, 7, 8, 8)], ids=str)
def test_loops_of_nothing(shape: tuple[int, ...]) -> None:
    case = Case(shape)
    q, k, v, _, _ = case.given()
    loop = Loop(SCALE, 3, "row", factors(case))
    grads = backward.sinkhorn_backward(torch.ones_like(q), q, k, v, None, None, None, loop, Tail(3))
    for own, tensor in zip(grads[:3], (q, k, v), strict=True):
        assert own is not None
        assert own.shape == tensor.shape and float(own.abs().sum()) == 0.0


# The registered operators, whose gradients are these kernels' on a GPU


@pytest.fixture
def gpu_chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if the tensors were on a GPU; lists the operators that ask."""
    asked: list[str] = []

    def backend(operator: str, *_: Any, **_names: Any) -> str:
        asked.append(operator)
        return "gpu"

    monkeypatch.setattr(dispatch, "attention_backend", backend)
    monkeypatch.setattr(gradients, "_on_cpu", lambda tensor: False)
    return asked


CALLS: dict[str, tuple[str, Any]] = {
    "sinkhorn": ("sinkhorn", lambda keep, f, g: (keep, None, SCALE, 4, True, [1.0, 1.0, 0.0, 0.0])),
    "source": ("asap", lambda keep, f, g: (keep, None, f, None, SCALE, 3, [1.0, 1.0, 0.0, 0.0])),
    "target": ("asap", lambda keep, f, g: (keep, None, None, g, SCALE, 1, [1.0, 1.0, 0.0, 0.0])),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("masked", [False, True], ids=["open", "masked"])
def test_registered_gradients(gpu_chosen: list[str], name: str, masked: bool) -> None:
    """One example has no active key: nothing flows to its queries and keys, and v gets 1 / M."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 9, 8, generator=generator) for _ in range(3))
    f, g = torch.randn(2, 2, 9, generator=generator), torch.randn(2, 2, 9, generator=generator)
    keep = None
    if masked:
        keep = torch.arange(9)[None].expand(2, 9) < torch.tensor([[5], [0]])
    operator, tail = CALLS[name]
    reference = meaning.sinkhorn if operator == "sinkhorn" else asap_meaning.asap
    weights = torch.randn(2, 2, 9, 8, generator=generator)
    found = []
    own_function = getattr(torch.ops.asapc, operator)
    dual = {"sinkhorn": [], "source": [3], "target": [4]}[name]
    for function, dtype in ((own_function, torch.float32), (reference, torch.float64)):
        leaves = [t.to(DEVICE, dtype).requires_grad_() for t in (q, k, v, f, g)]
        out = function(*leaves[:3], *tail(None if keep is None else keep.to(DEVICE), *leaves[3:]))
        used = [*leaves[:3], *(leaves[i] for i in dual)]
        found.append(torch.autograd.grad(out, used, weights.to(DEVICE, dtype)))
    for own, exact in zip(*found, strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=1e-4, atol=1e-5)
    assert gpu_chosen.count(operator) >= 1


def test_a_gradient_of_the_bias_is_the_meanings(gpu_chosen: list[str]) -> None:
    q = torch.randn(1, 2, 6, 8, device=DEVICE)
    bias = torch.zeros(1, 2, 6, 6, device=DEVICE, requires_grad=True)
    out = torch.ops.asapc.sinkhorn(q, q, q, None, bias, SCALE, 4, True, [1.0, 1.0, 0.0, 0.0])
    (own,) = torch.autograd.grad(out.square().sum(), bias)
    exact = meaning.sinkhorn(q, q, q, None, bias, SCALE, 4, True, [1.0, 1.0, 0.0, 0.0])
    (expected,) = torch.autograd.grad(exact.square().sum(), bias)
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("spread", "safe"), [(1.0, True), (400.0, False)])
def test_slopes_on_one_orbit_are_those_of_every_half_step(
    monkeypatch: pytest.MonkeyPatch, spread: float, safe: bool
) -> None:
    """A product of rank 2 T over one plan, and an exponential a half-step where duals move too far."""
    case = Case((2, 1, 17, 20, 16, 16), masked=True, spread=spread)
    q, k, v, keep, bias = case.given()
    loop, told = Loop(SCALE, 9, "row", [1.0, 1.0, 0.0, 0.0]), list[Tensor]()
    true = backward.orbit_of

    def noted(*given: Tensor) -> backward.Orbit:
        orbit = true(*given)
        told.append(orbit.safe)
        return orbit

    def never(*given: Tensor) -> backward.Orbit:
        return true(*given)._replace(safe=torch.zeros_like(told[0]))

    grad = upstream(*case.q.shape[:3], 16).to(DEVICE)
    found = []
    for orbit in (noted, never):
        monkeypatch.setattr(backward, "orbit_of", orbit)
        found.append(backward.sinkhorn_backward(grad, q, k, v, keep, bias, None, loop, Tail(9))[:3])
    assert len(told) == 2 and all(bool(flags[0].any()) == safe for flags in told)
    for own, each in zip(*found, strict=True):
        assert torch.allclose(own, each, rtol=1e-4, atol=1e-5 * float(each.abs().max()))
