"""Attention alone: the usual PyTorch Sinkhorn loop against asapc's operators and against softmax.

    python benchmarks/attention.py                       # B4 H8 N512 D32 T20, float32
    python benchmarks/attention.py --batch 1 --tokens 2048 --head-dim 64 --json

Speed is printed only after parity: in float64 every operator must reproduce the usual loop, and in
the timed dtype it may be at most twice as wrong as the usual loop is. The amortised operators are
given the teacher's own duals there, so that they have an exact answer to be held to. Rows named after
features include the prediction of the dual; their coefficients are arbitrary, which costs the same.
Candidates take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import asapc.operators  # noqa: F401 -- registers torch.ops.asapc
from asapc.features import coarse
from asapc.features.clouds import clouds_of
from asapc.ir import SiteTensors
from asapc.operators.sinkhorn import finite_duals, score_matrix
from asapc.timing import interleaved_medians

EXACT = 1e-9
SLACK = 1e-6
ROWS_FIRST = True


FACTOR = [1.0, 1.0, 0.0, 0.0]  # attention = N * P
SLICED = "sliced:32:random"
COARSE = "coarse:32"
BOTH = "coarse:32 gaussian"


@dataclass(frozen=True)
class Problem:
    """q, k, v: [B, H, N, D]; source, key, key_last: the teacher's duals 3, 2 and 0 half-steps early.

    row_sums: [B, H, N], of the teacher's map.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    source: Tensor
    key: Tensor
    key_last: Tensor
    row_sums: Tensor
    theta: Tensor
    query_pivots: Tensor
    key_pivots: Tensor
    scale: float
    half_steps: int

    def to(self, dtype: torch.dtype) -> Problem:
        values = (getattr(self, item.name) for item in fields(self))
        return Problem(*(x.to(dtype) if isinstance(x, Tensor) else x for x in values))


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
        problem.q, problem.k, problem.v, None, None, problem.scale, problem.half_steps, ROWS_FIRST,
        FACTOR,
    )  # fmt: skip


def closed(p: Problem, source: Tensor | None, key: Tensor | None, closures: int) -> Tensor:
    return torch.ops.asapc.asap(p.q, p.k, p.v, None, None, source, key, p.scale, closures, FACTOR)


def rescaled(p: Problem, key: Tensor, row_sums: Tensor) -> Tensor:
    return closed(p, None, key, 1) * row_sums[..., None]


def predicted(p: Problem, features: str, side: str, half_steps: int) -> Tensor:
    parameters = {
        SLICED: [p.theta],
        COARSE: [p.key_pivots if side == "source" else p.query_pivots],
        BOTH: [p.key_pivots if side == "source" else p.query_pivots],
    }
    columns = {SLICED: 32, COARSE: 1, BOTH: 4}[features]
    coefficients = torch.full((1, columns), 0.5, dtype=torch.float32)
    return torch.ops.asapc.dual(
        p.q, p.k, None, None, parameters[features], coefficients, features, side, p.scale,
        half_steps, side == "source",
    )  # fmt: skip


def key_closure(p: Problem) -> Tensor:
    """One closure from a predicted target dual, rows rescaled: what `side: key, closures: 1` runs."""
    coefficients = torch.full((1, 1), 0.5, dtype=torch.float32)
    dual, mass = torch.ops.asapc.dual_and_row_mass(
        p.q, p.k, None, None, [p.query_pivots], coefficients, COARSE, p.scale, p.half_steps, False
    )
    return rescaled(p, dual, mass)


def amortised(p: Problem, features: str, side: str, closures: int) -> Tensor:
    dual = predicted(p, features, side, p.half_steps - closures)
    return closed(p, dual, None, closures) if side == "source" else closed(p, None, dual, closures)


def softmax(problem: Problem) -> Tensor:
    return scaled_dot_product_attention(problem.q, problem.k, problem.v, scale=problem.scale)


def make_problem(options: argparse.Namespace) -> Problem:
    """Float64, seeded. Scores have standard deviation `spread`."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.batch, options.heads, options.tokens, options.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = q * options.spread**0.5, k * options.spread**0.5
    theta = torch.randn(32, shape[-1], generator=generator, dtype=torch.float64)
    theta = theta / theta.norm(dim=-1, keepdim=True)
    scale = shape[-1] ** -0.5
    scores = score_matrix(q, k, None, None, scale)
    source, _ = finite_duals(scores, options.half_steps - 3, "row", None)
    _, key = finite_duals(scores, options.half_steps - 2, "row", None)
    f, key_last = finite_duals(scores, options.half_steps, "row", None)
    plan = torch.exp(scores + f[..., :, None] + key_last[..., None, :])
    row_sums = plan.sum(-1) * options.tokens
    pivots = [
        coarse.parameter(clouds_of(SiteTensors(q, k), scale, side), 32, "", options.seed).double()
        for side in ("key", "source")
    ]
    tensors = (q, k, v, source, key, key_last, row_sums, theta, *pivots)
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    return Problem(*(t.to(device) for t in tensors), scale, options.half_steps)


def error(result: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, in float64."""
    return (result.double() - exact).abs().max().item()


def check_parity(problem: Problem, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Errors of every operator in both dtypes.  Raises SystemExit if one is not exact enough."""
    exact = usual_loop(problem)
    timed = problem.to(dtype)
    budget = 2 * error(usual_loop(timed), exact) + SLACK
    errors = {"usual loop": {"float64": 0.0, "timed": error(usual_loop(timed), exact)}}
    candidates: dict[str, Callable[[Problem], Tensor]] = {
        "lossless": lossless,
        "source, 3": lambda p: closed(p, p.source, None, 3),
        "key, 2": lambda p: closed(p, None, p.key, 2),
        "key, 1": lambda p: rescaled(p, p.key_last, p.row_sums),
    }
    for name, function in candidates.items():
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
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of scores")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="even if there is an accelerator")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.half_steps % 2 or options.half_steps < 4:
        parser.error("--half-steps must be even (columns last) and at least 4")

    with torch.no_grad():
        problem = make_problem(options)
        dtype = getattr(torch, options.dtype)
        errors = check_parity(problem, dtype)
        timed = problem.to(dtype)
        t, steps = timed, timed.half_steps
        functions: dict[str, Callable[[], Tensor]] = {
            "usual loop": lambda: usual_loop(t),
            "lossless": lambda: lossless(t),
            "source, 3 closures, sliced:32": lambda: amortised(t, SLICED, "source", 3),
            "source, 3 closures, coarse:32 gaussian": lambda: amortised(t, BOTH, "source", 3),
            "source, 3 closures, dual given": lambda: closed(t, t.source, None, 3),
            "source, 1 closure, dual given": lambda: closed(t, t.source, None, 1),
            "key, 2 closures, coarse:32": lambda: amortised(t, COARSE, "key", 2),
            "key, 2 closures, dual given": lambda: closed(t, None, t.key, 2),
            "key, 1 closure, coarse:32": lambda: key_closure(t),
            "key, 1 closure, dual given": lambda: closed(t, None, t.key_last, 1),
            "predict sliced:32": lambda: predicted(t, SLICED, "source", steps - 3),
            "predict coarse:32 gaussian": lambda: predicted(t, BOTH, "source", steps - 3),
            "predict coarse:32": lambda: predicted(t, COARSE, "key", steps),
            "softmax (SDPA)": lambda: softmax(t),
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
