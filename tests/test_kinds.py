"""A model with a Sinkhorn, an ESP and a LOT layer, on the command line the whole way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file
from steps import run

import asapc
from asapc.errors import EXIT_BAD_INPUT
from asapc.report import report_schema

CODE = f'''
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import attention_zoo as zoo
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(4, 16)
        self.scaled, self.sliced, self.glued = zoo.Alternating(2), zoo.SlicedSoft(), zoo.GluedMasked()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x, keep):
        x = self.start(x)
        x = self.norm(x + self.scaled(x, keep))
        x = self.norm(x + self.sliced(x))
        x = self.norm(x + self.glued(x, keep))
        return self.head(x.mean(1))

def build():
    torch.manual_seed(0)
    return Mixed()
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "mixed.py").write_text(CODE)
    save_file(built(folder).state_dict(), folder / "mixed.safetensors")
    random = np.random.default_rng(0)
    keep = np.arange(10) < random.integers(4, 11, (200, 1))
    np.savez(folder / "data.npz", x=random.standard_normal((200, 10, 4)).astype("float32"), keep=keep)
    (folder / "recipe.yaml").write_text(
        "budget: {prediction_agreement: 0}\n"
        "sites: {scaled: {operator: asap, features: [norm]}, glued: {operator: lossless}}\n"
    )
    model = (folder / "mixed.py:build", "--weights", folder / "mixed.safetensors")
    data = ("--data", folder / "data.npz")
    recipe = ("--recipe", folder / "recipe.yaml")
    assert run("calibrate", *model, *data, "-o", folder / "calib", *recipe) == 0
    assert run("compile", *model, "--calibration", folder / "calib", "-o", folder / "out") == 0
    return folder


def built(folder: Path) -> torch.nn.Module:
    space: dict[str, Any] = {}
    exec(compile(CODE, "mixed.py", "exec"), space)
    model: torch.nn.Module = space["build"]()
    return model.eval()


def test_every_kind_becomes_its_own_operator(work: Path) -> None:
    manifest = json.loads((work / "out" / "manifest.json").read_text())
    kinds = {s["name"]: (s["convention"]["operator"], s["operator"]) for s in manifest["sites"]}
    assert kinds == {
        "scaled": ("sinkhorn", "asap"), "sliced": ("esp_soft", "esp_hard"), "glued": ("lot", "lot"),
    }  # fmt: skip
    assert not manifest["refused"] and manifest["soft_to_hard"]["switched"]


def test_the_compiled_model_runs_at_other_sizes(work: Path) -> None:
    model = asapc.load(work / "out")
    x, keep = torch.randn(5, 17, 4), torch.arange(17) < torch.tensor([[17], [9], [4], [1], [12]])
    with torch.no_grad():
        out, teacher = model(x, keep), built(work)(x, keep)
    assert out.shape == teacher.shape and bool(out.isfinite().all())
    # A layer is approximated and another replaced: near, and not the same.
    assert 1e-6 < float((out - teacher).abs().max()) < 0.5


def test_report_and_bench_cover_every_kind(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", work / "out", "--data", work / "data.npz", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    Draft202012Validator(report_schema()).validate(report)
    sites = {s["name"]: s for s in report["sites"]}
    assert sites["glued"]["metrics"]["attention_rel_l2"] < 1e-6
    assert sites["sliced"]["metrics"]["row_err"] < 1e-6 < sites["sliced"]["metrics"]["attention_rel_l2"]
    assert "contraction_bound" in sites["scaled"]["metrics"]
    assert "contraction_bound" not in sites["glued"]["metrics"]
    assert report["soft_to_hard"]
    assert run(
        "bench", work / "out", "--data", work / "data.npz", "--explain", "--json", "--no-torch-compile"
    ) == 0  # fmt: skip
    bench = json.loads(capsys.readouterr().out)
    kernels = {s["name"]: [k["operator"] for k in s["kernels"]] for s in bench["sites"]}
    assert kernels["sliced"] == ["esp_hard"] and kernels["glued"] == ["lot"]


def test_an_operator_of_another_kind_is_refused(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "wrong.yaml").write_text("sites: {glued: {operator: asap}, scaled: {operator: lossless}}\n")
    model = (work / "mixed.py:build", "--weights", work / "mixed.safetensors")
    code = run(
        "compile", *model, "--calibration", work / "calib", "-o", work / "other", "--recipe",
        work / "wrong.yaml",
    )  # fmt: skip
    assert code == EXIT_BAD_INPUT
    assert "a site of the kind lot can become lot" in " ".join(capsys.readouterr().err.split())
