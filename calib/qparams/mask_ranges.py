"""Ranges of tensors with attention masks: scores keep the range, masks the end of it.

A mask is a large negative number, or minus infinity, that only reaches softmaxes (`mask_ways`). In one range with the
scores, 8 bits would leave nothing of them: a step of a range to -1e4 is 39. Values far below the others are therefore
left out of the range, which ends so far below the scores that masked ones still become zeros:

    floor = v - MARGIN    if softmaxes alone read the tensor, else    floor = v - MARGIN - (hi - v)

with the scores in [v, hi]. Quantization clips masks to the floor.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.calib.sketches import Sketch
from sbonnx.patterns.blocks.masks import LEAST_MASK
from sbonnx.planning.types import Site
from sbonnx.report.codes import Note

MARGIN: Final = 12.0
"""Distance of masks from the smallest score: exp(-12) is 6e-6, below half a step of a softmax in 16 bits."""

FAR: Final = -64.0
"""Values above are never masks."""

GAP: Final = 8.0
"""Ratio between masks and the next value, without any value in between."""


def without_masks(site: Site, sketch: Sketch, ways: dict[str, bool]) -> tuple[Sketch, Note | None]:
    """Return the statistics from which the range of a site follows, and a note if masks are left out.

    Args:
        ways: see `mask_ways`.
    """
    if site.tensor not in ways or sketch.axis is not None or sketch.detail != "histogram" or not sketch.finite:
        return sketch, None
    distribution = sketch.distribution()
    left, right = (np.asarray(edges, np.float64)[0] for edges in (distribution.left, distribution.right))
    used = np.flatnonzero(np.broadcast_to(distribution.counts, (1, len(left)))[0])
    left, right = left[used], right[used]
    next_sizes = np.maximum(np.maximum(np.abs(left[1:]), abs(float(distribution.hi[0]))), 1.0)
    gaps = np.flatnonzero((right[:-1] <= FAR) & (-right[:-1] >= GAP * next_sizes))
    if not len(gaps) and not sketch.inf:
        return sketch, None
    low, high = float(left[gaps[-1] + 1] if len(gaps) else distribution.lo[0]), float(distribution.hi[0])
    cut = float(right[gaps[-1]]) / np.sqrt(GAP) if len(gaps) else -np.inf
    if low == high:  # of a mask alone, both values are exact at any scale
        floor = max(float(distribution.lo[0]), LEAST_MASK) if len(gaps) else LEAST_MASK
    else:
        floor = low - MARGIN - (0.0 if ways[site.tensor] else high - low)
    mask = "-inf" if sketch.inf else f"{float(distribution.lo[0]):.4g}"
    note = Note(
        "masks-left-out",
        f"'{site.tensor}': masks down to {mask} become {floor:.4g} in its range, where a softmax makes zeros of them",
    )
    return sketch.floored(cut, floor), note
