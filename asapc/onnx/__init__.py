"""ONNX: files as teachers, and compiled models as files that any runtime runs."""
