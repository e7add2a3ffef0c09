"""A layer and a training step of it, in time and memory: every kind of attention at one length after the
other (ASAP, Tables C.2, C.3 and C.5).

    python benchmarks/training.py                    # B1 H8 D64, N = 512 to 8192, 32 slices
    python benchmarks/training.py --tokens 64 128 --repeats 2 -o FOLDER

Sinkhorn attention of S = 3, 10 and 20 half-steps, by the usual loop and by asapc; the one c-transform and
the three that stand for S = 20, prediction included; soft and exact sorts by slices; LOT with 32 pivots;
softmax. A step is the layer and the gradients of q, k and v.  Problems, parity and the usual loop are
those of benchmarks/attention.py: a length is timed only after the operators of S = 20 have reproduced the
loop, and the gradient of the lossless one, of 512 tokens at most, is at most twice as wrong as its own.

Candidates take turns; figures are medians. Extra memory is the peak of one call over what was held before
it, in a process of its own. A form whose dense matrices would take more than --max-memory is not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from attention import (
    BOTH,
    COARSE,
    SLACK,
    SOFTMAX,
    USUAL,
    Problem,
    Shape,
    amortised,
    check_parity,
    device_of,
    environment,
    error,
    extra_mib,
    key_c_transform,
    lossless,
    make_problem,
    softmax,
    usual_loop,
)
from esp import dense, hard, soft
from torch import Tensor
from written import parser_of, write_results

from asapc.measure.timing import interleaved_medians

BUDGETS = (3, 10, 20)
TEMPERATURE = 0.1  # of soft sorts
FEW = 64  # tokens of a call that warms a process up
GRADIENT_TOKENS = 512  # at which gradients are compared: the loop's own keep all its plans
Form = Callable[[Problem], Tensor]


def lot(p: Problem) -> Tensor:
    """Learnt pivots stand in by those that problems have; as many half-steps a plan as models.lot."""
    mass = torch.full(p.key_pivots.shape[:2], 1 / p.key_pivots.shape[1], device=p.q.device)
    plans = (p.scale, p.scale, 5, True, 5, True, [1.0, 1.0, 0.0, 0.0])
    return torch.ops.asapc.lot(p.q, p.k, p.v, None, None, None, p.key_pivots, mass, *plans)


def forms(slices: int) -> dict[str, tuple[Form, float, float]]:
    """By name: the layer, and how many N x M matrices of a head it holds, and a step of it."""

    def of(half_steps: int, form: Form) -> Form:
        return lambda p: form(replace(p, half_steps=half_steps))

    def sorted_by(sort: Callable[..., Tensor]) -> Form:
        return lambda p: sort(p.q[..., :slices], p.k[..., :slices], p.v, TEMPERATURE)

    loops = {f"{USUAL}, S = {s}": (of(s, usual_loop), 4.0, 4.0 + 2 * s) for s in BUDGETS}
    exact = {f"lossless, S = {s}": (of(s, lossless), 1.0, 2.0) for s in BUDGETS}
    return {
        **loops, **exact,
        "one c-transform, coarse:32": (lambda p: key_c_transform(p, COARSE, p.query_pivots), 1.0, 2.0),
        "three c-transforms, coarse:32 gaussian": (lambda p: amortised(p, BOTH, "source", 3), 1.0, 2.0),
        "ESP soft, dense": (sorted_by(dense), 5.0 * slices, 8.0 * slices),
        "ESP soft": (sorted_by(soft), 2.0, 2.0 * slices),
        "ESP exact": (sorted_by(hard), 0.0, 2.0 * slices),
        "LOT, 32 pivots": (lot, 0.0, 0.0),
        SOFTMAX: (softmax, 0.0, 1.0),
    }  # fmt: skip


def gradients(form: Form, p: Problem) -> tuple[Tensor, ...]:
    """Of q, k and v, for a gradient of v's numbers."""
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    with torch.enable_grad():
        out = form(replace(p, q=leaves[0], k=leaves[1], v=leaves[2]))
        found = torch.autograd.grad(out, leaves, p.v.to(out.dtype))
    return found


CALLS: Mapping[str, Callable[[Form, Problem], Any]] = {
    "layer": lambda form, p: form(p), "step": gradients,
}  # fmt: skip


def check_gradients(problem: Problem, dtype: torch.dtype) -> float:
    """The largest error of the lossless operator's.  Raises SystemExit where it is too large."""
    exact, timed = gradients(usual_loop, problem), problem.to(dtype)
    own, found = (
        max(error(x, y) for x, y in zip(gradients(form, timed), exact, strict=True))
        for form in (usual_loop, lossless)
    )
    budget = 2 * own + SLACK
    if not found <= budget:
        raise SystemExit(f"training.py: the gradient is off by {found:.2e}, {budget:.2e} allowed")
    return found


def made(shape: Shape, options: argparse.Namespace) -> Problem:
    dtype = getattr(torch, options.dtype)
    return make_problem(shape, dtype, device_of(options), 1.0, options.seed, False).to(dtype)


def memory_of(name: str, shape: Shape, options: argparse.Namespace) -> float | None:
    """MiB of a call of this name, "step of <form>" or "layer of <form>", in this process."""
    kind, _, form = name.partition(" of ")
    function = forms(options.slices)[form][0]
    for own in (replace(shape, tokens=FEW), shape):
        problem = made(own, options)
        extra = extra_mib(lambda p=problem: CALLS[kind](function, p), problem.q.device)
    return extra


def memory_elsewhere(name: str, shape: Shape, options: argparse.Namespace) -> float | None:
    """The same in a new process, where no earlier call has left memory behind; a GPU counts what it
    serves."""
    if device_of(options) != "cpu":
        return memory_of(name, shape, options)
    command = [sys.executable, *sys.argv, "--memory-of", name, "--tokens", str(shape.tokens)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    value: float | None = json.loads(found)
    return value


def measured(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of every form at one length.  Raises SystemExit where an operator is not exact."""
    dtype = getattr(torch, options.dtype)
    check = make_problem(shape.for_parity(), dtype, device_of(options), 1.0, options.seed, True)
    with torch.no_grad():
        errors = check_parity(check, dtype)
    few = replace(shape.for_parity(), tokens=min(GRADIENT_TOKENS, shape.tokens))
    check = make_problem(few, dtype, device_of(options), 1.0, options.seed, False)
    errors["gradients"] = {"timed": check_gradients(check, dtype)}
    problem, skipped = made(shape, options), {}
    entries = shape.batch * shape.heads * shape.tokens**2 * problem.q.element_size() / 2**30
    calls: dict[str, Callable[[], Any]] = {}
    for form, (function, *matrices) in forms(options.slices).items():
        for kind, count in zip(CALLS, matrices, strict=True):
            name = f"{kind} of {form}"
            if count * entries > options.max_memory:
                skipped[name] = f"not run: {count * entries:.1f} GiB"
            else:
                calls[name] = lambda kind=kind, function=function: CALLS[kind](function, problem)
    times = interleaved_medians(calls, repeats=options.repeats, warmup=1)
    rows = {
        name: {**row, "extra_mib": memory_elsewhere(name, shape, options)} for name, row in times.items()
    }
    return {
        "shape": asdict(shape), "dtype": options.dtype, "max_abs_error": errors, "rows": rows,
        "skipped": skipped,
    }  # fmt: skip


def table(result: dict[str, Any], slices: int) -> str:
    """Markdown, one length."""
    lines = [
        f"### {Shape(**result['shape'])}, {result['dtype']}, {slices} slices", "",
        "| | layer, ms | MiB | step, ms | MiB |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip

    def cells(name: str) -> str:
        row = result["rows"].get(name)
        if row is None:
            return f"{result['skipped'][name]} | "
        memory = "-" if row["extra_mib"] is None else f"{row['extra_mib']:.1f}"
        return f"{row['median_ms']:.2f} | {memory}"

    for form in forms(slices):
        lines.append(f"| {form} | {' | '.join(cells(f'{kind} of {form}') for kind in CALLS)} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(
        __doc__, batch=1, heads=8, head_dim=64, tokens=[512, 1024, 2048, 4096, 8192], repeats=7, seed=0,
    )  # fmt: skip
    parser.add_argument("--slices", type=int, default=32, help="axes of a head, at most its dimension")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-memory", type=float, default=4.0, help="GiB that dense matrices may take")
    parser.add_argument("--cpu", action="store_true", help="even if there is an accelerator")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # see memory_elsewhere
    options = parser.parse_args()
    shapes = [Shape(options.batch, options.heads, n, options.head_dim, 20) for n in options.tokens]
    if options.memory_of is not None:
        print(json.dumps(memory_of(options.memory_of, shapes[0], options)))
        return
    results: list[dict[str, Any]] = []
    for shape in shapes:
        results.append(measured(shape, options))
        print(table(results[-1], options.slices), "\n", flush=True)
        document = {"environment": environment(options.cpu), "slices": options.slices, "results": results}
        text = [f"`{json.dumps(document['environment'])}`", *(table(x, options.slices) for x in results)]
        head = "# A layer and a training step: time and memory"
        write_results(options.out, "training", document, "\n\n".join([head, *text]))


if __name__ == "__main__":
    sys.exit(main())
