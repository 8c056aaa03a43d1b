"""Simulated quantized graph: tensors of a network whose activations and weights are quantized."""
