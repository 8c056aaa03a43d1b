"""Inputs of networks that read images: photos, rendered text, puzzles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from benchmarks.zoo.corpus import WORDS, Corpus, Feed

MARGIN: Final = 4
"""Pixels of paper beside a line of text. Recognizers read a wider margin as a space."""

SHOWS_THROUGH: Final = 0.4
"""Share of a photo under text. PP-OCRv4 and v6 read all of 80 lines right with it. Of lines with a wide margin and dark
text on the photos themselves they read 33 and 67: text that float cannot read says nothing about quantization."""


def _size(text: str) -> tuple[int, int]:
    """Return (height, width) of "224" or "800x608"."""
    height, _, width = text.partition("x")
    return int(height), int(width or height)


def _scaled(image: Image.Image, size: tuple[int, int], form: str) -> Any:
    """Return float32 (3, H, W) as the model's own preprocessing does."""
    values = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR), np.float32).transpose(2, 0, 1)
    if form == "bytes":
        return values[::-1].copy()
    if form == "levels":
        return values
    if form == "half":
        return (values / 255 - 0.5) / 0.5
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


def photo_last(corpus: Corpus, names: list[str], size: str, form: str = "mean") -> Iterator[Feed]:
    """Yield photos, (1, H, W, 3); of the form "mean" blue first, less their mean."""
    for image in corpus.photos():
        values = _scaled(image, _size(size), "bytes" if form == "mean" else form)
        if form == "mean":
            values -= np.array([104, 117, 123], np.float32)[:, None, None]
        yield {names[0]: np.ascontiguousarray(values.transpose(1, 2, 0)[None])}


def _text(rng: np.random.Generator, words: int) -> str:
    return " ".join(rng.choice(WORDS, words))


def _drawn(image: Image.Image, place: tuple[int, int], text: str, size: int, rng: np.random.Generator) -> None:
    ink = tuple(int(value) for value in rng.integers(0, 90, 3))
    ImageDraw.Draw(image).text(place, text, fill=ink, font=ImageFont.load_default(size))


def page(corpus: Corpus, names: list[str], size: str, form: str = "half") -> Iterator[Feed]:
    """Yield pages with lines of text on photos and on paper, (1, 3, H, W)."""
    rng = np.random.default_rng(3)
    height, width = _size(size)
    for number, under in enumerate(corpus.photos()):
        image = under.resize((width, height)) if number % 3 == 0 else Image.new("RGB", (width, height), (244, 242, 236))
        top = int(rng.integers(10, 60))
        while top < height - 50:
            letters = int(rng.integers(14, 34))
            _drawn(image, (int(rng.integers(5, 80)), top), _text(rng, int(rng.integers(1, 7))), letters, rng)
            top += letters + int(rng.integers(8, 60))
        yield {names[0]: _scaled(image, (height, width), form)[None]}


def turned(corpus: Corpus, names: list[str], size: str, form: str = "half") -> Iterator[Feed]:
    """Yield square pages turned by 0, 90, 180 and 270 degrees, (1, 3, H, W)."""
    for number, feed in enumerate(page(corpus, names, size, form)):
        yield {name: np.rot90(value, number % 4, (2, 3)).copy() for name, value in feed.items()}


def captcha(corpus: Corpus, names: list[str], size: str, form: str) -> Iterator[Feed]:
    """Yield photos with four to seven turned letters, (1, 3, H, W)."""
    rng = np.random.default_rng(13)
    height, width = _size(size)
    for under in corpus.photos():
        image = under.resize((width, height))
        for place in rng.permutation(9)[: int(rng.integers(4, 8))]:
            letter = Image.new("L", (80, 80))
            ImageDraw.Draw(letter).text((16, 4), chr(int(rng.integers(65, 91))), 255, ImageFont.load_default(60))
            mask = letter.rotate(int(rng.integers(-40, 41)))
            corner = np.array(divmod(int(place), 3)) * (width // 3) + rng.integers(0, width // 3 - 80, 2)
            ink = tuple(int(value) for value in rng.integers(0, 256, 3))
            image.paste(Image.new("RGB", mask.size, ink), (int(corner[0]), int(corner[1])), mask)
        yield {names[0]: _scaled(image, (height, width), form)[None]}


def letters(corpus: Corpus, names: list[str], size: str, form: str) -> Iterator[Feed]:
    """Yield four turned letters or digits on light paper with lines and dots across, (1, 3, H, W)."""
    rng = np.random.default_rng(29)
    height, width = _size(size)
    for _ in range(96):
        image = Image.new("RGB", (width, height), tuple(int(value) for value in rng.integers(200, 256, 3)))
        draw = ImageDraw.Draw(image)
        for place in range(4):
            letter = Image.new("L", (height, height))
            sign = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"[int(rng.integers(34))]
            ImageDraw.Draw(letter).text((height // 4, 4), sign, 255, ImageFont.load_default(height * 2 // 3))
            mask = letter.rotate(int(rng.integers(-25, 26)))
            ink = tuple(int(value) for value in rng.integers(0, 140, 3))
            image.paste(Image.new("RGB", mask.size, ink), (place * width // 4 - 4, int(rng.integers(-4, 5))), mask)
        for _ in range(3):
            ends = rng.integers(0, (width, height, width, height)).tolist()
            draw.line(ends, fill=tuple(int(value) for value in rng.integers(60, 200, 3)))
        draw.point(rng.integers(0, (width, height), (60, 2)).ravel().tolist(), fill=(90, 90, 90))
        yield {names[0]: _scaled(image, (height, width), form)[None]}


def puzzle(corpus: Corpus, names: list[str], size: str) -> Iterator[Feed]:
    """Yield photos with a darkened gap and the piece that fits it at the left, (1, 3, H, W)."""
    rng = np.random.default_rng(17)
    height, width = _size(size)
    for under in corpus.photos():
        image = under.resize((width, height // 2))
        side = int(rng.integers(70, 110))
        left, top = int(rng.integers(width // 4, width - side - 9)), int(rng.integers(20, height // 2 - side - 20))
        piece = image.crop((left, top, left + side, top + side))
        image.paste(Image.eval(piece, lambda value: value * 2 // 5), (left, top))
        image.paste(piece, (12, top))
        for corner in (left, 12):
            ImageDraw.Draw(image).rectangle((corner, top, corner + side, top + side), outline=(240, 240, 240), width=2)
        board = Image.new("RGB", (width, height), (114, 114, 114))
        board.paste(image, (0, height // 4))
        yield {names[0]: _scaled(board, (height, width), "unit")[None]}


def _line(
    rng: np.random.Generator, height: int, wide: int | None, under: Image.Image | None = None, words: int = 4
) -> Image.Image:
    """Return a line of up to `words` words, dark on paper or on a photo that shows through, cut as detectors cut it."""
    text = _text(rng, int(rng.integers(1, words + 1)))
    size = int(height * 0.72)
    left, top, right, bottom = (int(value) for value in ImageFont.load_default(size).getbbox(text))
    width = wide or right - left + 2 * MARGIN
    image = Image.new("RGB", (width, height), tuple(int(value) for value in rng.integers(200, 256, 3)))
    if under is not None:
        side = max(width, 4 * height)
        photo = under.resize((side, side)).crop((0, height, width, 2 * height))
        image = Image.blend(image, photo, SHOWS_THROUGH)
    middle = (height - bottom - top) // 2 + int(rng.integers(-2, 3))
    _drawn(image, (MARGIN - left, middle), text, size, rng)
    return image


def line(corpus: Corpus, names: list[str], width: str = "") -> Iterator[Feed]:
    """Yield lines of text, normalized with 0.5, (1, 3, 48, W); with a width, a half of them upside down.

    Of every four, one is light on dark and two are on photos: paper alone is unlike the training data by the batch
    normalization of the recognizers.
    """
    rng, photos = np.random.default_rng(5), corpus.photos()
    for number in range(160):
        kind, turned_over = number // 2 % 4, number // 8 % 2  # `feeds` takes every second line
        image = _line(rng, 48, int(width) if width else None, photos[number % len(photos)] if kind > 1 else None)
        if kind == 1:
            image = ImageOps.invert(image)
        if width and turned_over:
            image = image.rotate(180)
        yield {names[0]: _scaled(image, (48, image.width), "half")[None]}


def line_gray(corpus: Corpus, names: list[str]) -> Iterator[Feed]:
    """Yield lines of text in gray, (1, 1, 64, W)."""
    rng = np.random.default_rng(7)
    for _ in range(160):
        values = np.asarray(_line(rng, 64, None).convert("L"), np.float32) / 255
        yield {names[0]: values[None, None]}


def line_small(corpus: Corpus, names: list[str], size: str) -> Iterator[Feed]:
    """Yield words on photos and on paper, normalized with 0.5, (1, 3, H, W)."""
    rng, photos = np.random.default_rng(47), corpus.photos()
    for number in range(96):
        image = _line(rng, 48, None, photos[number % len(photos)] if number % 2 else None, words=1)
        yield {names[0]: _scaled(image, _size(size), "half")[None]}


def noise(corpus: Corpus, names: list[str], size: str) -> Iterator[Feed]:
    """Yield noise of a deviation of 80, (1, 1, N, N), as the one step of a consistency model starts from it."""
    rng, side = np.random.default_rng(53), int(size)
    for _ in range(96):
        values = 80 * rng.standard_normal((1, 1, side, side), np.float32)
        yield dict(zip(names, (values, np.array([80], np.float32), rng.random(1, np.float32)), strict=True))
