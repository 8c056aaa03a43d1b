"""Regions whose quantization costs much at the outputs: heads of detectors, necks and stems.

`layout` recognises them, `losses` measures what quantizing each costs, `times` estimates what it
saves, `protect` decides which stay float.
"""

from __future__ import annotations

from sbonnx.heads.losses import Quantized
from sbonnx.heads.protect import Protected, protect

__all__ = ["Protected", "Quantized", "protect"]
