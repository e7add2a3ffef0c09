"""The exact finite loop on a CPU, shape by shape: the usual loop, torch.compile of it, asapc, softmax.

    python benchmarks/loop.py                              # ten shapes, B H N D T
    python benchmarks/loop.py --shapes "1 8 2048 64 20" --compile --threads 1
    python benchmarks/loop.py --mixers --compile           # matrices of given scores

q, k and v are views of [B, N, H, D], as models have them. A row is printed only after parity: asapc is
at most twice as wrong as the usual loop is in the same dtype. Candidates take turns; figures are medians
in ms. `call` is the operator on one head of 16 tokens, and what of it is spent below torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attention import SLACK, Problem, Shape, error, lossless, make_problem, softmax, usual_loop
from torch import Tensor

from asapc.kernels import native
from asapc.kernels.loop import Loop
from asapc.measure.timing import interleaved_medians

SHAPES = (
    "1 4 50 32 5; 32 1 50 32 5; 1 12 197 64 3; 1 12 197 64 20; 8 12 197 64 20; 16 8 65 32 10; "
    "8 8 128 32 20; 1 8 256 32 20; 4 8 512 32 20; 1 8 1024 64 20"
)
Candidates = Mapping[str, Callable[[Problem], Tensor]]
CANDIDATES: Candidates = {"usual loop": usual_loop, "asapc": lossless, "sdpa": softmax}


def problem_of(shape: Shape, dtype: torch.dtype) -> Problem:
    """Its tokens interleaved as the heads of one projection are."""
    problem = make_problem(shape, dtype, "cpu", 1.0, 0, with_duals=False)
    for name in ("q", "k", "v"):
        laid_out = getattr(problem, name).transpose(1, 2).contiguous().transpose(1, 2)
        object.__setattr__(problem, name, laid_out)
    return problem


def check(problem: Problem, dtype: torch.dtype, candidates: Candidates) -> None:
    """Raises SystemExit unless the loops agree: asapc within twice the usual loop's own error."""
    exact, timed = usual_loop(problem), problem.to(dtype)
    budget = 2 * error(usual_loop(timed), exact) + SLACK
    for name in candidates:
        off = 0.0 if name == "sdpa" else error(candidates[name](timed), exact)
        if off > budget:
            raise SystemExit(f"loop.py: {name} is off by {off:.1e}, allowed {budget:.1e}")


def measure(shape: Shape, dtype: torch.dtype, candidates: Candidates, seconds: float) -> None:
    heads = shape.batch * shape.heads
    few = Shape(1, min(heads, 2), shape.tokens, shape.head_dim, shape.half_steps)
    check(problem_of(few, dtype), dtype, candidates)
    timed = problem_of(shape, dtype).to(dtype)
    functions = {name: partial(run, timed) for name, run in candidates.items()}
    found = interleaved_medians(functions, repeats=5, warmup=1, min_time=seconds)
    own, soft = found["asapc"]["median_ms"], found["sdpa"]["median_ms"]
    times = "".join(f"  {name} {found[name]['median_ms']:.3f}" for name in candidates)
    compiled = found.get("torch.compile", found["usual loop"])["median_ms"]
    ratios = f"asapc/sdpa {own / soft:.2f}  loop/asapc {compiled / own:.1f}"
    print(f"{shape!s:24}{times}  {ratios}", flush=True)


MIXERS = (
    (1, 4, 20), (16, 4, 20), (512, 4, 20), (4096, 4, 20), (1, 16, 20), (8, 200, 20), (1, 513, 50),
)  # fmt: skip


def divided(scores: Tensor, iterations: int) -> Tensor:
    """The usual loop of a mixer: softmax, then columns and rows in turn."""
    plan = torch.softmax(scores, -1)
    for _ in range(iterations):
        plan = plan / plan.sum(-2, keepdim=True)
        plan = plan / plan.sum(-1, keepdim=True)
    return plan


def measure_mixers(seconds: float, with_compile: bool) -> None:
    """G matrices [n, n] of scores and so many iterations; of the G = tokens of a hyper-connection."""
    for groups, size, iterations in MIXERS:
        generator = torch.Generator().manual_seed(groups + size)
        scores = torch.randn(groups, 1, size, size, generator=generator)
        settings = (None, None, 1.0, 2 * iterations + 1, True, [1.0, 1.0, 0.0, 0.0])
        ours = partial(torch.ops.asapc.plan.default, scores, *settings)
        exact = divided(scores.double(), iterations)
        if error(ours(), exact) > 2 * error(divided(scores, iterations), exact) + SLACK:
            raise SystemExit(f"loop.py: mixers of {size} x {size} are off")
        functions = {"usual loop": partial(divided, scores, iterations), "asapc": ours}
        if with_compile:
            torch._dynamo.reset()
            compiled = torch.compile(divided, dynamic=False)
            functions["torch.compile"] = partial(compiled, scores, iterations)
        found = interleaved_medians(functions, repeats=5, warmup=2, min_time=seconds)
        own = found["asapc"]["median_ms"]
        times = "".join(f"  {name} {one['median_ms']:.3f}" for name, one in found.items())
        others = (name for name in found if name != "asapc")
        ratios = "".join(f"  {name}/asapc {found[name]['median_ms'] / own:.1f}" for name in others)
        print(f"G{groups} n{size} iterations {iterations:<6}{times}{ratios}", flush=True)


def measure_call() -> None:
    """What a call costs beside the arithmetic."""
    timed = problem_of(Shape(1, 1, 16, 16, 4), torch.float32).to(torch.float32)
    loop = Loop(timed.scale, 4, "row", [1.0, 1.0, 0.0, 0.0])
    arguments: tuple[Any, ...] = (timed.q, timed.k, timed.v, None, None, None, loop)
    calls = {"operator": partial(lossless, timed), "engine": partial(native.sinkhorn_loop, *arguments)}
    found = interleaved_medians(calls, repeats=2000, warmup=50)
    print("call:", "  ".join(f"{name} {1e3 * x['median_ms']:.1f} us" for name, x in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=SHAPES, help='"B H N D T; .."')
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="at least so many a shape")
    parser.add_argument("--compile", action="store_true", help="also the usual loop under torch.compile")
    parser.add_argument("--mixers", action="store_true", help="matrices of given scores instead")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {native.described()}, {options.dtype}")
    dtype = getattr(torch, options.dtype)
    with torch.no_grad():
        if options.mixers:
            return measure_mixers(options.seconds, options.compile)
        measure_call()
        for text in options.shapes.split(";"):
            shape, candidates = Shape(*map(int, text.split())), dict(CANDIDATES)
            if options.compile:
                torch._dynamo.reset()  # which gives up after a few shapes
                candidates["torch.compile"] = torch.compile(usual_loop, dynamic=False)
            measure(shape, dtype, candidates, options.seconds)


if __name__ == "__main__":
    main()
