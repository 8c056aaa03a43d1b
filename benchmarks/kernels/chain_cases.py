"""The chains and single ops whose Q/DQ forms are timed: what stands between two convolutions or matrix products."""

from __future__ import annotations

import numpy as np

from benchmarks.kernels.chains import Chain

MAP = (1, 64, 28, 28)
PAD = "pads = [1,1,1,1]"
ROWS = (1, 128, 384)
"""Shape of the encoder; its first axis is dynamic, because onnxruntime fuses MatMul and Add to Gemm otherwise."""
Constants = dict[str, tuple[int, ...] | np.ndarray]
NONE: Constants = {}
CONVS: Constants = {"w": (64, 64, 3, 3), "wb": (64,), "v": (64, 64, 3, 3), "vb": (64,)}
FIRST = f"c = Conv <{PAD}> (x, w, wb)"
BOTH = ("u8", "s8")


def between(name: str, middle: str, points: dict[str, str], constants: Constants = NONE) -> Chain:
    """Return a chain with nodes between two 3x3 convolutions of 64 channels; the nodes read c and write r."""
    body = f"{FIRST} {middle} y = Conv <{PAD}> (r, v, vb)"
    return Chain(f"conv {name} conv", body, MAP, {**CONVS, **constants}, points)


def single(name: str, body: str, points: str, shape: tuple[int, ...] = MAP, constants: Constants = NONE) -> Chain:
    """Return a chain of one op, with or without activation, with Q/DQ pairs at inputs and outputs, in both types."""
    return Chain(name, body, shape, constants, {"": points}, BOTH)


def numbers(*values: float) -> np.ndarray:
    """Return a float32 constant."""
    return np.array(values if len(values) > 1 else values[0], np.float32)


SIX: Constants = {"zero": numbers(0), "six": numbers(6)}
TO_SIX = f"low:{6 / 255}"
TWICE: Constants = {"none": np.empty(0, np.float32), "sizes": numbers(1, 1, 2, 2)}
SQUEEZE: Constants = {"p": (16, 64, 1, 1), "pb": (16,), "q": (64, 16, 1, 1), "qb": (64,)}
GATE = "g = GlobalAveragePool(c) s = Conv(g, p, pb) t = Relu(s) u = Conv(t, q, qb) h = HardSigmoid(u) r = Mul(c, h)"
SHUFFLE = "a = Reshape(c, fold) b = Transpose <perm = [0,2,1,3,4]> (a) r = Reshape(b, back)"

ACTIVATIONS = (
    Chain(
        "conv Relu conv",
        f"{FIRST} r = Relu(c) y = Conv <{PAD}> (r, v, vb)",
        MAP,
        CONVS,
        {"Q after Relu, zp=qmin": "x r:low y", "Q after Relu, zp in the middle": "x r y"},
        BOTH,
    ),
    between(
        "Relu (two pairs)", "r = Relu(c)", {"both zp=qmin": "x c:low r:low y", "first in the middle": "x c r:low y"}
    ),
    between(
        "Clip(0,6)",
        "r = Clip(c, zero, six)",
        {
            "scale 6/255": f"x r:{TO_SIX} y",
            "scale 3/255": f"x r:low:{3 / 255} y",
            "range beyond 6": f"x r:low:{8 / 255} y",
        },
        SIX,
    ),
    between("HardSwish", "r = HardSwish(c)", {"Q both sides": "x c r y", "Q after only": "x r y"}),
    between(
        "HardSigmoid*x",
        "h = HardSigmoid(c) r = Mul(c, h)",
        {"all Q": "x c h:low r y", "Q around the pair": "x c r y"},
    ),
    between(
        "SiLU",
        "h = Sigmoid(c) r = Mul(c, h)",
        {"all Q": "x c h:low:0.00390625 r y", "Q around the pair": "x c r y", "Q after only": "x r y"},
    ),
    between("LeakyRelu", "r = LeakyRelu <alpha = 0.1> (c)", {"Q both sides": "x c r y", "Q after only": "x r y"}),
    between(
        "PRelu", "r = PRelu(c, slope)", {"Q both sides": "x c r y", "Q after only": "x r y"}, {"slope": (64, 1, 1)}
    ),
)

STRUCTURE = (
    Chain("conv conv", f"{FIRST} y = Conv <{PAD}> (c, v, vb)", MAP, CONVS, {"Q everywhere": "x c y"}),
    between(
        "(+x) Relu",
        "a = Add(c, x) r = Relu(a)",
        {
            "Q on conv output and after Relu": "x c r:low y",
            "Q on conv output, Add output and after Relu": "x c a:low r:low y",
            "no Q on conv output": "x r:low y",
            "Add output zp in the middle": "x c a r:low y",
        },
    ),
    between("(+x)", "r = Add(c, x)", {"Q everywhere": "x c r y"}),
    between(
        "Concat",
        "r = Concat <axis = 1> (c, x)",
        {"one scale": "x c r y", "three scales": "x c:mid:0.04 r:mid:0.06 y"},
        {"v": (64, 128, 3, 3)},
    ),
    between("Mul(const)", "r = Mul(c, half)", {"Q both sides, constant float": "x c r y"}, {"half": numbers(0.5)}),
    between(
        "SE-block",
        GATE,
        {
            "Q everywhere": "x c g t:low u h:low r y",
            "branch float, Mul quantized": "x c h:low r y -p -q",
            "branch and Mul float": "x c r y -p -q",
        },
        SQUEEZE,
    ),
    between(
        "ChannelShuffle",
        SHUFFLE,
        {"Q before and after": "x c r y", "Q on all four": "x c a b r y"},
        {"fold": np.array([1, 2, 32, 28, 28]), "back": np.array(MAP)},
    ),
)

RESAMPLING = (
    between(
        "MaxPool",
        f"r = MaxPool <kernel_shape = [3,3], strides = [2,2], {PAD}> (c)",
        {"one scale": "x c r y", "two scales": "x c r:mid:0.04 y", "Q after only": "x r y"},
    ),
    between(
        "AveragePool",
        "r = AveragePool <kernel_shape = [2,2], strides = [2,2]> (c)",
        {"Q both sides": "x c r y", "Q before only": "x c y"},
    ),
    between(
        "Resize nearest",
        'r = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (c, none, sizes)',
        {"Q both sides": "x c r y", "Q before only": "x c y"},
        TWICE,
    ),
    between("Resize linear", 'r = Resize <mode = "linear"> (c, none, sizes)', {"Q both sides": "x c r y"}, TWICE),
    between("Pad", "r = Pad(c, rim)", {"Q both sides": "x c r y"}, {"rim": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
)

WIDTHS = tuple(
    Chain(
        f"depthwise {kernel}x{kernel} Relu conv 1x1",
        f"c = Conv <pads = {[kernel // 2] * 4}, group = 192> (x, w, wb) r = Relu(c) y = Conv(r, v, vb)",
        (1, 192, 28, 28),
        {"w": (192, 1, kernel, kernel), "wb": (192,), "v": (64, 192, 1, 1), "vb": (64,)},
        {"Q everywhere": "x r:low y"},
    )
    for kernel in (3, 5)
)

STEM = Chain(
    "stem 7x7 + conv",
    f"c = Conv <strides = [2,2], pads = [3,3,3,3]> (x, w, wb) r = Relu(c) y = Conv <{PAD}> (r, v, vb)",
    (1, 3, 112, 112),
    {"w": (64, 3, 7, 7), "wb": (64,), "v": (64, 64, 3, 3), "vb": (64,)},
    {"both integer": "x r:low y", "stem float": "r:low y"},
)

ENCODER = (
    Chain(
        "MatMul Gelu MatMul",
        "a = MatMul(x, w) b = Add(a, wb) g = Gelu(b) y = MatMul(g, v)",
        ROWS,
        {"w": (384, 1536), "wb": (1536,), "v": (1536, 384)},
        {"Q both sides of Gelu": "x b g y", "no Q before Gelu": "x g y", "no Q on MatMul outputs": "x g"},
        batch="N",
    ),
    Chain(
        "Gemm Gelu Gemm",
        "b = Gemm(x, w, wb) g = Gelu(b) y = Gemm(g, v, vb)",
        ROWS[1:],
        {"w": (384, 1536), "wb": (1536,), "v": (1536, 384), "vb": (384,)},
        {"Q both sides of Gelu": "x b g y", "no Q on Gemm outputs": "x g"},
    ),
    Chain(
        "MatMul Relu MatMul",
        "a = MatMul(x, w) r = Relu(a) y = MatMul(r, v)",
        ROWS,
        {"w": (384, 1536), "v": (1536, 384)},
        {"Q after Relu, zp=qmin": "x r:low y"},
        batch="N",
    ),
    Chain(
        "MatMul Add LayerNorm MatMul",
        "a = MatMul(x, w) s = Add(a, x) l = LayerNormalization(s, gamma, beta) y = MatMul(l, v)",
        ROWS,
        {"w": (384, 384), "v": (384, 384), "gamma": (384,), "beta": (384,)},
        {"Q everywhere": "x a s l y", "Q only on MatMul inputs": "x l", "Q on MatMul inputs and outputs": "x a l y"},
        batch="N",
    ),
    Chain(
        "attention",
        "q = MatMul(x, wq) k = MatMul(x, wk) o = MatMul(x, wv)"
        " q4 = Reshape(q, heads) k4 = Reshape(k, heads) o4 = Reshape(o, heads)"
        " qt = Transpose <perm = [0,2,1,3]> (q4) kt = Transpose <perm = [0,2,3,1]> (k4)"
        " ot = Transpose <perm = [0,2,1,3]> (o4)"
        " s = MatMul(qt, kt) d = Mul(s, factor) p = Softmax <axis = -1> (d) m = MatMul(p, ot)"
        " n = Transpose <perm = [0,2,1,3]> (m) r = Reshape(n, flat) y = MatMul(r, wo)",
        ROWS,
        {
            **dict.fromkeys(("wq", "wk", "wv", "wo"), (384, 384)),
            "heads": np.array([1, 128, 12, 32]),
            "flat": np.array([1, 128, 384]),
            "factor": numbers(0.17),
        },
        {
            "four weight MatMuls, float outputs": "x r",
            "weight MatMuls, Q on their outputs": "x q k o r y",
            "also QK and PV, softmax float": "x qt kt ot s p:low:0.00390625 m r y",
        },
        batch="N",
    ),
)


def convolution(name: str, shape: tuple[int, ...], weight: tuple[int, ...], attributes: str) -> Chain:
    """Return a chain of a convolution with bias."""
    return single(f"Conv {name}", f"y = Conv <{attributes}> (x, w, b)", "x y", shape, {"w": weight, "b": weight[:1]})


def activation(op: str, attributes: str = "", constants: Constants = NONE) -> Chain:
    """Return a chain of an op with one input and optional constants."""
    return single(op, f"y = {op} {attributes} ({', '.join(('x', *constants))})", "x y", constants=constants)


SINGLES = (
    convolution("3x3 64", (1, 64, 56, 56), (64, 64, 3, 3), PAD),
    convolution("3x3 512", (1, 512, 7, 7), (512, 512, 3, 3), PAD),
    convolution("1x1 64 to 256", (1, 64, 56, 56), (256, 64, 1, 1), "group = 1"),
    convolution("1x1 256 to 64", (1, 256, 14, 14), (64, 256, 1, 1), "group = 1"),
    convolution("7x7 stem", (1, 3, 224, 224), (64, 3, 7, 7), "strides = [2,2], pads = [3,3,3,3]"),
    convolution("depthwise 3x3", (1, 192, 28, 28), (192, 1, 3, 3), f"{PAD}, group = 192"),
    convolution("group 8, 3x3", MAP, (64, 8, 3, 3), f"{PAD}, group = 8"),
    single("Conv Relu, Q after", f"{FIRST} y = Relu(c)", "x y:low", constants={"w": (64, 64, 3, 3), "wb": (64,)}),
    single("Add", "y = Add(x, x)", "x y"),
    single("Mul", "y = Mul(x, x)", "x y"),
    *(activation(op) for op in ("Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Gelu")),
    activation("GlobalAveragePool"),
    activation("MaxPool", f"<kernel_shape = [3,3], strides = [2,2], {PAD}>"),
    activation("AveragePool", "<kernel_shape = [2,2], strides = [2,2]>"),
    activation("Softmax"),
    activation("Transpose", "<perm = [0,2,3,1]>"),
    activation("Reshape", constants={"to": np.array([1, 2, 32, 784])}),
    activation("DepthToSpace", "<blocksize = 2>"),
    single("MatMul 384", "y = MatMul(x, w)", "x y", ROWS, {"w": (384, 384)}),
    single("Gemm 384", "y = Gemm(x, w, b)", "x y", ROWS[1:], {"w": (384, 384), "b": (384,)}),
    single("ConvTranspose 2x2", "y = ConvTranspose <strides = [2,2]> (x, w)", "x y", constants={"w": (64, 32, 2, 2)}),
)

CHAINS = (*STRUCTURE, *ACTIVATIONS, *RESAMPLING, *WIDTHS, STEM, *ENCODER)
"""All chains, in the order of the table."""
