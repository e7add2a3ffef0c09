"""ESP attention alone: dense published-style code, eager and compiled, soft and exact sorts, softmax.

    python benchmarks/esp.py                       # B1 H4 D32, L = 32 axis-aligned slices
    python benchmarks/esp.py --tokens 256 --temperature 0.1 -o FOLDER

Speed is printed only after parity: in float64 the soft operator must reproduce the published-style
code, and the exact one that code with permutation matrices, at a length where each runs the kernel of
long heads. Candidates take turns; figures are medians. A step is a call and the gradients of q, k and
v. At a low SoftSort temperature, 0.001 in the released code, most entries of the dense matrices fall out
of the normal range of float32, where processors are slow; the kernels leave them out.
Extra memory is the peak of one call over what was held before it, output included, in a process of its
own. With -o, esp.json and esp.md are written there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from attention import device_of, environment, error, extra_mib
from torch import Tensor
from torch.nn.functional import one_hot, scaled_dot_product_attention
from written import parser_of, write_results

import asapc.kernels.library  # noqa: F401 -- registers torch.ops.asapc
from asapc.measure.timing import interleaved_medians
from asapc.models.esp import soft_sort

EXACT = 1e-9
TAU = 0.1
PARITY_TOKENS = 400

DENSE, COMPILED = "dense soft, published style", "torch.compile of it"
SOFT, HARD, SOFTMAX = "esp_soft", "esp_hard", "softmax (SDPA)"
Points = tuple[Tensor, Tensor, Tensor]


def mixed(q: Tensor, k: Tensor, v: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Every slice's plan at once, weighed by its cost.  first, second: sorts [B, H, L, N, N]."""
    plans = torch.matmul(first.transpose(-1, -2), second)
    totals = (torch.cdist(q, k).unsqueeze(2) * plans).sum((-1, -2))
    weights = torch.softmax(-TAU * totals, dim=-1)
    return (weights[..., None, None] * plans).sum(2) @ v


def dense(q: Tensor, k: Tensor, v: Tensor, temperature: float) -> Tensor:
    first, second = (soft_sort(p.transpose(-1, -2), temperature) for p in (q, k))
    return mixed(q, k, v, first, second)


def permuted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What exact sorting means: permutation matrices."""
    first, second = (
        one_hot(p.transpose(-1, -2).argsort(dim=-1, descending=True, stable=True)).to(p.dtype)
        for p in (q, k)
    )
    return mixed(q, k, v, first, second)


def soft(q: Tensor, k: Tensor, v: Tensor, temperature: float) -> Tensor:
    tau = torch.full((1,), TAU, dtype=torch.float64, device=q.device)
    return torch.ops.asapc.esp_soft(
        q, k, v, None, None, None, tau, temperature, False, False, 1.0
    )  # fmt: skip


def hard(q: Tensor, k: Tensor, v: Tensor, _temperature: float) -> Tensor:
    tau = torch.full((1,), TAU, dtype=torch.float64, device=q.device)
    return torch.ops.asapc.esp_hard(q, k, v, None, None, None, tau, False, False, 1.0)


def softmax(q: Tensor, k: Tensor, v: Tensor, _temperature: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


CANDIDATES: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    DENSE: dense, COMPILED: torch.compile(dense), SOFT: soft, HARD: hard, SOFTMAX: softmax,
}  # fmt: skip


def points(options: argparse.Namespace, tokens: int, dtype: torch.dtype) -> Points:
    """Seeded normal q, k, v [B, H, N, D]."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.batch, options.heads, tokens, options.head_dim)
    device = device_of(options)
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    return q, k, v


def check_parity(options: argparse.Namespace, tokens: int, temperature: float) -> dict[str, float]:
    """Largest errors in float64, of one head.  Raises SystemExit if an operator is not exact enough."""
    tokens = min(tokens, PARITY_TOKENS)
    own = [t[:1, :1] for t in points(options, tokens, torch.float64)]
    found = {
        SOFT: error(soft(*own, temperature), dense(*own, temperature)),
        HARD: error(hard(*own, temperature), permuted(*own)),
    }
    for name, value in found.items():
        if not value <= EXACT:
            raise SystemExit(f"esp.py: {name} is off by {value:.2e} in float64 (allowed {EXACT:g})")
    return found


def step(function: Callable[..., Tensor], own: Points, temperature: float) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, for v as that of the output."""
    leaves = [x.detach().requires_grad_() for x in own]
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves, temperature), leaves, own[2])


def memory_elsewhere(name: str, tokens: int, temperature: float) -> float | None:
    """extra_mib of one candidate in a new process, where no earlier call has left memory behind."""
    command = [sys.executable, *sys.argv, "--memory-of", name, "--temperature", str(temperature),
               "--tokens", str(tokens)]  # fmt: skip
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    value: float | None = json.loads(found)
    return value


def memory_of(name: str, options: argparse.Namespace) -> float | None:
    function, temperature = CANDIDATES[name], options.temperature[0]
    for tokens in (16, options.tokens[0]):  # once on a few tokens, for what every process holds
        own = points(options, tokens, torch.float32)
        extra = extra_mib(lambda own=own: function(*own, temperature), own[0].device)  # type: ignore[misc]
    return extra


def measure(options: argparse.Namespace, tokens: int, temperature: float) -> dict[str, Any]:
    errors = check_parity(options, tokens, temperature)
    own = points(options, tokens, torch.float32)
    calls = {
        name: lambda function=function: function(*own, temperature)  # type: ignore[misc]
        for name, function in CANDIDATES.items()
    }
    steps = {
        name: lambda function=function: step(function, own, temperature)  # type: ignore[misc]
        for name, function in CANDIDATES.items()
    }
    times, of_steps = (
        interleaved_medians(some, repeats=options.repeats, warmup=1) for some in (calls, steps)
    )
    rows = {
        name: {**found, "step_ms": of_steps[name]["median_ms"],
               "extra_mib": memory_elsewhere(name, tokens, temperature)}
        for name, found in times.items()
    }  # fmt: skip
    shape = {"B": options.batch, "H": options.heads, "N": tokens, "D": options.head_dim}
    return {
        "shape": shape, "softsort_temperature": temperature, "max_abs_error_float64": errors,
        "rows": rows,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    rows, shape = result["rows"], result["shape"]
    title = " ".join(f"{key}{value}" for key, value in shape.items())
    lines = [
        f"### ESP, {title}, L = D axis-aligned slices, SoftSort temperature "
        f"{result['softsort_temperature']:g}, float32, {torch.get_num_threads()} threads",
        "",
        "| | median ms | dense / this | step ms | dense / this | extra MiB | of dense |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    first = rows[DENSE]
    for name, row in rows.items():
        memory, own = row["extra_mib"], first["extra_mib"]
        known = memory is not None and own
        lines.append(
            f"| {name} | {row['median_ms']:.2f} | {first['median_ms'] / row['median_ms']:.1f}x | "
            f"{row['step_ms']:.2f} | {first['step_ms'] / row['step_ms']:.1f}x | "
            + (f"{memory:.1f} | {memory / own:.2%} |" if known else "- | - |")
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(
        __doc__, batch=1, heads=4, tokens=[65, 197, 1024], head_dim=32, temperature=[0.1, 0.001],
        repeats=5, seed=0,
    )  # fmt: skip
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # see memory_elsewhere
    options = parser.parse_args()
    results = []
    with torch.no_grad():
        if options.memory_of is not None:
            print(json.dumps(memory_of(options.memory_of, options)))
            return
        for tokens, temperature in product(options.tokens, options.temperature):
            results.append(measure(options, tokens, temperature))
            print(table(results[-1]), "\n", flush=True)
    document = {"environment": environment(cpu=device_of(options) == "cpu"), "results": results}
    write_results(options.out, "esp", document, "\n\n".join(map(table, results)))


if __name__ == "__main__":
    main()
