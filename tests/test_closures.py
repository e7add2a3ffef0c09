"""benchmarks/closures.py: other ways to softmax(S + g) v compute it, the dual to all of its digits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


closures = load("closures")


def problem(dtype: torch.dtype, spread: float, dim: int = 16, width: int = 16) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(dim + width)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    q, k, v = normal(2, 3, 37, dim), normal(2, 3, 53, dim), normal(2, 3, 53, width)
    return q.to(dtype), k.to(dtype), v.to(dtype), spread * normal(2, 3, 53)


def exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) * scale + g.double()[:, :, None]
    return scores.softmax(-1) @ v.double()


@pytest.mark.parametrize("width", [16, 5, 40])
@pytest.mark.parametrize("way", ["bias", "folded"])
def test_the_same_in_float32(way: str, width: int) -> None:
    given = problem(torch.float32, 3.0, width=width)
    found = closures.WAYS[way](*given, 0.25)
    assert found.shape == (2, 3, 37, width) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact(*given, 0.25), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("spread", [0.1, 5.0, 300.0])
def test_a_folded_dual_keeps_its_digits_in_bfloat16(spread: float) -> None:
    """A dual rounded to bfloat16 would be off by spread / 256, and the weights by its exponential."""
    g = problem(torch.bfloat16, spread)[3]
    parts = closures._parts(g, torch.bfloat16)
    assert len(parts) == 3
    assert (sum(part.double() for part in parts) - g.double()).abs().max() <= 2**-23 * g.abs().max()


def test_folded_in_bfloat16_is_as_near_as_softmax_itself() -> None:
    q, k, v, g = problem(torch.bfloat16, 5.0)
    honest = exact(q, k, v, g, 0.25)
    own = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25)
    budget = (own.double() - exact(q, k, v, torch.zeros_like(g), 0.25)).abs().max()
    off = (closures.folded(q, k, v, g, 0.25).double() - honest).abs().max()
    rounded = (closures.bias(q, k, v, g, 0.25).double() - honest).abs().max()
    assert off <= 2 * budget + 2e-2
    assert off <= rounded  # a mask is of the queries' dtype, and rounds the dual


def test_the_benchmark_times_those_that_are_exact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    attention = load("attention")
    shape = attention.Shape(1, 2, 40, 16, 6)
    timed = attention.make_problem(shape, torch.float32, "cpu", 1.0, 0, True).to(torch.float32)

    def wrong(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
        return closures.bias(q, k, v, g, scale) * 1.01

    def refused(*_: Any) -> Tensor:
        raise RuntimeError("no kernel for this\nand more")

    ways = {"bias": closures.bias, "wrong": wrong, "refused": refused}
    monkeypatch.setattr(attention, "WAYS", ways)
    found = attention.other_closures(timed)
    assert [*found] == ["target, 1 c-transform, dual given: bias"]
    said = capsys.readouterr().err
    assert "wrong: not timed, off by" in said and "refused: not timed, no kernel for this\n" in said
