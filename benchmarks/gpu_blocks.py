"""How many blocks a head's loop is best shared among on a GPU, beside Triton and softmax attention.

    python benchmarks/gpu_blocks.py -o FOLDER

Microseconds of a call in a CUDA graph, T = 20 and D = 64, after parity with the usual loop; `own` is what
block.py chooses, and must not be much slower than the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from attention import (
    SLACK,
    Problem,
    Shape,
    error,
    graph_medians,
    lossless,
    make_problem,
    softmax,
    usual_loop,
)
from torch import Tensor
from written import write_results

from asapc.kernels.gpu import block, sinkhorn, stored
from asapc.kernels.gpu.tiles import Scores
from asapc.kernels.loop import Loop

SIZES = ((32, 65), (32, 128), (32, 197), (32, 256), (1, 320), (1, 512), (4, 512), (1, 608), (4, 880))
HEADS, DIM, HALF_STEPS = 8, 64, 20
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def ways_to_share(p: Problem) -> dict[str, block.Shape]:
    """By name, one that each number of blocks allows."""
    own = block.shape_for(p.q, p.k, p.v)
    if own is None:
        return {}
    strips, tokens = -(-p.q.shape[2] // 16), p.k.shape[2]
    properties: Any = torch.cuda.get_device_properties(p.q.device)
    memory = properties.shared_memory_per_block_optin
    found = {"own": own}
    for cluster in range(1, min(block.MOST_BLOCKS, strips) + 1):
        shape = own._replace(cluster=cluster, warps=-(-strips // cluster), blocks=1)
        if shape.warps <= block.MOST_WARPS and shape.shared(tokens) <= memory:
            found[f"{cluster} blocks"] = shape.filling(tokens)
    return found


def launcher(p: Problem, shape: block.Shape, loop: Loop) -> Callable[[], Any]:
    """CUDA C++ alone, without the launch after it."""
    out = torch.empty_like(p.v)
    done = torch.empty(out.shape[0] * HEADS, dtype=torch.int32, device=out.device)
    given: tuple[Tensor | None, ...] = (None, None, None, None)
    tensors, numbers = block.arguments(p.q, p.k, p.v, *given, out, done, loop, 1.0)
    return lambda: block.launch(shape, tensors, numbers, len(done))


def measured(batch: int, tokens: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    few = make_problem(Shape(1, 2, tokens, DIM, HALF_STEPS), dtype, "cuda", 1.0, 0, False)
    exact = usual_loop(few)
    errors = [error(run(few.to(dtype)), exact) for run in (lossless, usual_loop)]
    if not errors[0] <= 2 * errors[1] + SLACK:
        raise SystemExit(f"gpu_blocks.py: N{tokens} {dtype} is off by {errors[0]:.1e}, allowed {errors}")
    p = make_problem(Shape(batch, HEADS, tokens, DIM, HALF_STEPS), dtype, "cuda", 1.0, 0, False).to(dtype)
    loop = Loop(p.scale, HALF_STEPS, "row", [1.0, 1.0, 0.0, 0.0])
    scores = Scores(p.q, p.k, None, None, p.scale)
    ways = {name: launcher(p, shape, loop) for name, shape in ways_to_share(p).items()}
    ways["lossless"] = lambda: lossless(p)
    if tokens > 256:
        ways["stream"] = lambda: sinkhorn.streaming_loop(scores, p.v, None, loop)
        if stored.fits(p.q, p.k, loop):
            ways["matrix kept"] = lambda: stored.stored_loop(scores, p.v, None, loop)
    ways["softmax"] = lambda: softmax(p)
    times = graph_medians(ways, repeats)
    return {
        "shape": f"B{batch} H{HEADS} N{tokens}", "dtype": str(dtype)[6:], "errors": errors,
        "us": {name: round(1e3 * time, 1) for name, time in times.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("-o", "--out", type=Path, help="folder for blocks.{json,md}")
    options = parser.parse_args()
    wanted = [(*size, dtype) for dtype in DTYPES for size in SIZES]
    shapes: set[block.Shape] = set()
    for batch, tokens, dtype in wanted:
        p = make_problem(Shape(batch, HEADS, tokens, DIM, HALF_STEPS), dtype, "cuda", 1.0, 0, False)
        shapes |= set(ways_to_share(p.to(dtype)).values())
    with ThreadPoolExecutor(16) as pool:  # NVRTC takes seconds of a CPU for each
        list(pool.map(lambda shape: block.compiled(shape, p.q.device), shapes))
    rows, lines = [], ["| shape, dtype | error, usual loop's | us |", "|---|---|---|"]
    for size in wanted:
        rows.append(measured(*size, options.repeats))
        row = rows[-1]
        times = ", ".join(f"{name} {time}" for name, time in row["us"].items())
        errors = ", ".join(f"{found:.1e}" for found in row["errors"])
        lines.append(f"| {row['shape']}, {row['dtype']} | {errors} | {times} |")
        print(lines[-1], flush=True)
        write_results(options.out, "blocks", {"rows": rows}, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
