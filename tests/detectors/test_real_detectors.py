"""Detections of real models equal those of the decoders that came with them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from sbonnx import graph as graphs
from sbonnx.detectors import HeadDecoder
from sbonnx.detectors.head import HeadChoice
from sbonnx.metrics.boxes import detections

SELECTION = {"fastestdet": (0.1, 0.45), "ultraface_rfb320": (0.2, 0.3)}
"""Minimum score and IoU. Below 0.1 the decoder of fastestdet limits the candidates of a class before suppression."""


@pytest.mark.parametrize("name", SELECTION)
def test_detections_of_real_models(name: str, pack: Path) -> None:
    spec = importlib.util.spec_from_file_location("pack_code", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    entry, (least, iou) = code.entry(name), SELECTION[name]
    session = onnxruntime.InferenceSession(str(pack / entry["file"]))
    names = [output.name for output in session.get_outputs()]
    recognized = HeadDecoder(lambda: graphs.load(pack / entry["file"]))
    head = {"fastestdet": "fastestdet", "ultraface_rfb320": "ssd"}[name]
    stated = HeadDecoder(
        lambda: graphs.load(pack / entry["file"]), HeadChoice(head, {"score": least, "iou": iou, "most": 200})
    )
    counts = []
    for image in code._images(np.load(pack / entry["eval_file"]), 4):
        feed = {entry["inputs"][0]["name"]: code._prep_images([image], entry["preprocess"])}
        outputs = dict(zip(names, session.run(None, feed), strict=True))
        expected = code._DEC[entry["decoder"]]([outputs[key] for key in entry.get("output_order") or names], least)
        (boxes,) = detections(stated(outputs, feed, {}))
        height, width = next(iter(feed.values())).shape[2:]
        assert np.allclose(boxes.corners / (width, height, width, height), expected[:, :4], atol=1e-5)
        assert np.allclose(boxes.scores, expected[:, 4], atol=1e-6)
        assert boxes.classes.tolist() == expected[:, 5].tolist()
        (others,) = detections(recognized(outputs, feed, {}))
        assert set(np.round(boxes.scores[:3], 6)) <= set(np.round(others.scores, 6))
        counts.append(len(boxes.scores))
    assert sum(counts)
