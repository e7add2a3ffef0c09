"""Compiled models as ONNX files that any runtime runs; asapc.inputs.onnx reads them as teachers."""
