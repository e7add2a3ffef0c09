"""`asapc.tail_gradients` and `asapc refresh --tail`: gradients through the end of the loops."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import compiled, run
from test_refresh import ATTENTION
from torch import Tensor, nn

import asapc
from asapc.errors import InputError
from asapc.kernels.library.gradients import depths
from asapc.training.settings import checked_tail

NET = """


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = Attention(3, 8), Attention(3, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = x + self.first(x)[0]
        return 5 * self.head(self.norm(x + self.second(x)[0]).mean(1))
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tails")
    x = np.random.default_rng(0).standard_normal((96, 6, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, labels=(x[:, :, 0].mean(1) > 0).astype(int))
    (folder / "net.py").write_text(ATTENTION + NET)
    amortised = {"operator": "asap", "side": "target", "c_transforms": 1, "features": ["norm"]}
    for name, recipe in {"exact": {"operator": "lossless"}, "amortised": amortised}.items():
        recipe |= {"batch_size": 16, "max_examples": 32}
        compiled(folder, f"{folder / 'net.py'}:Net", folder / "data.npz", recipe, name=name)
    return folder


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    return leaf.grad


def test_a_loaded_model_takes_a_tail_and_gives_it_back(work: Path) -> None:
    model = asapc.load(work / "exact")
    x = torch.from_numpy(np.load(work / "data.npz")["x"][:4])
    outputs, full = model(x), gradient(model, x)
    with depths() as passed:
        assert asapc.tail_gradients(model, 2) is model
        short = gradient(model, x)
    assert [set(depth.flatten().tolist()) for depth in passed] == [{2}, {2}]
    torch.testing.assert_close(model(x), outputs, rtol=0, atol=0)
    error = float((short - full).norm() / full.norm())
    assert 1e-6 < error < 0.2
    with depths() as passed:
        certified = gradient(asapc.tail_gradients(model, "certified", tolerance=1e-4), x)
    assert float((certified - full).norm() / full.norm()) < 1e-3
    assert all(2 <= int(depth.min()) <= int(depth.max()) <= 8 for depth in passed)
    asapc.tail_gradients(model)
    torch.testing.assert_close(gradient(model, x), full, rtol=0, atol=0)


def test_a_tail_under_torch_compile(work: Path) -> None:
    torch._dynamo.reset()  # what another test could not compile is left out from then on
    model = asapc.tail_gradients(asapc.load(work / "exact"), 3)
    x = torch.from_numpy(np.load(work / "data.npz")["x"][:4])
    traced = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradient(traced, x), gradient(model, x), rtol=1e-5, atol=1e-6)


def test_what_is_no_tail(work: Path) -> None:
    model = asapc.load(work / "exact")
    for tail in (-1, 1.5, True, "all"):
        with pytest.raises(InputError, match="a tail is a number of half-steps or 'certified'"):
            asapc.tail_gradients(model, tail)  # type: ignore[arg-type]
    for tolerance in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="must be positive"):
            asapc.tail_gradients(model, "certified", tolerance)
    with pytest.raises(InputError, match="a model with Sinkhorn layers is needed"):
        asapc.tail_gradients(asapc.load(work / "amortised"), 2)
    for text in ("-1", "1.5", "all", "", "9" * 12):
        with pytest.raises(InputError, match="a tail is a number"):
            checked_tail(text, 1e-3)


def refreshed(work: Path, out: Path, *arguments: str) -> dict[str, Any]:
    shutil.copytree(work / "exact", out)
    assert run("refresh", out, "--data", work / "data.npz", "--labels", "--quiet", "--epochs", 2,
               "--learning-rate", "1e-2", *arguments) == 0  # fmt: skip
    return json.loads((out / "manifest.json").read_text())["refresh"]


def test_refresh_trains_through_tails(work: Path, tmp_path: Path) -> None:
    full = refreshed(work, tmp_path / "full")
    assert "tail" not in full
    short = refreshed(work, tmp_path / "short", "--tail", "1")
    assert short["tail"] == {
        "half_steps": 1, "tolerance": None, "passed": {"min": 1, "median": 1, "max": 1}
    }  # fmt: skip
    own = refreshed(work, tmp_path / "certified", "--tail", "certified", "--tolerance", "1e-2")
    assert own["tail"]["half_steps"] == "certified" and own["tail"]["tolerance"] == 1e-2
    assert 1 <= own["tail"]["passed"]["min"] <= own["tail"]["passed"]["max"] <= 8
    assert own["after"]["loss"] == pytest.approx(full["after"]["loss"], rel=1e-2)
    for name in ("short", "certified"):  # what is written has no tail of its own
        assert (tmp_path / name / "graph.pt2").read_bytes() == (work / "exact/graph.pt2").read_bytes()
