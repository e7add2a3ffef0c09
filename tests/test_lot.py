"""LOT operators: goldens, closed forms, hostile shapes, the CPU kernel within the honest error."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.kernels import native
from asapc.kernels.dispatch import explained
from asapc.models import ARCHITECTURES, LOTFormerText
from asapc.operators import lot as meaning
from asapc.operators import tokens

GOLDEN = Path(__file__).parent / "golden"
COUNTED = [1.0, 1.0, 0.0, 0.0]  # n_q Gamma1 diag(1 / sigma) Gamma2
ops = torch.ops.asapc


def test_goldens() -> None:
    tensors = load_file(GOLDEN / "lot.safetensors")
    for case in json.loads((GOLDEN / "lot.json").read_text()):
        own = {key: tensors[f"{case['name']}.{key}"] for key in ("q", "k", "v", "output")}
        pivots, mass = (tensors[f"{case['name']}.{key}"] for key in ("pivots", "pivot_mass"))
        multiplier, steps = own["q"].shape[-1] ** -0.5 / case["epsilon"], case["half_steps"]
        settings = (multiplier, multiplier, steps, True, steps, False, COUNTED)
        out = ops.lot(own["q"], own["k"], own["v"], None, None, None, pivots, mass, *settings)
        torch.testing.assert_close(out, own["output"], rtol=0, atol=2e-6)


# An independent reference, token by token, in float64 and the linear domain.


def plan(
    points: Tensor, active: list[int], pivots: Tensor, sigma: Tensor, multiplier: float, bias: Tensor,
    half_steps: int, tokens_first: bool,
) -> Tensor:  # fmt: skip
    """Gamma [R, N] of one head.  points: [N, D]; bias: [R, N]."""
    kernel = torch.zeros(len(pivots), len(points), dtype=torch.float64)
    for i in active:
        kernel[:, i] = torch.exp(multiplier * (pivots @ points[i]) + bias[:, i])
    a, b = torch.ones(len(points)).double(), torch.ones(len(pivots)).double()
    for step in range(half_steps):
        if (step % 2 == 0) == tokens_first:
            for i in active:
                a[i] = 1 / len(active) / float(kernel[:, i] @ b)
        else:
            b = sigma / (kernel @ a)
    return b[:, None] * kernel * a


def reference(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, query_keep: Tensor | None,
    key_bias: Tensor | None, pivots: Tensor, mass: Tensor, query_multiplier: float,
    key_multiplier: float, query_half_steps: int, queries_first: bool, key_half_steps: int,
    keys_first: bool, output_factor: Sequence[float],
) -> Tensor:  # fmt: skip
    q, k, v, pivots, mass = (t.double() for t in (q, k, v, pivots, mass))
    (batch, heads, queries, _), keys, count = q.shape, k.shape[2], pivots.shape[1]
    bias = torch.zeros(batch, heads, count, keys).double()
    if key_bias is not None:
        bias = bias + key_bias.double()
    out = torch.zeros(batch, heads, queries, v.shape[3]).double()
    for e in range(batch):
        rows = range(queries) if query_keep is None else query_keep[e].nonzero().flatten().tolist()
        columns = range(keys) if keep is None else keep[e].nonzero().flatten().tolist()
        if not len(rows) or not len(columns):
            continue
        coefficient, a, b, c = output_factor
        factor = coefficient * len(rows) ** a * len(columns) ** b * queries**c
        for h in range(heads):
            own = (pivots[h], mass[h])
            first = plan(
                q[e, h], list(rows), *own, query_multiplier, torch.zeros(count, queries),
                query_half_steps, queries_first,
            )  # fmt: skip
            second = plan(
                k[e, h], list(columns), *own, key_multiplier, bias[e, h], key_half_steps, keys_first
            )
            values = second[:, columns] @ v[e, h, columns]
            out[e, h, rows] = factor * first[:, rows].T @ (values / mass[h][:, None])
    return out


def problem(
    shape: tuple[int, ...], *, spread: float = 1.0, masked: bool = False, biased: bool = False
) -> list[Any]:
    """Arguments of lot up to pivot_mass, for (B, H, N, M, D, E, R).

    Padded rows hold NaN and inf. Masked, the second example has one active key, the third no key, the
    fourth no query; the fifth is padded at its end, as most data is.
    """
    b, h, n, m, d, e, r = shape
    g = torch.Generator().manual_seed(b + 10 * n + 100 * m)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=g)

    q, k, v = normal(b, h, n, d) * spread, normal(b, h, m, d) * spread, normal(b, h, m, e)
    keep = query_keep = None
    if masked:
        keep, query_keep = torch.rand(b, m, generator=g) > 0.4, torch.rand(b, n, generator=g) > 0.4
        keep[1:2] = torch.arange(m) == m - 1
        keep[2:3], query_keep[3:4] = False, False
        keep[4:5], query_keep[4:5] = torch.arange(m) <= m // 2, torch.arange(n) <= n // 2
        q = q.masked_fill(~query_keep[:, None, :, None], math.nan)
        k = k.masked_fill(~keep[:, None, :, None], math.inf)
        v = v.masked_fill(~keep[:, None, :, None], math.nan)
    bias = None
    if biased:
        bias = normal(1, h, r, m) if n % 2 else normal(b, 1, 1, m)
    return [q, k, v, keep, query_keep, bias, normal(h, r, d), torch.softmax(normal(h, r), -1)]


def double(tensors: Sequence[Any]) -> list[Any]:
    return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max())


SHAPES = {
    "tails": (5, 2, 17, 31, 8, 5, 4),
    "one token": (2, 1, 1, 1, 4, 3, 2),
    "one key": (3, 2, 5, 1, 4, 4, 3),
    "one query": (3, 1, 1, 9, 4, 4, 3),
    "one pivot": (2, 2, 6, 7, 4, 4, 1),
    "more pivots than tokens": (2, 2, 3, 4, 4, 4, 9),
}
STEPS = {
    "released": (5, True, 5, False),
    "even": (4, True, 6, False),
    "other sides": (3, False, 2, True),
    "one": (1, True, 1, False),
    "one, other sides": (1, False, 1, True),
    "none": (0, True, 0, False),
}


SAMPLED = [
    (shape, STEPS[[*STEPS][(i + 3 * masked + shift) % len(STEPS)]], bool(masked))
    for i, shape in enumerate(SHAPES.values()) for masked in (0, 1) for shift in (0, 2)
]  # fmt: skip


@pytest.mark.parametrize(("shape", "steps", "masked"), SAMPLED, ids=str)
def test_meaning_and_kernel_are_the_formula(
    shape: tuple[int, ...], steps: tuple[int, bool, int, bool], masked: bool
) -> None:
    arguments = problem(shape, masked=masked, biased=shape[3] % 2 == 1)
    settings = (0.5, 0.6, *steps, [1.3, 1.0, -0.5, 0.3])
    exact = reference(*arguments, *settings)
    scale = max(1.0, float(exact.abs().max()))
    assert error(meaning.lot(*double(arguments), *settings), exact) <= 1e-12 * scale
    assert error(ops.lot(*double(arguments), *settings), exact) <= 1e-12 * scale
    budget = 2 * error(meaning.lot(*arguments, *settings), exact) + 1e-6 * scale
    assert error(ops.lot(*arguments, *settings), exact) <= budget
    dense = ops.lot_attention(*double(arguments[:2]), *double(arguments[3:]), *settings)
    v = arguments[2].double()
    if masked:
        v = v.masked_fill(~arguments[3][:, None, :, None], 0.0)
    assert error(dense @ v, exact) <= 1e-12 * scale


SIZES = {
    "small": ((5, 4, 60, 50, 8, 8, 4), 2),
    "kept": ((5, 4, 1300, 1500, 4, 4, 32), 2),
    "streamed": ((5, 1, 5000, 4500, 4, 4, 32), 1),
    "one head": ((1, 1, 5000, 4500, 4, 4, 16), 2),
}
# Up to which span of a pivot's scores float32 inputs run in what.
DOMAINS = {40.0: "linear domain", 340.0: "linear domain in float64", math.inf: "log domain"}


def widest(scores: Tensor, keep: Tensor | None) -> float:
    """Of the rows of pivots, [B, H, R, N]: the widest span of active tokens."""
    there = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep[:, None, None]
    low, high = scores.masked_fill(~there, 1e9).amin(-1), scores.masked_fill(~there, -1e9).amax(-1)
    return float((high - low).max())


@pytest.mark.skipif(bool(native.missing()), reason="the reference runs")
@pytest.mark.parametrize(("size", "span", "masked"), [
    (size, span, bool((i + j) % 2))
    for i, size in enumerate(SIZES) for j, span in enumerate((30.0, 250.0, 2000.0))
])  # fmt: skip
def test_kernel_is_within_the_honest_error_in_every_domain(size: str, span: float, masked: bool) -> None:
    """And what `explained` says is what runs."""
    shape, threads = SIZES[size]
    arguments = problem(shape, masked=masked, biased=True)
    q, k, _, keep, query_keep, bias, pivots, _ = arguments
    pivots += 1.5  # scores larger than they span
    multipliers, spans = [], []
    for x, mask, added in ((q, query_keep, None), (k, keep, bias)):
        scores = partial(meaning.pivot_scores, x, mask, added, pivots, dtype=torch.float32)
        multipliers.append(span / widest(scores(multiplier=1.0), mask))
        spans.append(widest(scores(multiplier=multipliers[-1]), mask))
    settings = (*multipliers, 3, True, 3, False, COUNTED)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with explained() as choices:
            out = ops.lot(*arguments, *settings)
    finally:
        torch.set_num_threads(before)
    domain = next(name for most, name in DOMAINS.items() if max(spans) <= most)
    assert [choice.kernel.rpartition(", ")[2] for choice in choices] == [domain]
    exact = meaning.lot(*double(arguments), *settings)
    budget = 2 * error(meaning.lot(*arguments, *settings), exact) + 1e-6 * float(exact.abs().max())
    assert error(out, exact) <= budget
    if masked:
        assert bool(out.isfinite().all())


def test_a_pivot_without_mass_takes_no_part() -> None:
    arguments = double(problem((2, 2, 6, 7, 4, 3, 3)))
    z, sigma = arguments[6], arguments[7]
    more = [torch.cat([z, torch.randn(2, 1, 4)], 1), torch.cat([sigma, torch.zeros(2, 1)], 1)]
    for steps in STEPS.values():
        settings = (0.5, 0.5, *steps, COUNTED)
        own = ops.lot(*arguments, *settings)
        for operator in (ops.lot, meaning.lot):
            torch.testing.assert_close(operator(*arguments[:6], *more, *settings), own)


def test_tiny_masses_after_few_half_steps() -> None:
    """1 / sigma, and the scalings of tokens near a pivot of little mass, leave float32."""
    for steps in ((1, True, 1, True), (2, False, 2, False), (20, False, 2, False)):
        for spread in (1.0, 4.0):
            arguments = problem((2, 2, 6, 40, 4, 3, 4), masked=True)
            arguments[6] = arguments[6] * spread
            arguments[7] = torch.tensor([[1.0, 1e-20, 1e-37, 3e-39], [0.0, 1e-12, 1.0, 1e-30]])
            exact = meaning.lot(*double(arguments), 3.0, 3.0, *steps, COUNTED)
            budget = 2 * error(meaning.lot(*arguments, 3.0, 3.0, *steps, COUNTED), exact)
            own = ops.lot(*arguments, 3.0, 3.0, *steps, COUNTED)
            assert error(own, exact) <= budget + 1e-5 * float(exact.abs().max())


@pytest.mark.parametrize("spread", [1.0, 150.0])
@pytest.mark.parametrize(("shape", "steps", "masked"), SAMPLED, ids=str)
def test_gradients_are_within_the_honest_error(
    shape: tuple[int, ...], steps: tuple[int, bool, int, bool], masked: bool, spread: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the engine alone, unless scores span more than float64 holds."""
    arguments = problem(shape, masked=masked, biased=True, spread=spread if steps[0] else 1.0)
    if masked:
        arguments[7][0, 0] = 0.0
    settings = (0.5, 0.6, *steps, [1.3, 1.0, -0.5, 0.3], masked, arguments[7].exp())
    grad = torch.randn(shape[:3] + shape[5:6]).transpose(1, 2).contiguous().transpose(1, 2)

    def gradients(lot: Any, dtype: torch.dtype) -> list[Tensor]:
        given = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
                 for x in (*arguments, *settings)]  # fmt: skip
        leaves = [x.requires_grad_() for x in given if isinstance(x, Tensor) and x.dtype == dtype]
        return [x.double() for x in torch.autograd.grad(lot(*given), leaves, grad.to(dtype))]

    exact, rough = (gradients(meaning.lot, dtype) for dtype in (torch.float64, torch.float32))
    if native.missing() is None and 0 not in steps and spread == 1.0:
        monkeypatch.setattr(meaning, "pivot_plan", None)
    scale = max(float(x.abs().max()) for x in (*exact, grad)) * spread
    for dtype, slack in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        for own, wanted, honest in zip(gradients(ops.lot, dtype), exact, rough, strict=True):
            allowed = 2 * error(honest, wanted) * (dtype == torch.float32) + slack * scale
            assert error(own, wanted) <= allowed


# Summary tokens and the convolution on values.


@pytest.mark.parametrize("powers", [None, (1.5, 2.0)], ids=["softmax", "polarised"])
def test_summary_rows_gather_from_the_whole_sequence(powers: tuple[float, float] | None) -> None:
    q, k, v, keep, query_keep, *_ = double(problem((5, 2, 9, 9, 4, 3, 2), masked=True))
    out = tokens.summary_rows(q[:, :, :2], k, v, keep, query_keep[:, :2], 0.7, powers)
    expected = torch.zeros(5, 2, 2, 3).double()
    for e, h, i in torch.cartesian_prod(torch.arange(5), torch.arange(2), torch.arange(2)).tolist():
        columns = keep[e].nonzero().flatten()
        if not query_keep[e, i] or not len(columns):
            continue
        logits = []
        for j in columns:
            x, y = q[e, h, i] * 0.7, k[e, h, j]
            if powers is None:
                logits.append(float(x @ y))
                continue
            same = x.clamp(min=0) @ y.clamp(min=0) + (-x).clamp(min=0) @ (-y).clamp(min=0)
            opposite = x.clamp(min=0) @ (-y).clamp(min=0) + (-x).clamp(min=0) @ y.clamp(min=0)
            logits.append(float(same ** powers[0] + opposite ** powers[1]))
        expected[e, h, i] = torch.tensor(logits).double().softmax(0) @ v[e, h, columns]
    torch.testing.assert_close(out, expected)


def test_depthwise_values() -> None:
    """Against the sum over neighbours: padded tokens count as 0."""
    torch.manual_seed(0)
    v = torch.randn(2, 3, 12, 2).double()
    keep = torch.arange(12) < torch.tensor([[12], [8]])
    v[1, :, 8:] = math.nan
    weight = torch.randn(3, 2, 3).double()
    out = tokens.depthwise_values(v, weight, keep)
    clean = v.masked_fill(~keep[:, None, :, None], 0.0)
    for b, h, e, i in torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 2, 12))).tolist():
        total = torch.zeros(()).double()
        for right in range(3):
            if 0 <= i + right - 1 < 12 and keep[b, i]:
                total = total + weight[h, e, right] * clean[b, h, i + right - 1, e]
        assert abs(float(out[b, h, i, e] - total)) < 1e-12


# The built-in classifier.


def small_text(**settings: Any) -> LOTFormerText:
    torch.manual_seed(0)
    config = {
        "vocab_size": 20, "seq_len": 9, "d_model": 8, "n_layers": 2, "n_heads": 2, "d_ff": 16,
        "n_pivots": 3, "eps": 0.5,
    }  # fmt: skip
    return LOTFormerText(**{**config, **settings}).eval()


@pytest.mark.parametrize("n_iters", [1, 2, 5])
def test_the_layer_is_the_operator(n_iters: int) -> None:
    mha = small_text(n_iters=n_iters).double().layers[0].mha
    q, k, v, keep, *_ = double(problem((2, 2, 9, 9, 4, 4, 3), masked=True))
    q, k, v = (t.nan_to_num(1.0, 2.0) for t in (q, k, v))  # published code lets NaN through
    torch.nn.init.normal_(mha.mass_logits)
    sigma = torch.softmax(mha.mass_logits, -1)
    settings = (1.0, 1.0, n_iters, True, n_iters, False, COUNTED)  # scale / eps = 4^-1/2 / 0.5
    expected = ops.lot(q, k, v, keep, keep, None, mha.pivots, sigma, *settings)
    torch.testing.assert_close(mha.glued(q, k, v, ~keep), expected)


@pytest.mark.parametrize("cls", ["none", "softmax", "polarised"])
@pytest.mark.parametrize("kernel_size", [0, 3])
def test_padding_changes_nothing(cls: str, kernel_size: int) -> None:
    model = small_text(cls=cls, kernel_size=kernel_size)
    tokens = model.example_inputs(3)["inputs"]
    probabilities = model(tokens)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(3))
    for row, own in zip(tokens, probabilities, strict=True):
        torch.testing.assert_close(model(row[None, : int(row.ne(0).sum())])[0], own)


def test_a_text_of_padding_alone_trains() -> None:
    model = small_text(cls="softmax", kernel_size=3).train()
    model(torch.zeros(2, 9, dtype=torch.long)).log().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_built_in_architecture_and_its_errors() -> None:
    assert ARCHITECTURES["lotformer-text"] is LOTFormerText
    with pytest.raises(ValueError, match="n_heads must divide d_model"):
        small_text(n_heads=3)
    with pytest.raises(ValueError, match='cls must be "none"'):
        small_text(cls="mean")
