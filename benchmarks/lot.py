"""LOT attention alone, over the number of tokens: published-style code, asapc's operator, softmax.

    python benchmarks/lot.py                                # B1 H8 D64 R32 T5, N = 1k .. 131k
    python benchmarks/lot.py --tokens 1024 4096 --pivots 16 --half-steps 10 -o FOLDER

Speed is printed only after parity: in float64 the operator must reproduce the published-style code, and
in the timed dtype it may be at most twice as wrong as that code is. Candidates take turns; figures are
medians. Extra memory is the peak of one call over what was held before it, output included, the first
call at this size in a process of its own. What would take longer than --max-seconds a call, by the time
it took at the last shorter length, is left out and said so. The ratio of times at 16384 and 4096 tokens
(4 is linear) is measured with those two taking turns.

With -o, lot.json and lot.md are written there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from attention import device_of, environment, error, extra_mib
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from written import parser_of, write_results

import asapc.kernels.library  # noqa: F401 -- registers torch.ops.asapc
from asapc.measure.timing import interleaved_medians
from asapc.models.lot import finite_plan

EXACT = 1e-9
SLACK = 1e-6
PARITY_TOKENS = 4096
SCALING = (4096, 16384)

PUBLISHED = "published style"
OURS = "lot"
SOFTMAX = "softmax (SDPA)"


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    tokens: int
    head_dim: int
    pivots: int
    half_steps: int

    def __str__(self) -> str:
        return (
            f"B{self.batch} H{self.heads} N{self.tokens} D{self.head_dim} R{self.pivots} "
            f"T{self.half_steps}"
        )


@dataclass(frozen=True)
class Problem:
    """q, k, v: [B, H, N, D]; pivots: [H, R, D]; mass: [H, R]."""

    q: Tensor
    k: Tensor
    v: Tensor
    pivots: Tensor
    mass: Tensor
    half_steps: int

    def to(self, dtype: torch.dtype) -> Problem:
        values = (getattr(self, item.name) for item in fields(self))
        return Problem(*(x.to(dtype) if isinstance(x, Tensor) else x for x in values))


def make_problem(shape: Shape, dtype: torch.dtype, seed: int, device: str) -> Problem:
    """Seeded normal tokens and pivots; scores have standard deviation 1."""
    generator = torch.Generator().manual_seed(seed)
    points = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    q, k, v = (torch.randn(points, generator=generator) for _ in range(3))
    pivots = torch.randn(shape.heads, shape.pivots, shape.head_dim, generator=generator)
    mass = torch.softmax(torch.randn(shape.heads, shape.pivots, generator=generator), -1)
    tensors = (x.to(device, dtype) for x in (q, k, v, pivots, mass))
    return Problem(*tensors, shape.half_steps)


def published(p: Problem) -> Tensor:
    """Two loops in the log domain, a fresh N x R matrix every half-step; both plans formed."""
    n, scale = p.q.shape[2], p.q.shape[3] ** -0.5
    log_mu = torch.full_like(p.q[..., 0], 1.0 / n).log()
    log_sigma = p.mass.log()
    start = torch.zeros_like(log_sigma)
    first = finite_plan(
        p.q @ p.pivots.transpose(-1, -2) * scale, log_mu, log_sigma, start, p.half_steps
    )
    second = finite_plan(
        p.pivots @ p.k.transpose(-1, -2) * scale, log_sigma, log_mu, torch.zeros_like(log_mu),
        p.half_steps,
    )  # fmt: skip
    return n * (first @ ((second @ p.v) / p.mass.unsqueeze(-1)))


def ours(p: Problem) -> Tensor:
    scale = p.q.shape[3] ** -0.5
    return torch.ops.asapc.lot(
        p.q, p.k, p.v, None, None, None, p.pivots, p.mass, scale, scale, p.half_steps, True,
        p.half_steps, False, [1.0, 1.0, 0.0, 0.0],
    )  # fmt: skip


def softmax(p: Problem) -> Tensor:
    return scaled_dot_product_attention(p.q, p.k, p.v)


CANDIDATES: dict[str, Callable[[Problem], Tensor]] = {
    PUBLISHED: published,
    OURS: ours,
    SOFTMAX: softmax,
}


def check_parity(shape: Shape, dtype: torch.dtype, seed: int, device: str) -> dict[str, float]:
    """Largest errors.  Raises SystemExit if the operator is not exact enough."""
    shape = Shape(**{**asdict(shape), "tokens": min(shape.tokens, PARITY_TOKENS)})
    timed = make_problem(shape, dtype, seed, device)
    exact = published(timed.to(torch.float64))
    found = {
        "float64": error(ours(timed.to(torch.float64)), exact),
        "timed": error(ours(timed), exact),
        "published": error(published(timed), exact),
    }
    budget = 2 * found["published"] + SLACK
    if not (found["float64"] <= EXACT and found["timed"] <= budget):
        raise SystemExit(
            f"lot.py: the operator does not reproduce the published-style code: max error "
            f"{found['float64']:.2e} in float64 (allowed {EXACT:g}), {found['timed']:.2e} in {dtype} "
            f"(allowed {budget:.2e})"
        )
    return found


def memory_of(name: str, shape: Shape, options: argparse.Namespace) -> float | None:
    """extra_mib of one candidate in this process, which has run it on a few tokens only."""
    for tokens in (64, shape.tokens):
        own = Shape(**{**asdict(shape), "tokens": tokens})
        problem = make_problem(own, getattr(torch, options.dtype), options.seed, device_of(options))
        extra = extra_mib(lambda p=problem: CANDIDATES[name](p), problem.q.device)  # type: ignore[misc]
    return extra


def memory_elsewhere(name: str, shape: Shape, options: argparse.Namespace) -> float | None:
    """memory_of in a new process: an allocator serves a later call, unseen, from what is free."""
    command = [
        sys.executable, __file__, "--batch", str(shape.batch), "--heads", str(shape.heads),
        "--tokens", str(shape.tokens), "--head-dim", str(shape.head_dim),
        "--pivots", str(shape.pivots), "--half-steps", str(shape.half_steps),
        "--dtype", options.dtype, "--seed", str(options.seed), "--memory-of", name,
        *(["--cpu"] if options.cpu else []),
    ]  # fmt: skip
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    value: float | None = json.loads(found)
    return value


def measure(
    shape: Shape, options: argparse.Namespace, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Errors, times and memory of every candidate at one length.  before: the same, one shorter."""
    dtype = getattr(torch, options.dtype)
    device = device_of(options)
    errors = check_parity(shape, dtype, options.seed, device)
    problem = make_problem(shape, dtype, options.seed, device)
    kept, skipped = {}, {}
    for name, function in CANDIDATES.items():
        expected = _expected_seconds(name, shape, before)
        if expected is None or expected > options.max_seconds:
            skipped[name] = "too slow" if expected is None else f"about {expected:.0f} s a call"
        else:
            kept[name] = lambda own=function: own(problem)  # type: ignore[misc]
    times = interleaved_medians(kept, repeats=options.repeats, warmup=1)
    rows = {
        name: {**found, "extra_mib": memory_elsewhere(name, shape, options)}
        for name, found in times.items()
    }
    return {"shape": asdict(shape), "max_abs_error": errors, "rows": rows, "skipped": skipped}


def _expected_seconds(name: str, shape: Shape, before: dict[str, Any] | None) -> float | None:
    """A guess from the last length, None if it was left out there already."""
    if before is None:
        return 0.0
    row = before["rows"].get(name)
    if row is None:
        return None
    grown = shape.tokens / before["shape"]["tokens"]
    return float(row["median_ms"]) / 1e3 * grown ** (2 if name == SOFTMAX else 1)


def scaling(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Times of the operator at the two lengths of SCALING, taking turns."""
    functions: dict[str, Callable[[], Tensor]] = {}
    for tokens in SCALING:
        own = Shape(**{**asdict(shape), "tokens": tokens})
        problem = make_problem(own, getattr(torch, options.dtype), options.seed, device_of(options))
        functions[str(tokens)] = lambda p=problem: ours(p)  # type: ignore[misc]
    times = interleaved_medians(functions, repeats=3 * options.repeats, warmup=2)
    short, long = (times[str(tokens)]["median_ms"] for tokens in SCALING)
    return {"times": times, "ratio": long / short}


def table(document: dict[str, Any]) -> str:
    """Markdown of all lengths."""
    results = document["results"]
    shape = Shape(**results[0]["shape"])
    title = str(shape).replace(f" N{shape.tokens}", "")
    worst = max(result["max_abs_error"]["timed"] for result in results)
    own = max(result["max_abs_error"]["published"] for result in results)
    exact = max(result["max_abs_error"]["float64"] for result in results)
    lines = [
        f"### LOT, {title}, {document['dtype']}, {document['environment']['threads']} threads",
        "",
        f"Parity: max error {exact:.1e} in float64, {worst:.1e} in {document['dtype']} (published-style "
        f"code itself: {own:.1e}).",
        "",
        "| N | " + " | ".join(f"{name} ms (MiB)" for name in CANDIDATES)
        + " | published / lot | softmax / lot |",
        "|---:|" + "---:|" * (len(CANDIDATES) + 2),
    ]  # fmt: skip
    for result in results:
        rows, cells = result["rows"], []
        for name in CANDIDATES:
            row = rows.get(name)
            if row is None:
                cells.append(f"not run: {result['skipped'][name]}")
            else:
                memory = "" if row["extra_mib"] is None else f" ({row['extra_mib']:.0f})"
                cells.append(f"{row['median_ms']:.1f}{memory}")
        for name in (PUBLISHED, SOFTMAX):
            there = name in rows and OURS in rows
            cells.append(
                f"{rows[name]['median_ms'] / rows[OURS]['median_ms']:.1f}x" if there else "-"
            )
        lines.append(f"| {result['shape']['tokens']} | " + " | ".join(cells) + " |")
    short, long = SCALING
    lines += ["", f"Time of lot at {long} over {short} tokens: {document['scaling']['ratio']:.2f}."]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(
        __doc__, batch=1, heads=8, tokens=[1024 << i for i in range(8)], head_dim=64, pivots=32,
        half_steps=5, repeats=7, seed=0,
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    parser.add_argument("--max-seconds", type=float, default=10.0, help="a call may take")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # see memory_elsewhere
    options = parser.parse_args()

    def shape(tokens: int) -> Shape:
        return Shape(
            options.batch, options.heads, tokens, options.head_dim, options.pivots, options.half_steps
        )

    with torch.no_grad():
        if options.memory_of is not None:
            print(json.dumps(memory_of(options.memory_of, shape(options.tokens[0]), options)))
            return
        results: list[dict[str, Any]] = []
        for tokens in sorted(options.tokens):
            results.append(measure(shape(tokens), options, results[-1] if results else None))
            print(f"lot.py: {shape(tokens)} done", file=sys.stderr, flush=True)
        document = {
            "environment": environment(cpu=device_of(options) == "cpu"),
            "dtype": options.dtype,
            "results": results,
            "scaling": scaling(shape(0), options),
        }
    print(table(document))
    write_results(options.out, "lot", document, table(document))


if __name__ == "__main__":
    main()
