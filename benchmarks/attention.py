"""Attention alone: the usual PyTorch Sinkhorn loop against asapc's operators and against softmax.

    python benchmarks/attention.py                       # B4 H8 N512 D32 T20, float32
    python benchmarks/attention.py --batch 1 --tokens 64 256 1024 2048 --head-dim 32 64 -o FOLDER

Speed is printed only after parity: in float64 every operator must reproduce the usual loop, and in
the timed dtype it may be at most twice as wrong as the usual loop is. Each shape is checked on one
example and at most PARITY_HEADS heads and PARITY_TOKENS tokens of it, with the teacher's own duals, so
that the amortised operators have an exact answer to be held to. Rows named after features include the
prediction of the dual; their coefficients are arbitrary, which costs the same. Candidates take turns;
figures are medians. Extra memory is the peak of one call over what was held before it, the first call
at this size in a process of its own. The floor is the products alone (scores and output once, a
matrix-vector product a half-step; no exponentials, no prediction) at the rate of one large matrix
product in the same run.

With -o, attention.json, attention.md and attention.svg (if matplotlib is installed: the `bench` extra)
are written there.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from closures import WAYS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from written import parser_of, write_results

import asapc.kernels.library  # noqa: F401 -- registers torch.ops.asapc
from asapc.measure.timing import interleaved_medians
from asapc.memory import current, forget_peak, peak
from asapc.operators.sinkhorn import finite_duals, score_matrix, widen

EXACT = 1e-9
SLACK = 1e-6
ROWS_FIRST = True
PARITY_HEADS = 4
PARITY_TOKENS = 4096
RECORDED = 5  # calls in a CUDA graph
USUAL = "usual loop"
SOFTMAX = "softmax (SDPA)"

FACTOR = [1.0, 1.0, 0.0, 0.0]  # attention = N * P
SLICED = "sliced:32:random"
COARSE = "coarse:32"
BOTH = "coarse:32 gaussian"


# The rows whose memory is measured and whose times are plotted.
MEASURED = (
    USUAL, "lossless", "source, 3 c-transforms, coarse:32 gaussian", "target, 2 c-transforms, coarse:32",
    "target, 1 c-transform, coarse:32", SOFTMAX,
)  # fmt: skip


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
        """Tokens in dtype; duals and directions in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        kinds = {"q": dtype, "k": dtype, "v": dtype}
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return Problem(
            *(x.to(kinds.get(name, wide)) if isinstance(x, Tensor) else x for name, x in values)
        )


def usual_loop(problem: Problem) -> Tensor:
    """As published Sinkformer code runs it: log domain, a fresh full matrix every half-step."""
    scores = widen(problem.q) @ widen(problem.k).transpose(-1, -2) * problem.scale
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
    return (attention @ widen(problem.v)).to(problem.v.dtype)


def flash_sinkhorn(problem: Problem) -> Tensor:
    """FlashSinkhorn, head by head as its interface asks: T / 2 alternating pairs, then the plan times v.

    It iterates to a converged plan and has no finite convention of its own, but from zero potentials
    its alternating updates are these half-steps; half the squared distance costs the same plan.
    """
    from flash_sinkhorn.kernels.apply_flash import apply_plan_mat_flashstyle
    from flash_sinkhorn.sinkhorn_solvers import sinkhorn_flashstyle_alternating

    root, tokens = problem.scale**0.5, problem.q.shape[2]
    mass = problem.q.new_full((tokens,), 1 / tokens, dtype=torch.float32)
    exact = problem.q.dtype == torch.float32
    settings: dict[str, Any] = {"eps": 1.0, "cost_scale": 0.5, "allow_tf32": not exact}
    out = torch.empty_like(problem.v)
    for index in itertools.product(range(problem.q.shape[0]), range(problem.q.shape[1])):
        x, y = problem.q[index].float() * root, problem.k[index].float() * root
        f, g = sinkhorn_flashstyle_alternating(
            x, y, mass, mass, n_iters=problem.half_steps // 2, **settings
        )
        f, g = f - x.square().sum(-1) / 2, g - y.square().sum(-1) / 2
        values = problem.v[index].float()
        plan = apply_plan_mat_flashstyle(x, y, f, g, mass.log(), mass.log(), values, axis=1, **settings)
        out[index] = plan * tokens
    return out


def lossless(problem: Problem) -> Tensor:
    return torch.ops.asapc.sinkhorn(
        problem.q, problem.k, problem.v, None, None, problem.scale, problem.half_steps, ROWS_FIRST,
        FACTOR,
    )  # fmt: skip


def closed(p: Problem, source: Tensor | None, key: Tensor | None, c_transforms: int) -> Tensor:
    return torch.ops.asapc.asap(p.q, p.k, p.v, None, None, source, key, p.scale, c_transforms, FACTOR)


def rescaled(p: Problem, key: Tensor, row_sums: Tensor) -> Tensor:
    return closed(p, None, key, 1) * row_sums[..., None]


def predicted(p: Problem, features: str, side: str, half_steps: int) -> Tensor:
    parameters = {
        SLICED: [p.theta],
        COARSE: [p.key_pivots if side == "source" else p.query_pivots],
        BOTH: [p.key_pivots if side == "source" else p.query_pivots],
    }
    columns = {SLICED: 32, COARSE: 1, BOTH: 4}[features]
    coefficients = torch.full((1, columns), 0.5, device=p.q.device)
    return torch.ops.asapc.dual(
        p.q, p.k, None, None, parameters[features], coefficients, features, side, p.scale,
        half_steps, side == "source",
    )  # fmt: skip


def key_c_transform(p: Problem, features: str, pivots: Tensor) -> Tensor:
    """One c-transform from a predicted target dual, rows rescaled: `side: target, c_transforms: 1`."""
    coefficients = torch.full((1, 1), 0.5, device=p.q.device)
    dual, mass = torch.ops.asapc.dual_and_row_mass(
        p.q, p.k, None, None, [pivots], coefficients, features, p.scale, p.half_steps, False
    )
    return rescaled(p, dual, mass)


def amortised(p: Problem, features: str, side: str, c_transforms: int) -> Tensor:
    dual = predicted(p, features, side, p.half_steps - c_transforms)
    duals = (dual, None) if side == "source" else (None, dual)
    return closed(p, *duals, c_transforms)


def softmax(problem: Problem) -> Tensor:
    return scaled_dot_product_attention(problem.q, problem.k, problem.v, scale=problem.scale)


def softmax_by(backend: SDPBackend, problem: Problem) -> Tensor:
    with sdpa_kernel(backend):
        return softmax(problem)


def recorded(function: Callable[[], Any]) -> Callable[[], Any]:
    """RECORDED calls in one CUDA graph: what they take without Python between them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RECORDED):
            function()
    return graph.replay


def graph_medians(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of one call in a CUDA graph, of those that one can hold; they take turns."""
    graphs = {}
    for name, function in functions.items():
        try:
            graphs[name] = recorded(function)
        except Exception as refused:  # torch's own, of many types
            print(f"{name}: no graph, {str(refused)[:200]}", file=sys.stderr)
            torch.cuda.synchronize()
    times = interleaved_medians(graphs, repeats=repeats)
    return {name: found["median_ms"] / RECORDED for name, found in times.items()}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    tokens: int
    head_dim: int
    half_steps: int

    def for_parity(self) -> Shape:
        heads, tokens = min(PARITY_HEADS, self.heads), min(PARITY_TOKENS, self.tokens)
        return Shape(1, heads, tokens, self.head_dim, self.half_steps)

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} N{self.tokens} D{self.head_dim} T{self.half_steps}"


def make_problem(
    shape: Shape, dtype: torch.dtype, device: str, spread: float, seed: int, with_duals: bool
) -> Problem:
    """Float64, of tokens that `dtype` holds, seeded; scores have standard deviation `spread`.

    Without duals, zeros stand in for them.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:  # numbers that dtype holds
        return torch.randn(sizes, generator=generator).to(device, dtype).double()

    points = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    q, k, v = normal(*points), normal(*points), normal(*points)
    q, k = ((t * spread**0.5).to(dtype).double() for t in (q, k))
    theta = torch.nn.functional.normalize(normal(32, shape.head_dim), dim=-1)
    scale = shape.head_dim**-0.5
    pivots = [normal(shape.heads, 32, shape.head_dim) * (spread * scale) ** 0.5 for _ in range(2)]
    source = key = key_last = row_sums = q.new_zeros(points[:3])
    if with_duals:
        scores = score_matrix(q, k, None, None, scale)
        source, _ = finite_duals(scores, shape.half_steps - 3, "row", None)
        _, key = finite_duals(scores, shape.half_steps - 2, "row", None)
        f, key_last = finite_duals(scores, shape.half_steps, "row", None)
        row_sums = torch.exp(scores + f[..., :, None] + key_last[..., None, :]).sum(-1) * shape.tokens
    tensors = (q, k, v, source, key, key_last, row_sums, theta, *pivots)
    return Problem(*tensors, scale, shape.half_steps)


def error(result: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, in float64."""
    return (result.double() - exact).abs().max().item()


def check_parity(problem: Problem, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Errors of every operator in both dtypes.  Raises SystemExit if one is not exact enough."""
    exact = usual_loop(problem)
    timed = problem.to(dtype)
    own = error(usual_loop(timed), exact)
    budget = 2 * own + SLACK
    errors = {USUAL: {"float64": 0.0, "timed": own}}
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


def candidates_of(t: Problem, with_compile: bool) -> dict[str, Callable[[], Tensor]]:
    steps = t.half_steps
    functions: dict[str, Callable[[], Tensor]] = {
        USUAL: lambda: usual_loop(t),
        "lossless": lambda: lossless(t),
        "source, 3 c-transforms, sliced:32": lambda: amortised(t, SLICED, "source", 3),
        "source, 3 c-transforms, coarse:32 gaussian": lambda: amortised(t, BOTH, "source", 3),
        "source, 3 c-transforms, dual given": lambda: closed(t, t.source, None, 3),
        "source, 1 c-transform, dual given": lambda: closed(t, t.source, None, 1),
        "target, 2 c-transforms, coarse:32": lambda: amortised(t, COARSE, "target", 2),
        "target, 2 c-transforms, dual given": lambda: closed(t, None, t.key, 2),
        "target, 1 c-transform, coarse:32": lambda: key_c_transform(t, COARSE, t.query_pivots),
        "target, 1 c-transform, coarse:16":
            lambda: key_c_transform(t, "coarse:16", t.query_pivots[:, :16]),
        "target, 1 c-transform, dual given": lambda: closed(t, None, t.key_last, 1),
        "predict sliced:32": lambda: predicted(t, SLICED, "source", steps - 3),
        "predict coarse:32 gaussian": lambda: predicted(t, BOTH, "source", steps - 3),
        "predict coarse:32": lambda: predicted(t, COARSE, "target", steps),
        SOFTMAX: lambda: softmax(t),
    }
    if t.q.is_cuda:
        functions |= other_closures(t, with_compile)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            functions[f"softmax, {backend.name}"] = partial(softmax_by, backend, t)
    if with_compile and t.q.is_cuda and find_spec("flash_sinkhorn") is not None:  # it tunes for long
        functions["FlashSinkhorn, head by head"] = lambda: flash_sinkhorn(t)
    if with_compile:
        compiled = torch.compile(usual_loop, dynamic=False)
        functions[f"{USUAL}, torch.compile"] = lambda: compiled(t)
    return functions


def other_closures(t: Problem, with_compile: bool) -> dict[str, Callable[[], Tensor]]:
    """One c-transform from the keys' dual by what torch has for it, where that runs and is as exact: on
    one head, at most twice as wrong as asapc's own pass."""
    g = t.key_last
    scores = t.q[:1, :1].double() @ t.k[:1, :1].double().transpose(-1, -2) * t.scale
    exact = (scores + g[:1, :1, None].double()).softmax(-1) @ t.v[:1, :1].double()
    budget = 2 * error(closed(t, None, g, 1)[:1, :1], exact) + SLACK
    found: dict[str, Callable[[], Tensor]] = {}
    for name, way in WAYS.items():
        if name == "flex" and not with_compile:  # which it is
            continue
        try:
            off = error(way(t.q, t.k, t.v, g, t.scale)[:1, :1], exact)
        except Exception as refused:  # torch's kernels refuse in many ways
            print(f"{name}: not timed, {str(refused).splitlines()[0][:200]}", file=sys.stderr)
            continue
        if off > budget:
            print(f"{name}: not timed, off by {off:.2e}, {budget:.2e} allowed", file=sys.stderr)
            continue
        found[f"target, 1 c-transform, dual given: {name}"] = partial(
            way, t.q, t.k, t.v, g, t.scale
        )
    return found


def floor_flops(name: str, shape: Shape) -> float | None:
    """Of the products a form cannot do without; None for a prediction alone."""
    if name.startswith("predict"):
        return None
    if name == SOFTMAX or name.startswith("key, 1"):
        half_steps = 0
    elif name.startswith(("source", "target")):
        half_steps = int(name.split()[1])
    else:
        half_steps = shape.half_steps
    scores = float(shape.batch * shape.heads * shape.tokens**2)
    return scores * (4 * shape.head_dim + 2 * half_steps)


def device_of(options: argparse.Namespace) -> str:
    there = torch.cuda.is_available() and not options.cpu
    return f"cuda:{torch.cuda.current_device()}" if there else "cpu"


def product_rate(dtype: torch.dtype, device: str) -> float:
    """Floating-point operations a second of one large matrix product."""
    size = 1024 if device == "cpu" else 4096
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = interleaved_medians({"product": lambda: a @ b}, repeats=5)
    return 2.0 * size**3 / times["product"]["median_ms"] * 1e3


def extra_mib(function: Callable[[], Any], device: torch.device) -> float | None:
    """MiB at the peak of one call over what was held before; None where that cannot be read."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before) / 2**20
    if not forget_peak():
        return None
    held = current()
    function()
    return max(0, peak() - held) / 2**20


def memory_of(name: str, shape: Shape, options: argparse.Namespace) -> float | None:
    """extra_mib of one candidate in this process, which has run it on a few tokens only."""
    dtype = getattr(torch, options.dtype)
    device = device_of(options)
    few = Shape(shape.batch, shape.heads, 64, shape.head_dim, shape.half_steps)
    for own in (few, shape):
        problem = make_problem(own, dtype, device, options.spread, options.seed, False).to(dtype)
        extra = extra_mib(candidates_of(problem, False)[name], problem.q.device)
    return extra


def memory_elsewhere(name: str, shape: Shape, options: argparse.Namespace) -> float | None:
    """memory_of in a new process: the C allocator serves a later call, unseen, from what is free. A GPU's
    counts what it serves."""
    if torch.cuda.is_available() and not options.cpu:
        return memory_of(name, shape, options)
    command = [
        sys.executable, __file__, "--batch", str(shape.batch), "--heads", str(shape.heads),
        "--tokens", str(shape.tokens), "--head-dim", str(shape.head_dim),
        "--half-steps", str(shape.half_steps), "--spread", str(options.spread),
        "--dtype", options.dtype, "--memory-of", name, *(["--cpu"] if options.cpu else []),
    ]  # fmt: skip
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    value: float | None = json.loads(found)
    return value


def measure(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Errors, times, ratios and memory of every candidate at one shape."""
    dtype = getattr(torch, options.dtype)
    device = device_of(options)
    check = make_problem(shape.for_parity(), dtype, device, options.spread, options.seed, True)
    errors = check_parity(check, dtype)
    del check
    problem = make_problem(shape, dtype, device, options.spread, options.seed, False).to(dtype)
    functions = candidates_of(problem, options.compile)
    # Scores, the shifted plan and two temporaries of its log-sum-exp.
    matrices = 4 * shape.batch * shape.heads * shape.tokens**2 * problem.q.element_size() / 2**30
    skipped = {}
    if matrices > options.max_memory:
        skipped = {name: f"about {matrices:.1f} GiB" for name in functions if name.startswith(USUAL)}
    kept = {}
    for name, function in functions.items():
        try:
            kept |= {} if name in skipped else {name: function} if function() is not None else {}
        except Exception as refused:  # one that does not run here is a row, not the end of the others
            skipped[name] = f"{type(refused).__name__}: {str(refused).splitlines()[0][:200]}"
    if options.once:
        return {}
    times = interleaved_medians(kept, repeats=options.repeats, warmup=1)
    graphs = graph_medians(kept, options.repeats) if problem.q.is_cuda else {}
    usual = times.get(USUAL, {}).get("median_ms")
    soft = times[SOFTMAX]["median_ms"]
    rate = product_rate(dtype, device)

    def of_floor(name: str) -> float | None:
        flops = floor_flops(name, shape)
        return None if flops is None else flops / rate * 1e3 / times[name]["median_ms"]

    rows = {
        name: {
            **found,
            "usual_over_this": None if usual is None else usual / found["median_ms"],
            "this_over_softmax": found["median_ms"] / soft,
            "graph_ms": graphs.get(name),
            "graph_over_softmax": _over_fastest(graphs, name),
            "of_floor": of_floor(name),
            "extra_mib": memory_elsewhere(name, shape, options) if name in MEASURED else None,
        }
        for name, found in times.items()
    }
    return {
        "shape": asdict(shape),
        "dtype": options.dtype,
        "max_abs_error": errors,
        "rows": rows,
        "skipped": skipped,
    }


def _over_fastest(graphs: dict[str, float], name: str) -> float | None:
    """A graph's time over that of the fastest softmax attention."""
    soft = [time for other, time in graphs.items() if other.startswith("softmax")]
    return graphs[name] / min(soft) if soft and name in graphs else None


def table(result: dict[str, Any]) -> str:
    """Markdown, one shape."""
    shape = Shape(**result["shape"])
    worst = max(found["timed"] for found in result["max_abs_error"].values())
    exact = max(found["float64"] for found in result["max_abs_error"].values())
    lines = [
        f"### {shape}, {result['dtype']}",
        "",
        f"Parity: max error {exact:.1e} in float64, {worst:.1e} in {result['dtype']} "
        f"(the usual loop itself: {result['max_abs_error'][USUAL]['timed']:.1e}).",
        "",
        "| | median ms | quartiles | usual / this | this / softmax | of the floor | extra MiB | "
        "in a graph, us | / fastest softmax |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in result["rows"].items():
        usual = "-" if row["usual_over_this"] is None else f"{row['usual_over_this']:.1f}x"
        share = "-" if row["of_floor"] is None else f"{100 * row['of_floor']:.0f} %"
        memory = "-" if row["extra_mib"] is None else f"{row['extra_mib']:.1f}"
        graph = "- | -"
        if row["graph_ms"] is not None:
            graph = f"{1e3 * row['graph_ms']:.1f} | {row['graph_over_softmax']:.2f}"
        lines.append(
            f"| {name} | {row['median_ms']:.2f} | {row['q1']:.2f}-{row['q3']:.2f} | {usual} | "
            f"{row['this_over_softmax']:.2f} | {share} | {memory} | {graph} |"
        )
    for name, why in result["skipped"].items():
        lines.append(f"| {name} | not run: {why} | | | | | | | |")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> bool:
    """Time over N, log-log, one panel for every other dimension. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    panels: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        s = result["shape"]
        panels.setdefault(f"B{s['batch']} H{s['heads']} D{s['head_dim']}", []).append(result)
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, own) in zip(grid, panels.items(), strict=True):
        for name in MEASURED:
            present = [r for r in own if name in r["rows"]]
            points = [(r["shape"]["tokens"], r["rows"][name]["median_ms"]) for r in present]
            axes.loglog(*zip(*sorted(points), strict=True), marker="o", label=name)
        axes.set(title=title, xlabel="tokens N", ylabel="median ms")
        axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path)
    return True


def main() -> None:
    parser = parser_of(
        __doc__, batch=4, heads=8, tokens=[512], head_dim=[32], half_steps=20, repeats=7, seed=0,
    )  # fmt: skip
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of scores")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--compile", action="store_true", help="also torch.compile, FlashSinkhorn")
    parser.add_argument("--max-memory", type=float, default=3.0, help="GiB the usual loop may take")
    parser.add_argument("--once", action="store_true", help="every form once, which compiles kernels")
    parser.add_argument("--cpu", action="store_true", help="even if there is an accelerator")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # see memory_elsewhere
    options = parser.parse_args()
    if options.half_steps % 2 or options.half_steps < 4:
        parser.error("--half-steps must be even (columns last) and at least 4")

    if options.memory_of is not None:
        tokens, head_dim = options.tokens[0], options.head_dim[0]
        shape = Shape(options.batch, options.heads, tokens, head_dim, options.half_steps)
        with torch.no_grad():
            print(json.dumps(memory_of(options.memory_of, shape, options)))
        return

    results: list[dict[str, Any]] = []
    failed: list[str] = []
    document: dict[str, Any] = {}
    for head_dim, tokens in itertools.product(options.head_dim, options.tokens):
        shape = Shape(options.batch, options.heads, tokens, head_dim, options.half_steps)
        try:
            with torch.no_grad():
                result = measure(shape, options)
        except (SystemExit, RuntimeError) as error:  # the other shapes are still measured
            failed.append(f"{shape}: {error}")
            print(f"attention.py: {failed[-1]}", file=sys.stderr, flush=True)
            continue
        if options.once:
            continue
        results.append(result)
        document = {"environment": environment(options.cpu), "results": results, "failed": failed}
        title = ["# Attention: time and memory", f"`{json.dumps(document['environment'])}`"]
        write_results(options.out, "attention", document, "\n\n".join([*title, *map(table, results)]))
        if not options.json:
            print(table(results[-1]), "\n", flush=True)
    if options.json:
        print(json.dumps(document, indent=2))
    if results and options.out is not None and not plot(results, options.out / "attention.svg"):
        print("no plot: matplotlib is not installed", file=sys.stderr)
    if failed:
        raise SystemExit("\n".join(["attention.py: not measured", *failed]))


def environment(cpu: bool) -> dict[str, str | int]:
    gpu = torch.cuda.is_available() and not cpu
    return {
        "device": torch.cuda.get_device_name() if gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 0,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
