"""Attention alone: the usual PyTorch Sinkhorn loop against asapc's operators and against softmax.

    python benchmarks/attention.py                       # B4 H8 N512 D32 T20, float32
    python benchmarks/attention.py --batch 1 --tokens 2048 --head-dim 64 --json

Speed is printed only after parity: in float64 every operator must reproduce the usual loop, and in
the timed dtype it may be at most twice as wrong as the usual loop is. The amortised operator is
given the teacher's own dual there, so that it has an exact answer to be held to. Its time includes
the prediction of the dual; a second row leaves that out. Candidates take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import asapc.operators  # noqa: F401 -- registers torch.ops.asapc
from asapc.operators.sinkhorn import finite_duals, score_matrix
from asapc.timing import interleaved_medians

EXACT = 1e-9
SLACK = 1e-6
ROWS_FIRST = True


@dataclass(frozen=True)
class Problem:
    """q, k, v: [B, H, N, D]; dual: [B, H, N], the teacher's, `closures` half-steps early."""

    q: Tensor
    k: Tensor
    v: Tensor
    dual: Tensor
    theta: Tensor
    coefficients: Tensor
    scale: float
    half_steps: int
    closures: int

    def to(self, dtype: torch.dtype) -> Problem:
        tensors = (self.q, self.k, self.v, self.dual, self.theta, self.coefficients)
        return Problem(*(t.to(dtype) for t in tensors), self.scale, self.half_steps, self.closures)


def usual_loop(problem: Problem) -> Tensor:
    """As published Sinkformer code runs it: log domain, a fresh full matrix every half-step."""
    scores = problem.q @ problem.k.transpose(-1, -2) * problem.scale
    rows, columns = scores.shape[-2:]
    u = scores.new_zeros(scores.shape[:-1])
    v = scores.new_zeros((*scores.shape[:-2], columns))
    for step in range(problem.half_steps):
        plan = scores + u.unsqueeze(-1) + v.unsqueeze(-2)
        if step % 2 == 0:
            u = -math.log(rows) - torch.logsumexp(plan, dim=-1) + u
        else:
            v = -math.log(columns) - torch.logsumexp(plan, dim=-2) + v
    attention = torch.exp(scores + u.unsqueeze(-1) + v.unsqueeze(-2)) * rows
    return attention @ problem.v


def lossless(problem: Problem) -> Tensor:
    return torch.ops.asapc.sinkhorn(
        problem.q,
        problem.k,
        problem.v,
        None,
        None,
        problem.scale,
        problem.half_steps,
        ROWS_FIRST,
        [1.0, 1.0, 0.0, 0.0],
    )


def amortised(problem: Problem, dual: Tensor | None = None) -> Tensor:
    return torch.ops.asapc.asap(
        problem.q,
        problem.k,
        problem.v,
        None,
        None,
        problem.dual if dual is None else dual,
        problem.scale,
        problem.closures,
        [1.0, 1.0, 0.0, 0.0],
    )


def predicted(problem: Problem) -> Tensor:
    dual = torch.ops.asapc.sliced_dual(
        problem.q, problem.k, None, problem.theta, problem.coefficients, problem.scale
    )
    return amortised(problem, dual)


def softmax(problem: Problem) -> Tensor:
    return scaled_dot_product_attention(problem.q, problem.k, problem.v, scale=problem.scale)


def make_problem(options: argparse.Namespace) -> Problem:
    """Float64, seeded. Scores have standard deviation `spread`."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.batch, options.heads, options.tokens, options.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = q * options.spread**0.5, k * options.spread**0.5
    theta = torch.randn(options.slices, shape[-1], generator=generator, dtype=torch.float64)
    theta = theta / theta.norm(dim=-1, keepdim=True)
    coefficients = torch.randn(1, options.slices, generator=generator, dtype=torch.float64)
    scale = shape[-1] ** -0.5
    scores = score_matrix(q, k, None, None, scale)
    dual, _ = finite_duals(scores, options.half_steps - options.closures, "row", None)
    tensors = (q, k, v, dual, theta, coefficients)
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    return Problem(*(t.to(device) for t in tensors), scale, options.half_steps, options.closures)


def error(result: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, in float64."""
    return (result.double() - exact).abs().max().item()


def check_parity(problem: Problem, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Errors of every operator in both dtypes.  Raises SystemExit if one is not exact enough."""
    exact = usual_loop(problem)
    timed = problem.to(dtype)
    budget = 2 * error(usual_loop(timed), exact) + SLACK
    errors = {"usual loop": {"float64": 0.0, "timed": error(usual_loop(timed), exact)}}
    for name, function in {"lossless": lossless, "asap": amortised}.items():
        found = {"float64": error(function(problem), exact), "timed": error(function(timed), exact)}
        errors[name] = found
        if not (found["float64"] <= EXACT and found["timed"] <= budget):
            raise SystemExit(
                f"attention.py: {name} does not reproduce the usual loop: max error "
                f"{found['float64']:.2e} in float64 (allowed {EXACT:g}), "
                f"{found['timed']:.2e} in {dtype} (allowed {budget:.2e})"
            )
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--half-steps", type=int, default=20)
    parser.add_argument("--closures", type=int, default=3, choices=(1, 3), help="parity of T = 20")
    parser.add_argument("--slices", type=int, default=32)
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of scores")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="even if there is an accelerator")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.half_steps % 2 or options.half_steps <= options.closures:
        parser.error("--half-steps must be even (columns last) and larger than --closures")

    with torch.no_grad():
        problem = make_problem(options)
        dtype = getattr(torch, options.dtype)
        errors = check_parity(problem, dtype)
        timed = problem.to(dtype)
        asap_name = f"asap, sliced:{options.slices}, {options.closures} closures"
        functions: dict[str, Callable[[], Tensor]] = {
            "usual loop": lambda: usual_loop(timed),
            "lossless": lambda: lossless(timed),
            asap_name: lambda: predicted(timed),
            f"{options.closures} closures, dual given": lambda: amortised(timed),
            "softmax (SDPA)": lambda: softmax(timed),
        }
        times = interleaved_medians(functions, repeats=options.repeats, warmup=1)

    usual = times["usual loop"]["median_ms"]
    ratios = {name: usual / found["median_ms"] for name, found in times.items()}
    if options.json:
        result = {
            "shape": {key: value for key, value in vars(options).items() if key != "json"},
            "environment": environment(problem.q.device),
            "max_abs_error": errors,
            "times": times,
            "ratio_to_usual_loop": ratios,
        }
        print(json.dumps(result, indent=2))
        return
    print(
        f"B{options.batch} H{options.heads} N{options.tokens} D{options.head_dim} "
        f"T{options.half_steps} {options.dtype}, {environment(problem.q.device)}"
    )
    for name, found in errors.items():
        print(
            f"  parity {name:12} max error {found['float64']:.1e} in float64, "
            f"{found['timed']:.1e} in {options.dtype}"
        )
    print(f"{'':40} {'median ms':>10} {'quartiles':>17} {'usual / this':>13}")
    for name, found in times.items():
        quartiles = f"{found['q1']:.2f}-{found['q3']:.2f}"
        print(f"{name:40} {found['median_ms']:10.2f} {quartiles:>17} {ratios[name]:12.1f}x")


def environment(device: torch.device) -> dict[str, str | int]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 0,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
