"""Quantized files run at every optimization level of onnxruntime, also where it rewrites operators between pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import sbonnx
from sbonnx import verify
from sbonnx.errors import ModelError
from sbonnx.spec import Array
from tests.support.models import model

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


def outputs(source: onnx.ModelProto | Path, feeds: list[dict[str, Array]], level: str) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    content = str(source) if isinstance(source, Path) else source.SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    found = [np.asarray(session.run(None, feed)[0], np.float64) for feed in feeds]
    return np.concatenate(found)


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
    return np.asarray(rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:])), np.float32)


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


@pytest.mark.parametrize("backend", ["onnxruntime", "qnn"])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_resize_that_keeps_the_aspect_ratio_by_rounding(mode: str, backend: str, tmp_path: Path) -> None:
    """9 columns become 7.875, which are 8."""
    op = f'Resize <axes = [2,3], mode = "{mode}", keep_aspect_ratio_policy = "not_larger"> (a, , , s)'
    text = BETWEEN.replace("OP", op).replace("8,8", "8,9")
    proto = model(text, opset=19, w1=kernel(16, 16, 3, 3), w2=kernel(16, 16, 3, 3), s=np.array([7, 8], INT64))
    feeds = normal(1, 16, 8, 9)
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


NORM = """agraph (float[N,6,DEPTH] x) => (float[N,6,8] y) {
    h = MatMul (x, w1)
    m = ReduceMean <axes = [-1]> (h)
    d = Sub (h, m)
    p = Pow (SQUARED, two)
    v = ReduceMean <axes = [-1]> (p)
    e = Add (v, eps)
    s = Sqrt (e)
    n = Div (SQUARED, s)
    g = Mul (n, gamma)
    z = Add (g, beta)
    y = MatMul (z, w2)
}"""


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("squared", ["d", "h"])
def test_a_norm_that_onnxruntime_fuses_wrongly_is_calibrated_as_it_is(squared: str, opset: int, tmp_path: Path) -> None:
    """The scale widens the result, which fused normalizations do not support; the float model runs at 'off' alone."""
    numbers = {"two": np.float32(2), "eps": np.float32(1e-2)}
    text = NORM.replace("SQUARED", squared).replace("DEPTH", "16")
    proto = model(text, opset=opset, w1=kernel(16, 1), w2=kernel(32, 8), gamma=32, beta=32, **numbers)
    feeds = normal(4, 6, 16)
    with pytest.raises(Exception, match=r"NormFusion|NumPy-broadcastable"):
        outputs(proto, feeds, "ORT_ENABLE_ALL")
    path = tmp_path / "q.onnx"
    report = sbonnx.quantize(proto, feeds, output=path, recipe={"KERNEL_COSTS": "none"})
    assert report.counts.activations
    notes = [note for note in report.notes if "LayerNormFusion" in note]
    assert len(notes) == 1
    assert "disabled_optimizers" in notes[0]
    reference, got = (outputs(one, feeds, "ORT_DISABLE_ALL") for one in (proto, path))
    assert 10 * np.log10((reference**2).sum() / ((got - reference) ** 2).sum()) > 20


def test_a_file_that_a_rewrite_breaks_is_an_error_that_names_it(tmp_path: Path) -> None:
    """One zero point for each column of a batch of matrices, as a file of other tools has it."""
    text = """agraph (float[2,3,4,8] x) => (float[2,3,4,6] y) {
        q = QuantizeLinear (x, s, mid)
        d = DequantizeLinear (q, s, mid)
        w = DequantizeLinear <axis = 2> (codes, ws, wz)
        m = MatMul (d, w)
        y = Tanh (m)
    }"""
    codes = np.random.default_rng(0).integers(-90, 90, (3, 8, 6)).astype(np.int8)
    scales = {
        "s": np.float32(0.03),
        "mid": np.uint8(128),
        "ws": np.full(6, 0.01, np.float32),
        "wz": np.zeros(6, np.int8),
    }
    proto = model(text, codes=codes, **scales)
    proto.graph.node[3].name = "product"
    path = tmp_path / "q.onnx"
    onnx.save(proto, path)
    floats = model(
        "agraph (float[2,3,4,8] x) => (float[2,3,4,6] y) { m = MatMul (x, w) y = Tanh (m) }", w=codes * np.float32(0.01)
    )
    for run in (verify.check, verify.compare):
        with pytest.raises(ModelError) as caught:
            run(floats.SerializeToString(), path, normal(2, 3, 4, 8))
        text = str(caught.value)
        assert f"{path} does not run at optimisation level" in text
        assert "'QDQSelectorActionTransformer'" in text
        assert "--exclude 'product'" in text
        assert "disabled_optimizers=['QDQSelectorActionTransformer']" in text
        assert "\n" not in text
