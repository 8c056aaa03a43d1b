"""Builders of real inputs, and their split into calibration and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import onnx

from benchmarks.zoo import images, signals, speech, symbols
from benchmarks.zoo.corpus import Corpus, Feed
from sbonnx.verify.sessions import run, session


def packed(corpus: Corpus, names: list[str], name: str) -> Iterator[Feed]:
    """Yield the samples that the model pack has for a model."""
    yield from corpus.samples(name)


def decoded(corpus: Corpus, names: list[str], encoder: str) -> Iterator[Feed]:
    """Yield the outputs of an encoder of the model pack that a decoder reads."""
    opened = session(corpus.zoo / "models" / f"{encoder}.onnx")
    for number, feed in enumerate(corpus.samples(encoder)):
        outputs = dict(zip((value.name for value in opened.get_outputs()), run(opened, feed, number), strict=True))
        yield {name: outputs[name] for name in names}


BUILDERS: Final[dict[str, Callable[..., Iterator[Feed]]]] = {
    build.__name__: build
    for build in (
        images.photo,
        images.photo_last,
        images.page,
        images.turned,
        images.captcha,
        images.puzzle,
        images.letters,
        images.line,
        images.line_gray,
        images.line_small,
        images.noise,
        signals.audio,
        signals.audio_last,
        signals.audio_pitch,
        signals.audio_state,
        signals.audio_frames,
        signals.audio_lengths,
        signals.mel,
        signals.eeg_spectrum,
        signals.eeg_scales,
        speech.dictation,
        symbols.file_bytes,
        symbols.characters,
        symbols.tokens,
        symbols.phonemes,
        symbols.spelled,
        symbols.hebrew,
        symbols.arabic,
        symbols.reaction,
        symbols.molecule,
        symbols.table,
        packed,
        decoded,
    )
}
"""Functions that yield feeds of one sample, by the first word of `Source.inputs`."""


def feeds(spec: str, model: Path, corpus: Corpus, calibration: int, evaluation: int) -> tuple[list[Feed], list[Feed]]:
    """Return feeds to calibrate with, and others to evaluate on, spread over what the builder yields.

    Args:
        spec: see `Source.inputs`.
    """
    name, *arguments = spec.split(":")
    graph = onnx.load(str(model), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    names = [value.name for value in graph.input if value.name not in constants]
    every = list(BUILDERS[name](corpus, names, *arguments))
    count = min(calibration + evaluation, len(every))
    chosen = [every[index * len(every) // count] for index in range(count)]
    held_out = {index * count // min(evaluation, count // 2) for index in range(min(evaluation, count // 2))}
    return (
        [feed for index, feed in enumerate(chosen) if index not in held_out],
        [chosen[index] for index in sorted(held_out)],
    )
