"""Qualcomm's QNN execution provider of onnxruntime: rules, and per-tensor overrides. No device is needed or used."""
