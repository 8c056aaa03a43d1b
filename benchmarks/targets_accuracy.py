"""Accuracy of each target beside the peer's setting for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy import HEADLINE, Run, measure, ours, runs
from benchmarks.results import table

HEADER = ("model", "quantizer", "metric 1", "metric 2", "MB", "CPU s", "beside the peer")
RIVALS = {
    "sbonnx onnxruntime": ("peer per-tensor", "peer per-channel"),
    "sbonnx onnxruntime min-max": ("peer per-tensor", "peer per-channel"),
    "sbonnx tensorrt": ("peer TensorRT switches",),
    "sbonnx tensorrt min-max": ("peer TensorRT switches",),
    "sbonnx tensorrt fp16": ("peer TensorRT switches",),
}
NOT_ENTERED = ("silero_vad",)
"""Models that the peer does not quantize, because it does not process branches: its file is the float network."""

NOT_A_SCORE = ("n_detections",)
"""Metrics for which larger is not better."""


def contestants(path: Path, feeds: list[dict[str, Any]], folder: Path) -> dict[str, Run]:
    """Return our defaults, the min-max setting of the accuracy table, and TensorRT with the rest in half precision."""
    found = runs(path, feeds, folder)
    return {
        "sbonnx onnxruntime": ours(path, feeds, "onnxruntime"),
        "sbonnx onnxruntime min-max": found.pop("sbonnx onnxruntime"),
        "sbonnx tensorrt": ours(path, feeds, "tensorrt"),
        "sbonnx tensorrt min-max": found.pop("sbonnx tensorrt"),
        "sbonnx tensorrt fp16": ours(path, feeds, "tensorrt", high_precision="fp16"),
        **found,
    }


def number(text: str) -> float | None:
    """Parse a cell as a number, or return None."""
    try:
        return float(text)
    except ValueError:
        return None


def ahead(mine: str, rivals: Sequence[str], reference: str) -> tuple[str, bool]:
    """Return the difference to the best rival's metric, and whether the metric is worse than both that and float's.

    Reaching the float metric is enough, because a metric above it is sampling noise.
    """
    own, floats = number(mine), number(reference)
    others = [value for rival in rivals if (value := number(rival)) is not None]
    if own is None or not others:
        return "–", False
    away = own - max(others)
    return f"{away:+.4f}", away < 0 and (floats is None or own < floats)


def judged(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Add the verdict to the rows of one model. Each row: model, quantizer, metric 1, metric 2, ..."""
    found = {row[1]: row for row in rows}
    return [[*row, verdict(row, found)] for row in rows]


def verdict(row: Sequence[str], found: Mapping[str, Sequence[str]]) -> str:
    """Compare a row's metrics with the best of the peer's settings for the same runtime. found: rows by quantizer."""
    name, who = row[:2]
    if who not in RIVALS:
        return ""
    if number(row[2]) is None:
        return "**fails**"
    if name in NOT_ENTERED:
        return "the peer leaves it float"
    differences, worse = [], False
    for place, metric in enumerate(HEADLINE.get(name, ("1", "2")), 2):
        if metric not in NOT_A_SCORE:
            rivals = [found[rival][place] for rival in RIVALS[who] if rival in found]
            difference, lost = ahead(row[place], rivals, found["float"][place])
            differences.append(difference)
            worse = worse or lost
    return f"{'**worse**' if worse else 'not worse'} ({', '.join(differences)})"


def text(pack: Any, names: Sequence[str]) -> str:
    """Return the table with its explanation."""
    metrics = "; ".join(f"{name}: {', '.join(HEADLINE[name])}" for name in names)
    rows = [row for name in names for row in judged(measure(pack, name, contestants))]
    return (
        "### Accuracy by target\n\n"
        f"Metric 1 and 2 by model: {metrics}. The same calibration data for all. Beside the peer: metric 1 "
        "and 2 less those of the peer's better setting for the same runtime; not worse: at least as high, or at least "
        "as high as float. sbonnx with its defaults (ranges of activations of least squared error) and with the "
        "peer's min-max; fp16: int8 where quantized, float16 elsewhere.\n\n" + table(HEADER, rows)
    )
