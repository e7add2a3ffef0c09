"""Sizes of the streaming kernels, tried on a GPU: what to ship for it in kernels/thresholds.json.

    python benchmarks/gpu_tune.py -o benchmarks/results/gpu/tune      # a minute or two

The best of each shape is also remembered in this machine's own tuning cache, which later runs read.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention import FACTOR, device_of, environment, write_results

import asapc.kernels.library  # noqa: F401 -- registers torch.ops.asapc
from asapc.measure.tuning import tune

HALF_STEPS = 20


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
        found = tune(call, q, k, options.repeats)
        shape = {"dtype": dtype, "H": options.heads, "N": tokens, "D": dim}
        yield {**shape, **asdict(found.best), "gain": found.gain, "refused": found.refused}


def table(rows: list[dict[str, Any]]) -> str:
    keys = (
        "dtype", "N", "D", "tile_x", "tile_y", "warps", "stages", "resident_tokens", "sweep_tokens",
        "gain",
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
