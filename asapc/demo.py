"""`asapc demo`: the whole pipeline on a shipped checkpoint, each step with its command line."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, TypeVar

from asapc import commands
from asapc.errors import InputError, VerificationError
from asapc.inputs.reading import AUTO, Reading
from asapc.inputs.recipe import Recipe, load_recipe
from asapc.report import Report
from asapc.report.advice import NEARLY
from asapc.report.tables import comparison_table
from asapc.session import Session
from asapc.terminal.hints import command_line

T = TypeVar("T")
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
    run: Session, out: str, example: str = "code", device: str = AUTO
) -> dict[str, Any]:
    """Inspect, calibrate, compile and report in folder `out`; returns what --json prints.

    The model is compiled twice: with the loop kept exactly, and with the loop removed, so that the
    closing table can tell what a better loop brings from what amortisation brings.  Raises InputError.
    """
    if example not in EXAMPLES:
        raise InputError(f"--example must be one of {', '.join(EXAMPLES)}", got=example)
    folder = Path(out)
    _place(folder, example)
    teacher, data, calibration = (str(folder / name) for name in ("teacher", f"{example}.npz", "calib"))
    reading, steps = Reading(device=device), list[dict[str, Any]]()

    def step(command: str, kind: str, action: Callable[[], T]) -> T:
        run.note(f"\n$ {command}")
        start = time.monotonic()
        result = action()
        seconds = time.monotonic() - start
        steps.append({"command": command, "seconds": seconds})
        if not run.json:
            run.present(result, kind)
        run.note(f"{seconds:.1f} s")
        return result

    step(
        command_line("inspect", teacher), "inspect",
        partial(commands.inspect_model, teacher, None, reading),
    )  # fmt: skip
    recipe = str(folder / "asap.yaml")
    step(
        command_line("calibrate", teacher, data=data, o=calibration, recipe=recipe), "calibration",
        partial(commands.calibrate_model, run, teacher, data, calibration, recipe, reading),
    )  # fmt: skip
    reports, compile_seconds = {}, {}
    for name in OPERATORS:
        artifact, recipe = str(folder / name), str(folder / f"{name}.yaml")
        step(
            command_line(
                "compile", teacher, calibration=calibration, o=artifact, recipe=recipe, data=data
            ),
            "compile",
            partial(commands.compile_model, run, teacher, calibration, artifact, recipe, data, reading),
        )
        compile_seconds[name] = steps[-1]["seconds"]
        fast = name != "asap"  # the page of one of them is enough
        reports[name] = step(
            command_line("report", artifact, data=data, fast=fast), "report",
            partial(
                commands.report_artifact, run, artifact, data, measured=commands.Measured(fast=fast),
                reading=reading,
            ),
        )  # fmt: skip
    run.note("\ntiming the models in turn, and the teacher under torch.compile")
    timed = time_in_turn(folder, data, reports, device)
    comparison = side_by_side(reports, timed, compile_seconds)
    shipped, why = to_ship(comparison)
    result = {
        "folder": out, "example": example, "steps": steps, "comparison": comparison, "ship": shipped,
        "why": why, "report": reports["asap"],
    }  # fmt: skip
    closing = comparison_table(comparison)
    run.show(result, lambda _: [*closing, f"ship {folder / shipped}: {why}"], lambda _: closing)
    run.note(f"the compiled models and their reports are in {folder / 'lossless'} and {folder / 'asap'}")
    return result


def time_in_turn(
    folder: Path, data: str, reports: Mapping[str, Report], device: str
) -> dict[str, dict[str, Any]]:
    """Median latency of one batch of the gate split, after parity: name -> {"latency_ms": ms}.

    "torch.compile" is the teacher under it, also with "compile_seconds"; or only "failed", the reason.
    Raises VerificationError where a model is further from the teacher than it may be.
    """
    from asapc.artifact import load
    from asapc.device import chosen_device
    from asapc.inputs.data import open_data, split_of
    from asapc.inputs.load import load_teacher
    from asapc.measure.differences import comparable, largest_difference
    from asapc.measure.timing import ENOUGH, interleaved_medians
    from asapc.measure.torch_compiled import torch_compiled
    from asapc.passes.analyse import OUTPUT_TOLERANCE
    from asapc.program.runner import Runner

    place = chosen_device(device)
    teacher = load_teacher(str(folder / "teacher")).model
    assert teacher is not None
    compiled = {name: load(folder / name) for name in reports}
    source = open_data(data, None).on(place)
    size = load_recipe(folder / "asap.yaml").batch_size
    batch = next(source.batches(size, select=lambda content: split_of(content) == "gate"))
    runners: dict[str, Any] = {
        name: Runner(model.to(place)) for name, model in {"teacher": teacher, **compiled}.items()
    }
    found: dict[str, dict[str, Any]] = {}
    under = torch_compiled(runners["teacher"], batch)
    if under.call is None:
        found["torch.compile"] = {"failed": textwrap.shorten(under.failed, 70)}
    else:
        found["torch.compile"] = {"compile_seconds": under.seconds}
        runners["torch.compile"] = under.call
    outputs = {name: comparable(runner(batch)) for name, runner in runners.items()}
    for name, output in outputs.items():
        # A report has measured all of the gate split, this batch included.
        known = reports[name].model.metric("max_abs_error") if name in reports else None
        difference = largest_difference(outputs["teacher"], output)
        if not difference <= OUTPUT_TOLERANCE + (known or 0.0):
            raise VerificationError(
                f"demo: {name} must give the teacher's predictions before it is timed",
                got=f"a difference of {difference:.2g}",
            )
    calls = {name: partial(runner, batch) for name, runner in runners.items()}  # all have just run
    for name, times in interleaved_medians(calls, repeats=5, warmup=0, enough=ENOUGH).items():
        found.setdefault(name, {})["latency_ms"] = times["median_ms"]
    return found


def side_by_side(
    reports: Mapping[str, Report],
    timed: Mapping[str, Mapping[str, Any]],
    compile_seconds: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Rows of the closing table.  timed: of time_in_turn."""
    usual = timed["teacher"]["latency_ms"]

    def row(key: str, name: str, **known: Any) -> dict[str, Any]:
        latency = timed[key].get("latency_ms")
        return {
            "model": key, "name": name, "latency_ms": latency,
            "speedup": None if latency is None else usual / latency, **known,
        }  # fmt: skip

    compiler = timed["torch.compile"]
    name = "teacher: torch.compile"
    if "failed" in compiler:
        name += f" cannot run: {compiler['failed']}"
    return [
        row(
            "teacher", "teacher: usual PyTorch loop", attention_rel_l2=0.0, prediction_agreement=1.0,
            accuracy=reports["asap"].model.metric("accuracy_teacher"),
        ),
        row("torch.compile", name, compile_seconds=compiler.get("compile_seconds")),
        *(
            row(key, name, compile_seconds=compile_seconds[key], **_fidelity(reports[key]))
            for key, name in (
                ("lossless", "lossless: same loop, better kernel"),
                ("asap", "asap: loop replaced by a predicted dual"),
            )
        ),
    ]  # fmt: skip


def to_ship(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """The model that is to be shipped, and why: the lossless one, unless asap is clearly faster."""
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
