"""Real inputs for models out of packages: photos and recordings of the model pack, rendered text, files."""

from __future__ import annotations

import io
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from PIL import Image, ImageDraw, ImageFont

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
    """

    def __init__(self, pack: Path) -> None:
        self._pack = pack

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


def _size(text: str) -> tuple[int, int]:
    """Return (height, width) of "224" or "800x608"."""
    height, _, width = text.partition("x")
    return int(height), int(width or height)


def _scaled(image: Image.Image, size: tuple[int, int], form: str) -> Any:
    """Return float32 (3, H, W) as the model's own preprocessing does."""
    values = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR), np.float32).transpose(2, 0, 1)
    if form == "bytes":
        return values[::-1].copy()
    if form == "signed":
        return (values - 127.5) / 128
    if form == "imagenet":
        mean, scale = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        return ((values / 255 - mean[:, None, None]) / scale[:, None, None]).astype(np.float32)
    return values / 255


def photo(corpus: Corpus, names: list[str], size: str, form: str = "unit") -> Iterator[Feed]:
    """Yield photos, (1, 3, H, W)."""
    for image in corpus.photos():
        yield {names[0]: _scaled(image, _size(size), form)[None]}


def photo_last(corpus: Corpus, names: list[str], size: str) -> Iterator[Feed]:
    """Yield photos, (1, H, W, 3), blue first, less their mean."""
    for image in corpus.photos():
        values = _scaled(image, _size(size), "bytes") - np.array([104, 117, 123], np.float32)[:, None, None]
        yield {names[0]: np.ascontiguousarray(values.transpose(1, 2, 0)[None])}


def _text(rng: np.random.Generator, words: int) -> str:
    return " ".join(rng.choice(WORDS, words))


def _drawn(image: Image.Image, place: tuple[int, int], text: str, size: int, rng: np.random.Generator) -> None:
    ink = tuple(int(value) for value in rng.integers(0, 90, 3))
    ImageDraw.Draw(image).text(place, text, fill=ink, font=ImageFont.load_default(size))


def page(corpus: Corpus, names: list[str], size: str) -> Iterator[Feed]:
    """Yield pages with lines of text on photos and on paper, normalized with 0.5, (1, 3, H, W)."""
    rng = np.random.default_rng(3)
    height, width = _size(size)
    for number, under in enumerate(corpus.photos()):
        image = under.resize((width, height)) if number % 3 == 0 else Image.new("RGB", (width, height), (244, 242, 236))
        top = int(rng.integers(10, 60))
        while top < height - 50:
            letters = int(rng.integers(14, 34))
            _drawn(image, (int(rng.integers(5, 80)), top), _text(rng, int(rng.integers(1, 7))), letters, rng)
            top += letters + int(rng.integers(8, 60))
        yield {names[0]: (_scaled(image, (height, width), "unit")[None] - 0.5) / 0.5}


def _line(rng: np.random.Generator, height: int, wide: int | None) -> Image.Image:
    text = _text(rng, int(rng.integers(1, 5)))
    font = ImageFont.load_default(int(height * 0.62))
    width = wide or int(font.getlength(text)) + 24
    paper = tuple(int(value) for value in rng.integers(200, 256, 3))
    image = Image.new("RGB", (width, height), paper)
    _drawn(image, (12, int(rng.integers(2, 9))), text, int(height * 0.62), rng)
    return image


def line(corpus: Corpus, names: list[str], width: str = "") -> Iterator[Feed]:
    """Yield lines of text, normalized with 0.5, (1, 3, 48, W); with a width, every second one upside down."""
    rng = np.random.default_rng(5)
    for number in range(160):
        image = _line(rng, 48, int(width) if width else None)
        if width and number % 2:
            image = image.rotate(180)
        yield {names[0]: (_scaled(image, (48, image.width), "unit")[None] - 0.5) / 0.5}


def line_gray(corpus: Corpus, names: list[str]) -> Iterator[Feed]:
    """Yield lines of text in gray, (1, 1, 64, W)."""
    rng = np.random.default_rng(7)
    for _ in range(160):
        values = np.asarray(_line(rng, 64, None).convert("L"), np.float32) / 255
        yield {names[0]: values[None, None]}


def _windows(corpus: Corpus, length: int, step: int) -> Iterator[Any]:
    sound = corpus.sound()
    for start in range(0, len(sound) - length, step):
        yield sound[start : start + length]


def audio_last(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield recordings, (1, N, 1)."""
    for window in _windows(corpus, int(length), int(length) // 4):
        yield {names[0]: window[None, :, None].copy()}


def audio_pitch(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield recordings, (1, N), and the limits of the pitch in Hz."""
    for window in _windows(corpus, int(length), int(length) // 2):
        limits = {"fmin": np.array(46.875, np.float32), "fmax": np.array(2093.75, np.float32)}
        yield {"audio": window[None].copy(), **limits}


def audio_state(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield recordings, (1, N), with a state of zeros."""
    rate = {"sr": np.array(16000, np.int64)} if "sr" in names else {}
    for window in _windows(corpus, int(length), int(length) * 19):
        yield {"input": window[None].copy(), "state": np.zeros((2, 1, 128), np.float32), **rate}


def audio_frames(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield 32 frames of a recording that overlap by 64 samples, (32, N), with states of zeros."""
    size = int(length)
    state = {name: np.zeros((1, 1, 128), np.float32) for name in ("h", "c")}
    for window in _windows(corpus, size + 31 * (size - 64), 16 * size):
        frames = np.stack([window[i * (size - 64) :][:size] for i in range(32)])
        yield {"input": frames, **state}


def file_bytes(corpus: Corpus, names: list[str], length: str) -> Iterator[Feed]:
    """Yield the first and last bytes of files of Python's library, int32 (1, N), as Magika reads them."""
    half, end = int(length) // 2, 256
    files = sorted(path for path in Path(sysconfig.get_paths()["purelib"]).rglob("*") if path.is_file())
    kinds: dict[str, int] = {}
    for path in files:
        kinds[path.suffix] = kinds.get(path.suffix, 0) + 1
        if kinds[path.suffix] > 8 or not path.stat().st_size:
            continue
        content = path.read_bytes().strip()
        values = np.full(2 * half, end, np.int32)
        first, last = content[:half], content[-half:]
        values[: len(first)] = list(first)
        values[2 * half - len(last) :] = list(last)
        yield {names[0]: values[None]}


def characters(corpus: Corpus, names: list[str], count: str) -> Iterator[Feed]:
    """Yield words as one-hot characters, float32 (1, letters, N)."""
    alphabet = " !\"#%&'()*+,-./:;?@[]_~0123456789abcdefghijklmnopqrstuvwxyz"
    for word in dict.fromkeys(word.lower() for word in WORDS):
        rows = np.zeros((1, len(word), int(count)), np.float32)
        for place, letter in enumerate(word):
            rows[0, place, alphabet.index(letter) % int(count)] = 1
        yield {names[0]: rows}


def table(corpus: Corpus, names: list[str], columns: str) -> Iterator[Feed]:
    """Yield rows of numbers, float32 (1, N)."""
    rng = np.random.default_rng(11)
    for _ in range(256):
        yield {names[0]: rng.uniform(0, 10, (1, int(columns))).astype(np.float32)}


BUILDERS: Final[dict[str, Callable[..., Iterator[Feed]]]] = {
    build.__name__: build
    for build in (
        photo,
        photo_last,
        page,
        line,
        line_gray,
        audio_last,
        audio_pitch,
        audio_state,
        audio_frames,
        file_bytes,
        characters,
        table,
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


__all__ = ["BUILDERS", "Corpus", "Feed", "feeds"]
