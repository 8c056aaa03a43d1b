"""The rules of docs/openvino.md, each shown by the executed graph of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import sbonnx
from sbonnx.backends.openvino.runtime import OPENVINO_RUNTIME, OpenVinoSession
from sbonnx.backends.runtime_types import layers_by_name
from sbonnx.errors import ModelError
from sbonnx.metrics import sqnr_db
from tests.backends.openvino.graphs import PACKED, SHOWN
from tests.support.models import model, run

pytest.importorskip("openvino", reason="OpenVINO is not installed")

DOC = Path(__file__).resolve().parents[3] / "docs" / "openvino.md"
IN_TABLE = {True: "integers", False: "float", None: "does not compile"}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", SHOWN)
def test_rule(name: str) -> None:
    shown = SHOWN[name]
    file = shown.make().SerializeToString()
    if shown.integer is None:
        with pytest.raises(ModelError, match="OpenVINO refuses the model"):
            OpenVinoSession(file, 1)
        return
    layers = OpenVinoSession(file, 1).layers()
    named = layers_by_name(layers)
    nameless = [layer for layer in layers if layer.kind in ("FullyConnected", "RNNSeq")]  # in float, or transposed
    found = nameless[0] if name.startswith(("recurrent", "gru")) else None
    found = found or named.get(shown.node) or named.get("op") or nameless[0]
    assert found.integer is shown.integer, found


def deviation(name: str) -> float:
    """Squared error of OpenVINO against onnxruntime, in float32, relative to the squared outputs."""
    model = SHOWN[name].make()
    shape = [size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(1).normal(0, 1, shape).astype(np.float32)}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    wanted, *_ = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)
    found, *_ = OpenVinoSession(model.SerializeToString(), 1, precision="f32").run(None, feeds)
    assert found.shape == wanted.shape
    return float(np.square(found - wanted).sum() / np.square(wanted).sum())


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "name", [name for name, shown in SHOWN.items() if shown.integer is not None and not shown.wrong]
)
def test_values_are_those_of_onnxruntime(name: str) -> None:
    """With one step of rounding: OpenVINO rounds some ties the other way."""
    error = deviation(name)
    assert error < 1e-3, f"{-10 * np.log10(error):.1f} dB"


@pytest.mark.parametrize("name", [name for name, shown in SHOWN.items() if shown.wrong])
def test_integer_sequences_compute_other_states_than_the_file_describes(name: str) -> None:
    """The reason why LSTM and GRU stay float. If this fails, a newer OpenVINO is exact: quantize them."""
    assert deviation(name) > 1e-2


@pytest.mark.parametrize("name", PACKED)
def test_weight_only_products_read_the_codes(name: str) -> None:
    """The weight of the executed product is the constant of codes, of as many bits."""
    session = OpenVinoSession(SHOWN[name].make().SerializeToString(), 1)
    (executed,) = (
        node
        for node in session._compiled.get_runtime_model().get_ordered_ops()
        if str(node.get_rt_info()["layerType"].astype(str)) == "FullyConnected"
    )
    weight = executed.input(1).get_source_output()
    assert weight.get_element_type().bitwidth == (8 if name.endswith("8") else 4)


def test_tables_stay_in_codes() -> None:
    """The executed Gather reads 8 bits; of a dequantized table it would read floats, folded when the file is loaded."""
    text = """agraph (int64[1,9] ids) => (float[1,9,64] y) {
        rows = Gather (words, ids)
        y = MatMul (rows, w)
    }"""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {"words": rng.standard_normal((64, 64)), "w": rng.standard_normal((64, 64))}
    proto = model(text, **{name: value.astype(np.float32) for name, value in weights.items()})
    feeds = [{"ids": rng.integers(0, 64, (1, 9))} for _ in range(4)]
    report = sbonnx.quantize(proto, feeds, backend="openvino", verify=False)
    assert report.quantized is not None
    session = OpenVinoSession(report.quantized.SerializeToString(), 1)
    inputs = {
        str(node.input(0).get_element_type().get_type_name())
        for node in session._compiled.get_runtime_model().get_ordered_ops()
        if str(node.get_rt_info()["layerType"].astype(str)) == "Gather"
    }
    assert inputs == {"i8", "f32"}  # codes and their scales
    floats, decoded = run(proto, feeds[0])["y"], session.run(None, feeds[0])[0]
    assert sqnr_db(floats, decoded) > 35


def test_document_has_every_rule() -> None:
    text = DOC.read_text(encoding="utf-8")
    for shown in SHOWN.values():
        assert f"| {shown.text} | {IN_TABLE[shown.integer]} |" in text


def test_it_is_not_absent() -> None:
    assert OPENVINO_RUNTIME.absent() is None


def test_both_types_of_64_bits_are_read() -> None:
    """NumPy has two, and onnxruntime's outputs are of the one that OpenVINO does not know."""
    source = model("agraph (int64[N] x) => (int64[N] y) { y = Neg (x) }")
    (result,) = OpenVinoSession(source.SerializeToString(), 1).run(None, {"x": np.arange(3).astype(np.longlong)})
    assert result.tolist() == [0, -1, -2]
