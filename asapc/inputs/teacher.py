"""Teacher: the model that is compiled, wherever it came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram


@dataclass(frozen=True)
class Teacher:
    """What is compiled: a module in eval mode or an exported program, never both.

    source:      where it came from, in words, for reports.
    fingerprint: sha256 over the sorted state-dict names, dtypes, shapes and bytes.
    builtin:     one of asapc.models.ARCHITECTURES, so example_inputs knows its inputs.
    factory:     "pkg.module:factory" or "file.py:factory", None otherwise.
    onnx:        the .onnx file that `model` evaluates, None otherwise.
    """

    model: nn.Module | None
    program: ExportedProgram | None
    source: str
    fingerprint: str
    builtin: bool
    factory: str | None
    onnx: Path | None = None
