"""Overrides of single tensors: written, they give onnxruntime's quantizer the same scales; its own are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config
from onnxruntime.quantization.tensor_quant_overrides import TensorQuantOverridesHelper

from sbonnx import quantize
from sbonnx.errors import RecipeError
from sbonnx.linting import lint
from sbonnx.planning.override_file import TensorOverride, read_overrides
from sbonnx.spec import Array
from sbonnx.verify import session
from tests.backends.qnn.graphs import feeds_for, parsed
from tests.support.values import some

TEXT = """g (float[N,4,8,8] x) => (float[N,4,8,8] y) {
    a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w0)
    b = Sigmoid(a)
    c = Mul(a, b)
    y = Conv<kernel_shape=[1,1]>(c, w1)
}"""


def model() -> onnx.ModelProto:
    return parsed(TEXT, {"w0": (4, 4, 3, 3), "w1": (4, 4, 1, 1)})


def written(folder: Path, overrides: Any) -> Path:
    path = folder / "overrides.json"
    path.write_text(overrides if isinstance(overrides, str) else json.dumps(overrides))
    return path


def numbers(found: onnx.ModelProto) -> dict[str, Array]:
    return {value.name: numpy_helper.to_array(value) for value in found.graph.initializer}


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Feeds for onnxruntime's quantizer."""

    def __init__(self, feeds: list[dict[str, Array]]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        return next(self.feeds, None)


def for_onnxruntime(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The overrides of a file with the objects that onnxruntime's quantizer takes, as docs/qnn.md says."""
    overrides: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())
    for rows in overrides.values():
        for row in rows:
            for one in (row, row.get("convert", {})):
                if one:
                    one["quant_type"] = QuantType.from_string(one["quant_type"])
                    one["zero_point"] = np.array(one["zero_point"], one["quant_type"].name[1:].lower())
                    one["scale"] = np.array(one["scale"], np.float32)
    return overrides


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bits", ["w8a8", "w8a16"])
def test_onnxruntime_computes_with_the_scales_that_are_written(bits: str, tmp_path: Path) -> None:
    source, path, theirs = tmp_path / "float.onnx", tmp_path / "overrides.json", tmp_path / "theirs.onnx"
    onnx.save(model(), source)
    feeds = feeds_for(model())
    report = quantize(source, feeds, backend="qnn", bits=bits, write_overrides=path)
    assert report.quantized is not None
    overrides = for_onnxruntime(path)
    names = {name for node in model().graph.node for name in (*node.input, *node.output)}
    weights = {value.name: value for value in model().graph.initializer}
    kind = QuantType.QUInt8 if bits == "w8a8" else QuantType.QUInt16
    assert TensorQuantOverridesHelper(overrides).is_valid(weights, names - set(weights), kind) == (True, None)
    quantize_static(
        source,
        theirs,
        Reader(feeds),
        QuantFormat.QDQ,
        activation_type=kind,
        extra_options={"TensorQuantOverrides": overrides, "MinimumRealRange": 0.0001},
    )
    ours, other = numbers(report.quantized), numbers(onnx.load(theirs))
    assert set(overrides) == {"x", "w0", "a", "b", "c", "w1", "y"}
    for tensor in overrides:
        for what in ("scale", "zero_point"):
            assert np.array_equal(ours[f"{tensor}_{what}"], other[f"{tensor}_{what}"]), (tensor, what)
    (mine,) = session(report.quantized.SerializeToString(), level="off").run(None, feeds[0])
    (their,) = session(theirs, level="off").run(None, feeds[0])
    step = float(ours["y_scale"])
    assert np.abs(mine - their).max() < (8 if bits == "w8a8" else 2048) * step, "codes of weights differ by gptq"


def test_what_is_written_gives_the_same_file(tmp_path: Path) -> None:
    path, feeds = tmp_path / "overrides.json", feeds_for(model())
    first = quantize(model(), feeds, backend="qnn", write_overrides=path)
    again = quantize(model(), [{"x": 3 * feed["x"]} for feed in feeds], backend="qnn", tensor_overrides=path)
    assert first.quantized is not None
    assert again.quantized is not None
    ours, other = numbers(first.quantized), numbers(again.quantized)
    assert all(np.array_equal(ours[name], other[name]) for name in ours if name.endswith(("_scale", "_zero_point")))


def test_overrides_of_the_helper_are_read(tmp_path: Path) -> None:
    helper = TensorQuantOverridesHelper({})
    helper.update_tensor_overrides("a", {"quant_type": QuantType.QUInt16, "symmetric": False})
    helper.update_tensor_overrides("b", {"scale": np.array(0.01, np.float32), "zero_point": np.array(3, np.uint8)})
    helper["w0"] = [{"quant_type": QuantType.QInt8, "axis": -4, "rmin": -1.0, "rmax": 1.0}]
    convert = {"quant_type": QuantType.QUInt16, "recv_nodes": {"y"}}
    helper.update_tensor_overrides("c", {"quant_type": QuantType.QUInt8, "convert": convert})
    found = read_overrides(written(tmp_path, helper.pprint_str()))
    assert found == {
        "a": TensorOverride(bits=16, signed=False, symmetric=False),
        "b": TensorOverride(scale=(float(str(np.float32(0.01))),), zero_point=(3,)),
        "w0": TensorOverride(bits=8, signed=True, axis=-4, ranges=((-1.0, 1.0),)),
        "c": TensorOverride(
            bits=8, signed=False, convert=TensorOverride(bits=16, signed=False), readers=frozenset({"y"})
        ),
    }


def test_types_ranges_and_conversions(tmp_path: Path) -> None:
    overrides = {
        "x": [{"quant_type": "QInt8", "rmin": -5, "rmax": 5, "symmetric": True}],
        "w1": [{"quant_type": "QInt8"}],
        "c": [{"convert": {"quant_type": "QUInt16", "recv_nodes": ["y"]}}],
        "y": [{"quant_type": "QUInt16"}],
        "other": [{"quant_type": "QUInt8"}],
    }
    path, again = written(tmp_path, overrides), tmp_path / "again.json"
    report = quantize(model(), feeds_for(model()), backend="qnn", tensor_overrides=path, write_overrides=again)
    assert report.quantized is not None
    assert [refusal.where for refusal in report.refusals] == ["other"]
    values = numbers(report.quantized)
    assert values["x_scale"] == np.float32(5 / 127)
    assert values["x_zero_point"].dtype == np.int8
    assert values["y_zero_point"].dtype == np.uint16
    makers = {name: node for node in report.quantized.graph.node for name in node.output}
    chain, name = [], next(node.input[0] for node in report.quantized.graph.node if node.name == "y")
    while makers[name].op_type != "Mul":
        chain.append(makers[name].op_type)
        name = makers[name].input[0]
    assert chain == ["DequantizeLinear", "QuantizeLinear"] * 2, "the converted type is of the dequantized tensor"
    assert some(report.metrics).outputs[0].sqnr_db > 25
    convert = json.loads(again.read_text())["c"][0]["convert"]
    assert (convert["quant_type"], convert["recv_nodes"]) == ("QUInt16", ["y"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("[1", "cannot be read as JSON"),
        ([1], "is no mapping of tensor names"),
        ({"x": {}}, "'x' in '.*' is no list of mappings"),
        ({"x": [{"bits": 8}]}, "'x' in '.*': key 'bits' is not one of axis, convert"),
        ({"x": [{"quant_type": "QFloat8"}]}, "quant_type is one of QInt8, QUInt8, QInt16, QUInt16, got 'QFloat8'"),
        ({"x": [{"scale": 1}]}, "'scale' and 'zero_point' are set together"),
        ({"x": [{"scale": 0, "zero_point": 0}]}, "'scale' cannot be 0"),
        ({"x": [{"scale": "a", "zero_point": 0}]}, "'scale' is a number, got 'a'"),
        ({"x": [{"scale": 1, "zero_point": 0, "symmetric": True}]}, "'symmetric' is invalid with 'scale'"),
        ({"x": [{"scale": 1, "zero_point": 300}]}, "zero point outside uint8"),
        ({"x": [{"axis": 1}]}, "'x' is no constant, and 'axis' is for constants"),
        ({"w0": [{"axis": 4}]}, "'w0' has 4 axes, and none 4"),
        ({"w0": [{"axis": 0, "rmin": -1, "rmax": 1}] * 3}, "4 channels along axis 0, and 3 overrides"),
        ({"w0": [{"rmin": -1, "rmax": 1}] * 3}, "3 entries without 'axis'"),
        ({"w0": [{"convert": {"quant_type": "QUInt16"}}]}, "'w0' is a constant, which 'convert' is not for"),
        ({"x": [{"convert": {}}]}, "'convert' is no mapping with 'quant_type'"),
    ],
)
def test_bad_overrides_are_one_line(overrides: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        quantize(model(), feeds_for(model(), 1), backend="qnn", tensor_overrides=written(tmp_path, overrides))
    assert "\n" not in str(caught.value)


def test_other_backends_have_no_overrides(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="tensor_overrides= is for the backend qnn"):
        quantize(model(), feeds_for(model(), 1), tensor_overrides=written(tmp_path, {}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "scale"), [("QInt16", 2.0**-15), ("QUInt16", 2.0**-16)])
def test_scales_that_the_runtime_prescribes_are_those_of_the_overriding_type(
    kind: str, scale: float, tmp_path: Path
) -> None:
    """As get_qnn_qdq_config has them; the rule Q10 finds any other."""
    made, path = model(), tmp_path / "float.onnx"
    onnx.save(made, path)
    overrides: dict[str, Any] = {"b": [{"quant_type": kind}]}
    report = quantize(made, feeds_for(made), backend="qnn", tensor_overrides=written(tmp_path, overrides), verify=False)
    assert report.quantized is not None
    ours = numbers(report.quantized)
    overrides["b"][0]["quant_type"] = QuantType.from_string(kind)
    config = get_qnn_qdq_config(str(path), Reader(feeds_for(made)), init_overrides=overrides, add_qtype_converts=False)
    theirs = config.extra_options["TensorQuantOverrides"]["b"][0]
    assert (ours["b_scale"], ours["b_zero_point"]) == (theirs["scale"], theirs["zero_point"]) == (scale, 0)
    assert "Q10" not in {finding.rule for finding in lint(report.quantized, "qnn")}


def test_prescribed_scales_have_their_zero_point_in_symmetric_recipes_too() -> None:
    made = parsed(TEXT.replace("Mul(a, b)", "Transpose<perm=[0,1,3,2]>(b)"), {"w0": (4, 4, 3, 3), "w1": (4, 4, 1, 1)})
    feeds = feeds_for(made)
    report = quantize(made, feeds, backend="qnn", verify=False, bits="w8a16", a_qscheme="per-tensor-symmetric")
    assert report.quantized is not None
    ours = numbers(report.quantized)
    for tensor in "bc":  # c is moved data, and shares the scale
        assert ours[f"{tensor}_scale"] == 2.0**-16
        assert ours[f"{tensor}_zero_point"] == 0
    assert lint(report.quantized, "qnn") == []
    again = quantize(made, feeds, backend="qnn", verify=False, ranges={"b": [0, 2]}, bits="w8a16")
    assert again.quantized is not None
    assert numbers(again.quantized)["b_scale"] == np.float32(2 / 65535)
