"""Untouched models of packages and papers, forced lossless: what they compile to, how equal, how fast.

    python benchmarks/released.py                          # packages, and modules in the released styles
    python benchmarks/released.py --repositories FOLDER    # and the checkouts that are in this folder
    python benchmarks/released.py --only differential --json

A row compiles one model as `asapc.compile` does and prints the operators, or the reason why there is
none; the largest difference from the untouched model, relative to its largest output, at another batch
size, another length and four times the inputs (at most 1e-4, or the row fails); and the times of the
whole model and of its sites, the model's own code over ours. A site's own code is its part of the
captured graph. Speed is told only after parity; candidates take turns; figures are medians. With -o,
released.json and released.md are written there, after every row; with --only, other rows stay as they
are there. The exit code is 1 where a row fails.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attention import environment
from released_models import Row, own_rows, repository_rows
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from written import write_results

import asapc
from asapc.errors import AsapcError, InputError
from asapc.inputs.data import Batch
from asapc.inputs.teacher import Teacher
from asapc.ir import Program
from asapc.measure.timing import interleaved_medians
from asapc.passes.analyse import analyse
from asapc.passes.site import Site
from asapc.program.calls import site_function
from asapc.program.runner import Tap

TOLERANCE = 1e-4
EXAMPLES = 40
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
    """By what was tried, None where it is none of the model's sizes."""
    (batch, tokens), (other_batch, other) = row.size, row.other
    given = {
        "as given": inputs(row, batch, tokens, 11),
        "another batch": inputs(row, other_batch, tokens, 12),
    }
    if other is not None:
        given["another length"] = inputs(row, batch, other, 13)
    if row.scaled:
        given["four times"] = {
            name: 4 * value if value.is_floating_point() and bool((value < 0).any()) else value
            for name, value in inputs(row, batch, tokens, 14).items()
        }
    found: dict[str, float | None] = {}
    for tried, x in given.items():
        with torch.no_grad():
            try:
                found[tried] = difference(model(**x), compiled(**x))
            except InputError as error:  # a size that the program does not hold for, and says so
                print(f"released.py: {row.name}, {tried}: {error}", file=sys.stderr)
                found[tried] = None
    return found


def compiled_row(row: Row, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        model = row.make().eval()
    except ImportError as error:
        return {"name": row.name, "status": "not installed", "reason": str(error)}
    tokens = row.size[1]
    count = min(8, row.size[0] * 2)
    batches = [inputs(row, count, tokens, seed) for seed in range(-(-EXAMPLES // count))]
    try:
        result = asapc.compile(copy.deepcopy(model), batches, recipe=RECIPE, examples=4)
    except AsapcError as error:
        found = listed(model, inputs(row, 2, tokens, 0))
        reason = "; ".join(found) or str(error).splitlines()[0]
        return {"name": row.name, "status": "left alone", "reason": reason}
    facts = result.report.facts
    own: dict[str, Any] = {
        "name": row.name, "status": "compiled",
        "operators": [site["operator"] for site in facts["sites"]],
        "left": [f"{left['name']}: {left['reason']}" for left in facts.get("refused", [])],
        "errors": errors(row, model, result.model),
    }
    worst = max(error for error in own["errors"].values() if error is not None)
    if not worst <= TOLERANCE:
        return {**own, "status": "differs"}
    x = inputs(row, *row.size, 11)
    with torch.no_grad():
        times = interleaved_medians(
            {"theirs": lambda: model(**x), "ours": lambda: result.model(**x)}, repeats, 2
        )
        own["whole"] = {name: found["median_ms"] for name, found in times.items()}
        own["site"] = site_times(model, x, repeats)
    return own


def listed(model: nn.Module, x: dict[str, Tensor]) -> list[str]:
    """What the model's attention was refused for."""
    try:
        analysis = analyse(Teacher(model, None, "model", "0", False, None), Batch((), x, None, [0] * 2))
    except AsapcError:
        return []
    return list(dict.fromkeys(left.reason for left in analysis.left_alone))


def site_times(model: nn.Module, x: dict[str, Tensor], repeats: int) -> dict[str, float] | None:
    """Milliseconds of all sites together: the captured code between their inputs and outputs, and our
    operators on the same."""
    count = len(next(iter(x.values())))
    batch = Batch((), x, None, [0] * count, [*range(count)])
    analysis = analyse(Teacher(model, None, "model", "0", False, None), batch)
    theirs, ours = [], []
    _, seen = Tap(model, analysis.lifted, analysis.names)(batch)
    tensors = dict(zip(analysis.names, seen, strict=True))
    if analysis.capture.kind != "whole":
        return None
    ((program, sites),) = zip(analysis.capture.programs, analysis.matched, strict=True)
    recorded = values(program, x)
    for site in sites:
        code, given = part(site, recorded)
        t, function = tensors[site.name], site_function(analysis.lifted, site.name)
        theirs.append(lambda code=code, given=given: code(*given))
        ours.append(lambda f=function, t=t: f(t, t.v))
    times = interleaved_medians(
        {"theirs": lambda: [f() for f in theirs], "ours": lambda: [f() for f in ours]}, repeats, 2
    )
    return {name: found["median_ms"] for name, found in times.items()}


def values(program: Program, x: dict[str, Tensor]) -> dict[Node, Any]:
    """What every node of a captured program holds on a call."""
    found: dict[Node, Any] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            found[n] = super().run_node(n)
            return found[n]

    names = [node.name for node in program.graph.graph.nodes if node.op == "placeholder"]
    order = [x[name] for name in program.kwargs] if program.kwargs else [x[name] for name in names]
    with torch.no_grad():
        Recorder(program.graph).run(*order, enable_io_processing=False)
    return found


def part(site: Site, recorded: dict[Node, Any]) -> tuple[GraphModule, list[Any]]:
    """The site's own code, product with values included, as a function of what enters it."""
    its = site.part()
    value = getattr(site, "value", None)
    end = its.output if site.takes_values or value is None else value.node
    inside = {*its.inside, its.output, end} - {*its.inputs}
    graph, copies, given = Graph(), dict[Node, Node](), []
    entering = list(dict.fromkeys(s for node in inside for s in node.all_input_nodes if s not in inside))
    for index, node in enumerate(entering):
        copies[node] = graph.placeholder(f"input_{index}")
        given.append(recorded[node])
    for node in end.graph.nodes:
        if node in inside:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[end])
    return GraphModule(nn.Module(), graph), given


def ratio(times: dict[str, float] | None) -> str:
    if times is None:
        return "-"
    return f"{times['theirs'] / times['ours']:.2f}x ({times['theirs']:.2f} / {times['ours']:.2f} ms)"


def line(row: dict[str, Any]) -> str:
    if row["status"] in ("left alone", "not installed"):
        return f"| {row['name']} | {row['status']}: {row['reason'].replace('|', '/')} | | | |"
    names = {name: row["operators"].count(name) for name in row["operators"]}
    operators = ", ".join(name if count == 1 else f"{count} {name}" for name, count in names.items())
    left = f"; left: {len(row['left'])}" if row["left"] else ""
    outside = [tried for tried, error in row["errors"].items() if error is None]
    left += f"; not for {', '.join(outside)}" if outside else ""
    worst = max(error for error in row["errors"].values() if error is not None)
    text = "differs" if row["status"] == "differs" else f"{operators}{left}"
    speeds = " | ".join(ratio(row.get(which)) for which in ("whole", "site"))
    return f"| {row['name']} | {text} | {worst:.1e} | {speeds} |"


def measured_before(folder: Path | None) -> dict[str, dict[str, Any]]:
    """The rows that a folder has, by name: with --only, these alone are measured again."""
    path = None if folder is None else folder / "released.json"
    if path is None or not path.is_file():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


HEAD = "| model | compiled to | largest difference | whole model | its sites |\n|---|---|---:|---:|---:|"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="the models with this in their name")
    parser.add_argument("--repositories", type=Path, help="folder with sinkformers, ESPFormer, LOTFormer")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="the results on stdout, a JSON document")
    parser.add_argument("-o", "--out", type=Path, help="folder for released.{json,md}")
    options = parser.parse_args(arguments)
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
        title = f"Untouched models, forced lossless, float32, {torch.get_num_threads()} threads"
        text = "\n".join([f"### {title}", "", HEAD, *map(line, kept)])
        write_results(options.out, "released", document, text)
    if options.json:
        print(json.dumps(document, indent=2))
    return int(any(row["status"] == "differs" for row in results))


if __name__ == "__main__":
    sys.exit(main())
