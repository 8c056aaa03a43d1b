"""Sung tones with a known pitch, and the share of frames whose pitch a model finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

RATE: Final = 16_000
FRAMES: Final = 63
STEP: Final = 256
"""Samples from frame to frame."""

Feed = dict[str, Any]


def tone(rng: np.random.Generator) -> tuple[Feed, Any]:
    """Return a second of a voice with vibrato and noise, and the pitch of each frame in Hz."""
    time = np.arange(RATE) / RATE
    vibrato = rng.uniform(0, 0.5) * np.sin(2 * np.pi * rng.uniform(4, 7) * time)
    pitch = rng.uniform(90, 500) * 2 ** ((rng.uniform(-4, 4) * time + vibrato) / 12)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voice = sum(np.sin(number * phase + rng.uniform(0, 6)) / number ** rng.uniform(0.7, 1.5) for number in range(1, 12))
    audio = 0.2 * voice + rng.normal(0, rng.uniform(0.001, 0.05), RATE)
    feed = {"audio": audio[None].astype(np.float32), "fmin": np.float32(46.875), "fmax": np.float32(2093.75)}
    return feed, pitch[np.minimum(np.arange(FRAMES) * STEP, RATE - 1)][None]


def _tones(count: int, seed: int) -> Iterator[tuple[Feed, Any]]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield tone(rng)


def calibration() -> Iterator[Feed]:
    """Yield tones to calibrate with."""
    return (feed for feed, _ in _tones(32, seed=1))


def evaluation() -> Iterator[tuple[Feed, dict[str, Any]]]:
    """Yield other tones, with their pitch."""
    return ((feed, {"hz": pitch}) for feed, pitch in _tones(48, seed=2))


def near(outputs: Mapping[str, Any], labels: Mapping[str, Any]) -> Any:
    """Return the share of frames of each tone whose pitch is within 50 cents."""
    pitch = np.maximum(next(iter(outputs.values())), 1)
    cents = 1200 * np.abs(np.log2(pitch / labels["hz"][:, : pitch.shape[1]]))
    return (cents < 50).mean(1)
