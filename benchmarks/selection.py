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

import asapc
from asapc import pipeline
from asapc.inputs.data import open_data
from asapc.inputs.load import load_teacher
from asapc.inputs.recipe import Recipe, load_recipe
from asapc.measure.bootstrap import LEVEL
from asapc.measure.differences import comparable
from asapc.measure.fidelity import OutputFidelity
from asapc.measure.timing import interleaved_medians
from asapc.report.site_metrics import environment
from asapc.report.tables import Table
from asapc.report.text import json_text, markdown_table
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--calibration", type=int, default=256)
    parser.add_argument("--selection", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--name", help="of the results; else the model's folder")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    progress = make_progress(quiet=False)
    teacher = load_teacher(options.model)
    recipes = variants(options, load_recipe(RECIPE))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        first = next(iter(recipes.values()))
        pipeline.calibrate(teacher, options.data, folder / "calibration", first, progress)
        calibration_seconds = time.perf_counter() - start
        rows = []
        for number, (label, recipe) in enumerate(recipes.items()):
            out = folder / str(number)
            manifest = pipeline.compile(
                teacher, folder / "calibration", out, recipe, options.data, progress
            ).manifest
            trail = json.loads((out / "selection.json").read_text())
            errors = [site["selection_attention_rel_l2"] or 0.0 for site in manifest["sites"]]
            labels = [
                next((c["label"] for c in site["candidates"] if c["chosen"]), "")
                for site in trail["sites"]
            ] or ["lossless"] * len(manifest["sites"])
            rows.append(
                {
                    "variant": label,
                    "sites": labels,
                    "worst_attention_rel_l2": max(errors),
                    "selection_seconds": trail["seconds"],
                    "rounds": len(trail["rounds"]),
                    "trail": trail if label.startswith("budget") else None,
                }
            )
        models = {row["variant"]: asapc.load(folder / str(i)) for i, row in enumerate(rows)}
        untouched = asapc.load(folder / "0", stage="teacher")
        measure(options, untouched, models, rows)
    result = {
        "model": options.name or Path(options.model).name, "calibration_seconds": calibration_seconds,
        "examples": options.examples, "batch": options.batch, "rows": rows,
        "environment": environment(),
    }  # fmt: skip
    text = markdown_table(table(result))
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / f"{result['model']}_selection"
        stem.with_suffix(".json").write_text(json_text(result) + "\n")
        stem.with_suffix(".md").write_text(text + "\n")


def measure(
    options: argparse.Namespace,
    untouched: torch.nn.Module,
    models: dict[str, torch.nn.Module],
    rows: list[dict[str, Any]],
) -> None:
    teacher = load_teacher(options.model)
    source = open_data(options.test, forward_signature(teacher))
    fidelity = {name: OutputFidelity() for name in models}
    with torch.no_grad():
        first = next(source.batches(options.batch))
        for batch in source.batches(options.batch, limit=options.examples):
            exact = comparable(untouched(*batch.args, **batch.kwargs))
            for name, model in models.items():
                own = comparable(model(*batch.args, **batch.kwargs))
                fidelity[name].update(exact, own, batch.labels)
        calls: dict[str, Any] = {"teacher": partial(untouched, *first.args, **first.kwargs)}
        calls |= {n: partial(m, *first.args, **first.kwargs) for n, m in models.items()}
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
        rows.append(
            (
                row["variant"],
                ", ".join(row["sites"]) if len(set(row["sites"])) > 1 else row["sites"][0],
                f"{row['milliseconds']:.1f}",
                f"{row['speedup']:.2f}",
                f"{row['metrics']['prediction_agreement']:.2%} [{low:.2%}, {high:.2%}]",
                f"{row['worst_attention_rel_l2']:.4f}",
                f"{row['selection_seconds']:.0f}",
            )
        )
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
