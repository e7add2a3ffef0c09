"""Checks of MODEL, DATA and folders, as far as a path shows what they are.

torch takes seconds to import, and a mistyped path should be reported at once: this module needs nothing
but the disk, and commands call it before they import what reads the files.
"""

from __future__ import annotations

import re
from pathlib import Path

from asapc.errors import InputError, check_text
from asapc.terminal.hints import command_line

MODEL_GRAMMAR = (
    "give a folder with config.json and model.safetensors (built in, or of transformers), "
    "pkg.module:factory or file.py:factory (with --weights), a .pt2 program or an .onnx model"
)
DATA_GRAMMAR = (
    "give an .npz or .safetensors file with one array per argument of forward (and optional "
    "labels), or pkg.module:callable or file.py:callable that yields batches"
)
CHECK = "check the path"


def check_model(model: str, weights: str | None = None) -> None:
    """Raises InputError where MODEL is neither a factory nor a file that can be loaded, or where it or
    its weights are missing."""
    check_text(model, "the name of a model")
    path = Path(model)
    if path.is_dir():
        _check_folder(path)
    elif ":" in model and not path.exists():
        _check_code(model)
        if weights is not None and not Path(weights).is_file():
            raise InputError(f"{weights}: no such weights file", help=CHECK)
    elif not path.exists():
        raise InputError(f"{model}: no such model", help=MODEL_GRAMMAR)
    elif path.suffix in (".safetensors", ".pt", ".pth"):
        raise InputError(
            f"{model} is read for its weights only, and does not say how the model is built",
            help=f"name the code that builds it: file.py:factory --weights {model}",
        )
    elif path.suffix == ".py":
        raise InputError(f"{model} names no factory", help=f"write {model}:NAME_OF_THE_FUNCTION")
    elif path.suffix not in (".onnx", ".pt2"):
        raise InputError(f"{model} is not a model", help=MODEL_GRAMMAR)


def check_data(data: str | None) -> None:
    """Raises InputError where DATA is neither code nor arrays in a file.  None: not given."""
    if data is None:
        return
    check_text(data, "the name of data")
    path = Path(data)
    if is_array_file(data):
        if not path.is_file():
            raise InputError(f"{data}: no such data file", help=CHECK)
    elif ":" in data:
        _check_code(data)
    elif path.suffix != ".npy":  # whose help needs the name of forward's argument
        what = "is not data that can be read" if path.exists() else "is not data, and no such file"
        raise InputError(f"{data} {what}", help=DATA_GRAMMAR)


def check_artifact(folder: str | Path) -> None:
    """Raises InputError where there is no manifest.json."""
    if not (Path(folder) / "manifest.json").is_file():
        there = Path(folder).exists()
        raise InputError(
            f"{folder}: not a compiled artefact" if there else f"{folder}: no such folder",
            got="no manifest.json" if there else None,
            help="make one with `asapc compile MODEL --calibration CALIB -o OUT`",
        )


def check_calibration(folder: str | Path) -> None:
    """Raises InputError where nothing lies there."""
    if not Path(folder).is_dir():
        raise InputError(
            f"{folder}: no such calibration folder",
            help="make one with `asapc calibrate MODEL --data DATA -o CALIB`",
        )


def check_file(path: str | None, what: str) -> None:
    """Raises InputError where a file that was named is not there.  None: not given."""
    if path is not None and not Path(path).is_file():
        raise InputError(f"{what} {path}: no such file", help=CHECK)


def is_array_file(spec: str) -> bool:
    """Whether DATA names a file of arrays, and not code."""
    return Path(spec).suffix in (".npz", ".safetensors")


def identifier(name: str) -> str:
    """The name as a Python identifier."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return plain if re.match(r"[A-Za-z_]", plain) else f"_{plain}"


def _check_folder(folder: Path) -> None:
    config = folder / "config.json"
    if config.is_file():
        return
    if (folder / "manifest.json").is_file():
        raise InputError(
            f"{folder} is already compiled",
            help=f"give the teacher it was compiled from, or use: {command_line('report', folder)}",
        )
    raise InputError(f"{folder} must hold {config.name}", got="no such file", help=MODEL_GRAMMAR)


def _check_code(spec: str) -> None:
    """Check the file of file.py:name; a module on Python's path is checked when it is imported."""
    location = spec.rpartition(":")[0]
    if location.endswith(".py") and not Path(location).is_file():
        raise InputError(f"{location}: no such file", help="check the path before the colon")
