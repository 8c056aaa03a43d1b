"""Inputs of Whisper: spectra of recordings, and the tokens that float reads in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx
from onnx.utils import Extractor

from benchmarks.zoo.corpus import Corpus, Feed
from benchmarks.zoo.signals import RATE, frames_of, windows
from sbonnx.verify.sessions import run, session

START: Final = (50257, 50362)
"""Tokens before the text in the English vocabulary: start of the transcript, no times."""

END: Final = 50256
"""Token after the text."""

TOKENS: Final = 32
"""Maximum number of tokens; repetitions of silence have no end."""


def dictation(corpus: Corpus, names: list[str], length: str, frames: str) -> Iterator[Feed]:
    """Yield a recording's spectrum, filled up with silence to a number of frames, with the text that float reads."""
    parts = Extractor(onnx.load(str(corpus.model)))
    encoder, decoder = (
        session(parts.extract_model(inputs, [output]).SerializeToString())
        for inputs, output in ((["mel"], "memory"), (["memory", "tokens"], "logits"))
    )
    for number, window in enumerate(windows(corpus, int(length), RATE)):
        mel = spectrum(np.pad(window, (0, int(frames) * 160 - len(window))))
        (memory,) = run(encoder, {"mel": mel}, number)
        tokens = [*START]
        while len(tokens) < TOKENS and tokens[-1] != END:
            (logits,) = run(decoder, {"memory": memory, "tokens": np.array([tokens])}, number)
            tokens.append(int(logits[0, -1].argmax()))
        yield {"mel": mel, "tokens": np.array([tokens])}


def spectrum(signal: Any) -> Any:
    """Return Whisper's logarithmic mel spectrum, float32 (1, 80, N / 160), of a signal of 16 kHz."""
    edges = _hertz(np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), 82))
    places = np.fft.rfftfreq(400, 1 / RATE)[:, None]
    rises, falls = (places - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - places) / np.diff(edges)[1:]
    filters = np.minimum(rises, falls).clip(0) * 2 / (edges[2:] - edges[:-2])
    frames = frames_of(np.pad(signal, 200, mode="reflect"), 400, 160)[: len(signal) // 160]
    power = np.abs(np.fft.rfft(frames * np.hanning(401)[:-1])) ** 2 @ filters
    levels = np.log10(np.maximum(power, 1e-10))
    return (np.maximum(levels, levels.max() - 8).T / 4 + 1).astype(np.float32)[None]


def _hertz(mel: Any) -> Any:
    """Return frequencies of Slaney's mel scale: linear to 1 kHz, then 27 steps for a factor of 6.4."""
    return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))
