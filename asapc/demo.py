"""`asapc demo`: the whole pipeline on a shipped checkpoint, each step by its own command line."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from asapc.errors import EXIT_OK, InputError
from asapc.inputs.reading import AUTO, Reading
from asapc.inputs.recipe import Recipe
from asapc.report import Report
from asapc.report.advice import NEARLY
from asapc.report.baseline import read_report
from asapc.report.tables import comparison_table
from asapc.session import Session
from asapc.terminal.hints import command_line

OPERATORS = {"lossless": "sinkhorn", "asap": "asap"}  # of the two compiled models


# Teachers and their data in asapc/demo_data, each in the folder of its name, as teacher/ and NAME.npz;
# keys of the recipes of both compiled models.
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "code": {
        "drop_attention_maps": True, "batch_size": 4, "max_examples": 32, "selection_examples": 8,
        "features": ["coarse:64"],
    },
    "digits": {},
}  # fmt: skip


def run_demo(
    run: Session, main: Callable[[Sequence[str]], int], out: str, example: str, reading: Reading
) -> int:
    """Inspect, calibrate, compile and report in folder `out`; the exit code of the first that fails.

    main: runs the arguments of a command line.  The model is compiled twice: with the loop kept exactly,
    and with the loop removed, so that the closing table can tell what a better loop brings from what
    amortisation brings.  Raises InputError.
    """
    if example not in EXAMPLES:
        raise InputError(f"--example must be one of {', '.join(EXAMPLES)}", got=example)
    folder = Path(out)
    _place(folder, example)
    teacher, data, calibration = (str(folder / name) for name in ("teacher", f"{example}.npz", "calib"))
    where: dict[str, Any] = {"device": None if reading.device == AUTO else reading.device,
                             "threads": reading.threads}  # fmt: skip
    commands = [
        command_line("inspect", teacher, **where),
        command_line(
            "calibrate", teacher, data=data, o=calibration, recipe=folder / "asap.yaml", **where
        ),
    ]
    for name in OPERATORS:
        commands += [
            command_line(
                "compile", teacher, calibration=calibration, o=folder / name,
                recipe=folder / f"{name}.yaml", data=data, **where,
            ),
            # One page, and one report that times all models, are enough.
            command_line(
                "report", folder / name, data=data, fast=name != "asap", torch_compile=name == "asap",
                **where,
            ),
        ]  # fmt: skip
    options = [f"--{name}" for name in ("quiet", "verbose", "debug") if getattr(run, name)]
    steps: list[dict[str, Any]] = []
    for command in commands:
        run.note(f"\n$ {command}")
        start = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO() if run.json else run.results):
            code = main([*shlex.split(command)[1:], *options])
        if code:
            return code
        steps.append({"command": command, "seconds": time.monotonic() - start})
        run.note(f"{steps[-1]['seconds']:.1f} s")
    reports = {name: read_report(folder / name / "report.json") for name in OPERATORS}
    compiling = [step["seconds"] for step in steps if step["command"].startswith("asapc compile")]
    comparison = side_by_side(reports, dict(zip(OPERATORS, compiling, strict=True)))
    shipped, why = to_ship(comparison)
    result = {
        "folder": out, "example": example, "steps": steps, "comparison": comparison, "ship": shipped,
        "why": why, "report": reports["asap"],
    }  # fmt: skip
    closing = comparison_table(comparison)
    run.show(result, lambda _: [*closing, f"ship {folder / shipped}: {why}"], lambda _: closing)
    run.note(f"the compiled models and their reports are in {folder / 'lossless'} and {folder / 'asap'}")
    return EXIT_OK


def side_by_side(
    reports: Mapping[str, Report], compile_seconds: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Rows of the closing table. All times are from the report of the amortised model, which has timed
    the four in turns, on one batch that no model has seen."""
    model = reports["asap"].model

    def row(key: str, name: str, timed: str, **known: Any) -> dict[str, Any]:
        latency, usual = (model.metric(f"latency_{of}_ms") for of in (timed, "teacher"))
        speedup = None if latency is None or usual is None else usual / latency
        return {"model": key, "name": name, "latency_ms": latency, "speedup": speedup, **known}

    failed = model.values.get("torch_compile_failed")
    name = "teacher: torch.compile"
    if failed and model.metric("latency_teacher_torch_compile_ms") is None:
        name += f" cannot run: {textwrap.shorten(failed, 70)}"
    return [
        row(
            "teacher", "teacher: usual PyTorch loop", "teacher", attention_rel_l2=0.0,
            prediction_agreement=1.0, accuracy=model.metric("accuracy_teacher"),
        ),
        row(
            "torch.compile", name, "teacher_torch_compile",
            compile_seconds=model.metric("torch_compile_seconds"),
        ),
        *(
            row(key, name, timed, compile_seconds=compile_seconds[key], **_fidelity(reports[key]))
            for key, name, timed in (
                ("lossless", "lossless: same loop, better kernel", "lossless"),
                ("asap", "asap: loop replaced by a predicted dual", "compiled"),
            )
        ),
    ]  # fmt: skip


def to_ship(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """The model to ship, and why: the lossless one, unless asap is clearly faster."""
    by_model = {row["model"]: row for row in rows}
    lossless, asap = by_model["lossless"], by_model["asap"]
    ratio = lossless["latency_ms"] / asap["latency_ms"]
    if ratio <= 1 + NEARLY:
        return "lossless", (
            f"{lossless['speedup']:.1f}x as fast as the teacher with the same predictions; "
            f"asap would run at {ratio:.2f}x that speed"
        )
    changed = round((1 - asap["prediction_agreement"]) * asap["examples"])
    return "asap", (
        f"{asap['speedup']:.1f}x as fast as the teacher and {ratio:.2f}x as fast as lossless; "
        f"{changed} of {asap['examples']} predictions change"
    )


def _fidelity(report: Report) -> dict[str, Any]:
    errors = [site.metric("attention_rel_l2") for site in report.sites]
    known = [error for error in errors if error is not None]
    return {
        "attention_rel_l2": max(known, default=None) if known == errors else None,
        "prediction_agreement": report.model.metric("prediction_agreement"),
        "accuracy": report.model.metric("accuracy_compiled"),
        "examples": report.model.metric("examples"),
    }


def _place(folder: Path, example: str) -> None:
    """Copy teacher, data and recipes into `folder`, but never into a folder of another use.

    Raises InputError.
    """
    ours = (folder / "teacher" / "config.json").is_file() and (folder / f"{example}.npz").is_file()
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"{folder}: the demo needs a new folder, or that of an earlier demo of {example}",
            help="name another one with --out",
        )
    source = files("asapc") / "demo_data" / example
    if not source.joinpath(f"{example}.npz").is_file():
        raise InputError(
            "the demo's data must be installed with the package",
            got="an installation without asapc/demo_data",
            help="install asapc from a wheel or a full checkout",
        )
    with as_file(source) as shipped:
        shutil.copytree(shipped, folder, dirs_exist_ok=True)
    for name, operator in OPERATORS.items():
        recipe = Recipe(operator=operator, **EXAMPLES[example])
        (folder / f"{name}.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
