"""Tiny models that break one rule of TensorRT each, and twins that break none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from sbonnx.spec import Array

F32, F16, I8 = np.float32, np.float16, np.int8
FP8, FP4, INT4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.int4


def filled(shape: tuple[int, ...], dtype: Any = I8) -> Array:
    """Codes from -3 to 3, or as floats."""
    return (np.arange(int(np.prod(shape))) % 7 - 3).reshape(shape).astype(dtype)


NUMBERS: dict[str, Array] = {
    "s": np.array(0.1, F32),
    "s2": np.array(0.2, F32),
    "z": np.array(0, I8),
    "sv": np.full(16, 0.1, F32),
    "zv": np.zeros(16, I8),
    "w": filled((16, 16, 3, 3)),
    "m": filled((16, 16)),
}
"""What every model may read: scales, zero points, the weight of a conv and of a product, 16 channels each."""


@dataclass(frozen=True)
class Case:
    """One model: interface and body as ONNX text, and its constants."""

    body: str
    inputs: str = "float[2,16,8,8] x"
    outputs: str = "float[2,16,8,8] y"
    opset: int = 17
    target: str = "tensorrt@11"
    constants: dict[str, Array] = field(default_factory=dict)

    def but(self, *swaps: tuple[str, str], **constants: Any) -> Case:
        """The case with parts of its body replaced, and with other constants."""
        body = self.body
        for old, new in swaps:
            assert old in body, old
            body = body.replace(old, new)
        return replace(self, body=body, constants={**self.constants, **constants})

    def model(self) -> onnx.ModelProto:
        """The model; node names are those of their first outputs."""
        head = f'<ir_version: 10, opset_import: ["" : {self.opset}, "acme" : 1]>'
        proto = onnx.parser.parse_model(f"{head}\nagraph ({self.inputs}) => ({self.outputs}) {{\n{self.body}\n}}")
        read = {name for node in proto.graph.node for name in node.input}
        for name, values in {**NUMBERS, **self.constants}.items():
            if name in read and name not in {one.name for one in proto.graph.input}:
                proto.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
        for node in proto.graph.node:
            node.name = node.output[0]
        return proto


def pair(source: str, to: str, s: str = "s") -> str:
    """Q/DQ per tensor."""
    return f"{to}_c = QuantizeLinear({source}, {s}, z)\n{to} = DequantizeLinear({to}_c, {s}, z)\n"


WEIGHT = "wd = DequantizeLinear<axis = 0>(w, sv, zv)\n"


def conv(source: str, to: str) -> str:
    """A conv of 16 channels that keeps the size; its weight is `wd`."""
    return f"{to} = Conv<pads = [1,1,1,1]>({source}, wd)\n"


CONV = Case(pair("x", "d") + WEIGHT + conv("d", "y"))
PRODUCT = Case(
    pair("x", "d") + "md = DequantizeLinear<axis = 1>(m, sv, zv)\ny = MatMul(d, md)",
    inputs="float[4,16] x",
    outputs="float[4,16] y",
)
HALF = replace(
    CONV.but(s=np.array(0.1, F16), sv=np.full(16, 0.1, F16)),
    inputs="float16[2,16,8,8] x",
    outputs="float16[2,16,8,8] y",
    opset=19,
)
CAST = replace(CONV.but(("QuantizeLinear(x,", "QuantizeLinear(xf,")), inputs="float16[2,16,8,8] x")
CAST = replace(CAST, body="xf = Cast<to = 1>(x)\n" + CAST.body)
CHAIN = Case(pair("x", "d") + WEIGHT + conv("d", "v") + "r = Relu(v)\n" + pair("r", "e") + conv("e", "y"))
RESIDUAL = Case(
    pair("x", "d") + WEIGHT + conv("d", "v") + "a = Add(v, d)\nr = Relu(a)\n" + pair("r", "e") + conv("e", "y")
)
BLOCKS = Case(
    "md = DequantizeLinear<axis = 0, block_size = 64>(b4, sb)\ny = MatMul(x, md)",
    inputs="float[4,128] x",
    outputs="float[4,32] y",
    opset=21,
    constants={"b4": filled((128, 32), INT4), "sb": np.full((2, 32), 0.1, F32)},
)
FOURS = replace(
    BLOCKS,
    body="sd = DequantizeLinear(sb, s)\nmd = DequantizeLinear<axis = 0, block_size = 16>(b4, sd)\ny = MatMul(x, md)",
    opset=23,
    constants={"b4": filled((128, 32), FP4), "sb": np.full((8, 32), 1.5, FP8)},
)
TWO = replace(
    CONV,
    body=pair("x", "d") + WEIGHT + conv("d", "y") + conv("d", "y2"),
    outputs="float[2,16,8,8] y, float[2,16,8,8] y2",
)
CONCAT = Case(
    pair("x", "d")
    + pair("x2", "d2")
    + "a = Concat<axis = 1>(d, d2)\n"
    + pair("a", "e")
    + "wd = DequantizeLinear<axis = 0>(w32, sv, zv)\n"
    + conv("e", "y"),
    inputs="float[2,16,8,8] x, float[2,16,8,8] x2",
    constants={"w32": filled((16, 32, 3, 3))},
)
POOL = Case(
    pair("x", "d")
    + "p = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(d)\n"
    + pair("p", "e")
    + WEIGHT
    + conv("e", "y")
)
SOFTMAX = replace(PRODUCT, body="p = Softmax(x)\n" + PRODUCT.body.replace("(x,", "(p,"))
SCORES = Case(
    pair("x", "d") + pair("k", "e") + "a = MatMul(d, e)\np = Softmax(a)",
    inputs="float[1,8,64] x, float[1,64,8] k",
    outputs="float[1,8,8] p",
)
SHARED = replace(
    PRODUCT,
    body=pair("x", "d")
    + "md = DequantizeLinear<axis = 0>(m, sv, zv)\nmd2 = DequantizeLinear<axis = 1>(m, sv, zv)\n"
    + "y = Gemm<transB = 1>(d, md)\ny2 = Gemm(d, md2)",
    outputs="float[4,16] y, float[4,16] y2",
)
DYNAMIC = replace(
    PRODUCT,
    body="c, cs, cz = DynamicQuantizeLinear(x)\np = MatMulInteger(c, m, cz)\nf = Cast<to = 1>(p)\ny = Mul(f, cs)",
)
BIASED = CONV.but(("(d, wd)", "(d, wd, b)"), b=np.ones(16, F32), b8=filled((16,)))

FULL = np.ones((16, 16, 3, 3), I8)
SPARSE = CONV.but(w=FULL * (np.arange(16) % 4 < 2)[:, None, None])
"""Two of each four input channels at each tap: 2:4."""

CASES: dict[str, tuple[Case, Case]] = {
    "T01": (DYNAMIC, PRODUCT),
    "T02": (CONV.but(z=np.array(3, I8)), CONV),
    "T03": (CONV.but(z=np.array(0, np.uint8)), CONV),
    "T04": (CONV.but(("(x, s, z)", "(x, s)"), ("(d_c, s, z)", "(d_c, s)")), CONV),
    "T05": (CONV.but(s=np.array(1e-9, F32)), CONV),
    "T06": (replace(CONV, inputs="float[2,16,8,8] x, float s"), CONV),
    "T07": (CONV.but(sv=np.full(8, 0.1, F32), zv=np.zeros(8, I8)), CONV),
    "T08": (
        CONV.but(
            ("QuantizeLinear(x, s, z)", "QuantizeLinear<axis = 1>(x, sv, zv)"),
            ("DequantizeLinear(d_c, s, z)", "DequantizeLinear<axis = 1>(d_c, sv, zv)"),
        ),
        CONV,
    ),
    "T09": (PRODUCT.but(("<axis = 1>", "")), PRODUCT),
    "T10": (CONV.but(("<axis = 0>", "<axis = 1>")), CONV),
    "T11": (BLOCKS.but(("= 64", "= 32"), sb=np.full((4, 32), 0.1, F32)), BLOCKS),
    "T12": (FOURS.but(("= 16", "= 32"), sb=np.full((4, 32), 1.5, FP8)), FOURS),
    "T13": (
        Case(pair("x", "d") + "y = Neg(d)", inputs="float x", outputs="float y"),
        Case(pair("x", "d") + "y = Neg(d)", inputs="float[1] x", outputs="float[1] y"),
    ),
    "T14": (replace(HALF, opset=18), HALF),
    "T14-newest": (replace(CONV, opset=18, target="tensorrt@8.6"), replace(CONV, target="tensorrt@8.6")),
    "T15": (replace(HALF, inputs="float[2,16,8,8] x"), HALF),
    "T16": (CONV.but(("d = DequantizeLinear(d_c,", "k = Relu(d_c)\nd = DequantizeLinear(k,")), CONV),
    "T17": (BIASED.but(("y = Conv", "bd = DequantizeLinear(b8, s, z)\ny = Conv"), ("wd, b)", "wd, bd)")), BIASED),
    "T18": (CONV.but(("(d_c, s, z)", "(d_c, s2, z)")), CONV),
    "T19": (CAST, HALF),
    "P01": (CONV.but(("(d, wd)", "(d, wf)"), wf=filled((16, 16, 3, 3), F32)), CONV),
    "P02": (
        CHAIN.but(("r = Relu(v)\n", pair("v", "u") + "r = Relu(u)\n")),
        CHAIN,
    ),
    "P03": (
        replace(CONV, body=pair("x", "d") + WEIGHT + conv("d", "v") + pair("v", "e") + "y = Exp(e)"),
        replace(CONV, body=pair("x", "d") + WEIGHT + conv("d", "v") + "y = Exp(v)"),
    ),
    "P04": (RESIDUAL.but(("a = Add(v, d)\n", pair("v", "u") + "a = Add(u, d)\n")), RESIDUAL),
    "P05": (TWO.but((conv("d", "y2"), pair("x", "d2") + conv("d2", "y2"))), TWO),
    "P06": (CONCAT.but(("(x2, s,", "(x2, s2,"), ("(d2_c, s,", "(d2_c, s2,")), CONCAT),
    "P07": (POOL.but(("(p, s,", "(p, s2,"), ("(e_c, s,", "(e_c, s2,")), POOL),
    "P08": (
        Case(pair("x", "d") + "y = GlobalAveragePool(d)", outputs="float[2,16,1,1] y"),
        Case(pair("x", "d") + "g = GlobalAveragePool(d)\n" + pair("g", "e") + WEIGHT + conv("e", "y")),
    ),
    "P09": (
        replace(CONV, body=pair("x", "d") + pair("d", "e", "s2") + WEIGHT + conv("e", "y")),
        replace(CONV, body=pair("x", "d") + pair("d", "e") + WEIGHT + conv("e", "y")),
    ),
    "P10": (replace(CONV, body=pair("x", "d") + WEIGHT + conv("d", "v") + "e = Exp(v)\n" + pair("e", "y")), CONV),
    "P11": (SOFTMAX.but(("p = Softmax(x)\n", pair("x", "e") + "p = Softmax(e)\n")), SOFTMAX),
    "P12": (
        replace(PRODUCT, outputs="float[4,8] y").but(m=filled((16, 8)), sv=np.full(8, 0.1, F32), zv=np.zeros(8, I8)),
        PRODUCT,
    ),
    "P13": (CONV.but(("<axis = 0>(w, sv, zv)", "(w, s, z)")), CONV),
    "P14": (
        replace(CONV, body=pair("x", "d") + "y = acme.Thing(d)"),
        replace(CONV, body=CONV.body.replace("y =", "v =") + "y = acme.Thing(v)"),
    ),
    "P15": (CHAIN, CONV),
    "P16": (SHARED.but(("(d, md2)", "(d, md)")), SHARED),
    "P17": (CONV.but(w=FULL * (np.arange(16) < 8)[:, None, None]), SPARSE),
}
"""By rule: a model that breaks it, and one that breaks none."""

WIDE = replace(CONV, inputs="float[2,32,8,8] x", outputs="float[2,32,8,8] y").but(
    w=filled((32, 32, 3, 3)), sv=np.full(32, 0.1, F32), zv=np.zeros(32, I8)
)

ASIDE: dict[str, tuple[Case, Case]] = {
    "T02-dla": (CONV.but(z=np.array(3, np.uint8)), CONV),
    "P12-full": (CONV, WIDE),
    "P17-kernels": (SPARSE, CONV),
}
"""Rules that only inform, and speak of most of these models or beside another rule."""

MORE: dict[str, tuple[Case, ...]] = {
    "T02": (CONV.but(("wd = Deq", "zc = Cast<to = 3>(z32)\nwd = Deq"), ("sv, zv)", "sv, zc)"), z32=np.ones(16, F32)),),
    "T03": (PRODUCT.but(zv=np.zeros(16, np.int32), m=filled((16, 16), np.int32)),),
    "T05": tuple(CONV.but(s=np.array(value, F32)) for value in (0, -0.1, np.nan, np.inf, 1e6)),
    "T07": (CONV.but(sv=np.full((4, 4), 0.1, F32), zv=np.zeros((4, 4), I8)), CONV.but(zv=np.zeros(8, I8))),
    "T10": (
        PRODUCT.but(("y = MatMul(d, md)", "mt = Transpose<perm = [1,0]>(md)\ny = MatMul(d, mt)")),
        PRODUCT.but(("y = MatMul(d, md)", "y = Gemm<transB = 1>(d, md)")),
    ),
    "T14": (replace(BLOCKS, opset=20),),
    "T12": (
        FOURS.but(("(b4, sd)", "(b4, sf)"), ("sd = DequantizeLinear(sb, s)\n", ""), sf=np.full((8, 32), 1.5, F32)),
        replace(BLOCKS, opset=24).but(b4=filled((128, 32), FP8), sb=np.ones((2, 32), ml_dtypes.float8_e8m0fnu)),
    ),
    "T16": (CONV.but(("(d, wd)", "(d, w)")),),
    "P01": (CONV.but(("(d, wd)", "(x, wd)")),),
    "P02": (
        CHAIN.but(("r = Relu(v)\n", pair("v", "u") + "r = Add(u, b)\n"), b=np.ones((16, 1, 1), F32)),
        CHAIN.but(("r = Relu(v)\n", "g = Sigmoid(v)\nt = Mul(g, v)\n" + pair("t", "u") + "r = Relu(u)\n")),
    ),
    "P03": (replace(CONV, body=pair("x", "d") + WEIGHT + conv("d", "v") + pair("v", "y")),),
    "P10": (replace(CONV.but(("d_c = QuantizeLinear(x, s, z)\n", "")), inputs="int8[2,16,8,8] d_c"),),
    "P11": (
        SCORES.but(("(d, e)", "(d, k)")),
        SCORES.but(("p = Softmax(a)", pair("a", "f") + "g = Add(f, a)\np = Softmax(g)")),
        replace(SCORES, inputs="float[1,600,64] x, float[1,64,600] k", outputs="float[1,600,600] p"),
        replace(SCORES, inputs="float[1,8,512] x, float[1,512,8] k", outputs="float[1,8,8] p", opset=19).but(
            z=np.array(0, FP8)
        ),
    ),
    "P12": (
        CONV.but(("<pads", "<group = 8, pads"), w=filled((16, 2, 3, 3))),
        replace(CONV, opset=19).but(z=np.array(0, FP8), w=filled((16, 16, 7, 7), FP8), zv=np.zeros(16, FP8)),
        replace(CONV, opset=19).but(
            ("<pads", "<group = 2, pads"), z=np.array(0, FP8), w=filled((16, 8, 3, 3), FP8), zv=np.zeros(16, FP8)
        ),
        replace(PRODUCT, inputs="float[1,16] x", outputs="float[1,16] y"),
    ),
    "P04": (RESIDUAL.but(("(v, d)", "(v, x)")), RESIDUAL.but(("a = Add(v, d)\n", pair("v", "u") + "a = Add(u, x)\n"))),
}
"""Other ways to break a rule."""
