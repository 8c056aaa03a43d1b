"""Measurement of the kernels of onnxruntime on this machine, and of the costs that plans read."""
