"""onnxruntime, where it is installed: sessions on the CPU, tensors in and out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import Tensor

from asapc.errors import InputError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

NUMPY = {
    "tensor(float)": torch.float32, "tensor(double)": torch.float64, "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64, "tensor(int32)": torch.int32, "tensor(int16)": torch.int16,
    "tensor(int8)": torch.int8, "tensor(uint8)": torch.uint8, "tensor(bool)": torch.bool,
}  # fmt: skip
ONLY_FATAL = 4  # of its log, which tells what is raised anyway


def open_session(
    model: onnx.ModelProto | str | Path, threads: int | None = None, optimise: bool = True
) -> InferenceSession:
    """A session of a model or a file.  threads: within an operator, None leaves it to onnxruntime.

    Raises InputError where onnxruntime is missing or does not take the model.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError(
            "ONNX models are checked with onnxruntime", got="no onnxruntime",
            help="pip install 'asapc[onnx]'",
        ) from error  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.log_severity_level = ONLY_FATAL
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    source: Any = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it has its own types, one for each status
        place = "the model" if isinstance(model, onnx.ModelProto) else str(model)
        raise InputError(
            f"{place}: onnxruntime must be able to run it", got=str(error).splitlines()[0],
            help="onnx.checker.check_model says what is wrong with a file",
        ) from error  # fmt: skip


def run(session: InferenceSession, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Its outputs in order.  inputs: by name, converted to the types that the model declares."""
    arrays = {}
    for declared in session.get_inputs():
        tensor = inputs[declared.name].detach().cpu()
        arrays[declared.name] = tensor.to(NUMPY.get(declared.type, tensor.dtype)).numpy()
    return [torch.as_tensor(output) for output in session.run(None, arrays)]
