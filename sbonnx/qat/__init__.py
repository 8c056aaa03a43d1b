"""Quantization-aware training on torch (extra `qat`): a calibrated ONNX graph as a module, and back into that graph.

module = sbonnx.qat.prepare("resnet.onnx", "calibration/", bits="w4a4")
sbonnx.qat.train(module, "calibration/")              # or your own training loop
sbonnx.qat.export(module, "resnet_w4a4.onnx", "calibration/")
"""

from __future__ import annotations

from sbonnx.torchnet import torch_module

torch_module()  # raises a short error if torch is missing, before the imports below fail with a long traceback

from sbonnx.qat.adapters import Adapters, adapter_parameters, adapter_state, add_adapters, load_adapters  # noqa: E402
from sbonnx.qat.fakequant import METHODS, quant_parameters  # noqa: E402
from sbonnx.qat.lora import Merged, merge  # noqa: E402
from sbonnx.qat.module import float_twin, trainable  # noqa: E402
from sbonnx.qat.workflow import export, prepare, train  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import parameter_name, reimport, site_of  # noqa: E402
from sbonnx.training.batches import make_augment  # noqa: E402
from sbonnx.training.distillation import distillation, with_divergence  # noqa: E402
from sbonnx.training.loop import Settings, Trained  # noqa: E402

__all__ = [
    "METHODS",
    "Adapters",
    "Merged",
    "Settings",
    "Trained",
    "adapter_parameters",
    "adapter_state",
    "add_adapters",
    "distillation",
    "export",
    "float_twin",
    "load_adapters",
    "make_augment",
    "merge",
    "parameter_name",
    "prepare",
    "quant_parameters",
    "reimport",
    "site_of",
    "train",
    "trainable",
    "with_divergence",
]
