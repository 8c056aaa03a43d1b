"""`Sample`: the input of one run, a sample or a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbonnx.calib.data import Feed


@dataclass(frozen=True)
class Sample:
    """Input of one run: a sample, or a micro-batch of samples.

    Attributes:
        index: position among all units, in the order of the data.
        where: file or position in the data, for messages.
        feed: arrays by input name.
        samples: number of samples it holds.
        closes: whether it is the last of its feed.
        parts: the samples of a micro-batch, without their feeds; see `sbonnx.calib.engine.samples`.
        rank: position in the canonical order, see `sbonnx.calib.engine.samples`; 0 if the units were not
            sorted.
    """

    index: int
    where: str
    feed: Feed
    samples: int = 1
    closes: bool = True
    parts: tuple[Sample, ...] = ()
    rank: int = 0

    @property
    def members(self) -> tuple[Sample, ...]:
        """The samples of a micro-batch; for any other unit, itself."""
        return self.parts or (self,)

    @property
    def bare(self) -> Sample:
        """A copy without its feed."""
        return replace(self, feed={})
