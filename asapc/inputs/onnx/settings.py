"""What an ONNX file is asked for, and the record of one; nothing here needs the extra."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Interval
from pydantic import AllowInfNan, Strict, StringConstraints, ValidationError, create_model

from asapc.errors import InputError
from asapc.formats.json_text import read_json
from asapc.formats.places import DIGEST, digest_of
from asapc.inputs.settings import Switch
from asapc.terminal.hints import install_line, option

MODEL, RECORD = "model.onnx", "onnx.json"
DOMAIN = "ai.asapc"  # of the functions that asapc writes
OPSETS = (18, 23)  # least and most
DEFAULT_OPSET = 18  # of a file that is written anew
TOLERANCE = 1e-4


@dataclass(frozen=True)
class OnnxSettings:
    """tolerance: an output's largest entry counts as 1e-3 at least.  float16: attention operators inside
    stay in float32.

    Raises InputError for an opset that is not written, or a tolerance that is none.
    """

    opset: int | None = option(None, "ONNX opset, 18 to 23. Default: 18, or that of an .onnx teacher.")
    tolerance: float | None = option(
        None, "Largest allowed difference of each ONNX output, relative to its largest entry. Default: "
        "1e-4, or four times PyTorch's own error in float16.",
    )  # fmt: skip
    float16: bool = option(False, "Store weights and activations in half precision.")

    def __post_init__(self) -> None:
        if self.opset is not None and not OPSETS[0] <= self.opset <= OPSETS[1]:
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
    """What onnx.json of an artefact holds of its model.onnx; None without one, and where the file is gone
    or another than was verified.  Raises InputError for a broken onnx.json."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: must be readable JSON", got=str(error)) from error
    try:
        _Record.model_validate(record)
    except ValidationError:
        raise InputError(f"{path}: must be what `asapc export` writes", help="export again") from None
    checked: dict[str, Any] = record
    return checked if digest_of(folder / MODEL) == checked["sha256"] else None


def is_unverified(folder: Path) -> bool:
    """Whether there is a model.onnx that no record is of.  Raises InputError as read_record."""
    return (folder / MODEL).is_file() and read_record(folder) is None


_Count = Annotated[int, Strict(), Interval(gt=0, lt=2**63)]
_Error = Annotated[float, Strict(), AllowInfNan(False), Ge(0)]
_Sizes = list[dict[str, _Count]]
_Digest = Annotated[str, StringConstraints(pattern=DIGEST)]
_Record = create_model(  # and what else `asapc export` may write
    "_Record", opset=_Count, bytes=_Count, sha256=_Digest, float16=Switch, functions=list[str],
    largest=_Error, tolerance=_Error, shapes=_Sizes, skipped=_Sizes,
)  # fmt: skip


def require_extra(*needed: str) -> None:
    """Raises InputError, with the command that installs it, where the extra `onnx` is missing.

    needed: what of it, all by default.
    """
    needed = needed or ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            "ONNX files are read with onnx, written with onnxscript and checked with onnxruntime",
            got=f"{' and '.join(missing)} not installed",
            help=install_line("onnx"),
        )
