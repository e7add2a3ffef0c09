"""Sinkhorn attention in a window, over the number of tokens: a dense loop, asapc's dense operators, ours.

    python benchmarks/banded.py                                  # B1 H4 D64 W129 T10, N = 512 .. 4096
    python benchmarks/banded.py --tokens 1024 8192 --window 257 --half-steps 21 -o FOLDER
    python benchmarks/banded.py --backward --heads 1 --head-dim 8 --window 33 --half-steps 8

The teacher hides its scores outside the window and runs its log-domain loop on all of them, as it is and
under torch.compile, fixed to each length; `plan` is given those scores; `sinkhorn` has no window and
computes another map: what the loop costs on all keys.
Speed is printed only after parity: in float64 the operator must reproduce the teacher, and in the timed
dtype it may be at most twice as wrong as the teacher is. Candidates take turns; figures are medians. What
would take longer than --max-seconds a call, by the time it took at the last shorter length, is left out
and said so. With --backward a call is the gradient of mean(out^2) for q, k and v, forward included, and
its peak memory stands beside it.

With -o, banded.json or banded_backward.json is written there.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from attention import environment, error
from torch import Tensor
from written import parser_of

import asapc.kernels.library  # noqa: F401 -- registers torch.ops.asapc
from asapc.measure.timing import extra_bytes, interleaved_medians

EXACT = 1e-9
SLACK = 1e-6
PARITY_TOKENS = 1024

TEACHER, COMPILED = "teacher's loop", "torch.compile of it"
PLAN, DENSE, OURS = "plan", "sinkhorn, all keys", "banded_sinkhorn"
UNIT = [1.0, 1.0, 0.0, 0.0]  # rows sum to 1


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    tokens: int
    head_dim: int
    window: int
    half_steps: int

    def __str__(self) -> str:
        return (
            f"B{self.batch} H{self.heads} N{self.tokens} D{self.head_dim} W{self.window} "
            f"T{self.half_steps}"
        )


@dataclass(frozen=True)
class Problem:
    """q, k, v: [B, H, N, D]; the window is as wide on either side."""

    q: Tensor
    k: Tensor
    v: Tensor
    shape: Shape

    @property
    def side(self) -> int:
        return self.shape.window // 2

    @property
    def multiplier(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def to(self, dtype: torch.dtype) -> Problem:
        return Problem(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.shape)

    def scores(self) -> Tensor:
        """[B, H, N, N], hidden outside the window."""
        i = torch.arange(self.shape.tokens)
        outside = (i[None, :] - i[:, None]).abs() > self.side
        scores = self.q @ self.k.transpose(-1, -2) * self.multiplier
        return scores.masked_fill(outside, -1e9)


def make_problem(shape: Shape, dtype: torch.dtype, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    return Problem(q, k, v, shape).to(dtype)


def teacher(p: Problem) -> Tensor:
    scores = p.scores()
    f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
    log_mass = -math.log(p.shape.tokens)
    for step in range(p.shape.half_steps):
        if step % 2 == 0:
            f = log_mass - torch.logsumexp(scores + g[..., None, :], -1)
        else:
            g = log_mass - torch.logsumexp(scores + f[..., None], -2)
    return torch.exp(scores + f[..., None] + g[..., None, :]) * p.shape.tokens @ p.v


def plan(p: Problem) -> Tensor:
    attention: Tensor = torch.ops.asapc.plan(p.scores(), None, None, 1.0, p.shape.half_steps, True, UNIT)
    return attention @ p.v


def dense(p: Problem) -> Tensor:
    found: Tensor = torch.ops.asapc.sinkhorn(
        p.q, p.k, p.v, None, None, p.multiplier, p.shape.half_steps, True, UNIT
    )
    return found


def ours(p: Problem) -> Tensor:
    found: Tensor = torch.ops.asapc.banded_sinkhorn(
        p.q, p.k, p.v, None, p.multiplier, p.shape.half_steps, True, UNIT, -p.side, p.side
    )
    return found


CANDIDATES: dict[str, Callable[[Problem], Tensor]] = {
    TEACHER: teacher, COMPILED: torch.compile(teacher, dynamic=False), PLAN: plan, DENSE: dense,
    OURS: ours,
}  # fmt: skip


def backward(function: Callable[[Problem], Tensor], problem: Problem) -> tuple[Tensor, ...]:
    """The gradients of mean(out^2)."""
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    return torch.autograd.grad(function(replace(problem, q=q, k=k, v=v)).square().mean(), (q, k, v))


def check_parity(shape: Shape, dtype: torch.dtype, seed: int) -> dict[str, float]:
    """Largest errors.  Raises SystemExit if the operator is not exact enough."""
    shape = replace(shape, tokens=min(shape.tokens, PARITY_TOKENS), heads=min(shape.heads, 2))
    timed = make_problem(shape, dtype, seed)
    exact = teacher(timed.to(torch.float64))
    found = {
        "float64": error(ours(timed.to(torch.float64)), exact),
        "timed": error(ours(timed), exact),
        "teacher": error(teacher(timed), exact),
    }
    budget = 2 * found["teacher"] + SLACK
    if not (found["float64"] <= EXACT and found["timed"] <= budget):
        raise SystemExit(
            f"banded.py: the operator does not reproduce the teacher: max error {found['float64']:.2e} "
            f"in float64 (allowed {EXACT:g}), {found['timed']:.2e} in {dtype} (allowed {budget:.2e})"
        )
    return found


def measure(
    shape: Shape, options: argparse.Namespace, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Errors and times of every candidate at one length.  before: the same, one shorter."""
    dtype = getattr(torch, options.dtype)
    errors = check_parity(shape, dtype, options.seed)
    problem = make_problem(shape, dtype, options.seed)
    kept, skipped = {}, {}
    for name, function in CANDIDATES.items():
        expected = _expected_seconds(name, shape, before)
        if expected is None or expected > options.max_seconds:
            skipped[name] = "too slow" if expected is None else f"about {expected:.0f} s a call"
        else:
            call = partial(backward, function) if options.backward else function
            kept[name] = partial(call, problem)
    times = interleaved_medians(kept, repeats=options.repeats, warmup=1)
    if options.backward:
        for name, call in kept.items():
            times[name]["peak_bytes"] = extra_bytes(call)
    return {"shape": asdict(shape), "max_abs_error": errors, "rows": times, "skipped": skipped}


def _expected_seconds(name: str, shape: Shape, before: dict[str, Any] | None) -> float | None:
    """A guess from the last length, None if it was left out there already."""
    if before is None:
        return 0.0
    row = before["rows"].get(name)
    if row is None:
        return None
    grown = shape.tokens / before["shape"]["tokens"]
    return float(row["median_ms"]) / 1e3 * grown ** (1 if name == OURS else 2)


def table(shape: Shape, found: dict[str, Any]) -> str:
    errors = found["max_abs_error"]
    lines = [f"{shape}: parity {errors['timed']:.1e}, the teacher itself {errors['teacher']:.1e}"]
    best = found["rows"][OURS]["median_ms"]
    for name, row in found["rows"].items():
        memory = f"  {row['peak_bytes'] / 2**20:8.1f} MiB" if row.get("peak_bytes") is not None else ""
        lines.append(f"  {name:20} {row['median_ms']:10.2f} ms  {row['median_ms'] / best:7.2f}x{memory}")
    lines += [f"  {name:20} left out: {why}" for name, why in found["skipped"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(
        __doc__, batch=1, heads=4, tokens=[512, 1024, 2048, 4096], head_dim=64, window=129,
        half_steps=10, repeats=5, max_seconds=20.0, seed=0,
    )  # fmt: skip
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--backward", action="store_true")
    options = parser.parse_args()
    if options.window % 2 == 0:
        parser.error("--window is a query and as many keys on either side: an odd number")
    results: list[dict[str, Any]] = []
    for tokens in sorted(options.tokens):
        shape = Shape(
            options.batch, options.heads, tokens, options.head_dim, options.window, options.half_steps
        )
        results.append(measure(shape, options, results[-1] if results else None))
        print(table(shape, results[-1]), flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        document = {"environment": environment(cpu=True), "results": results}
        name = "banded_backward.json" if options.backward else "banded.json"
        (options.out / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
