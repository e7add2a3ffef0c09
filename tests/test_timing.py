import gc
import time

import numpy as np
import pytest
import torch

from asapc.measure.timing import ENOUGH, interleaved_medians, interleaved_times, ratio_interval


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
    interleaved_medians({"a": lambda: calls.append(0)}, repeats=20, warmup=5, enough=enough)
    assert len(calls) == rounds + (1 if enough == 0.0 else 5)
    calls.clear()
    interleaved_medians({"a": lambda: calls.append(0)}, repeats=1, warmup=0, enough=0.0)
    assert len(calls) == 1


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
