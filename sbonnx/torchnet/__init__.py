"""Evaluation of ONNX graphs by torch, with gradients. torch is imported lazily, when a net is created."""

from __future__ import annotations

from sbonnx.torchnet.call import Call, Function, Unfit, compute, torch_module
from sbonnx.torchnet.net import Hook, TorchNet, as_tensor, lacking
from sbonnx.torchnet.ops import FUNCTIONS, NUMBERS, RUNTIME_FUNCTIONS, function_of

__all__ = [
    "FUNCTIONS",
    "NUMBERS",
    "RUNTIME_FUNCTIONS",
    "Call",
    "Function",
    "Hook",
    "TorchNet",
    "Unfit",
    "as_tensor",
    "compute",
    "function_of",
    "lacking",
    "torch_module",
]
