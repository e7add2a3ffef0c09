"""The twins that become ONNX functions, against the operators they stand for, in PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import onnx_ir
import pytest
import torch
from attention_zoo import module
from torch import Tensor

from asapc.features.clouds import clouds_from
from asapc.features.gaussian import brenier_matrix, moments
from asapc.onnx import twins
from asapc.onnx.translate import translate
from asapc.operators import asap, esp, hybrid, plan, sinkhorn
from asapc.operators.masks import hidden_queries

BATCH, HEADS, DIM = 2, 3, 8
FACTOR = [1.0, 0.0, 1.0, 0.0]
Case = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def tensors(queries: int, keys: int, kind: str, dtype: torch.dtype = torch.float64) -> Case:
    """q, k, v, keep and bias."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k = normal(BATCH, HEADS, queries, DIM), normal(BATCH, HEADS, keys, DIM)
    v = normal(BATCH, HEADS, keys, 5)
    keep = bias = None
    if kind == "twins":
        k = k[:, :, :1].expand_as(k).contiguous()
    if kind == "huge":
        q, k = q * 8, k * 8
    if kind == "biased":
        bias = normal(1, HEADS, queries, keys)
    if kind in ("masked", "one", "none"):
        active = {"masked": (keys + 1) // 2, "one": 1, "none": 0}[kind]
        keep = torch.arange(keys) < torch.tensor([[keys], [active]])
        v = torch.where(keep[:, None, :, None] | (active == 0), v, torch.nan)
    if kind == "hidden":  # queries as well as keys, the former of one example all
        keep = torch.arange(keys) < torch.tensor([[(keys + 1) // 2], [keys]])
        bias = hidden_queries(torch.arange(queries) < torch.tensor([[queries // 3 + 1], [0]])).to(dtype)
    return q, k, v, keep, bias


KINDS = ["plain", "masked", "one", "none", "biased", "huge", "twins", "hidden"]
STEPS = [(1, True), (2, False), (5, True), (20, False)]


def close(own: Tensor, meant: Tensor, tolerance: float = 1e-10) -> None:
    assert own.dtype == meant.dtype and own.shape == meant.shape
    scale = max(1.0, float(meant.abs().max())) if meant.numel() else 1.0
    assert float((own - meant).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (6, 11), (33, 32)])
def test_finite_loops(shape: tuple[int, int], kind: str) -> None:
    q, k, v, keep, bias = tensors(*shape, kind)
    for half_steps, rows_first in STEPS:
        settings = (0.4, half_steps, rows_first, [0.5, 1.0, 0.0, 1.0])
        arguments = (q, k, v, keep, bias, *settings)
        close(twins.sinkhorn(*arguments), sinkhorn.sinkhorn(*arguments))
        close(
            twins.sinkhorn_attention(q, k, keep, bias, *settings),
            sinkhorn.sinkhorn_attention(q, k, keep, bias, *settings),
        )


@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (6, 11)])
def test_plans_of_given_scores(shape: tuple[int, int]) -> None:
    q, k, *_ = tensors(*shape, "huge")
    scores = q @ k.transpose(-1, -2)
    for absent in (False, True):
        if absent:
            scores[0, :, -1], scores[1, ..., 0] = -torch.inf, -torch.inf
        for (half_steps, rows_first), by_head in itertools.product(STEPS, (None, [1.0, 2.0, 0.5])):
            settings = (0.4, half_steps, rows_first, [0.5, 1.0, -0.5, 0.0], False, by_head)
            close(twins.plan(scores, None, None, *settings), plan.plan(scores, None, None, *settings))
            given = (scores.clamp(max=100).exp(), None, None, *settings)
            close(twins.plan(*given, is_kernel=True), plan.plan(*given, is_kernel=True))


@pytest.mark.parametrize("kind", ["plain", "masked", "one", "none", "twins"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (6, 11)])
def test_exact_sorting(shape: tuple[int, int], kind: str) -> None:
    q, k, v, keep, _ = tensors(*shape, kind)
    own = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    theta, omega = torch.randn(4, DIM, dtype=torch.float64), torch.rand(HEADS, 4, dtype=torch.float64)
    couplings, ties = ("interpolated", "monotone"), ("shared", "descending", "ascending")
    for slices, coupling, tie in itertools.product((theta, None), couplings, ties):
        weight = None if slices is None else omega
        arguments = (keep, None, slices, own, False, True, 0.5, coupling, tie, weight, 1, 0)
        for points in ((q, k), (q.round(), k.round())):
            close(twins.esp_hard(*points, v, *arguments), esp.esp_hard(*points, v, *arguments))


@pytest.mark.parametrize("summary", [0, 2])
def test_loops_beside_summary_tokens(summary: int) -> None:
    q, k, v, keep, bias = tensors(9, 9, "masked")
    v = torch.where(torch.isnan(v), 0.0, v)
    convolution = torch.randn(HEADS, 5, 3, dtype=torch.float64)
    arguments = (keep, bias, summary, 0.5, convolution, torch.rand(HEADS), 0.4, 5, True, FACTOR)
    for name, values in (("hybrid_fitted_sinkhorn", (v,)), ("hybrid_fitted_sinkhorn_attention", ())):
        close(getattr(twins, name)(q, k, *values, *arguments),
              getattr(hybrid, name)(q, k, *values, *arguments))  # fmt: skip


@pytest.mark.parametrize(("tokens", "margin", "half_steps"), [(16, 100, 40), (64, 200, 60)])
@pytest.mark.parametrize("rows_first", [True, False])
def test_an_attention_sink(tokens: int, margin: float, half_steps: int, rows_first: bool) -> None:
    """All rows but one prefer one key: what two half-steps leave below float32 becomes the plan."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(1, 1, tokens, tokens, generator=generator, dtype=torch.float64)
    bias[..., :-1, 1:] -= margin
    bias[..., -1, 0] -= margin
    nothing = torch.zeros(1, 1, tokens, 4, dtype=torch.float64)
    v = torch.randn(1, 1, tokens, 4, generator=generator, dtype=torch.float64)
    settings = (1.0, half_steps, rows_first, FACTOR)
    exact = sinkhorn.sinkhorn(nothing, nothing, v, None, bias, *settings)
    single = (nothing.float(), nothing.float(), v.float(), None, bias.float(), *settings)
    honest = float((sinkhorn.sinkhorn(*single) - exact).abs().max())
    assert float((twins.sinkhorn(*single) - exact).abs().max()) <= 4 * honest + 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("c_transforms", [1, 2, 3])
def test_c_transforms_from_a_dual(kind: str, c_transforms: int) -> None:
    q, k, v, keep, bias = tensors(6, 11, kind)
    source, target = (torch.randn(BATCH, HEADS, count, dtype=torch.float64) for count in (6, 11))
    for duals in ((source, None), (None, target)):
        arguments = (keep, bias, *duals, 0.4, c_transforms, FACTOR)
        close(twins.asap(q, k, v, *arguments), asap.asap(q, k, v, *arguments))
        close(twins.asap_attention(q, k, *arguments), asap.asap_attention(q, k, *arguments))


FEATURES = ["coarse:4", "farthest:4", "gaussian", "lse", "coarse:4 gaussian sliced:3 lse"]
WIDTHS = {"gaussian": 3, "sliced": 3}


def parameters(features: str) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    own, width = [], 0
    for text in features.split():
        family = text.split(":")[0]
        width += WIDTHS.get(family, 1)
        if family == "coarse":
            own.append(torch.randn(HEADS, 4, DIM, generator=generator))
        elif ":" in text and family != "farthest":
            own.append(torch.randn(3, DIM, generator=generator))
    return own, torch.randn(HEADS, width, generator=generator)


@pytest.mark.parametrize("kind", ["plain", "masked", "one", "none", "biased", "twins", "hidden"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("side", "starts_on_x"), [("source", True), ("target", False)])
def test_predicted_duals(features: str, kind: str, side: str, starts_on_x: bool) -> None:
    own, coefficients = parameters(features)
    half_steps = 17 if starts_on_x else 18
    settings = (own, coefficients, features, side, 0.4, half_steps, starts_on_x)
    # Newton-Schulz stops at its own tolerance in float64; the rest is the same sums in another order.
    tolerance = 1e-5 if "gaussian" in features else 1e-8
    for shape in ((1, 1), (9, 9), (6, 11)):
        q, k, _, keep, bias = tensors(*shape, kind)
        close(twins.dual(q, k, keep, bias, *settings), asap.dual(q, k, keep, bias, *settings), tolerance)


@pytest.mark.parametrize("kind", ["plain", "masked", "one", "none", "hidden"])
@pytest.mark.parametrize("features", ["coarse:4", "norm"])
@pytest.mark.parametrize("half_steps", [0, 1, 2, 19])
def test_row_masses(kind: str, features: str, half_steps: int) -> None:
    q, k, _, keep, bias = tensors(9, 9, kind)
    own, coefficients = parameters(features)
    arguments = (q, k, keep, bias, own, coefficients, features, 0.4, half_steps, False)
    for one, other in zip(
        twins.dual_and_row_mass(*arguments), asap.dual_and_row_mass(*arguments), strict=True
    ):
        close(one, other, 1e-8)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gaussian_matrix_by_products(scale: float, dtype: torch.dtype) -> None:
    """Also with a covariance of rank 1, whose root is the hardest."""
    for kind in ("plain", "twins", "one"):
        q, k, _, keep, bias = tensors(33, 32, kind)
        clouds = clouds_from(q * scale, k * scale, keep, bias, 0.4, "source")
        spreads = [moments(clouds.x, clouds.x_keep)[1], moments(clouds.y, clouds.y_keep)[1]]
        meant = brenier_matrix(*spreads)
        own = twins.brenier_matrix(*(spread.to(dtype) for spread in spreads))
        scale_of = max(1.0, float(meant.abs().max()))
        assert float((own - meant).abs().max()) <= (2e-3 if dtype == torch.float32 else 2e-4) * scale_of


@pytest.mark.parametrize("mask, call", [
    (-2.0, lambda mask: twins.kept_keys(mask, -1e4)), (0.5, twins.is_one),
    (0.0, lambda mask: twins.some_keys(mask > 0)), (1e5, lambda mask: twins.rows_kept(mask, True)),
    (-1e6, lambda mask: twins.keys_of_empty(
        mask.diag()[:, None] == 0, mask.diag()[:, None], *[torch.ones(3, 1, 1, 1)] * 2, 0.5, False
    )),
])  # fmt: skip
def test_a_mask_of_which_nothing_is_known_is_an_error(
    mask: float, call: Callable[[Tensor], Tensor]
) -> None:
    known = torch.eye(3)
    exported = torch.export.export(module(lambda self, mask: call(mask)), (known,)).module()
    assert exported(known - known if mask < 0 else known).shape[0] == 3
    with pytest.raises(IndexError):
        exported(torch.where(known > 0, mask, 0.0))


def test_distances_have_a_translation(tmp_path: Path) -> None:
    """For many points, too, of which some are the same."""
    onnxruntime = pytest.importorskip("onnxruntime")
    x = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.cat([x[:, :1], x[:, 5:30] + 1.0], 1)
    distances = module(lambda self, x, y: (torch.cdist(x, y), torch.cdist(x, y, p=1.0)))
    exported = torch.export.export(distances, (x, y)).run_decompositions()
    onnx_ir.save(translate(exported, 18), tmp_path / "distances.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "distances.onnx"))
    feeds = {given.name: value.numpy() for given, value in zip(session.get_inputs(), (x, y), strict=True)}
    for found, p in zip(session.run(None, feeds), (2.0, 1.0), strict=True):
        exact = torch.cdist(x.double(), y.double(), p=p)
        torch.testing.assert_close(torch.from_numpy(found).double(), exact, rtol=1e-5, atol=1e-6)
        assert float(found[0, 0, 0]) == 0.0
