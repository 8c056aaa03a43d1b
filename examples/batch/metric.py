"""The metric of this example's jobs: what share of images is recognised. Named in jobs.yaml as metric.py:score."""

from __future__ import annotations

import numpy as np
import onnxruntime

from sbonnx import digits


def score(path: str) -> dict[str, float]:
    """Top-1 of a model file on the 450 images that nothing was trained or calibrated on, 0 to 1."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    data = np.load(digits().eval)
    scores = session.run(["scores"], {"image": data["image"]})[0]
    return {"top1": float(np.mean(scores.argmax(axis=1) == data["label"]))}
