"""Torch implementations of ONNX operators, by subject."""
