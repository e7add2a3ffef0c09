"""An ONNX model read as a teacher."""
