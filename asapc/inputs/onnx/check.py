"""Check that the module made of an ONNX file computes what onnxruntime computes from the file."""

from __future__ import annotations

from pathlib import Path

import torch

from asapc.errors import InputError, VerificationError
from asapc.inputs.data import Batch
from asapc.inputs.onnx.module import OnnxModule
from asapc.inputs.onnx.session import open_session, run
from asapc.inputs.onnx.settings import TOLERANCE
from asapc.inputs.onnx.verify import difference_of, first_difference


def check_import(module: OnnxModule, path: Path, batch: Batch) -> float:
    """The largest difference between the module's outputs and onnxruntime's on the batch.

    Raises VerificationError, which names the first node that differs, where it is beyond TOLERANCE, and
    InputError where onnxruntime is missing or does not run the file on this batch.
    """
    given = dict(zip(module.names, batch.args, strict=False)) | batch.kwargs
    values = [given[name] for name in module.names]
    inputs = {declared.name: value for declared, value in zip(module.inputs, values, strict=True)}
    session = open_session(path)
    try:
        expected = run(session, inputs)
    except InputError as error:
        raise InputError(
            f"{path}: onnxruntime must be able to run it on the given data", got=error.got,
            help="check the data against the model's inputs, a batch of several examples included",
        ) from error
    with torch.no_grad():
        found = module.values(values, module.graph.outputs)
    worst = difference_of(expected, found)
    if not worst <= TOLERANCE:
        nodes = {name: node for node in module.graph.nodes for name in node.outputs if name}
        with torch.no_grad():
            ours = dict(zip(nodes, module.values(values, list(nodes)), strict=True))
        first = first_difference(path, ours, inputs, TOLERANCE, nodes)
        raise VerificationError(
            f"{path}: the imported model computes what onnxruntime computes",
            got=f"relative difference {worst:.2g}; {first}",
            help="this is a defect of asapc: please report the node",
        )
    return worst
