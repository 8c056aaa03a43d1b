"""Float biases behind coarse pairs: onnxruntime would round them to the step of input times weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from sbonnx import quantize
from sbonnx.assets import digits
from sbonnx.backends.tensorrt import ROUNDS_BIASES
from sbonnx.judged import NO_BIASES
from sbonnx.spec import Array

IMAGES = np.load(digits().calib)["image"][:32]


def scores(file: Path, *without: str) -> Array:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"], disabled_optimizers=list(without))
    found: Array = session.run(None, {"image": IMAGES})[0]
    return found


def test_below_8_bits_the_virtual_file_is_judged_by_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "q.onnx"
    report = quantize(str(digits().model), [{"image": IMAGES}], backend="virtual", bits="w3a3", output=file)
    assert NO_BIASES in report.notes
    float_scores = scores(digits().model)
    plain, rewritten = scores(file, ROUNDS_BIASES), scores(file)
    spread = np.square(float_scores).mean()
    kept, lost = (10 * np.log10(spread / np.square(one - float_scores).mean()) for one in (plain, rewritten))
    assert kept > lost  # what the note is about
    assert report.metrics["outputs"][0]["sqnr_db"] == pytest.approx(kept, abs=0.5)


def test_at_8_bits_nothing_is_left_out(tmp_path: Path) -> None:
    report = quantize(str(digits().model), [{"image": IMAGES}], backend="virtual", output=tmp_path / "q.onnx")
    assert NO_BIASES not in report.notes
