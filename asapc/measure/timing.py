"""Comparing run times: candidates take turns, so that a drifting clock or a busy neighbour hits
all of them alike.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.special import bdtrik  # scipy.stats takes a second to import

from asapc.measure.bootstrap import LEVEL, Interval
from asapc.memory import current, forget_peak, give_back, peak

FEWEST = 6  # rounds of calls of a few seconds: with fewer, a ratio has no interval
ENOUGH = 10.0  # seconds of rounds of a whole model: a few long calls are as steady as many short ones


def interleaved_medians(
    functions: Mapping[str, Callable[[], Any]], repeats: int = 10, warmup: int = 2, min_time: float = 0.0
) -> dict[str, dict[str, float]]:
    """Median and quartiles of `interleaved_times`: name -> {"median_ms", "q1", "q3"}, all in ms."""
    times = interleaved_times(functions, repeats, warmup, min_time=min_time)
    return {name: quartiles(values) for name, values in times.items()}


def interleaved_times(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int = 10,
    warmup: int = 2,
    enough: float = math.inf,
    min_time: float = 0.0,
) -> dict[str, list[float]]:
    """Wall times of one call in ms, round by round: name -> as many as there were rounds.

    Rounds go through every function once, starting one further each round.  There are `repeats` rounds,
    and more until `min_time` seconds have passed, but no more than FEWEST once `enough` seconds have, and
    one where it takes more than half of that.  Where this process uses a GPU, calls are timed by its
    events, from an idle stream to its end.  `warmup` rounds are not counted; the first is enough where it
    takes a tenth of `enough`.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats must be >= 1 and warmup >= 0, got {repeats} and {warmup}")
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    timed = _timed_by_events if on_gpu else _timed
    start = time.perf_counter()
    for _ in range(warmup):
        for name in names:
            timed(functions[name])
        if time.perf_counter() - start >= enough / 10:
            break
    collecting = gc.isenabled()
    gc.disable()  # a collection would be charged to whoever happens to run
    try:
        start = time.perf_counter()
        for rounds in itertools.count():
            passed = time.perf_counter() - start
            if rounds and (2 * passed > enough * rounds or (passed >= enough and rounds >= FEWEST)):
                break
            if rounds >= repeats and passed >= min_time:
                break
            turn = rounds % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                samples[name].append(timed(functions[name]))
    finally:
        if collecting:
            gc.enable()
    return samples


def _timed(function: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    before = time.perf_counter()
    function()
    return (time.perf_counter() - before) * 1e3


def _timed_by_events(function: Callable[[], Any]) -> float:
    """Milliseconds between two events of the current GPU, work on the CPU included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def extra_bytes(function: Callable[[], Any], device: str = "cpu") -> int | None:
    """Bytes at the peak of one call over what was held before it, what it returns included.

    device: its kind. On a GPU by its allocator's statistics. On the CPU by the process's own peak, all
    threads included, after the C allocator has given back what it kept of earlier calls. A first call is
    not counted, so neither is scratch that a kernel keeps. None where that cannot be read (Linux tells).
    """
    function()  # whatever is loaded or cached on a first call is not the call's
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    give_back()
    if not forget_peak():
        return None
    held = current()
    function()
    return max(0, peak() - held)


def quartiles(values: list[float]) -> dict[str, float]:
    q1, median, q3 = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median_ms": median, "q1": q1, "q3": q3}


def ratios(rounds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Metrics of what was timed beside the teacher, and the intervals of its ratios as `confidence`."""
    medians = {name: quartiles(times)["median_ms"] for name, times in rounds.items()}
    figures: dict[str, Any] = {f"latency_{name}_ms": median for name, median in medians.items()}
    confidence: dict[str, Interval] = {}
    for name in (name for name in rounds if name != "teacher"):
        key = "speedup" if name == "compiled" else f"speedup_{name}"
        ratio = figures[key] = medians["teacher"] / medians[name]
        interval = ratio_interval(rounds["teacher"], rounds[name])
        if interval is not None:
            confidence[key] = (min(interval[0], ratio), max(interval[1], ratio))
    return {**figures, "confidence": confidence}


def ratio_interval(above: list[float], below: list[float]) -> Interval | None:
    """The interval of the median of above / below, round by round, by order statistics.

    None if there are too few rounds of both, at 95 % five or fewer. Two functions that are equally fast
    have an interval about 1.
    """
    ratios = sorted(a / b for a, b in zip(above, below, strict=False))
    outside = math.ceil(bdtrik((1 - LEVEL) / 2, len(ratios), 0.5)) if ratios else 0
    return (ratios[outside - 1], ratios[-outside]) if outside else None
