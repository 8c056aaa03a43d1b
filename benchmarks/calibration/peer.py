"""onnxruntime.quantization's calibrators, on the tensors that ours observes. Used inside a process of their own."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import calibrate as peer

from benchmarks.calibration.subjects import Feed, Samples

METHODS = {"minmax": "MinMax", "percentile": "Percentile", "kl_histogram": "Entropy"}
"""Calibration method of the peer by our observer."""


class Reader:
    """Calibration data reader for onnxruntime.quantization."""

    def __init__(self, samples: Samples) -> None:
        self._feeds: Iterator[Feed] = iter(samples)

    def get_next(self) -> Feed | None:
        """Return the next feed, or None at the end."""
        return next(self._feeds, None)


def observe_only(names: Collection[str]) -> None:
    """Patch the peer's calibrators in this process to observe only these tensors."""

    def select(_: Any, model: onnx.ModelProto) -> tuple[set[str], dict[str, onnx.ValueInfoProto]]:
        values = {v.name: v for v in (*model.graph.value_info, *model.graph.output, *model.graph.input)}
        missing = sorted(set(names) - values.keys())
        if missing:
            raise SystemExit(f"shape inference gives the peer no type of {len(missing)} tensors, '{missing[0]}' first")
        return set(names), values

    peer.CalibraterBase.select_tensors_to_calibrate = select


def ranges(model: Path, method: str, samples: Samples) -> tuple[float, dict[str, tuple[float, float]]]:
    """Calibrate with the defaults of `create_calibrator`, which are those of `quantize_static`.

    Args:
        model: float graph, the same that sbonnx observes.
        method: a value of `METHODS`.
        samples: calibration samples.

    Returns:
        (seconds, range by tensor).
    """
    with tempfile.TemporaryDirectory(prefix="calibration-peer-") as folder, contextlib.redirect_stdout(io.StringIO()):
        start = time.perf_counter()
        calibrator = peer.create_calibrator(
            str(model),
            augmented_model_path=str(Path(folder) / "augmented.onnx"),
            calibrate_method=peer.CalibrationMethod[method],
        )
        calibrator.collect_data(Reader(samples))
        found = calibrator.compute_data()
        taken = time.perf_counter() - start
    ends = {name: found[name].range_value for name in found}
    return taken, {name: (np.asarray(lo).item(), np.asarray(hi).item()) for name, (lo, hi) in ends.items()}
