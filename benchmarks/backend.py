"""Whole layers with a finite loop: eager, torch.compile, and torch.compile with backend="asapc".

    python benchmarks/backend.py --threads 2 -o benchmarks/results/cpu

Shapes are B H N D, half-steps and layers. Each is a projection, the loop, the product and a projection,
in evaluation. A row is printed only after parity; candidates take turns, and figures are medians in ms.
`first call` is what the backend takes to identify and compile, Inductor's own time included.
"""

from __future__ import annotations

import platform
import time
from typing import Any

import torch
from torch import Tensor, nn
from written import parser_of, write_results

import asapc
from asapc.measure.timing import interleaved_medians

SHAPES = "8 12 197 64 20 1; 4 8 512 32 20 1; 1 12 197 64 20 2; 16 8 65 32 10 2; 1 4 50 32 5 2"
PARITY = 1e-5


class Layer(nn.Module):
    def __init__(self, heads: int, dim: int, half_steps: int) -> None:
        super().__init__()
        self.heads, self.dim, self.half_steps = heads, dim, half_steps
        self.qkv, self.out = nn.Linear(heads * dim, 3 * heads * dim), nn.Linear(heads * dim, heads * dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        log_plan = q @ k.transpose(-1, -2) * self.dim**-0.5
        for step in range(self.half_steps):
            log_plan = log_plan - log_plan.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
        return x + self.out((log_plan.exp() @ v).transpose(1, 2).reshape(batch, tokens, -1))


def measured(shape: tuple[int, ...], repeats: int) -> dict[str, Any]:
    batch, heads, tokens, dim, half_steps, layers = shape
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(heads, dim, half_steps) for _ in range(layers))).eval()
    x = torch.randn(batch, tokens, heads * dim)
    forms = {
        "eager": model, "torch.compile": torch.compile(model),
        "asapc": torch.compile(model, backend="asapc"),
    }  # fmt: skip
    start = time.perf_counter()
    ours = forms["asapc"](x)
    first_call = time.perf_counter() - start
    theirs = model(x)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if not error <= PARITY:
        raise SystemExit(f"{shape}: asapc differs by {error:.1e}")
    times = interleaved_medians({name: lambda f=form: f(x) for name, form in forms.items()}, repeats, 1)
    replaced = sum(len(graph.sites) for graph in asapc.explain(model).graphs)
    row = {name: found["median_ms"] for name, found in times.items()}
    return {"shape": shape, "sites": replaced, "error": error, "first_call_s": first_call, **row}


def main() -> None:
    parser = parser_of(__doc__, shapes=SHAPES, threads=torch.get_num_threads(), repeats=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        f"{options.threads} threads, torch {torch.__version__}, {platform.machine()}; ms", "",
        "| B H N D T layers | eager | torch.compile | asapc | gain on compile | sites | first call, s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    rows = []
    for text in options.shapes.split(";"):
        with torch.no_grad():
            row = measured(tuple(map(int, text.split())), options.repeats)
        rows.append(row)
        lines.append(
            f"| {' '.join(map(str, row['shape']))} | {row['eager']:.2f} | {row['torch.compile']:.2f} | "
            f"{row['asapc']:.2f} | {row['torch.compile'] / row['asapc']:.1f} | {row['sites']} | "
            f"{row['first_call_s']:.0f} |"
        )
        print(lines[-1], flush=True)
    write_results(options.out, "backend", rows, "\n".join(lines))


if __name__ == "__main__":
    main()
