"""Untouched models of packages, papers and public repositories: what they compile to, how fast.

    python benchmarks/released.py                          # packages, and modules in the released styles
    python benchmarks/released.py --repositories FOLDER    # and the checkouts that are in this folder
    python benchmarks/released.py --only differential --json

A row compiles one model losslessly as `asapc.compile` does and prints the operators, or the reason why
there are none; the seconds that this took; the largest difference from the untouched model, relative to
its largest output, at another batch size, another length and four times the inputs (at most 1e-4, or the
row fails); and milliseconds of one call: the model itself, under torch.compile, compiled by asapc, that
under torch.compile in turn ("both"), and the model under torch.compile(backend="asapc"). Times are taken
after parity only; candidates take turns; figures are medians. What torch.compile has made is timed alone
with the model itself: several of its results would look for each other's code at every call. With -o,
released.json and released.md are written there, after every row; with --only, other rows stay as they
are there. The exit code is 1 where a row fails.
"""

from __future__ import annotations

import copy
import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attention import environment
from public_models import repository_rows
from released_models import Row, own_rows
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from written import parser_of, write_results

import asapc
from asapc.errors import AsapcError, InputError, NoSiteError
from asapc.inputs.data import Batch
from asapc.inputs.teacher import Teacher
from asapc.measure.timing import interleaved_medians
from asapc.passes.analyse import analyse
from asapc.program.compiled import OwnCodeWarning

TOLERANCE = 1e-4
PATIENCE = 60  # seconds for the first call under torch.compile: loops of 200 half-steps take longer
EXAMPLES = 80
RECIPE = {"operator": "lossless", "batch_size": 8, "max_examples": 8, "selection_examples": 8}


def inputs(row: Row, batch: int, tokens: int, seed: int) -> dict[str, Tensor]:
    return row.inputs(batch, tokens, torch.Generator().manual_seed(seed))


def difference(theirs: Any, ours: Any) -> float:
    """The largest of all outputs, relative to the largest entry of the untouched one; entries that are
    -inf in both are equal."""
    worst = 0.0
    pairs = zip(pytree.tree_leaves(theirs), pytree.tree_leaves(ours), strict=True)
    for expected, found in pairs:
        if not isinstance(expected, Tensor) or not expected.is_floating_point():
            continue
        apart = torch.where(expected == found, 0.0, (found - expected).abs().double())
        scale = float(expected[expected.isfinite()].abs().max().clamp(min=1e-30))
        worst = max(worst, float(apart.max()) / scale)
    return worst


def errors(row: Row, model: nn.Module, compiled: nn.Module) -> dict[str, float | None]:
    """By what was tried, None where the compiled model says that it does not hold for that, or runs the
    original's own code with a warning."""
    (batch, tokens), (other_batch, other) = row.size, row.other
    tried = {
        "as given": inputs(row, batch, tokens, 11),
        "another batch": inputs(row, other_batch, tokens, 12),
    }
    if other is not None:
        tried["another length"] = inputs(row, batch, other, 13)
    if row.scaled:
        tried["four times"] = {
            name: 4 * value if value.is_floating_point() and bool((value < 0).any()) else value
            for name, value in inputs(row, batch, tokens, 14).items()
        }
    differences: dict[str, float | None] = {}
    for what, x in tried.items():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error", OwnCodeWarning)
            try:
                differences[what] = difference(model(**x), compiled(**x))
            except (InputError, OwnCodeWarning) as error:
                print(f"released.py: {row.name}, {what}: {error}", file=sys.stderr)
                differences[what] = None
    return differences


def compiled_row(row: Row, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        model = row.make().eval()
    except ImportError as error:
        return {"name": row.name, "status": "not installed", "reason": str(error)}
    tokens = row.size[1]
    count = min(8, row.size[0] * 2)
    batches = [inputs(row, count, tokens, seed) for seed in range(-(-EXAMPLES // count))]
    start = time.perf_counter()
    try:
        result = asapc.compile(copy.deepcopy(model), batches, recipe=RECIPE, examples=4)
    except AsapcError as error:
        reasons = listed(model, inputs(row, 2, tokens, 0)) if isinstance(error, NoSiteError) else []
        reason = "; ".join(reasons) or str(error).splitlines()[0]
        return {"name": row.name, "status": "left alone", "reason": reason}
    facts = result.report.facts
    entry: dict[str, Any] = {
        "name": row.name, "status": "compiled", "seconds": round(time.perf_counter() - start, 1),
        "operators": [site["operator"] for site in facts["sites"]],
        "left": [f"{left['name']}: {left['reason']}" for left in facts.get("refused", [])],
        "errors": errors(row, model, result.model),
    }  # fmt: skip
    if not largest(entry) <= TOLERANCE:
        return {**entry, "status": "differs"}
    x = inputs(row, *row.size, 11)
    plain: dict[str, Callable[[], Any]] = {
        "eager": lambda: model(**x), "asapc": lambda: result.model(**x)
    }
    with torch.no_grad():
        expected = model(**x)
        ms = {name: timed["median_ms"] for name, timed in interleaved_medians(plain, repeats, 2).items()}
        for name, (subject, backend) in {
            "torch.compile": (model, "inductor"), "both": (result.model, "inductor"),
            "backend": (model, "asapc"),
        }.items():
            torch.compiler.reset()
            optimised = torch.compile(subject, backend=backend)
            signal.alarm(PATIENCE)
            try:
                apart = difference(expected, optimised(**x))
            except Exception as error:  # torch.compile raises many types: there is nothing to time
                print(f"released.py: {row.name}, {name}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            finally:
                signal.alarm(0)
            if apart <= TOLERANCE:
                pair = {"eager": plain["eager"], name: lambda optimised=optimised: optimised(**x)}
                times = interleaved_medians(pair, repeats, 2)
                ms[name] = ms["eager"] * times[name]["median_ms"] / times["eager"]["median_ms"]
            elif name != "torch.compile":
                return {**entry, "status": "differs", "errors": {**entry["errors"], name: apart}}
    return {**entry, "ms": ms}


def too_long(*_: Any) -> None:
    raise TimeoutError(f"not compiled in {PATIENCE} seconds")


def largest(entry: dict[str, Any]) -> float:
    """The largest difference that was found for a model."""
    return max(error for error in entry["errors"].values() if error is not None)


def listed(model: nn.Module, x: dict[str, Tensor]) -> list[str]:
    """What the model's attention was refused for."""
    try:
        analysis = analyse(Teacher(model, None, "model", "0", False, None), Batch((), x, None, [0] * 2))
    except AsapcError:
        return []
    return list(dict.fromkeys(left.reason for left in analysis.left_alone))


def line(entry: dict[str, Any]) -> str:
    if entry["status"] in ("left alone", "not installed"):
        reason = entry["reason"].replace("|", "/")
        return f"| {entry['name']} | {entry['status']}: {reason} | | | | | | | |"
    names = {name: entry["operators"].count(name) for name in entry["operators"]}
    operators = ", ".join(name if count == 1 else f"{count} {name}" for name, count in names.items())
    left = f"; left: {len(entry['left'])}" if entry["left"] else ""
    outside = [tried for tried, error in entry["errors"].items() if error is None]
    left += f"; not for {', '.join(outside)}" if outside else ""
    text = "differs" if entry["status"] == "differs" else f"{operators}{left}"
    ms = entry.get("ms", {})
    times = [f"{ms[name]:.2f}" if name in ms else "-" for name in CANDIDATES]
    cells = [entry["name"], text, f"{entry['seconds']:.0f} s", f"{largest(entry):.1e}", *times]
    return f"| {' | '.join(cells)} |"


def measured_before(folder: Path | None) -> dict[str, dict[str, Any]]:
    """The rows that a folder has, by name: with --only, these alone are measured again."""
    path = None if folder is None else folder / "released.json"
    if path is None or not path.is_file():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


CANDIDATES = ("eager", "torch.compile", "asapc", "both", "backend")
HEAD = (
    "| model | compiled to | in | largest difference | eager | torch.compile | asapc | both | backend |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, threads=1, repeats=15)
    parser.add_argument("--only", metavar="NAME", help="the models with this in their name")
    parser.add_argument("--repositories", type=Path, help="folder with checkouts: see public_models.py")
    parser.add_argument("--json", action="store_true", help="the results on stdout, a JSON document")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    signal.signal(signal.SIGALRM, too_long)
    rows = own_rows() + ([] if options.repositories is None else repository_rows(options.repositories))
    chosen = [row for row in rows if options.only is None or options.only.lower() in row.name.lower()]
    if not chosen:
        raise SystemExit(f"released.py: no model has {options.only!r} in its name")
    told = sys.stderr if options.json else sys.stdout
    print(HEAD, file=told, flush=True)
    results = []
    before = {} if options.only is None else measured_before(options.out)
    for row in chosen:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(compiled_row(row, options.repeats))
        print(line(results[-1]), file=told, flush=True)
        # After every row: a run that is cut short leaves what it has measured.
        known = {**before, **{found["name"]: found for found in results}}
        order = dict.fromkeys([*(row.name for row in rows), *known])
        kept = [known[name] for name in order if name in known]
        document = {"environment": environment(cpu=True), "rows": kept}
        title = f"Untouched models, forced lossless, float32, milliseconds on {options.threads} threads"
        text = "\n".join([f"### {title}", "", HEAD, *map(line, kept)])
        write_results(options.out, "released", document, text)
    if options.json:
        print(json.dumps(document, indent=2))
    return int(any(row["status"] == "differs" for row in results))


if __name__ == "__main__":
    sys.exit(main())
