"""The twins that become ONNX functions, against the operators they stand for, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import torch
from torch import Tensor

from asapc.features.clouds import clouds_from
from asapc.features.gaussian import brenier_matrix, moments
from asapc.onnx import twins
from asapc.onnx.translate import translate
from asapc.operators import asap, banded, esp, lot, plan, sinkhorn

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
    return q, k, v, keep, bias


SHAPES = [(1, 1), (7, 7), (6, 11), (33, 32)]
KINDS = ["plain", "masked", "one", "none", "biased", "huge", "twins"]


def close(own: Tensor, meant: Tensor, tolerance: float = 1e-10) -> None:
    assert own.dtype == meant.dtype and own.shape == meant.shape
    scale = max(1.0, float(meant.abs().max())) if meant.numel() else 1.0
    assert float((own - meant).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("half_steps", "rows_first"), [(1, True), (2, False), (5, True), (20, False)])
def test_finite_loops(shape: tuple[int, int], kind: str, half_steps: int, rows_first: bool) -> None:
    q, k, v, keep, bias = tensors(*shape, kind)
    settings = (0.4, half_steps, rows_first, [0.5, 1.0, 0.0, 1.0])
    arguments = (q, k, v, keep, bias, *settings)
    close(twins.sinkhorn(*arguments), sinkhorn.sinkhorn(*arguments))
    close(
        twins.sinkhorn_attention(q, k, keep, bias, *settings),
        sinkhorn.sinkhorn_attention(q, k, keep, bias, *settings),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given", ["uniform", "masses", "massless", "absent"])
def test_plans_of_given_scores(shape: tuple[int, int], given: str) -> None:
    q, k, *_ = tensors(*shape, "huge")
    scores, (n, m) = q @ k.transpose(-1, -2), shape
    log_mu = log_nu = None
    if given in ("masses", "massless"):
        log_mu, log_nu = -torch.rand(BATCH, 1, n, dtype=torch.float64), torch.rand(m, dtype=torch.float64)
        if given == "massless" and min(n, m) > 1:
            log_mu[1, :, 0], log_nu[-1] = -torch.inf, -torch.inf
    if given == "absent":
        scores[0, :, -1], scores[1, ..., 0] = -torch.inf, -torch.inf
    for log, half_steps, rows_first in ((False, 20, True), (True, 5, False), (True, 1, True)):
        for rest in ({}, {"by_head": [1.0, 2.0, 0.5]}, {"damping": [0.7, 1.0]}):
            settings = (0.4, half_steps, rows_first, [0.5, 1.0, -0.5, 0.0], log)
            arguments = (scores, log_mu, log_nu, *settings)
            found, meant = (make.plan(*arguments, **rest) for make in (twins, plan))  # type: ignore[operator]
            close(*((x.clamp(min=-300) if log else x) for x in (found, meant)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "biased"])
@pytest.mark.parametrize("shape", SHAPES)
def test_banded_loops(shape: tuple[int, int], kind: str) -> None:
    """Windows shorter than padding, and an example without keys."""
    q, k, v, keep, _ = tensors(*shape, kind)
    for half_steps, rows_first, low, high in ((1, False, -2, 1), (6, True, -3, 0), (4, False, -50, 50)):
        settings = (keep, 0.4, half_steps, rows_first, [0.5, 1.0, 0.0, 1.0], low, high)
        v = torch.where(torch.isnan(v), 0.0, v) if kind == "none" else v
        close(twins.banded_sinkhorn(q, k, v, *settings), banded.banded_sinkhorn(q, k, v, *settings))
        close(
            twins.banded_sinkhorn_attention(q, k, *settings),
            banded.banded_sinkhorn_attention(q, k, *settings),
        )


def test_a_long_loop_in_float32_keeps_what_float32_keeps() -> None:
    """Scores up to several hundred: beyond the log-domain steps, products must neither overflow nor
    lose mass."""
    q, k, v, keep, bias = tensors(64, 64, "masked")
    q = q * 20
    settings = (1.0, 41, True, FACTOR)
    v = torch.where(torch.isnan(v), 0.0, v)
    exact = sinkhorn.sinkhorn(q, k, v, keep, bias, *settings)
    single = [q.float(), k.float(), v.float(), keep, bias]
    honest = float((sinkhorn.sinkhorn(*single, *settings) - exact).abs().max())
    own = float((twins.sinkhorn(*single, *settings) - exact).abs().max())
    assert own <= 4 * honest


@pytest.mark.parametrize(
    ("tokens", "margin", "half_steps"), [(16, 100, 40), (64, 200, 60), (256, 110, 20)]
)
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
@pytest.mark.parametrize("side", ["source", "target"])
def test_c_transforms_from_a_dual(kind: str, c_transforms: int, side: str) -> None:
    q, k, v, keep, bias = tensors(6, 11, kind)
    dual = torch.randn(BATCH, HEADS, 6 if side == "source" else 11, dtype=torch.float64)
    duals = (dual, None) if side == "source" else (None, dual)
    arguments = (keep, bias, *duals, 0.4, c_transforms, FACTOR)
    close(twins.asap(q, k, v, *arguments), asap.asap(q, k, v, *arguments))
    close(twins.asap_attention(q, k, *arguments), asap.asap_attention(q, k, *arguments))


FEATURES = {
    "coarse": "coarse:4", "farthest": "farthest:4", "gaussian": "gaussian", "sliced": "sliced:3",
    "norm": "norm", "raw": "raw", "lse": "lse", "active": "active",
    "several": "coarse:4 gaussian sliced:3 lse",
}  # fmt: skip
WIDTHS = {"gaussian": 3, "sliced": 3, "raw": DIM}


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


@pytest.mark.parametrize("kind", ["plain", "masked", "one", "none", "biased", "twins"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize(("side", "starts_on_x"), [("source", True), ("target", False)])
@pytest.mark.parametrize("shape", [(1, 1), (9, 9), (6, 11)])
def test_predicted_duals(
    features: str, kind: str, side: str, starts_on_x: bool, shape: tuple[int, int]
) -> None:
    q, k, _, keep, bias = tensors(*shape, kind)
    own, coefficients = parameters(features)
    half_steps = 17 if starts_on_x else 18
    arguments = (q, k, keep, bias, own, coefficients, features, side, 0.4, half_steps, starts_on_x)
    # Newton-Schulz stops at its own tolerance in float64; the rest is the same sums in another order.
    tolerance = 1e-5 if "gaussian" in features else 1e-8
    close(twins.dual(*arguments), asap.dual(*arguments), tolerance)


@pytest.mark.parametrize("kind", ["plain", "masked", "one", "none"])
@pytest.mark.parametrize("features", ["coarse:4", "farthest:4", "norm"])
@pytest.mark.parametrize("half_steps", [0, 1, 2, 19])
def test_row_masses(kind: str, features: str, half_steps: int) -> None:
    q, k, _, keep, bias = tensors(9, 9, kind)
    own, coefficients = parameters(features)
    arguments = (q, k, keep, bias, own, coefficients, features, 0.4, half_steps, False)
    for one, other in zip(
        twins.dual_and_row_mass(*arguments), asap.dual_and_row_mass(*arguments), strict=True
    ):
        close(one, other, 1e-8)


def test_token_bias() -> None:
    q, k, _, keep, bias = tensors(9, 9, "plain")
    arguments = (q, k, keep, bias, [], torch.randn(HEADS, 9), "token_bias", "source", 0.4, 5, True)
    close(twins.dual(*arguments), asap.dual(*arguments))


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


@pytest.mark.parametrize("masks", ["none", "keys", "both"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (6, 11)])
@pytest.mark.parametrize(("squared", "mean"), [(False, False), (True, True)])
@pytest.mark.parametrize("slices", ["axes", "frozen", "learnt"])
def test_sliced_plans(
    masks: str, shape: tuple[int, int], squared: bool, mean: bool, slices: str
) -> None:
    q, k, v, keep, _ = tensors(*shape, "plain" if masks == "none" else "masked")
    query_keep = None
    if masks == "both":
        query_keep = torch.arange(shape[0]) < torch.tensor([[shape[0]], [(shape[0] + 1) // 2]])
    theta = {"axes": None, "frozen": torch.randn(4, DIM), "learnt": torch.randn(HEADS, 4, DIM)}[slices]
    tau = torch.tensor([0.5])
    settings = (keep, query_keep, theta, tau)
    coupling = "monotone" if squared else "interpolated"
    pairs: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
        (twins.esp_soft, esp.esp_soft, (q, k, v, *settings, 0.3, squared, mean, 1.0, coupling)),
        (twins.esp_hard, esp.esp_hard, (q, k, v, *settings, squared, mean, 1.0, coupling)),
        (twins.esp_soft_attention, esp.esp_soft_attention,
         (q, k, *settings, 0.3, squared, mean, 1.0, coupling)),
        (twins.esp_hard_attention, esp.esp_hard_attention,
         (q, k, *settings, squared, mean, 1.0, coupling)),
    ]  # fmt: skip
    for own, meant, arguments in pairs:
        close(own(*arguments), meant(*arguments), 1e-8)


@pytest.mark.parametrize("ties", ["shared", "descending", "ascending"])
@pytest.mark.parametrize("coupling", ["interpolated", "monotone"])
@pytest.mark.parametrize("shape", [(7, 7), (6, 11), (11, 6)])
def test_sliced_plans_of_tied_tokens(shape: tuple[int, int], coupling: str, ties: str) -> None:
    """Whole numbers along the axes: some slices tie, in the others one coordinate makes them differ."""
    q, k, v, keep, _ = tensors(*shape, "masked")
    q[..., 1:], k[..., 1:] = q[..., 1:].round(), k[..., 1:].round()
    query_keep = torch.arange(shape[0]) < torch.tensor([[shape[0]], [(shape[0] + 1) // 2]])
    settings = (keep, query_keep, None, torch.tensor([0.5]), False, True, 1.5, coupling, ties)
    close(twins.esp_hard(q, k, v, *settings), esp.esp_hard(q, k, v, *settings), 1e-8)
    close(twins.esp_hard_attention(q, k, *settings), esp.esp_hard_attention(q, k, *settings), 1e-8)


@pytest.mark.parametrize("kind", ["plain", "masked", "one", "none"])
@pytest.mark.parametrize("massless", [False, True])
@pytest.mark.parametrize(("half_steps", "first"), [(1, True), (4, False), (5, True), (20, False)])
def test_pivots(kind: str, massless: bool, half_steps: int, first: bool) -> None:
    q, k, v, keep, _ = tensors(11, 11, kind)
    pivots = torch.randn(HEADS, 4, DIM, dtype=torch.float64)
    mass = torch.softmax(torch.randn(HEADS, 4, dtype=torch.float64), -1)
    if massless:
        mass[:, 0] = 0
        mass = mass / mass.sum(-1, keepdim=True)
    rest = (pivots, mass, 0.3, 0.4, half_steps, first, half_steps + 1, not first, [1.0, 1.0, 0.0, 0.0])
    arguments = (keep, keep, None, *rest)
    close(twins.lot(q, k, v, *arguments), lot.lot(q, k, v, *arguments))
    close(twins.lot_attention(q, k, *arguments), lot.lot_attention(q, k, *arguments))


@pytest.mark.parametrize("first", [True, False])
def test_pivots_of_almost_no_mass(first: bool) -> None:
    """In float32, where 1 / sigma is not."""
    q, k, v, *_ = tensors(11, 11, "plain")
    pivots = torch.randn(HEADS, 4, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mass = torch.tensor([0.5, 0.5, 1e-20, 1e-39], dtype=torch.float64).expand(HEADS, 4)
    rest = (0.3, 0.4, 5, first, 5, not first, [1.0, 1.0, 0.0, 0.0])
    exact = lot.lot(q, k, v, None, None, None, pivots, mass, *rest)
    single = (q.float(), k.float(), v.float(), None, None, None, pivots.float(), mass.float(), *rest)
    honest = float((lot.lot(*single) - exact).abs().max())
    assert float((twins.lot(*single) - exact).abs().max()) <= 4 * honest + 1e-6


class Distances(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.cdist(x, y), torch.cdist(x, y, p=1.0)


def test_distances_have_a_translation(tmp_path: Path) -> None:
    """For many points, too, of which some are the same."""
    onnxruntime = pytest.importorskip("onnxruntime")
    x = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.cat([x[:, :1], x[:, 5:30] + 1.0], 1)
    exported = torch.export.export(Distances(), (x, y)).run_decompositions()
    onnx_ir.save(translate(exported, 18), tmp_path / "distances.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "distances.onnx"))
    feeds = {given.name: value.numpy() for given, value in zip(session.get_inputs(), (x, y), strict=True)}
    for found, p in zip(session.run(None, feeds), (2.0, 1.0), strict=True):
        exact = torch.cdist(x.double(), y.double(), p=p)
        torch.testing.assert_close(torch.from_numpy(found).double(), exact, rtol=1e-5, atol=1e-6)
        assert float(found[0, 0, 0]) == 0.0
