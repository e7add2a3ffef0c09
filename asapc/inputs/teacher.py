"""Teacher: the model that is compiled, wherever it came from."""

from __future__ import annotations

import sys
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


def uncompiled(model: nn.Module) -> nn.Module:
    """The module in what torch.compile(module) returns, which does not call it by its name.

    Compiled modules inside another are called by name, and stay.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")  # without which nothing was compiled
    if frames is None or not isinstance(model, frames.OptimizedModule):
        return model
    return model.get_submodule("_orig_mod")
