"""`Unit`: what one run sees."""

from __future__ import annotations

from dataclasses import dataclass

from sbonnx.calib.readers import Feed


@dataclass(frozen=True)
class Unit:
    """What one run sees.

    Attributes:
        index: position among all units.
        where: file or position in the data, for messages.
        feed: arrays by input name.
        samples: how many samples it holds.
        closes: whether it is the last of its feed.
    """

    index: int
    where: str
    feed: Feed
    samples: int = 1
    closes: bool = True
