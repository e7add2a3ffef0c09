"""The kit for a machine with a GPU, as far as it runs without one."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from second_device import GPU, one_gpu

from asapc.device import running_on

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_check  # noqa: E402


def test_a_step_that_fails_or_hangs_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "LEAST", 1.0)
    made = [
        gpu_check.taken(
            gpu_check.Step(name, 1.0 / 60, ("-c", code)), left, os.environ, tmp_path, tmp_path / "log"
        )
        for name, code, left in (
            ("good", "print('fine')", 60.0),
            ("broken", "print('why'); raise SystemExit(3)", 60.0),
            ("hangs", "print('on its way', flush=True); import time; time.sleep(60)", 60.0),
            ("late", "pass", 0.5),
        )
    ]
    assert [step.outcome for step in made] == ["done", "exit 3", "not done in 1 s", "no time left"]
    assert "why" in made[1].tail and "on its way" in made[2].tail and "fine" not in made[1].tail
    assert "fine" in (tmp_path / "log").read_text()
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "attention.json").write_text('{"rows": 1}')
    (tmp_path / "good" / "attention.md").write_text("### a table")
    gpu_check.gathered(tmp_path, made, "a GPU")
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert document["results"] == {"good": {"rows": 1}} and len(document["steps"]) == 4
    text = (tmp_path / "gpu_check.md").read_text()
    assert "### a table" in text and "| broken | 0 | exit 3 |" in text


def test_every_step_names_what_there_is(tmp_path: Path) -> None:
    for step in gpu_check.steps(tmp_path):
        for argument in step.arguments:
            if argument.endswith(".py"):
                assert Path(argument).exists()
    assert sum(step.minutes for step in gpu_check.steps(tmp_path)) + gpu_check.KERNELS / 60 <= 8


def test_the_package_installs_without_a_network(tmp_path: Path) -> None:
    environment = gpu_check.installed(tmp_path / "site")
    code = "import asapc.passes, asapc.calibration, asapc; print(asapc.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, text=True,
                          capture_output=True, check=True)  # fmt: skip
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "-o", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 2


@pytest.mark.parametrize("name", ["attention", "lot", "esp"])
def test_the_benchmarks_mix_no_devices(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = importlib.import_module(name)
    one_gpu(monkeypatch)
    options = argparse.Namespace(
        dtype="bfloat16" if name == "attention" else "float32", cpu=False, spread=1.0, seed=0,
        compile=False, max_memory=1.0, repeats=1, once=False, max_seconds=10.0, batch=1, heads=2,
        tokens=12, head_dim=4,
    )  # fmt: skip
    if name == "attention":
        monkeypatch.setattr(module, "find_spec", lambda _: None)
        monkeypatch.setattr(module, "product_rate", lambda *_: 1e9)
    else:
        monkeypatch.setattr(module, "memory_elsewhere", lambda *_: None)  # of another process
        monkeypatch.setattr(module, "device_of", lambda _: str(GPU))
    with running_on(GPU, []), torch.no_grad():
        found = {
            "attention": lambda: module.measure(module.Shape(1, 2, 20, 8, 4), options),
            "lot": lambda: module.measure(module.Shape(1, 2, 12, 4, 3, 3), options, None),
            "esp": lambda: module.measure(options, 12, 0.1),
        }[name]()
    if name == "attention":
        assert not found["skipped"] and module.SOFTMAX in found["rows"]
    assert len(found["rows"]) >= 3


# A torch of three lines in place of the library, which every worker would import for seconds.
TORCH = """
class cuda:
    broken = False
    is_initialized = staticmethod(lambda: True)

    def synchronize():
        if cuda.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""
POISONED = """
import pytest, torch


@pytest.mark.parametrize("number", range(4))
def test_one(number):
    torch.cuda.synchronize()
    if number == 1:
        torch.cuda.broken = True
        raise AssertionError(f"poisoned by {number}")
"""


def test_an_error_that_sticks_to_its_process_costs_one_test(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "test_kernels.py").write_text(POISONED)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-n", "1", "-p", "gpu_worker", "-p",
               "no:cacheprovider", "test_kernels.py"]  # fmt: skip
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**outside, "PYTHONPATH": f"{tmp_path}{os.pathsep}{BENCHMARKS}"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "3 passed" in done.stdout, done.stdout
    assert "poisoned by 1" in done.stderr
