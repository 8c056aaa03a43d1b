"""Selection of onnxruntime's convolution kernels by size, in float and in integers, and their padded channel counts.

Names of variants are those of the table of kernel costs; `sbonnx.tuning` measures by the same functions.

Float convolutions run on blocks of channels (NCHWc: 16 channels with AVX-512, 8 with AVX2). The last block is padded
with zeros, which are computed as well. With fewer input channels than a block, the input is read unblocked; with more
that are no multiple of four, nothing is blocked.

Integer convolutions run on channels last. The symmetric kernel (MLAS, ConvSym) needs rows of input channels in fours,
and output channels in fours from 16 on; others copy their windows into a matrix first (im2col) and write the last
channels one by one. Depthwise ones need channels in sixteens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

DOT: Final = 4
"""Values that one integer instruction multiplies and adds."""

LANES: Final = 16
"""Channels that an integer kernel computes at a time."""

LARGEST_WIDENING: Final = 2.0
"""Largest factor by which depthwise convolutions are widened: beyond it new channels cost as much as they save."""

FOLDED_TAPS: Final = 25
"""Taps of a stem above which `widen_stems` folds blocks of 2 x 2 pixels into channels."""

BLOCK: Final = 2
"""Side of the blocks of pixels that are folded into channels; also the required stride."""

FEW_CHANNELS: Final = 4
"""Input channels up to which folding pays: with more, 49 taps are gathered in longer pieces, which is cheaper."""

MEASURED_ROW: Final = 3
"""Taps in a row of the kernels for which im2col was measured."""

SMALL_TAPS: Final = 9
GROUPED: Final = (4, 8, 32)
"""Channels per group for which grouped convolutions were measured."""


def padded(channels: int, block: int) -> int:
    """Round a number of channels up to whole blocks."""
    return -(-channels // block) * block


def integer_conv(inner: int, outputs: int, taps: int, groups: int) -> str:
    """Return the variant of QLinearConv.

    Args:
        inner: input channels per group.
        outputs: output channels.
        taps: size of the kernel in positions.
        groups: number of groups.
    """
    if groups > 1 and inner == 1 and outputs == groups:
        return _depthwise(taps) if groups % LANES == 0 else "depthwise odd"
    if groups > 1:  # several outputs of one channel too: the depthwise kernel writes as many channels as it reads
        return _grouped(inner)
    name = "1x1" if taps == 1 else "3x3"
    return name if inner % DOT == 0 and outputs % DOT == 0 and outputs >= LANES else f"{name} odd"


def folds(inner: int, sides: Sequence[int], attrs: Mapping[str, Any]) -> bool:
    """Return whether `widen_stems` folds blocks of pixels into channels, if the sides of the image are divisible.

    Args:
        inner: input channels.
        sides: of the kernel.
        attrs: of the convolution.
    """
    steps = [list(attrs.get(name, [1] * len(sides))) for name in ("strides", "dilations")]
    return (
        prod(sides) > FOLDED_TAPS
        and inner <= FEW_CHANNELS
        and len(sides) == BLOCK
        and steps == [[BLOCK] * BLOCK, [1] * BLOCK]
    )


def copied(rows: int, taps: int) -> int:
    """Return the pieces that im2col copies for an output, in units of a tap of the measured 3x3 kernels.

    It copies the taps of a row at once: a row of one tap takes about as long as one of three.

    Args:
        rows: height of the kernel.
        taps: size of the kernel in positions.
    """
    return max(taps, MEASURED_ROW * rows)


def float_conv(inner: int, outputs: int, taps: int, groups: int, block: int) -> str:
    """Return the variant of the float Conv, ending in "blocked" or "plain"; arguments as of `integer_conv`.

    Args:
        block: channels per block.
    """
    if groups > 1 and inner == 1 and outputs == groups:
        return f"{_depthwise(taps)} {'blocked' if groups % DOT == 0 else 'plain'}"
    if groups > 1:
        blocked = inner % block == 0 and outputs // groups % block == 0
        return f"{_grouped(inner)} {'blocked' if blocked else 'plain'}"
    name = "1x1" if taps == 1 else "3x3"
    if inner < block:
        return f"{name} few blocked"
    return f"{name} {'plain' if inner % DOT else 'blocked'}"


def _depthwise(taps: int) -> str:
    return "depthwise 3x3" if taps <= SMALL_TAPS else "depthwise 5x5"


def _grouped(inner: int) -> str:
    return f"grouped by {min(GROUPED, key=lambda size: abs(size - inner))}"
