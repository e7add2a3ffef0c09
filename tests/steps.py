"""Commands as a user types them, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asapc.cli import main


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What --json prints."""
    capsys.readouterr()
    code = run(*arguments, "--json", "--quiet")
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def files(folder: Path, *others: str) -> dict[str, bytes]:
    """Every file in the folder, at any depth, but those of the names in `others`."""
    there = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in others)
    return {str(path.relative_to(folder)): path.read_bytes() for path in there}


def expect(
    capsys: pytest.CaptureFixture[str], code: int, arguments: Sequence[object], *words: str
) -> None:
    """Of a command that is refused: its exit code, and one message that has these words."""
    capsys.readouterr()
    assert run(*arguments) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("asapc: ")]
    assert len(lines) == 1, captured.err
    for word in words:
        assert word in captured.err, captured.err


def calibrated(
    folder: Path, model: object, data: object, recipe: dict[str, Any], *options: object,
    name: str = "calib",
) -> Path:  # fmt: skip
    file = folder / f"{name}.recipe.json"
    file.write_text(json.dumps(recipe))
    given = ("--data", data, "-o", folder / name, "--recipe", file, "--quiet", *options)
    assert run("calibrate", model, *given) == 0
    return folder / name


def compiled(
    folder: Path, model: object, data: object, recipe: dict[str, Any], *options: object, name: str = "out"
) -> Path:
    """Calibrated, too, in a folder beside it."""
    calibration = calibrated(folder, model, data, recipe, *options, name=f"{name}-calib")
    given = ("--calibration", calibration, "-o", folder / name, "--quiet", *options)
    assert run("compile", model, *given) == 0
    return folder / name
