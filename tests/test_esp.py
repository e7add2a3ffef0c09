"""ESP operators: goldens, closed forms, hostile shapes, the CPU kernels within the honest error."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.ir import Ties
from asapc.operators import esp as meaning
from asapc.operators import ranks

GOLDEN = Path(__file__).parent / "golden"
EPS = torch.finfo(torch.float32).eps
ops = torch.ops.asapc


# An independent reference in float64: one example, head and slice at a time, tokens in Python lists.


def interpolated(n: int, m: int) -> Tensor:
    """I [n, m]: rank r of n meets rank r (m - 1) / (n - 1) of m."""
    matrix = torch.zeros(n, m).double()
    for r in range(n):
        place = r * (m - 1) / (n - 1) if n > 1 else 0.0
        low = min(int(place + 1e-9), m - 1)
        share = max(place - low, 0.0)
        matrix[r, low] += 1 - share
        if share > 1e-9:
            matrix[r, low + 1] += share
    return matrix


def stairs(n: int, m: int) -> Tensor:
    """I [n, m] of the exact coupling: the north-west corner, of rows with mass 1."""
    matrix, r, s = torch.zeros(n, m).double(), 0, 0
    row, column = m, n  # what is left, in units of 1 / m
    while r < n and s < m:
        moved = min(row, column)
        matrix[r, s] += moved / m
        row, column = row - moved, column - moved
        if row == 0:
            r, row = r + 1, m
        if column == 0:
            s, column = s + 1, n
    return matrix


def sorting(x: Tensor, temperature: float | None, ties: str = "shared") -> Tensor:
    """SoftSort, or where temperature is None the permutation, or its mean over ties.  x: [n]."""
    last = -1 if ties == "ascending" else 1
    order = sorted(range(len(x)), key=lambda i: (-float(x[i]), last * i))
    if temperature is not None:
        return torch.stack([torch.softmax(-((x[i] - x) ** 2) / temperature, 0) for i in order])
    if ties != "shared":
        return torch.eye(len(x)).double()[order]
    equal = (x[order, None] == x).double()
    return equal / equal.sum(-1, keepdim=True)


def reference(
    q: Tensor, k: Tensor, keep: Tensor | None, query_keep: Tensor | None, slices: Tensor | None,
    tau: Tensor, temperature: float | None, squared_cost: bool = False, mean_cost: bool = False,
    coupling: str = "interpolated", ties: str = "shared",
) -> Tensor:  # fmt: skip
    """The map [B, H, N, M] in float64."""
    q, k = q.double(), k.double()
    batch, heads, queries, dim = q.shape
    out = torch.zeros(batch, heads, queries, k.shape[2]).double()
    for b, h in itertools.product(range(batch), range(heads)):
        rows = torch.arange(queries) if query_keep is None else query_keep[b].nonzero()[:, 0]
        columns = torch.arange(k.shape[2]) if keep is None else keep[b].nonzero()[:, 0]
        if len(rows) == 0 or len(columns) == 0:
            continue
        theta = torch.eye(dim).double()
        if slices is not None:
            theta = (slices if slices.dim() == 2 else slices[h]).double()
        points, keys = q[b, h, rows], k[b, h, columns]
        cost = (points[:, None] - keys).norm(dim=-1) ** (2 if squared_cost else 1)
        between = (stairs if coupling == "monotone" else interpolated)(len(rows), len(columns))
        plans, costs = [], []
        for direction in theta:
            a, c = (sorting((p * direction).sum(-1), temperature, ties) for p in (points, keys))
            plans.append(a.T @ between @ c)
            costs.append((cost * plans[-1]).sum() / (len(rows) if mean_cost else 1))
        weights = torch.softmax(-tau.double().expand(heads)[h] * torch.stack(costs), 0)
        own = (weights[:, None, None] * torch.stack(plans)).sum(0)
        out[b, h, rows[:, None], columns] = own
    return out


def error(own: Tensor, exact: Tensor) -> float:
    return float((own.double() - exact).abs().max()) if own.numel() else 0.0


# Goldens


def golden(kind: str) -> list[Any]:
    tensors = load_file(GOLDEN / "esp.safetensors")
    cases = [case for case in json.loads((GOLDEN / "esp.json").read_text()) if case["kind"] == kind]
    return [
        pytest.param(case, *(tensors[f"{case['name']}.{key}"] for key in ("q", "k", "attention")),
                     id=case["name"])
        for case in cases
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "q", "k", "attention"), golden("esp_soft"))
def test_soft_goldens(case: dict[str, Any], q: Tensor, k: Tensor, attention: Tensor) -> None:
    """They were computed in float32, where tau times a sum of 256 numbers leaves up to 8e-6 of the map
    open at tau = 10: theirs is 8e-7 and 8e-6 there, by the luck of an order of sums."""
    tau, temperature = torch.tensor([case["inverse_temperature"]]), case["softsort_temperature"]
    settings = (None, None, None, tau, temperature, False, False, 1.0)
    values = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    exact = reference(q, k, None, None, None, tau, temperature)
    allowed, theirs = 2e-6 * max(1.0, float(tau) / 4), error(attention, exact)
    for own in (ops.esp_soft_attention(q, k, *settings), ops.esp_soft(q, k, values, *settings)):
        assert error(own, attention.double()) <= allowed + theirs
        assert error(own, exact) <= max(allowed, theirs)
    wide = ops.esp_soft_attention(q.double(), k.double(), *settings)
    assert error(wide, exact) < 1e-12


@pytest.mark.parametrize(("case", "q", "k", "attention"), golden("esp_hard"))
def test_hard_goldens(case: dict[str, Any], q: Tensor, k: Tensor, attention: Tensor) -> None:
    """The map is a sum of permutations, the exact ones; only the weights bear the rounding of costs.

    Permutations: ours, weighted as the golden's map asks, reproduce it. Weights: w_l moves by w_l tau
    times what a float32 sum of the distances leaves open, eps D_l.
    """
    tau = torch.tensor([case["inverse_temperature"]])
    plans = []  # [B, H, N, M] of every slice alone
    for theta in torch.eye(q.shape[3]):
        plans.append(ops.esp_hard_attention(q, k, None, None, theta[None], tau, False, False, 1.0))
        assert bool(((plans[-1] == 0) | (plans[-1] == 1)).all())
        assert bool((plans[-1].sum(-1) == 1).all() and (plans[-1].sum(-2) == 1).all())
    columns = torch.stack(plans, -1).double().flatten(2, 3)  # [B, H, N M, L]
    weights = torch.linalg.lstsq(columns, attention.double().flatten(2, 3)[..., None]).solution
    assert error((columns @ weights).squeeze(-1), attention.double().flatten(2, 3)) < 1e-7

    own = ops.esp_hard_attention(q, k, None, None, None, tau, False, False, 1.0)
    exact = reference(q, k, None, None, None, tau, None)
    assert error(own, exact) < 2e-6
    cost = (torch.cdist(q, k).unsqueeze(-1) * torch.stack(plans, -1)).sum((2, 3))  # [B, H, L]
    open_digits = float(tau * EPS * cost.max())
    assert error(attention, exact) <= 2 * open_digits
    assert error(own, attention.double()) <= 2 * open_digits + 1e-7


# Against the reference


SHAPES = {
    "tails": (3, 2, 17, 17, 4, 5),
    "more keys": (3, 2, 17, 31, 4, 3),
    "more queries": (3, 2, 31, 17, 4, 3),
    "one token": (2, 1, 1, 1, 3, 2),
    "one key": (2, 2, 9, 1, 3, 2),
    "one query": (2, 2, 1, 9, 3, 2),
}


def problem(shape: tuple[int, ...], masked: bool, spread: float = 1.0) -> tuple[Any, ...]:
    """q, k, v, keep, query_keep for (B, H, N, M, D, E): duplicated tokens, NaN and inf where padded.

    The first example has no active key, the second one alone, the third no active query.
    """
    b, h, n, m, d, e = shape
    torch.manual_seed(b + 10 * n + 100 * m)
    q, k, v = torch.randn(b, h, n, d) * spread, torch.randn(b, h, m, d) * spread, torch.randn(b, h, m, e)
    q[:, :, n // 2], k[:, :, m // 2] = q[:, :, 0], k[:, :, 0]  # ties
    if not masked:
        return q, k, v, None, None
    keep, query_keep = torch.rand(b, m) > 0.4, torch.rand(b, n) > 0.4
    keep[0] = keep[1] = False
    keep[1, m // 2] = True
    query_keep[2:3] = False
    q[~query_keep[:, None].expand(b, h, n)] = torch.nan
    k[~keep[:, None].expand(b, h, m)] = torch.inf
    v[~keep[:, None].expand(b, h, m)] = torch.nan
    return q, k, v, keep, query_keep


def tying(shape: tuple[int, ...], masked: bool, kind: str) -> tuple[Any, ...]:
    """problem() with tokens that tie along every direction, and different ones along the axes."""
    q, k, v, keep, query_keep = problem(shape, masked)
    generator = torch.Generator().manual_seed(5)
    found = []
    for points in (q, k):
        batch, heads, count, dim = points.shape
        if kind == "repeated":
            few = torch.randn(batch, heads, 4, dim, generator=generator)
            own = few[:, :, torch.randint(4, (count,), generator=generator)]
        else:  # one coordinate is not 0: no rounding anywhere
            own = torch.zeros(batch, heads, count, dim)
            axis = torch.randint(dim, (batch, heads, count, 1), generator=generator)
            own.scatter_(-1, axis, torch.randint(1, 3, axis.shape, generator=generator).float())
        found.append(torch.where(points.isfinite(), own, points))
    return *found, v, keep, query_keep


def theta(kind: str, heads: int, dim: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(7)
    if kind == "axes":
        return None
    return torch.randn(*((3,) if kind == "shared" else (heads, 3)), dim, generator=generator)


SLICES = ("axes", "shared", "per head")
SAMPLED = dict(zip(SHAPES, zip(SHAPES.values(), itertools.cycle(SLICES)), strict=True))
TEMPERATURES = (1e-12, 1e-3, 0.5, 1e4)


def with_every_shape(values: Iterable[Any], more: Iterable[str] = ()) -> list[tuple[Any, str, bool]]:
    """(value, shape, masked): every shape and every value is met open and masked."""
    return [
        (value, shape, (i + j) % 2 == 1)
        for i, value in enumerate(values) for j, shape in enumerate((*SHAPES, *more))
    ]  # fmt: skip


@pytest.mark.parametrize(("temperature", "name", "masked"), with_every_shape(TEMPERATURES))
def test_kernels_are_within_the_honest_error(temperature: float, name: str, masked: bool) -> None:
    """Maps, products and float64 of both against the reference; of exact sorts below, with their ties."""
    shape, slices = SAMPLED[name]
    q, k, v, keep, query_keep = problem(shape, masked)
    directions = theta(slices, shape[1], shape[4])
    tau = torch.tensor([0.3] if slices == "axes" else [0.1, 2.0][: shape[1]])
    squared, mean = slices == "shared", slices == "per head"
    factor = 1.5
    exact = factor * reference(
        q.nan_to_num(), k.nan_to_num(), keep, query_keep, directions, tau, temperature, squared, mean
    )
    product = exact @ v.double().nan_to_num()
    settings = (keep, query_keep, directions, tau, temperature, squared, mean, factor)
    plain: Tensor = meaning.esp_soft(q, k, v, *settings)
    kernel: Tensor = ops.esp_soft(q, k, v, *settings)
    dense: Tensor = ops.esp_soft_attention(q, k, *settings)
    budget = 2 * error(plain, product) + 2e-6 * float(v.nan_to_num().abs().max())
    assert error(kernel, product) <= budget
    assert error(dense, exact) <= budget
    wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in settings]
    for module in (meaning, ops):
        own = module.esp_soft(q.double(), k.double(), v.double(), *wide)
        assert error(own, product) <= 1e-10
    if query_keep is not None and keep is not None:
        assert bool((kernel[~query_keep[:, None].expand(kernel.shape[:3])] == 0).all())
        assert bool((kernel[0] == 0).all() and (dense[0] == 0).all())


TIES = (("shared", "apart"), ("shared", "repeated"), ("shared", "crossed"), ("descending", "crossed"),
        ("ascending", "repeated"))  # fmt: skip


@pytest.mark.parametrize(("tied", "name", "masked"), with_every_shape(TIES))
def test_ties_and_couplings(tied: tuple[str, str], name: str, masked: bool) -> None:
    """Every operator against the lists, in float64, by both couplings and both costs."""
    (ties, points), (shape, slices) = tied, SAMPLED[name]
    given = problem(shape, masked) if points == "apart" else tying(shape, masked, points)
    q, k, v, keep, query_keep = (
        t.double() if t is not None and t.is_floating_point() else t for t in given
    )
    directions = theta(slices, shape[1], shape[4])
    tau = torch.tensor([0.1, 2.0][: shape[1]], dtype=torch.float64)
    for coupling, squared, mean in (("interpolated", False, True), ("monotone", True, False)):
        settings = (keep, query_keep, directions, tau, squared, mean, 1.5, coupling, ties)
        exact = 1.5 * reference(
            q.nan_to_num(), k.nan_to_num(), keep, query_keep, directions, tau, None, *settings[4:6],
            coupling, ties,
        )  # fmt: skip
        product = exact @ v.nan_to_num()
        assert error(ops.esp_hard_attention(q, k, *settings), exact) <= 1e-10
        assert error(meaning.esp_hard(q, k, v, *settings), product) <= 1e-10
        assert error(ops.esp_hard(q, k, v, *settings), product) <= 1e-10
        single = ops.esp_hard(q.float(), k.float(), v.float(), *settings)
        plain = meaning.esp_hard(q.float(), k.float(), v.float(), *settings)
        budget = 2 * error(plain, product) + 2e-6 * float(v.nan_to_num().abs().max())
        assert error(single, product) <= budget


@pytest.mark.parametrize("temperature", [1e-3, 0.1])
def test_a_long_head_is_right(temperature: float) -> None:
    """Its nodes are more than are formed together."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 420, 3), torch.randn(1, 1, 390, 3), torch.randn(1, 1, 390, 4)
    settings = (None, None, None, torch.tensor([0.02]), temperature, False, False, 1.0)
    own = ops.esp_soft(q, k, v, *settings)
    exact = meaning.esp_soft(q.double(), k.double(), v.double(), *settings)
    plain = meaning.esp_soft(q, k, v, *settings)
    assert error(own, exact) <= 2 * error(plain, exact) + 1e-6


def test_a_plan_too_large_to_stand_beside_others_is_formed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slices are formed together, the map is the same."""
    q, k, v, _, _ = problem((2, 2, 9, 9, 6, 4), False)
    settings = (None, None, None, torch.tensor([0.7]), 0.1, False, False, 1.0)
    expected = meaning.esp_soft(q, k, v, *settings)
    for entries in (0, 2 * 2 * 9 * 9, 4 * 2 * 2 * 9 * 9):  # one slice, two unevenly, four and two
        monkeypatch.setattr(meaning, "ENTRIES", entries)
        torch.testing.assert_close(meaning.esp_soft(q, k, v, *settings), expected)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_huge_scores(hard: bool, squared: bool) -> None:
    """Costs of 1e6 or 1e12: the cheapest slice is the plan, and nothing overflows."""
    q, k, v, _, _ = problem((2, 2, 12, 12, 3, 3), False, spread=1e6)
    tau, softsort = torch.tensor([1.0]), () if hard else (1e-3,)
    operator = ops.esp_hard if hard else ops.esp_soft
    out = operator(q, k, v, None, None, None, tau, *softsort, squared, False, 1.0)
    exact = reference(q, k, None, None, None, tau, None if hard else 1e-3, squared) @ v.double()
    assert error(out, exact) < 1e-5


# Closed forms and invariants


@pytest.mark.parametrize("keys", [33, 20], ids=["as many keys", "fewer keys"])
def test_equal_tokens_share_their_mass(keys: int) -> None:
    """Every slice of equal tokens is uniform, on every path, also from a learnt direction; in the order
    of the tokens it is the identity where there are as many of either."""
    q = torch.randn(1, 1, 1, 4).expand(1, 2, 33, 4).clone()
    v = torch.randn(1, 2, keys, 3)
    for directions, coupling in itertools.product(
        (None, torch.randn(5, 4), torch.randn(2, 5, 4)), ("interpolated", "monotone")
    ):
        settings = (None, None, directions, torch.ones(1), False, False, 1.0, coupling)
        dense = ops.esp_hard_attention(q, -q[:, :, :keys], *settings)
        torch.testing.assert_close(dense, torch.full((1, 2, 33, keys), 1 / keys))
        own = ops.esp_hard(q, -q[:, :, :keys], v, *settings)
        torch.testing.assert_close(own, v.mean(2, keepdim=True).expand(1, 2, 33, 3))
        if keys == 33:
            own = ops.esp_hard(q, -q, v, *settings, "descending")
            torch.testing.assert_close(own, v)


@pytest.mark.parametrize("counts", [(1, 1), (4, 7), (7, 4), (12, 4), (31, 17), (17, 31)], ids=str)
def test_the_monotone_coupling_has_both_marginals(counts: tuple[int, int]) -> None:
    """And the cost of the exact transport on a line; at most N + M - 1 entries are not 0."""
    n, m = counts
    x, y = torch.randn(1, 1, n, 1).double(), torch.randn(1, 1, m, 1).double()
    settings = (None, None, None, torch.ones(1), True, False, 1.0, "monotone")
    dense = ops.esp_hard_attention(x, y, *settings)
    torch.testing.assert_close(dense.sum(-1), torch.ones(1, 1, n).double())
    torch.testing.assert_close(dense.sum(-2), torch.full((1, 1, m), n / m).double())
    assert int((dense > 1e-12).sum()) <= n + m - 1
    levels = (torch.arange(n * m) + 0.5).double() / (n * m)
    ends = [torch.sort(t.flatten()).values[(levels * len(t.flatten())).long()] for t in (x, y)]
    cost = (dense[0, 0] * (x[0, 0] - y[0, 0].T).square()).sum() / n
    torch.testing.assert_close(cost, (ends[0] - ends[1]).square().mean())


def test_unknown_couplings_and_ties_are_refused() -> None:
    q = torch.randn(1, 1, 3, 2)
    settings = (q, q, q, None, None, None, torch.ones(1), False, False, 1.0)
    with pytest.raises(ValueError, match="one of interpolated, monotone is needed, got 'exact'"):
        ops.esp_hard(*settings, "exact")
    with pytest.raises(ValueError, match="one of shared, descending, ascending is needed"):
        ops.esp_hard(*settings, "monotone", "first")


def test_order_of_signed_zeros_infinities_and_ties() -> None:
    x = torch.tensor([0.0, -0.0, 3.0, -2.0, 0.0, 3.0, -torch.inf, 1e-42, -1e-42, torch.inf])
    orders: dict[Ties, Tensor] = {
        "descending": torch.sort(x, descending=True, stable=True).indices,
        "ascending": torch.sort(x, stable=True).indices.flip(0),
    }
    finite = x.isfinite().nonzero()[:, 0]
    points, values = x[None, None, :, None], torch.eye(len(x))[None, None]
    last = torch.arange(float(len(x))).flip(0)[None, None, :, None]
    for ties, order in orders.items():
        assert torch.equal(ranks.order_of(x, ties), order)
        keep = x.isfinite()[None]
        settings = (keep, keep, None, torch.ones(1), False, False, 1.0, "monotone", ties)
        for dtype in (torch.float32, torch.float64):
            q, k, v = (t.to(dtype) for t in (points, last, values))
            by_rank = ops.esp_hard(q, k, v, *settings)[0, 0][order[x[order].isfinite()]]
            assert torch.equal(by_rank, v[0, 0][finite])


def test_released_hard_takes_the_first_of_equal_tops() -> None:
    """Two equal queries both take the key of the first: the map is no permutation, as published."""
    q = torch.tensor([[2.0], [2.0], [1.0]])[None, None]
    k = torch.tensor([[3.0], [2.0], [1.0]])[None, None]
    keep = torch.tensor([[True, True, True]])
    settings = (keep, keep, None, torch.ones(1), 0.1, False, False, 1.0)
    dense = ops.esp_released_hard_attention(q, k, *settings)
    assert torch.equal(dense[0, 0], torch.tensor([[1.0, 1, 0], [0, 0, 0], [0, 0, 1]]))


# Gradients, export, the rest of the contract


MANY = {"many": (3, 2, 150, 131, 3, 2)}  # whose plans are formed by nodes


@pytest.mark.parametrize(("temperature", "name", "masked"), with_every_shape((1e-3, 1, 1e4, None), MANY))
def test_gradients_are_within_the_honest_error(temperature: Any, name: str, masked: bool) -> None:
    """Of products and maps, of a huge cloud too, in bfloat16 and, at no temperature, of exact sorts."""
    shape = (SHAPES | MANY)[name]
    heads, dim, squared = shape[1], shape[4], shape[0] == 3
    q, k, v, keep, query_keep = problem(shape, masked, 1e3 if name == "tails" and masked else 1.0)
    if temperature is None and squared:
        q, k, v, keep, query_keep = tying(shape, masked, "crossed")
    generator = torch.Generator().manual_seed(9)
    directions, weight = (torch.randn(heads, 3, size, generator=generator) for size in (dim, 1))
    tau, grads = torch.tensor([0.3, 1.0][:heads]), torch.randn(*q.shape[:3], 200)

    def gradients(module: Any, dtype: torch.dtype, dense: bool) -> list[Tensor]:
        points = (q, k) if dense else (q, k, v)
        given = (*points, directions, tau, weight[..., 0].exp())
        leaves = [x.to(dtype).detach().requires_grad_() for x in given]
        *own, theta, of_tau, omega = leaves
        call = getattr(module, f"esp_{'hard' if temperature is None else 'soft'}{'_attention' * dense}")
        softly, ties = ((), ("shared",)) if temperature is None else ((temperature,), ())
        out = call(*own, keep, query_keep, theta, of_tau, *softly, squared, True, 1.5, "interpolated",
                   *ties, omega)  # fmt: skip
        grad = grads[..., : out.shape[3]].to(out.dtype)
        return list(torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True))

    for dense in (False, True):
        exact, wide = (gradients(module, torch.float64, dense) for module in (meaning, ops))
        for expected, found in zip(exact, wide, strict=True):
            assert error(found, expected) <= 1e-9 * (1 + float(expected.abs().max()))
        for dtype in (torch.float32, torch.bfloat16):
            plain, kernel = (gradients(module, dtype, dense) for module in (meaning, ops))
            for expected, theirs, found in zip(exact, plain, kernel, strict=True):
                budget = 2 * error(theirs, expected) + 8 * EPS * float(expected.abs().max()) + 1e-7
                assert error(found, expected) <= budget


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_gradients_are_finite_where_points_meet_and_tokens_are_padded(hard: bool) -> None:
    """Queries equal keys; NaN and inf in padded rows; examples without an active query or key."""
    _, k, v, keep, query_keep = problem((3, 2, 6, 6, 4, 4), True)
    q = k.nan_to_num(posinf=0.5).masked_fill(~query_keep[:, None, :, None], torch.nan)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, torch.ones(1), torch.randn(3, 4))]
    q, k, v, tau, directions = leaves
    softsort = () if hard else (0.1,)
    call = ops.esp_hard if hard else ops.esp_soft
    settings = (keep, query_keep, directions, tau, *softsort, False, False, 1.0)
    call(q, k, v, *settings).square().sum().backward()
    for leaf in leaves[: 4 if hard else 5]:
        assert leaf.grad is not None and bool(leaf.grad.isfinite().all())
    assert v.grad is not None and bool((v.grad[1] != 0).any()) and bool((v.grad[0] == 0).all())


def test_slices_of_no_weight_or_of_infinite_cost_add_nothing() -> None:
    """In float32 as well, whichever of them comes first and however far it is ahead."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 8, 2), torch.randn(1, 1, 8, 2), torch.randn(1, 1, 8, 3)
    for tau in (1.0, 20.0, 40.0):
        for weight in ([1.0, 0.0], [0.0, 1.0]):
            for points in ((q, k), (q.flip(-1), k.flip(-1))):
                settings = (None, None, None, torch.tensor([tau]), True, False, 1.0)
                named = {"slice_weight": torch.tensor(weight)}
                expected = meaning.esp_hard(*points, v, *settings, **named)
                assert expected.isfinite().all()
                torch.testing.assert_close(ops.esp_hard(*points, v, *settings, **named), expected)
    far = [x.clone() for x in (q, k)]
    far[0][..., 0, 1] = far[1][..., 3, 1] = 1e20
    for points in (far, [x.flip(-1) for x in far]):
        settings = (None, None, None, torch.ones(1), True, False, 1.0)
        expected = meaning.esp_hard(*points, v, *settings)
        torch.testing.assert_close(ops.esp_hard(*points, v, *settings), expected, equal_nan=True)
