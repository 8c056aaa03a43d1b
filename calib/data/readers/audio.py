"""Audio as feeds: mono, resampled, in windows of the length of the model's input."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.labels import LABEL, LabelledFeed, batched_labels
from sbonnx.calib.data.objects import Source
from sbonnx.calib.data.readers.media_files import MediaFiles
from sbonnx.calib.data.readers.preprocess_values import PreprocessValues, truth, whole
from sbonnx.calib.data.stored_arrays import first_line
from sbonnx.calib.data.validate import InputSpec
from sbonnx.errors import DataError, MissingReaderError
from sbonnx.report.codes import Note
from sbonnx.spec import Array
from sbonnx.system.input_files import check_regular

INSTALL: Final = "pip install 'sbonnx[audio]'"
KEYS: Final = ("sample_rate", "window", "normalize")
RATES: Final = ("sr", "sample_rate", "sampling_rate")
"""Names of integer inputs that take the sample rate."""

LONGEST: Final = 1 << 28
"""Maximum number of samples of a file: 4.6 hours at 16 kHz."""


@dataclass(frozen=True)
class Window:
    """A part of a file: `length` samples from `start`, at the model's rate."""

    path: Path
    start: int
    length: int


def open_audio(files: MediaFiles, inputs: Sequence[InputSpec], settings: PreprocessValues) -> Source:
    """Open audio files: a feed is as many consecutive windows as the model's fixed batch size, else one.

    Channels are averaged. Files shorter than a window are padded with zeros; the rest of a longer one is left out.

    Raises:
        DataError: the settings or inputs do not fit, a file cannot be decoded, or a package is missing.
    """
    try:
        import soundfile
        import soxr  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: there is no libsndfile
        raise MissingReaderError(
            f"audio needs the packages soundfile and soxr, which are not installed: {INSTALL}"
        ) from error
    settings.check_keys(KEYS, "audio")
    rate = settings.value("sample_rate", 0, whole, "a number of samples a second, such as 16000")
    if not rate:
        raise DataError(f"{settings.where} has no sample_rate: set it to the rate that the model was trained on")
    normalize = settings.value("normalize", False, truth, "true or false")
    spec, others = _audio_input(inputs)
    shape = spec.shape or (None, None)
    sizes = [size if isinstance(size, int) and size > 0 else None for size in shape]
    batch = (sizes[0] if len(shape) > 1 else None) or 1
    given = settings.value("window", None, whole, "a number of samples")
    if given is not None and sizes[-1] not in (None, given):
        raise DataError(f"input '{spec.name}' wants {spec}, and window is {given}: leave it out")
    length = sizes[-1] or given
    windows = [window for path in files.paths for window in _windows(path, rate, length, soundfile)]
    count = len(windows) // batch
    if not count:
        raise DataError(f"{files.name} holds {len(windows)} windows, and a batch of the model has {batch}: add audio")
    notes = list(files.notes)
    if len(windows) % batch:
        notes.append(
            Note(
                "data-not-used",
                f"the last {len(windows) % batch} windows of {files.name} are no whole batch of {batch}: not used",
            )
        )
    for first, second in itertools.pairwise(windows):
        if first.path == second.path and isinstance(files.labels.get(first.path), str):
            raise DataError(
                f"'{first.path}' is longer than the {length} samples of the model's input, and its text is of the "
                "whole file: cut file and text, or export the model with a dynamic length"
            )
    decoded = _LastFile(rate)

    def at(place: int) -> tuple[str, LabelledFeed]:
        some = windows[place * batch : (place + 1) * batch]
        x = np.stack([_cut(decoded.samples(clip.path), clip, normalize) for clip in some])
        x = x[0] if len(shape) == 1 else x[:, None] if len(shape) == 3 else x
        constants = {other.name: np.full((1,) * len(other.shape or ()), rate, np.int64) for other in others}
        labelled = [files.labels[clip.path] for clip in some if clip.path in files.labels]
        labels = batched_labels([{LABEL: label} for label in labelled]) if len(labelled) == batch else {}
        return f"'{some[0].path}' from {some[0].start / rate:.3g} s", LabelledFeed({spec.name: x, **constants}, labels)

    return Source(
        files.name,
        lambda: (at(place) for place in range(count)),
        count,
        at,
        lambda: [batch] * count,
        notes=tuple(notes),
    )


def _audio_input(inputs: Sequence[InputSpec]) -> tuple[InputSpec, list[InputSpec]]:
    """Return the input of samples, and those that take the sample rate.

    Raises:
        DataError: there are other required inputs, or the input has more than three axes.
    """
    needed = [spec for spec in inputs if not spec.optional] or list(inputs)
    rates = [
        spec for spec in needed if spec.name.lower() in RATES and spec.dtype is not None and spec.dtype.kind in "iu"
    ]
    rest = [spec for spec in needed if spec not in rates]
    if len(rest) != 1:
        names = ", ".join(f"'{spec.name}'" for spec in rest)
        raise DataError(f"audio fills one input and the model has {len(rest)} ({names}): give a Python file, data.py:f")
    (spec,) = rest
    if spec.shape is not None and (len(spec.shape) > 3 or (len(spec.shape) == 3 and spec.shape[1] not in (1, None))):
        raise DataError(
            f"input '{spec.name}' wants {spec}, and audio is (samples), (N, samples) or (N, 1, samples): data.py:f can"
        )
    return spec, rates


def _windows(path: Path, rate: int, length: int | None, soundfile: Any) -> list[Window]:
    """Divide a file into windows by its header; `length` None: the whole file."""
    try:
        check_regular(path)
        info = soundfile.info(str(path))
    except Exception as error:  # soundfile's errors have no common base with OSError
        raise DataError(f"audio '{path}' cannot be read: {first_line(error)}; copy it again or remove it") from error
    total = resampled_length(info.frames, info.samplerate, rate)
    if not 0 < total <= LONGEST:
        raise DataError(f"audio '{path}' holds {total} samples at {rate} Hz: 1 to {LONGEST} are read; remove or cut it")
    length = length or total
    return [Window(path, place * length, length) for place in range(max(1, total // length))]


def resampled_length(frames: int, own: int, rate: int) -> int:
    """Return the number of samples after resampling, rounded up."""
    return ceil(frames * rate / own)


class _LastFile:
    """The samples of the file that was read last: consecutive windows decode it once."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._path: Path | None = None
        self._samples: Array = np.empty(0, np.float32)

    def samples(self, path: Path) -> Array:
        """Return the samples of a file, float32, mono, resampled.

        Raises:
            DataError: it cannot be decoded.
        """
        if path != self._path:
            self._path, self._samples = path, decode(path, self._rate)
        return self._samples


def decode(path: Path, rate: int) -> Array:
    """Decode a file: float32, average of the channels, resampled with soxr (quality HQ).

    Raises:
        DataError: it cannot be decoded.
    """
    import soundfile
    import soxr

    try:
        samples, own = soundfile.read(str(path), dtype="float32", always_2d=True)
    except Exception as error:
        raise DataError(f"audio '{path}' cannot be decoded: {first_line(error)}; copy it again or remove it") from error
    mono: Array = samples.mean(axis=1, dtype=np.float32)
    if own != rate:
        mono = soxr.resample(mono, own, rate).astype(np.float32, copy=False)
    return mono


def _cut(samples: Array, window: Window, normalize: bool) -> Array:
    part = samples[window.start : window.start + window.length]
    part = np.pad(part, (0, window.length - len(part)))
    if normalize:  # Wav2Vec2FeatureExtractor of transformers: zero mean, unit variance
        part = (part - part.mean()) / np.sqrt(part.var() + 1e-7)
    return part.astype(np.float32, copy=False)
