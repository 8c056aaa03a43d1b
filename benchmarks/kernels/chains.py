"""Times small float graphs against their Q/DQ form and says which kernels onnxruntime makes of it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sbonnx.linear.layer import channel_axes
from sbonnx.ops import CONTROL_FLOW, DEQUANTIZE, LINEAR, MOVES_DATA, QDQ, QUANTIZE
from sbonnx.tuning.kernel_timing import optimised, session

OPSET = 20
INTEGER_MARKS = ("QLinear", "QGemm", "Nhwc", "DynamicQuantize", "MatMulNBits")
SHAPES = frozenset({"Shape", "Size"})
SCALE = 0.05


@dataclass(frozen=True)
class Chain:
    """A float graph from "x" to "y", and the placements of Q/DQ pairs to measure.

    Attributes:
        name: name in the table.
        body: nodes in ONNX's text format.
        shape: shape of x.
        constants: values of each constant in `body`, or its shape, filled with random values.
        points: tensors that get a Q/DQ pair, by the name of the placement: "x r:low y". ":low" sets the zero point to
            the lowest code (default: middle), "r:low:0.02" also sets the scale, "-w" keeps weight w in float.
        types: types of activations, "u8" or "s8".
        batch: name of the first axis of x if it is dynamic.
    """

    name: str
    body: str
    shape: tuple[int, ...]
    constants: Mapping[str, tuple[int, ...] | np.ndarray]
    points: Mapping[str, str]
    types: tuple[str, ...] = ("u8",)
    batch: str = ""

    def model(self) -> onnx.ModelProto:
        """Build the float model."""
        sizes = ",".join([self.batch or str(self.shape[0]), *map(str, self.shape[1:])])
        text = f'<ir_version: 8, opset_import: ["" : {OPSET}]> g (float[{sizes}] x) => (float y) {{ {self.body} }}'
        made = onnx.parser.parse_model(text)
        made.graph.output[0].type.tensor_type.ClearField("shape")
        rng = np.random.default_rng(0)
        for name, value in self.constants.items():
            if isinstance(value, tuple):
                value = (rng.standard_normal(value) * 0.05).astype(np.float32)
            made.graph.initializer.append(numpy_helper.from_array(value, name))
        return made


@dataclass
class Writer:
    """Rewrites one float graph into Q/DQ: activations per tensor, int8 weights per channel, int32 biases."""

    model: onnx.ModelProto
    points: Mapping[str, tuple[float, bool]]
    floats: frozenset[str]
    signed: bool
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def constant(self, name: str, values: Any) -> str:
        """Add an initializer, once."""
        if all(tensor.name != name for tensor in self.model.graph.initializer):
            self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def pair(self, name: str, source: str, target: str) -> None:
        """Add the Q/DQ pair of activation `name`, from `source` to `target`."""
        scale, low = self.points[name]
        lowest, middle = (-128, 0) if self.signed else (0, 128)
        code = np.array(lowest if low else middle, np.int8 if self.signed else np.uint8)
        edge = (self.constant(f"{name}_s", np.float32(scale)), self.constant(f"{name}_z", code))
        self.nodes.append(helper.make_node("QuantizeLinear", [source, *edge], [f"{name}_q"]))
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", *edge], [target]))

    def weight(self, node: onnx.NodeProto) -> None:
        """Quantize weight and bias of a node that reads a Q/DQ pair."""
        place = LINEAR[node.op_type]
        held = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.model.graph.initializer}
        name, activation = node.input[place.weight], node.input[0].removesuffix("_dq")
        if name not in held or name in self.floats or activation not in self.points:
            return
        axis = out_axis(node, held[name].ndim)
        rest = tuple(index for index in range(held[name].ndim) if index != axis)
        scale = (np.abs(held[name]).max(axis=rest, keepdims=True) / 127).astype(np.float32)
        codes = np.rint(held[name] / scale).astype(np.int8)
        self.stored(name, codes, scale.ravel(), axis)
        node.input[place.weight] = f"{name}_dq"
        if place.bias is not None and len(node.input) > place.bias:
            bias = node.input[place.bias]
            whole = (scale.ravel() * self.points[activation][0]).astype(np.float32)
            self.stored(bias, np.rint(held[bias] / whole).astype(np.int32), whole, 0)
            node.input[place.bias] = f"{bias}_dq"

    def stored(self, name: str, codes: np.ndarray, scale: np.ndarray, axis: int) -> None:
        """Add a quantized constant with its DequantizeLinear."""
        edge = [self.constant(f"{name}_c", codes), self.constant(f"{name}_s", scale)]
        zeros = self.constant(f"{name}_z", np.zeros(scale.shape, codes.dtype))
        self.nodes.append(helper.make_node("DequantizeLinear", [*edge, zeros], [f"{name}_dq"], axis=axis))

    def write(self) -> onnx.ModelProto:
        """Build the Q/DQ model."""
        if "x" in self.points:
            self.pair("x", "x", "x_dq")
        for node in list(self.model.graph.node):
            for index, name in enumerate(node.input):
                if name in self.points:
                    node.input[index] = f"{name}_dq"
            if node.op_type in LINEAR:
                self.weight(node)
            self.nodes.append(node)
            for index, name in enumerate(node.output):
                if name == "y" and name in self.points:
                    node.output[index] = "y_f"
                    self.pair(name, "y_f", "y")
                elif name in self.points:
                    self.pair(name, name, f"{name}_dq")
        del self.model.graph.node[:]
        self.model.graph.node.extend(self.nodes)
        return self.model


def quantized(chain: Chain, placement: str, dtype: str) -> onnx.ModelProto:
    """Return the Q/DQ model of a chain."""
    points, floats = {}, set()
    for token in placement.split():
        name, low, scale = (*token.split(":"), "", "")[:3]
        if name.startswith("-"):
            floats.add(name[1:])
        else:
            points[name] = (float(scale or SCALE), low == "low")
    return Writer(chain.model(), points, frozenset(floats), dtype == "s8").write()


def kernels_of(made: onnx.ModelProto) -> tuple[Counter[str], Counter[str]]:
    """Count the kernels of an optimized graph, including branches: all, and those that compute in float."""
    whole: Counter[str] = Counter()
    left: Counter[str] = Counter()
    real = {value.name for value in made.graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    for node in nodes_of(made.graph):
        whole[node.op_type] += 1
        reads_float = any(name in real for name in node.input)
        integer = is_integer(node.op_type)
        if writes_float(node.op_type, reads_float):
            real.update(node.output)
        if reads_float and not integer and node.op_type not in QDQ | MOVES_DATA | CONTROL_FLOW | SHAPES:
            left[node.op_type] += not node.op_type.startswith("Reorder")
    return whole, +left


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes; the nodes of a branch come before the node that contains it."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)
        yield node


def writes_float(kernel: str, reads_float: bool) -> bool:
    """Return whether a kernel's outputs are float; by default the same as for its inputs."""
    if kernel in DEQUANTIZE or kernel.endswith(("ToFloat", "QuantizeMatMul", "NBits")):
        return True
    return reads_float and not is_integer(kernel) and kernel not in QUANTIZE | SHAPES


def is_integer(kernel: str) -> bool:
    """Return whether a kernel computes on integers, by its name."""
    return kernel.startswith(INTEGER_MARKS) or "Integer" in kernel


def counted(name: str, count: int) -> str:
    """Format a count: ``Conv`` or ``Conv*2``."""
    return f"{name}*{count}" if count > 1 else name


def size(model: onnx.ModelProto) -> tuple[int, int]:
    """Return the MACs of the products with constants, and the number of elements that all nodes write."""
    known = {}
    for value in (shaped := onnx.shape_inference.infer_shapes(model).graph).value_info:
        known[value.name] = [max(dim.dim_value, 1) for dim in value.type.tensor_type.shape.dim]
    known["y"] = [max(dim.dim_value, 1) for dim in shaped.output[0].type.tensor_type.shape.dim]
    held = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    macs = elements = 0
    for node in model.graph.node:
        written = sum(int(np.prod(known[name])) for name in node.output if known.get(name))
        elements += written
        weight = held.get(node.input[LINEAR[node.op_type].weight]) if node.op_type in LINEAR else None
        if weight is not None:
            macs += written * int(np.prod(weight)) // weight[out_axis(node, len(weight))]
    return macs, elements


def out_axis(node: onnx.NodeProto, rank: int) -> int:
    """Return the output-channel axis of the weight of a linear node."""
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return channel_axes(node.op_type, attributes, rank)[0] or 0


def by_turns(models: Sequence[onnx.ModelProto], feeds: Mapping[str, np.ndarray], seconds: float) -> list[float]:
    """Measure the CPU time of one run of each model alternately: median in ns, one thread."""
    sessions = [session(model, optimise=True) for model in models]
    taken: list[list[int]] = [[] for _ in models]
    for run in sessions:
        run.run(None, dict(feeds))
    end = time.process_time() + seconds * len(models)
    while len(taken[0]) < 5 or time.process_time() < end:
        for run, times in zip(sessions, taken, strict=True):
            start = time.process_time_ns()
            run.run(None, dict(feeds))
            times.append(time.process_time_ns() - start)
    return [statistics.median(times) for times in taken]


def measured(chains: Iterable[Chain], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each chain, placement and type, with the counts of its kernels."""
    for chain in chains:
        float_model = chain.model()
        macs, elements = size(float_model)
        feeds = {"x": np.random.default_rng(0).standard_normal(chain.shape).astype(np.float32)}
        for dtype in chain.types:
            for label, placement in chain.points.items():
                made = quantized(chain, placement, dtype)
                kernels, left = kernels_of(optimised(made))
                ns_float, ns_integer = by_turns([float_model, made], feeds, seconds)
                yield {
                    "chain": chain.name,
                    "placement": label,
                    "activation": dtype,
                    "ratio": round(ns_integer / ns_float, 3),
                    "kernels": [counted(*item) for item in kernels.items()],
                    "integer": not left,
                    "float": [counted(*item) for item in left.items()],
                    "macs": macs,
                    "elements": elements,
                    "ns_float": round(ns_float),
                    "ns_integer": round(ns_integer),
                }
