"""Whether two model files compute the same, by onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

BATCHES: Final = (2,)
TOLERANCE: Final = 1e-3
DTYPES: Final = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def session(path: Path) -> ort.InferenceSession:
    """One thread, nothing optimized: the model as it is written."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feed(run: ort.InferenceSession) -> dict[str, Any] | None:
    """Random inputs; None where a type has no random values."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for value in run.get_inputs():
        if value.type not in DTYPES:
            return None
        shape = [size if isinstance(size, int) and size >= 0 else BATCHES[0] for size in value.shape]
        if np.prod(shape, dtype=float) > 1e6:
            return None
        feeds[value.name] = (rng.standard_normal(shape) * 2).astype(DTYPES[value.type])
    return feeds


def difference(model: Path, result: Path) -> str | None:
    """Compare `result` with `model` in onnxruntime; None if they agree, or if onnxruntime cannot run `model`."""
    try:
        first = session(model)
        feeds = feed(first)
        if feeds is None:
            return None
        want = first.run(None, feeds)
        again = first.run(None, feeds)
    except Exception:  # onnxruntime's exceptions share no base; a model that it cannot run has nothing to compare
        return None
    try:
        other = session(result)
        got = other.run([value.name for value in first.get_outputs()], feeds)
    except Exception as error:
        return f"onnxruntime runs the model and not the result: {error}"[:300]
    for value, expected, repeated, found in zip(first.get_outputs(), want, again, got, strict=True):
        if not isinstance(expected, np.ndarray) or expected.dtype.kind not in "fiub":
            continue
        if not np.array_equal(expected, repeated, equal_nan=expected.dtype.kind == "f"):
            continue  # random by nature, or not a number
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return f"'{value.name}': {expected.dtype}{expected.shape} became {found.dtype}{found.shape}"
        wide, other_wide = expected.astype(np.float64), found.astype(np.float64)
        finite = np.isfinite(wide)
        scale = np.abs(wide[finite]).max(initial=1.0)
        if not np.allclose(wide, other_wide, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True):
            return f"'{value.name}' differs by {np.nanmax(np.abs(wide[finite] - other_wide[finite]), initial=0):.3g}"
    return None
