"""A vision transformer at few bits of weights and activations, beside RepQ-ViT's own program on the same network."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.calibration.subjects import save_feeds
from benchmarks.lowbit.runs import Bench, run
from benchmarks.pruning.files import session
from benchmarks.results import table
from sbonnx.spec import Array
from sbonnx.verify.intervals import paired, wilson

FEEDS: Final = 6
"""Calibration batches of every quantizer."""

BATCH: Final = 16
"""Images of a batch."""

IMAGES: Final = 4000
"""Test images."""

STEM: Final = "/patch_embed/patch_embed.1/Relu_output_0"
PLACEMENT: Final[Mapping[str, Any]] = {
    "backend": "virtual",
    "QUANTIZE_INPUTS_OF.NORM": False,
    "FIRST_BITS.A": 8,
    "A.SPECIFIC": [{STEM: {"QUANTIZER": {"BIT": 8}}}],
}
"""That of RepQ-ViT: inputs of layers and of both products of attention, 8 bits for those of convolutions."""

ABSORBED: Final = {"EQUALIZE.ABSORB_BIAS": True, "EQUALIZE.SMOOTH_QUANT": 1.0, "A.OBSERVER.TYPE": "mse"}
PEER: Final = "RepQ-ViT"
AHEAD: Final = 1.0
"""Points of top-1 above the peer at W4A4 that are to be reached."""

CLOSE: Final = 0.3
"""Points of top-1 below float at W6A6 that are allowed."""


@dataclass(frozen=True)
class Way:
    """One row.

    Attributes:
        bits: of weights and activations.
        overrides: of the recipe; None: the peer.
    """

    bits: int
    overrides: Mapping[str, Any] | None


BEST: Final = "channels absorbed, mse ranges"

WAYS: Final[Mapping[str, Way]] = {
    "W8A8, default": Way(8, {}),
    f"W6A6, {BEST}": Way(6, ABSORBED),
    f"W6A6, {PEER}": Way(6, None),
    "W4A4, default": Way(4, {}),
    f"W4A4, {BEST}": Way(4, ABSORBED),
    f"W4A4, {PEER}": Way(4, None),
}


@dataclass(frozen=True)
class Row:
    """Predicted class of each test image, and CPU seconds of the quantization."""

    classes: list[int]
    cpu: float


def text(bench: Bench, folder: Path, code: Path) -> str:
    """Return the table.

    Args:
        folder: output of `benchmarks.lowbit.vit_network`.
        code: the folder `classification` of the peer's repository.
    """
    with np.load(folder / "eval.npz") as held:
        images, labels = held["image"][:IMAGES], held["label"][:IMAGES]
    with np.load(folder / "calib.npz") as held:
        samples = held["image"][: FEEDS * BATCH].reshape(FEEDS, BATCH, *images.shape[1:])
    save_feeds(bench.folder / "vit.npz", [{"image": sample} for sample in samples])
    floats = classes(folder / "vit.onnx", images)
    hits = floats == labels
    rows, right = [_row("float", hits, hits, floats == floats, None)], {}
    for name, way in WAYS.items():
        key = ("vision transformer", name)
        record = bench.kept.record(key, partial(_measured, bench, folder, code, images, way))
        predictions = np.asarray(record["classes"])
        right[name] = predictions == labels
        rows.append(_row(name, right[name], hits, predictions == floats, record["cpu"]))
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    below, below_text = _difference(hits, right[f"W6A6, {BEST}"])
    ahead, ahead_text = _difference(right[f"W4A4, {BEST}"], right[f"W4A4, {PEER}"])
    verdicts = (
        f"- W6A6 at most {CLOSE} points below float: {below_text}: {'met' if below <= CLOSE else '**missed**'}\n"
        f"- W4A4 at least {AHEAD:g} point above {PEER}: {ahead_text}: {'met' if ahead >= AHEAD else '**missed**'}"
    )
    about = (
        "Six blocks of width 128 after two convolutions, trained on CIFAR-10 for 3 of 6 epochs (`python -m "
        f"benchmarks.lowbit.vit_network IMAGES build/vit`); {len(labels):,} test images, with 95 % intervals "
        f"(Wilson; of differences: Agresti and Min, paired). {FEEDS * BATCH} calibration images for every "
        "quantizer. Backend virtual. Inputs of layers and of both products of attention are quantized, those of "
        "convolutions to 8 bits, weights a channel. Channels absorbed: EQUALIZE.ABSORB_BIAS, and SMOOTH_QUANT of 1. "
        f"{PEER}: its own program on the CPU in torch, which has log2 codes "
        "with half steps for the outputs of softmax. Equal to float: images with the class that the float network "
        "predicts. CPU seconds: quantization, imports not counted, on one thread of a busy machine."
    )
    header = ("quantizer", "top-1", "against float, points", "equal to float", "CPU s")
    return f"## Vision transformer\n\n{about}\n\n{table(header, rows)}\n\n{verdicts}"


def _row(name: str, right: Array, hits: Array, equal: Array, cpu: float | None) -> list[str]:
    count = len(right)
    low, high = wilson(int(right.sum()), count)
    shown = [name, f"{right.mean():.4f} ({low:.3f} to {high:.3f})"]
    if cpu is None:
        return [*shown, "", "", ""]
    return [*shown, _difference(right, hits)[1], f"{equal.mean():.4f}", f"{cpu:.0f}"]


def _difference(right: Array, other: Array) -> tuple[float, str]:
    """Return how many points of top-1 are gained on `other`, and the text with the interval."""
    least, most = paired(int((right & ~other).sum()), int((other & ~right).sum()), len(right))
    points = 100 * float(right.mean() - other.mean())
    return points, f"{points:+.2f} ({100 * least:+.2f} to {100 * most:+.2f})"


def classes(model: Path, images: Array) -> Array:
    """Return the class that a file predicts for each image."""
    opened = session(model)
    batches = np.split(images, len(images) // 100)
    return np.concatenate([opened.run(None, {"image": batch})[0].argmax(1) for batch in batches])


def _measured(bench: Bench, folder: Path, code: Path, images: Array, way: Way) -> dict[str, Any]:
    if way.overrides is None:
        output = bench.folder / "vit.npy"
        job = {"code": str(code), "folder": str(folder), "count": FEEDS * BATCH, "images": len(images)}
        job |= {"w_bit": way.bits, "a_bit": way.bits, "output": str(output)}
        cost = run([sys.executable, "-m", "benchmarks.peers.repq_vit", json.dumps(job)], None)
        return asdict(Row(np.load(output).tolist(), cost["cpu"]))
    overrides = {**PLACEMENT, "w_bit": way.bits, "a_bit": way.bits, **way.overrides}
    output = bench.folder / "vit.onnx"
    job = {"model": str(folder / "vit.onnx"), "data": str(bench.folder / "vit.npz"), "count": FEEDS}
    job |= {"output": str(output), "backend": overrides.pop("backend"), "overrides": overrides}
    cost = run([sys.executable, "-m", "benchmarks.lowbit.child", json.dumps(job)], None)
    return asdict(Row(classes(output, images).tolist(), cost["cpu"]))
