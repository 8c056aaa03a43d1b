"""Conversions on loading: validation, opset conversion, inlining of functions, sparse to dense tensors."""
