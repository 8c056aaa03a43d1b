"""Decoders (LLMs) as exported to ONNX: inspect, quantize and evaluate whole folders.

    report = sbonnx.llm.quantize("phi-4-mini", "notes.txt", output="phi-4-mini-int4", bits=4)

Texts need the extra: ``pip install 'sbonnx[llm]'``.
"""

from __future__ import annotations

from sbonnx.llm.adapt import AdaptedDecoder
from sbonnx.llm.api import adapt, evaluate, quantize
from sbonnx.llm.evaluate import DecoderLimits
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.report.decoder import DecoderEvaluation

__all__ = [
    "AdaptedDecoder",
    "Decoder",
    "DecoderEvaluation",
    "DecoderLimits",
    "adapt",
    "evaluate",
    "quantize",
    "read_decoder",
]
