"""onnxruntime-web, in WebAssembly (WASM) and WebGPU: rules of the `onnxruntime` backend, and what differs in a browser.

- WASM runs the kernels of onnxruntime's CPU provider, compiled for 128-bit SIMD. They add 8-bit products exactly, so
  that weights need no headroom. Products of weights in blocks (MatMulNBits) compute in float32 at every accuracy level,
  and float16 is computed slowly.
- WebGPU has kernels for float32 and float16, DequantizeLinear, MatMulNBits and GatherBlockQuantized. Operators that it
  has no kernel for run in WASM, with copies between both: QuantizeLinear, DynamicQuantizeLinear, MatMulInteger, QLinear
  operators. An 8-bit file is therefore for WASM, and 4-bit weights are for both (docs/web.md).

Kernel costs were not measured: every op with an integer kernel is quantized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from sbonnx.backends.onnxruntime.backend import MODES, ONNXRUNTIME, STEPS, OrtFiles, OrtNumbers
from sbonnx.backends.onnxruntime.convolutions import align
from sbonnx.backends.onnxruntime.rewrites import pad_codes
from sbonnx.backends.onnxruntime.stems import widen_stems

FOR_WIDE_VECTORS: Final = (pad_codes, align, widen_stems)
"""Rewrites to multiples of channels that AVX2 and AVX-512 need: WASM has 128-bit vectors, and they cost bytes."""

FLOAT_PRODUCTS: Final = 1
"""Accuracy level of MatMulNBits that computes in float32, as WASM does at every level."""

WEIGHT_ONLY: Final = MODES["weight_only"]

VARIANTS: Final[dict[str, dict[str, Any] | None]] = {
    "fp16": {"bits": "w0a0", "high_precision": "fp16"},
    "q8": None,
    "q4": {"mode": "weight_only"},
    "q4f16": {"mode": "weight_only", "high_precision": "fp16"},
}
"""Files beside the float model, by dtype."""

WEB: Final = replace(
    ONNXRUNTIME,
    name="web",
    numbers=OrtNumbers(int32_bias=True, only_channels=True, half_blocks=True, narrow_depthwise=True),
    files=OrtFiles(
        packs_weights=True,
        integer_operators=True,
        variants=VARIANTS,
        steps=tuple(step for step in STEPS if step not in FOR_WIDE_VECTORS),
    ),
    modes={
        **MODES,
        "weight_only": replace(
            WEIGHT_ONLY, defaults={**WEIGHT_ONLY.defaults, "ACCURACY_LEVEL": FLOAT_PRODUCTS}, experts=False
        ),
    },
    costs=None,
)
