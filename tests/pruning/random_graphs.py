"""Random models whose float sums are exact: small whole numbers as weights, values limited after each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sbonnx.spec import Array

LIMIT: Final = 5.0
"""Values after each layer are at most this large, so that sums stay far below 2^24."""

OPSET: Final = 18


class RandomModel:
    """Builds a model op by op; `tensors` has the shapes (N, C, H, W) of everything computed so far."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.tensors: dict[str, tuple[int, ...]] = {}

    def constant(self, values: Any, kind: type = np.float32) -> str:
        """Add an initializer and return its name."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, kind), name))
        return name

    def whole(self, *shape: int) -> str:
        """Add an initializer of random numbers -1, 0, 1."""
        return self.constant(self.rng.integers(-1, 2, shape))

    def add(self, op: str, inputs: Sequence[str], shape: tuple[int, ...], **attributes: Any) -> str:
        """Add a node with one output of this shape and return its name."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"{op}_{len(self.nodes)}", **attributes))
        self.tensors[name] = shape
        return name

    def inner(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node whose output other steps do not read, and return its name."""
        name = self.add(op, inputs, (), **attributes)
        del self.tensors[name]
        return name

    def pick(self) -> tuple[str, tuple[int, ...]]:
        """Return a recent tensor."""
        names = list(self.tensors)[-4:]
        name = names[int(self.rng.integers(len(names)))]
        return name, self.tensors[name]

    def limited(self, name: str) -> str:
        """Limit a tensor."""
        return self.add("Clip", [name, self.constant(-LIMIT), self.constant(LIMIT)], self.tensors[name])

    def flat(self, name: str, size: int) -> str:
        """Return a target of Reshape to rows: a constant, or with a computed batch as torch exports it."""
        last = int(self.rng.choice([size, -1]))
        if self.rng.integers(2):
            return self.constant([self.tensors[name][0], last], np.int64)
        sizes = self.add("Shape", [name], (4,))
        batch = self.add("Gather", [sizes, self.constant([0], np.int64)], (1,), axis=0)
        del self.tensors[sizes], self.tensors[batch]
        target = self.add("Concat", [batch, self.constant([last], np.int64)], (2,), axis=0)
        del self.tensors[target]
        return target

    def model(self) -> onnx.ModelProto:
        """Return the model, with a convolution or a Gemm on the last tensor as output."""
        name, (n, c, h, w) = list(self.tensors.items())[-1]
        if self.rng.integers(2):
            name = self.add("Conv", [name, self.whole(4, c, 1, 1), self.whole(4)], (n, 4, h, w))
        else:
            name = self.add("Reshape", [name, self.flat(name, c * h * w)], (n, c * h * w))
            name = self.add("Gemm", [name, self.whole(4, c * h * w), self.whole(4)], (n, 4), transB=1)
        output = helper.make_tensor_value_info(name, TensorProto.FLOAT, self.tensors[name])
        entry = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
        graph = helper.make_graph(self.nodes, "random", [entry], [output], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


SHAPE: Final = (2, 3, 4, 4)


def _conv(m: RandomModel, *, grouped: bool = False, depthwise: bool = False, transposed: bool = False) -> None:
    name, (n, c, h, w) = m.pick()
    groups = [group for group in range(2, c) if c % group == 0] if grouped else [c if depthwise else 1]
    if not groups:
        return
    group = int(m.rng.choice(groups))
    most = 3 if depthwise or group > 2 else 7
    out = group * int(m.rng.integers(1, most))
    taps = int(m.rng.choice([1, 3]))
    shape = (c, out // group, taps, taps) if transposed else (out, c // group, taps, taps)
    inputs = [name, m.whole(*shape)] + ([m.whole(out)] if m.rng.integers(2) else [])
    op = "ConvTranspose" if transposed else "Conv"
    m.limited(m.add(op, inputs, (n, out, h, w), group=group, pads=[taps // 2] * 4))


def _point(m: RandomModel) -> None:
    name, shape = m.pick()
    kind = int(m.rng.integers(5))
    if kind == 0:
        m.add("PRelu", [name, m.whole(shape[1], 1, 1)], shape)
    elif kind == 1:
        m.add("Mul", [m.whole(1, shape[1], 1, 1), name], shape)
    elif kind == 2:
        m.add("Max", [name, m.whole(1), m.whole(shape[1], 1, 1)], shape)
    else:
        m.add(str(m.rng.choice(["Relu", "Abs", "Neg", "Sign", "Identity"])), [name], shape)


def _join(m: RandomModel) -> None:
    name, shape = m.pick()
    others = [other for other, size in m.tensors.items() if size == shape and other != name]
    other = str(m.rng.choice(others)) if others else name
    m.limited(m.add(str(m.rng.choice(["Add", "Sub", "Min"])), [name, other], shape))


def _gate(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    if m.rng.integers(2):
        gate = m.add("GlobalMaxPool", [name], (n, c, 1, 1))
    else:
        gate = m.add("Conv", [name, m.whole(1, c, 1, 1)], (n, 1, h, w))
        gate = m.limited(gate)
    m.limited(m.add("Mul", [name, gate], (n, c, h, w)))


def _concat(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    others = [(other, size) for other, size in m.tensors.items() if (size[0], *size[2:]) == (n, h, w)]
    other, size = others[int(m.rng.integers(len(others)))]
    if c + size[1] <= 16:
        m.add("Concat", [name, other], (n, c + size[1], h, w), axis=1)


def _split(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    if c < 2:
        return
    first = int(m.rng.integers(1, c))
    parts = [f"t{len(m.nodes)}a", f"t{len(m.nodes)}b"]
    sizes = m.constant([first, c - first], np.int64)
    m.nodes.append(helper.make_node("Split", [name, sizes], parts, name=f"Split_{len(m.nodes)}", axis=1))
    m.tensors[parts[0]], m.tensors[parts[1]] = (n, first, h, w), (n, c - first, h, w)


def _halves(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    if c % 2 == 0:
        parts = [f"t{len(m.nodes)}a", f"t{len(m.nodes)}b"]
        m.nodes.append(helper.make_node("Split", [name], parts, name=f"Split_{len(m.nodes)}", axis=1, num_outputs=2))
        m.tensors.update(dict.fromkeys(parts, (n, c // 2, h, w)))


def _slice(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    start = int(m.rng.integers(0, c))
    stop = int(m.rng.integers(start + 1, c + 1))
    limits = [m.constant([value], np.int64) for value in (start - c, stop if m.rng.integers(2) else 2**40, 1)]
    count = len(range(c)[start : stop if m.weights[-2].raw_data != np.int64(2**40).tobytes() else None])
    m.add("Slice", [name, *limits], (n, count, h, w))


def _gather(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    places = m.rng.integers(-c, c, int(m.rng.integers(1, c + 1)))
    m.add("Gather", [name, m.constant(places, np.int64)], (n, len(places), h, w), axis=1)


def _pad(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    first, last = (int(value) for value in m.rng.integers(0, 3, 2))
    if c + first + last <= 16:
        pads = m.constant([0, first, 0, 0, 0, last, 0, 0], np.int64)
        m.add("Pad", [name, pads], (n, c + first + last, h, w))


def _shuffle(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    for groups in (2, 3):
        if c % groups == 0:
            wide = m.add("Reshape", [name, m.constant([0, groups, -1, h, w], np.int64)], (n, groups, c // groups, h, w))
            turned = m.add("Transpose", [wide], (n, c // groups, groups, h, w), perm=[0, 2, 1, 3, 4])
            del m.tensors[wide], m.tensors[turned]
            m.add("Reshape", [turned, m.constant([n, c, h, w], np.int64)], (n, c, h, w))
            return


def _blocks(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    mode = str(m.rng.choice(["DCR", "CRD"]))
    if c % 4 == 0 and h <= 4:
        m.add("DepthToSpace", [name], (n, c // 4, 2 * h, 2 * w), blocksize=2, mode=mode)
    elif c <= 4 and h >= 2 and h % 2 == 0:
        m.add("SpaceToDepth", [name], (n, 4 * c, h // 2, w // 2), blocksize=2)


def _resize(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    if h <= 4:
        sizes = m.constant([n, c, 2 * h, 2 * w], np.int64)
        m.add("Resize", [name, "", "", sizes], (n, c, 2 * h, 2 * w), mode="nearest", nearest_mode="floor")


def _expand(m: RandomModel) -> None:
    name, (n, c, h, w) = m.pick()
    pooled = m.add("GlobalMaxPool", [name], (n, c, 1, 1))
    m.add("Expand", [pooled, m.constant([1, c, h, w], np.int64)], (n, c, h, w))


def _heads(m: RandomModel) -> None:
    """Softmax-like pins: a maximum over the channels, subtracted from all."""
    name, (n, c, h, w) = m.pick()
    top = m.add("ReduceMax", [name, m.constant([1], np.int64)], (n, 1, h, w))
    m.limited(m.add("Sub", [name, top], (n, c, h, w)))


def _attention(m: RandomModel) -> None:
    """Attention over the pixels, with Hardmax, whose results are whole numbers."""
    name, (n, c, h, w) = m.pick()
    t, heads, d = h * w, int(m.rng.integers(1, 4)), int(m.rng.integers(1, 4))
    tokens = m.inner("Transpose", m.inner("Reshape", name, m.constant([n, c, t], np.int64)), perm=[0, 2, 1])
    q, k, v = _packed(m, tokens, (n, t, c, heads, d)) if m.rng.integers(2) else _apart(m, tokens, (n, t, c, heads, d))
    if m.rng.integers(3) == 0:  # a norm of each head
        q = m.inner("Sub", q, m.inner("ReduceMax", q, m.constant([-1], np.int64)))
        q = m.inner("Mul", q, m.whole(d))
    if m.rng.integers(3) == 0 and d == 2:  # a rotation
        halves = [m.inner("Slice", q, *(m.constant([x], np.int64) for x in (start, start + 1, -1))) for start in (0, 1)]
        turned = m.inner("Concat", m.inner("Neg", halves[1]), halves[0], axis=-1)
        q = m.inner("Add", q, m.inner("Mul", turned, m.whole(1, 1, t, d)))
    over_channels = m.rng.integers(4) == 0
    q, k, v = (m.inner("Transpose", each, perm=[0, 1, 3, 2]) for each in (q, k, v)) if over_channels else (q, k, v)
    scores = m.inner("MatMul", q, m.inner("Transpose", k, perm=[0, 1, 3, 2]))
    size = d if over_channels else t
    biases = [(1, heads, size, size), (heads, 1, 1), (1, 1, size, size), (heads, 1, size)]
    scores = m.inner("Add", scores, m.whole(*biases[int(m.rng.integers(4))]))
    found = m.inner("MatMul", m.inner("Hardmax", scores, axis=-1), v)
    order = [0, 3, 1, 2] if over_channels else [0, 2, 1, 3]
    wide = m.constant([n, t, int(m.rng.choice([heads * d, -1]))], np.int64)
    found = m.inner("Reshape", m.inner("Transpose", found, perm=order), wide)
    found = m.inner("MatMul", found, m.whole(heads * d, c))
    found = m.inner("Add", found, tokens if m.rng.integers(2) else m.whole(c))
    found = m.inner("Transpose", found, perm=[0, 2, 1])
    m.limited(m.add("Reshape", [found, m.constant([n, c, h, w], np.int64)], (n, c, h, w)))


def _apart(m: RandomModel, tokens: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Queries, keys and values from three layers; sometimes all heads share keys and values."""
    _, _, c, heads, d = sizes
    found = []
    for count in (heads, *[int(m.rng.choice([heads, heads, 1]))] * 2):
        x = m.inner("Add", m.inner("MatMul", tokens, m.whole(c, count * d)), m.whole(count * d))
        x = m.inner("Reshape", x, m.constant([0, 0, count, int(m.rng.choice([d, -1]))], np.int64))
        found.append(m.inner("Transpose", x, perm=[0, 2, 1, 3]))
    return tuple(found)


def _packed(m: RandomModel, tokens: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """Queries, keys and values from one layer."""
    n, t, c, heads, d = sizes
    x = m.inner("MatMul", tokens, m.whole(c, 3 * heads * d))
    if m.rng.integers(2):
        x = m.inner("Reshape", x, m.constant([n, t, 3, heads, d], np.int64))
        x = m.inner("Transpose", x, perm=[2, 0, 3, 1, 4])
        return tuple(m.inner("Gather", x, m.constant(place, np.int64), axis=0) for place in range(3))
    parts = [f"t{len(m.nodes)}{letter}" for letter in "qkv"]
    lengths = m.constant([heads * d] * 3, np.int64)
    m.nodes.append(helper.make_node("Split", [x, lengths], parts, name=f"Split_{len(m.nodes)}", axis=-1))
    wide = [m.inner("Reshape", part, m.constant([n, t, heads, d], np.int64)) for part in parts]
    return tuple(m.inner("Transpose", each, perm=[0, 2, 1, 3]) for each in wide)


def _shared(m: RandomModel) -> None:
    """Two convolutions with one weight: of two tensors, or one after the other."""
    name, (n, c, h, w) = m.pick()
    out = c if m.rng.integers(2) else int(m.rng.integers(1, 9))
    weight, bias = m.whole(out, c, 1, 1), m.whole(out)
    first = m.limited(m.add("Conv", [name, weight, bias], (n, out, h, w)))
    others = [other for other, (_, channels, *_) in m.tensors.items() if channels == c]
    other = first if out == c and m.rng.integers(2) else str(m.rng.choice(others))
    _, _, h, w = m.tensors[other]
    m.limited(m.add("Conv", [other, weight, bias], (n, out, h, w)))


STEPS: Final[dict[str, Callable[[RandomModel], None]]] = {
    "conv": _conv,
    "grouped": lambda m: _conv(m, grouped=True),
    "depthwise": lambda m: _conv(m, depthwise=True),
    "transposed": lambda m: _conv(m, grouped=bool(m.rng.integers(2)), transposed=True),
    "transposed depthwise": lambda m: _conv(m, depthwise=True, transposed=True),
    "point": _point,
    "join": _join,
    "gate": _gate,
    "concat": _concat,
    "split": _split,
    "halves": _halves,
    "slice": _slice,
    "gather": _gather,
    "pad": _pad,
    "shuffle": _shuffle,
    "blocks": _blocks,
    "resize": _resize,
    "expand": _expand,
    "heads": _heads,
    "attention": _attention,
    "shared": _shared,
}


def random_model(steps: Sequence[str], seed: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a model with these steps between a first and a last layer, and a feed of whole numbers."""
    m = RandomModel(seed)
    n, c, h, w = SHAPE
    channels = int(m.rng.integers(2, 9))
    m.limited(m.add("Conv", ["x", m.whole(channels, c, 1, 1), m.whole(channels)], (n, channels, h, w)))
    for step in steps:
        STEPS[step](m)
    feed = {"x": m.rng.integers(-2, 3, SHAPE).astype(np.float32)}
    return m.model(), feed
