"""What each version of TensorRT reads: opsets, types of codes, sizes of blocks. Planning, recipes and lint look here.

Source: the parsers' documents (newest opset, types), NVIDIA's release notes (FP4 since 10.8, weak typing and implicit
quantization gone in 11), the headers of the quantize and dequantize layers (blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

Version = Literal["11", "10", "8.6"]

VERSIONS: Final[tuple[Version, ...]] = get_args(Version)
"""Newest first; the first is meant where none is named."""

FP8: Final = "float8_e4m3fn"
FP4: Final = "float4_e2m1fn"
E8M0: Final = "float8_e8m0fnu"

INT4_BLOCKS: Final = (64, 128)
"""Values along the summed axis that share a scale in int4, the only form in which TensorRT takes it."""

INT4_BITS: Final = 4

FP8_WINDOW: Final = 32
"""Largest filter, in values of one channel, that fp8 convolutions take."""

MIN_SCALE: Final = 2.0**-14
"""No scale is below the smallest normal float16, as an engine in half precision rounds scales to it: below 2^-24 they
become 0 and the channel NaN, between the two they lose bits and older GPUs flush them.

Measured on the pack's models: 128 of 40202 channels of weights are raised, and the signal to noise of no weight falls
by more than 0.02 dB; with 2^-24 as the floor 3 would be raised, and 125 be denormal in float16."""

MAX_SCALE: Final = 65504.0
"""No scale is above the largest float16, which would be infinite in half precision."""


@dataclass(frozen=True)
class Profile:
    """One version.

    Attributes:
        version: as written behind "tensorrt@".
        newest_opset: the newest opset that its parser is documented for.
        codes: types of quantized tensors that it takes, as ONNX's types are called in numpy.
        only_strong: every op is computed in the type that the file says; before, this is a choice of the build.
    """

    version: Version
    newest_opset: int
    codes: frozenset[str]
    only_strong: bool = False

    @property
    def name(self) -> str:
        """For people: ``TensorRT 10``."""
        return f"TensorRT {self.version}"

    @property
    def target(self) -> str:
        """As lint calls it: ``tensorrt@10``."""
        return f"tensorrt@{self.version}"


PROFILES: Final[dict[str, Profile]] = {
    "11": Profile("11", 25, frozenset({"int8", FP8, "int4", FP4}), only_strong=True),
    "10": Profile("10", 24, frozenset({"int8", FP8, "int4", FP4})),
    "8.6": Profile("8.6", 17, frozenset({"int8"})),
}
"""By version, newest first. FP4 since 10.8."""
