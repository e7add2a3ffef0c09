"""Tuning: sizes that the kernels may work in, tried on tensors; the best goes into the tuning cache.

Nothing is tuned by itself: a first call that tries sizes would be slow, and a CUDA graph could not hold
it. `asapc bench --tune` does it, and benchmarks/gpu_tune.py for shapes in general.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asapc.kernels.thresholds import (
    Thresholds,
    key_of,
    remember,
    thresholds,
    using,
    without_cache,
)
from asapc.measure.timing import interleaved_medians

TILE_BYTES = [1 << power for power in range(17, 22)]
RESIDENT_BYTES = [1 << 22, 1 << 24, 1 << 26, 1 << 28]
# (points x, points y, warps, stages) of a streamed kernel, next to those it was written with.
TILES = (
    (128, 64, 4, 2), (128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3),
    (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3), (256, 64, 8, 2),
)  # fmt: skip
WORTH_KEEPING = 0.97  # of the shipped sizes' time: a smaller gain is noise


@dataclass(frozen=True)
class Tuned:
    """best: what is remembered.  gain: the shipped sizes' time over its own.  refused: how many of the
    tried sizes do not run here.  cache: the file."""

    best: Thresholds
    gain: float
    refused: int
    cache: Path


def tune(call: Callable[[], Any], q: Tensor, k: Tensor, repeats: int) -> Tuned:
    """Time `call`, which runs a loop on queries and keys like these, in every size there is."""
    with without_cache():
        start = thresholds(q, k)
    runs = {limits: partial(_within, limits, call) for limits in sizes_for(start, q, k)}
    with torch.no_grad():
        able = {limits: run for limits, run in runs.items() if limits == start or _runs(run)}
        times = interleaved_medians(
            {str(i): run for i, run in enumerate(able.values())}, repeats=repeats
        )
    medians = {limits: times[str(i)]["median_ms"] for i, limits in enumerate(able)}
    best = min(medians, key=lambda limits: medians[limits])
    if medians[best] > WORTH_KEEPING * medians[start]:
        best = start
    path = remember(key_of(q, k), best)
    return Tuned(best, medians[start] / medians[best], len(runs) - len(able), path)


def sizes_for(start: Thresholds, q: Tensor, k: Tensor) -> Sequence[Thresholds]:
    """Those to try for queries [B, H, N, D] and keys [B, H, M, D], the shipped ones first."""
    if q.device.type == "cuda":
        names = ("tile_x", "tile_y", "warps", "stages")
        others = [replace(start, **dict(zip(names, tile, strict=True))) for tile in TILES]
        if max(q.shape[2], k.shape[2]) <= start.resident_tokens:
            others.append(replace(start, resident_tokens=0))
        if max(q.shape[2], k.shape[2]) <= start.sweep_tokens:
            others += [replace(x, sweep_tokens=0) for x in (start, *others)]
    else:
        size = q.shape[2] * k.shape[2] * 4
        kept = [x for x in RESIDENT_BYTES if size > RESIDENT_BYTES[0]] or [start.resident_bytes]
        others = [replace(start, tile_bytes=a, resident_bytes=b) for a in TILE_BYTES for b in kept]
    return list(dict.fromkeys([start, *others]))


def _within(limits: Thresholds, call: Callable[[], Any]) -> Any:
    with using(limits):
        return call()


def _runs(call: Callable[[], Any]) -> bool:
    """A tile that needs more shared memory or registers than there are is refused by Triton."""
    try:
        call()
    except Exception:  # of Triton's compiler and of the driver, many types
        return False
    return True
