"""The set that a budget makes the compiler choose, next to the same operator at every site.

    python benchmarks/selection.py MODEL --data DATA --test TEST -o FOLDER

One calibration of every candidate in benchmarks/recipes/budget.yaml, then one compiled model for each
budget and for each uniform choice: all lossless, all asap with 1 or 3 c-transforms. All whole models take
turns on one batch of TEST, so that their times can be compared; agreement with the teacher is counted on
up to --examples examples of TEST, with its 95 % interval. NAME_selection.json and .md go to FOLDER.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from written import parser_of, write_results

import asapc
from asapc import pipeline
from asapc.inputs.data import open_data
from asapc.inputs.load import load_teacher
from asapc.inputs.recipe import Recipe, load_recipe
from asapc.inputs.teacher import Teacher
from asapc.measure.bootstrap import LEVEL
from asapc.measure.differences import comparable
from asapc.measure.fidelity import OutputFidelity
from asapc.measure.timing import interleaved_medians
from asapc.report.site_metrics import environment
from asapc.report.tables import Table
from asapc.report.text import markdown_table
from asapc.stages.analyse import forward_signature
from asapc.terminal.progress import make_progress

RECIPE = Path(__file__).parent / "recipes" / "budget.yaml"
BUDGETS = {
    "prediction_agreement >= 0.998": {"prediction_agreement": 0.998},
    "attention_rel_l2 <= 0.02": {"attention_rel_l2": 0.02},
}
FORM = {"features": ["coarse:32", "gaussian"]}
UNIFORM: dict[str, dict[str, Any]] = {
    "all lossless": {"operator": "lossless"},
    "all asap, target, 1 c-transform": {"operator": "asap", "side": "target", "c_transforms": 1, **FORM},
    "all asap, source, 1 c-transform": {"operator": "asap", "side": "source", "c_transforms": 1, **FORM},
    "all asap, source, 3 c-transforms": {"operator": "asap", "side": "source", "c_transforms": 3, **FORM},
}


def variants(options: argparse.Namespace, base: Recipe) -> dict[str, Recipe]:
    common = {**base.to_dict(), "max_examples": options.calibration, "batch_size": options.batch,
              "selection_examples": options.selection}  # fmt: skip
    chosen = {f"budget {name}": {"budget": limits} for name, limits in BUDGETS.items()}
    forced = {name: {"candidates": [], **own} for name, own in UNIFORM.items()}
    return {name: Recipe.from_dict({**common, **own}) for name, own in (chosen | forced).items()}


def compiled(
    options: argparse.Namespace, teacher: Teacher, folder: Path
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of the calibration, and a row for every variant, compiled into the folder by its number."""
    progress, recipes = make_progress(quiet=False), variants(options, load_recipe(RECIPE))
    start = time.perf_counter()
    first = next(iter(recipes.values()))
    pipeline.calibrate(teacher, options.data, folder / "calibration", first, progress)
    seconds, rows = time.perf_counter() - start, []
    for number, (label, recipe) in enumerate(recipes.items()):
        out = folder / str(number)
        pipeline.compile(teacher, folder / "calibration", out, recipe, options.data, progress)
        sites = json.loads((out / "manifest.json").read_text())["sites"]
        trail = json.loads((out / "selection.json").read_text())
        labels = [next((c["label"] for c in site["candidates"] if c["chosen"]), "")
                  for site in trail["sites"]]  # fmt: skip
        rows.append({
            "variant": label,
            "sites": labels or ["lossless"] * len(sites),
            "worst_attention_rel_l2": max(site["selection_attention_rel_l2"] or 0.0 for site in sites),
            "selection_seconds": trail["seconds"],
            "rounds": len(trail["rounds"]),
            "trail": trail if label.startswith("budget") else None,
        })  # fmt: skip
    return seconds, rows


def main() -> None:
    counts = {"examples": 1000, "calibration": 256, "selection": 512, "batch": 16, "repeats": 7}
    parser = parser_of(__doc__, **counts)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--name", help="of the results; else the model's folder")
    options = parser.parse_args()
    teacher = load_teacher(options.model)
    with tempfile.TemporaryDirectory() as name:
        seconds, rows = compiled(options, teacher, Path(name))
        models = {row["variant"]: asapc.load(Path(name, str(i))) for i, row in enumerate(rows)}
        measure(options, teacher, asapc.load(Path(name, "0"), stage="teacher"), models, rows)
    result = {
        "model": options.name or Path(options.model).name, "calibration_seconds": seconds,
        "examples": options.examples, "batch": options.batch, "rows": rows,
        "environment": environment(),
    }  # fmt: skip
    text = markdown_table(table(result))
    print(text)
    write_results(options.out, f"{result['model']}_selection", result, text)


def measure(
    options: argparse.Namespace, teacher: Teacher, untouched: nn.Module, models: dict[str, nn.Module],
    rows: list[dict[str, Any]],
) -> None:  # fmt: skip
    source = open_data(options.test, forward_signature(teacher))
    fidelity = {name: OutputFidelity() for name in models}
    with torch.no_grad():
        first = next(source.batches(options.batch))
        for batch in source.batches(options.batch, limit=options.examples):
            exact = comparable(untouched(*batch.args, **batch.kwargs))
            for name, model in models.items():
                own = comparable(model(*batch.args, **batch.kwargs))
                fidelity[name].update(exact, own, batch.labels)
        every = {"teacher": untouched, **models}
        calls = {name: partial(model, *first.args, **first.kwargs) for name, model in every.items()}
        times = interleaved_medians(calls, repeats=options.repeats, warmup=1)
    for row in rows:
        name = row["variant"]
        row["metrics"] = fidelity[name].metrics()
        row["confidence"] = {k: list(v) for k, v in fidelity[name].confidence().items()}
        row["milliseconds"] = times[name]["median_ms"]
        row["speedup"] = times["teacher"]["median_ms"] / times[name]["median_ms"]


def table(result: dict[str, Any]) -> Table:
    rows = []
    for row in result["rows"]:
        low, high = row["confidence"]["prediction_agreement"]
        rows.append((
            row["variant"],
            ", ".join(row["sites"]) if len(set(row["sites"])) > 1 else row["sites"][0],
            f"{row['milliseconds']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['metrics']['prediction_agreement']:.2%} [{low:.2%}, {high:.2%}]",
            f"{row['worst_attention_rel_l2']:.4f}",
            f"{row['selection_seconds']:.0f}",
        ))  # fmt: skip
    title = (
        f"{result['model']}, batch {result['batch']}, {result['environment']['threads']} threads; "
        f"calibration {result['calibration_seconds']:.0f} s, {result['examples']} test examples"
    )
    columns = (
        "model", "sites", "ms|", "speed-up|", f"agreement, {LEVEL:.0%} interval|",
        "attention l2, selection|", "selection s|",
    )  # fmt: skip
    return Table(title, columns, tuple(rows))


if __name__ == "__main__":
    main()
