"""Generated recordings: syllables with harmonics in noise; and the feeds of a calibration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

RATES: Final = (16000, 8000)
SECONDS: Final = 0.016
WINDOW: Final = {rate: round(rate * SECONDS) for rate in RATES}
"""Samples of a window of 16 ms."""

WINDOWS: Final = 40
HIDDEN: Final = 24
"""Width of the state."""


def recordings(count: int, rate: int, seed: int) -> tuple[Any, Any]:
    """Return audio (count, 40, samples of a window) and whether a window is voiced (count, 40), both float32.

    Args:
        count: number of recordings.
        rate: samples a second.
        seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    total = WINDOWS * WINDOW[rate]
    time = np.arange(total) / rate
    audio, voiced = np.zeros((count, total)), np.zeros((count, WINDOWS))
    for at in range(count):
        pitch = random.uniform(90, 250) * (1 + 0.05 * np.sin(2 * np.pi * 5 * time + random.uniform(0, 6)))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        harmonics = range(1, int(3500 // pitch.max()))
        voice = sum(np.sin(number * phase + number) / number ** random.uniform(0.6, 1.2) for number in harmonics)
        start, length = random.integers(0, WINDOWS - 8), random.integers(6, 24)
        voiced[at, start : start + length] = 1
        envelope = np.repeat(voiced[at], WINDOW[rate]) * (0.7 + 0.3 * np.sin(2 * np.pi * 4 * time))
        hum = 0.05 * np.sin(2 * np.pi * random.uniform(50, 60) * time)
        noise = random.normal(0, random.uniform(0.02, 0.2), total)
        audio[at] = random.uniform(0.15, 0.4) * (voice * envelope + hum) + noise
    shape = (count, WINDOWS, WINDOW[rate])
    return audio.reshape(shape).astype(np.float32), voiced.astype(np.float32)


def windows(rate: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the windows of four recordings; the first of each has a state of zeros, which begins a sequence."""
    for audio in recordings(4, rate, seed)[0]:
        for at, window in enumerate(audio):
            start = {"state": np.zeros((2, 1, HIDDEN), np.float32)} if at == 0 else {}
            yield {"input": window[None], "sr": np.array(rate), **start}


def wide_only() -> Iterator[dict[str, Any]]:
    """Yield windows at 16 kHz; `--feedback` passes the state on within a recording."""
    return windows(RATES[0], seed=3)


def both_rates() -> Iterator[dict[str, Any]]:
    """Yield windows at each rate."""
    yield from windows(RATES[0], seed=3)
    yield from windows(RATES[1], seed=4)
