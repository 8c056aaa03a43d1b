"""Small valid models of many kinds, as the start of mutations. Each runs in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.models import model, residual


def _plain() -> onnx.ModelProto:
    return model(
        """agraph (float[N,3,8,8] x) => (float[N,2,8,8] y) {
            c = Conv <pads = [1,1,1,1]> (x, w, b)
            n = BatchNormalization (c, gamma, beta, mean, var)
            r = Clip (n, low, high)
            y = Conv (r, v)
        }""",
        w=(4, 3, 3, 3),
        b=4,
        gamma=4,
        beta=4,
        mean=4,
        var=np.ones(4, np.float32),
        low=np.float32(0),
        high=np.float32(6),
        v=(2, 4, 1, 1),
    )


def _attention() -> onnx.ModelProto:
    return model(
        """agraph (float[N,4,8] x) => (float[N,4,8] y) {
            q = MatMul (x, wq)
            k = MatMul (x, wk)
            t = Transpose <perm = [0,2,1]> (k)
            s = MatMul (q, t)
            p = Softmax <axis = -1> (s)
            o = MatMul (p, x)
            a = Add (o, x)
            y = LayerNormalization <axis = -1, epsilon = 0.00001> (a, g, b)
        }""",
        wq=(8, 8),
        wk=(8, 8),
        g=8,
        b=8,
    )


def _shapes() -> onnx.ModelProto:
    return model(
        """agraph (float[N,3,4] x) => (float[N,12] y, float[M,3,4] z) {
            s = Shape (x)
            n = Gather <axis = 0> (s, zero)
            u = Unsqueeze (n, zeros)
            t = Concat <axis = 0> (u, minus)
            f = Reshape (x, t)
            e = Expand (one, t2)
            y = Mul (f, e)
            r = Range (begin, end, step)
            c = Cast <to = 1> (r)
            k = ReduceSum <keepdims = 0> (c)
            p = Pad <mode = "constant"> (x, pads)
            i = Slice (p, starts, ends, axes)
            z = Add (i, k)
        }""",
        zero=np.array(0),
        zeros=np.array([0]),
        minus=np.array([12]),
        one=np.ones((1, 1), np.float32),
        t2=np.array([1, 12]),
        begin=np.array(0),
        end=np.array(6),
        step=np.array(2),
        pads=np.array([0, 0, 1, 0, 0, 1]),
        starts=np.array([1]),
        ends=np.array([5]),
        axes=np.array([2]),
    )


def _branch() -> onnx.ModelProto:
    return model(
        """agraph (bool flag, float[N,4] x) => (float[N,4] y) {
            h = MatMul (x, w)
            y = If (flag) <
                then_branch = first () => (float[N,4] a) { a = Relu (h) },
                else_branch = second () => (float[N,4] b) { m = MatMul (h, w) b = Add (m, one) }
            >
        }""",
        w=(4, 4),
        one=np.ones(4, np.float32),
    )


def _constant_branch() -> onnx.ModelProto:
    return model(
        """agraph (float[N,4] x) => (float[N,4] y) {
            h = MatMul (x, w)
            f = Constant <value = bool {1}> ()
            y = If (f) <
                then_branch = first () => (float[N,4] a) { a = Relu (h) },
                else_branch = second () => (float[N,4] b) { b = Neg (h) }
            >
        }""",
        w=(4, 4),
    )


def _loop() -> onnx.ModelProto:
    return model(
        """agraph (float[N,4] x) => (float[N,4] y) {
            y = Loop (times, go, x) <
                body = step (int64 i, bool c, float[N,4] h) => (bool d, float[N,4] k) {
                    d = Identity (c)
                    m = MatMul (h, w)
                    k = Tanh (m)
                }
            >
        }""",
        times=np.array(2),
        go=np.array(True),
        w=(4, 4),
    )


def _lstm() -> onnx.ModelProto:
    return model(
        """agraph (float[4,N,3] x) => (float[4,1,N,5] y, float[1,N,5] h) {
            y, h = LSTM <hidden_size = 5> (x, w, r, b)
        }""",
        w=(1, 20, 3),
        r=(1, 20, 5),
        b=(1, 40),
    )


def _integers() -> onnx.ModelProto:
    return model(
        """agraph (int64[4] x, float[4] v) => (float[4] y) {
            d = Div (many, few)
            m = Mod (d, few)
            a = Add (x, m)
            c = Cast <to = 1> (a)
            t = Tile (one, four)
            s = Mul (c, t)
            y = Where (mask, s, v)
        }""",
        many=np.array([7, 8, 9, 10]),
        few=np.array([2, 3, 2, 3]),
        one=np.ones(1, np.float32),
        four=np.array([4]),
        mask=np.array([True, False, True, False]),
    )


def _pairs() -> onnx.ModelProto:
    return model(
        """agraph (float[N,3,8,8] x) => (float[N,4,8,8] y) {
            xq = QuantizeLinear (x, sx, zx)
            xd = DequantizeLinear (xq, sx, zx)
            wd = DequantizeLinear <axis = 0> (wq, sw, zw)
            c = Conv (xd, wd)
            cq = QuantizeLinear (c, sc, zx)
            y = DequantizeLinear (cq, sc, zx)
        }""",
        sx=np.float32(0.02),
        zx=np.uint8(128),
        wq=np.arange(-6, 6, dtype=np.int8).reshape(4, 3, 1, 1),
        sw=np.full(4, 0.1, np.float32),
        zw=np.zeros(4, np.int8),
        sc=np.float32(0.05),
    )


def _old() -> onnx.ModelProto:
    """Opset 9, IR 4: axes, pads and limits as attributes; Upsample."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Pad", ["x"], ["p"], name="pad", pads=[0, 0, 1, 1, 0, 0, 1, 1]),
            helper.make_node("Conv", ["p", "w"], ["c"], name="conv"),
            helper.make_node("Clip", ["c"], ["r"], name="clip", min=0.0, max=6.0),
            helper.make_node("Upsample", ["r", "scales"], ["u"], name="up", mode="nearest"),
            helper.make_node("ReduceMean", ["u"], ["m"], name="mean", axes=[2], keepdims=1),
            helper.make_node("Squeeze", ["m"], ["s"], name="squeeze", axes=[2]),
            helper.make_node("Slice", ["s"], ["y"], name="slice", axes=[2], starts=[0], ends=[4]),
        ],
        "old",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4, 4])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)


def _function() -> onnx.ModelProto:
    """A local function that calls another."""
    inner = helper.make_function(
        "local", "Inner", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    outer = helper.make_function(
        "local",
        "Outer",
        ["a", "w"],
        ["c"],
        [helper.make_node("MatMul", ["a", "w"], ["m"]), helper.make_node("Inner", ["m"], ["c"], domain="local")],
        [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
    )
    weight = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Outer", ["x", "w"], ["y"], name="call", domain="local")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[inner, outer], ir_version=8)


def _outside() -> onnx.ModelProto:
    """The weights lie in `w.bin` beside the model."""
    proto = _plain()
    for tensor in proto.graph.initializer[:1]:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(4 * 3 * 9 * 4))):
            tensor.external_data.add(key=key, value=value)
    return proto


EXTERNAL: Final = np.random.default_rng(3).standard_normal(4 * 3 * 9).astype(np.float32).tobytes()
"""Content of `w.bin`."""

SEEDS: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "plain": _plain,
    "residual": residual,
    "attention": _attention,
    "shapes": _shapes,
    "branch": _branch,
    "constant branch": _constant_branch,
    "loop": _loop,
    "lstm": _lstm,
    "integers": _integers,
    "pairs": _pairs,
    "old": _old,
    "function": _function,
    "outside": _outside,
}


@cache
def seed(name: str) -> bytes:
    """The serialized model called `name`."""
    return bytes(SEEDS[name]().SerializeToString())


def files(content: bytes) -> dict[str, bytes]:
    """The files of a case: the model, its external data, and data that fits the model called 'plain'."""
    return {"m.onnx": content, "w.bin": EXTERNAL}


def arrays(proto: onnx.ModelProto, batch: int = 4) -> dict[str, Any]:
    """Inputs that fit `proto`, by name; empty where a size or a type is none that can be fed."""
    found: dict[str, Any] = {}
    held = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name in held:
            continue
        tensor = value.type.tensor_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else batch for dim in tensor.shape.dim]
        if any(not 0 <= size <= 64 for size in sizes) or len(sizes) > 8 or np.prod(sizes, dtype=float) > 1e5:
            return {}
        try:
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        except KeyError:
            return {}
        if dtype.kind not in "fiub":
            return {}
        found[value.name] = (np.random.default_rng(5).standard_normal(sizes) * 2).astype(dtype)
    return found
