"""Functions of onnxruntime's own ops of decoders, against its kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx import graph as graphs
from sbonnx.errors import ModelError
from sbonnx.ops import CONTRIB, RUNTIME_OPS
from sbonnx.torchnet import RUNTIME_FUNCTIONS, TorchNet

torch = pytest.importorskip("torch")

FLOAT = np.float32
RANDOM = np.random.default_rng(11)


def normal(*shape: int, scale: float = 1.0) -> Any:
    return (scale * RANDOM.standard_normal(shape)).astype(FLOAT)


def codes(*shape: int) -> Any:
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


def model_of(
    op: str, feeds: dict[str, Any], weights: dict[str, Any], order: list[str], outputs: list[str], **attributes: Any
) -> onnx.ModelProto:
    """A model of one node. order: names of its inputs, "" for omitted ones."""
    domain = "" if op in RUNTIME_OPS else CONTRIB
    node = helper.make_node(op, order, outputs, name="node", domain=domain, **attributes)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "g",
        [info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for name, x in feeds.items()],
        [info(name, TensorProto.FLOAT, None) for name in outputs if name],
        [numpy_helper.from_array(np.asarray(x), name) for name, x in weights.items()],
    )
    imports = [helper.make_opsetid("", 22), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def assert_same(model: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    """torch computes what onnxruntime does."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in model.graph.output]
    found = TorchNet(graphs.load(model, opset=22))({name: torch.from_numpy(x) for name, x in feeds.items()})
    for name, want in zip(names, session.run(names, feeds), strict=True):
        have = found[name].numpy()
        assert (have.shape, have.dtype) == (want.shape, want.dtype), name
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5 * np.abs(want).max(), err_msg=name)


def nbits(bits: int, block: int, zeros: str = "", bias: bool = False, inner: int = 96) -> Any:
    """A MatMulNBits with random values: (model, feeds)."""
    rows, blocks = 24, -(-inner // block)
    weights = {"b": codes(rows, blocks, block * bits // 8), "s": np.abs(normal(rows, blocks)) * 0.1}
    if zeros == "packed":
        weights["z"] = codes(rows, -(-blocks * bits // 8))
    if zeros == "float":
        weights["z"] = normal(rows, blocks) + FLOAT(1 << (bits - 1))
    if bias:
        weights["bias"] = normal(rows)
    order = ["x", "b", "s", "z" if zeros else "", "", "bias" if bias else ""]
    while not order[-1]:
        order.pop()
    feeds = {"x": normal(2, 5, inner)}
    return model_of("MatMulNBits", feeds, weights, order, ["y"], K=inner, N=rows, bits=bits, block_size=block), feeds


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    "form", [{}, {"zeros": "packed"}, {"zeros": "packed", "bias": True, "inner": 80}], ids=["plain", "zeros", "uneven"]
)
def test_products_with_packed_weights(bits: int, form: dict[str, Any]) -> None:
    assert_same(*nbits(bits, 32, **form))


def test_float_zero_points() -> None:
    assert_same(*nbits(4, 32, zeros="float"))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_gathers_from_packed_tables(bits: int, zeros: bool) -> None:
    rows, inner, block = 20, 96, 32
    weights = {"d": codes(rows, inner * bits // 8), "s": normal(rows, inner // block)}
    if zeros:
        weights["z"] = codes(rows, -(-(inner // block) * bits // 8))
    feeds = {"i": RANDOM.integers(-rows, rows, (2, 7))}
    order = ["d", "i", "s", *(["z"] if zeros else [])]
    attributes = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    assert_same(model_of("GatherBlockQuantized", feeds, weights, order, ["y"], **attributes), feeds)


def test_a_gather_from_4_bit_elements() -> None:
    rows, inner, block = 20, 96, 32
    values = RANDOM.integers(-8, 8, (rows, inner)).astype(np.int8)
    feeds = {"i": RANDOM.integers(0, rows, (3,))}
    model = model_of(
        "GatherBlockQuantized", feeds, {"s": normal(rows, inner // block)}, ["d", "i", "s"], ["y"], block_size=block
    )
    model.graph.initializer.append(helper.make_tensor("d", TensorProto.INT4, (rows, inner), values.reshape(-1)))
    assert_same(model, feeds)


HEADS, KV_HEADS, SIZE = 4, 2, 32


def gqa(
    length: int = 6, past: int = 0, batch: int = 2, packed: bool = True, rotary: int = 32, **attributes: Any
) -> Any:
    """A GroupQueryAttention on random tokens: (model, feeds)."""
    extra = attributes.pop("extra", {})
    inner, outer = HEADS * SIZE, KV_HEADS * SIZE
    feeds = {"q": normal(batch, length, inner + 2 * outer if packed else inner)}
    if not packed:
        feeds |= {"k": normal(batch, length, outer), "v": normal(batch, length, outer)}
    feeds |= {name: normal(batch, KV_HEADS, past, SIZE) for name in ("pk", "pv")}
    feeds |= {"lengths": np.full(batch, past + length - 1, np.int32), "total": np.array(past + length, np.int32)}
    angles = np.outer(np.arange(64), 1.0 / 100 ** (np.arange(rotary // 2) / (rotary // 2)))
    weights = {"cos": np.cos(angles).astype(FLOAT), "sin": np.sin(angles).astype(FLOAT), **extra}
    order = ["q", *(["", ""] if packed else ["k", "v"]), "pk", "pv", "lengths", "total", "cos", "sin"]
    if not attributes.get("do_rotary", 1):
        order[-2:] = ["", ""]
    places = ("positions", "bias", "sink")
    order += [name if name in extra else "" for name in places[: 1 + max(map(places.index, extra), default=-1)]]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1} | attributes
    return model_of("GroupQueryAttention", feeds, weights, order, ["y", "present_k", "present_v"], **attributes), feeds


GQA: list[dict[str, Any]] = [
    {},
    {"packed": False},
    {"length": 1, "past": 7},
    {"length": 3, "past": 5, "batch": 1},
    {"do_rotary": 0, "scale": 0.4},
    {"rotary_interleaved": 1},
    {"rotary": 16},
    {"softcap": 2.0},
    {"length": 12, "local_window_size": 4},
    {"length": 1, "past": 9, "local_window_size": 4},
    {"smooth_softmax": 1},
    {"extra": {"sink": normal(HEADS)}},
    {"extra": {"bias": normal(1, 1, 6, 6)}},
    {"batch": 1, "extra": {"positions": np.array([[4, 5, 6, 7, 8, 9]])}},  # of several rows it reads the first only
]


@pytest.mark.parametrize("form", GQA, ids=[", ".join(form) or "packed" for form in GQA])
def test_grouped_query_attention(form: dict[str, Any]) -> None:
    assert_same(*gqa(**form))


def test_padding_after_a_prompt_changes_no_other_token() -> None:
    model, feeds = gqa()
    feeds["lengths"] = np.array([5, 3], np.int32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    want = session.run(["y"], feeds)[0]
    found = TorchNet(graphs.load(model, opset=22))({name: torch.from_numpy(x) for name, x in feeds.items()})["y"]
    for row, length in enumerate((6, 4)):
        np.testing.assert_allclose(found[row, :length], want[row, :length], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", ["rows", "heads", "offset", "part"])
def test_rotary_embeddings(form: str) -> None:
    size = 8 if form == "part" else SIZE
    angles = np.outer(np.arange(32), 1.0 / 100 ** (np.arange(size // 2) / (size // 2)))
    weights = {"cos": np.cos(angles).astype(FLOAT), "sin": np.sin(angles).astype(FLOAT)}
    x = normal(2, HEADS, 5, SIZE) if form == "heads" else normal(2, 5, HEADS * SIZE)
    positions = np.array([3]) if form == "offset" else RANDOM.integers(0, 32, (2, 5))
    feeds = {"x": x, "p": positions}
    attributes = {"num_heads": HEADS, "rotary_embedding_dim": size} if form == "part" else {}
    assert_same(model_of("RotaryEmbedding", feeds, weights, ["x", "p", "cos", "sin"], ["y"], **attributes), feeds)


@pytest.mark.parametrize("made", [lambda: nbits(4, 32, "packed", bias=True), gqa], ids=["MatMulNBits", "GroupQuery"])
def test_gradients_of_inputs(made: Any) -> None:
    """Against differences, in double precision; weights stay packed between the passes."""
    model, feeds = made()
    net = TorchNet(graphs.load(model, opset=22))
    net._constants = {name: x.double() if x.is_floating_point() else x for name, x in net._constants.items()}
    given = {name: torch.from_numpy(x) for name, x in feeds.items()}
    floats = {name: x.double().requires_grad_() for name, x in given.items() if x.is_floating_point() and x.numel()}
    rest = {name: x.double() if x.is_floating_point() else x for name, x in given.items() if name not in floats}

    def outputs(*values: Any) -> Any:
        return net({**rest, **dict(zip(floats, values, strict=True))})["y"]

    assert torch.autograd.gradcheck(outputs, tuple(floats.values()), fast_mode=True, eps=1e-6, atol=1e-4)


def test_norms() -> None:
    feeds = {"x": normal(2, 5, 24), "skip": normal(2, 5, 24)}
    weights = {"g": normal(24), "bias": normal(24), "beta": normal(24)}
    plain = model_of("SimplifiedLayerNormalization", feeds, weights, ["x", "g"], ["y", "root"], epsilon=1e-3)
    del plain.graph.input[1], plain.graph.initializer[1:]
    assert_same(plain, {"x": feeds["x"]})
    for order in (["x", "skip", "g"], ["x", "skip", "g", "bias"]):
        outputs = ["y", "mean", "root", "sum"]
        assert_same(model_of("SkipSimplifiedLayerNormalization", feeds, weights, order, outputs, epsilon=1e-3), feeds)
    for order in (["x", "skip", "g", "beta"], ["x", "skip", "g", "beta", "bias"]):
        outputs = ["y", "mean", "root", "sum"]
        assert_same(model_of("SkipLayerNormalization", feeds, weights, order, outputs, epsilon=1e-3), feeds)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: nbits(2, 32), "weights of 3 bits are not supported, only of 2, 4, 8"),
        (lambda: gqa(do_rotary=0), "qk_output=1 is not supported"),
        (gqa, r"quantized caches are not supported \(k_quant_type=PER_TENSOR\)"),
    ],
    ids=["bits", "attribute", "cache"],
)
def test_what_is_not_supported_is_said(made: Any, message: str) -> None:
    model, feeds = made()
    node = model.graph.node[0]
    if "bits" in message:
        next(each for each in node.attribute if each.name == "bits").i = 3
    else:
        wrong = ("qk_output", 1) if "qk_output" in message else ("k_quant_type", "PER_TENSOR")
        node.attribute.append(helper.make_attribute(*wrong))
    net = TorchNet(graphs.load(model, opset=22))
    with pytest.raises(ModelError, match=f"cannot evaluate node 'node' .*{message}"):
        net({name: torch.from_numpy(x) for name, x in feeds.items()})


def test_every_op_is_tested_here() -> None:
    text = Path(__file__).read_text()
    assert all(f'"{op}"' in text for op in RUNTIME_FUNCTIONS)
