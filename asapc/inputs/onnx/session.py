"""onnxruntime, where it is installed: sessions on the CPU or on CUDA, tensors in and out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.inputs.onnx.host import DTYPES
from asapc.inputs.onnx.settings import require_extra
from asapc.inputs.onnx.tensors import type_name
from asapc.terminal.printed import reason

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

TYPES = {f"tensor({type_name(number).lower()})": dtype for number, dtype in DTYPES.items()}
ONLY_FATAL = 4  # of its log, which tells what is raised anyway


def open_session(
    model: onnx.ModelProto | str | Path, threads: int | None = None, optimise: bool = True
) -> InferenceSession:
    """A session of a model or a file.  threads: within an operator, None leaves it to onnxruntime.

    Raises InputError where onnxruntime is missing or does not take the model.
    """
    require_extra()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = ONLY_FATAL
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    try:
        source: Any = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
        return onnxruntime.InferenceSession(source, options, providers=providers())
    except Exception as error:  # it has its own types, one for each status; protobuf too
        place = "the model" if isinstance(model, onnx.ModelProto) else str(model)
        raise InputError(
            f"{place}: onnxruntime must be able to run it", got=reason(error),
            help="onnx.checker.check_model says what is wrong with a file",
        ) from error  # fmt: skip


def providers() -> list[str]:
    """Where a session runs, best first."""
    import onnxruntime

    known = onnxruntime.get_available_providers()
    return [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in known]


def run(session: InferenceSession, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Its outputs in order.  inputs: by name, converted to the types that the model declares.

    Raises InputError where the runtime fails on them.
    """
    arrays = {}
    for declared in session.get_inputs():
        tensor = inputs[declared.name].detach().cpu()
        arrays[declared.name] = tensor.to(TYPES.get(declared.type, tensor.dtype)).numpy()
    try:
        outputs = session.run(None, arrays)
    except Exception as error:  # it has its own types, one for each status
        raise InputError(
            "onnxruntime must be able to run the model on this batch", got=reason(error)
        ) from error
    return [torch.as_tensor(output) for output in outputs]


def observe(path: Path, wanted: Collection[str], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values by name, in the order of the file's nodes, of a run without optimisation: those of `wanted`
    that nodes of the main graph make.

    Raises InputError as open_session and run, a model too large for one message included.
    """
    model = onnx.load(path)
    made = [name for node in model.graph.node for name in node.output if name in wanted]
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made if name not in known)
    session = open_session(model, optimise=False)
    names = [value.name for value in session.get_outputs()]
    values = dict(zip(names, run(session, inputs), strict=True))
    return {name: values[name] for name in made}
