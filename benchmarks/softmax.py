"""What softmax attention may become, over the number of tokens, beside torch's own attention.

    python benchmarks/softmax.py                                     # B1 H8 D64, N = 512 .. 8192
    python benchmarks/softmax.py --tokens 1024 2048 --pivots 16 -o FOLDER

lot has 32 pivots and 5 half-steps on either side, esp_hard 32 slices, fitted_sinkhorn 3 half-steps; the
last column is lot with one summary token and a convolution of width 3. Speed is printed only after
parity: in the timed dtype an operator may be at most twice as wrong as its reference in that dtype is,
against the reference in float64. (Where sorted tokens nearly tie, rounding decides which comes first, in
either.) Candidates take turns; figures are medians, and ratios are within one run.

With -o, softmax.json and softmax.md are written there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attention import device_of, environment, error
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from written import parser_of, write_results

import asapc.kernels.library  # noqa: F401 -- registers torch.ops.asapc
from asapc.measure.timing import interleaved_medians
from asapc.operators.catalogue import reference_named

SLACK = 1e-6
PARITY_TOKENS = 2048
SOFTMAX = "softmax (SDPA)"
Call = tuple[str, Mapping[str, Any]]  # an operator's name, and its arguments by name


def candidates(tokens: int, options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Call]:
    """Seeded normal tokens, whose scores have standard deviation 1, and parameters of every operator."""
    generator = torch.Generator().manual_seed(options.seed)
    heads, dim = options.heads, options.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device_of(options), dtype)

    q, k, v = (normal(options.batch, heads, tokens, dim) for _ in range(3))
    scale = dim**-0.5
    lot = {
        "key_bias": None, "pivots": normal(heads, options.pivots, dim),
        "pivot_mass": torch.softmax(normal(heads, options.pivots), -1),
        "query_multiplier": scale, "key_multiplier": scale, "query_half_steps": 5, "queries_first": True,
        "key_half_steps": 5, "keys_first": True, "output_factor": [1.0, 0.0, 0.0, 1.0],
    }  # fmt: skip
    esp = {
        "slices": normal(heads, options.slices, dim), "inverse_temperature": normal(heads).abs(),
        "squared_cost": False, "mean_cost": True, "output_factor": 1.0, "coupling": "monotone",
        "ties": "shared",
    }  # fmt: skip
    loop = {
        "head_multiplier": normal(heads).abs() + 0.5, "score_multiplier": scale, "half_steps": 3,
        "rows_first": True, "output_factor": [1.0, 1.0, 0.0, 0.0],
    }  # fmt: skip
    beside = {"summary_tokens": 1, "summary_multiplier": scale, "depthwise": normal(heads, dim, 3)}
    seen = {"q": q, "k": k, "v": v, "keep": None}
    return {
        f"lot, {options.pivots} pivots": ("lot", {**seen, "query_keep": None, **lot}),
        f"esp_hard, {options.slices} slices": ("esp_hard", {**seen, "query_keep": None, **esp}),
        "fitted_sinkhorn, 3 half-steps": ("fitted_sinkhorn", {**seen, "bias": None, **loop}),
        "lot, summary token, convolution": ("hybrid_lot", {**seen, "bias": None, **beside, **lot}),
    }


def wide(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) else x for name, x in arguments.items()}


def check_parity(name: str, call: Call) -> dict[str, float]:
    """Largest errors.  Raises SystemExit if the operator is not as exact as its reference."""
    operator, arguments = call
    reference = reference_named(operator)
    exact = reference(**wide(arguments))
    honest = error(reference(**arguments), exact)
    found = error(getattr(torch.ops.asapc, operator)(**arguments), exact)
    if not found <= 2 * honest + SLACK:
        raise SystemExit(
            f"softmax.py: {name} is not its reference: max error {found:.2e}, allowed "
            f"{2 * honest + SLACK:.2e}"
        )
    return {"operator": found, "reference": honest}


def measure(tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Errors at this length, or at PARITY_TOKENS where it is longer, and times of every candidate."""
    dtype = getattr(torch, options.dtype)
    checked = candidates(min(tokens, PARITY_TOKENS), options, dtype)
    errors = {name: check_parity(name, call) for name, call in checked.items()}
    timed = candidates(tokens, options, dtype)
    first = next(iter(timed.values()))[1]
    calls: dict[str, Callable[[], Tensor]] = {
        SOFTMAX: partial(scaled_dot_product_attention, first["q"], first["k"], first["v"]),
        **{name: partial(getattr(torch.ops.asapc, operator), **arguments)
           for name, (operator, arguments) in timed.items()},
    }  # fmt: skip
    times = interleaved_medians(calls, repeats=options.repeats, warmup=2)
    return {"tokens": tokens, "max_abs_error": errors, "rows": times}


def table(document: Mapping[str, Any]) -> str:
    """Markdown: milliseconds, and in parentheses how many times as fast as softmax attention."""
    results = document["results"]
    names = list(results[0]["rows"])
    errors = [result["max_abs_error"] for result in results]
    worst = {name: max(found[name]["operator"] for found in errors) for name in errors[0]}
    told = ", ".join(f"{error:.1e} ({name})" for name, error in worst.items())
    lines = [
        f"### Softmax attention and its replacements, {document['shape']}, {document['dtype']}, "
        f"{document['environment']['threads']} threads",
        "",
        f"Largest errors against float64, each at most twice that of the reference plus 1e-6: {told}. "
        "Where tokens nearly tie, rounding decides how esp_hard sorts, in the reference, too.",
        "",
        "| N | " + " | ".join(names) + " |",
        "|---:|" + "---:|" * len(names),
    ]
    for result in results:
        times = {name: row["median_ms"] for name, row in result["rows"].items()}
        cells = [
            f"{ms:.1f} ms" + ("" if name == SOFTMAX else f" ({times[SOFTMAX] / ms:.2f}x)")
            for name, ms in times.items()
        ]
        lines.append(f"| {result['tokens']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(
        __doc__, batch=1, heads=8, tokens=[512 << i for i in range(5)], head_dim=64, pivots=32,
        slices=32, repeats=7, seed=0,
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    options = parser.parse_args()
    results = []
    with torch.no_grad():
        for tokens in sorted(options.tokens):
            results.append(measure(tokens, options))
            print(f"softmax.py: {tokens} tokens done", file=sys.stderr, flush=True)
    document = {
        "environment": environment(cpu=device_of(options) == "cpu"),
        "dtype": options.dtype,
        "shape": f"B{options.batch} H{options.heads} D{options.head_dim}",
        "results": results,
    }
    print(table(document))
    write_results(options.out, "softmax", document, table(document))


if __name__ == "__main__":
    main()
