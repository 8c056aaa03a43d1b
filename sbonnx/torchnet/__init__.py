"""Torch as an evaluator of graphs, for what needs gradients. torch is imported when a net is made, not before."""

from __future__ import annotations

from sbonnx.torchnet.call import Call, Function, Unfit, compute, torch_module
from sbonnx.torchnet.net import Hook, TorchNet, as_tensor, lacking
from sbonnx.torchnet.table import FUNCTIONS, NUMBERS

__all__ = [
    "FUNCTIONS",
    "NUMBERS",
    "Call",
    "Function",
    "Hook",
    "TorchNet",
    "Unfit",
    "as_tensor",
    "compute",
    "lacking",
    "torch_module",
]
