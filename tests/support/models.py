"""Small models for tests, written as ONNX text; weights by shape, seeded."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from sbonnx.spec import Array


def model(text: str, *, opset: int = 17, seed: int = 0, **weights: Any) -> onnx.ModelProto:
    """A model from the text of its graph.

    Args:
        text: ``agraph (float[N,3,8,8] x) => (float[N,4,8,8] y) { ... }``.
        weights: by name: an array, or a shape (tuple or int) to be filled with seeded normal numbers.
    """
    rng = np.random.default_rng(seed)
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')
    for name, value in weights.items():
        if isinstance(value, (int, tuple)):
            value = rng.standard_normal(value).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    onnx.checker.check_model(proto)
    return proto


def batchnorm(prefix: str, channels: int, seed: int = 1) -> dict[str, Array]:
    """Weights ``<prefix>_gamma, _beta, _mean, _var`` of a batch norm that does something."""
    rng = np.random.default_rng(seed)
    return {
        f"{prefix}_gamma": rng.uniform(0.5, 1.5, channels).astype(np.float32),
        f"{prefix}_beta": rng.standard_normal(channels).astype(np.float32),
        f"{prefix}_mean": rng.standard_normal(channels).astype(np.float32),
        f"{prefix}_var": rng.uniform(0.5, 2.0, channels).astype(np.float32),
    }


def run(
    proto: onnx.ModelProto | str, feeds: dict[str, Array], *, level: str = "off", exact: bool = True
) -> dict[str, Array]:
    """Outputs of a model (or file) in onnxruntime, by name. 8-bit products are exact on every CPU if `exact`."""
    import onnxruntime as ort

    from sbonnx.system.cpu import target_cpu
    from sbonnx.system.runtime import EXACT_PRODUCTS

    options = ort.SessionOptions()
    if exact and not target_cpu().exact:
        options.add_session_config_entry(*EXACT_PRODUCTS)
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # how a product is cut among threads changes the order of its sums
    options.graph_optimization_level = {
        "off": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    }[level]
    if exact and not target_cpu().exact and level == "off":  # where onnxruntime ignores the option
        proto = with_unsigned_weights(onnx.load(proto) if isinstance(proto, str) else proto)
    source = proto if isinstance(proto, str) else proto.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


WEIGHTS_OF_INTEGER_OPS = {
    "QLinearConv": (3, 5),
    "QLinearMatMul": (3, 5),
    "QGemm": (3, 5),
    "MatMulInteger": (1, 3),
    "ConvInteger": (1, 3),
}
"""Positions of the weight and of its zero point."""


def with_unsigned_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose integer operators have uint8 weights: the same products, by kernels that are exact on every CPU."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        at, zero = WEIGHTS_OF_INTEGER_OPS.get(node.op_type, (0, 0))
        weight = stored.get(node.input[at]) if at else None
        moved = stored.get(node.input[2]) if at and len(node.input) > 2 else None  # zero point of the activation
        signed = moved is not None and moved.data_type == onnx.TensorProto.INT8
        if weight is None or weight.data_type != onnx.TensorProto.INT8 or signed:
            continue  # products of int8 and int8 are exact
        given = stored[node.input[zero]] if len(node.input) > zero and node.input[zero] else None
        zeros = np.zeros((), np.int8) if given is None else onnx.numpy_helper.to_array(given)
        node.input.extend([""] * (zero + 1 - len(node.input)))
        for place, value in ((at, onnx.numpy_helper.to_array(weight)), (zero, zeros)):
            name = f"{node.output[0]}_unsigned_{place}"
            proto.graph.initializer.append(onnx.numpy_helper.from_array((value ^ np.int8(-128)).view(np.uint8), name))
            node.input[place] = name
    return proto


RESIDUAL = """
agraph (float[N,3,8,8] x) => (float[N,10] y) {
    s = Conv <pads = [1,1,1,1]> (x, ws, bs)
    r = Relu (s)
    c1 = Conv <pads = [1,1,1,1]> (r, w1, b1)
    r1 = Relu (c1)
    c2 = Conv <pads = [1,1,1,1]> (r1, w2, b2)
    a = Add (c2, r)
    r2 = Relu (a)
    g = GlobalAveragePool (r2)
    f = Flatten (g)
    y = Gemm <transB = 1> (f, wf, bf)
}"""


def residual(channels: int = 8, **more: Any) -> onnx.ModelProto:
    """A conv stem, one residual block, global pool and classifier; every node named."""
    c, inner = channels, (channels, channels, 3, 3)
    shapes: dict[str, Any] = {"ws": (c, 3, 3, 3), "bs": c, "w1": inner, "b1": c, "w2": inner, "b2": c}
    proto = model(RESIDUAL, **shapes, wf=(10, c), bf=10, **more)
    names = ("stem", "stem_relu", "conv1", "relu1", "conv2", "add", "relu2", "gap", "flat", "fc")
    for node, name in zip(proto.graph.node, names, strict=True):
        node.name = name
    return proto
