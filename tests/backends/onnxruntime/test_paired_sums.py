"""Sums of two products in 16 bits, on x86 CPUs without 8-bit dot products: their order, and codes that never saturate.

`added_in_pairs` is a model of such kernels. It is compared with those of the machine that runs the tests where that
machine saturates; exact sums are compared elsewhere. What is proved with the model holds on both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import sbonnx
from sbonnx.linear.layer import LinearLayer
from sbonnx.pipeline import prepare
from sbonnx.planning import Plan
from sbonnx.spec import Array
from sbonnx.stages.state import read_recipe
from sbonnx.system.cpu import target_cpu
from tests.support.models import model, run


def added_in_pairs(x: Array, rows: Array) -> Array:
    """Products of uint8 inputs (n, K) and int8 rows (O, K), (n, O): neighbours are added in int16 with saturation."""
    odd = [(0, 0), (0, x.shape[1] % 2)]
    x, rows = (np.pad(each.astype(np.int64), odd) for each in (x, rows))
    products = x[:, None] * rows[None]
    pairs = np.clip(products[..., 0::2] + products[..., 1::2], -(1 << 15), (1 << 15) - 1)
    return np.asarray(pairs.sum(axis=2))


def channels_last(codes: Array, group: int) -> Array:
    """The weight of a convolution (M, C, *kernel) as rows by group, (G, M, K), with the input channel fastest."""
    return np.moveaxis(codes, 1, -1).reshape(group, len(codes) // group, -1)


def ort(node: onnx.NodeProto, x: Array, kind: int, **constants: Any) -> Array:
    """Run the model with the kernels of this machine."""
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return run(helper.make_model(graph, opset_imports=opsets, ir_version=8), {"x": x}, exact=False)["y"]


KERNELS = {
    "stem": ((3, 3, 3), 1, 12),
    "four channels": ((4, 3, 3), 1, 16),
    "pointwise": ((16, 1, 1), 1, 32),
    "odd pointwise": ((7, 1, 1), 1, 5),
    "one axis": ((3, 5), 1, 8),
    "three axes": ((3, 2, 2, 2), 1, 8),
    "groups": ((3, 3, 3), 2, 8),
    "one channel a group, two outputs": ((1, 3, 3), 4, 8),
    "depthwise": ((1, 3, 3), 4, 4),
    "wide depthwise": ((1, 5, 5), 32, 32),
    "depthwise of one axis": ((1, 7), 3, 3),
    "depthwise of three axes": ((1, 2, 2, 2), 16, 16),
    "depthwise pointwise": ((1, 1, 1), 8, 8),
}


@pytest.mark.parametrize("case", KERNELS)
def test_order_of_convolutions(case: str) -> None:
    """Codes of any size: each kernel is exact or saturates in this order, and depthwise ones never saturate."""
    (channels, *kernel), group, outputs = KERNELS[case]
    rng = np.random.default_rng(0)
    w = rng.choice(np.array([-127, 90, 127], np.int8), (outputs, channels, *kernel))
    x = rng.choice(np.array([0, 200, 255], np.uint8), (40, channels * group, *kernel))
    scale = np.float32(w[0].size * 100)
    node = helper.make_node("QLinearConv", ["x", "s", "z", "w", "s", "v", "t", "m"], ["y"], group=group)
    constants = {"s": np.float32(1), "z": np.uint8(0), "w": w, "v": np.int8(0), "t": scale, "m": np.uint8(128)}
    found = ort(node, x, onnx.TensorProto.UINT8, **constants).reshape(len(x), group, -1).astype(int)
    rows = channels_last(w, group)
    inputs = np.moveaxis(x.reshape(len(x), group, channels, *kernel), 2, -1).reshape(len(x), group, -1)
    exact = np.einsum("ngk,gok->ngo", inputs.astype(int), rows.astype(int))
    saturated = np.stack([added_in_pairs(inputs[:, at], rows[at]) for at in range(group)], axis=1)
    wanted = exact if target_cpu().exact or "depthwise" in case else saturated
    np.testing.assert_allclose(found, np.clip(np.rint(wanted / scale) + 128, 0, 255), atol=1)
    if "pointwise" not in case:
        assert (np.abs(exact - saturated) > 4 * scale).any()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("inputs", [8, 9, 700])
@pytest.mark.parametrize("op", ["MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QGemm"])
def test_order_of_products(op: str, inputs: int, rows: int) -> None:
    rng = np.random.default_rng(0)
    w = rng.choice(np.array([-127, 90, 127], np.int8), (inputs, 20))
    x = rng.choice(np.array([0, 200, 255], np.uint8), (rows, inputs))
    x[:, 0] = 255
    wanted = x.astype(int) @ w.astype(int) if target_cpu().exact else added_in_pairs(x, w.T)
    one, zero, none = np.float32(1), np.uint8(0), np.int8(0)
    names = {
        "MatMulInteger": ["x", "w", "z", "v"],
        "MatMulIntegerToFloat": ["x", "w", "s", "s", "z", "v"],
        "DynamicQuantizeMatMul": ["x", "w", "s", "v"],
        "QGemm": ["x", "s", "z", "w", "s", "v"],
    }[op]
    domain = "" if op == "MatMulInteger" else "com.microsoft"
    kind = onnx.TensorProto.INT32 if op == "MatMulInteger" else onnx.TensorProto.FLOAT
    given = x.astype(np.float32) if op == "DynamicQuantizeMatMul" else x
    constants = {name: value for name, value in zip("swzv", (one, w, zero, none), strict=True) if name in names}
    found = ort(helper.make_node(op, names, ["y"], domain=domain), given, kind, **constants)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-2)


TAIL = """
    r = Relu (c)
    t = Conv (r, tail)
    p = ReduceMean <axes = [2, 3], keepdims = 0> (t)
    y = Neg (p)
}"""

LAYERS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "stem": ("Conv <pads = [1,1,1,1]> (x, w)", (16, 3, 3, 3), (1, 3, 24, 24)),
    "large stem": ("Conv <pads = [1,1,1,1]> (x, w)", (16, 5, 3, 3), (1, 5, 28, 28)),
    "folded stem": ("Conv <pads = [3,3,3,3], strides = [2,2]> (x, w)", (16, 3, 7, 7), (1, 3, 48, 48)),
    "one channel": ("Conv <pads = [1,1,1,1]> (x, w)", (8, 1, 3, 3), (1, 1, 24, 24)),
    "pointwise": ("Conv (x, w)", (16, 9, 1, 1), (1, 9, 12, 12)),
    "groups": ("Conv <group = 2, pads = [1,1,1,1]> (x, w)", (16, 3, 3, 3), (1, 6, 12, 12)),
    "two outputs a channel": ("Conv <group = 6, pads = [1,1,1,1]> (x, w)", (12, 1, 3, 3), (1, 6, 12, 12)),
    "depthwise": ("Conv <group = 24, pads = [1,1,1,1]> (x, w)", (24, 1, 3, 3), (1, 24, 12, 12)),
}

PRODUCTS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "matmul": ("MatMul (x, w)", (130, 128), (4, 130)),
    "odd matmul": ("MatMul (x, w)", (131, 129), (4, 131)),
    "batches": ("MatMul (x, w)", (2, 131, 8), (2, 4, 131)),
    "gemm": ("Gemm (x, w, b)", (131, 128), (4, 131)),
    "gemm, transB": ("Gemm <transB = 1> (x, w, b)", (128, 131), (4, 131)),
}


def weights(shape: tuple[int, ...]) -> Array:
    """Heavy-tailed; some rows of one sign with the largest ones side by side in any order of the inputs."""
    rng = np.random.default_rng(1)
    w = rng.laplace(size=shape).astype(np.float32)
    some = w[: shape[0] // 3]
    some[:] = np.abs(some)
    some[:, :2] = 6.0
    return w


def layer(case: str) -> tuple[onnx.ModelProto, list[dict[str, Array]]]:
    """A layer, followed by others so that it runs in integers, and feeds."""
    op, shape, reads = {**LAYERS, **PRODUCTS}[case]
    size = ",".join(map(str, reads[1:]))
    constants: dict[str, Any] = {"w": weights(shape)}
    if case in LAYERS:
        constants["tail"] = weights((10, shape[0], 1, 1))
        text = f"agraph (float[N,{size}] x) => (float[N,10] y) {{ c = {op} {TAIL}"
    else:
        if "Gemm" in op:
            constants["b"] = 128
        text = f"agraph (float[N,{size}] x) => (float[N,M] y) {{ c = {op} y = Neg (c) }}"
    rng = np.random.default_rng(2)
    return model(text, **constants), [{"x": rng.standard_normal(reads).astype(np.float32)} for _ in range(6)]


def quantized(case: str, **keywords: Any) -> onnx.ModelProto:
    """The file for a CPU that saturates."""
    proto, feeds = layer(case)
    settings = {"backend": "onnxruntime", "cpu": "avx2", "verify": False, **keywords}
    if settings.get("mode") != "dynamic":
        settings["kernel_costs"] = "none"
    found = sbonnx.quantize(proto, feeds, **settings).quantized
    assert found is not None
    return found


def stored(proto: onnx.ModelProto) -> list[tuple[LinearLayer, Array]]:
    """The layers of a file that read int8 constants, and those codes, which onnxruntime may compute from floats."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in values:
            x, scale, zero = (values[name] for name in node.input)
            alike = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"], axis=node.attribute[0].i)
            values[node.output[0]] = ort(alike, x, onnx.TensorProto.INT8, s=scale, z=zero)
    behind = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    found = []
    for node in proto.graph.node:
        for name in node.input:
            codes = values.get(behind.get(name, name))
            op = {"QLinearConv": "Conv", "QGemm": "Gemm"}.get(
                node.op_type, "MatMul" if "MatMul" in node.op_type else node.op_type
            )
            if op in ("Conv", "MatMul", "Gemm") and codes is not None and codes.dtype == np.int8 and codes.ndim > 1:
                attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
                one = LinearLayer.of_shape(op, attributes, codes.shape)
                assert isinstance(one, LinearLayer)
                found.append((one, codes))
    return found


def rows_of(one: LinearLayer, codes: Array) -> Array:
    """Codes as rows in the order of the kernel, (G * O, K)."""
    if one.op == "Conv":
        rows = channels_last(codes, one.group)
        return rows.reshape(-1, rows.shape[-1])
    return np.moveaxis(codes, one.in_axis, -1).reshape(-1, codes.shape[one.in_axis])


def assert_exact(proto: onnx.ModelProto, count: int) -> int:
    """Every sum of a layer is exact for the worst inputs; return the largest code."""
    layers = stored(proto)
    assert len(layers) == count
    most = 0
    for one, codes in layers:
        most = max(most, int(np.abs(codes.astype(int)).max()))
        if one.depthwise:
            continue
        rows = rows_of(one, codes)
        for sign in (1, -1):
            worst = np.where(sign * rows > 0, 255, 0).astype(np.uint8)
            exact = np.einsum("nk,ok->no", worst.astype(int), rows.astype(int))
            np.testing.assert_array_equal(added_in_pairs(worst, rows), exact)
    return most


SETTINGS: dict[str, dict[str, Any]] = {
    "fast": {"effort": "fast"},
    "default": {},
    "best": {"effort": "best"},
    "nearest, one scale": {"rounding": "nearest", "w_qscheme": "per-tensor-symmetric"},
    "mse": {"effort": "fast", "w_observer": "mse"},
    "adaround": {"rounding": "adaround"},
    "adaquant": {"rounding": "adaquant"},
    "integer operators": {"effort": "fast", "format": "qoperator"},
    "float constants": {"effort": "fast", "weights": "qdq"},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        *((case, settings) for case in (*LAYERS, *PRODUCTS) for settings in ("fast", "default")),
        *((case, settings) for case in ("stem", "groups", "gemm") for settings in [*SETTINGS][2:]),
    ],
)
def test_no_sum_saturates(case: str, settings: str) -> None:
    """Whatever rounds the weights, after every rewrite of the file; and with more than 7 bits."""
    most = assert_exact(quantized(case, **SETTINGS[settings]), 1 if case in PRODUCTS else 2)
    assert most > 64


@pytest.mark.parametrize("case", ["matmul", "odd matmul", "gemm", "gemm, transB"])
def test_dynamic(case: str) -> None:
    assert assert_exact(quantized(case, mode="dynamic"), 1) > 64


@pytest.mark.sampled
@pytest.mark.parametrize("level", ["off", "all"])
@pytest.mark.parametrize("case", [*LAYERS, *PRODUCTS])
def test_extreme_inputs(case: str, level: str) -> None:
    """The integer kernels of this machine, at inputs at either end of their range, as float kernels compute it."""
    proto = quantized(case, effort="fast")
    shape = {**LAYERS, **PRODUCTS}[case][2]
    x = np.where(np.random.default_rng(3).random(shape) < 0.8, np.float32(1e3), np.float32(-1e3))
    wanted = run(_in_floats(proto), {"x": x})["y"]
    found = run(proto, {"x": x}, level=level, exact=False)["y"]
    np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())


def _in_floats(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The file whose weights are float constants: nothing runs in integers."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    for node in list(made.graph.node):
        if node.op_type == "DequantizeLinear" and node.input[0] in values:
            axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
            codes, scale = values[node.input[0]], values[node.input[1]]
            wide = scale if scale.ndim == 0 else scale.reshape([-1 if at == axis else 1 for at in range(codes.ndim)])
            floats = (codes.astype(np.float32) * wide).astype(np.float32)
            made.graph.node.remove(node)
            made.graph.initializer.append(numpy_helper.from_array(floats, node.output[0]))
    return made


def plan_of(case: str, *, cpu: str = "avx2", **keywords: Any) -> Plan:
    recipe, rules = read_recipe(None, "onnxruntime", {"kernel_costs": "none", "cpu": cpu, **keywords})
    return prepare(layer(case)[0], recipe, rules).plan


@pytest.mark.parametrize(
    ("case", "label"),
    [
        ("stem", "int8 pair-safe axis 0"),
        ("groups", "int8 pair-safe axis 0"),
        ("two outputs a channel", "int8 pair-safe axis 0"),
        ("odd matmul", "int8 pair-safe axis 1"),
        ("gemm, transB", "int8 pair-safe axis 0"),
        ("depthwise", "int8 axis 0"),
        ("folded stem", "int7 axis 0"),
    ],
)
def test_types(case: str, label: str) -> None:
    """8 bits with limits where the order of the inputs is known, without limits where nothing saturates."""
    assert plan_of(case).of_role("weight")[0].spec.label() == label
    assert plan_of(case, cpu="vnni").of_role("weight")[0].spec.label().startswith("int8 axis")
    assert plan_of(case, reduce_range=True).of_role("weight")[0].spec.label().startswith("int7 axis")
    assert plan_of(case, reduce_range=False).of_role("weight")[0].spec.label().startswith("int8 axis")


def test_ranges_and_schemes_of_the_user_keep_7_bits() -> None:
    """A fixed range says nothing about pairs, and affine codes have another middle."""
    for keywords in ({"w_qscheme": "per-channel-affine"}, {"ranges": {"w": [-6.0, 6.0]}}):
        spec = plan_of("stem", **keywords).of_role("weight")[0].spec
        assert (spec.bits, spec.pairs) == (7, ())


@pytest.mark.parametrize("method", ["uniform", "lsq", "lsq+", "dorefa"])
def test_trained_weights(method: str, tmp_path: Path) -> None:
    """Weights that have left their range in training: the file is what the module computes, and is exact."""
    torch = pytest.importorskip("torch")
    from sbonnx import qat

    proto, feeds = layer("stem")
    settings: dict[str, Any] = {"backend": "onnxruntime", "cpu": "avx2", "kernel_costs": "none", "rounding": "nearest"}
    module = qat.prepare(proto, feeds, weights=method, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    wanted = module.eval()(torch.from_numpy(feeds[0]["x"]))["y"].detach().numpy()
    qat.export(module, tmp_path / "trained.onnx", verify=False)
    file = onnx.load(tmp_path / "trained.onnx")
    assert assert_exact(file, 2) > 64
    np.testing.assert_allclose(
        run(file, feeds[0], exact=False)["y"], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max()
    )
