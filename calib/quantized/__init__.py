"""Simulated quantized graph: values of a network whose activations and weights are quantized."""
