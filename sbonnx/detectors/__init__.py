"""Heads of detectors: recognition by the structure of the graph, and decoding of their outputs into boxes.

`head_structure` answers questions about the graph, `recognize` decides which head it has, `decode` has the formulas,
`nms` the suppression, and `class_numbers` the classes of the model in those of the labels.
"""

from __future__ import annotations

from sbonnx.detectors.head import HEADS, HeadChoice, head_choice
from sbonnx.detectors.head_decoder import HeadDecoder

__all__ = ["HEADS", "HeadChoice", "HeadDecoder", "head_choice"]
