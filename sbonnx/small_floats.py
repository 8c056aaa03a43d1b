"""Types of 4- and 8-bit floats, and the scales of their blocks.

Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6; ONNX, "Float stored in 8 bits" and "Float
stored in 4 bits"; NVIDIA, NVFP4: blocks of 16 with E4M3 scales and one float32 scale for the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Kind = Literal["int", "fp8", "mxfp8", "mxfp4", "nvfp4"]

FP8: Final = "float8_e4m3fn"
FP4: Final = "float4_e2m1fn"
E8M0: Final = "float8_e8m0fnu"
"""Names of types in ml_dtypes and ONNX; E8M0 has powers of two from 2^-127 to 2^127."""

FP8_MAX: Final = 448
"""Largest value of float8_e4m3fn, which has no infinity: 1.75 * 2^8."""

FP4_MAX: Final = 6
"""Largest value of float4_e2m1fn, which has neither infinity nor NaN: 1.5 * 2^2."""

LEAST_POWER: Final = -126
"""Exponent of the smallest scale: 2^-127, which E8M0 has too, is a denormal of float32."""


MOST: Final = 2.0**127
"""Largest magnitude that scales are computed for."""


@dataclass(frozen=True)
class SmallFloat:
    """A type of small floats.

    Attributes:
        codes: name of the type of the codes.
        bits: of a code.
        most: largest code, as a number.
        block: values that share a scale; None: any granularity.
        scales: name of the type of the scales in a file; None: that of the tensor. E4M3 scales are multiplied by one
            scale for the tensor.
        opset: first one whose DequantizeLinear has codes and scales of these types.
    """

    codes: str
    bits: int
    most: int
    block: int | None = None
    scales: str | None = None
    opset: int = 19

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the codes in ml_dtypes."""
        codes: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.codes))
        return codes

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Type of the scales of blocks in ml_dtypes; float32 if theirs is that of the tensor."""
        return np.dtype(np.float32 if self.scales is None else getattr(ml_dtypes, self.scales))

    def block_scales(self, largest: NDArray[Any]) -> NDArray[Any]:
        """Compute the scales of blocks from their largest magnitudes.

        E8M0: ``2^(floor(log2(largest)) - floor(log2(most)))`` (OCP MX, 6.3): a magnitude above ``most`` scales
        saturates. E4M3: ``largest / most``, rounded to E4M3 in units of the tensor's scale. That is a power of two, so
        that products are exact: the smallest with which no scale saturates. Magnitudes above `MOST` saturate, so that
        none is rounded to infinity.

        Args:
            largest: float64, finite, >= 0, of any shape.

        Returns:
            float32, > 0, in the shape of `largest`: exactly what the file will hold.
        """
        if self.scales == E8M0:
            exponents = np.frexp(largest)[1] - np.frexp(self.most)[1]
            powers = np.where(largest > 0, np.clip(exponents, LEAST_POWER, -LEAST_POWER), 0)
            return np.asarray(np.ldexp(np.float32(1), powers), np.float32)
        largest = np.minimum(largest, MOST)
        unit = tensor_scale(largest / self.most)
        ratio = np.maximum(largest / self.most / unit, float(ml_dtypes.finfo(FP8).smallest_normal))  # type: ignore[no-untyped-call]
        return np.asarray(ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(unit))


def tensor_scale(scales: NDArray[Any]) -> float:
    """Return the smallest power of two in whose units the largest of the scales of blocks is at most 448."""
    fraction, exponent = map(float, np.frexp(np.max(scales, initial=0.0) / FP8_MAX))
    exponent -= fraction == 0.5
    return float(
        np.ldexp(1.0, max(int(exponent), LEAST_POWER + 6))
    )  # with the smallest E4M3 number, 2^-6, a normal float32


FLOATS: Final[dict[Kind, SmallFloat]] = {
    "fp8": SmallFloat(FP8, 8, FP8_MAX),
    "mxfp8": SmallFloat(FP8, 8, FP8_MAX, 32, E8M0, 24),
    "mxfp4": SmallFloat(FP4, 4, FP4_MAX, 32, E8M0, 24),
    "nvfp4": SmallFloat(FP4, 4, FP4_MAX, 16, FP8, 23),
}
"""Types of small floats by kind."""

IN_BLOCKS: Final = tuple(kind for kind, float_kind in FLOATS.items() if float_kind.block is not None)
"""Kinds whose scales are of blocks."""
