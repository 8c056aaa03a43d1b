"""The bundled model is what the demo and the documentation say it is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime

from sbonnx.assets import digits

MAX_MODEL_BYTES = 500_000
MAX_ARRAY_BYTES = 50_000


def model() -> onnx.ModelProto:
    return onnx.load(digits().model)


def test_the_files_are_small() -> None:
    paths = digits()
    assert paths.model.stat().st_size < MAX_MODEL_BYTES
    assert paths.calib.stat().st_size < MAX_ARRAY_BYTES
    assert paths.eval.stat().st_size < MAX_ARRAY_BYTES


def test_the_model_is_valid_and_has_one_of_each() -> None:
    onnx.checker.check_model(model(), full_check=True)
    counts = Counter(node.op_type for node in model().graph.node)
    for op in ("Conv", "BatchNormalization", "Relu", "Add", "Concat", "MaxPool", "GlobalAveragePool", "Gemm"):
        assert counts[op], f"no {op}"
    assert counts["Conv"] == counts["BatchNormalization"], "left unfused, for the demo to fuse"
    groups = [a.i for node in model().graph.node if node.op_type == "Conv" for a in node.attribute if a.name == "group"]
    assert max(groups) == 16, "one depthwise"


def test_the_interface() -> None:
    graph = model().graph
    (image,), (scores,) = graph.input, graph.output
    assert (image.name, scores.name) == ("image", "scores")
    dims = [dim.dim_param or dim.dim_value for dim in image.type.tensor_type.shape.dim]
    assert dims == ["batch", 1, 8, 8]


def test_nothing_of_the_exporting_machine_is_left() -> None:
    stored = model()
    for node in stored.graph.node:
        assert not node.metadata_props
        assert not node.doc_string
    assert b"/tmp/" not in stored.SerializeToString()
    assert b'.py"' not in stored.SerializeToString()


def test_accuracy_is_the_recorded_one() -> None:
    """And at least 98 %: the drop that the demo shows is quantization's own."""
    session = onnxruntime.InferenceSession(digits().model, providers=["CPUExecutionProvider"])
    data = np.load(digits().eval)
    (scores,) = session.run(None, {"image": data["image"]})
    accuracy = float(np.mean(np.argmax(np.asarray(scores), axis=1) == data["label"]))
    recorded = {entry.key: entry.value for entry in model().metadata_props}
    assert abs(accuracy - float(recorded["accuracy"])) < 0.5 / len(data["label"])
    assert accuracy >= 0.98


def test_calibration_and_evaluation_images_differ() -> None:
    calib, evaluation = np.load(digits().calib)["image"], np.load(digits().eval)["image"]
    assert calib.shape == (256, 1, 8, 8)
    assert evaluation.shape == (450, 1, 8, 8)
    for images in (calib, evaluation):
        assert images.dtype == np.float32
        assert images.min() == 0
        assert images.max() == 1
    seen = {image.tobytes() for image in calib}
    assert not seen & {image.tobytes() for image in evaluation}
