import ast
import gc
import inspect
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asapc.inputs.data import Batch
from asapc.measure import torch_compiled as module
from asapc.measure.timing import ENOUGH, interleaved_medians, interleaved_times, ratio_interval
from asapc.measure.torch_compiled import CACHE, torch_compiled
from asapc.program.runner import Runner
from asapc.report.brief import bench_brief
from asapc.report.site_metrics import time_model


def test_functions_take_turns_with_a_rotating_start() -> None:
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    interleaved_medians(functions, repeats=3, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"


def test_medians_and_quartiles_are_ordered_milliseconds() -> None:
    found = interleaved_medians(
        {"fast": lambda: None, "slow": lambda: time.sleep(0.005)}, repeats=5, warmup=0
    )
    for entry in found.values():
        assert entry["q1"] <= entry["median_ms"] <= entry["q3"]
    assert found["slow"]["median_ms"] >= 5.0
    assert found["fast"]["median_ms"] < found["slow"]["median_ms"]


def test_calls_of_a_few_seconds_have_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def call() -> None:
        clock[0] += 2.0

    monkeypatch.setattr("asapc.measure.timing.time.perf_counter", lambda: clock[0])
    times = interleaved_times({"a": call, "b": call}, repeats=10, enough=ENOUGH)
    assert len(times["a"]) == 6
    assert ratio_interval(times["a"], times["b"]) == (1.0, 1.0)


@pytest.mark.parametrize(("enough", "rounds"), [(0.0, 1), (1e9, 20)])
def test_calls_that_take_long_are_not_repeated_as_often(enough: float, rounds: int) -> None:
    calls: list[int] = []
    interleaved_times({"a": lambda: calls.append(0)}, repeats=20, warmup=5, enough=enough)
    assert len(calls) == rounds + (1 if enough == 0.0 else 5)


def test_short_calls_are_repeated_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("asapc.measure.timing.time.perf_counter", lambda: 1e-3 * next(clock))
    counts = [
        len(interleaved_times({"a": lambda: None}, repeats=repeats, warmup=0, min_time=0.3)["a"])
        for repeats in (5, 200)
    ]
    assert counts == [100, 200]  # a round looks at the clock three times


def test_benchmarks_pass_what_is_taken() -> None:
    """No test runs them."""
    taken = inspect.signature(interleaved_medians)
    for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("interleaved_medians"):
                taken.bind(*call.args, **{str(own.arg): own.value for own in call.keywords})


def test_garbage_collection_is_restored_even_after_a_failure() -> None:
    assert gc.isenabled()

    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError("boom")

    with pytest.raises(KeyError):
        interleaved_medians({"a": fail}, repeats=1, warmup=0)
    assert gc.isenabled()


def test_nothing_to_time_and_senseless_counts() -> None:
    assert interleaved_medians({}) == {}
    for repeats, warmup in ((0, 0), (1, -1)):
        with pytest.raises(ValueError, match="repeats must be >= 1"):
            interleaved_medians({"a": lambda: None}, repeats=repeats, warmup=warmup)


def test_a_gpu_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """From an idle stream to the end of what was started: the wait is part of neither."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 3.0

    for name, value in {
        "is_available": lambda: True, "is_initialized": lambda: True, "Event": Event,
        "synchronize": lambda: log.append("wait"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    found = interleaved_medians({"a": lambda: log.append("call")}, repeats=2, warmup=1)
    assert found["a"]["median_ms"] == 3.0
    assert log == ["wait", "event", "call", "event", "wait"] * 3


def test_the_interval_of_a_ratio_is_distribution_free() -> None:
    below = [1.0] * 10
    assert ratio_interval([*range(10, 0, -1)], below) == (2.0, 9.0)  # all but one on either side
    assert ratio_interval(below[:6], below[:6]) == (1.0, 1.0)
    assert ratio_interval(below[:5], below[:5]) is None and ratio_interval([], []) is None
    assert ratio_interval([900.0], below) is None  # a long call that was made once
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = ratio_interval((2.0 * rng.lognormal(size=11)).tolist(), [1.0] * 11) or (0.0, 0.0)
        covered += low <= 2.0 <= high
    assert covered >= 370  # 97.9 %, give or take


# Models under torch.compile as a baseline


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
