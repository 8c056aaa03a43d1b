"""Equalization: function-preserving transformations of the float graph that make it easier to quantize.

`scale_trace` traces the scales of channels through the graph (`sbonnx.channels`), by the rules in `rules`, to constants
that can absorb them. `cross_layer` and `smooth` compute scales, `channel_scales` applies them. `absorb` moves biases,
`awq` scales the inputs of products. `steps` runs them.
"""

from __future__ import annotations

from sbonnx.equalize.equalization import (
    Equalization,
    Equalized,
    channel_ranges,
    equalize,
    equalize_measured,
    wanted_ranges,
)

__all__ = ["Equalization", "Equalized", "channel_ranges", "equalize", "equalize_measured", "wanted_ranges"]
