"""Kinds of layers, recipes and models: untrained, each goes back to the file of calibration, or one sentence says why.

What is in no branch is in `test_module`; branches are in `test_settled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

import sbonnx  # noqa: E402
from sbonnx import qat  # noqa: E402
from sbonnx.errors import ModelError, RecipeError  # noqa: E402
from sbonnx.qat.module import origin_of  # noqa: E402
from tests.qat.sent_back import assert_same_file  # noqa: E402
from tests.support.models import model  # noqa: E402

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


IMAGES = [{"x": normal(2, 4, 6, 6)} for _ in range(4)]
ROWS = [{"x": normal(4, 64)} for _ in range(4)]
WORDS = [{"ids": RNG.integers(0, 20, (2, 5))} for _ in range(4)]
STEPS = [{"x": normal(5, 2, 3)} for _ in range(4)]
BYTES = [{"x": RNG.integers(0, 256, (2, 4, 6, 6)).astype(np.uint8)} for _ in range(4)]

DEPTHWISE = """g (float[N,4,6,6] x) => (float[N,4,6,6] y) {
    a = Conv <group = 4, pads = [1,1,1,1]> (x, w, b)
    r = Relu (a)
    y = Conv (r, v, c)
}"""
TRANSPOSED = """g (float[N,4,6,6] x) => (float[N,4,13,13] y) {
    a = Relu (x)
    y = ConvTranspose <strides = [2,2], group = 2> (a, w, b)
}"""
EMBEDDING = "g (int64[N,T] ids) => (float[N,T,4] y) { e = Gather (table, ids)  y = MatMul (e, w) }"
TIED = """g (int64[N,T] ids) => (float[N,T,20] y) {
    e = Gather (table, ids)
    r = Relu (e)
    t = Transpose <perm = [1,0]> (table)
    y = MatMul (r, t)
}"""
PRODUCTS = "g (float[N,64] x) => (float[N,6] y) { a = MatMul (x, w)  r = Relu (a)  y = Gemm <transB = 1> (r, v, c) }"
LSTM = """g (float[T,N,3] x) => (float[T,N,4] y) {
    h = LSTM <hidden_size = 4> (x, w, r, b)
    s = Squeeze (h, one)
    y = MatMul (s, v)
}"""
OUTPUTS = """g (float[N,4,6,6] x) => (float[N,4,6,6] y, float[N,4,6,6] a, int64[4] s) {
    a = Conv <pads = [1,1,1,1]> (x, w)
    r = Relu (a)
    y = Conv (r, v, c)
    s = Shape (y)
}"""
PIXELS = """g (uint8[N,4,6,6] x) => (float[N,4,6,6] y) {
    f = Cast <to = 1> (x)
    n = Mul (f, scale)
    a = Conv <pads = [1,1,1,1]> (n, w)
    y = Relu (a)
}"""
SHARED = "g (float[N,64] x) => (float[N,64] y) { a = MatMul (x, w)  r = Relu (a)  y = MatMul (r, w) }"

SEPARABLE: dict[str, Any] = {"w": (4, 1, 3, 3), "b": 4, "v": (4, 4, 1, 1), "c": 4}
PAIR: dict[str, Any] = {"w": (64, 32), "v": (6, 32), "c": 6}
ONE = np.array([1])

Case = tuple[str, dict[str, Any], list[dict[str, Any]], dict[str, Any], dict[str, str]]
CASES: dict[str, Case] = {
    "embedding": (EMBEDDING, {"table": (20, 8), "w": (8, 4)}, WORDS, {}, {"table": "int8 axis 0"}),
    "embedding of 4 bits": (
        EMBEDDING, {"table": (20, 8), "w": (8, 4)}, WORDS, {"bits": "w4a16"}, {"table": "int4 axis 0", "e": "uint16"},
    ),
    "embedding that is the last layer too": (TIED, {"table": (20, 8)}, WORDS, {}, {"table": "int8 axis 0"}),
    "weight of two layers": (SHARED, {"w": (64, 64)}, ROWS, {}, {"w": "int8 axis 1"}),
    "transposed": (TRANSPOSED, {"w": (4, 2, 3, 3), "b": 4}, IMAGES, {"bits": "w4a8"}, {"w": "int4 axis 1"}),
    "depthwise": (DEPTHWISE, SEPARABLE, IMAGES, {"bits": "w4a8"}, {"w": "int4 axis 0"}),
    "depthwise for onnxruntime": (DEPTHWISE, SEPARABLE, IMAGES, {"backend": "onnxruntime"}, {"w": "int8 axis 0"}),
    "lstm": (LSTM, {"w": (1, 16, 3), "r": (1, 16, 4), "b": (1, 32), "v": (4, 4), "one": ONE}, STEPS, {},
             {"v": "int8 axis 1", "s": "uint8"}),
    "gru": (LSTM.replace("LSTM", "GRU"), {"w": (1, 12, 3), "r": (1, 12, 4), "b": (1, 24), "v": (4, 4), "one": ONE},
            STEPS, {}, {"v": "int8 axis 1"}),
    "activations of 16 bits": (DEPTHWISE, SEPARABLE, IMAGES, {"bits": "w8a16"}, {"x": "uint16", "r": "uint16"}),
    "16 bits for onnxruntime": (
        DEPTHWISE, SEPARABLE, IMAGES, {"bits": "w8a16", "backend": "onnxruntime"}, {"x": "uint16"},
    ),
    "16 bits on both sides": (DEPTHWISE, SEPARABLE, IMAGES, {"bits": "w16a16"}, {"w": "int16 axis 0"}),
    "weights alone": (PRODUCTS, PAIR, ROWS, {"bits": "w4a0"}, {"w": "int4 axis 1"}),
    "weights alone in blocks": (
        PRODUCTS, PAIR, ROWS, {"bits": "w4a0", "block_size": 16}, {"w": "int4 axis 0 blocks of 16"},
    ),
    "blocks": (PRODUCTS, PAIR, ROWS, {"bits": "w4a16", "block_size": 16}, {"v": "int4 axis 1 blocks of 16"}),
    "weights of one scale": (DEPTHWISE, SEPARABLE, IMAGES, {"W.QSCHEME": "per-tensor-affine"}, {"w": "uint8"}),
    "activations by channel": (
        DEPTHWISE, SEPARABLE, IMAGES, {"A.QSCHEME": "per-channel-affine"}, {"x": "uint8 axis 1"},
    ),
    "symmetric activations": (DEPTHWISE, SEPARABLE, IMAGES, {"A.QSCHEME": "per-tensor-symmetric"}, {"x": "int8"}),
    "the rest in float16": (DEPTHWISE, SEPARABLE, IMAGES, {"HIGH_PRECISION": "fp16"}, {"w": "int8 axis 0"}),
    "inputs in float16": (
        DEPTHWISE, SEPARABLE, IMAGES, {"HIGH_PRECISION": "fp16", "KEEP_IO": False}, {"w": "int8 axis 0"},
    ),
    "the rest in bfloat16": (DEPTHWISE, SEPARABLE, IMAGES, {"HIGH_PRECISION": "bf16"}, {"w": "int8 axis 0"}),
    "several outputs": (OUTPUTS, {"w": (4, 4, 3, 3), "v": (4, 4, 1, 1), "c": 4}, IMAGES, {}, {"v": "int8 axis 0"}),
    "integer inputs": (
        PIXELS, {"scale": np.array(1 / 255, np.float32), "w": (4, 4, 3, 3)}, BYTES, {}, {"w": "int8 axis 0"},
    ),
    "batches of a fixed size": (DEPTHWISE.replace("N,4", "2,4"), SEPARABLE, IMAGES, {}, {"w": "int8 axis 0"}),
}  # fmt: skip
"""Text, weights, feeds, wishes, and what some tensors must become: a case that quantizes nothing proves nothing."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_untrained_it_is_the_file_of_calibration(name: str, tmp_path: Path) -> None:
    text, weights, feeds, wishes, wanted = CASES[name]
    proto = model(text, **weights)
    chosen = {"backend": "virtual", "bits": "w8a8", "cpu": "vnni", **wishes}
    module = qat.prepare(proto, feeds, **chosen)
    planned = {site.tensor: site.spec.label() for some in origin_of(module).sites.values() for site in some}
    assert wanted.items() <= planned.items(), planned
    sbonnx.quantize(proto, feeds, output=tmp_path / "calibrated.onnx", verify=False, **chosen)
    report = qat.export(module, tmp_path / "trained.onnx", feeds)
    assert not [one for one in report.problems if "differs from that of the module" in one]
    assert_same_file(tmp_path / "calibrated.onnx", tmp_path / "trained.onnx")


@pytest.mark.parametrize("name", ["embedding", "lstm", "several outputs", "blocks", "transposed"])
def test_every_parameter_learns(name: str) -> None:
    """A gradient for each, and not all of them 0."""
    text, weights, feeds, wishes, _ = CASES[name]
    module = qat.prepare(model(text, **weights), feeds, **{"backend": "virtual", "bits": "w8a8", **wishes}).train()
    made = module(**{key: torch.from_numpy(value) for key, value in feeds[0].items()})
    sum(value.square().sum() for value in made.values() if value.is_floating_point()).backward()
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), parameter_name


LOOP = """g (float[N,4] x, int64 k) => (float[N,4] y) {
    c = Cast <to = 9> (k)
    z = Loop (k, c, x) <body = b (int64 i, bool c1, float[N,4] v) => (bool c2, float[N,4] v2) {
        c2 = Identity (c1)
        u = MatMul (v, w1)
        v2 = Tanh (u)
    }>
    y = MatMul (z, w3)
}"""

DECLINED: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]], dict[str, Any], type[Exception], str]] = {
    "a loop": (
        LOOP, {"w1": (4, 4), "w3": (4, 4)}, [{"x": normal(3, 4), "k": np.array(3)}], {}, ModelError,
        r"op Loop \(opset 17, node 'Loop_0'\) is not supported.*export it with other ops",
    ),
    "weights alone as a mode": (PRODUCTS, PAIR, ROWS, {"mode": "weight_only"}, RecipeError, "leave MODE out"),
    "8-bit floats": (
        PRODUCTS, PAIR, ROWS, {"bits": "fp8"}, RecipeError, "is planned as fp8, which cannot be trained: use integers",
    ),
    "weights that are clipped": (
        DEPTHWISE, SEPARABLE, IMAGES, {"weights": "pact"}, RecipeError, "use lsq or dorefa",
    ),
}  # fmt: skip
"""Text, weights, feeds, wishes, and what is said."""


@pytest.mark.parametrize("name", DECLINED)
def test_what_cannot_be_trained_says_what_to_do(name: str) -> None:
    text, weights, feeds, wishes, kind, words = DECLINED[name]
    with pytest.raises(kind, match=words):
        qat.prepare(model(text, **weights), feeds, **{"backend": "virtual", **wishes})


def half(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float16."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    for held in made.graph.initializer:
        held.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(held).astype(np.float16), held.name))
    for value in [*made.graph.input, *made.graph.output]:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return made


def test_a_model_in_half_precision(tmp_path: Path) -> None:
    proto = half(model(DEPTHWISE, **SEPARABLE))
    feeds = [{"x": feed["x"].astype(np.float16)} for feed in IMAGES]
    wishes: Mapping[str, Any] = {"backend": "virtual", "bits": "w8a8"}
    module = qat.prepare(proto, feeds, **wishes)
    assert module.get_parameter("w").dtype == torch.float16
    sbonnx.quantize(proto, feeds, output=tmp_path / "calibrated.onnx", verify=False, **wishes)
    report = qat.export(module, tmp_path / "trained.onnx", feeds)
    assert not [one for one in report.problems if "differs from that of the module" in one]
    assert_same_file(tmp_path / "calibrated.onnx", tmp_path / "trained.onnx")
