"""Progress that counts samples."""

from __future__ import annotations

from sbonnx.progress import Progress


class SampleCount(Progress):
    """Counts the samples that were run through the float model."""

    def __init__(self) -> None:
        self.samples = 0

    def count_samples(self, samples: int) -> None:
        self.samples += samples
