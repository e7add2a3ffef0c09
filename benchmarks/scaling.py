"""One attention layer against its length: the picture in the README.

    python benchmarks/scaling.py            # N = 128 to 4096: writes results and picture
    python benchmarks/scaling.py --tokens 128 256 -o FOLDER --picture FOLDER/scaling.svg
    python benchmarks/scaling.py --draw     # the picture again, from scaling.json

B1 H8 D32 T20 in float32: the usual PyTorch loop, the same under torch.compile, the lossless operator, one
c-transform from a predicted dual (prediction included) and softmax attention.  Parity, problems and
operators are those of benchmarks/attention.py; a length is timed only after its parity held, and
torch.compile is held to the usual loop too.  Candidates take turns; figures are medians, bands are
quartiles.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from attention import (
    SLACK,
    SOFTMAX,
    USUAL,
    Shape,
    candidates_of,
    check_parity,
    device_of,
    environment,
    error,
    make_problem,
    write_results,
)

from asapc.measure.timing import interleaved_medians

ROOT = Path(__file__).resolve().parents[1]
COMPILED = f"{USUAL}, torch.compile"
# Row of attention.py -> what the picture calls it, and its colour, which reads on white and on black.
LINES = {
    USUAL: ("usual PyTorch loop", "#d1495b"),
    COMPILED: ("the same, torch.compile", "#c77d0a"),
    "lossless": ("asapc, lossless", "#2a7fde"),
    "target, 1 c-transform, coarse:32": ("asapc, one c-transform", "#1a9a6c"),
    SOFTMAX: ("softmax attention (SDPA)", "#858585"),
}


def measured(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Times of every line at one length.  Raises SystemExit where an operator is not exact."""
    device = device_of(options)
    check = make_problem(shape.for_parity(), torch.float32, device, 1.0, options.seed, True)
    errors = check_parity(check, torch.float32)
    del check
    problem = make_problem(shape, torch.float32, device, 1.0, options.seed, False).to(torch.float32)
    functions = {name: own for name, own in candidates_of(problem, True).items() if name in LINES}
    torch._dynamo.reset()  # otherwise every call looks through the compiled loops of earlier lengths
    usual = functions[USUAL]().double()
    errors[COMPILED] = {"timed": error(functions[COMPILED](), usual)}
    if errors[COMPILED]["timed"] > 2 * errors[USUAL]["timed"] + SLACK:
        raise SystemExit(f"scaling.py: torch.compile differs at {shape}: {errors[COMPILED]['timed']:.2e}")
    times = interleaved_medians(functions, repeats=options.repeats, warmup=1, min_time=options.seconds)
    return {"shape": vars(shape), "dtype": "float32", "max_abs_error": errors, "rows": times}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row for each length, medians in ms, and how often the usual loop would fit in."""
    names = list(LINES)
    lines = [
        "| N | " + " | ".join(f"{LINES[name][0]}, ms" for name in names) + " |",
        "|---:|" + "---:|" * len(names),
    ]
    for result in results:
        rows = result["rows"]
        medians = [rows[name]["median_ms"] for name in names]
        usual = rows[USUAL]["median_ms"]
        cells = [f"{own:.2f}" + (f" ({usual / own:.1f}x)" if own != usual else "") for own in medians]
        lines.append(f"| {result['shape']['tokens']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(document: dict[str, Any], path: Path) -> None:
    """Time over N, log-log, on a transparent ground, in greys and colours that read on white and black.

    The same document gives the same bytes.
    """
    import matplotlib

    matplotlib.rcParams.update({"svg.hashsalt": "asapc", "svg.fonttype": "none"})  # text stays text
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    results = document["results"]
    tokens = [result["shape"]["tokens"] for result in results]
    grey = "#808080"
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, (label, colour) in LINES.items():
        rows = [result["rows"][name] for result in results]
        style = "--" if name == SOFTMAX else "-"
        medians = [row["median_ms"] for row in rows]
        axes.plot(tokens, medians, style, color=colour, marker="o", markersize=4, label=label)
        low, high = ([row[end] for row in rows] for end in ("q1", "q3"))
        axes.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(tokens, [str(n) for n in tokens])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("tokens N", color=grey)
    axes.set_ylabel("median time of one layer, ms", color=grey)
    axes.tick_params(colors=grey, which="both")
    for spine in axes.spines.values():
        spine.set_color(grey)
    axes.grid(True, color=grey, alpha=0.25)
    axes.legend(loc="upper left", frameon=False, labelcolor=[colour for _, colour in LINES.values()])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of rounds at every length, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="even if there is an accelerator")
    parser.add_argument("--draw", action="store_true", help="draw scaling.json, measure nothing")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "assets" / "scaling.svg")
    options = parser.parse_args()
    if not options.draw:
        results = []
        for tokens in sorted(set(options.tokens)):
            with torch.no_grad():
                results.append(measured(Shape(1, 8, tokens, 32, 20), options))
            print(table(results[-1:]), "\n", flush=True)
        document = {"environment": environment(options.cpu), "results": results}
        head = "# One attention layer against its length: B1 H8 D32 T20, float32"
        text = f"{head}\n\n`{json.dumps(document['environment'])}`\n\n{table(results)}"
        write_results(options.out, "scaling", document, text)
    draw(json.loads((options.out / "scaling.json").read_text()), options.picture)


if __name__ == "__main__":
    sys.exit(main())
