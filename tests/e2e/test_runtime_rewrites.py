"""Quantized files run at every optimization level of onnxruntime, also where it rewrites operators between pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import sbonnx
from sbonnx.spec import Array
from tests.support.models import model

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


def outputs(source: onnx.ModelProto | Path, feeds: list[dict[str, Array]], level: str) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    content = str(source) if isinstance(source, Path) else source.SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return np.asarray(np.concatenate([session.run(None, feed)[0] for feed in feeds]), np.float64)


def assert_near_float(proto: onnx.ModelProto, feeds: list[dict[str, Array]], file: Path, least: float = 22.0) -> None:
    """Compare the file with the float model at every level, in dB."""
    reference = outputs(proto, feeds, LEVELS[0])
    for level in LEVELS:
        noise = ((outputs(file, feeds, level) - reference) ** 2).sum()
        assert 10 * np.log10((reference**2).sum() / noise) > least, level


def quantized(proto: onnx.ModelProto, feeds: list[dict[str, Array]], folder: Path, **wishes: Any) -> Path:
    path = folder / "q.onnx"
    recipe = {"KERNEL_COSTS": "none"} if wishes.get("backend", "onnxruntime") == "onnxruntime" else {}
    recipe.update(wishes.pop("recipe", {}))
    sbonnx.quantize(proto, feeds, output=path, recipe=recipe, **wishes)
    return path


def normal(*shape: int, seed: int = 0, count: int = 4) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal(shape).astype(np.float32)} for _ in range(count)]


def kernel(*shape: int) -> Array:
    rng = np.random.default_rng(len(shape))
    return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


BETWEEN = """agraph (float[1,16,8,8] x) => (float[1,16,1,1] y) {
    c1 = Conv <pads = [1,1,1,1]> (x, w1)
    a = Relu (c1)
    b = OP
    c2 = Conv <pads = [1,1,1,1]> (b, w2)
    d = Relu (c2)
    y = GlobalAveragePool (d)
}"""

INT64 = np.int64
RESIZES = {
    "sizes": ('Resize <axes = [2,3], mode = "nearest"> (a, , , s)', np.array([16, 12], INT64)),
    "scales": ('Resize <axes = [3,2], mode = "nearest"> (a, , s)', np.array([1.5, 2], np.float32)),
    "negative axes": ('Resize <axes = [-2,-1], mode = "linear"> (a, , s)', np.array([2, 2], np.float32)),
    "aspect": (
        'Resize <axes = [2,3], mode = "nearest", keep_aspect_ratio_policy = "not_larger"> (a, , , s)',
        np.array([16, 12], INT64),
    ),
}


@pytest.mark.parametrize("backend", ["onnxruntime", "qnn"])
@pytest.mark.parametrize("case", RESIZES)
def test_resize_with_axes_between_convolutions(case: str, backend: str, tmp_path: Path) -> None:
    op, numbers = RESIZES[case]
    proto = model(BETWEEN.replace("OP", op), opset=19, w1=kernel(16, 16, 3, 3), w2=kernel(16, 16, 3, 3), s=numbers)
    feeds = normal(1, 16, 8, 8)
    assert_near_float(proto, feeds, quantized(proto, feeds, tmp_path, backend=backend))


PADS: dict[str, tuple[str, list[int], list[int]]] = {
    "edge": ('Pad <mode = "edge"> (a, p, , axes)', [1, 1], [3]),
    "reflect": ('Pad <mode = "reflect"> (a, p, , axes)', [1, 1, 1, 1], [2, 3]),
    "wrap": ('Pad <mode = "wrap"> (a, p, , axes)', [-1, 2], [-2]),
    "two": ('Pad <mode = "constant"> (a, p, two, axes)', [1, 1], [3]),
    "wide": ('Pad <mode = "constant"> (a, p, , axes)', [4, 4, 4, 4], [2, 3]),
}


@pytest.mark.parametrize("backend", ["onnxruntime", "qnn"])
@pytest.mark.parametrize("case", PADS)
def test_pad_with_axes_between_convolutions(case: str, backend: str, tmp_path: Path) -> None:
    op, pads, axes = PADS[case]
    numbers = {"p": np.array(pads, INT64), "axes": np.array(axes, INT64), "two": np.float32(2)}
    proto = model(BETWEEN.replace("OP", op), opset=19, w1=kernel(16, 16, 3, 3), w2=kernel(16, 16, 3, 3), **numbers)
    feeds = normal(1, 16, 8, 8)
    assert_near_float(proto, feeds, quantized(proto, feeds, tmp_path, backend=backend))


@pytest.mark.parametrize("form", ["onnxruntime", "tensorrt", "qnn", "virtual", "qoperator"])
@pytest.mark.parametrize("dilations", ["1,1", "2,2"])
def test_average_pool_with_dilations(dilations: str, form: str, tmp_path: Path) -> None:
    op = f"AveragePool <kernel_shape = [2,2], dilations = [{dilations}]> (a)"
    proto = model(BETWEEN.replace("OP", op), opset=19, w1=kernel(16, 16, 3, 3), w2=kernel(16, 16, 3, 3))
    feeds = normal(1, 16, 8, 8)
    operators = form == "qoperator"
    wishes: dict[str, Any] = {"recipe": {"FORMAT": "qoperator"}} if operators else {"backend": form}
    file = quantized(proto, feeds, tmp_path, **wishes)
    assert_near_float(proto, feeds, file)
    if form == "onnxruntime":
        kinds = [node.op_type for node in onnx.load(file).graph.node]
        assert kinds.count("DequantizeLinear") >= 4  # the first convolution stays in integers in any case


WEIGHTS = [
    ((1, 32, 64), (2, 6, 32)),
    ((4, 32, 64), (2, 4, 6, 32)),
    ((1, 1, 32, 64), (2, 4, 6, 32)),
    ((1, 32, 64), (6, 32)),
]


@pytest.mark.parametrize("between", ["Tanh", "Relu", "Identity"])
@pytest.mark.parametrize(("weight", "data"), WEIGHTS)
def test_matmul_with_a_weight_of_several_axes(
    weight: tuple[int, ...], data: tuple[int, ...], between: str, tmp_path: Path
) -> None:
    rank = max(len(weight), len(data))
    text = f"""agraph (float[{",".join(map(str, data))}] x) => (float[{",".join("ABCD"[:rank])}] y) {{
        a = MatMul (x, w1)
        b = {between} (a)
        y = MatMul (b, w2)
    }}"""
    proto = model(text, w1=kernel(*weight), w2=kernel(64, 16))
    feeds = normal(*data)
    assert_near_float(proto, feeds, quantized(proto, feeds, tmp_path))


@pytest.mark.parametrize("backend", ["tensorrt", "qnn", "virtual"])
def test_matmul_with_a_batch_of_weights_for_other_runtimes(backend: str, tmp_path: Path) -> None:
    text = """agraph (float[2,4,6,32] x) => (float[2,4,6,16] y) {
        a = MatMul (x, w1)
        b = Tanh (a)
        y = MatMul (b, w2)
    }"""
    proto = model(text, w1=kernel(4, 32, 64), w2=kernel(4, 64, 16))
    feeds = normal(2, 4, 6, 32)
    assert_near_float(proto, feeds, quantized(proto, feeds, tmp_path, backend=backend))


@pytest.mark.parametrize("mode", ["weight_only", "dynamic"])
def test_weights_with_unit_axes_are_quantized_without_activations(mode: str, tmp_path: Path) -> None:
    text = "agraph (float[2,6,64] x) => (float[2,6,64] y) { a = MatMul (x, w1) b = Tanh (a) y = MatMul (b, w2) }"
    proto = model(text, w1=kernel(1, 64, 64), w2=kernel(1, 64, 64))
    feeds = normal(2, 6, 64)
    recipe = {"MODE": mode, "MIN_WEIGHT_SIZE": 1, "W": {"QUANTIZER": {"BIT": 8}}}
    file = quantized(proto, feeds, tmp_path, recipe=recipe)
    assert_near_float(proto, feeds, file)
    assert not [node for node in onnx.load(file).graph.node if node.op_type == "MatMul"]


@pytest.mark.parametrize("mode", ["static", "weight_only"])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_integer_sums_before_a_mean(kind: str, mode: str, tmp_path: Path) -> None:
    text = f"""agraph (float[2,6,32] x, {kind}[2,6,32] i) => (float[2,6,8] y) {{
        s = Add (i, i)
        m = ReduceMean <axes = [-1]> (s)
        f = Cast <to = 1> (m)
        a = MatMul (x, w1)
        b = Add (a, f)
        c = Relu (b)
        y = MatMul (c, w2)
    }}"""
    proto = model(text, w1=kernel(32, 32), w2=kernel(32, 8))
    rng = np.random.default_rng(1)
    feeds = [{**feed, "i": rng.integers(-5, 9, (2, 6, 32)).astype(kind)} for feed in normal(2, 6, 32)]
    recipe = {"MODE": mode, "MIN_WEIGHT_SIZE": 1, "W": {"QUANTIZER": {"BIT": 8}}}
    assert_near_float(proto, feeds, quantized(proto, feeds, tmp_path, recipe=recipe))
