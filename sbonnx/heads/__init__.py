"""Regions whose quantization costs much at the outputs: heads of detectors, necks and stems, and single layers.

`recognition` has the regions of detectors, `costly_layers` the layers that lose the outputs of other networks, `losses`
measures what quantizing costs, `protect` decides what stays float.
"""

from __future__ import annotations

from sbonnx.heads.losses import Quantized
from sbonnx.heads.protect import Protected, protect, protect_layers

__all__ = ["Protected", "Quantized", "protect", "protect_layers"]
