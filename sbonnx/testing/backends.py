"""The contract of backends."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto, numpy_helper

from sbonnx.api.create import quantize
from sbonnx.backends import BACKENDS
from sbonnx.metrics import sqnr_db
from sbonnx.report import Report
from sbonnx.spec import Array
from sbonnx.verify import session

LEAST_SQNR_DB: Final = 20.0
"""SQNR that 8 bits reach on every model of `MODELS`."""

MODELS: Final[dict[str, tuple[str, dict[str, tuple[int, ...]]]]] = {
    "a convolutional network": (
        """g (float[N,3,16,16] x) => (float[N,10] y) {
            a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w0)
            b = Relu(a)
            c = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)
            d = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(c, w1)
            e = Add(c, d)
            f = Relu(e)
            h = GlobalAveragePool(f)
            i = Flatten(h)
            y = Gemm<transB=1>(i, w2)
        }""",
        {"w0": (32, 3, 3, 3), "w1": (32, 32, 3, 3), "w2": (10, 32)},
    ),
    "branches and an upsampling": (
        """g (float[N,16,8,8] x) => (float[N,16,16,16] y) {
            a = Conv<kernel_shape=[1,1]>(x, w0)
            b = Sigmoid(a)
            c = Mul(a, b)
            d = Conv<kernel_shape=[1,1]>(x, w1)
            e = Concat<axis=1>(c, d)
            f = Resize<mode="nearest">(e, , s)
            y = Conv<kernel_shape=[1,1]>(f, w2)
        }""",
        {"w0": (16, 16, 1, 1), "w1": (16, 16, 1, 1), "w2": (16, 32, 1, 1)},
    ),
    "matrix products and a softmax": (
        """g (float[N,8,32] x) => (float[N,8,32] y) {
            q = MatMul(x, w0)
            k = MatMul(x, w1)
            t = Transpose<perm=[0,2,1]>(k)
            p = MatMul(q, t)
            s = Softmax<axis=-1>(p)
            v = MatMul(s, x)
            y = MatMul(v, w2)
        }""",
        {"w0": (32, 32), "w1": (32, 32), "w2": (32, 32)},
    ),
}
"""Graphs as ONNX text, with the shapes of their weights."""


def check_backend(name: str) -> None:
    """Check the backend with this recipe name.

    The clauses, for small networks of all kinds of operators: the result is valid ONNX and runs in onnxruntime; its
    outputs have the names and shapes of the float model, and at least 20 dB; each linear op is quantized or refused
    with a reason; quantizing again gives the same bytes; a recipe can leave every node in float. If the backend has a
    runtime that is installed, reports name it as the one that executed the file, and its sessions have the inputs and
    outputs of the file, compute at least 20 dB of onnxruntime's values, and name their kernels.

    Args:
        name: of an installed or built-in backend.

    Raises:
        AssertionError: a clause is broken.
        KeyError: there is no such backend.
    """
    assert BACKENDS[name].name == name, f"backend '{name}': its name is that of its entry point"
    quantized = 0
    for label, (text, weights) in MODELS.items():
        where = f"backend '{name}' on {label}"
        model, feeds = _model(text, weights)
        report = _quantized(model, feeds, name)
        problems = [problem for problem in report.problems if problem.code != "no-tensor-quantized"]
        assert not problems, f"{where}: {problems}"
        _check_result(where, model, report)
        _check_runtime(where, name, model, feeds[0], report)
        quantized += bool(report.sites)
        again = _quantized(model, feeds, name)
        assert _bytes(report) == _bytes(again), f"{where}: the same inputs give the same bytes"
        untouched = _quantized(model, feeds, name, EXCLUDE=["*"])
        assert untouched.quantized is not None
        pairs = [node for node in untouched.quantized.graph.node if "Quantize" in node.op_type]
        assert not pairs, f"{where}: EXCLUDE leaves every node in float"
    assert quantized, f"backend '{name}': it quantizes nothing in any of the networks"


def _check_result(where: str, model: ModelProto, report: Report) -> None:
    quantized = report.quantized
    assert quantized is not None
    onnx.checker.check_model(quantized, full_check=True)
    for before, after in zip(model.graph.output, quantized.graph.output, strict=True):
        assert before.name == after.name, f"{where}: outputs keep their names"
        assert len(before.type.tensor_type.shape.dim) == len(after.type.tensor_type.shape.dim), (
            f"{where}: and their rank"
        )
    assert report.metrics is not None
    for output in report.metrics.outputs:
        assert output.sqnr_db >= LEAST_SQNR_DB, f"{where}: {output.name} has {output.sqnr_db:.1f} dB"
    quantized_nodes = {site.node for site in report.sites if site.role == "weight"}
    refused = {refusal.where: refusal.why for refusal in report.refusals}
    assert all(why.strip() for why in refused.values()), f"{where}: a refusal has a reason"
    assert quantized_nodes or refused, f"{where}: nothing is quantized, and nothing is refused"


def _check_runtime(where: str, name: str, model: ModelProto, feed: dict[str, Array], report: Report) -> None:
    runtime = BACKENDS[name].runtime
    if runtime is None or runtime.absent() is not None:
        return
    assert report.metrics is not None and report.metrics.runtime == name, f"{where}: its runtime executes the file"
    assert report.quantized is not None
    opened = runtime.open(report.quantized.SerializeToString(), 1)
    for given, declared in ((opened.get_inputs(), model.graph.input), (opened.get_outputs(), model.graph.output)):
        names = [entry.name for entry in given]
        assert names == [value.name for value in declared], f"{where}: {runtime.title} has the names of the file"
    values = opened.run(None, feed)
    wanted = session(model.SerializeToString()).run(None, feed)
    for computed, expected in zip(values, wanted, strict=True):
        assert computed.shape == expected.shape, f"{where}: {runtime.title} computes tensors of the same shapes"
        error = sqnr_db(expected, computed)
        assert error >= LEAST_SQNR_DB, f"{where}: {runtime.title} computes {error:.1f} dB"
    assert opened.layers(), f"{where}: {runtime.title} names its kernels"


def _quantized(model: ModelProto, feeds: list[dict[str, Array]], name: str, **overrides: Any) -> Report:
    return quantize(model, feeds, recipe={"BACKEND": name}, **overrides)


def _bytes(report: Report) -> bytes:
    assert report.quantized is not None
    return bytes(report.quantized.SerializeToString(deterministic=True))


def _model(text: str, weights: dict[str, tuple[int, ...]]) -> tuple[ModelProto, list[dict[str, Array]]]:
    """Return a model with random weights of unit gain, and 8 feeds of 4 samples."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    for name, shape in weights.items():
        fan_in = np.prod(shape[1:]) if len(shape) > 2 else shape[-1]
        values = rng.normal(0, 1 / np.sqrt(fan_in), shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    if any("s" in node.input and node.op_type == "Resize" for node in model.graph.node):
        model.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s"))
    for node in model.graph.node:
        node.name = node.output[0]
    dims = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim][1:]
    return model, [{"x": rng.normal(size=(4, *dims)).astype(np.float32)} for _ in range(8)]
