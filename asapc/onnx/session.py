"""ONNX Runtime on tensors: the runtime that checks every file, and times it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asapc.errors import InputError


def open_session(model: Path | bytes, threads: int | None = None, optimise: bool = True) -> Any:
    """An onnxruntime.InferenceSession on the CPU, or on CUDA where the runtime has it.

    model: a file, or a model without external data.  threads: for one operator, None for the
    runtime's own choice.  Raises InputError if onnxruntime is not installed or refuses the model.
    """
    runtime = onnxruntime()
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors: its warnings speak of nodes it folds
    if threads is not None:
        options.intra_op_num_threads = threads
    if not optimise:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    known = runtime.get_available_providers()
    providers = [p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in known]
    try:
        return runtime.InferenceSession(
            model if isinstance(model, bytes) else str(model), options, providers=providers
        )
    except Exception as error:  # the runtime's own exceptions share no base class
        name = model.name if isinstance(model, Path) else "the model"
        raise InputError(
            f"{name}: ONNX Runtime {runtime.__version__} must be able to load it",
            got=" ".join(str(error).split())[:300],
        ) from error


def run(session: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The outputs in order.  inputs: tensors by name, on any device; extra ones are left out.

    Raises InputError with the runtime's message if it fails on them.
    """
    wanted = [value.name for value in session.get_inputs()]
    arrays = {name: inputs[name].detach().cpu().contiguous().numpy() for name in wanted}
    try:
        outputs: Sequence[np.ndarray] = session.run(None, arrays)
    except Exception as error:
        raise InputError(
            "ONNX Runtime must be able to run the model on this batch",
            got=" ".join(str(error).split())[:300],
        ) from error
    return [torch.from_numpy(np.array(output)) for output in outputs]


def onnxruntime() -> Any:
    """The module.  Raises InputError with the command that installs it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError(
            "ONNX files are checked and timed with onnxruntime",
            got="it is not installed",
            help="pip install 'asapc[onnx]'",
        ) from error
    return onnxruntime
