"""What runs on a machine with an NVIDIA GPU."""

from typing import Final

ENGINES: Final = ("tensorrt", "tensorrt-rtx")
"""Builders of engines. TensorRT-RTX is for GPUs of workstations."""
