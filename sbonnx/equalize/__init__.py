"""Equalization: function-preserving transformations of the float graph that make it easier to quantize.

`trace` follows the scales of channels through the graph (with the rules in `rules` and `channel_flow.ops`) to the
constants that can absorb them (`channel_flow.constants`). `cross_layer` and `smooth` compute scales, `scales` applies
them. `absorb` moves biases, `split` splits outlier channels.
"""

from __future__ import annotations

from sbonnx.equalize.steps import (
    Equalization,
    Equalized,
    channel_ranges,
    equalize,
    equalize_measured,
    wanted_ranges,
)

__all__ = ["Equalization", "Equalized", "channel_ranges", "equalize", "equalize_measured", "wanted_ranges"]
