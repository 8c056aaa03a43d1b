"""Every function against onnxruntime's own kernel, on random inputs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, parser

from sbonnx import graph as graphs
from sbonnx.errors import ModelError
from sbonnx.torchnet import FUNCTIONS, TorchNet
from tests.torchnet.more_cases import ELSEWHERE, MORE

torch = pytest.importorskip("torch")

X = "float[2,4,6,5] x"
CASES: dict[str, list[Any]] = {
    # products and pools
    "Conv": [
        ("float[2,4,7,6] x, float[6,2,3,3] w, float[6] b", "Conv <group=2, strides=[2,1], pads=[1,0,2,1]> (x, w, b)"),
        ("float[2,4,9] x, float[4,1,3] w", "Conv <group=4, auto_pad='SAME_UPPER', strides=[2]> (x, w)"),
        ("float[1,2,5,4,3] x, float[3,2,2,3,1] w", "Conv <auto_pad='SAME_LOWER'> (x, w)"),
        ("float[1,2,5,4] x, float[3,2,2,3] w", "Conv <auto_pad='VALID'> (x, w)"),
        ("float[1,2,7,6] x, float[3,2,2,3] w", "Conv <dilations=[2,1], pads=[1,1,1,1]> (x, w)"),
    ],
    "ConvTranspose": [
        (
            "float[2,4,5,4] x, float[4,3,3,2] w, float[6] b",
            "ConvTranspose <group=2, strides=[2,3], pads=[1,0,0,1]> (x, w, b)",
        ),
        (
            "float[1,2,5,4] x, float[2,3,3,3] w",
            "ConvTranspose <strides=[2,2], output_padding=[1,1], dilations=[1,2]> (x, w)",
        ),
        ("float[1,2,5,4] x, float[2,3,3,3] w", "ConvTranspose <strides=[2,2], output_shape=[10,8]> (x, w)"),
        ("float[1,2,5] x, float[2,3,4] w", "ConvTranspose <strides=[2], auto_pad='SAME_UPPER'> (x, w)"),
        ("float[1,2,5] x, float[2,3,4] w", "ConvTranspose <strides=[2], auto_pad='SAME_LOWER'> (x, w)"),
    ],
    "Gemm": [
        ("float[4,3] x, float[5,3] w, float[5] b", "Gemm <transB=1, alpha=0.5, beta=2.0> (x, w, b)"),
        ("float[3,4] x, float[3,5] w", "Gemm <transA=1> (x, w)"),
    ],
    "MatMul": [("float[2,3,4] x, float[4,5] w", "MatMul (x, w)")],
    "MaxPool": [
        ("float[1,2,8,7] x", "MaxPool <kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,1]> (x)"),
        ("float[1,2,8,7] x", "MaxPool <kernel_shape=[3,3], strides=[2,2], ceil_mode=1> (x)"),
        ("float[1,2,8,7] x", "MaxPool <kernel_shape=[3,3], dilations=[2,1]> (x)"),
        ("float[1,2,8,7] x", "MaxPool <kernel_shape=[3,3], strides=[2,1], auto_pad='SAME_UPPER'> (x)"),
    ],
    "AveragePool": [
        ("float[1,2,8,7] x", "AveragePool <kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,1]> (x)"),
        ("float[1,2,8,7] x", "AveragePool <kernel_shape=[3,2], pads=[1,0,1,1], count_include_pad=1> (x)"),
        ("float[1,2,8,8] x", "AveragePool <kernel_shape=[3,3], strides=[2,2], ceil_mode=1> (x)"),
    ],
    "GlobalAveragePool": [(X, "GlobalAveragePool (x)")],
    "GlobalMaxPool": [(X, "GlobalMaxPool (x)")],
    # two tensors, element by element
    **{op: [(f"{X}, float[4,1,5] w", f"{op} (x, w)")] for op in ("Add", "Sub", "Mul", "Div", "PRelu")},
    **{op: [(f"{X}, float[4,1,5] w, float[5] b", f"{op} (x, w, b)")] for op in ("Max", "Min", "Sum", "Mean")},
    "Mod": [(f"{X}, float[4,1,5] w", "Mod <fmod=1> (x, w)")],
    "Pow": [("float[3,4] p, float[1] w", "Pow (p, w)"), ("float[3,4] x", "Pow (x, c)", [2.0])],
    **{
        op: [(f"{X}, float[4,1,5] w", f"{op} (x, w)")]
        for op in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    },
    # one tensor, element by element
    **{
        op: [(X, f"{op} (x)")]
        for op in (
            *("Relu", "LeakyRelu", "Elu", "Celu", "Selu", "ThresholdedRelu", "Sigmoid", "HardSigmoid", "HardSwish"),
            *("Tanh", "Erf", "Mish", "Softplus", "Softsign", "Exp", "Neg", "Abs", "Sign", "Floor", "Ceil", "Round"),
            *("Sin", "Cos", "Identity", "Dropout", "Reciprocal"),
        )
    },
    **{op: [("float[3,4] p", f"{op} (p)")] for op in ("Log", "Sqrt")},
    "Gelu": [(X, "Gelu (x)"), (X, "Gelu <approximate='tanh'> (x)")],
    "Clip": [(X, "Clip (x, c, d)", [-0.5], [0.75]), (X, "Clip (x, , c)", [0.5])],
    "And": [("bool[3,4] t, bool[3,4] u", "And (t, u)")],
    "Or": [("bool[3,4] t, bool[3,4] u", "Or (t, u)")],
    "Not": [("bool[3,4] t", "Not (t)")],
    "Where": [("bool[3,4] t, float[3,4] x, float[4] w", "Where (t, x, w)")],
    "Cast": [(X, "Cast <to=7> (x)"), ("bool[3,4] t", "Cast <to=1> (t)")],
    "CastLike": [(f"{X}, int64[1] i", "CastLike (x, i)")],
    # sums over axes and norms
    **{
        op: [(X, f"{op} <axes=[1,-1]> (x)"), (X, f"{op} <axes=[2], keepdims=0> (x)"), (X, f"{op} (x)")]
        for op in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare")
    },
    "ReduceLogSumExp": [(X, "ReduceLogSumExp <axes=[1]> (x)")],
    "ReduceSum": [(X, "ReduceSum (x, c)", [1, 3]), (X, "ReduceSum <noop_with_empty_axes=1> (x)")],
    "ArgMax": [(X, "ArgMax <axis=1> (x)"), (X, "ArgMax <axis=-1, keepdims=0> (x)")],
    "Softmax": [(X, "Softmax (x)"), (X, "Softmax <axis=1> (x)")],
    "LogSoftmax": [(X, "LogSoftmax <axis=1> (x)")],
    "BatchNormalization": [
        (f"{X}, float[4] s, float[4] b, float[4] m, float[4] p", "BatchNormalization <epsilon=0.01> (x, s, b, m, p)")
    ],
    "LayerNormalization": [(f"{X}, float[6,5] s, float[6,5] b", "LayerNormalization <axis=-2> (x, s, b)")],
    "InstanceNormalization": [(f"{X}, float[4] s, float[4] b", "InstanceNormalization (x, s, b)")],
    "LpNormalization": [(X, "LpNormalization <axis=1, p=2> (x)"), (X, "LpNormalization <axis=1, p=1> (x)")],
    # movement and shapes
    "Reshape": [(X, "Reshape (x, c)", [0, -1, 5])],
    "Flatten": [(X, "Flatten <axis=2> (x)"), (X, "Flatten <axis=0> (x)")],
    "Transpose": [(X, "Transpose <perm=[0,2,3,1]> (x)"), (X, "Transpose (x)")],
    "Squeeze": [("float[2,1,3,1] x", "Squeeze (x, c)", [1]), ("float[2,1,3,1] x", "Squeeze (x)")],
    "Unsqueeze": [(X, "Unsqueeze (x, c)", [0, -1])],
    "Concat": [(f"{X}, float[2,1,6,5] w", "Concat <axis=1> (x, w)")],
    "Slice": [
        (X, "Slice (x, c, d, e, f)", [0, -3], [2, 99], [1, 3], [1, 2]),
        (X, "Slice (x, c, d, e, f)", [-1], [-99], [2], [-2]),
        (X, "Slice (x, c, d)", [1, 1], [2, 3]),
    ],
    "Gather": [(X, "Gather <axis=1> (x, c)", [[0, -1], [2, 2]])],
    "GatherElements": [("float[3,4] x", "GatherElements <axis=1> (x, c)", [[0, -1], [2, 2]])],
    "Expand": [("float[4,1] x", "Expand (x, c)", [2, 1, 3])],
    "Tile": [("float[4,1] x", "Tile (x, c)", [2, 3])],
    "DepthToSpace": [
        ("float[1,8,2,3] x", "DepthToSpace <blocksize=2> (x)"),
        ("float[1,8,2,3] x", "DepthToSpace <blocksize=2, mode='CRD'> (x)"),
    ],
    "SpaceToDepth": [("float[1,2,4,6] x", "SpaceToDepth <blocksize=2> (x)")],
    "Pad": [
        ("float[3,4] x", "Pad (x, c)", [1, 0, 2, 1]),
        ("float[3,4] x", "Pad <mode='reflect'> (x, c)", [2, 1, 0, 3]),
        ("float[3,4] x", "Pad <mode='edge'> (x, c)", [2, 1, 0, 3]),
        ("float[3,4] x", "Pad (x, c)", [-1, 0, 2, -1]),
    ],
    "Resize": [
        (X, "Resize <mode='nearest'> (x, , c)", [1.0, 1.0, 2.0, 3.0]),
        (
            X,
            "Resize <mode='nearest', nearest_mode='floor', coordinate_transformation_mode='asymmetric'> (x, , c)",
            [1.0, 1.0, 2.0, 1.6],
        ),
        (X, "Resize <mode='linear'> (x, , c)", [1.0, 1.0, 2.0, 0.6]),
        (X, "Resize <mode='linear', coordinate_transformation_mode='align_corners'> (x, , , c)", [2, 4, 9, 8]),
        (X, "Resize <mode='linear', coordinate_transformation_mode='pytorch_half_pixel'> (x, , , c)", [2, 4, 9, 1]),
    ],
    "Shape": [(X, "Shape (x)"), (X, "Shape <start=1, end=-1> (x)")],
    "Size": [(X, "Size (x)")],
    "ConstantOfShape": [
        ("float[1] x", "ConstantOfShape <value = float[1] {0.5}> (c)", [2, 3]),
        ("float[1] x", "ConstantOfShape <value = float[1] {0.5}> (c)", np.zeros(0, np.int64)),  # a scalar
    ],
    "Range": [("float[1] x", "Range (c, d, e)", 1, 9, 3)],
}  # fmt: skip
"""By op: (inputs, call, values of c, d, ...)."""

OTHERS: dict[str, tuple[int, list[Any]]] = {
    "Split": (18, [(X, "y, z = Split <axis=1, num_outputs=2> (x)"), (X, "y, z = Split <axis=1> (x, c)", [1, 3])]),
    "GroupNormalization": (
        21,
        [(f"{X}, float[4] s, float[4] b", "y = GroupNormalization <num_groups=2> (x, s, b)")],
    ),
    "RMSNormalization": (23, [(f"{X}, float[5] s", "y = RMSNormalization (x, s)")]),
    "Swish": (24, [(X, "y = Swish (x)")]),
    "Upsample": (9, [(X, "y = Upsample <mode='linear'> (x, c)", [1.0, 1.0, 2.0, 2.0])]),
    **MORE,
}
"""The same for ops of another opset or with more outputs."""

OLD = [
    (9, "y = Slice <axes=[1,3], starts=[0,-3], ends=[2,99]> (x)"),
    (9, "y = Clip <min=-0.5, max=0.5> (x)"),
    (9, "y = Softmax <axis=1> (x)"),
    (9, "y = Upsample <mode='nearest'> (x, c)"),
    (10, "y = Pad <pads=[0,1,0,2,0,0,1,0], value=0.5> (x)"),
    (11, "y = Squeeze <axes=[0]> (x)"),
    (11, "y, z = Split <axis=1, split=[1,3]> (x)"),
    (11, "y = ReduceSum <axes=[2]> (x)"),
]
"""What were attributes once."""


def model_of(opset: int, inputs: str, call: str, values: tuple[Any, ...]) -> onnx.ModelProto:
    """A model of one node; `values` are the constants c, d, e, f."""
    outputs = ", ".join(f"float {name.strip()}" for name in re.findall(r"(?:^|\) )([\w, ]+) =", call)[-1].split(","))
    graph = parser.parse_graph(f"g ({inputs}) => ({outputs}) {{ {call} }}".replace("'", '"'))
    node = graph.node[0]
    for name, value in zip("cdef", values, strict=False):
        array = np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        if node.op_type in ("Clip", "Pow"):
            array = array.reshape(())
        graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for output in graph.output:
        output.ClearField("type")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model)
    for output, found in zip(graph.output, inferred.graph.output, strict=True):
        output.CopyFrom(found)
    model.graph.CopyFrom(graph)
    return model


def feeds_of(model: onnx.ModelProto) -> dict[str, Any]:
    """Random inputs; those called p are positive."""
    random = np.random.default_rng(3)
    feeds: dict[str, Any] = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        x = np.asarray(random.standard_normal(shape), np.float32)
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = np.asarray(x > 0 if kind == np.bool_ else np.abs(x + 0.1) if value.name == "p" else x, kind)
    return feeds


def assert_same(model: onnx.ModelProto) -> None:
    """torch gives what onnxruntime does."""
    feeds = feeds_of(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in model.graph.output]
    wanted = session.run(names, feeds)
    graph = graphs.load(model, opset=model.opset_import[0].version)
    assert graph.opset == model.opset_import[0].version
    found = TorchNet(graph)({name: torch.from_numpy(x) for name, x in feeds.items()})
    for name, want in zip(names, wanted, strict=True):
        have = found[name].numpy()
        assert (have.shape, have.dtype) == (want.shape, want.dtype), name
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5)


def test_every_function_has_a_case() -> None:
    assert FUNCTIONS.keys() == CASES.keys() | OTHERS.keys() | ELSEWHERE


@pytest.mark.parametrize("op", CASES)
def test_function(op: str) -> None:
    opset = {"Gelu": 20, "HardSwish": 17, "Mish": 18}.get(op, 17)
    for inputs, call, *values in CASES[op]:
        assert_same(model_of(opset, inputs, f"y = {call}", tuple(values)))


@pytest.mark.parametrize("op", OTHERS)
def test_function_of_another_form(op: str) -> None:
    opset, cases = OTHERS[op]
    for inputs, call, *values in cases:
        assert_same(model_of(opset, inputs, call, tuple(values)))


@pytest.mark.parametrize(("opset", "call"), OLD, ids=[f"{call.split('=')[1].split()[0]}-{at}" for at, call in OLD])
def test_attributes_of_older_opsets(opset: int, call: str) -> None:
    inputs = "float[1,4,6,5] x"
    assert_same(model_of(opset, inputs, call, ([1.0, 1.0, 2.0, 2.0],) if "Upsample" in call else ()))


def test_what_a_function_declines_is_said() -> None:
    model = model_of(17, "int32[9] i", "y = Unique <axis=0> (i)", ())
    net = TorchNet(graphs.load(model, opset=17))
    with pytest.raises(ModelError, match=r"cannot evaluate node .* \(Unique\): Unique along an axis is not supported"):
        net({"i": torch.zeros(9, dtype=torch.int32)})


def test_an_op_that_is_not_there_is_named() -> None:
    model = model_of(17, "float[1,5,3,3] x, float[2,5] w", "y = MaxRoiPool <pooled_shape=[2,2]> (x, w)", ())
    with pytest.raises(ModelError, match=r"op MaxRoiPool of node .* is not supported in torch"):
        TorchNet(graphs.load(model, opset=17))


def test_a_failure_names_the_node() -> None:
    model = model_of(17, "float[3,3] x, float[3,3] w", "y = MatMul (x, w)", ())
    net = TorchNet(graphs.load(model, opset=17))
    with pytest.raises(ModelError, match=r"torch fails at node .* \(MatMul\)"):
        net({"x": torch.zeros(3, 3), "w": torch.zeros(4, 3)})


def test_gradients_pass_and_values_are_let_go() -> None:
    model = model_of(17, "float[2,3] x, float[3,4] w", "y = MatMul (x, w)", ())
    net = TorchNet(graphs.load(model, opset=17))
    x, w = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
    net({"x": x, "w": w})["y"].sum().backward()
    assert torch.equal(w.grad, torch.full((3, 4), 2.0))


def test_a_hook_computes_a_node() -> None:
    graph = graphs.load(model_of(17, "float[3] x", "y = Relu (x)", ()), opset=17)
    net = TorchNet(graph, hooks={graph.nodes[0].name: lambda x: x + 1})
    assert net({"x": torch.tensor([-1.0, 0.0, 1.0])})["y"].tolist() == [0.0, 1.0, 2.0]
