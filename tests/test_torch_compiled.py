"""Models under torch.compile as a baseline: compiled once and held against the model, or why not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asapc.inputs.data import Batch
from asapc.measure import torch_compiled as module
from asapc.measure.torch_compiled import CACHE, torch_compiled
from asapc.program.runner import Runner
from asapc.report.brief import bench_brief
from asapc.report.site_metrics import time_model


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1) * 2


BATCH = Batch((torch.randn(3, 5),), {}, None, [0, 1, 2])


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's trace without a C++ compiler's minute: what is tested here is what becomes of it."""
    compile = torch.compile
    monkeypatch.setattr(module.torch, "compile", lambda f, **k: compile(f, backend="eager", **k))


def test_it_computes_the_same_and_leaves_no_cache() -> None:
    before = os.environ.get(CACHE)
    found = torch_compiled(Runner(Net()), BATCH)
    assert found.failed == "" and found.seconds > 0 and found.call is not None
    torch.testing.assert_close(found.call(BATCH), Net()(*BATCH.args))
    assert os.environ.get(CACHE) == before


def test_a_failure_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no C++ compiler\nand a page of advice")

        return call

    monkeypatch.setattr(module.torch, "compile", refuses)
    found = torch_compiled(Runner(Net()), BATCH)
    assert found.call is None and found.failed == "no C++ compiler and a page of advice"


@pytest.mark.parametrize("fails", [False, True])
def test_a_benchmark_has_its_times_or_the_reason(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fails:
        monkeypatch.setattr(module.torch, "compile", lambda f, **_: lambda x: 0 * f(x))
    runners: Any = {stage: Runner(Net()) for stage in ("teacher", "lossless", "graph")}
    found = time_model(runners, BATCH, repeats=2, torch_compile=True)
    timed = {key for key in found if "torch_compile_ms" in key}
    assert found["torch_compile_seconds"] > 0
    if fails:
        assert timed == set() and found["torch_compile_failed"].startswith("teacher: its outputs")
    else:
        assert timed == {"latency_teacher_torch_compile_ms", "latency_compiled_torch_compile_ms"}
        ratio = found["latency_teacher_ms"] / found["latency_teacher_torch_compile_ms"]
        assert found["speedup_teacher_torch_compile"] == pytest.approx(ratio)
    lines = "\n".join(bench_brief({"model": {"source": "net", "batch": 3, **found}, "sites": []}))
    assert ("torch.compile failed on teacher" in lines) == fails
    assert ("under torch.compile, the teacher is " in lines) != fails
