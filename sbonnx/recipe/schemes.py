"""Meaning of schemes: scales per channel or per tensor, zero points fixed or free."""

from __future__ import annotations

from typing import Final

from sbonnx.recipe.names import BY_WIDTH, ONLY_WEIGHTS

FULL_BITS: Final = 8
"""From this width on rounding to nearest suffices; below, input-aware roundings are the default."""

UNIFORM: Final = "uniform"
"""Sparsebit's name of plain quantization, whose rounding is set by W.ROUNDING."""

_CALIBRATED: Final = frozenset({UNIFORM}) | ONLY_WEIGHTS
"""Quantizers of weights whose scales are measured; the others learn them."""


def is_per_channel(scheme: str) -> bool:
    """Whether a scheme has one scale per channel."""
    return scheme == BY_WIDTH or scheme.startswith("per-channel-")


def is_symmetric(scheme: str, bits: int, quantizer: str) -> bool:
    """Whether a scheme has a fixed zero point, for a bit width (0: float) and a quantizer type."""
    if scheme == BY_WIDTH:
        return not 0 < bits < FULL_BITS or quantizer not in _CALIBRATED
    return scheme.endswith("-symmetric")
