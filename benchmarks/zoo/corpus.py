"""Photos and recordings of the model pack, and words."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

Feed = dict[str, Any]

WORDS: Final = tuple(
    """the quick brown fox jumps over a lazy dog while seven wizards brew hot coffee in Paris station platform nine
    invoice total amount due 1,284.50 EUR please pay before 14 March quantization keeps models small fast and accurate
    weather tomorrow sunny with light wind from north west gate B42 boarding at 18:35 passport number street address
    phone""".split()  # noqa: SIM905
)

PHOTOS: Final = 64
"""Maximum number of photos of each file of the pack."""


class Corpus:
    """Images and sounds of the model pack.

    Args:
        pack: folder of the model pack.
        model: the network that the inputs are for; some are made with it.
    """

    def __init__(self, pack: Path, model: Path) -> None:
        self._pack = pack
        self.model = model
        self.zoo = pack.parent / "zoo"

    @cache  # noqa: B019 (lives as long as the process)
    def photos(self) -> tuple[Image.Image, ...]:
        """Return photos of ImageNet and COCO, evaluation images last."""
        images = []
        for name in ("coco_calib", "imagenet_calib", "imagenet_eval"):
            with np.load(self._pack / "data" / f"{name}.npz") as data:
                blob, ends = data["jpeg"], data["off"]
            for start, end in pairwise(ends[: PHOTOS + 1]):
                images.append(Image.open(io.BytesIO(blob[start:end].tobytes())).convert("RGB"))
        return tuple(images)

    @cache  # noqa: B019
    def sound(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return float32 (N,) in [-1, 1], speech with noise at 16 kHz."""
        parts = []
        for name in ("audio_calib", "audio_eval"):
            with np.load(self._pack / "data" / f"{name}.npz") as data:
                parts.append(data["X"].reshape(-1).astype(np.float32) / 32768)
        return np.concatenate(parts)

    def samples(self, name: str) -> Iterator[Feed]:
        """Yield the samples of a model of the pack, those to calibrate with first."""
        for use in ("calib", "eval"):
            for file in sorted((self.zoo / "data" / f"{name}_{use}").glob("*.npz")):
                with np.load(file) as data:
                    yield dict(data)
