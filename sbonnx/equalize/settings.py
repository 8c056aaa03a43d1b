"""Settings of equalization."""

from __future__ import annotations

from dataclasses import dataclass

from sbonnx.equalize.channel_flow.trace import Clips


@dataclass(frozen=True)
class Equalization:
    """Settings of the transformations of a float graph before planning; none is enabled by default.

    Attributes:
        cross_layer: equalize channel ranges of consecutive layers by scales that cancel, using weights only.
        clips: treatment of a Clip from 0 to a number between two layers, with `cross_layer` and `smooth`.
        absorb_bias: move high biases before a Relu into the next layers.
        smooth: SmoothQuant strength for convolutions and for matrix products: move channel ranges from layer inputs
            into their weights. None: off.
        split: maximum number of channels added by outlier channel splitting, as a share of the channels of a layer.
        per_channel: whether weights get one scale per output channel.
        bits: bit width of the quantized weights.
    """

    cross_layer: bool = False
    clips: Clips = "channels"
    absorb_bias: bool = False
    smooth: tuple[float, float] | None = None
    split: float = 0.0
    per_channel: bool = True
    bits: int = 8

    @property
    def any(self) -> bool:
        """Whether any transformation is enabled."""
        return self.cross_layer or self.absorb_bias or self.smooth is not None or self.split > 0

    @property
    def needs_ranges(self) -> bool:
        """Whether calibration data are needed."""
        return self.smooth is not None or self.absorb_bias
