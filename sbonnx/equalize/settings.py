"""What is asked of equalization."""

from __future__ import annotations

from dataclasses import dataclass

from sbonnx.equalize.channel_flow.trace import Clips


@dataclass(frozen=True)
class Equalization:
    """Which transformations a float graph goes through before it is planned; none by default.

    Attributes:
        cross_layer: equal ranges of channels on both sides of a scale that cancels, by weights alone.
        clips: what becomes of a Clip from 0 to a number between two layers, with `cross_layer` and `smooth`.
        absorb_bias: high biases before a Relu moved into the next layers.
        smooth: ranges of channels moved from inputs of layers into their weights; None: not. Of convolutions, of
            matrix products.
        split: how many channels a layer may gain, as a share of those it has, by cutting outliers in two.
        per_channel: whether weights are to have a scale an output channel.
        bits: width of the weights' codes.
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
        """Whether anything is asked."""
        return self.cross_layer or self.absorb_bias or self.smooth is not None or self.split > 0

    @property
    def needs_ranges(self) -> bool:
        """Whether data are wanted."""
        return self.smooth is not None or self.absorb_bias
