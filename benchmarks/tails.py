"""Gradients of the finite loop: tails against full back-propagation, and what each costs.

    python benchmarks/tails.py                        # two minutes on two cores
    python benchmarks/tails.py -o benchmarks/results/cpu

Gaps: the block-wise paper's setting (Section 3.1: L = 512, d = 8, T = 15 stopped iterations of two
half-steps, then R refined ones, three seeds, the worst entry of dQ, dK and dV), in float64, for the loss
mean(out^2), which the paper does not state.  Sharpness: the same with scores times s; gaps are relative,
|g_tail - g| / |g| over dQ and dK, and a certified tail of tolerance 1e-3 says how long it was.
Certificates: Proposition 5 on the paper's Table 2 (L = 128): what a tail of R iterations leaves out of
the scores' gradient, c_R = D_x z_T' eta_R, beside the bound on its L1 norm that a certified tail stops
by, both as parts of the slopes of the plan with fixed scalings; and how far full - stopped - c_R is from
0.
Cost: time and peak memory of one gradient with respect to q, k and v, forward included: back-propagation
through the loop, the kernel's whole gradient, a tail of four half-steps and a certified one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention import environment
from torch import Tensor
from written import parser_of, write_results

import asapc.kernels.library
from asapc.kernels.library.gradients import depths
from asapc.measure.timing import extra_bytes, interleaved_medians
from asapc.operators.c_transforms import log_marginals
from asapc.operators.sinkhorn import alternate, attention_map, initial_duals
from asapc.operators.sinkhorn import sinkhorn as loop

assert asapc.kernels.library
LENGTH, DIM, STOPPED = 512, 8, 15
SHORT = 128  # of the paper's Table 2, whose selector takes the first R with max |c_R| <= SELECTED
SELECTED = 1e-5
REFINED = (0, 1, 2, 4)
PAPER = {0: 1.49e-4, 1: 1.63e-5, 2: 1.42e-5, 4: 1.42e-5}
SHARPNESS = (1.0, 2.0, 4.0, 8.0, 16.0)
TOLERANCE = 1e-3
SHAPES = ((1, 1, 1536, 64, 20), (8, 8, 256, 32, 20), (32, 4, 64, 32, 20))
WAYS = ("back-propagation", "whole gradient", "tail of 4", "certified")


def points(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def gradients(
    function: Callable[..., Tensor], given: list[Tensor], scale: float, half_steps: int, *tail: Any
) -> list[Tensor]:
    """Of mean(out^2) with respect to q, k and v; rows of the plan sum to 1."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = function(*leaves, None, None, scale, half_steps, True, [1.0, 1.0, 0.0, 0.0], *tail)
    return list(torch.autograd.grad(out.square().mean(), leaves))


def operator(*arguments: Any) -> Tensor:
    found: Tensor = torch.ops.asapc.sinkhorn(*arguments)
    return found


def gaps(seeds: int) -> list[dict[str, float]]:
    rows = []
    for refined in REFINED:
        worst, half_steps = 0.0, 2 * (STOPPED + refined)
        for seed in range(seeds):
            given = points(seed, 1, 1, LENGTH, DIM)
            full = gradients(loop, given, DIM**-0.5, half_steps)
            own = gradients(operator, given, DIM**-0.5, half_steps, 2 * refined)
            worst = max(worst, *(float((x - y).abs().max()) for x, y in zip(full, own, strict=True)))
        rows.append({"refined": refined, "gap": worst, "paper": PAPER[refined]})
    return rows


def sharpness(seeds: int) -> list[dict[str, Any]]:
    """By R iterations after the 15, and for the tail that is certified on the loop of 15 + 4."""
    rows = []
    for sharp in SHARPNESS:
        row: dict[str, Any] = {"sharpness": sharp}
        tails = {f"R = {refined}": (2 * (STOPPED + refined), 2 * refined, 0.0) for refined in REFINED}
        tails["certified"] = (2 * (STOPPED + 4), None, TOLERANCE)
        for name, (half_steps, tail, tolerance) in tails.items():
            worst = 0.0
            with depths() as passed:
                for seed in range(seeds):
                    given = points(seed, 1, 1, LENGTH, DIM)
                    scale = sharp * DIM**-0.5
                    own = gradients(operator, given, scale, half_steps, tail, tolerance)
                    full = gradients(loop, given, scale, half_steps)
                    worst = max(worst, _relative(own[:2], full[:2]))
            row[name] = worst
            if tail is None:
                row["half-steps"] = max(int(depth.max()) for depth in passed)
        rows.append(row)
    return rows


def certificates(seeds: int) -> list[dict[str, float]]:
    """The largest of all seeds, by sharpness and R."""
    rows = []
    for sharp, refined in itertools.product((1.0, 4.0), REFINED):
        cases = [_certificate(seed, sharp, refined) for seed in range(seeds)]
        worst = {name: max(case[name] for case in cases) for name in cases[0]}
        rows.append({"sharpness": sharp, "refined": refined, **worst})
    return rows


def _certificate(seed: int, sharp: float, refined: int) -> dict[str, float]:
    q, k, v = points(seed, 1, 1, SHORT, DIM)
    base = (q @ k.mT * sharp * DIM**-0.5).requires_grad_()
    tail = base.detach().requires_grad_()
    masses = log_marginals(SHORT, SHORT, None, base)
    end = alternate(base, *initial_duals(base, None), 2 * STOPPED, "row", *masses)

    def loss(scores: Tensor, start: Sequence[Tensor]) -> Tensor:
        duals = alternate(scores, *start, 2 * refined, "row", *masses)
        return (attention_map(scores, *duals, [1.0, 1.0, 0.0, 0.0], None) @ v).square().mean()

    (full,) = torch.autograd.grad(loss(base, end), base, retain_graph=True)
    start = [dual.detach().requires_grad_() for dual in end]
    of_tail = torch.autograd.grad(loss(tail, start), (tail, *start), allow_unused=True)
    stopped, *eta = (torch.zeros_like(x) if y is None else y
                     for x, y in zip((tail, *start), of_tail, strict=True))  # fmt: skip
    (omitted,) = torch.autograd.grad(end, base, eta)
    fixed = [dual.detach() for dual in alternate(base, *start, 2 * refined, "row", *masses)]
    plan = attention_map(tail.detach(), *fixed, [1.0, 1.0, 0.0, 0.0], None)
    out = plan @ v
    products = (2 * out / out.numel()) @ v.mT
    mean = (plan * products).sum(-1, keepdim=True) / plan.sum(-1, keepdim=True)
    slopes = float((plan * (products - mean)).abs().sum())
    exact = float(omitted.abs().sum())
    bound = 2 * STOPPED * sum(float(x.abs().sum()) for x in eta)
    return {
        "largest": float(omitted.abs().max()), "exact": exact / slopes, "bound": bound / slopes,
        "residual": float((full - stopped - omitted).abs().max()),
    }  # fmt: skip


def _relative(own: list[Tensor], full: list[Tensor]) -> float:
    error = sum(float((x - y).square().sum()) for x, y in zip(own, full, strict=True))
    return float((error / sum(float(y.square().sum()) for y in full)) ** 0.5)


def call_of(way: str, shape: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    batch, heads, tokens, dim, half_steps = shape
    given = points(0, batch, heads, tokens, dim, dtype=torch.float32)
    function, tail = {
        "back-propagation": (loop, ()),
        "whole gradient": (operator, ()),
        "tail of 4": (operator, (4,)),
        "certified": (operator, (None, TOLERANCE)),
    }[way]  # fmt: skip
    return lambda: gradients(function, given, dim**-0.5, half_steps, *tail)


def costs(repeats: int) -> list[dict[str, Any]]:
    """Times in one run, the ways in turn; the peak of each in a process of its own.

    Raises SystemExit where the kernel's gradient is not that of the loop.
    """
    rows = []
    for shape in SHAPES:
        calls = {way: call_of(way, shape) for way in WAYS}
        exact = _exact(shape)
        own, usual = (_relative(calls[way](), exact) for way in ("whole gradient", "back-propagation"))
        if own > 4 * usual + 1e-6:
            raise SystemExit(f"{shape}: the gradient is {own:.2g} off, back-propagation {usual:.2g}")
        times = interleaved_medians(calls, repeats=repeats)
        rows.append(
            {
                "shape": list(shape),
                "error": {"whole gradient": own, "back-propagation": usual},
                "ms": {way: times[way]["median_ms"] for way in WAYS},
                "mib": {way: _peak(way, shape) for way in WAYS},
            }
        )
    return rows


def _exact(shape: tuple[int, ...]) -> list[Tensor]:
    batch, heads, tokens, dim, half_steps = shape
    given = [x.double() for x in points(0, batch, heads, tokens, dim, dtype=torch.float32)]
    return gradients(loop, given, dim**-0.5, half_steps)


def _peak(way: str, shape: tuple[int, ...]) -> float:
    command = [sys.executable, __file__, "--peak", json.dumps([way, list(shape)])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def text_of(document: dict[str, Any]) -> str:
    lines = [
        "# Tails", "",
        f"L = {LENGTH}, d = {DIM}, {STOPPED} stopped iterations, R refined; worst of dQ, dK, dV.", "",
        "| R | gap to full back-propagation | paper |", "|---:|---:|---:|",
    ]  # fmt: skip
    lines += [f"| {row['refined']} | {row['gap']:.2g} | {row['paper']:.2g} |" for row in document["gaps"]]
    names = [f"R = {refined}" for refined in REFINED]
    lines += [
        "", f"Scores times s, relative gaps of dQ and dK; certified to {TOLERANCE:g}.", "",
        "| s | " + " | ".join(names) + " | certified | of its 38 half-steps |",
        "|---:|" + "---:|" * (len(names) + 2),
    ]  # fmt: skip
    for row in document["sharpness"]:
        figures = " | ".join(f"{row[name]:.2g}" for name in [*names, "certified"])
        lines.append(f"| {row['sharpness']:g} | {figures} | {row['half-steps']} |")
    lines += [
        "", f"What R iterations leave out of the scores' gradient (Proposition 5), L = {SHORT}.", "",
        "| s | R | max of c_R | L1 of c_R over the slopes' | its bound | residual |",
        "|---:|" + "---:|" * 5,
    ]  # fmt: skip
    for row in document["certificates"]:
        names = ("largest", "exact", "bound", "residual")
        figures = " | ".join(f"{row[name]:.2g}" for name in names)
        lines.append(f"| {row['sharpness']:g} | {row['refined']} | {figures} |")
    lines += [
        "", "Forward and gradient, float32: milliseconds, and MiB beyond the inputs.", "",
        "| B, H, N, D, T | " + " | ".join(WAYS) + " |", "|---|" + "---:|" * len(WAYS),
    ]  # fmt: skip
    for row in document["costs"]:
        figures = " | ".join(f"{row['ms'][way]:.1f} ms, {row['mib'][way]:.0f} MiB" for way in WAYS)
        lines.append(f"| {', '.join(map(str, row['shape']))} | {figures} |")
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, seeds=3, repeats=7)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        way, shape = json.loads(options.peak)
        print((extra_bytes(call_of(way, tuple(shape))) or 0) / 2**20)
        return 0
    document = {
        "environment": environment(cpu=True),
        "gaps": gaps(options.seeds),
        "sharpness": sharpness(options.seeds),
        "certificates": certificates(options.seeds),
        "costs": costs(options.repeats),
    }
    text = text_of(document)
    print(text)
    write_results(options.out, "tails", document, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
