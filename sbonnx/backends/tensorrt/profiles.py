"""Profiles of TensorRT versions: opsets, quantized types and block sizes, for planning, recipes and lint.

Source: the parsers' documents (newest opset, types), NVIDIA's release notes (FP4 since 10.8, weak typing and implicit
quantization removed in 11), the headers of the quantize and dequantize layers (blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sbonnx.schemes import Version
from sbonnx.small_floats import FP4, FP8

INT4_BLOCKS: Final = (64, 128)
"""Values along the reduction axis that share a scale in int4, the only form that TensorRT supports."""

INT4_BITS: Final = 4

FP8_WINDOW: Final = 32
"""Largest filter, in values of one channel, that fp8 convolutions support."""

MIN_SCALE: Final = 2.0**-14
"""Smallest scale: the smallest normal float16, because an engine in half precision rounds scales to it.

Scales below 2^-24 would become 0 and the channel NaN; between the two, scales lose bits and older GPUs flush them.

Measured on the pack's models: 128 of 40202 weight channels are raised, and the signal-to-noise ratio of no weight falls
by more than 0.02 dB; with 2^-24 as the minimum, 3 would be raised, and 125 would be denormal in float16.
"""

MAX_SCALE: Final = 65504.0
"""Largest scale: the largest float16, because a larger one would be infinite in half precision."""


@dataclass(frozen=True)
class VersionProfile:
    """Properties of one TensorRT version.

    Attributes:
        version: as written after "tensorrt@".
        newest_opset: the newest opset that its parser is documented for.
        codes: supported types of quantized tensors, as NumPy names of ONNX's types.
        only_strong: every op is computed in the type that the file says; in older versions this is a build option.
        half_pairs: the parser reads Q/DQ pairs with scales in half precision.
    """

    version: Version
    newest_opset: int
    codes: frozenset[str]
    only_strong: bool = False
    half_pairs: bool = True

    @property
    def name(self) -> str:
        """Display name: ``TensorRT 10``."""
        return f"TensorRT {self.version}"

    @property
    def target(self) -> str:
        """Target name in lint: ``tensorrt@10``."""
        return f"tensorrt@{self.version}"


PROFILES: Final[dict[str, VersionProfile]] = {
    "11": VersionProfile("11", 25, frozenset({"int8", FP8, "int4", FP4}), only_strong=True),
    "10": VersionProfile("10", 24, frozenset({"int8", FP8, "int4", FP4})),
    "8.6": VersionProfile("8.6", 17, frozenset({"int8"}), half_pairs=False),
}
"""Profiles by version, newest first. FP4 since 10.8."""
