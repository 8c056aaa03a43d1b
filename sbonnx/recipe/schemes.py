"""What a scheme says: scales a channel or a tensor, zero points fixed or free."""

from __future__ import annotations

from typing import Final

from sbonnx.recipe.names import BY_WIDTH, ONLY_WEIGHTS

FULL_BITS: Final = 8
"""From this width on the nearest codes are good: below, roundings that see inputs are the default."""

UNIFORM: Final = "uniform"
"""The ancestor's name of plain quantization, whose rounding is W.ROUNDING's."""

_CALIBRATED: Final = frozenset({UNIFORM}) | ONLY_WEIGHTS
"""Quantizers of weights whose scales are measured; the others learn them."""


def is_per_channel(scheme: str) -> bool:
    """Whether a scheme has a scale a channel."""
    return scheme == BY_WIDTH or scheme.startswith("per-channel-")


def is_symmetric(scheme: str, bits: int, quantizer: str) -> bool:
    """Whether a scheme has its zero point fixed, at a width (0: float) and with a type of quantizer."""
    if scheme == BY_WIDTH:
        return not 0 < bits < FULL_BITS or quantizer not in _CALIBRATED
    return scheme.endswith("-symmetric")
