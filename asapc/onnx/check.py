"""Check: the module that was made of an ONNX file computes what onnxruntime makes of the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from asapc.data import Batch
from asapc.errors import InputError, VerificationError
from asapc.onnx.module import OnnxModule
from asapc.onnx.session import open_session, run

TOLERANCE = 1e-4  # of float32 outputs, relative to max(1, largest)


def check_import(module: OnnxModule, path: Path, batch: Batch) -> float:
    """The largest difference between the module's outputs and onnxruntime's on the batch.

    Raises VerificationError, which names the first node that differs, where it is beyond TOLERANCE, and
    InputError where onnxruntime is missing or does not run the file on this batch.
    """
    given = dict(zip(module.names, batch.args, strict=False)) | batch.kwargs
    values = [given[name] for name in module.names]
    inputs = {own.name: value for own, value in zip(module.inputs, values, strict=True)}
    session = open_session(path)
    try:
        expected = run(session, inputs)
    except InputError as error:
        raise InputError(
            f"{path}: onnxruntime must be able to run it on the given data", got=error.got,
            help="check the data against the model's inputs, a batch of several examples included",
        ) from error
    with torch.no_grad():
        own = module.values(values, module.graph.outputs)
    worst = max(map(_difference, own, expected), default=0.0)
    if not worst <= TOLERANCE:
        raise VerificationError(
            f"{path}: the imported model computes what onnxruntime computes",
            got=f"relative difference {worst:.2g}, {_first_difference(module, path, inputs)}",
            help="this is a defect of asapc: please report the node",
        )
    return worst


def _difference(own: Tensor, expected: Tensor) -> float:
    """Largest difference relative to max(1, largest); NaN and infinities must be in the same places."""
    if own.shape != expected.shape:
        return float("inf")
    a, b = own.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    a, b = a[~same], b[~same]
    if not a.numel():
        return 0.0
    finite = expected.double()[expected.double().isfinite()]
    scale = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
    return float((a - b).abs().nan_to_num(nan=float("inf")).max()) / scale


def _first_difference(module: OnnxModule, path: Path, inputs: Mapping[str, Tensor]) -> str:
    """In words.  Every value of the main graph becomes an output of an unoptimised session."""
    nodes = [(node, name) for node in module.graph.nodes for name in node.outputs if name]
    try:
        model = onnx.load(path)
        known = {value.name for value in model.graph.output}
        there = {name for node in model.graph.node for name in node.output}
        wanted = [name for _, name in nodes if name in there]
        model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in wanted if n not in known)
        session = open_session(model, optimise=False)
        names = [value.name for value in session.get_outputs()]
        expected: dict[str, Any] = dict(zip(names, run(session, inputs), strict=True))
        with torch.no_grad():
            own = module.values([inputs[value.name] for value in module.inputs], wanted)
    except Exception as error:  # of a model that is too large for it, for one
        return f"and no first node, for {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    values = dict(zip(wanted, own, strict=True))
    for node, name in nodes:
        if name in values and not _difference(values[name], expected[name]) <= TOLERANCE:
            return f"first in {node}"
    return "in no node alone"
