"""Stand-ins for the files and names of readers in the pages of the documentation: digits and small decoders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

import sbonnx
from sbonnx.assets import digits
from sbonnx.spec import Array
from tests.llm.grouped_decoder import write_grouped_folder
from tests.llm.tiny_decoder import WORDS, decoder_model

MODELS: Final = ("m.onnx", "model.onnx", "resnet.onnx", "mobilenet.onnx", "minilm.onnx")
PRODUCTS: Final = ("encoder.onnx", "decoder.onnx")
FOLDERS: Final = ("samples", "calib", "calibration", "images", "texts")
FEEDS, BATCH, LABELLED, TOKENS = 6, 4, 90, 480

RECIPES: Final = {
    "r.yaml": "SPARSE: {STRATEGY: l1norm}\n",
    "recipe.yaml": "BACKEND: virtual\n",
    "qconfig.yaml": "BACKEND: virtual\nW: {OBSERVER: {TYPE: MSE}}\n",
    "sconfig.yaml": "SPARSER: {TYPE: structed, STRATEGY: l1norm, RATIO: 0.5}\n",
    "jobs.yaml": "output: out\njobs:\n  - {model: mobilenet.onnx, data: calib/}\n",
}


def calibration_images() -> Array:
    """Return the images of the feeds, (24, 1, 8, 8) float32."""
    with np.load(digits().calib) as arrays:
        images: Array = arrays["image"][: FEEDS * BATCH]
    return images


def products() -> onnx.ModelProto:
    """Return a network of two matrix products, (N, 128) to (N, 64), for modes without data."""
    text = """<ir_version: 9, opset_import: ["": 17]>
        products (float[N, 128] x) => (float[N, 64] y) { a = MatMul(x, v) b = Relu(a) y = MatMul(b, w) }"""
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    weights = {"v": random.normal(0, 0.1, (128, 128)), "w": random.normal(0, 0.1, (128, 64))}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()
    )
    return model


def write_files(folder: Path, page: str) -> None:
    """Write the files that a page reads and that a reader would have: models, feeds, recipes; a decoder and texts."""
    if page == "llm":
        write_grouped_folder(folder / "phi-4-mini")
        shutil.copy(folder / "phi-4-mini" / "tokenizer.json", folder)
        onnx.save(decoder_model(), folder / "model.onnx")
        random = np.random.default_rng(0)
        for name in ("notes.txt", "held_out.txt"):
            (folder / name).write_text(" ".join(random.choice(WORDS[2:], TOKENS)))
        return
    for name in MODELS:
        shutil.copy(digits().model, folder / name)
    for name in PRODUCTS:
        onnx.save(products(), folder / name)
    for name in FOLDERS:
        (folder / name).mkdir()
        for number, batch in enumerate(np.split(calibration_images(), FEEDS)):
            np.savez(folder / name / f"{number}.npz", image=batch)
    with np.load(digits().eval) as arrays:
        np.savez(folder / "val.npz", image=arrays["image"][:LABELLED], label=arrays["label"][:LABELLED])
    if page == "profiling":
        sbonnx.quantize("m.onnx", "samples", output="m.int8.onnx")
    for name, text in RECIPES.items():
        (folder / name).write_text(text)


def names() -> dict[str, Any]:
    """Return the names that programs of the pages use without defining them."""
    batches = np.split(calibration_images(), FEEDS)
    return {"samples": [{"image": batch} for batch in batches], "loader": batches}
