"""Training loop: losses, augmentation, schedules, checkpoints, EMA of the weights."""

from __future__ import annotations

from sbonnx.torchnet import torch_module

torch_module()  # raises a short error if torch is missing, before an import fails with a long traceback
