"""What an ONNX file is asked for, and the record of one; nothing here needs the extra."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asapc.errors import InputError
from asapc.formats.json_text import read_json

MODEL, RECORD = "model.onnx", "onnx.json"
OPSETS = (18, 23)  # least and most
DEFAULT_OPSET = 18
TOLERANCE = 1e-4


@dataclass(frozen=True)
class OnnxSettings:
    """tolerance: largest difference of an output, relative to max(1, its largest entry); None for
    TOLERANCE, or in float16 for four times what PyTorch itself loses there.
    float16: weights and activations in half precision, attention operators inside in float32.

    Raises InputError for an opset that is not written, or a tolerance that is none.
    """

    opset: int = DEFAULT_OPSET
    tolerance: float | None = None
    float16: bool = False

    def __post_init__(self) -> None:
        if not OPSETS[0] <= self.opset <= OPSETS[1]:
            raise InputError(
                f"ONNX: opset must be from {OPSETS[0]} to {OPSETS[1]}", got=self.opset,
                help=f"{DEFAULT_OPSET} runs everywhere",
            )  # fmt: skip
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InputError(
                "ONNX: tolerance must lie between 0 and 1", got=self.tolerance,
                help=f"{TOLERANCE:g} is what float32 keeps",
            )  # fmt: skip


def read_record(folder: Path) -> dict[str, Any] | None:
    """What onnx.json of an artefact holds, None without one.  Raises InputError for a broken file."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: must be readable JSON", got=str(error)) from error
    if not _is_record(record):
        raise InputError(f"{path}: must be what `asapc export` writes", help="export again")
    checked: dict[str, Any] = record
    return checked


def _is_record(record: Any) -> bool:
    def are_sizes(shapes: Any) -> bool:
        return isinstance(shapes, list) and all(
            isinstance(shape, dict) and all(isinstance(size, int) for size in shape.values())
            for shape in shapes
        )

    return (
        isinstance(record, dict)
        and all(isinstance(record.get(key), int) for key in ("opset", "bytes"))
        and all(isinstance(record.get(key), float) for key in ("largest", "tolerance"))
        and all(isinstance(name, str) for name in record.get("functions", [None]))
        and all(are_sizes(record.get(key)) for key in ("shapes", "skipped"))
    )


def require_extra() -> None:
    """Raises InputError, with the command that installs it, where the extra `onnx` is missing."""
    missing = [name for name in ("onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            "ONNX files are written with onnxscript and checked with onnxruntime",
            got=f"{' and '.join(missing)} not installed",
            help="pip install 'asapc[onnx]'",
        )
