"""Speed of onnxruntime's CPU kernels for block-wise weights (MatMulNBits): slow paths, and defaults that avoid them.

Some combinations of bit width, block size and accuracy level have no kernel: the weights are dequantized to float at
every call. Measured on onnxruntime 1.31 (one thread, AVX-512 VNNI, K = N = 2048), as factors of the time of the float
MatMul at 1, 8 and 128 rows:

| bits, block size, level | 1 row | 8 rows | 128 rows |
|---|---|---|---|
| 4, 32, level 4 | 0.18 | 0.32 | 0.84 |
| 4, 128, level 4 | 0.12 | 0.21 | 0.56 |
| 4, 32, level 0 to 3 | 0.72 | 1.2 | 1.03 |
| 8, 32 / 128, level 4 | 0.24 / 0.23 | 0.32 / 0.21 | 0.76 / 0.59 |
| 2, 32 / 64 / 128, level 4 | 0.31 / 0.16 / 0.13 | 0.60 / 0.35 / 0.22 | 1.6 / 0.84 / 0.57 |
| 8, any, level 0 | 20 to 45 | 7 to 13 | 2 to 3 |
| 2, 16 or 256 at any level, or level 0 | 28 to 42 | | |
| 4, float zero points | 21 | | |

At level 4 the shape does not matter: 2 bits in blocks of 64 with K x N of 1024 x 1024, 1024 x 960, 1024 x 1000 and
1040 x 1024 take 0.11 to 0.16 of the float time for one row, on this CPU and with AVX2 or AVX-512 without VNNI alone. So
nothing is padded. The lookup tables that a session can ask for (``mlas.use_lut_gemm``), which take N in multiples of
128 and K of 32, are as fast (0.11 to 0.19).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIN_BLOCK: Final = 16
"""Smallest block size of the kernels; block sizes are powers of two."""

MAX_BLOCK: Final = 256
"""Largest block size: a file with a larger one does not load."""

WIDTHS: Final = (2, 4, 8)
"""Bit widths with kernels."""

INTEGERS: Final = 4
"""Accuracy level at which the kernels compute on int8 activations."""

TWO_BIT_BLOCKS: Final = (32, 64, 128)
"""Block sizes with kernels for 2 bits."""

TWO_BIT_DEFAULT: Final = 64
"""Default block size for 2 bits: 0.16 of the float time for one row, against 0.31 with blocks of 32."""


@dataclass(frozen=True)
class SlowPath:
    """A combination without a fast kernel.

    Attributes:
        factor: time of one row, as a multiple of the float MatMul, as text.
        why: what causes it.
        fix: what to change.
    """

    factor: str
    why: str
    fix: str

    def text(self) -> str:
        """Format it for a message."""
        return f"{self.why}: {self.factor} times the time of the float MatMul for one row; {self.fix}"


def stored_bits(bits: int) -> int:
    """Return the width in the file of codes of 2 to 8 bits: the narrowest with a kernel that holds them."""
    return next(width for width in WIDTHS if bits <= width)


def slow_path(bits: int, block: int, level: int, *, float_zero_points: bool = False) -> SlowPath | None:
    """Return why MatMulNBits is slow on the CPU with these attributes; None if it has a fast kernel.

    Args:
        bits: 2, 4 or 8. block: block size. level: accuracy level, 0 to 4.
        float_zero_points: the zero points have the type of the scales.
    """
    if float_zero_points:
        return SlowPath("21", "float zero points", "write integer zero points")
    if bits == 2 and block not in TWO_BIT_BLOCKS:
        return SlowPath("28 to 42", f"2 bits in blocks of {block}", "take blocks of 64 or 128")
    if bits == 2 and level < INTEGERS:
        return SlowPath("28 to 42", f"2 bits at accuracy level {level}", f"take accuracy level {INTEGERS}")
    if bits == 8 and level < INTEGERS:
        return SlowPath("20 to 45", f"8 bits at accuracy level {level}", f"take accuracy level {INTEGERS}, or 4 bits")
    return None


def default_block(bits: int, block: int) -> int:
    """Return the block size for weights of `bits` bits, if the recipe gives none and `block` is the usual one."""
    return TWO_BIT_DEFAULT if bits == 2 else block
