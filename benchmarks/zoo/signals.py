"""Inputs of networks that read sound or EEG."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from benchmarks.zoo.corpus import Corpus, Feed

RATE: Final = 16_000
"""Samples a second of the recordings."""

SAMPLES: Final = 96
"""Signals made up of known events."""

EVENTS: Final = ((8.0, 12.0, 3.0, 0.8, 2), (12.0, 15.0, 0.9, 1.0, 5), (2.5, 3.5, 12.0, 2.5, 0.3))
"""Alpha waves, spindles, spikes and waves: limits of their frequency in Hz, duration in s, gain, number in 30 s."""


def windows(corpus: Corpus, length: int, step: int) -> Iterator[Any]:
    """Yield parts of the recordings, (N,), which start every `step` samples."""
    sound = corpus.sound()
    for start in range(0, len(sound) - length, step):
        yield sound[start : start + length]


def audio(corpus: Corpus, names: list[str], length: str, peak: str = "1") -> Iterator[Feed]:
    """Yield recordings of values up to `peak`, (1, N)."""
    for window in windows(corpus, int(length), int(length) // 2):
        yield {names[0]: window[None] * np.float32(peak)}


def audio_last(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield recordings, (1, N, 1)."""
    for window in windows(corpus, int(length), int(length) // 4):
        yield {names[0]: window[None, :, None].copy()}


def audio_pitch(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield recordings, (1, N), and the limits of the pitch in Hz."""
    for window in windows(corpus, int(length), int(length) // 2):
        limits = {"fmin": np.array(46.875, np.float32), "fmax": np.array(2093.75, np.float32)}
        yield {"audio": window[None].copy(), **limits}


def audio_state(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield recordings, (1, N), with a state of zeros."""
    rate = {"sr": np.array(16000, np.int64)} if "sr" in names else {}
    for window in windows(corpus, int(length), int(length) * 19):
        yield {"input": window[None].copy(), "state": np.zeros((2, 1, 128), np.float32), **rate}


def audio_frames(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield 32 frames of a recording that overlap by 64 samples, (32, N), with states of zeros."""
    size = int(length)
    state = {name: np.zeros((1, 1, 128), np.float32) for name in ("h", "c")}
    for window in windows(corpus, size + 31 * (size - 64), 16 * size):
        frames = np.stack([window[i * (size - 64) :][:size] for i in range(32)])
        yield {"input": frames, **state}


def audio_lengths(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield recordings, (1, N), and their length."""
    for window in windows(corpus, int(length), RATE):
        yield dict(zip(names, (window[None].copy(), np.array([len(window)])), strict=True))


def mel(corpus: Corpus, names: list[str], frames: str, bands: str) -> Iterator[Feed]:
    """Yield logarithmic mel spectra of windows of 25 ms every 10 ms, float32 (1, frames, bands, 1)."""
    count = int(frames)
    edges = 700 * np.expm1(np.linspace(np.log1p(60 / 700), np.log1p(3800 / 700), int(bands) + 2))
    places = np.fft.rfftfreq(512, 1 / RATE)[:, None]
    rises, falls = (places - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - places) / np.diff(edges)[1:]
    for window in windows(corpus, 400 + 160 * (count - 1), 160 * count):
        spectrum = np.abs(np.fft.rfft(frames_of(window * 32768, 400, 160) * np.hanning(400), 512)) ** 2
        power = np.log10(np.maximum(spectrum @ np.minimum(rises, falls).clip(0), 1e-10))
        yield {names[0]: np.maximum(power, power.max() - 8).astype(np.float32)[None, :, :, None] + 2}


def frames_of(signal: Any, length: int, step: int) -> Any:
    """Return (frames, length) that start every `step` samples."""
    return np.lib.stride_tricks.sliding_window_view(signal, length)[::step]


def _eeg(rng: np.random.Generator, rate: int, seconds: int) -> Any:
    """Return an EEG: noise of falling spectrum, alpha waves, spindles, and spikes and waves of 3 Hz."""
    time = np.arange(rate * seconds) / rate
    slope = np.fft.rfft(rng.standard_normal(len(time))) / np.maximum(np.fft.rfftfreq(len(time), 1 / rate), 0.5)
    signal = np.fft.irfft(slope, len(time))
    signal /= signal.std()
    for low, high, duration, gain, count in EVENTS:
        for _ in range(rng.poisson(count * seconds / 30)):
            bump = np.exp(-(((time - rng.uniform(0, seconds)) / duration) ** 2) * 4)
            wave = np.sin(2 * np.pi * rng.uniform(low, high) * time + rng.uniform(0, 6))
            signal += gain * rng.uniform(0.5, 1.5) * bump * (wave + (0.5 * wave**3 if low < 5 else 0))
    return signal


def eeg_spectrum(corpus: Corpus, names: list[str], seconds: str) -> Iterator[Feed]:
    """Yield standardized power of 100 bins of 1 Hz every half second of an EEG, float32 (1, 100, N)."""
    rng = np.random.default_rng(19)
    for _ in range(SAMPLES):
        power = np.abs(np.fft.rfft(frames_of(_eeg(rng, 250, int(seconds)), 250, 125) * np.hanning(250))).T[:100] ** 2
        yield {names[0]: _standardized(power)[None]}


def eeg_scales(corpus: Corpus, names: list[str], size: str) -> Iterator[Feed]:
    """Yield an EEG of 250 Hz, (1, 1, N), and magnitudes of its wavelet transform, (1, 15, N), standardized."""
    rng = np.random.default_rng(23)
    bins = np.fft.fftfreq(int(size), 1 / 250)
    for _ in range(SAMPLES):
        signal = _eeg(rng, 250, int(size) // 250)
        spectrum = np.fft.fft(signal - signal.mean())
        scales = np.geomspace(135, 270, 15)[:, None]  # of a Shannon wavelet: centre 13, bandwidth 6
        bands = np.abs(np.fft.ifft(spectrum * (np.abs(bins - 13 * 250 / scales) < 3 * 250 / scales)))
        yield dict(zip(names, (_standardized(signal[None])[None], _standardized(bands)[None]), strict=True))


def _standardized(rows: Any) -> Any:
    return ((rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)).astype(np.float32)
