"""Sizes of the streaming kernels, tried on a GPU: what to ship for it in kernels/thresholds.json.

    python benchmarks/gpu_tune.py -o benchmarks/results/gpu/tune      # a minute or two

The CPU's sizes are tried with --cpu. The best ones can be used at once: ASAPC_THRESHOLDS=FILE.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention import FACTOR, device_of, environment
from written import write_results

import asapc.kernels.library  # noqa: F401 -- registers torch.ops.asapc
from asapc.kernels.thresholds import Thresholds, thresholds, using
from asapc.measure.timing import interleaved_medians

HALF_STEPS = 20
TILE_BYTES = [1 << power for power in range(17, 22)]
RESIDENT_BYTES = [1 << 22, 1 << 24, 1 << 26, 1 << 28]
# (points x, points y, warps, stages) of a streamed kernel, next to those it was written with.
TILES = (
    (128, 64, 4, 2), (128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3),
    (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3), (256, 64, 8, 2),
)  # fmt: skip
WORTH_KEEPING = 0.97  # of the shipped sizes' time: a smaller gain is noise


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for every dtype, length and width of a head."""
    device = device_of(options)
    for dtype, tokens, dim in itertools.product(options.dtype, options.tokens, options.head_dim):
        kind = getattr(torch, dtype)
        points = (1, options.heads, tokens, dim)
        q, k, v = (torch.randn(points, device=device, dtype=kind) for _ in range(3))
        call = partial(
            torch.ops.asapc.sinkhorn, q, k, v, None, None, dim**-0.5, HALF_STEPS, True, FACTOR
        )
        best, gain, refused = tuned(call, q, k, options.repeats)
        shape = {"dtype": dtype, "H": options.heads, "N": tokens, "D": dim}
        yield {**shape, **asdict(best), "gain": gain, "refused": refused}


def tuned(
    call: Callable[[], Any], q: torch.Tensor, k: torch.Tensor, repeats: int
) -> tuple[Thresholds, float, int]:
    """The sizes that `call`, a loop on tensors like these, is fastest in, the shipped sizes' time over
    its own, and how many do not run here."""
    start = thresholds(q, k)
    runs = {limits: partial(_within, limits, call) for limits in sizes_for(start, q, k)}
    able = {limits: run for limits, run in runs.items() if limits == start or _runs(run)}
    times = interleaved_medians({str(i): run for i, run in enumerate(able.values())}, repeats=repeats)
    medians = {limits: times[str(i)]["median_ms"] for i, limits in enumerate(able)}
    best = min(medians, key=lambda limits: medians[limits])
    if medians[best] > WORTH_KEEPING * medians[start]:
        best = start
    return best, medians[start] / medians[best], len(runs) - len(able)


def sizes_for(start: Thresholds, q: torch.Tensor, k: torch.Tensor) -> Sequence[Thresholds]:
    """Those to try for queries [B, H, N, D] and keys [B, H, M, D], the shipped ones first."""
    if q.device.type == "cuda":
        names = ("tile_x", "tile_y", "warps", "stages")
        others = [replace(start, **dict(zip(names, tile, strict=True))) for tile in TILES]
        if max(q.shape[2], k.shape[2]) <= start.resident_tokens:
            others.append(replace(start, resident_tokens=0))
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


def table(rows: list[dict[str, Any]]) -> str:
    keys = (
        "dtype", "N", "D", "tile_x", "tile_y", "warps", "stages", "resident_tokens", "gain",
    )  # fmt: skip
    lines = ["### The best sizes of the lossless loop; 0: as written", ""]
    lines += [f"| {' | '.join(keys)} |", "|---|" + "---:|" * (len(keys) - 1)]
    for row in rows:
        cells = (f"{row[key]:.2f}" if key == "gain" else str(row[key]) for key in keys)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    parser.add_argument("-o", "--out", type=Path, help="folder for tune.{json,md}")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for row in measured(options):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            document = {"environment": environment(cpu=device_of(options) == "cpu"), "rows": rows}
            write_results(options.out, "tune", document, table(rows))  # what comes next may be cut off
    print(table(rows))


if __name__ == "__main__":
    main()
