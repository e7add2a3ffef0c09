"""Teacher: the model that is compiled, wherever it came from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram


@dataclass(frozen=True)
class Teacher:
    """What is compiled: a module in eval mode or an exported program, never both.

    source:      where it came from, in words, for reports.
    fingerprint: sha256 over the sorted state-dict names, dtypes, shapes and bytes.
    builtin:     one of asapc.models.ARCHITECTURES, so example_inputs knows its inputs.
    onnx:        the .onnx file that `model` evaluates, None otherwise.
    """

    model: nn.Module | None
    program: ExportedProgram | None
    source: str
    fingerprint: str
    builtin: bool = False
    onnx: Path | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Restore the model's buffers afterwards: its code may count calls in them."""
        before = [
            (module, name, tensor, None if tensor.is_inference() else (tensor.clone(), tensor._version))
            for module in ([] if self.model is None else self.model.modules())
            for name, tensor in module._buffers.items() if tensor is not None
        ]  # fmt: skip
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, tensor, kept in before:
                    module._buffers[name] = tensor
                    if kept is not None and tensor._version != kept[1]:
                        tensor.copy_(kept[0])


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside what torch.compile(module) returns. Compiled modules inside another one stay."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # without which nothing was compiled
    if frames is None or not isinstance(model, frames.OptimizedModule):
        return model
    return model.get_submodule("_orig_mod")
