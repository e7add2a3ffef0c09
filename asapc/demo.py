"""`asapc demo`: the whole pipeline on a shipped checkpoint, each step with its command line."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, TypeVar

from asapc import commands
from asapc.errors import InputError
from asapc.inputs.recipe import Recipe
from asapc.report import Report
from asapc.report.brief import calibration_brief, compile_brief, inspect_brief, report_brief
from asapc.report.tables import (
    Table,
    calibration_tables,
    comparison_table,
    compile_tables,
    inspect_tables,
    report_tables,
)
from asapc.session import Session
from asapc.terminal.hints import command_line

T = TypeVar("T")
RECIPES = {
    "lossless": Recipe(operator="sinkhorn"),
    "asap": Recipe(operator="asap"),
}


def run_demo(run: Session, out: str, device: str = commands.AUTO) -> dict[str, Any]:
    """Inspect, calibrate, compile and report in folder `out`; returns what --json prints.

    The model is compiled twice: with the loop kept exactly, and with the loop removed, so that the
    closing table can tell what a better loop brings from what amortisation brings.
    """
    folder = Path(out)
    _place(folder)
    teacher, data, calibration = (str(folder / name) for name in ("teacher", "digits.npz", "calib"))
    steps: list[dict[str, Any]] = []

    def step(
        command: str,
        action: Callable[[], T],
        brief: Callable[[T], list[str]],
        tables: Callable[[T], list[Table]],
    ) -> T:
        run.note(f"\n$ {command}")
        start = time.monotonic()
        result = action()
        seconds = time.monotonic() - start
        steps.append({"command": command, "seconds": seconds})
        if not run.json:
            run.show(result, brief, tables)
        run.note(f"{seconds:.1f} s")
        return result

    step(
        command_line("inspect", teacher),
        partial(commands.inspect_model, teacher, None, None, None, device=device),
        inspect_brief,
        inspect_tables,
    )
    recipe = str(folder / "asap.yaml")
    step(
        command_line("calibrate", teacher, data=data, o=calibration, recipe=recipe),
        partial(commands.calibrate_model, run, teacher, data, calibration, recipe, device=device),
        calibration_brief,
        calibration_tables,
    )
    reports = {}
    for name in RECIPES:
        artifact, recipe = str(folder / name), str(folder / f"{name}.yaml")
        step(
            command_line(
                "compile", teacher, calibration=calibration, o=artifact, recipe=recipe, data=data
            ),
            partial(
                commands.compile_model, run, teacher, calibration, artifact, recipe, data, device=device
            ),
            compile_brief,
            compile_tables,
        )
        reports[name] = step(
            command_line("report", artifact, data=data),
            partial(commands.report_artifact, run, artifact, data, device=device),
            report_brief,
            report_tables,
        )
    comparison = side_by_side(reports["lossless"], reports["asap"])
    result = {"folder": out, "steps": steps, "comparison": comparison, "report": reports["asap"]}
    closing = [comparison_table(comparison)]
    run.show(result, lambda _: closing, lambda _: closing)
    run.note(f"the compiled model and its report are in {folder / 'asap'}")
    return result


def side_by_side(lossless: Report, asap: Report) -> list[dict[str, Any]]:
    """Rows of the closing table, each compiled model against the teacher timed beside it."""
    teacher = {
        "name": "teacher: usual PyTorch loop",
        "latency_ms": asap.model.metric("latency_teacher_ms"),
        "speedup": 1.0,
        "attention_rel_l2": 0.0,
        "prediction_agreement": 1.0,
        "accuracy": asap.model.metric("accuracy_teacher"),
    }
    return [
        teacher,
        _comparison_row("lossless: same loop, better kernel", lossless),
        _comparison_row("asap: loop replaced by a predicted dual", asap),
    ]


def _comparison_row(name: str, report: Report) -> dict[str, Any]:
    model = report.model
    errors = [site.metric("attention_rel_l2") for site in report.sites]
    known = [error for error in errors if error is not None]
    return {
        "name": name,
        "latency_ms": model.metric("latency_compiled_ms"),
        "speedup": model.metric("speedup"),
        "attention_rel_l2": max(known, default=None) if known == errors else None,
        "prediction_agreement": model.metric("prediction_agreement"),
        "accuracy": model.metric("accuracy_compiled"),
    }


def _place(folder: Path) -> None:
    """Copy teacher, digits and recipes into `folder`, but never into a folder of another use.

    Raises InputError.
    """
    ours = (folder / "teacher" / "config.json").is_file() and (folder / "digits.npz").is_file()
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"{folder}: the demo works in a new folder or in that of an earlier demo",
            help="name another one with --out",
        )
    source = files("asapc") / "demo_data" / "digits"
    if not source.joinpath("digits.npz").is_file():
        raise InputError(
            "the demo's data must be installed with the package",
            got="an installation without asapc/demo_data",
            help="install asapc from a wheel or a full checkout",
        )
    with as_file(source) as shipped:
        shutil.copytree(shipped, folder, dirs_exist_ok=True)
    for name, recipe in RECIPES.items():
        (folder / f"{name}.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
