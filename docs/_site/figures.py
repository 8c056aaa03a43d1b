"""Figures of the pages of concepts, as SVG: `python docs/_site/figures.py` writes them into docs/concepts/.

Colours follow the reader's scheme (`prefers-color-scheme`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FOLDER: Final = Path(__file__).resolve().parents[1] / "concepts"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 320, 60, 44, 16, 16

STYLE: Final = (
    "<style>text{font:13px sans-serif;fill:#333}.axis{stroke:#777;fill:none}.a{stroke:#3949ab}.b{stroke:#e65100}"
    ".c{stroke:#2e7d32}.line{fill:none;stroke-width:2}.ta{fill:#3949ab}.tb{fill:#e65100}.tc{fill:#2e7d32}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.a{stroke:#9fa8da}.b{stroke:#ffb74d}.c{stroke:#81c784}"
    ".ta{fill:#9fa8da}.tb{fill:#ffb74d}.tc{fill:#81c784}}</style>"
)

Array = NDArray[Any]


def chart(lines: Sequence[tuple[str, str, Array, Array]], across: str, up: str) -> str:
    """Return a line chart.

    Args:
        lines: class (a, b or c), label, x and y values of each line.
        across, up: labels of the axes.
    """
    xs, ys = (np.concatenate([line[at] for line in lines]) for at in (2, 3))
    spans = [(float(values.min()), float(values.max())) for values in (xs, ys)]

    def place(x: float, y: float) -> str:
        right = LEFT + (x - spans[0][0]) / (spans[0][1] - spans[0][0]) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - spans[1][0]) / (spans[1][1] - spans[1][0]) * (HEIGHT - BOTTOM - TOP)
        return f"{right:.1f},{down:.1f}"

    parts = [f'<path class="axis" d="M{LEFT},{TOP} V{HEIGHT - BOTTOM} H{WIDTH - RIGHT}"/>']
    for at, (kind, label, x, y) in enumerate(lines):
        points = " ".join(place(float(one), float(other)) for one, other in zip(x, y, strict=True))
        parts.append(f'<polyline class="line {kind}" points="{points}"/>')
        parts.append(f'<text class="t{kind}" x="{LEFT + 16}" y="{TOP + 16 + 18 * at}">{label}</text>')
    for at, span in enumerate(spans):
        for value in np.linspace(*span, 5):
            x, y = (
                place(float(value), spans[1][0]).split(",") if at == 0 else place(spans[0][0], float(value)).split(",")
            )
            where = (
                f'x="{x}" y="{float(y) + 18:.1f}" text-anchor="middle"'
                if at == 0
                else (f'x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end"')
            )
            parts.append(f"<text {where}>{value:.2g}</text>")
    parts.append(f'<text x="{(WIDTH + LEFT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{across}</text>')
    middle = f"{HEIGHT / 2:.0f}"
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{up}</text>')
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">{STYLE}{"".join(parts)}</svg>\n'


def staircase() -> str:
    """Return float values against their values after quantization to 4 bits over -2 to 2."""
    x = np.linspace(-3, 3, 1201)
    scale = 4 / 15
    y = (np.clip(np.round(x / scale) + 8, 0, 15) - 8) * scale
    return chart([("a", "float", x, x), ("b", "quantized to 4 bits", x, y)], "value", "value after quantization")


def clipping() -> str:
    """Return rounding and clipping error against the range, at 4 bits, of normal values with 1 % wide outliers."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 1, 99_000), rng.normal(0, 4, 1_000)])
    ranges = np.linspace(1, 10, 91)
    rounding, clipped = [], []
    for limit in ranges:
        scale = 2 * limit / 15
        inside = np.abs(values) <= limit
        codes = np.clip(np.round(values / scale), -8, 7)
        error = (codes * scale - values) ** 2
        rounding.append(float(error[inside].sum() / values.size))
        clipped.append(float(error[~inside].sum() / values.size))
    total = np.add(rounding, clipped)
    return chart(
        [
            ("a", "rounding error", ranges, np.array(rounding)),
            ("b", "clipping error", ranges, np.array(clipped)),
            ("c", "sum", ranges, total),
        ],
        "range (standard deviations)",
        "mean squared error",
    )


FIGURES: Final = {"staircase.svg": staircase, "clipping.svg": clipping}

if __name__ == "__main__":
    for name, make in FIGURES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
