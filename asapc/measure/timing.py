"""Comparing run times: candidates take turns, so that a drifting clock or a busy neighbour hits
all of them alike.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from asapc.memory import current, forget_peak, give_back, peak

MAX_ROUNDS = 10_000
FEWEST = 3  # rounds, however long each takes
ENOUGH = 10.0  # seconds of rounds of a whole model: a few long calls are as steady as many short ones


def interleaved_medians(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int = 10,
    warmup: int = 2,
    min_time: float = 0.0,
    enough: float = math.inf,
) -> dict[str, dict[str, float]]:
    """Median and quartiles of one call's wall time: name -> {"median_ms", "q1", "q3"}, all in ms.

    Rounds go through every function once, starting one further each round.  There are at least
    `repeats` rounds, and more until `min_time` seconds have passed (at most MAX_ROUNDS), but no more
    than FEWEST once `enough` seconds have.  Accelerator work is waited for around each call; `warmup`
    rounds are not counted; the first is enough where it takes a tenth of `enough`.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats must be >= 1 and warmup >= 0, got {repeats} and {warmup}")
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    if not names:
        return {}
    wait = _synchronizer()
    start = time.perf_counter()
    for _ in range(warmup):
        for name in names:
            functions[name]()
        wait()
        if time.perf_counter() - start >= enough / 10:
            break
    collecting = gc.isenabled()
    gc.disable()  # a collection would be charged to whoever happens to run
    try:
        start = time.perf_counter()
        rounds = 0
        while rounds < MAX_ROUNDS:
            passed = time.perf_counter() - start
            wanted = min(FEWEST, repeats) if passed >= enough else repeats
            if rounds >= wanted and passed >= min_time:
                break
            turn = rounds % len(names)
            for name in names[turn:] + names[:turn]:
                wait()
                before = time.perf_counter()
                functions[name]()
                wait()
                samples[name].append((time.perf_counter() - before) * 1e3)
            rounds += 1
    finally:
        if collecting:
            gc.enable()
    return {name: _quartiles(values) for name, values in samples.items()}


def extra_bytes(function: Callable[[], Any]) -> int | None:
    """Bytes at the peak of one call over what was held before it, what it returns included.

    On an accelerator by its allocator's statistics. On the CPU by the process's own peak, all threads
    included, after the C allocator has given back what it kept from earlier calls. A first call is not
    counted, so neither is scratch that a kernel keeps. None where that cannot be read (Linux tells).
    """
    import torch

    function()  # whatever is loaded or cached on a first call is not the call's
    gc.collect()
    if torch.cuda.is_available():
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


def _quartiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(fraction: float) -> float:
        place = fraction * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return {"median_ms": at(0.5), "q1": at(0.25), "q3": at(0.75)}


def _synchronizer() -> Callable[[], None]:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.synchronize
    return lambda: None
