"""Commands as a user types them, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asapc.cli import main


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


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
