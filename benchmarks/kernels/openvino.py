"""What OpenVINO's CPU kernels cost on this machine, as `KERNEL_COSTS` reads it.

    python -m benchmarks.kernels.openvino [--table FILE] [--rounds 9]

One thread, CPU time. Each kernel is timed in chains of two lengths, whose difference holds whole kernels without the
overhead of a run: with the activation and the pair that are fused into them. Convolutions of images are measured by
OpenVINO's profile. Float kernels have OpenVINO's default type
on this machine (bfloat16 where it can compute so), as users run it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper

from sbonnx.backends.openvino.costs import conv_amounts, conv_variant, pool_amounts, transposed_amounts
from sbonnx.backends.openvino.runtime import OpenVinoSession, version
from sbonnx.tuning.cost_fit import fit
from sbonnx.tuning.cost_table import cost_table, machine

SHORT, LONG = 2, 12
"""Lengths of the chains."""

LEAST_SECONDS: Final = 0.004

FEW: Final = 3
"""Channels of an image."""

LEAST_NS: Final = 100.0

QUICK: Final = 20
"""Percentile of the measurements of a chain: a busy machine makes runs longer only, by its caches."""

CONVOLUTIONS: Final = (
    # channels, side, kernel, groups (0: depthwise)
    *((channels, side, 1, 1) for channels, side in ((16, 56), (24, 56), (32, 28), (64, 28), (128, 14), (256, 14))),
    *((channels, side, 3, 1) for channels, side in ((16, 32), (24, 28), (32, 28), (64, 28), (128, 14))),
    *((channels, side, 3, 0) for channels, side in ((16, 56), (32, 28), (64, 28), (72, 28), (128, 14), (256, 14))),
    *((channels, side, 3, 4) for channels, side in ((32, 28), (64, 28), (128, 14))),
)
PRODUCTS: Final = ((384, 1), (768, 1), (128, 32), (384, 32), (384, 128), (768, 32))
"""Sizes of square matrices, and rows."""


POOLS: Final = tuple(
    (channels, side, kernel) for channels, side in ((16, 56), (64, 28), (64, 56), (128, 28)) for kernel in (3, 5)
)
"""Channels, side and kernel."""

STEMS: Final = (
    *((16, 32, 3, 1), (16, 64, 3, 1), (32, 64, 3, 1), (16, 112, 3, 1), (32, 64, 3, 2), (24, 352, 3, 2)),
    *((32, 224, 3, 2), (64, 224, 3, 2), (16, 240, 3, 2), (64, 112, 7, 2), (64, 224, 7, 2)),
)
"""Output channels, side, kernel and stride."""

STEM_ROUNDS: Final = 300

TRANSPOSED: Final = tuple(
    (channels, side, kernel) for channels, side in ((16, 28), (32, 28), (64, 14), (128, 14)) for kernel in (2, 4)
)
"""Channels, side and kernel of ConvTranspose with stride 2."""


@dataclass
class ChainGraph:
    """Builder of a chain.

    Attributes:
        shape: of the input.
        integers: pairs on every tensor and weight.
    """

    shape: tuple[int, ...]
    integers: bool

    def __post_init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def keep(self, values: Any) -> str:
        """Add a constant."""
        name = f"c{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"{kind}{len(self.nodes)}", **attributes))
        return name

    def pair(self, tensor: str) -> str:
        """Add a pair of uint8."""
        numbers = self.keep(np.float32(0.02)), self.keep(np.uint8(0))
        return self.op("DequantizeLinear", self.op("QuantizeLinear", tensor, *numbers), *numbers)

    def weight(self, axis: int, *shape: int) -> str:
        """Add a weight, int8 with a scale per channel or float."""
        if not self.integers:
            return self.keep(self.rng.normal(0, 0.1, shape).astype(np.float32))
        scale = self.keep(np.full(shape[axis], 0.002, np.float32))
        codes = self.keep(self.rng.integers(-127, 128, shape).astype(np.int8))
        return self.op("DequantizeLinear", codes, scale, self.keep(np.zeros(shape[axis], np.int8)), axis=axis)

    def done(self, tensor: str) -> bytes:
        """Return the model: the mean of the last tensor is its output."""
        output = self.op("ReduceMean", tensor, keepdims=0)
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(self.shape))]
        outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, [])]
        graph = helper.make_graph(self.nodes, "chain", inputs, outputs, self.stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        data: bytes = model.SerializeToString()
        return data


def convolutions(length: int, sizes: tuple[int, int, int, int], *, integers: bool) -> bytes:
    """Build a chain of convolutions with Relu; `sizes`: channels, side, kernel, groups."""
    channels, side, kernel, groups = sizes
    groups = groups or channels
    net = ChainGraph((1, channels, side, side), integers)
    x = net.op("Relu", "x")
    x = net.pair(x) if integers else x
    for _ in range(length):
        w = net.weight(0, channels, channels // groups, kernel, kernel)
        bias = net.keep(np.zeros(channels, np.float32))
        x = net.op("Relu", net.op("Conv", x, w, bias, pads=[kernel // 2] * 4, group=groups))
        x = net.pair(x) if integers else x
    return net.done(x)


def products(length: int, size: int, rows: int, *, integers: bool) -> bytes:
    """Build a chain of matrix products with Relu."""
    net = ChainGraph((1, rows, size), integers)
    x = net.pair("x") if integers else "x"
    for _ in range(length):
        x = net.op("Add", net.op("MatMul", x, net.weight(1, size, size)), net.keep(np.zeros(size, np.float32)))
        x = net.op("Relu", x)
        x = net.pair(x) if integers else x
    return net.done(x)


def crossings(length: int, channels: int, side: int, *, integers: bool) -> bytes:
    """Build a chain of MaxPool in float, each with a pair before and behind it that no kernel absorbs, or without."""
    net = ChainGraph((1, channels, side, side), integers)
    x = net.op("Relu", "x")
    for _ in range(length):
        x = net.op("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
        x = net.op("Sin", net.pair(x) if integers else x)
    return net.done(x)


def pooled(length: int, channels: int, side: int, *, integers: bool) -> bytes:
    """Build a chain of MaxPool and 1 x 1 convolution; in integers, the pair between them is a kernel of its own."""
    net = ChainGraph((1, channels, side, side), integers)
    x = net.op("Relu", "x")
    for _ in range(length):
        x = net.op("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
        x = net.pair(x) if integers else x
        bias = net.keep(np.zeros(channels, np.float32))
        x = net.op("Relu", net.op("Conv", x, net.weight(0, channels, channels, 1, 1), bias))
    return net.done(x)


def between(length: int, op: str, channels: int, side: int, kernel: int, *, integers: bool) -> bytes:
    """Build a chain of pools or ConvTranspose between pairs, each with a 1 x 1 convolution that keeps the size."""
    net = ChainGraph((1, channels, side, side), integers)
    x = net.op("Relu", "x")
    x = net.pair(x) if integers else x
    for _ in range(length):
        stride = 1
        if op == "ConvTranspose":
            stride, pads = 2, [kernel // 2 - 1] * 4
            x = net.op(
                "Relu", net.op(op, x, net.weight(1, channels, channels, kernel, kernel), pads=pads, strides=[2, 2])
            )
        else:
            x = net.op(op, x, kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4)
        x = net.pair(x) if integers else x
        bias = net.keep(np.zeros(channels, np.float32))
        w = net.weight(0, channels, channels, 1, 1)
        x = net.op("Relu", net.op("Conv", x, w, bias, strides=[stride] * 2))
        x = net.pair(x) if integers else x
    return net.done(x)


def stem_ns(outputs: int, side: int, kernel: int, stride: int, *, integers: bool) -> float:
    """Return ns of a convolution of an image of 3 channels, before a 1 x 1 convolution.

    Such kernels are no chain: OpenVINO's own profile has the time of one, in whole microseconds.
    """
    net = ChainGraph((1, FEW, side, side), integers)
    x = net.pair("x") if integers else "x"
    for channels, taps, step in ((FEW, kernel, stride), (outputs, 1, 1)):
        w, bias = net.weight(0, outputs, channels, taps, taps), net.keep(np.zeros(outputs, np.float32))
        x = net.op("Relu", net.op("Conv", x, w, bias, pads=[taps // 2] * 4, strides=[step] * 2))
        x = net.pair(x) if integers else x
    name = next(node.name for node in net.nodes if node.op_type == "Conv")
    settings = {"PERF_COUNT": "YES", "INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": "LATENCY"}
    core = openvino.Core()
    request = core.compile_model(core.read_model(net.done(x)), "CPU", settings).create_infer_request()
    feed = np.random.default_rng(0).normal(0, 1, net.shape).astype(np.float32)
    times: list[float] = []
    for _ in range(STEM_ROUNDS):
        request.infer([feed])
        times += [
            1e9 * row.cpu_time.total_seconds()
            for row in request.get_profiling_info()
            if row.node_name.partition("/")[0] == name
        ]
    return min(times)


MOVES: Final = 5
"""Ops of `shuffled` that move a whole tensor: Reshape, Transpose, Reshape, two halves by Gather, Concat."""


def shuffled(length: int, channels: int, side: int, *, integers: bool) -> bytes:
    """Build a chain of channel shuffle, split and Concat, each with a 1 x 1 convolution."""
    net = ChainGraph((1, channels, side, side), integers)
    x = net.op("Relu", "x")
    x = net.pair(x) if integers else x
    for _ in range(length):
        half = channels // 2
        x = net.op("Reshape", x, net.keep(np.array([half, 2, side * side])))
        x = net.op("Transpose", x, perm=[1, 0, 2])
        x = net.op("Reshape", x, net.keep(np.array([2, 1, half, side, side])))
        halves = [net.op("Gather", x, net.keep(np.array(place)), axis=0) for place in (0, 1)]
        x = net.op("Concat", *halves, axis=1)
        bias = net.keep(np.zeros(channels, np.float32))
        x = net.op("Relu", net.op("Conv", x, net.weight(0, channels, channels, 1, 1), bias))
        x = net.pair(x) if integers else x
    return net.done(x)


def per_kernel(make: Callable[[int, bool], bytes], rounds: int) -> tuple[float, float]:
    """Return ns of one kernel in float and in integers; `make` gets length and integers."""
    kinds = [(integers, length) for integers in (False, True) for length in (SHORT, LONG)]
    models = [OpenVinoSession(make(length, integers), 1) for integers, length in kinds]
    shapes = [[size or 1 for size in model.get_inputs()[0].shape] for model in models]
    feeds = [{"x": np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)} for shape in shapes]
    taken: list[list[float]] = [[] for _ in models]
    for turn in range(rounds + 1):
        for which, (model, feed) in enumerate(zip(models, feeds, strict=True)):
            count, start = 0, time.process_time()
            while (spent := time.process_time() - start) < LEAST_SECONDS or not count:
                model.run(None, feed)
                count += 1
            if turn:
                taken[which].append(1e9 * spent / count)
    times = [float(np.percentile(row, QUICK)) for row in taken]
    steps = LONG - SHORT
    return max((times[1] - times[0]) / steps, 0.0), max((times[3] - times[2]) / steps, 0.0)


Row = dict[str, Any]


def measured(rounds: int) -> Iterator[Row]:
    """Yield a row for each kernel, size and type."""
    for sizes in CONVOLUTIONS:
        channels, side, kernel, groups = sizes
        groups = groups or channels
        both = _convolution(sizes, rounds)
        own = channels // groups, kernel * kernel, channels, groups
        for kind, ns in zip(("float", "u8"), both, strict=True):
            amounts = conv_amounts(own, side * side, channels * side * side, integers=kind == "u8")
            yield _row("Convolution", conv_variant(own[0], own[1], groups), kind, ns, amounts)
    for size, rows in PRODUCTS:
        both = per_kernel(_chain(products, size, rows), rounds)
        for kind, ns in zip(("float", "u8"), both, strict=True):
            row = {"macs": rows * size * size, "reads": 0, "writes": rows * size, "weights": size * size}
            yield {"kernel": "FullyConnected", "variant": "", "type": kind, "ns": ns, "pieces": 0, **row}
    for outputs, side, kernel, stride in STEMS:
        own = FEW, kernel**2, outputs, 1
        for kind in ("float", "u8"):
            places = (side // stride) ** 2
            amounts = conv_amounts(own, places, FEW * side * side, integers=kind == "u8")
            ns = stem_ns(outputs, side, kernel, stride, integers=kind == "u8")
            yield _row("Convolution", conv_variant(FEW, kernel**2, 1), kind, ns, amounts)
    for channels, side in ((16, 112), (32, 56), (64, 56), (128, 28)):
        values = channels * side * side
        row = {"macs": 0, "reads": values, "writes": values, "weights": 0, "pieces": 0}
        both = per_kernel(_chain(pooled, channels, side), rounds)
        alone = _convolution((channels, side, 1, 1), rounds)
        extra = (both[1] - alone[1]) - (both[0] - alone[0])
        yield {"kernel": "Quantize", "variant": "", "type": "float", "ns": extra, **row}
        moved = per_kernel(_chain(shuffled, channels, side // 2), rounds)
        still = _convolution((channels, side // 2, 1, 1), rounds)
        quarter = {**row, "reads": 0, "writes": values // 4}
        for kind, ns, other in zip(("float", "u8"), moved, still, strict=True):
            yield {"kernel": "Move", "variant": "", "type": kind, "ns": (ns - other) / MOVES, **quarter}
        both = per_kernel(_chain(crossings, channels, side), rounds)
        # a quantization and a dequantization, fused into one kernel each: half of both
        yield {"kernel": "Dequantize", "variant": "", "type": "u8", "ns": (both[1] - both[0]) / 2, **row}


def measured_between(rounds: int) -> Iterator[Row]:
    """Yield rows of pools and ConvTranspose: chains of them and of a convolution, less the convolution."""
    for op, sizes in (("MaxPool", POOLS), ("AveragePool", POOLS), ("ConvTranspose", TRANSPOSED)):
        for channels, side, kernel in sizes:
            both = per_kernel(_chain(between, op, channels, side, kernel), rounds)
            alone = _convolution((channels, side, 1, 1), rounds)
            for kind, ns, other in zip(("float", "u8"), both, alone, strict=True):
                amounts = pool_amounts(channels, side * side, kernel**2, integers=kind == "u8")
                if op == "ConvTranspose":
                    amounts = transposed_amounts((channels, kernel**2, channels, 1), side * side, 4 * side * side)
                yield _row(op, "", kind, ns - other, amounts)


def _chain(make: Callable[..., bytes], *sizes: int | str) -> Callable[[int, bool], bytes]:
    return lambda length, integers: make(length, *sizes, integers=integers)


def _convolution(sizes: tuple[int, int, int, int], rounds: int) -> tuple[float, float]:
    return per_kernel(lambda length, integers: convolutions(length, sizes, integers=integers), rounds)


def _row(kernel: str, variant: str, kind: str, ns: float, amounts: Any) -> Row:
    # the weights of these sizes are proportional to multiplications, and values read to values written
    read = {"macs": amounts.macs, "reads": 0, "writes": amounts.write, "weights": 0}
    return {"kernel": kernel, "variant": variant, "type": kind, "ns": ns, "pieces": 0, **read}


def fits(rows: Sequence[Row]) -> list[Row]:
    """Fit one cost formula for each kernel, variant and type."""
    rows = [row for row in rows if row["ns"] >= LEAST_NS]  # else it drowned in the noise of the machine
    keys = dict.fromkeys((row["kernel"], row["variant"], row["type"]) for row in rows)
    found = []
    for key in keys:
        sizes = [row for row in rows if (row["kernel"], row["variant"], row["type"]) == key]
        names = dict(zip(("kernel", "variant", "type"), key, strict=True))
        found.append({**names, **{name: float(f"{value:.4g}") for name, value in fit(sizes).items()}})
    return found


def main() -> int:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path, help="JSON file for the table that KERNEL_COSTS reads")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each chain")
    options = parser.parse_args()
    rows = [*measured(options.rounds), *measured_between(options.rounds)]
    for row in rows:
        print(json.dumps(row))
    known = machine(1)
    where = {key: known[key] for key in ("cpu", "architecture", "dot_product", "threads")}
    text = cost_table({**where, "openvino": version()}, fits(rows))
    if options.table:
        options.table.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
