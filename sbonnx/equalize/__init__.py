"""Transformations of the float graph that keep what it computes and are easier to quantize.

The scales of channels are followed through the graph (`trace`, by the tables of `rules` and `moving`) to the constants
that take them up (`parts`); `cross_layer` and `smooth` choose scales, `scales` puts them in. `absorb` moves biases,
`split` cuts outliers in two.
"""

from __future__ import annotations

from sbonnx.equalize.settings import Equalization
from sbonnx.equalize.steps import Equalized, equalize, equalize_measured, wanted_ranges

__all__ = ["Equalization", "Equalized", "equalize", "equalize_measured", "wanted_ranges"]
