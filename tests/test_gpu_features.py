"""Triton twins of the predicted duals against their meaning in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_env import DEVICE
from torch import Tensor

triton = pytest.importorskip("triton")

from asapc.features.clouds import Clouds  # noqa: E402
from asapc.features.coarse import farthest_points  # noqa: E402
from asapc.kernels.gpu import coarse, dual, sliced  # noqa: E402
from asapc.operators import asap as meaning  # noqa: E402
from asapc.operators.masks import hidden_queries  # noqa: E402

ALL = "coarse:5 gaussian sliced:3"


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def parameters_of(features: str, heads: int, dim: int, seed: int = 7) -> list[Tensor]:
    made = []
    for name, _, count in (own.partition(":") for own in features.split()):
        if name == "coarse":
            made.append(points(heads, int(count), dim, seed=seed))
        elif name == "sliced":
            made.append(torch.nn.functional.normalize(points(int(count), dim, seed=seed), dim=-1))
    return made


def width_of(features: str, dim: int) -> int:
    fixed = {"coarse": 1, "farthest": 1, "gaussian": 3, "raw": dim, "norm": 1, "lse": 1, "active": 1}
    named = (own.partition(":") for own in features.split())
    return sum(fixed[name] if name in fixed else int(count) for name, _, count in named)


def double(value: Any) -> Any:
    if isinstance(value, list):
        return [double(own) for own in value]
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_honest(
    q: Tensor, k: Tensor, features: str, keep: Tensor | None = None, bias: Tensor | None = None,
    parameters: list[Tensor] | None = None, score_multiplier: float = 0.4, half_steps: int = 5,
    starts_on_x: bool = True, sides: tuple[str, ...] = ("source", "target"), per_head: bool = True,
) -> None:  # fmt: skip
    """Either side's dual and the row masses: at most twice as wrong as the meaning in float32."""
    heads, dim = q.shape[1], q.shape[3]
    if parameters is None:
        parameters = parameters_of(features, heads, dim)
    weights = points(heads if per_head else 1, width_of(features, dim), seed=3)
    assert dual.supported(q, k, features) is None
    head = (q, k, keep, bias, parameters, weights, features)
    for side in sides:
        if side == "target":
            name, tail = "dual_and_row_mass", (score_multiplier, half_steps, starts_on_x)
        else:
            name, tail = "dual", (side, score_multiplier, half_steps, starts_on_x)
        reference = getattr(meaning, name)
        exact = reference(*map(double, head), *tail)
        honest = reference(*head, *tail)
        own = getattr(dual, name)(*head, *tail)
        if side == "source":
            exact, honest, own = (exact,), (honest,), (own,)
        for part, e, h, o in zip((side, "mass"), exact, honest, own, strict=False):
            assert o.shape == e.shape and o.dtype == torch.float32
            if not e.numel():
                continue
            assert bool(o.isfinite().all())
            budget = 2 * error(h, e) + 1e-6 * max(1.0, float(e.abs().max()))
            assert error(o, e) <= budget, (part, error(o, e), budget)


def error(own: Tensor, exact: Tensor) -> float:
    return float((own - exact).abs().max())


@pytest.mark.parametrize(("half_steps", "starts_on_x"), [(0, True), (1, False), (2, True)])
def test_coarse_after_any_number_of_half_steps(half_steps: int, starts_on_x: bool) -> None:
    q, k = points(1, 2, 19, 5), points(1, 2, 13, 5, seed=1)
    arguments = {"half_steps": half_steps, "starts_on_x": starts_on_x, "sides": ("target",)}
    assert_honest(q, k, "coarse:4", **arguments)


@pytest.mark.parametrize(("half_steps", "masked", "parts"), [(3, False, 1), (4, True, 2), (1, True, 9)])
def test_coarse_of_several_blocks(
    half_steps: int, masked: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head in as many parts."""
    monkeypatch.setattr(coarse, "ALONE", 0)
    monkeypatch.setattr(coarse, "TILE", 256)  # 16 rows a block
    monkeypatch.setattr(coarse, "PROGRAMS", 2 * parts)  # of two heads
    q, k = points(2, 1, 35, 48), points(2, 1, 39, 48, seed=1)
    keep = torch.arange(39, device=DEVICE) < torch.tensor([[30], [39]], device=DEVICE)
    mask = keep if masked else None
    assert_honest(q, k, "coarse:20", mask, half_steps=half_steps, starts_on_x=half_steps != 4)


@pytest.mark.parametrize("features", ["coarse:5", "farthest:5", "gaussian", "sliced:3"])
def test_masked_keys_hold_nan(features: str) -> None:
    """One example open, one with gaps, one with a single key, one with none: self-attention."""
    q, k = points(4, 1, 9, 5), points(4, 1, 9, 5, seed=1)
    keep = torch.tensor([[1] * 9, [1, 0, 1, 1, 0, 1, 1, 0, 0], [0] * 8 + [1], [0] * 9], device=DEVICE) > 0
    k[(~keep)[:, None].expand(4, 1, 9)] = math.nan
    assert_honest(q, k, features, keep)  # the errors compared would be nan if it leaked
    shown = keep.flip(0)  # and of queries others, of one example all
    assert_honest(q, k, features, keep, hidden_queries(shown))


@pytest.mark.parametrize("lengths", [(1, 6), (17, 18)], ids=str)
def test_lengths(lengths: tuple[int, int]) -> None:
    q, k = points(1, 1, lengths[0], 4), points(1, 1, lengths[1], 4, seed=1)
    assert_honest(q, k, f"{ALL} farthest:5")


@pytest.mark.parametrize("count", [1, 7])
def test_farthest_points(count: int) -> None:
    """In blocks of 16 points at D = 300; an example with gaps and equal points, one with no point."""
    y = points(3, 2, 37, 300)
    y[1, :, 5:20] = y[1, :, 4:5]
    keep = torch.rand(3, 37, generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.7
    keep[2] = False
    for mask in (None, keep):
        clouds = Clouds(y, y, y_keep=mask)
        assert torch.equal(coarse.farthest_points(clouds, count), farthest_points(clouds, count))


def test_duplicated_tokens_and_pivots() -> None:
    """Pivots 0 and 2 are one, and so are 1, 3 and 4: they share their points."""
    q = points(1, 2, 12, 5)[:, :, [0, 0, 1, 2, 2, 2, 3, 4, 5]]
    k = points(1, 2, 6, 5, seed=1)[:, :, [0] * 7]
    pivots = points(2, 2, 5, seed=2)[:, [0, 1, 0, 1, 1]]
    theta = torch.nn.functional.normalize(points(3, 5, seed=4), dim=-1)
    assert_honest(q, k, ALL, parameters=[pivots, theta])


def test_an_empty_cluster() -> None:
    pivots = torch.cat([points(2, 3, 5), torch.full((2, 2, 5), 1e3, device=DEVICE)], 1)
    q, k = points(1, 2, 11, 5, seed=1), points(1, 2, 14, 5, seed=2)
    q, k = q - q.mean(-1, keepdim=True), k - k.mean(-1, keepdim=True)  # nothing points to (1 .. 1)
    assert_honest(q, k, "coarse:5", parameters=[pivots], half_steps=6, starts_on_x=False)


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4)], ids=str)
def test_empty_batch(shape: tuple[int, ...]) -> None:
    assert_honest(points(*shape), points(*shape), ALL)


def test_more_pivots_than_points_repeat_points() -> None:
    y = points(2, 2, 5, 4)
    found = coarse.farthest_points(Clouds(y, y), 9)
    assert torch.equal(found[:, :, :5], farthest_points(Clouds(y, y), 5))
    assert bool((found[:, :, :, None] == y[:, :, None]).all(-1).any(-1).all())


@pytest.mark.parametrize("features", ["coarse:5", "gaussian", "sliced:2"])
def test_huge_scores(features: str) -> None:
    q, k = points(1, 2, 17, 5) * 30, points(1, 2, 12, 5, seed=1) * 30
    assert_honest(q, k, features, score_multiplier=1.0, half_steps=9)


def test_half_precision_is_widened() -> None:
    q, k = points(1, 1, 9, 5).bfloat16(), points(1, 1, 9, 5, seed=1).bfloat16()
    keep = torch.arange(9, device=DEVICE)[None] < 7
    assert_honest(q, k, ALL, keep, score_multiplier=-0.4)
    tail = (keep, None, [points(1, 3, 5)], points(1, 1), "coarse:3", "target", 0.4, 4, False)
    for dtype in (torch.bfloat16, torch.float16):
        own = dual.dual(q.to(dtype), k.to(dtype), *tail)
        assert torch.equal(own, dual.dual(q.to(dtype).float(), k.to(dtype).float(), *tail))


def test_families_without_a_kernel() -> None:
    q, k = points(2, 2, 9, 5), points(2, 2, 9, 5, seed=1)
    keep = torch.arange(9, device=DEVICE) < torch.tensor([[9], [4]], device=DEVICE)
    features = "raw norm lse coarse:3 active coarse:2"
    bias = points(2, 1, 9, 9, seed=5)
    assert_honest(q, k, features, keep, bias)
    assert_honest(q, k, "norm lse", keep)


def test_beyond_the_tiles_the_meaning_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_honest(points(1, 2, 6, 65), points(1, 2, 5, 65, seed=1), "gaussian")
    monkeypatch.setattr(sliced, "MAX_POINTS", 8)
    assert_honest(points(2, 2, 9, 5), points(2, 2, 5, 5, seed=1), "sliced:3")


def test_unsupported_inputs_say_why() -> None:
    q = points(1, 1, 4, 8)
    assert dual.supported(q, q, "coarse:128 gaussian sliced:40:axis norm") is None
    for given, features, word in (
        (q.double(), "norm", "float64"),
        (q[0], "norm", "axes"),
        (q[:, :, :0], "norm", "token"),
        (points(1, 1, 2, 257), "norm", "257"),
        (q, "norm coarse:129", "coarse:129"),
    ):
        reason = dual.supported(given, given, features)
        assert reason is not None and word in reason
